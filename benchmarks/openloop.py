"""Drives a trace into a system open-loop, and brings back what became of every job.

Arrivals are fixed beforehand and wait for nobody's answer. A `System` is our pool (`Pool`, here) or
a plain diffusers worker (benchmarks/fifo_diffusers.py). What comes back is an `Outcome` as the
simulator makes them, so that real and simulated runs are scored alike. Arrivals, deadlines and
ends are by Redis' clock on both sides.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.traffic import medians
from common.asks import Ask
from common.clock import redis_clock
from common.connect import writing
from common.record import JobEvent
from common.settings import Settings
from common.stage import DENOISE, STAGES
from services.pool.local import LocalPool
from services.simulator.outcome import JobOutcome, Outcome
from services.simulator.traces import TraceJob

# Between the call and the trace's beginning; between two looks at whether all has ended.
LEAD_S = 0.5
LOOK_S = 0.5
# Due so late that it does not matter.
LATE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Ran:
    """What a system says of one job; times since the epoch by Redis' clock."""

    status: str
    arrived_s: float
    started_s: float | None = None
    finished_s: float | None = None
    stage_s: Mapping[str, float] = field(default_factory=dict)  # seconds of work
    chunks: int = 1
    error: str = ""


class System(Protocol):
    """Takes jobs and says later what became of them."""

    name: str

    def clock(self) -> float:
        """Seconds since the epoch, by Redis' clock."""

    def push(self, job: str, params: Mapping[str, Any], deadline_s: float) -> None:
        """One arrival, now; `deadline_s` since the epoch."""

    def left(self) -> int:
        """How many of those pushed have not ended; cheap."""

    def ran(self, jobs: Sequence[str]) -> dict[str, Ran]:
        """What became of jobs that have ended."""

    def switches(self) -> dict[str, int]:
        """By job, how often it was begun or resumed after another job."""


# -- our pool ------------------------------------------------------------------------------


class Pool:
    """A running pool as a System."""

    def __init__(self, pool: LocalPool) -> None:
        self.name = pool.settings.policy
        self._keys = pool.keys
        self.client = pool.client()
        self._redis: Any = writing(pool.redis_url)
        self.clock = redis_clock(self._redis)
        [manifest] = self.client.models().values()
        self._known = {*manifest["parameters"], "seed"}  # a no-op model has no guidance

    def push(self, job: str, params: Mapping[str, Any], deadline_s: float) -> None:
        known = {name: value for name, value in params.items() if name in self._known}
        self.client.submit(id=job, deadline_ms=1000 * deadline_s, **known)

    def left(self) -> int:
        counts = (("SCARD", self._keys.active), ("XLEN", self._keys.jobs))
        return sum(self.client.ask(Ask(counts)))

    def ran(self, jobs: Sequence[str]) -> dict[str, Ran]:
        found = {}
        for job, record in zip(jobs, self.client.statuses(jobs), strict=True):
            result = self.client.result(job)
            assert record is not None
            assert result is not None
            found[job] = Ran(
                str(result.status),
                # The entry's own time, cut to whole milliseconds.
                int(record.entry.split("-")[0]) / 1000 + 0.0005,
                record.started_s,
                record.finished_s,
                {stage: result.timings.get(f"{stage}_s", 0.0) for stage in STAGES},
                int(result.timings.get("chunks", 0)),
                result.error,
            )
        return found

    def switches(self) -> dict[str, int]:
        """From the records of all dispatches, which stay for ten minutes."""
        last = int(self._redis.get(self._keys.seq) or 0)
        pipeline = self._redis.pipeline(transaction=False)
        for seq in range(1, last + 1):
            pipeline.hmget(self._keys.task(seq), "state", "stage", "members", "jobs")
        return count_switches(
            (members.decode(), jobs.decode().split())
            for state, stage, members, jobs in pipeline.execute()
            if state == b"done" and stage == DENOISE.encode()
        )

    def events(self, job: str) -> list[JobEvent]:
        """Of a job that has ended: its latest 256."""
        return list(self.client.events(job))

    def close(self) -> None:
        self.client.close()
        self._redis.close()


@contextmanager
def running_pool(settings: Settings) -> Iterator[Pool]:
    """A fresh pool of one worker a stage."""
    with LocalPool(settings=settings) as pool:
        system = Pool(pool)
        try:
            yield system
        finally:
            system.close()


def count_switches(tasks: Iterable[tuple[str, Sequence[str]]]) -> dict[str, int]:
    """`tasks` are (worker, its jobs) in the order of dispatch, in which workers run them. A job
    has a switch where its worker ran another one before, its first task included."""
    last: dict[str, str] = {}
    counts: dict[str, int] = {}
    for worker, jobs in tasks:
        for job in jobs:
            if last.get(worker) != job:
                counts[job] = counts.get(job, 0) + 1
            last[worker] = job
    return counts


# -- running -------------------------------------------------------------------------------


def run_all(system: System, params: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, Ran]:
    """Push all jobs at once, due far away, and wait for them: to warm up, or to measure.

    Raises RuntimeError if one fails.
    """
    due = system.clock() + LATE_S
    names = [f"{prefix}-{number}" for number in range(len(params))]
    for name, one in zip(names, params, strict=True):
        system.push(name, one, due)
    wait_for_end(system, LATE_S)
    ran = system.ran(names)
    for name in names:
        if ran[name].status != "succeeded":
            raise RuntimeError(f"{system.name}: {name} {ran[name].status}: {ran[name].error}")
    return ran


@dataclass(frozen=True, slots=True)
class Run:
    """One trace through one system, on the trace's clock."""

    outcome: Outcome
    stage_s: dict[str, dict[str, float]]  # class -> stage -> median seconds of a job
    busy_s: dict[str, float]  # stage -> seconds of work of all jobs
    lag_s: float  # how late the latest arrival was pushed


def run_trace(
    system: System, trace: Sequence[TraceJob], params: Sequence[Mapping[str, Any]], prefix: str = ""
) -> Run:
    """Push every job at its time and wait until the last has ended, in time or not."""
    begun = system.clock() + LEAD_S
    lag_s = 0.0
    for job, one in zip(trace, params, strict=True):
        time.sleep(max(0.0, begun + job.arrival_s - system.clock()))
        system.push(prefix + job.id, one, begun + job.deadline_s)
        lag_s = max(lag_s, system.clock() - begun - job.arrival_s)
    wait_for_end(system, 60 + 3 * sum(job.standalone_s for job in trace))
    ran = system.ran([prefix + job.id for job in trace])
    switches = system.switches()
    outcome = Outcome(system.name, ranks=1)
    for job in trace:
        one_ran = ran[prefix + job.id]
        outcome.jobs[job.id] = JobOutcome(
            job,
            status=one_ran.status,
            started_s=None if one_ran.started_s is None else one_ran.started_s - begun,
            finished_s=None if one_ran.finished_s is None else one_ran.finished_s - begun,
            steps_run=job.steps,
            switches=switches.get(prefix + job.id, 0),
            chunks=one_ran.chunks,
            work_s=sum(one_ran.stage_s.values()),
        )
    outcome.ended_s = max(j.finished_s or 0.0 for j in outcome.jobs.values())
    busy_s: dict[str, float] = {}
    for one_ran in ran.values():
        for stage, seconds in one_ran.stage_s.items():
            busy_s[stage] = busy_s.get(stage, 0.0) + seconds
    outcome.busy_s = busy_s.get(DENOISE, 0.0)
    by_class = medians([(j.request_class, ran[prefix + j.id].stage_s) for j in trace])
    return Run(outcome, by_class, busy_s, lag_s)


def wait_for_end(system: System, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while left := system.left():
        if time.monotonic() > until:
            raise TimeoutError(f"{system.name}: {left} jobs had not ended {timeout_s:.0f} s later")
        time.sleep(LOOK_S)
