"""Makes what is owed arrive: each delivery is tried until it gets through or is given up.

What is owed stands in Redis (`sw:deliveries`, `sw:delivery:…`) until then, so a killed process
repeats at most what it had in hand. A slow receiver holds up one thread and nobody else.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common.client import Client
from common.clock import Clock
from common.errors import RedisAway
from common.messages import pack, unpack
from common.settings import Settings
from common.uploads import Prefixes
from services.celery_app.attempts import Failed, GiveUp, pause_s
from services.celery_app.copies import copy_outputs
from services.celery_app.lease import Deposed, Lease
from services.celery_app.metrics import CeleryMetrics
from services.celery_app.webhooks import Webhooks

log = logging.getLogger("slackwater.sender")

WEBHOOK, UPLOAD = "webhook", "upload"
THREADS = 8
# So long one of which not even the failure can be written down keeps its thread, so that it is not
# begun again at once.
PAUSE_S = 5.0


class Deliveries:
    def __init__(
        self, client: Client, redis: Any, lease: Lease, settings: Settings, clock: Clock,
        metrics: CeleryMetrics,
    ) -> None:  # fmt: skip
        """Raises ValueError for settings that cannot be used."""
        self._client, self._redis, self._lease, self._clock = client, redis, lease, clock
        self._metrics = metrics
        self._first_s, self._give_up_s = settings.webhook_retry_s, settings.webhook_give_up_s
        self._prefixes = Prefixes.parse(settings.upload_prefixes)
        self._webhooks = Webhooks(settings)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="delivery")
        self._in_hand: dict[str, Future[None]] = {}
        self._closing = threading.Event()

    def begin_due(self) -> None:
        """Hand what is due to free threads. What is in hand is not begun again."""
        self._in_hand = {name: one for name, one in self._in_hand.items() if not one.done()}
        free = THREADS - len(self._in_hand)
        if free <= 0:
            return
        now_ms = round(1000 * self._clock())
        names = self._redis.zrangebyscore(
            self._client.keys.deliveries, "-inf", now_ms, start=0, num=THREADS + free
        )
        for name in (n.decode() for n in names):
            if name not in self._in_hand and len(self._in_hand) < THREADS:
                self._in_hand[name] = self._threads.submit(self._try, name)

    def _try(self, name: str) -> None:
        try:
            self._settle(name, self._redis.hgetall(self._client.keys.delivery(name)))
        except (Deposed, RedisAway, RedisConnectionError, RedisTimeoutError, OSError) as error:
            log.debug("delivery %s was not settled: %s", name, error)  # it stays owed
        except Exception as error:
            log.warning("delivery %s cannot be settled: %s: %s", name, type(error).__name__, error)
            self._closing.wait(PAUSE_S)

    def _settle(self, name: str, raw: dict[bytes, bytes]) -> None:
        settle = self._lease.transitions.settle
        if not raw:
            self._lease.run(settle(name, "done"))
            return
        try:
            job, url, body = raw[b"job"].decode(), raw[b"url"].decode(), raw[b"body"]
            kind, failures = raw[b"kind"].decode(), int(raw[b"attempts"]) + 1
            owed_s = int(raw[b"created"]) / 1000
        except (KeyError, ValueError) as error:  # no later try would read more
            what = f"cannot be read: {type(error).__name__}: {error}"
            self._lease.run(settle(name, "given_up", error=what))
            log.error("delivery %s given up: %s", name, what)
            return
        follows = b""
        try:
            follows = self._attempt(name, kind, job, url, body)
            self._lease.run(settle(name, "done", job=job, follows=follows))
            self._metrics.tried(kind, "done", owed_s, self._clock())
            log.info("job %s: %s delivered at try %d", job, kind, failures)
            return
        except Failed as error:
            what, now = str(error), self._clock()
            if now < owed_s + self._give_up_s:
                again_s = now + pause_s(failures, self._first_s)
                self._lease.run(settle(name, "again", again_s, what))
                self._metrics.tried(kind, "again", owed_s, now)
                wait_s = again_s - now
                log.warning("job %s: %s failed, again in %.1f s: %s", job, kind, wait_s, what)
                return
        except GiveUp as error:
            what = str(error)
        if kind == UPLOAD:
            follows = self._follows(body, "job.upload_failed", error=what)
        self._lease.run(settle(name, "given_up", error=what, job=job, follows=follows))
        self._metrics.tried(kind, "given_up", owed_s, self._clock())
        log.error("job %s: %s given up after %d tries: %s", job, kind, failures, what)

    def _attempt(self, name: str, kind: str, job: str, url: str, body: bytes) -> bytes:
        """One try; what the outbox is to say then. Raises Failed, GiveUp, or what is wrong with our
        own Redis."""
        try:
            if kind == WEBHOOK:
                self._webhooks.send(name, url, body)
                return b""
            if kind == UPLOAD:
                files = copy_outputs(self._client, job, url, self._prefixes)
                return self._follows(body, "job.uploaded", files=files)
        except (Failed, GiveUp, Deposed, RedisAway, RedisError):
            raise
        except Exception as error:  # whatever it is, it waits its turn as any other failure
            log.warning("delivery %s: a try failed unexpectedly", name, exc_info=True)
            raise Failed(f"{type(error).__name__}: {error}") from error
        raise Failed(f"this version does not know how to deliver {kind!r:.64}")

    def _follows(self, body: bytes, event: str, **more: Any) -> bytes:
        """What the outbox is to say of an upload; nothing where nobody asked."""
        callback = unpack(body).get("callback_url", "")
        return pack({"type": event, "callback_url": callback, **more}) if callback else b""

    def close(self) -> None:
        """Waits for what is in hand, which a slow receiver cannot draw out; the rest stays owed."""
        self._closing.set()
        self._threads.shutdown(cancel_futures=True)
        self._webhooks.close()
