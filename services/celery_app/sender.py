"""The one reader of the outbox.

It tells Celery's programs of their jobs, and turns everything else in the outbox into deliveries.
Any number may be started; one of them reads, the others stand by. Nothing leaves the outbox before
what it stands for is done or written down, so a death repeats and never loses.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from datetime import UTC, datetime
from typing import Any, TypeVar

from redis.exceptions import NoPermissionError, RedisError

from common.acl import NO_RIGHT
from common.asks import Plan
from common.client import Client
from common.clock import Clock, redis_clock
from common.connect import blocking, writing
from common.errors import RedisAway
from common.keys import Keys
from common.messages import pack, unpack
from common.scripts import Scripts
from common.settings import Settings
from services.celery_app.beat import Beat
from services.celery_app.deliveries import UPLOAD, WEBHOOK, Deliveries
from services.celery_app.following import Following
from services.celery_app.lease import LEASE_S, Deposed, Lease
from services.celery_app.metrics import CeleryMetrics
from services.celery_app.transitions import Owed
from services.celery_app.webhooks import payload
from services.gateway.links import Links
from services.gateway.views import job_json, views

log = logging.getLogger("slackwater.sender")

READ_COUNT = 100
BLOCK_S = 0.25  # at most this long without a look at what else is due
PAUSE_S = 1.0
PATIENCE_S = 1.0  # with a Redis that is away; `run` starts over then

T = TypeVar("T")


class Sender:
    """Call `run` on a thread of its own."""

    def __init__(
        self, settings: Settings, following: Following, beat: Beat | None, metrics: CeleryMetrics
    ) -> None:
        """`beat`, if any, ticks while this process reads. Raises ValueError for settings that
        cannot be used."""
        self.keys = Keys(settings.prefix)
        self.client = Client(settings.redis_url, settings.prefix, PATIENCE_S)
        self._reading: Any = blocking(settings.redis_url)
        self._redis = writing(settings.redis_url)
        self.lease = Lease(Scripts(self._redis), self.keys)
        self._clock: Clock = time.time  # Redis' own, as soon as it has answered
        self._following, self._beat = following, beat
        self._deliveries = Deliveries(
            self.client, self._redis, self.lease, settings, self._now, metrics
        )
        self._links = Links(settings.http_base_url.rstrip("/"), None, settings.output_ttl_s)
        self._last = "0"
        # What its figures tell, from other threads.
        self.leads = self.away = False
        self.reconnects = 0

    @property
    def waiting(self) -> int:
        return self._following.count if self.leads else 0

    def _now(self) -> float:
        return self._clock()

    def run(self, stopping: threading.Event) -> None:
        """Read whenever it holds the lease, until told to stop."""
        refused = ""  # the right that Redis said is missing
        while not stopping.is_set():
            try:
                if not self.leads:
                    self.leads = self._lead()
                    if not self.leads:
                        stopping.wait(LEASE_S / 6)
                        continue
                self.step()
                if self.away:
                    log.warning("Redis is back")
                    self.reconnects += 1
                self.away, refused = False, ""
                continue
            except Deposed as error:
                log.warning("%s; standing by", error)
            except NoPermissionError as error:
                if refused != str(error):
                    log.error("%s; trying again", NO_RIGHT.format(error))
                refused = str(error)
                stopping.wait(PAUSE_S)
            except (RedisError, RedisAway, OSError) as error:
                if not self.away:
                    log.warning("Redis is away (%s); trying again", error)
                self.away = True
                stopping.wait(PAUSE_S)
            except Exception:
                log.exception("starting over in %.0f s", PAUSE_S)
                stopping.wait(PAUSE_S)
            self.leads = False
            self._stop_beat()
        self._stop_beat()
        self._deliveries.close()
        if self.leads:
            with contextlib.suppress(RedisError, OSError):
                self.lease.release()
        self.client.close()

    def _stop_beat(self) -> None:
        if self._beat is not None:
            self._beat.stop()

    def _lead(self) -> bool:
        if not self.lease.take():
            return False
        self._clock = redis_clock(self._redis)
        log.info("reads the outbox")
        self._last = "0"
        self._following.forget()
        if self._beat is not None:
            self._beat.start()
        return True

    def step(self) -> None:
        """Wait a moment for news and act on it."""
        self.lease.keep()
        for entry, fields in self._read():
            self._last = entry
            try:
                self._act(entry, fields[b"job"].decode(), fields.get(b"body", b""))
            except (Deposed, RedisError, RedisAway, OSError):
                raise
            except Exception:  # it stays, and those behind it go on
                log.exception("entry %s of the outbox", entry)
        self._deliveries.begin_due()  # before a look, which may take its time
        if self._following.due_s() <= 0:
            self._following.look(self.lease.keep)

    def _read(self) -> list[tuple[str, dict[bytes, bytes]]]:
        block_ms = max(1, round(1000 * min(BLOCK_S, self._following.due_s())))
        reply: Any = self._reading.execute_command(
            "XREAD", "COUNT", READ_COUNT, "BLOCK", block_ms, "STREAMS", self.keys.outbox, self._last
        )
        found = []
        for _, entries in reply or ():
            for entry, fields in entries:
                if not isinstance(fields, dict):
                    fields = dict(zip(fields[::2], fields[1::2], strict=True))
                found.append((entry.decode(), fields))
        return found

    def _act(self, entry: str, job: str, body: bytes) -> None:
        wanted = unpack(body) if body else {}
        if not wanted.get("type", "").startswith("job.upload"):
            self._following.end(job)
        self.lease.run(
            self.lease.transitions.post(entry, self._owed(entry, job, wanted), self._clock())
        )

    def _owed(self, entry: str, job: str, wanted: dict[str, Any]) -> list[Owed]:
        owed = []
        callback, upload = wanted.get("callback_url", ""), wanted.get("upload_url", "")
        if upload:
            then = pack({"callback_url": callback})
            owed.append(Owed(f"upl_{entry}", UPLOAD, job, upload, then))
        if callback:
            owed.append(Owed(f"msg_{entry}", WEBHOOK, job, callback, self._payload(job, wanted)))
        return owed

    def _payload(self, job: str, wanted: dict[str, Any]) -> bytes:
        """Made once: each try sends the same."""
        [view] = _carried_out(views(self.keys, [job]), self.client)
        said: dict[str, Any] = {"id": job} if view is None else job_json(view, self._links)
        said |= {name: wanted[name] for name in ("files", "error") if name in wanted}
        ended = None if view is None else view.record.finished_s
        at = datetime.fromtimestamp(ended or self._clock(), UTC)
        return payload(wanted["type"], at, said)


def _carried_out(plan: Plan[T], client: Client) -> T:
    """What a plan of common.asks comes to."""
    replies: Any = None
    while True:
        try:
            replies = client.ask(plan.send(replies))
        except StopIteration as end:
            answer: T = end.value
            return answer
