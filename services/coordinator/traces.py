"""The coordinator's part of a job's trace: the job as a whole, and each wait for a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.tracing import Spans
from services.coordinator import events as ev

if TYPE_CHECKING:
    from services.coordinator.core import Core

# Beyond so many that wait no more, they are looked for.
FEW = 1000


class JobTraces:
    """Implements services.coordinator.watching.Watcher."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._ready: dict[str, float] = {}  # since when each waiting job has waited

    def heard(self, event: ev.Event, core: Core, now: float) -> None:
        match event:
            case ev.Submitted(spec=spec, verdict="created"):
                self._ready[spec.id] = spec.arrival_s
            case ev.Reported(report=report, accepted=accepted):
                self._forget_others(core)
                for row, counts in zip(report.rows, accepted, strict=False):
                    if counts:
                        self._ready[row.job] = now
            case ev.Voided(seq=seq, verdict="void"):
                flight = core.board.flights.get(seq)
                for job in flight.jobs if flight is not None else ():
                    self._ready[job] = now

    def _forget_others(self, core: Core) -> None:
        """Jobs that ended while another coordinator led."""
        if len(self._ready) > 2 * len(core.jobs) + FEW:
            self._ready = {job: at for job, at in self._ready.items() if job in core.jobs}

    def did(self, effect: ev.Effect, verdict: str, core: Core, now: float) -> None:
        match effect:
            case ev.Dispatch() if verdict == "dispatched":
                self._dispatched(effect, core, now)
            case ev.Finish() if verdict in ("finished", "gone"):
                self._ready.pop(effect.spec.id, None)
                if verdict == "finished":
                    self._finished(effect, now)

    def _dispatched(self, effect: ev.Dispatch, core: Core, now: float) -> None:
        """The wait that ends with this task: for encode since the job's arrival."""
        slacks = effect.slacks_s or (None,) * len(effect.rows)
        for row, slack_s in zip(effect.rows, slacks, strict=True):
            since, job = self._ready.pop(row.job, None), core.jobs.get(row.job)
            if since is None or job is None:  # it was taken up by a new leader
                continue
            trace = self._spans.trace(row.job, job.spec.traceparent)
            if trace.sampled:
                about = {
                    "slackwater.job": row.job, "slackwater.seq": effect.seq,
                    "slackwater.stage": effect.stage, "slackwater.slack_s": slack_s,
                    "slackwater.worker": " ".join(effect.members),
                }  # fmt: skip
                self._spans.add("queue", trace.trace, trace.job, since, now, about)

    def _finished(self, effect: ev.Finish, now: float) -> None:
        spec = effect.spec
        trace = self._spans.trace(spec.id, spec.traceparent)
        if not trace.sampled:
            return
        about = {
            "slackwater.job": spec.id, "slackwater.model": spec.model,
            "slackwater.status": str(effect.status), "slackwater.priority": spec.priority,
            "slackwater.slack_s": (spec.deadline_s or now) - now,
            "slackwater.steps": spec.params.get("num_inference_steps"),
            "slackwater.error_code": effect.error_code or None,
            **{f"slackwater.{name}": value for name, value in effect.timings.items()},
        }  # fmt: skip
        self._spans.add(
            "job", trace.trace, trace.parent, spec.arrival_s, now, about,
            span=trace.job, error=effect.error,
        )  # fmt: skip
