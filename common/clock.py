"""Redis' clock, read from here: deadlines and arrivals are in its time, wherever a service runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Clock = Callable[[], float]


def redis_clock(redis: Any) -> Clock:
    """Seconds since the epoch by Redis' clock, from one TIME and the monotonic clock here."""
    before = time.monotonic()
    seconds, micros = redis.time()
    after = time.monotonic()
    offset = seconds + micros / 1e6 - (before + after) / 2
    return lambda: time.monotonic() + offset
