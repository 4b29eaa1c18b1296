"""Redis' clock, read from here: deadlines and arrivals are in its time, wherever a service runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

log = logging.getLogger(__name__)

Clock = Callable[[], float]
LONGEST_PAUSE_S = 2.0


# A sample of Redis' clock is as good as half of its round trip. One that took longer than this
# is taken only where there is no other.
SLOW_S = 0.1


class RedisClock:
    """Seconds since the epoch by Redis' clock, from the latest TIME and the monotonic clock here.

    `read` again and again: monotonic clocks drift and stand still while a machine sleeps, and
    after a failover Redis' clock is another one.
    """

    def __init__(self, redis: Any) -> None:
        self._offset, _ = _sample(redis)

    def __call__(self) -> float:
        return time.monotonic() + self._offset

    def read(self, redis: Any) -> float:
        """Set it right; by how many seconds. What a sample cannot tell apart changes nothing, so
        that it does not tremble."""
        offset, within_s = _sample(redis)
        moved_s = offset - self._offset
        if within_s > SLOW_S / 2 or abs(moved_s) <= within_s:
            return 0.0
        self._offset = offset
        return moved_s


def _sample(redis: Any) -> tuple[float, float]:
    """How far Redis' clock is ahead of the monotonic one, and how wrong that may be, in seconds."""
    before = time.monotonic()
    seconds, micros = redis.time()
    after = time.monotonic()
    return float(seconds + micros / 1e6 - (before + after) / 2), (after - before) / 2


def redis_clock(redis: Any) -> RedisClock:
    return RedisClock(redis)


def keep_right(clock: Clock, redis: Any) -> float:
    """Set `clock` right if it is one of Redis', any other says what it says; by how many seconds.
    Raises what Redis does."""
    return clock.read(redis) if isinstance(clock, RedisClock) else 0.0


def patient_clock(redis: Any) -> RedisClock:
    """As `redis_clock`, once Redis is there: a service may be started before it is."""
    pause_s, away = 0.05, False
    while True:
        try:
            return redis_clock(redis)
        except (RedisError, OSError) as error:
            if not away:
                log.warning("Redis is away (%s); waiting for it", error)
            away = True
            time.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
