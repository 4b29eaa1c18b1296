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


def redis_clock(redis: Any) -> Clock:
    """Seconds since the epoch by Redis' clock, from one TIME and the monotonic clock here."""
    before = time.monotonic()
    seconds, micros = redis.time()
    after = time.monotonic()
    offset = seconds + micros / 1e6 - (before + after) / 2
    return lambda: time.monotonic() + offset


def patient_clock(redis: Any) -> Clock:
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
