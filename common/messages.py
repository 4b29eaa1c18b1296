"""What goes over the streams: tasks to workers, reports back. msgpack, one version for all.

Everything is plain lists, maps, strings, numbers and bytes: nothing is ever looked up by a
name that came over the wire, and unpacking never builds an object of the sender's choosing.
A task message stays under 8 kB: tensors travel by handle, long prompts by the trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import msgpack

from common.handles import Handle
from common.stage import Row, Task

VERSION = 1
# A stream entry larger than this slows every reader behind it; longer params are left out of
# the message and read from the trajectory record instead.
TASK_LIMIT_BYTES = 8_000


class MessageError(ValueError):
    """A message that is not of this version or not of this shape."""


def pack(value: Any) -> bytes:
    out: bytes = msgpack.packb(value, use_bin_type=True)
    return out


def unpack(data: bytes) -> Any:
    """Plain values only; raises MessageError for bytes that are not one whole msgpack value."""
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except Exception as error:  # msgpack raises half a dozen unrelated types
        raise MessageError(f"not msgpack: {error}") from error


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A row before its worker has seen it: params and handles still packed."""

    job: str
    start: int
    stop: int
    exact: bool
    params: bytes  # msgpack map; empty when it stands in the trajectory only
    handles: bytes  # msgpack map part -> Handle.to_wire()
    latest_s: float = inf  # see common.stage.Row
    traceparent: str = ""


def pack_task(
    seq: int, stage: str, model: str, members: tuple[str, ...], rows: list[TaskRow]
) -> bytes:
    body = _task_body(seq, stage, model, members, rows, with_params=True)
    if len(body) > TASK_LIMIT_BYTES:
        body = _task_body(seq, stage, model, members, rows, with_params=False)
    return body


def _task_body(
    seq: int,
    stage: str,
    model: str,
    members: tuple[str, ...],
    rows: list[TaskRow],
    with_params: bool,
) -> bytes:
    wire = [
        [
            r.job,
            r.start,
            r.stop,
            r.exact,
            r.params if with_params else b"",
            r.handles,
            r.latest_s,
            *([r.traceparent] if r.traceparent else ()),  # earlier workers know no such field
        ]
        for r in rows
    ]
    return pack([VERSION, seq, stage, model, list(members), wire])


def unpack_task(data: bytes) -> tuple[Task, list[TaskRow]]:
    """The task, and its rows as they came (those with empty `params` need a look-up).

    Raises MessageError or HandleError for anything that is not a task of this version.
    """
    try:
        version, *rest = unpack(data)
        if version != VERSION:
            raise MessageError(f"task message of version {version}; this worker speaks {VERSION}")
        seq, stage, model, members, wire = rest
        raw = [TaskRow(*row) for row in wire]
        rows = tuple(
            Row(
                job=r.job,
                params=unpack(r.params) if r.params else {},
                handles=unpack_handles(r.handles),
                start=r.start,
                stop=r.stop,
                exact=r.exact,
                latest_s=r.latest_s,
                traceparent=r.traceparent,
            )
            for r in raw
        )
        return Task(seq=seq, stage=stage, model=model, rows=rows, members=tuple(members)), raw
    except MessageError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise MessageError(f"not a task message: {error}") from error


def seq_of(data: bytes) -> int:
    """The seq of a task message of any version; 0 where not even that can be read."""
    try:
        _, seq, *_ = unpack(data)
    except (MessageError, TypeError, ValueError):
        return 0
    return seq if isinstance(seq, int) else 0


def pack_handles(handles: dict[str, Handle]) -> bytes:
    return pack({part: handle.to_wire() for part, handle in handles.items()})


def unpack_handles(data: bytes) -> dict[str, Handle]:
    if not data:
        return {}
    return {part: Handle.from_wire(wire) for part, wire in unpack(data).items()}


@dataclass(frozen=True, slots=True)
class ReportRow:
    """What the coordinator hears of one row."""

    job: str
    step: int
    next_stage: str
    handles: bytes = b""
    outputs: tuple[dict[str, Any], ...] = ()  # mime, width, height, bytes, sha256, seq
    seconds: float = 0.0
    error_code: str = ""
    error: str = ""
    step_s: float = 0.0
    rows: int = 0  # of the largest forward pass it shared with other jobs; 0: it ran alone
    skipped: int = 0  # as in common.stage.Outcome


@dataclass(frozen=True, slots=True)
class Report:
    seq: int
    worker: str
    stage: str
    rows: tuple[ReportRow, ...]
    seconds: float = 0.0
    returned: bool = False  # every row is handed back as it was
    draining: bool = False  # the worker takes no more tasks


def pack_report(report: Report) -> bytes:
    rows = [
        [
            r.job,
            r.step,
            r.next_stage,
            r.handles,
            list(r.outputs),
            r.seconds,
            r.error_code,
            r.error,
            r.step_s,
            r.rows,
            r.skipped,
        ]
        for r in report.rows
    ]
    return pack(
        [
            VERSION,
            report.seq,
            report.worker,
            report.stage,
            rows,
            report.seconds,
            report.returned,
            report.draining,
        ]
    )


def unpack_report(data: bytes) -> Report:
    """Raises MessageError for anything that is not a report of this version."""
    try:
        version, *rest = unpack(data)
        if version != VERSION:
            raise MessageError(f"report of version {version}; this coordinator speaks {VERSION}")
        seq, worker, stage, wire, seconds, returned, draining = rest
        rows = tuple(
            ReportRow(job, step, next_stage, handles, tuple(outputs), *rest)
            for job, step, next_stage, handles, outputs, *rest in wire
        )
    except MessageError:
        raise
    except (TypeError, ValueError) as error:
        raise MessageError(f"not a report: {error}") from error
    return Report(seq, worker, stage, rows, seconds, returned, draining)
