"""Waiting for a Redis that is away."""

from __future__ import annotations

import logging
import threading
import time

log = logging.getLogger("slackwater.worker")


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
