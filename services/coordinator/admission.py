"""Who may enter: validation against the manifests, the deadline, what the queue allows. Pure.

A job is accepted, accepted as best effort (it will probably miss its deadline, and is told so), or
refused with the time after which it is worth trying again. The verdict and an eta stand in the
job's record from its first moment.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from common.checks import InvalidRequest
from common.job import ErrorCode, JobSpec
from common.params import PoolDefaults, accept
from common.push import content_of, id_of, read_push
from services.coordinator.events import Pushed, Refuse, Submit
from services.coordinator.spread import Spread, in_hand_s
from services.coordinator.state import Job
from services.costs.model import CostModel
from services.policies.base import Candidate, Outlook, View
from services.policies.contained import Contained

log = logging.getLogger("slackwater.coordinator")


@dataclasses.dataclass(slots=True)
class Queue:
    """The pool as a push finds it."""

    policy: Contained
    view: View
    costs: CostModel
    spread: Spread
    active: int  # those that were accepted a moment ago included
    is_active: Callable[[str], bool]
    # Accepted a moment ago as best effort: the policy does not know of them yet.
    late: tuple[Candidate, ...]
    now: float

    def outlook(self, candidate: Candidate) -> Outlook:
        found = self.policy.outlook(candidate, self.view, self.now)
        if found.fits:
            return found  # those that are late go behind it
        before = (c for c in self.late if c.deadline_s <= candidate.deadline_s)
        ahead_s = found.ahead_s + sum(c.remaining_s for c in before)
        return Outlook(ahead_s, found.fits)

    def wait_s(self, model: str, ahead_s: float = math.inf) -> float:
        """Until a job of `model` would begin, with so much before it; by default with all that
        waits or is under way."""
        work_s = in_hand_s(self.view, self.now)
        for other, left_s in self.policy.waiting_s.items():
            work_s[other] = work_s.get(other, 0.0) + max(0.0, left_s)
        for candidate in self.late:
            work_s[candidate.model] = work_s.get(candidate.model, 0.0) + candidate.remaining_s
        return self.spread.wait_s(model, self.view, work_s, ahead_s)


@dataclasses.dataclass(slots=True)
class Admission:
    """`admit` "all": only a full queue refuses. "feasible": also what would miss its deadline."""

    pool: PoolDefaults
    max_jobs: int = 10_000  # active jobs
    max_backlog_s: float = math.inf  # work before a push, in seconds of all its ranks together
    slo_scale: float = 3.0  # default deadline: arrival + slo_scale × standalone time
    admit: Literal["all", "feasible"] = "all"

    def decide(
        self, event: Pushed, manifests: Mapping[str, Mapping[str, Any]], queue: Queue
    ) -> Submit | Refuse:
        """A Submit whose spec has its deadline, or a Refuse that says what to change."""
        try:
            spec = accept(read_push(event.entry, event.raw), manifests, self.pool)
        except InvalidRequest as error:
            own = id_of(event.entry, event.raw)
            return Refuse(
                entry=event.entry,
                ids=tuple(dict.fromkeys((event.entry, own))),
                content=content_of(event.raw),
                error_code=ErrorCode.INVALID_REQUEST,
                error=str(error),
                field=error.field,
            )
        except Exception as error:  # a push may be refused, but never stop those behind it
            log.exception("push %s could not be read", event.entry)
            return Refuse(
                entry=event.entry,
                ids=(event.entry,),
                content="",
                error_code=ErrorCode.INVALID_REQUEST,
                error=f"payload: could not be read ({type(error).__name__}); please report this",
                field="payload",
            )
        if queue.is_active(spec.id):  # the script says whether it is the same job
            return self._place(spec, manifests[spec.model], queue, refuses=False)
        return self._full(spec, queue) or self._place(spec, manifests[spec.model], queue)

    def _full(self, spec: JobSpec, queue: Queue) -> Refuse | None:
        if queue.active >= self.max_jobs:
            wait_s = max(1.0, queue.wait_s(spec.model) / max(1, queue.active))
            what = f"{queue.active} jobs are active and {self.max_jobs} may be"
            return _later(spec, ErrorCode.QUEUE_FULL, what, wait_s)
        if math.isinf(self.max_backlog_s):
            return None
        backlog_s = queue.wait_s(spec.model)
        if backlog_s <= self.max_backlog_s:
            return None
        wait_s = max(1.0, backlog_s - self.max_backlog_s)
        what = f"{backlog_s:.0f} s of work wait and {self.max_backlog_s:.0f} s may"
        return _later(spec, ErrorCode.QUEUE_FULL, what, wait_s)

    def _place(
        self, spec: JobSpec, manifest: Mapping[str, Any], queue: Queue, refuses: bool = True
    ) -> Submit | Refuse:
        job = Job.of(spec, manifest)
        alone = job.alone(queue.costs)
        alone_s = alone.seconds
        if spec.deadline_s is None:
            scale = self.slo_scale if spec.slo_scale is None else spec.slo_scale
            spec = dataclasses.replace(spec, deadline_s=spec.arrival_s + scale * alone_s)
            job.spec, job.deadline_s = spec, spec.arrival_s + scale * alone_s
        candidate = job.candidate(queue.costs)
        outlook = queue.outlook(candidate)
        eta_s = queue.now + queue.wait_s(spec.model, outlook.ahead_s) + alone_s
        late_s = eta_s - (job.deadline_s + queue.view.error * alone_s)
        misses = late_s > 0 if outlook.fits is None else not outlook.fits
        # Nobody is turned away for an estimate that may be wrong by as much.
        refuses = refuses and (self.admit == "feasible" or spec.on_late == "drop")
        if refuses and misses and alone.known:
            return self._unreachable(spec, alone_s, late_s, queue)
        margin_s = 0.0 if alone.known else alone.margin_s
        return Submit(spec, candidate, eta_s, margin_s, misses, job.batch)

    def _unreachable(self, spec: JobSpec, alone_s: float, late_s: float, queue: Queue) -> Refuse:
        left_s = (spec.deadline_s or 0.0) - queue.now
        if alone_s > left_s:
            return Refuse(
                entry=spec.entry,
                ids=(spec.entry,),
                content=spec.content,
                error_code=ErrorCode.DEADLINE_UNREACHABLE,
                error=f"deadline_ms: it is due in {1000 * max(0.0, left_s):.0f} ms and takes "
                f"{1000 * alone_s:.0f} ms alone; give it more time, fewer steps or a smaller size",
                field="deadline_ms",
            )
        if late_s > 0:
            what, wait_s = f"with the jobs before it, it would be {late_s:.1f} s late", late_s
        else:  # until there is room for it once as much as it takes has been done
            what = "it would make jobs late that were promised their deadlines, or be late itself"
            wait_s = queue.wait_s(spec.model, alone_s)
        return _later(spec, ErrorCode.DEADLINE_UNREACHABLE, what, max(1.0, wait_s))


def _later(spec: JobSpec, code: ErrorCode, what: str, wait_s: float) -> Refuse:
    """Refused for now. Not under its own id: the same push must be able to succeed later."""
    wait_s = round(wait_s, 1)
    return Refuse(
        entry=spec.entry,
        ids=(spec.entry,),
        content=spec.content,
        error_code=code,
        error=f"{what}; try again in {wait_s} s",
        retry_after_s=wait_s,
    )
