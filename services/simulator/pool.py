"""Simulated workers: each runs one task, holds one more, and may stop at a step's end.

They do what `common/worker.py` and the stages do, in no time at all: rows of a task run one after
another, a request to yield is noticed before the next step, a task that has begun cannot be
taken back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.stage import DECODE, DENOISE, ENCODE
from services.coordinator.events import Dispatch
from services.coordinator.state import FINISH

AFTER = {ENCODE: DENOISE, DECODE: FINISH}


@dataclass(slots=True)
class Overheads:
    """What the hardware and the hand-over cost besides the work, in seconds."""

    dispatch_s: float = 0.0  # before a task's first step, every task
    switch_s: float = 0.0  # before a denoise task of another job than this rank's last
    report_s: float = 0.0  # from a task's end until the core hears of it
    submit_s: float = 0.0  # from a job's arrival until the core knows it
    jitter: float = 0.01  # standard deviation of a task's speed (about 1 %, as published)


@dataclass(slots=True)
class Part:
    """One row's share of a task: (stop - start) steps of `step_s` each, from `begin_s` on."""

    job: str
    start: int
    stop: int
    begin_s: float
    step_s: float
    steps: int  # the whole job's

    @property
    def end_s(self) -> float:
        return self.begin_s + max(1, self.stop - self.start) * self.step_s


@dataclass(slots=True)
class Held:
    """A task on a worker. `ends_s` is known once it runs; `version` tells stale alarms apart."""

    seq: int
    stage: str
    dispatch: Dispatch
    parts: list[Part] = field(default_factory=list)
    begun_s: float = 0.0
    ends_s: float = 0.0
    version: int = 0
    yielding: bool = False


@dataclass(slots=True)
class Simulated:
    """One worker."""

    name: str
    stage: str
    running: Held | None = None
    queued: Held | None = None
    last_job: str = ""


class OverFull(RuntimeError):
    """A worker was given a task while one was queued already: the core promises not to."""


class Workers:
    """All of them. `cost_s(stage, job, together)` is the true cost of a task or step, by itself or
    with all jobs that share its passes; `steps_of` a job's steps."""

    def __init__(
        self,
        names: dict[str, str],  # name -> stage
        cost_s: Callable[[str, str, Sequence[str]], float],
        steps_of: Callable[[str], int],
        overheads: Overheads,
        rng: random.Random,
        started: Callable[[Simulated, Held, bool], None],
    ) -> None:
        self.all = {name: Simulated(name, stage) for name, stage in names.items()}
        self._cost_s, self._steps_of = cost_s, steps_of
        self._overheads, self._rng = overheads, rng
        self._started = started  # told of every start, and whether it was a switch
        self._where: dict[int, Simulated] = {}

    def accept(self, dispatch: Dispatch, now: float) -> Held | None:
        """A task arrives; it is returned if it starts at once."""
        (name,) = dispatch.members
        worker = self.all[name]
        held = Held(dispatch.seq, dispatch.stage, dispatch)
        self._where[held.seq] = worker
        if worker.running is None:
            self._start(worker, held, now)
            return held
        if worker.queued is not None:
            raise OverFull(f"{name} runs {worker.running.seq}, holds {worker.queued.seq}")
        worker.queued = held
        return None

    def _start(self, worker: Simulated, held: Held, now: float) -> None:
        """Rows one after another, or all at once where they share forward passes."""
        at = now + self._overheads.dispatch_s
        rows = held.dispatch.rows
        switch = held.stage == DENOISE and rows[0].job != worker.last_job
        if switch:
            at += self._overheads.switch_s
        jitter = self._overheads.jitter
        together = [row.job for row in rows] if held.dispatch.together else []
        began = at
        for row in rows:
            cost = self._cost_s(held.stage, row.job, together)
            if jitter:
                cost *= max(0.5, self._rng.gauss(1.0, jitter))
            # Asked to yield before it began: no step is run.
            stop = row.start if held.yielding and held.stage == DENOISE else row.stop
            begin = began if together else at
            part = Part(row.job, row.start, stop, begin, cost, self._steps_of(row.job))
            if stop > row.start or held.stage != DENOISE:
                at = max(at, part.end_s)
            held.parts.append(part)
        worker.last_job = rows[-1].job
        held.begun_s, held.ends_s = now, at
        worker.running = held
        self._started(worker, held, switch)

    def release(self, held: Held, now: float) -> tuple[str, Held | None]:
        """`held` has ended: its worker, and what starts there now."""
        worker = self._where.pop(held.seq)
        following, worker.running, worker.queued = worker.queued, None, None
        if following is not None:
            self._start(worker, following, now)
        return worker.name, following

    def ask_yield(self, seq: int, now: float) -> Held | None:
        """Stop at the next step's end. The task is returned if it now ends sooner."""
        worker = self._where.get(seq)
        if worker is None:
            return None  # it has ended
        held = worker.running
        if held is None or held.seq != seq:
            if worker.queued is not None:
                worker.queued.yielding = True
            return None
        if held.yielding or held.stage != DENOISE:
            return None
        held.yielding = True
        end = held.begun_s
        for part in held.parts:
            if part.begin_s >= now:  # not begun
                part.stop = part.start
                continue
            done = -int(-(now - part.begin_s) // part.step_s) if part.step_s > 0 else part.stop
            part.stop = min(part.stop, part.start + max(1, done))
            end = max(end, part.end_s)
        held.ends_s = max(now, end)
        held.version += 1
        return held

    def take_back(self, seq: int) -> bool:
        """Void a queued task; False if it has started or ended."""
        worker = self._where.get(seq)
        if worker is None or worker.queued is None or worker.queued.seq != seq:
            return False
        worker.queued = None
        del self._where[seq]
        return True
