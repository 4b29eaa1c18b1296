"""Who may enter: validation against the manifests, the deadline, what the queue allows. Pure.

A job is accepted, accepted as best effort (it will probably miss its deadline, and is told so), or
refused with the time after which it is worth trying again. The verdict and an eta stand in the
job's record from its first moment.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from common.checks import InvalidRequest
from common.job import ErrorCode, JobSpec
from common.params import PoolDefaults, accept
from common.push import content_of, id_of, read_push
from common.stage import DENOISE
from services.coordinator.events import Pushed, Refuse, Submit
from services.coordinator.state import Job
from services.costs.model import CostModel
from services.policies.base import Candidate, Outlook, View, under_way_s
from services.policies.contained import Contained

log = logging.getLogger("slackwater.coordinator")


@dataclasses.dataclass(slots=True)
class Queue:
    """The pool as a push finds it."""

    policy: Contained
    view: View
    costs: CostModel
    active: int
    entering: tuple[Candidate, ...]  # accepted a moment ago, not in the policy's index yet
    now: float

    def ranks_of(self, model: str) -> int:
        """Denoisers that could run `model`; one that is to come, if there is none."""
        ranks = self.view.by_stage.get(DENOISE, ())
        return sum(model in rank.models for rank in ranks) or 1

    def outlook(self, candidate: Candidate) -> Outlook:
        found = self.policy.outlook(candidate, self.view, self.now)
        before = (c for c in self.entering if c.deadline_s <= candidate.deadline_s)
        ahead_s = found.ahead_s + sum(c.remaining_s for c in before)
        return Outlook(ahead_s, found.fits)

    def backlog_s(self, model: str) -> float:
        """All work that waits or is under way, spread over the ranks."""
        waiting_s = self.policy.waiting_s + sum(c.remaining_s for c in self.entering)
        work_s = waiting_s + under_way_s(self.view, self.now, lambda _: True)
        return work_s / self.ranks_of(model)


@dataclasses.dataclass(slots=True)
class Admission:
    """`admit` "all": only a full queue refuses. "feasible": also what would miss its deadline."""

    pool: PoolDefaults
    max_jobs: int = 10_000  # active jobs
    max_backlog_s: float = math.inf  # work before a push, in seconds of all ranks together
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
        return self._full(spec, queue) or self._place(spec, manifests[spec.model], queue)

    def _full(self, spec: JobSpec, queue: Queue) -> Refuse | None:
        active = queue.active + len(queue.entering)
        if active >= self.max_jobs:
            wait_s = max(1.0, queue.backlog_s(spec.model) / active)
            what = f"{active} jobs are active and {self.max_jobs} may be"
            return _later(spec, ErrorCode.QUEUE_FULL, what, wait_s)
        if math.isinf(self.max_backlog_s):
            return None
        backlog_s = queue.backlog_s(spec.model)
        if backlog_s <= self.max_backlog_s:
            return None
        wait_s = max(1.0, backlog_s - self.max_backlog_s)
        what = f"{backlog_s:.0f} s of work wait and {self.max_backlog_s:.0f} s may"
        return _later(spec, ErrorCode.QUEUE_FULL, what, wait_s)

    def _place(self, spec: JobSpec, manifest: Mapping[str, Any], queue: Queue) -> Submit | Refuse:
        job = Job.of(spec, manifest)
        alone = job.alone(queue.costs)
        alone_s = alone.seconds
        if spec.deadline_s is None:
            scale = self.slo_scale if spec.slo_scale is None else spec.slo_scale
            spec = dataclasses.replace(spec, deadline_s=spec.arrival_s + scale * alone_s)
            job.spec, job.deadline_s = spec, spec.arrival_s + scale * alone_s
        candidate = job.candidate(queue.costs)
        outlook = queue.outlook(candidate)
        eta_s = queue.now + outlook.ahead_s / queue.ranks_of(spec.model) + alone_s
        late_s = eta_s - (job.deadline_s + queue.view.error * alone_s)
        misses = late_s > 0 if outlook.fits is None else not outlook.fits
        # Nobody is turned away for an estimate that may be wrong by as much.
        if misses and alone.known and (self.admit == "feasible" or spec.on_late == "drop"):
            return self._unreachable(spec, alone_s, max(late_s, 0.0), queue)
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
        what = f"with the jobs before it, it would be {late_s:.1f} s late"
        return _later(spec, ErrorCode.DEADLINE_UNREACHABLE, what, max(1.0, late_s))


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
