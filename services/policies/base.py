"""What a policy is: it orders ready tasks and says which rank runs what, and for how long.

A policy is pure. It keeps its own index and is told of every change (`add`, `remove`), so
that a decision costs about log n in the number of waiting jobs; `plan` is asked whenever
something changed. The coordinator and the simulator run the same policies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol, runtime_checkable

from common.stage import DENOISE, ENCODE


@dataclass(slots=True)
class Candidate:
    """A job's next task, ready to run. Times in seconds.

    `remaining_s` is all that is left of the job by the cost model, the decode stage and its
    expected queue included; `step_s` one denoising step; `task_s` the whole task where the
    stage is not denoise.
    """

    job: str
    stage: str
    model: str
    arrival_s: float
    deadline_s: float
    priority: int
    remaining_s: float
    task_s: float
    step_s: float
    step: int
    steps: int
    fewest: int = 0  # it would rather be cut to so many steps than be late; 0: it would not
    batch: str = ""  # those of one key and stage may share forward passes; "": it runs alone
    rows: int = 1  # that it adds to a forward pass it shares: pictures, branches, prompts
    tokens: int = 0  # of one picture
    doomed: bool = False  # known not to make its deadline
    suspect: bool = False  # a task of it failed: it shares none, lest it take others with it

    def cut_to(self, steps: int) -> Candidate:
        """The same with `steps` in all."""
        saved_s = (self.steps - steps) * self.step_s
        return replace(self, steps=steps, remaining_s=self.remaining_s - saved_s)

    def slack_s(self, now: float) -> float:
        return self.deadline_s - now - self.remaining_s

    @property
    def each_s(self) -> float:
        """What is asked of a forward pass alone: a denoising step, or a whole encode or decode."""
        return self.step_s if self.stage == DENOISE else self.task_s


@dataclass(frozen=True, slots=True)
class Pass:
    """What several jobs would run together: a denoising step, an encode or a decode.

    `rows` are all of theirs (services/costs/shape.py says what a row is at which stage); where
    their pictures differ in size, as many of the largest as have the same tokens in all, rounded
    up. `units` is what it may ask of a device's memory: every row as large as the largest.
    """

    stage: str
    model: str
    rows: int
    tokens: int
    mixed: bool
    units: int


@dataclass(slots=True)
class Running:
    """What a rank is doing."""

    seq: int
    candidate: Candidate
    ends_s: float  # expected
    yielding: bool = False
    stop: int = 0  # the step before which a denoise chunk ends; 0: not known
    company: tuple[str, ...] = ()  # the other jobs of the task
    goes_on: bool = False  # a job of it has steps left after it
    company_s: float = 0.0  # denoising left of those in `company`
    begins_s: float = inf  # when it began, or should; inf: not known, then nothing of it is done
    step_s: float = 0.0  # of a pass that its jobs share; 0: they run one after another

    @property
    def each_s(self) -> float:
        """What one of its forward passes takes."""
        return self.step_s or self.candidate.each_s

    def done_s(self, now: float) -> float:
        """How much of its first job is done, in seconds of that job alone."""
        spent_s = min(now, self.ends_s) - self.begins_s
        if spent_s <= 0:
            return 0.0
        if self.step_s:
            spent_s *= self.candidate.each_s / self.step_s
        return min(spent_s, cost_s(self.candidate, self.stop)) if self.stop else spent_s

    def begun(self, now: float) -> int:
        """How many steps it will have done once it could make way: those that are done, and the
        one that runs."""
        spent_s = min(now, self.ends_s) - self.begins_s
        if spent_s < 0 or self.each_s <= 0:
            return 0
        begun = int(spent_s / self.each_s + 1e-9) + 1
        planned = self.stop - self.candidate.step
        return min(begun, planned) if planned > 0 else begun

    def yields_in_s(self, now: float) -> float:
        """How long until it could make way: the rest of the step that runs."""
        wait_s = max(0.0, self.ends_s - now)
        begun = self.begun(now)
        if not begun:
            return min(wait_s, self.each_s)
        return min(wait_s, max(0.0, self.begins_s + begun * self.each_s - now))


@dataclass(slots=True)
class Rank:
    """One worker: runs one task, holds at most one more queued behind it.

    `most_units` is the largest pass, in rows × tokens, that its memory is known to hold.
    """

    name: str
    stage: str
    models: tuple[str, ...]
    running: Running | None = None
    queued: Running | None = None
    most_units: float = inf

    def free_at(self, now: float) -> float:
        return max(now, self.running.ends_s) if self.running else now


@dataclass(slots=True)
class View:
    """The pool as the policy may see it."""

    ranks: list[Rank]
    lead_s: float = 0.02  # a task is handed over this long before its rank is free
    chunk_s: float = 0.6  # a chunk's wanted length
    pack_s: float = 0.005  # short tasks are packed into one of up to this length
    switch_s: float = 0.005  # what it costs to stop one job and start another
    error: float = 0.05  # relative error of an estimate
    ahead: int = 2  # jobs encoded ahead per denoise rank, and
    ahead_s: float = 0.1  # the denoising time that they should make up at least
    patience_s: float = 2400.0  # who is out gets a step after so long without; why: turns.py
    by_stage: dict[str, list[Rank]] = field(default_factory=dict)
    batch: bool = True  # jobs that are not exact may be given to a rank together
    # Seconds of a pass, and whether they are known: reported, or in the range of a table whose
    # speed is known. What is not known may be tried, and is no reason to expect a gain.
    shared_s: Callable[[Pass], tuple[float, bool]] = lambda shared: (inf, True)


@dataclass(frozen=True, slots=True)
class Run:
    """Give `rank` one task of these rows: (job, the step its chunk ends before). They run one
    after another, or, with `step_s`, together: so many seconds a step, or the whole task where
    the stage is not denoise."""

    rank: str
    rows: tuple[tuple[str, int], ...]
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Preempt:
    """Ask the rank's running task to yield at its next step."""

    seq: int


@dataclass(frozen=True, slots=True)
class Recall:
    """Take back a task that is queued and not started."""

    seq: int


@dataclass(frozen=True, slots=True)
class Doomed:
    """Said once when a job can no longer make its deadline; `on_late` decides what follows."""

    job: str


@dataclass(frozen=True, slots=True)
class Degrade:
    """Have a job with `fewest` that has done no step do only `steps`, lest it be late."""

    job: str
    steps: int


Decision = Run | Preempt | Recall | Doomed | Degrade


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a job that came now would find. `ahead_s` is the work that would go before it, in
    seconds of one rank; `fits` whether it would make its deadline beside those that count on
    theirs, None where the policy makes no such promise."""

    ahead_s: float
    fits: bool | None = None


class Policy(Protocol):
    name: str

    def add(self, candidate: Candidate) -> None:
        """`candidate` became ready."""

    def remove(self, job: str) -> None:
        """The job's task is not ready any more; unknown jobs are passed over."""

    def plan(self, view: View, now: float) -> list[Decision]:
        """What to do now. Jobs named in a Run leave the index when the core says `remove`."""

    def order(self, now: float) -> Iterable[str]:
        """Waiting jobs, the next first: what a queue position means."""


@runtime_checkable
class Foresees(Protocol):
    """A policy that can say what a job would find; without it, what fcfs would say is said."""

    def outlook(self, candidate: Candidate, view: View, now: float) -> Outlook:
        """What `candidate`, which does not wait yet, would find."""


def unfinished(rank: Rank) -> Candidate | None:
    """The job that runs there if its chunk leaves steps to do. It cannot be queued again before
    it reports; where it goes first, the next hand-over waits for that, since a switch and a
    switch back cost more than a round trip."""
    running = rank.running
    if running is None or running.candidate.stage != DENOISE:
        return None  # an encode or decode ends whole
    return running.candidate if 0 < running.stop < running.candidate.steps else None


def under_way_s(view: View, now: float, before: Callable[[Running], bool]) -> float:
    """Denoising of the jobs that workers have in hand, in seconds of one rank: what their chunks
    will still take, and all that is left of those that go `before` another."""
    total = 0.0
    for rank in view.ranks:
        for held in (rank.running, rank.queued):
            if held is None or rank.stage not in (ENCODE, DENOISE):
                continue
            task = held.candidate
            if before(held):
                total += (task.steps - task.step) * task.step_s + held.company_s
                if rank.stage == DENOISE:
                    total -= held.done_s(now)
            elif held is rank.running and rank.stage == DENOISE:
                total += max(0.0, held.ends_s - now)
    return total


# A packed task's message must stay well under 8 kB (common/messages.py).
MOST_ROWS = 12


def cost_s(candidate: Candidate, stop: int) -> float:
    """How long the candidate's next task takes if its chunk ends before `stop`."""
    if candidate.stage == DENOISE:
        return (stop - candidate.step) * candidate.step_s
    return candidate.task_s


def pack(
    first: Candidate, view: View, following: Callable[[], Candidate | None]
) -> tuple[tuple[str, int], ...]:
    """Rows of a task that begins with `first`: itself, and, while all of them together are
    short, the candidates that `following` yields (none that is suspect). One hand-over then
    pays for several tasks that are each shorter than it."""
    stop = chunk_stop(first, view.chunk_s)
    rows, left_s = [(first.job, stop)], view.pack_s - cost_s(first, stop)
    while left_s > 0 and len(rows) < MOST_ROWS and not first.suspect:
        candidate = following()
        if candidate is None:
            break
        stop = chunk_stop(candidate, view.chunk_s)
        left_s -= cost_s(candidate, stop)
        rows.append((candidate.job, stop))
    return tuple(rows)


def chunk_stop(candidate: Candidate, chunk_s: float) -> int:
    """The step before which a chunk of about `chunk_s` ends.

    A rest shorter than a quarter of a chunk is taken along: it would cost a hand-over of its own.
    """
    if candidate.step_s <= 0:
        return candidate.steps
    count = max(1, round(chunk_s / candidate.step_s))
    stop = candidate.step + count
    return candidate.steps if candidate.steps - stop < count * 0.25 else stop


def longest_chunk_s(view: View, step_s: float) -> float:
    """What a chunk takes of a rank at most, the switch to it included, if no step is longer than
    `step_s`: rounding adds half a step, and the rest taken along a quarter."""
    return 1.25 * (view.chunk_s + step_s / 2) + view.switch_s
