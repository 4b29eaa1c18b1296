"""What the core is told (events) and what it wants done (effects). Data only.

Every effect that Redis may refuse comes back as an event with Redis' answer, so that the
core and the records never drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from common.job import JobSpec, JobStatus
from common.messages import Report, TaskRow
from services.policies.base import Candidate, Policy

# -- events ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pushed:
    """An entry of `sw:jobs`."""

    entry: str
    raw: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """An entry of `sw:cancel`."""

    entry: str
    job: str


@dataclass(frozen=True, slots=True)
class Reported:
    """A report that Redis has recorded; `accepted` says for each row whether it counted."""

    report: Report
    accepted: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Motion:
    """What a worker runs (seq 0: nothing), and how long that has not moved, by its own clock, at
    the heartbeat of `at_s` (Redis' clock)."""

    seq: int = 0
    still_s: float = 0.0
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    name: str
    stage: str
    models: tuple[str, ...]
    host: str
    draining: bool = False
    hung: str = ""  # what it hangs on, as a leader has marked it
    motion: Motion = field(default=Motion(), compare=False)  # differs at every heartbeat
    most_units: float = field(default=inf, compare=False)  # rows × tokens that fit in its memory


@dataclass(frozen=True, slots=True)
class Joined:
    worker: WorkerInfo


@dataclass(frozen=True, slots=True)
class Beats:
    """All living workers' records, looked at once a second."""

    workers: tuple[WorkerInfo, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """A worker went (`lost` False: it handed everything back first)."""

    worker: str
    lost: bool


@dataclass(frozen=True, slots=True)
class ManifestsRead:
    """The merged manifests by model name."""

    manifests: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PolicyChosen:
    """The operator wants another policy to lead."""

    policy: Policy


@dataclass(frozen=True, slots=True)
class Tick:
    """Time to decide: sent after every batch of events and whenever `Core.wake_at` has come."""


# Answers to effects.


@dataclass(frozen=True, slots=True)
class Submitted:
    spec: JobSpec
    verdict: str  # created | created_canceled | same | conflict


@dataclass(frozen=True, slots=True)
class CancelNoted:
    job: str
    verdict: str  # canceling | terminal | early


@dataclass(frozen=True, slots=True)
class Dispatched:
    seq: int
    verdict: str  # dispatched | seq | worker | row
    detail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Voided:
    seq: int
    verdict: str  # void | late
    blamed: bool  # it counted as an attempt


@dataclass(frozen=True, slots=True)
class Finished:
    job: str
    verdict: str  # finished | gone | lost | done


@dataclass(frozen=True, slots=True)
class Rewound:
    job: str
    verdict: str  # rewound | late


@dataclass(frozen=True, slots=True)
class SubmitFailed:
    """Redis would not take a new job (it is at maxmemory)."""

    spec: JobSpec
    reason: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """An active job as its records tell it, at the start of a coordinator's lead."""

    spec: JobSpec
    stage: str
    step: int
    seq: int
    handles: bytes
    outputs: tuple[dict[str, Any], ...]
    attempts: int
    error_code: str
    error: str
    started_s: float | None
    seconds: Mapping[str, float]
    cancel: bool
    flight: RecoveredFlight | None
    reached: int | None = None  # the furthest place (state.position) at which a task of it began


@dataclass(frozen=True, slots=True)
class RecoveredFlight:
    """The task record an active job waits for."""

    seq: int
    state: str
    stage: str
    members: tuple[str, ...]
    jobs: tuple[str, ...]
    expected_s: float


Event = (
    Pushed
    | CancelAsked
    | Reported
    | Joined
    | Beats
    | Left
    | ManifestsRead
    | PolicyChosen
    | Tick
    | Submitted
    | SubmitFailed
    | CancelNoted
    | Dispatched
    | Voided
    | Finished
    | Rewound
    | Recovered
)

# -- effects --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """`candidate` is its first task. `eta_s`: when it should end, in seconds since the epoch, and
    `eta_margin_s` by how much that may be off where nothing like it was ever measured.
    `best_effort`: too late for its deadline, as things stand."""

    spec: JobSpec
    candidate: Candidate
    eta_s: float
    eta_margin_s: float = 0.0
    best_effort: bool = False
    batch: str = ""  # jobs of one key may share denoising steps


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a push with a failed result, under each of `ids` that is still unused."""

    entry: str
    ids: tuple[str, ...]
    content: str
    error_code: str
    error: str
    field: str = ""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class NoteCancel:
    entry: str
    job: str


@dataclass(frozen=True, slots=True)
class Dispatch:
    seq: int
    stage: str
    model: str
    members: tuple[str, ...]
    rows: tuple[TaskRow, ...]
    expected_s: float
    together: bool = False  # its rows are to share forward passes
    slacks_s: tuple[float, ...] = ()  # of each row's job, as it is handed over


@dataclass(frozen=True, slots=True)
class Yield:
    seq: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Void:
    seq: int
    members: tuple[str, ...]
    jobs: tuple[str, ...]
    forced: bool
    blame: bool = True  # forced: whether it is an attempt of its jobs if it had started


@dataclass(frozen=True, slots=True)
class Finish:
    """End a job. `outputs` are the staged files that become its result."""

    spec: JobSpec
    status: JobStatus
    outputs: tuple[dict[str, Any], ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    error_code: str = ""
    error: str = ""
    free_by: tuple[str, ...] = ()  # workers that could free its state; one is told to


@dataclass(frozen=True, slots=True)
class Shorten:
    """Have a job that has done no step yet do `steps` in all, as `spec` now says."""

    spec: JobSpec
    steps: int


@dataclass(frozen=True, slots=True)
class Rewind:
    """Begin a job again from its prompt: its state is lost."""

    job: str
    free_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """What the public record of a waiting or running job says of its future."""

    job: str
    queue_position: int | None
    slack_s: float
    eta_s: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class Refresh:
    standings: tuple[Standing, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """Write into a worker's record what it hangs on; "" for nothing."""

    worker: str
    hung: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove what a dead worker left in Redis."""

    worker: str


Effect = (
    Submit
    | Refuse
    | NoteCancel
    | Dispatch
    | Yield
    | Void
    | Finish
    | Shorten
    | Rewind
    | Refresh
    | Forget
    | Mark
)
