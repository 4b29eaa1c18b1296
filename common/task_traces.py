"""A worker's part of its jobs' traces: each task it ran, and its way back into Redis."""

from __future__ import annotations

from common.ran import Ran
from common.stage import DENOISE, Outcome, Row
from common.tracing import Spans


class TaskTraces:
    """A watcher (common.ran): a span for each row of a task, in the trace of its job."""

    def __init__(self, spans: Spans, worker: str) -> None:
        self._spans, self._worker = spans, worker

    def __call__(self, ran: Ran) -> None:
        if not ran.returned:
            for row, outcome in zip(ran.task.rows, ran.outcomes, strict=False):
                if outcome.done:  # else it was of a job that had ended
                    self._row(ran, row, outcome)

    def _row(self, ran: Ran, row: Row, outcome: Outcome) -> None:
        task = ran.task
        trace = self._spans.trace(row.job, row.traceparent)
        if not trace.sampled:
            return
        about = {
            "slackwater.job": row.job, "slackwater.seq": task.seq, "slackwater.stage": task.stage,
            "slackwater.model": task.model, "slackwater.worker": self._worker,
            "slackwater.state_wait_s": ran.waited_s, "slackwater.verdict": ran.verdict,
        }  # fmt: skip
        if task.stage == DENOISE:
            about |= {
                "slackwater.step": row.start, "slackwater.reached": outcome.step,
                "slackwater.step_s": outcome.step_s, "slackwater.batch_rows": max(1, outcome.rows),
                "slackwater.task_jobs": len(task.rows),
            }  # fmt: skip
        end_s = ran.begun_s + ran.seconds
        span = self._spans.add(
            task.stage, trace.trace, trace.job, ran.begun_s, end_s, about, error=outcome.error
        )
        sent = {"slackwater.files": len(outcome.outputs) or None, "slackwater.seq": task.seq}
        self._spans.add("report", trace.trace, span, end_s, ran.reported_s, sent)
