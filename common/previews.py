"""The hand-over of previews from the thread that computes to the one that talks to Redis."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from redis.exceptions import ResponseError

log = logging.getLogger("slackwater.worker")

# A job's previews come no closer: a person watching sees it grow.
PREVIEW_S = 0.5
# How long one stays after it was made; the next one renews it.
STAY_S = 600.0


class Previews:
    """The latest preview of each job. `put(job, step, content)` writes one to Redis."""

    def __init__(
        self,
        put: Callable[[str, int, bytes], None],
        wake: Callable[[], None],
        on: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._put, self._wake, self._on, self._clock = put, wake, on, clock
        self._lock = threading.Lock()
        self._coming: dict[str, tuple[int, Callable[[], bytes]]] = {}
        self._made: dict[str, float] = {}

    def wanted(self, job: str) -> bool:
        return self._on and self._clock() - self._made.get(job, float("-inf")) >= PREVIEW_S

    def hand_over(self, job: str, step: int, encode: Callable[[], bytes]) -> None:
        """Never blocks; an older one that was not sent yet is forgotten."""
        now = self._clock()
        self._made = {j: at for j, at in self._made.items() if now - at < PREVIEW_S} | {job: now}
        with self._lock:
            self._coming[job] = (step, encode)
        self._wake()

    def send(self) -> None:
        """Encode and write what was handed over. Raises RedisError while Redis is away."""
        with self._lock:
            coming, self._coming = self._coming, {}
        for job, (step, encode) in coming.items():
            try:
                content = encode()
            except Exception:  # a heartbeat must not end for the sake of a picture
                log.exception("job %s: no preview", job)
                continue
            try:
                self._put(job, step, content)
            except ResponseError as error:  # at maxmemory it is the first thing to do without
                log.debug("job %s: preview refused: %s", job, error)
