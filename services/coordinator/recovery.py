"""Taking a job up again from its records, at the start of a coordinator's lead. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.job import JobStatus
from services.coordinator import events as ev
from services.coordinator.state import FINISH, Flight, Job, died, position

if TYPE_CHECKING:
    from services.coordinator.core import Core, Effects


def recover(core: Core, event: ev.Recovered, now: float) -> Effects:
    """Put one job where it was: ended but for its finish, ready, or in flight."""
    job = core.remember(event.spec)
    job.stage, job.step, job.seq = event.stage, event.step, event.seq
    job.handles, job.outputs = event.handles, event.outputs
    place = position(job.stage, job.step)
    job.reached = place if event.reached is None else max(place, event.reached)
    # Its next start would have counted anew.
    moved_on = event.reached is not None and place > event.reached
    job.attempts, job.started_s = 0 if moved_on else event.attempts, event.started_s
    job.seconds = dict(event.seconds)
    if event.cancel:
        return core.end(job, JobStatus.CANCELED, now)
    if job.seq:
        return _in_flight(core, job, event.flight, now)
    if job.stage == FINISH:
        return core.end(job, JobStatus.SUCCEEDED, now)
    return core.try_again(job, event.error_code, event.error or died(job.attempts), now)


def _in_flight(core: Core, job: Job, found: ev.RecoveredFlight | None, now: float) -> Effects:
    if found is None or found.state not in ("queued", "running"):
        members = found.members if found else ()
        jobs = found.jobs if found else (job.spec.id,)
        lost = Flight(job.seq, job.stage, members, jobs, job.candidate(core.costs), 0.0)
        core.board.flights[job.seq] = lost
        return [ev.Void(job.seq, members, jobs, forced=True)]
    if job.seq in core.board.flights:
        return []
    flight = Flight(
        seq=job.seq,
        stage=found.stage,
        members=found.members,
        jobs=found.jobs,
        candidate=job.candidate(core.costs),
        expected_s=found.expected_s,
        begins_s=now,
        ends_s=now + found.expected_s,
        silent=set(found.members),
    )
    core.board.launch(flight)
    if all(member in core.board.workers for member in found.members):
        return []
    flight.voiding = True
    return [ev.Void(flight.seq, flight.members, flight.jobs, forced=True)]
