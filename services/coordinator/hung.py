"""Workers that heartbeat and get nothing done: their tasks are taken from them. Pure.

A worker's record says what it runs and for how long that has not moved, by the worker's own clock,
so a late look never makes a worker seem slower than it is. A leased heartbeat proves a living
process; only this proves a working one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.stage import DENOISE
from services.coordinator import events as ev
from services.coordinator.state import Flight, Job
from services.costs.model import Shape

if TYPE_CHECKING:
    from services.coordinator.core import Core, Effects

log = logging.getLogger("slackwater.coordinator")

HANG_S, HANG_FACTOR, HANG_FIRST_S = 5.0, 10.0, 60.0
# Shapes that a worker is known to be warm for, the latest: users may ask for any size.
WARM_SHAPES = 1000
# What the record of a worker says that is idle though it was given a task: it reads no more.
DEAF = "deaf"


class Watch:
    """How patient to be with whom.

    A step, or an encode or decode, may take `factor` times its estimate and `hang_s` at least. A
    worker's first task of a shape may take `first_s`: kernels are chosen and compiled then,
    memory is claimed, and a model may be read from disk on its first use.
    """

    def __init__(
        self, hang_s: float = HANG_S, factor: float = HANG_FACTOR, first_s: float = HANG_FIRST_S
    ) -> None:
        self.hang_s, self.factor, self.first_s = hang_s, factor, first_s
        self._worked: dict[str, dict[tuple[str, Shape], None]] = {}

    def worked(self, worker: str, stage: str, jobs: Sequence[Job]) -> None:
        """It has brought a task of these jobs to an end: it is warm for their shapes."""
        warm = self._worked.setdefault(worker, {})
        for job in jobs:
            warm.pop((stage, job.shape), None)  # the latest last
            warm[stage, job.shape] = None
        for oldest in list(warm)[: max(0, len(warm) - WARM_SHAPES)]:
            del warm[oldest]

    def forget(self, worker: str) -> None:
        self._worked.pop(worker, None)

    def limit_s(self, core: Core, flight: Flight, worker: str) -> float:
        """For how long nothing may move while `worker` runs `flight`."""
        jobs = [core.jobs[name] for name in flight.jobs if name in core.jobs]
        estimate_s = flight.expected_s
        if flight.stage == DENOISE:
            steps_s = [job.candidate(core.costs).step_s for job in jobs]
            estimate_s = min(estimate_s, sum(steps_s) if steps_s else flight.candidate.step_s)
        warm = self._worked.get(worker, ())
        is_warm = all((flight.stage, job.shape) in warm for job in jobs)
        return max(self.hang_s if is_warm else self.first_s, self.factor * estimate_s)

    def look(self, core: Core, workers: Sequence[ev.WorkerInfo]) -> Effects:
        """What to do about the workers as their heartbeats show them."""
        effects: Effects = []
        for worker in workers:
            if not worker.hung:
                hangs_on = self._hangs_on(core, worker)
                if hangs_on:
                    effects += take_away(core, worker.name, hangs_on)
            elif worker.hung != DEAF and worker.motion.seq != int(worker.hung):
                log.warning("worker %s has let go of seq %s", worker.name, worker.hung)
                effects.append(ev.Mark(worker.name, ""))
        return effects

    def _hangs_on(self, core: Core, worker: ev.WorkerInfo) -> str:
        """The seq of the task that it does not get on with, DEAF, or ""."""
        motion, board = worker.motion, core.board
        if motion.seq:
            flight = board.flights.get(motion.seq)
            if flight is None or worker.name not in flight.members:
                return ""
            stuck = motion.still_s > self.limit_s(core, flight, worker.name)
            return str(flight.seq) if stuck else ""
        rank = board.ranks.get(worker.name)
        flight = board.flights.get(rank.running.seq) if rank and rank.running else None
        if flight is None:
            return ""
        waits_s = min(motion.still_s, motion.at_s - flight.begins_s)
        return DEAF if waits_s > self.limit_s(core, flight, worker.name) else ""


def take_away(core: Core, worker: str, hangs_on: str) -> Effects:
    """Take everything from a worker that hangs, and give it nothing more."""
    log.warning("worker %s hangs (%s): its tasks are taken away", worker, hangs_on)
    core.board.retire(worker)
    effects: Effects = [ev.Mark(worker, hangs_on)]
    for flight in core.board.flights_of(worker):
        flight.voiding = True
        effects.append(ev.Void(flight.seq, flight.members, flight.jobs, forced=True))
    return effects
