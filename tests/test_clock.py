"""Redis' clock, followed from here."""

from __future__ import annotations

import time

import pytest

from common.clock import RedisClock, keep_right


class Clockwork:
    """A Redis that only knows the time: `ahead_s` of this machine's monotonic clock."""

    def __init__(self) -> None:
        self.ahead_s, self.round_trip_s = 1000.0, 0.0

    def time(self) -> tuple[int, int]:
        now = time.monotonic() + self.ahead_s
        time.sleep(self.round_trip_s)
        return int(now), int(now % 1 * 1e6)


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, 0.5])
def test_it_follows_a_clock_that_was_set_or_stood_still(jump_s: float) -> None:
    """NTP set it, the machine slept, or another Redis is the master now."""
    redis = Clockwork()
    clock = RedisClock(redis)
    redis.ahead_s += jump_s
    assert clock() - time.monotonic() == pytest.approx(1000.0, abs=0.1)
    assert keep_right(clock, redis) == pytest.approx(jump_s, abs=0.1)
    assert clock() - time.monotonic() == pytest.approx(1000.0 + jump_s, abs=0.1)


def test_a_sample_that_took_long_changes_nothing() -> None:
    """It is wrong by as much as half of its round trip."""
    redis = Clockwork()
    clock = RedisClock(redis)
    redis.round_trip_s = 0.25
    assert keep_right(clock, redis) == 0.0


def test_it_does_not_tremble() -> None:
    redis = Clockwork()
    clock = RedisClock(redis)
    redis.ahead_s += 0.005
    redis.round_trip_s = 0.02  # a sample within 10 ms
    assert keep_right(clock, redis) == 0.0


def test_other_clocks_say_what_they_say() -> None:
    assert keep_right(lambda: 7.0, Clockwork()) == 0.0
