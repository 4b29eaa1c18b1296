"""What became of a simulated trace: per job, and per chunk where asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.simulator.traces import TraceJob


@dataclass(slots=True)
class JobOutcome:
    """Times in seconds on the trace's clock; `work_s` of all stages, `switches` of denoisers."""

    job: TraceJob
    status: str = "waiting"
    started_s: float | None = None
    finished_s: float | None = None
    steps_run: int = 0
    switches: int = 0
    chunks: int = 0
    work_s: float = 0.0
    longest_wait_s: float = 0.0  # the longest time without a step while it was in the system
    last_seen_s: float = 0.0
    steps: int = 0  # it was to do, fewer than it asked for if it was degraded

    def __post_init__(self) -> None:
        self.steps = self.steps or self.job.steps

    @property
    def succeeded(self) -> bool:
        return self.status == "succeeded"

    @property
    def on_time(self) -> bool:
        # A microsecond: the core's clock and the trace's differ by rounding.
        done = self.finished_s
        return self.succeeded and done is not None and done <= self.job.deadline_s + 1e-6

    @property
    def latency_s(self) -> float | None:
        if not self.succeeded or self.finished_s is None:
            return None
        return self.finished_s - self.job.arrival_s

    @property
    def lateness_s(self) -> float:
        """How long after its deadline it ended, 0 if in time."""
        if self.finished_s is None:
            return 0.0
        return max(0.0, self.finished_s - self.job.deadline_s)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row of one task. `slack_s` as it began: deadline − start − work left. `planned` is the
    stop it was given; `asked`: it was asked to yield."""

    rank: str
    stage: str
    job: str
    start: int
    stop: int
    start_s: float
    end_s: float
    slack_s: float
    planned: int = 0
    asked: bool = False


@dataclass(slots=True)
class Outcome:
    """A whole run."""

    policy: str
    ranks: int
    jobs: dict[str, JobOutcome] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    ended_s: float = 0.0
    busy_s: float = 0.0  # of denoise ranks, switches included
    decisions: int = 0
    wall_s: float = 0.0
    failures: int = 0  # of the policy: so often fcfs decided in its place
    last_failure: str = ""
