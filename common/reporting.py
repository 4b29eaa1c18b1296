"""From what became of a task's rows to the report: its rows, its script's arguments, the files."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.messages import ReportRow, pack, pack_handles
from common.scripts import Call, Transitions
from common.stage import DECODE, DENOISE, ENCODE, Outcome, Row, Task

# Errors of a stage are shown to users; a whole traceback goes to the log.
ERROR_CHARS = 500
# What a dead letter keeps of a traceback: its end, where the cause stands.
TRACE_CHARS = 4000
# Redis ends the connection that sends it a longer string (proto-max-bulk-len), and would again.
MOST_FILE_BYTES = 512 << 20

RowArgs = tuple[str, int, int, str, bytes, bytes, float, str, str]


def rows_of(task: Task, outcomes: Sequence[Outcome]) -> list[ReportRow]:
    """The rows of the report, one an outcome."""
    return [
        ReportRow(
            job=row.job,
            step=outcome.step if task.stage == DENOISE else row_step(row.params, task.stage),
            next_stage=_next_stage(task.stage, outcome, row.params),
            handles=pack_handles({**row.handles, **outcome.handles}),
            outputs=tuple(_files(task.seq, outcome)),
            seconds=outcome.seconds,
            error_code=outcome.error_code,
            error=outcome.error[:ERROR_CHARS],
            step_s=outcome.step_s,
            rows=outcome.rows,
            skipped=outcome.skipped,
        )
        for row, outcome in zip(task.rows, outcomes, strict=True)
    ]


def _files(seq: int, outcome: Outcome) -> list[dict[str, Any]]:
    return [
        {
            "mime": output.mime,
            "width": output.width,
            "height": output.height,
            "bytes": len(output.content),
            "sha256": hashlib.sha256(output.content).hexdigest(),
            "seq": seq,
            "n": n,
        }
        for n, output in enumerate(outcome.outputs)
    ]


def before_report(t: Transitions, task: Task, outcomes: Sequence[Outcome]) -> list[Call]:
    """What must stand in Redis before the report counts: finished files, and why rows failed."""
    calls = []
    for row, outcome in zip(task.rows, outcomes, strict=True):
        for n, output in enumerate(outcome.outputs):
            calls.append(t.upload(row.job, task.seq, n, output.content))
        if outcome.error_code:
            why = outcome.trace or outcome.error
            calls.append(t.trace(row.job, task.seq, why[-TRACE_CHARS:]))
    return calls


def args_of(row: ReportRow, outcome: Outcome, steps_of_job: Mapping[str, int]) -> RowArgs:
    """One row as the report script takes it; no steps: it is handed back as it was."""
    steps = steps_of_job.get(row.job, 1) if outcome.done else 0
    outputs = pack(list(row.outputs)) if row.outputs else b""
    return (
        row.job, row.step, steps, row.next_stage, row.handles, outputs, row.seconds,
        row.error_code, row.error,
    )  # fmt: skip


def deliverable(outcome: Outcome) -> Outcome:
    """`outcome`, or that its row failed where a file of it cannot be left in Redis."""
    most = max((len(output.content) for output in outcome.outputs), default=0)
    if most <= MOST_FILE_BYTES:
        return outcome
    error = (
        f"its file has {most} bytes; Redis takes {MOST_FILE_BYTES} at most: ask for a smaller "
        "size, fewer frames or another output_format"
    )
    return replace(outcome, outputs=[], error_code="storage_full", error=error)


def _next_stage(stage: str, outcome: Outcome, params: dict[str, Any]) -> str:
    if not outcome.done:
        return stage
    if stage == ENCODE:
        return DENOISE
    if stage == DENOISE:
        return DECODE if outcome.step >= steps_of(params) else DENOISE
    return "finish"


def row_step(params: dict[str, Any], stage: str) -> int:
    """Steps done of a job that is not in the denoise stage."""
    return 0 if stage == ENCODE else steps_of(params)


def steps_of(params: dict[str, Any]) -> int:
    return int(params.get("num_inference_steps") or 1)


def failed(row: Row, error: BaseException) -> Outcome:
    """The outcome of a row whose task raised `error`."""
    what = "".join(traceback.format_exception_only(error)).strip()
    code = "stage_error"
    kind = getattr(error, "kind", "")
    if kind in ("lost", "corrupt", "full"):
        code = "storage_full" if kind == "full" else "state_lost"
    elif isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
        code = "out_of_memory"
    trace = "".join(traceback.format_exception(error))
    return Outcome(row.job, step=row.start, error_code=code, error=what, trace=trace[-TRACE_CHARS:])
