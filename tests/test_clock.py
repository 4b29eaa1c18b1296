"""Redis' clock, followed from here."""

from __future__ import annotations

import pytest

from common.clock import RedisClock, keep_right


class Clockwork:
    """A Redis that only knows the time, `ahead_s` of the monotonic clock, and that clock."""

    def __init__(self) -> None:
        self.now, self.ahead_s, self.round_trip_s = 50.0, 1000.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> tuple[int, int]:
        now = self.now + self.ahead_s
        self.now += self.round_trip_s
        return int(now), int(now % 1 * 1e6)


@pytest.fixture
def redis(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    made = Clockwork()
    monkeypatch.setattr("common.clock.time", made)
    return made


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, 0.5])
def test_it_follows_a_clock_that_was_set_or_stood_still(redis: Clockwork, jump_s: float) -> None:
    """NTP set it, the machine slept, or another Redis is the master now."""
    clock = RedisClock(redis)
    redis.ahead_s += jump_s
    assert clock() - redis.now == pytest.approx(1000.0)
    assert keep_right(clock, redis) == pytest.approx(jump_s)
    assert clock() - redis.now == pytest.approx(1000.0 + jump_s)


def test_a_sample_that_took_long_changes_nothing(redis: Clockwork) -> None:
    """It is wrong by as much as half of its round trip."""
    clock = RedisClock(redis)
    redis.round_trip_s = 0.25
    assert keep_right(clock, redis) == 0.0


def test_it_does_not_tremble(redis: Clockwork) -> None:
    clock = RedisClock(redis)
    redis.ahead_s += 0.005
    redis.round_trip_s = 0.02  # a sample within 10 ms
    assert keep_right(clock, redis) == 0.0


def test_other_clocks_say_what_they_say() -> None:
    assert keep_right(lambda: 7.0, Clockwork()) == 0.0
