"""Waiting for a Redis that is away, or takes no writes for now."""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import Any

from redis.exceptions import ClusterDownError, ReadOnlyError, ResponseError, TryAgainError

log = logging.getLogger("slackwater.worker")

# Replies of a node that cannot serve now: a replica, a cluster that is being mended, and by their
# first word, for which redis-py has no classes, one that has too few replicas or a full disk.
# Before Redis 7 a script that meets with any of them says so in a sentence of its own.
ELSEWHERE = (ReadOnlyError, ClusterDownError, TryAgainError)
NOT_NOW = re.compile("(Error running script .* -)?(NOREPLICAS|MISCONF|READONLY) ")


def cannot_now(reply: Any) -> bool:
    """Whether Redis takes no writes for now, whatever they are; nothing was done."""
    if isinstance(reply, ELSEWHERE):
        return True
    return isinstance(reply, ResponseError) and NOT_NOW.match(str(reply)) is not None


def connect_anew(pool: Any) -> None:
    """Have what follows go over new connections, after a reply of a node that cannot serve now: an
    address that stands for whoever is the master may lead to another node by now. Connections
    that other threads use stay.
    """
    pool.disconnect(inuse_connections=False)


class Outage:
    """Waits between tries while Redis is away, and logs the state once, not every try."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.times = 0
        self._since: float | None = None
        self._pause = 0.05

    @property
    def goes_on(self) -> bool:
        return self._since is not None

    def failed(self, error: Exception, stop: threading.Event) -> None:
        if self._since is None:
            self._since = time.monotonic()
            self.times += 1
            log.warning("%s: Redis is away (%s); trying again", self._what, error)
        stop.wait(self._pause)
        self._pause = min(2.0, self._pause * 2)

    def over(self) -> None:
        if self._since is not None:
            log.warning(
                "%s: Redis is back after %.1f s", self._what, time.monotonic() - self._since
            )
        self._since, self._pause = None, 0.05
