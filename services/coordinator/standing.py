"""Where each job stands in the queue, for its public record: said once a second, as of when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.coordinator.events import Standing
from services.coordinator.spread import Ahead

if TYPE_CHECKING:
    from services.coordinator.core import Core

# Beyond this many, a job's standing is brought up to date less often than once a second.
MOST = 200


def standings(core: Core, now: float) -> tuple[Standing, ...]:
    """Positions, slack and eta of the first MOST waiting jobs and of all running ones.

    The eta assumes the present order, no arrivals, and that denoisers share evenly the work that
    they can do (spread.py).
    """
    out = []
    ahead = Ahead(core.spread, core.view)
    for flight in core.board.flights.values():
        for name in flight.jobs:
            job = core.jobs.get(name)
            if job is None or job.ending:
                continue
            left = job.remaining_s(core.costs)
            ahead.add(job.spec.model, left)
            out.append(Standing(name, None, job.deadline_s - now - left, now + left))
    position = 0
    for name in core.policy.order(now):
        job = core.jobs.get(name)
        if job is None or job.ending:
            continue
        left = job.remaining_s(core.costs)
        eta = now + ahead.wait_s(job.spec.model) + left
        out.append(Standing(name, position, job.deadline_s - now - left, eta))
        ahead.add(job.spec.model, left)
        position += 1
        if position >= MOST:
            break
    return tuple(out)
