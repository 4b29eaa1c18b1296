"""The clairvoyant bound beside what trying out all sets of jobs finds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from benchmarks.bound import bound
from services.simulator.calibrations import Calibration, calibration, flat
from services.simulator.generate import generate
from services.simulator.simulation import Setting, simulate
from services.simulator.traces import TraceJob

# A second a step, nothing else.
PLAIN = Calibration("plain", "a second a step", flat(1.0), flat(0.0), flat(0.0))


def all_in_time(jobs: Sequence[TraceJob]) -> bool:
    """Whether one rank can do all of them in time: earliest deadline first, switching freely, does
    if anything can."""
    left = {job.id: float(job.steps) for job in jobs}
    now = 0.0
    moments = [*sorted({job.arrival_s for job in jobs}), float("inf")]
    while any(left.values()):
        waiting = [job for job in jobs if left[job.id] and job.arrival_s <= now]
        until = next(at for at in moments if at > now)
        if not waiting:
            now = until
            continue
        first = min(waiting, key=lambda job: (job.deadline_s, job.id))
        run = min(left[first.id], until - now)
        now += run
        left[first.id] -= run
        if not left[first.id] and now > first.deadline_s + 1e-9:
            return False
    return True


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_what_trying_out_every_set_of_jobs_finds(seed: int) -> None:
    """On one rank, where switches cost nothing; on more it may only be larger."""
    rng = random.Random(seed)
    jobs = []
    for number in range(8):
        at, steps = rng.randrange(20), rng.randrange(1, 8)
        due = at + steps + rng.randrange(6)
        jobs.append(TraceJob(f"j{number}", "any", float(at), float(due), float(steps), 1, steps))
    best = max(
        size
        for size in range(len(jobs) + 1)
        if any(all_in_time(chosen) for chosen in itertools.combinations(jobs, size))
    )
    found = bound(jobs, PLAIN)
    assert found["exact"]
    assert found["bound"] == best
    assert bound(jobs, PLAIN, ranks=2)["bound"] >= best


@pytest.mark.parametrize("ranks", [1, 3])
def test_no_policy_beats_the_bound(ranks: int) -> None:
    """Not even where the search for intervals looks at some of the long ones only."""
    toy = calibration("toy")
    trace = generate(250, 1.2, toy, ranks=ranks, seed=4)
    most = bound(trace, toy, ranks, limit_s=5.0)["bound"]
    for policy in ("slack", "srtf"):
        setting = Setting(policy, costs=toy, denoise=ranks)
        assert sum(job.on_time for job in simulate(trace, setting).jobs.values()) <= most
