"""A run to look at: which rank ran which steps of which job, and when. Live and simulated alike.

Times are seconds on one clock: a trace's own, or Redis'.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from common.stage import DENOISE, STAGES
from services.simulator.outcome import JobOutcome, Outcome
from services.simulator.report import by_size, report


@dataclass(frozen=True, slots=True)
class Row:
    """One job's share of a task: steps start … stop (exclusive; 0 … 0 outside the denoise stage).

    `planned` is the stop it was given, `slack_s` its job's slack as it was handed out. `end` is
    `done`, `error`, `refused` (the job had ended or moved on), `returned` (not begun), or
    `member` (the task's first member reports for it).
    """

    job: str
    start: int
    stop: int
    planned: int
    slack_s: float | None
    end: str = "done"


@dataclass(frozen=True, slots=True)
class Bar:
    """One task on one rank. `asked`: it was asked to yield before it ended."""

    rank: str
    stage: str
    start_s: float
    end_s: float
    rows: tuple[Row, ...]
    seq: int = 0
    model: str = ""
    asked: bool = False

    @property
    def yielded(self) -> bool:
        """It was asked to, and left steps undone."""
        return self.asked and any(row.stop < row.planned for row in self.rows)


@dataclass(frozen=True)
class Run:
    """One pool under one policy for a while. `bars` by start, `jobs` by id in order of arrival."""

    name: str
    bars: tuple[Bar, ...]
    jobs: dict[str, JobOutcome]
    begin_s: float
    end_s: float

    @cached_property
    def ranks(self) -> tuple[str, ...]:
        """Those that ran something: denoisers first, then encoders and decoders; by name."""
        stage_of = self.stage_of
        return tuple(sorted(stage_of, key=lambda r: (_place(stage_of[r]), natural(r))))

    @cached_property
    def shown(self) -> tuple[str, ...]:
        """Ids of the jobs that have a bar, in order of arrival where that is known."""
        seen = {row.job for bar in self.bars for row in bar.rows}
        known = [job for job in self.jobs if job in seen]
        return (*known, *sorted(seen - self.jobs.keys()))

    @cached_property
    def stage_of(self) -> dict[str, str]:
        return {bar.rank: bar.stage for bar in self.bars}

    @cached_property
    def labels(self) -> dict[str, str]:
        """Short names of ranks: "denoise 1", …; a worker's own name is long and says little."""
        seen: dict[str, int] = {}
        labels = {}
        for rank in self.ranks:
            stage = self.stage_of[rank]
            seen[stage] = seen.get(stage, 0) + 1
            labels[rank] = f"{stage} {seen[stage]}"
        return labels

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the jobs' classes, the shortest jobs' first."""
        return tuple(by_size(self.jobs.values()))

    def missed(self, job: str) -> bool:
        """Whether a job ended too late or never, or is late already."""
        found = self.jobs.get(job)
        if found is None or found.status == "canceled" or found.on_time:
            return False
        return found.finished_s is not None or found.job.deadline_s < self.end_s

    def within(self, begin_s: float, end_s: float) -> Run:
        """The part between two moments: the bars that touch it and all jobs."""
        bars = tuple(b for b in self.bars if b.end_s > begin_s and b.start_s < end_s)
        return Run(self.name, bars, self.jobs, begin_s, end_s)


def _place(stage: str) -> int:
    """Denoisers come first: they are what a pool is short of."""
    return -1 if stage == DENOISE else STAGES.index(stage)


def natural(name: str) -> tuple[int | str, ...]:
    """A key that sorts rank-2 before rank-10: words and numbers in turn."""
    parts = re.split(r"(\d+)", name)
    return tuple(int(part) if place % 2 else part for place, part in enumerate(parts))


def classes_of(runs: Iterable[Run]) -> tuple[str, ...]:
    """The classes of several runs, shortest first."""
    return tuple(dict.fromkeys(name for run in runs for name in run.classes))


def simulated(outcome: Outcome) -> Run:
    """A simulated run whose timeline was kept (`Setting.timeline`)."""
    bars = sorted(_bars(outcome), key=lambda bar: bar.start_s)
    begin_s = min((job.job.arrival_s for job in outcome.jobs.values()), default=0.0)
    return Run(outcome.policy, tuple(bars), outcome.jobs, begin_s, outcome.ended_s)


def _bars(outcome: Outcome) -> Iterator[Bar]:
    for chunk in outcome.chunks:
        row = Row(chunk.job, chunk.start, chunk.stop, chunk.planned, chunk.slack_s)
        yield Bar(chunk.rank, chunk.stage, chunk.start_s, chunk.end_s, (row,), asked=chunk.asked)


def figures(run: Run) -> dict[str, Any]:
    """A run's figures as a simulation's report has them; jobs that have not ended, or were
    canceled, do not count."""
    ended = {
        name: job
        for name, job in run.jobs.items()
        if job.status in ("succeeded", "failed", "expired")
    }
    ranks = sum(stage == DENOISE for stage in run.stage_of.values())
    return report(Outcome(run.name, ranks, ended, ended_s=run.end_s))


def said_of(run: Run) -> str:
    """A run's figures in a line."""
    found = figures(run)["all"]
    if not found["jobs"]:
        return "no job has ended"
    return (
        f"{found['jobs']} jobs, {100 * found['on_time']:.1f} % on time, "
        f"median {found['p50_s']:.1f} s, p95 {found['p95_s']:.1f} s"
    )
