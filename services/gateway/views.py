"""A job's records read in one moment, and the JSON that HTTP clients see of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common import asks
from common.asks import Ask, Plan, Ticket
from common.job import JobSpec, JobStatus, Result
from common.keys import Keys
from common.record import JobRecord
from services.gateway.links import Links

# OpenAI's four words for a video; ours say more.
VIDEO_STATUS = {
    JobStatus.QUEUED: "queued",
    JobStatus.RUNNING: "in_progress",
    JobStatus.SUCCEEDED: "completed",
}
# Columns of a job's read, in order: record, result, specification while it is active, and how
# long its first file stays (ms).
COLUMNS = 4


@dataclass(frozen=True, slots=True)
class View:
    """A job as found at one moment; `expires_at` is when its files go, in Unix seconds."""

    record: JobRecord
    result: Result | None = None
    spec: JobSpec | None = None
    expires_at: int | None = None

    @property
    def params(self) -> dict[str, Any]:
        """The effective parameters; empty for a push that nobody has read yet."""
        if self.result is not None:
            return dict(self.result.params)
        if self.spec is None:
            return {}
        spec = self.spec
        own = {"on_late": spec.on_late, "exact": spec.exact, "user": spec.user}
        return {**spec.params, "model": spec.model, "priority": spec.priority, **own}


def views(keys: Keys, jobs: Sequence[str]) -> Plan[list[View | None]]:
    """Jobs as they stand; None for one without a record."""
    found: list[View | None] = []
    for at in range(0, len(jobs), asks.PAGE):
        page = jobs[at : at + asks.PAGE]
        commands: list[tuple[str, ...]] = []
        for job in page:
            commands += [
                ("HGETALL", keys.job(job)),
                ("GET", keys.result(job)),
                ("HGET", keys.trajectory(job), "spec"),
                ("PTTL", keys.output(job, 0)),
            ]
        replies = yield Ask(tuple(commands))
        for i, job in enumerate(page):
            found.append(_view(job, *replies[COLUMNS * i : COLUMNS * (i + 1)]))
    return found


def view(keys: Keys, job: str) -> Plan[View]:
    """One job, also if its push has not been read. Raises UnknownJob."""
    [found] = yield from views(keys, [job])
    if found is not None:
        return found
    return View((yield from asks.look(keys, Ticket(job))).record)


def _view(
    job: str, fields: Sequence[bytes], result: bytes | None, spec: bytes | None, stays_ms: int
) -> View | None:
    record = JobRecord.of(job, dict(zip(fields[::2], fields[1::2], strict=True)))
    if not record.status:
        return None
    return View(
        record,
        # One that came just after the record was read is of the next look.
        Result.from_wire(result) if result is not None and record.is_terminal else None,
        None if spec is None else JobSpec.from_wire(spec),
        round(time.time() + stays_ms / 1000) if stays_ms > 0 else None,
    )


# -- our own job ---------------------------------------------------------------------------


def job_json(found: View, links: Links) -> dict[str, Any]:
    """Everything there is to say. Times ending in _at are Unix seconds."""
    record, result = found.record, found.result
    body: dict[str, Any] = {
        "id": record.id,
        "object": "job",
        "status": record.status,
        "is_terminal": record.is_terminal,
        "model": record.model or None,
        "prompt": record.prompt,
        "stage": record.stage or None,
        "step": record.step,
        "steps": record.steps,
        "progress": round(100 * record.progress, 1),
        "priority": record.priority,
        "admission": record.admission or None,
        "queue_position": record.queue_position,
        "slack_s": record.slack_s,
        "deadline_at": record.deadline_s,
        "eta_at": record.eta_s,
        "as_of": record.as_of_s,
        "created_at": record.created_s,
        "started_at": record.started_s,
        "completed_at": record.finished_s,
        "expires_at": found.expires_at,
        "attempts": record.attempts,
        "worker": record.worker or None,
        "params": found.params,
        "error": error_json(found),
        "outputs": [],
        "seed": None,
        "timings": {},
        "on_time": None,
        "notes": [],
    }
    if found.spec is not None:
        body |= {"seed": found.spec.params.get("seed"), "notes": list(found.spec.notes)}
    if result is not None:
        body |= {
            "seed": result.seed,
            "outputs": outputs_json(result, links),
            "timings": result.timings,
            "on_time": result.on_time,
            "notes": list(result.notes),
        }
    return body


def outputs_json(result: Result, links: Links) -> list[dict[str, Any]]:
    return [
        {
            "url": links.output(result.id, n),
            "mime": file.mime,
            "width": file.width,
            "height": file.height,
            "bytes": file.bytes,
            "sha256": file.sha256,
        }
        for n, file in enumerate(result.outputs)
    ]


def error_json(found: View) -> dict[str, Any] | None:
    """Why a job did not succeed, None while it may."""
    record = found.record
    if not record.is_terminal or record.status == JobStatus.SUCCEEDED:
        return None
    return {
        "code": record.error_code or str(record.status),
        "message": record.error or f"the job was {record.status}",
        "param": (found.result.field if found.result is not None else "") or None,
    }


# -- OpenAI's video ------------------------------------------------------------------------


def video_json(found: View) -> dict[str, Any]:
    record, params = found.record, found.params
    return {
        "id": record.id,
        "object": "video",
        "model": record.model,
        "status": VIDEO_STATUS.get(JobStatus(record.status), "failed")
        if record.status in set(JobStatus)
        else "failed" if record.is_terminal else "in_progress",
        "progress": int(100 * record.progress),
        "created_at": int(record.created_s or 0),
        "completed_at": _whole(record.finished_s if record.status == "succeeded" else None),
        "expires_at": found.expires_at,
        "prompt": record.prompt,
        "size": f"{record.width}x{record.height}" if record.width else "",
        "seconds": _seconds(params),
        "error": error_json(found),
    }  # fmt: skip


def _seconds(params: dict[str, Any]) -> str:
    """How long the video plays, as OpenAI writes it: "4"; empty while nobody has read the push."""
    frames, fps = params.get("num_frames"), params.get("fps")
    if frames and fps:
        return f"{max(frames - 1, 1) / fps:.3f}".rstrip("0").rstrip(".")
    return ""


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
