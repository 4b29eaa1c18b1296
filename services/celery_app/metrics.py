"""What the Celery side tells Prometheus: tasks that came by the door, and what is owed and sent.

Tasks and deliveries each run on threads of their own, so counting here takes a lock.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from redis.exceptions import RedisError

from common.connect import writing
from common.keys import Keys
from common.metrics import process
from common.metrics.registry import SECONDS, Family, Labels, Registry
from common.settings import Settings

TASKS = Family(
    "slackwater_celery_tasks_total", "counter",
    "tasks of Celery's programs: entered (pushed as a job), known (pushed before), invalid",
    ("verdict",),
)  # fmt: skip
WAITING = Family(
    "slackwater_celery_waiting", "gauge",
    "tasks whose job goes on, as the process that reads the outbox follows them",
)  # fmt: skip
READS = Family("slackwater_sender", "gauge", "1 while this process reads the outbox")
DELIVERIES = Family(
    "slackwater_deliveries_total", "counter",
    "tries to send a webhook or an upload, by what came of them: done, again (failed, to be tried "
    "again), given_up",
    ("kind", "outcome"),
)  # fmt: skip
DELIVERY_SECONDS = Family(
    "slackwater_delivery_seconds", "histogram",
    "from the moment that a delivery was owed until it got through", ("kind",), SECONDS,
)  # fmt: skip
OWED = Family(
    "slackwater_deliveries_owed", "gauge", "webhooks and uploads that have not got through yet"
)
FAMILIES = (TASKS, WAITING, READS, DELIVERIES, DELIVERY_SECONDS, OWED)

ENTERED, KNOWN, INVALID = "entered", "known", "invalid"
# Under a scrape's own time-out, so that the rest is told also while Redis is away.
REDIS_S = 0.8


class Follows(Protocol):
    """The sender, as its figures see it."""

    leads: bool
    away: bool
    reconnects: int

    @property
    def waiting(self) -> int:
        """Tasks whose job goes on; 0 on a standby."""
        ...


class CeleryMetrics:
    def __init__(self, registry: Registry, settings: Settings) -> None:
        self._lock = threading.Lock()
        self._tasks = registry.count(TASKS, ENTERED, KNOWN, INVALID)
        self._deliveries = registry.count(DELIVERIES)
        for kind in ("webhook", "upload"):
            for outcome in ("done", "again", "given_up"):
                self._deliveries.add(kind, outcome, by=0)  # so that its first is a growth
        self._seconds = registry.spread(DELIVERY_SECONDS)
        self._redis: Any = writing(settings.redis_url, REDIS_S)
        self._owed = Keys(settings.prefix).deliveries
        self._registry = registry
        registry.ask(OWED, self._ask_owed)

    def show(self, sender: Follows) -> None:
        """The sender is there: what it does can be told."""
        ask = self._registry.ask
        process.describe(
            self._registry, "celery", lambda: not sender.away, lambda: sender.reconnects
        )
        ask(READS, lambda: {(): float(sender.leads)})
        ask(WAITING, lambda: {(): sender.waiting})

    def task(self, verdict: str) -> None:
        with self._lock:
            self._tasks.add(verdict)

    def tried(self, kind: str, outcome: str, owed_since_s: float, now_s: float) -> None:
        """One delivery was tried; times by the clock of the pool's Redis."""
        with self._lock:
            self._deliveries.add(kind, outcome)
            if outcome == "done":
                self._seconds.observe(max(0.0, now_s - owed_since_s), kind)

    def close(self) -> None:
        self._redis.close()

    def _ask_owed(self) -> dict[Labels, float]:
        """Nothing while Redis is away."""
        try:
            return {(): self._redis.zcard(self._owed)}
        except (RedisError, OSError):
            return {}
