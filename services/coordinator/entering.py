"""From a push to a job of the core: judged, submitted, and Redis' answer to that. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.job import ErrorCode, JobStatus
from services.coordinator import events as ev
from services.coordinator.admission import Queue

if TYPE_CHECKING:
    from services.coordinator.core import Core, Effects


def push(core: Core, event: ev.Pushed, now: float) -> Effects:
    entering = core.entering

    def is_active(job: str) -> bool:
        return job in core.jobs or job in entering

    queue = Queue(
        policy=core.policy,
        view=core.view,
        costs=core.costs,
        spread=core.spread,
        active=len(core.jobs) + len(entering),
        is_active=is_active,
        late=tuple(each.candidate for each in entering.values() if each.best_effort),
        now=now,
    )
    verdict = core.admission.decide(event, core.manifests, queue)
    if isinstance(verdict, ev.Submit) and not is_active(verdict.spec.id):
        entering[verdict.spec.id] = verdict
        if not verdict.best_effort:
            # Whoever is judged next, maybe of the same read, must see that it was promised room.
            core.policy.add(verdict.candidate)
    return [verdict]


def hold_back(core: Core) -> None:
    """Nothing is run that Redis has not accepted yet."""
    for job in core.entering:
        core.policy.remove(job)


def submitted(core: Core, event: ev.Submitted, now: float) -> Effects:
    spec = event.spec
    _answered(core, spec.id)
    if event.verdict == "conflict":
        return [
            ev.Refuse(
                entry=spec.entry,
                ids=(spec.entry,),
                content=spec.content,
                error_code=ErrorCode.CONFLICT,
                error=f"id: {spec.id!r} is taken by a job with other content; use another id",
                field="id",
            )
        ]
    if event.verdict == "same" or spec.id in core.jobs:
        return []
    job = core.remember(spec)
    if event.verdict == "created_canceled":
        return core.end(job, JobStatus.CANCELED, now)
    core.ready(job)
    return []


def submit_failed(core: Core, event: ev.SubmitFailed) -> Effects:
    spec = event.spec
    _answered(core, spec.id)
    return [
        ev.Refuse(
            entry=spec.entry,
            ids=(spec.entry,),
            content=spec.content,
            error_code=ErrorCode.QUEUE_FULL,
            error=f"Redis takes no new jobs ({event.reason}); try again in 10 s",
            retry_after_s=10.0,
        )
    ]


def _answered(core: Core, job: str) -> None:
    """Redis has said what becomes of it: from here on it is a job, or nothing."""
    if core.entering.pop(job, None) is not None:
        core.policy.remove(job)
