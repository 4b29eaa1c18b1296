"""Runs as Chrome trace events, which Perfetto and chrome://tracing open.

Format: “Trace Event Format”, JSON object form. A process is a stage (of one policy), a thread a
rank, a complete event a task; times are microseconds from the run's begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from services.timeline.runs import Bar, Row, Run

# Names of the colors that the viewers know, for what should catch the eye.
LATE_COLOR, REFUSED_COLOR = "terrible", "grey"


def trace_events(runs: Sequence[Run]) -> dict[str, Any]:
    """The whole file, ready for json.dump."""
    events: list[dict[str, Any]] = []
    process = 0
    for run in runs:
        stages = dict.fromkeys(run.stage_of[rank] for rank in run.ranks)
        for stage in stages:
            process += 1
            events += _process(run, stage, process, f"{run.name} · {stage}")
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(run: Run, stage: str, pid: int, name: str) -> Iterator[dict[str, Any]]:
    yield _about(pid, 0, "process_name", name=name)
    yield _about(pid, 0, "process_sort_index", sort_index=pid)
    threads = {rank: i for i, rank in enumerate(run.ranks, 1) if run.stage_of[rank] == stage}
    for rank, tid in threads.items():
        yield _about(pid, tid, "thread_name", name=f"{run.labels[rank]} ({rank})")
        yield _about(pid, tid, "thread_sort_index", sort_index=tid)
    for bar in run.bars:
        if bar.rank in threads:
            yield _complete(run, bar, pid, threads[bar.rank])


def _about(pid: int, tid: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _complete(run: Run, bar: Bar, pid: int, tid: int) -> dict[str, Any]:
    classes = {run.jobs[row.job].job.request_class for row in bar.rows if row.job in run.jobs}
    event = {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": " + ".join(row.job for row in bar.rows),
        "cat": ",".join([bar.stage, *sorted(classes)]),
        "ts": round(1e6 * (bar.start_s - run.begin_s), 3),
        "dur": round(1e6 * (bar.end_s - bar.start_s), 3),
        "args": {
            "seq": bar.seq,
            "model": bar.model,
            "yielded": bar.yielded,
            "rows": [_row(run, row) for row in bar.rows],
        },
    }
    if all(row.end == "refused" for row in bar.rows):
        event["cname"] = REFUSED_COLOR
    elif any(run.missed(row.job) for row in bar.rows):
        event["cname"] = LATE_COLOR
    return event


def _row(run: Run, row: Row) -> dict[str, Any]:
    args: dict[str, Any] = {
        "job": row.job,
        "steps": f"{row.start}–{row.stop}",
        "planned": row.planned,
        "slack_s": row.slack_s,
        "end": row.end,
    }
    found = run.jobs.get(row.job)
    if found is not None:
        job = found.job
        args |= {
            "class": job.request_class,
            "of": job.steps,
            "status": found.status,
            "deadline_s": round(job.deadline_s - run.begin_s, 3),
            "missed": run.missed(row.job),
        }
    return args
