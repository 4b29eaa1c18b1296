"""What the gateway tells Prometheus: its requests, and the pool as Redis has it.

The pool's figures are the coordinator's to tell; these few are here too, because they must be told
also when no coordinator is there to do it.
"""

from __future__ import annotations

import time
from typing import Any

from redis.exceptions import RedisError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.connect import writing
from common.keys import Keys
from common.metrics import process
from common.metrics.registry import SECONDS, Family, Labels, Registry
from common.scripts import text
from common.stage import STAGES
from services.gateway.gateway import Gateway

REQUESTS = Family(
    "slackwater_http_requests_total", "counter",
    "requests answered; status 499: the client went away before",
    ("method", "route", "status"),
)  # fmt: skip
REQUEST_SECONDS = Family(
    "slackwater_http_request_seconds", "histogram",
    "until the answer began; a request that waits for its pictures takes as long as they do",
    ("method", "route"), SECONDS,
)  # fmt: skip
IN_PROGRESS = Family("slackwater_http_requests_in_progress", "gauge", "requests not answered whole")
STREAMS = Family("slackwater_http_event_streams", "gauge", "open streams of server-sent events")
WAITING = Family(
    "slackwater_http_waiting", "gauge", "requests and streams that wait for news of jobs"
)
POOL_LEADER = Family("slackwater_pool_leader", "gauge", "1 while some coordinator leads")
POOL_JOBS = Family("slackwater_pool_active_jobs", "gauge", "jobs that have not ended")
POOL_WORKERS = Family(
    "slackwater_pool_workers", "gauge", "registered workers that are not leaving", ("stage",)
)
ENTRIES = Family(
    "slackwater_stream_entries", "gauge",
    "entries of the pool's streams: jobs (pushes nobody has read), cancel, reports, outbox, dead",
    ("stream",),
)  # fmt: skip
FAMILIES = (
    REQUESTS, REQUEST_SECONDS, IN_PROGRESS, STREAMS, WAITING, POOL_LEADER, POOL_JOBS, POOL_WORKERS,
    ENTRIES,
)  # fmt: skip

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
GONE = 499  # as nginx says it
# Under a scrape's own time-out, so that the rest is told also while Redis is away.
REDIS_S = 0.8
# All figures of one scrape are of one look.
FRESH_S = 0.5


class GatewayMetrics:
    def __init__(self, registry: Registry, gateway: Gateway) -> None:
        self.requests = registry.count(REQUESTS)
        self.seconds = registry.spread(REQUEST_SECONDS)
        self.in_progress = self.streams = 0
        pool = self._pool = PoolView(gateway)
        process.describe(registry, "gateway", pool.answers, lambda: pool.reconnects)
        registry.ask(IN_PROGRESS, lambda: {(): self.in_progress})
        registry.ask(STREAMS, lambda: {(): self.streams})
        registry.ask(WAITING, lambda: {(): gateway.client.reads.waiting})
        for family in (POOL_LEADER, POOL_JOBS, POOL_WORKERS, ENTRIES):
            registry.ask(family, lambda family=family: pool.look().get(family, {}))  # type: ignore[misc]

    def close(self) -> None:
        self._pool.close()


class PoolView:
    """The pool as Redis has it, looked at when Prometheus asks."""

    def __init__(self, gateway: Gateway) -> None:
        self._keys: Keys = gateway.client.keys
        self._redis: Any = writing(gateway.settings.redis_url, REDIS_S)
        self._found: dict[Family, dict[Labels, float]] = {}
        self._looked = float("-inf")
        self._up = True
        self.reconnects = 0

    def answers(self) -> bool:
        self.look()
        return self._up

    def look(self) -> dict[Family, dict[Labels, float]]:
        """Nothing while Redis is away."""
        if time.monotonic() - self._looked > FRESH_S:
            try:
                self._found = self._read()
                self.reconnects += not self._up
                self._up = True
            except (RedisError, OSError):
                self._found, self._up = {}, False
            self._looked = time.monotonic()
        return self._found

    def close(self) -> None:
        self._redis.close()

    def _read(self) -> dict[Family, dict[Labels, float]]:
        k = self._keys
        streams = {
            "jobs": k.jobs, "cancel": k.cancel, "reports": k.reports, "outbox": k.outbox,
            "dead": k.dead,
        }  # fmt: skip
        pipe = self._redis.pipeline(transaction=False)
        pipe.exists(k.leader)
        pipe.scard(k.active)
        pipe.smembers(k.workers)
        for stream in streams.values():
            pipe.xlen(stream)
        # A user that may not read one of them is told the others: Redis answers.
        leader, active, names, *lengths = pipe.execute(raise_on_error=False)
        found: dict[Family, dict[Labels, float]] = {
            POOL_LEADER: _known({(): leader}),
            POOL_JOBS: _known({(): active}),
            ENTRIES: _known({(name,): n for name, n in zip(streams, lengths, strict=True)}),
        }
        if not isinstance(names, Exception):
            found[POOL_WORKERS] = self._workers(names)
        return found

    def _workers(self, names: set[bytes]) -> dict[Labels, float]:
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.hmget(self._keys.worker(text(name)), "stage", "draining")
        workers: dict[Labels, float] = {(stage,): 0.0 for stage in STAGES}
        for stage, draining in pipe.execute():
            if stage is not None and (text(stage),) in workers and draining != b"1":
                workers[text(stage),] += 1
        return workers


def _known(figures: dict[Labels, Any]) -> dict[Labels, float]:
    return {labels: v for labels, v in figures.items() if not isinstance(v, Exception)}


class Metered:
    """ASGI: counts each request under the route that took it."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        metrics, begun, status, seconds, streams = self.metrics, time.monotonic(), GONE, 0.0, 0

        async def watched(message: Message) -> None:
            nonlocal status, seconds, streams
            if message["type"] == "http.response.start":
                status, seconds = message["status"], time.monotonic() - begun
                kind = dict(message["headers"]).get(b"content-type", b"")
                streams = int(kind.startswith(b"text/event-stream"))
                metrics.streams += streams
            await send(message)

        metrics.in_progress += 1
        try:
            await self.app(scope, receive, watched)
        except Exception:
            if status == GONE:  # no answer had begun: it will be this one
                status, seconds = 500, time.monotonic() - begun
            raise
        finally:
            metrics.in_progress -= 1
            metrics.streams -= streams
            method = scope["method"] if scope["method"] in METHODS else "other"
            route = getattr(scope.get("route"), "path", "none")
            metrics.requests.add(method, route, str(status))
            if status != GONE:
                metrics.seconds.observe(seconds, method, route)
