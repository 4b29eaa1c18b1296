"""One line a transition, its job in each, with the same as fields for a log store."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from common.job import JobStatus
from common.messages import ReportRow
from common.stage import DENOISE
from services.coordinator import events as ev

if TYPE_CHECKING:
    from services.coordinator.core import Core

log = logging.getLogger("slackwater.coordinator")


class Narration:
    """Implements services.coordinator.watching.Watcher."""

    def heard(self, event: ev.Event, core: Core, now: float) -> None:
        if isinstance(event, ev.Reported) and log.isEnabledFor(logging.INFO):
            report = event.report
            for row, counts in zip(report.rows, event.accepted, strict=False):
                self._reported(event, row, counts, core)

    def _reported(self, event: ev.Reported, row: ReportRow, counts: bool, core: Core) -> None:
        report, job = event.report, core.jobs.get(row.job)
        fields: dict[str, Any] = {
            "job": row.job, "seq": report.seq, "stage": report.stage, "worker": report.worker,
            "step": row.step,
        }  # fmt: skip
        where = f"on {report.worker} (seq {report.seq})"
        if report.returned:
            said = f"was handed back {where}"
        elif not counts:
            said = f"{report.stage} came too late and did not count {where}"
        elif row.error_code:
            fields["error_code"] = row.error_code
            said = f"{report.stage} failed {where}: {row.error_code}: {row.error}"
        else:
            fields["seconds"] = round(row.seconds, 6)
            at = f" {row.step}/{job.steps}" if job is not None and report.stage == DENOISE else ""
            said = f"{report.stage}{at} done in {row.seconds:.3f} s {where}"
        log.info("job %s %s", row.job, said, extra=fields)

    def did(self, effect: ev.Effect, verdict: str, core: Core, now: float) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        match effect:
            case ev.Dispatch() if verdict == "dispatched":
                self._dispatched(effect)
            case ev.Submit(spec=spec) if verdict.startswith("created"):
                slack_s = round(effect.candidate.slack_s(now), 3)
                kind = "as best effort" if effect.best_effort else f"with {slack_s:.1f} s of slack"
                said = {"job": spec.id, "model": spec.model, "slack_s": slack_s}
                log.info("job %s accepted %s", spec.id, kind, extra=said)
            case ev.Refuse(ids=ids, error_code=code, error=error):
                said = {"job": ids[-1], "error_code": code}
                log.info("push %s refused: %s", ids[-1], error, extra=said)
            case ev.NoteCancel(job=job) if verdict in ("canceling", "early"):
                log.info("job %s: cancel asked for", job, extra={"job": job})
            case ev.Finish() if verdict == "finished":
                self._finished(effect, now)
            case ev.Yield(seq=seq):
                self._of_flight(seq, core, "is asked to yield")
            case ev.Void(seq=seq, forced=forced) if verdict == "void":
                lost = " from a worker that is gone or hangs" if forced else ""
                self._of_flight(seq, core, f"was taken back{lost}")
            case ev.Rewind(job=job) if verdict == "rewound":
                log.info("job %s begins again: its state was lost", job, extra={"job": job})
            case ev.Shorten(spec=spec, steps=steps):
                said = {"job": spec.id, "steps": steps}
                log.info("job %s is cut to %d steps", spec.id, steps, extra=said)
            case ev.Mark(worker=worker, hung=hung):
                said = {"worker": worker}
                if hung:
                    log.warning("worker %s hangs (%s)", worker, hung, extra=said)
                else:
                    log.info("worker %s gets on again", worker, extra=said)

    def _dispatched(self, effect: ev.Dispatch) -> None:
        members = " ".join(effect.members)
        slacks = effect.slacks_s or (None,) * len(effect.rows)
        for row, slack_s in zip(effect.rows, slacks, strict=True):
            steps = f" {row.start}–{row.stop}" if row.stop else ""
            slack = "" if slack_s is None else f", slack {slack_s:.1f} s"
            log.info(
                "job %s %s%s → %s (seq %d%s)", row.job, effect.stage, steps, members, effect.seq,
                slack,
                extra={
                    "job": row.job, "seq": effect.seq, "stage": effect.stage, "worker": members,
                    "step": row.start, "stop": row.stop,
                    "slack_s": None if slack_s is None else round(slack_s, 3),
                },
            )  # fmt: skip

    def _finished(self, effect: ev.Finish, now: float) -> None:
        spec, status = effect.spec, effect.status
        late_s = now - (spec.deadline_s or now)
        fields: dict[str, Any] = {
            "job": spec.id, "status": str(status), "slack_s": round(-late_s, 3),
            "total_s": effect.timings.get("total_s"),
        }  # fmt: skip
        if status is JobStatus.SUCCEEDED:
            when = "on time" if late_s <= 0 else f"{late_s:.1f} s late"
            said = f"{when}, after {effect.timings.get('total_s', 0.0):.2f} s"
        else:
            said = effect.error
            fields["error_code"] = effect.error_code
        log.info("job %s %s%s", spec.id, status, said and f" {said}", extra=fields)

    def _of_flight(self, seq: int, core: Core, said: str) -> None:
        flight = core.board.flights.get(seq)
        members = " ".join(flight.members) if flight is not None else ""
        stage = flight.stage if flight is not None else ""
        for job in flight.jobs if flight is not None else ("?",):
            log.info(
                "job %s %s (seq %d)", job, said, seq,
                extra={"job": job, "seq": seq, "stage": stage, "worker": members},
            )  # fmt: skip
