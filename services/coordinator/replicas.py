"""Waits until replicas have what was just written (`redis_wait_replicas`).

With Sentinel a failover loses what the new master has not got yet. WAIT makes that tail short: the
coordinator decides nothing on what a replica may not have. It is no transaction: what was written
stays written, and is seen by clients, before and without the replicas.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger("slackwater.coordinator")

# A replica that keeps up answers within milliseconds; the leader's lease must not run out here.
WAIT_MS = 500
# Replicas that are missing are not waited for at every transition: the pool would crawl.
AGAIN_S = 5.0


class Replicas:
    """`wanted` 0: nobody is waited for."""

    def __init__(
        self, redis: Any, wanted: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis, self._wanted, self._clock = redis, wanted, clock
        self._missing = False
        self._again = 0.0

    def wait(self) -> None:
        """Return once enough replicas have all that this connection wrote, or in vain."""
        if not self._wanted or (self._missing and self._clock() < self._again):
            return
        have = int(self._redis.execute_command("WAIT", self._wanted, WAIT_MS))
        if have < self._wanted:
            self._again = self._clock() + AGAIN_S
            if not self._missing:  # once, not at every transition
                log.warning(
                    "%d of %d replicas have the last transitions; a failover now could lose them",
                    have, self._wanted,
                )  # fmt: skip
        elif self._missing:
            log.warning("%d replicas keep up again", have)
        self._missing = have < self._wanted
