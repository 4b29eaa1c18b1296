"""How long jobs may wait to begin and how long they may run, where they say so. Pure.

One heap of alarms, two entries a job at most. An alarm that comes too early, since a job that
waits between two chunks does not run, is set again for the earliest moment that is left.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from common.job import ErrorCode, JobStatus
from services.coordinator import events as ev
from services.coordinator.state import Job

if TYPE_CHECKING:
    from services.coordinator.core import Core, Effects

QUEUE, RUN = "queue", "run"
# A queued task is asked back; its answer, or its start, is looked for after this.
AGAIN_S = 0.25
# Alarms of ended jobs stay until there are this many and they are most of the heap.
SLACK_ENTRIES = 64


class Limits:
    def __init__(self) -> None:
        self._alarms: list[tuple[float, str, str]] = []  # when (s since the epoch), kind, job

    def watch(self, job: Job) -> None:
        """A job came, or was taken up again."""
        spec = job.spec
        if spec.queue_timeout_s is not None:
            self._set(spec.arrival_s + spec.queue_timeout_s, QUEUE, spec.id)
        if spec.run_timeout_s is not None:
            self._set(spec.arrival_s + spec.run_timeout_s, RUN, spec.id)

    def _set(self, at: float, kind: str, job: str) -> None:
        heapq.heappush(self._alarms, (at, kind, job))

    def next_s(self) -> float | None:
        """When `due` is to be asked."""
        return self._alarms[0][0] if self._alarms else None

    def due(self, core: Core, now: float) -> Effects:
        """End the jobs whose time is over."""
        effects: Effects = []
        while self._alarms and self._alarms[0][0] <= now:
            _, kind, name = heapq.heappop(self._alarms)
            job = core.jobs.get(name)
            if job is None or job.ending:
                continue
            effects += self._queue(core, job, now) if kind == QUEUE else self._run(core, job, now)
        if len(self._alarms) > SLACK_ENTRIES + 4 * len(core.jobs):
            self._alarms = [alarm for alarm in self._alarms if alarm[2] in core.jobs]
            heapq.heapify(self._alarms)
        return effects

    def _queue(self, core: Core, job: Job, now: float) -> Effects:
        """A task that is on its worker's stream may have begun: asked back, it tells."""
        if job.begun or job.started_s is not None:
            return []
        if not job.seq:
            return expire(core, job, now)
        self._set(now + AGAIN_S, QUEUE, job.spec.id)
        flight = core.board.flights.get(job.seq)
        if flight is None or flight.voiding:
            return []
        flight.voiding = True
        return [ev.Void(flight.seq, flight.members, flight.jobs, forced=False)]

    def _run(self, core: Core, job: Job, now: float) -> Effects:
        left_s = (job.spec.run_timeout_s or 0.0) - ran_s(core, job, now)
        if left_s > 1e-3:
            self._set(now + left_s, RUN, job.spec.id)
            return []
        return out_of_time(core, job, now)


def has_waited_out(job: Job, now: float) -> bool:
    """Whether it may no longer begin."""
    limit_s = job.spec.queue_timeout_s
    if limit_s is None or job.begun or job.started_s is not None:
        return False
    return now >= job.spec.arrival_s + limit_s


def expire(core: Core, job: Job, now: float) -> Effects:
    waited_s = job.spec.queue_timeout_s or 0.0
    what = f"queue_timeout_ms: it had not begun after {1000 * waited_s:.0f} ms"
    return core.end(job, JobStatus.EXPIRED, now, ErrorCode.QUEUE_TIMEOUT, what)


def ran_s(core: Core, job: Job, now: float) -> float:
    """How long ranks have worked on a job, its running task included."""
    ran = sum(job.seconds.values())
    flight = core.board.flights.get(job.seq) if job.seq else None
    if flight is None:
        return ran
    ranks = [core.board.ranks.get(name) for name in flight.members]
    runs = any(r is None or (r.running is not None and r.running.seq == flight.seq) for r in ranks)
    return ran + (max(0.0, now - flight.begins_s) if runs else 0.0)


def is_out_of_time(job: Job) -> bool:
    limit_s = job.spec.run_timeout_s
    return limit_s is not None and sum(job.seconds.values()) >= limit_s


def out_of_time(core: Core, job: Job, now: float) -> Effects:
    limit_s = job.spec.run_timeout_s or 0.0
    what = f"run_timeout_ms: it ran for longer than {1000 * limit_s:.0f} ms"
    return core.end(job, JobStatus.FAILED, now, ErrorCode.RUN_TIMEOUT, what)
