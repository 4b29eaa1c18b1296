"""What Redis' records say, typed for clients: a job's record, its events, a worker's record.

A status or event that this version does not know stays the text that it is; `is_terminal` in
the record says whether to go on waiting.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from common.job import JobStatus

# Events after which a job goes on. After any other one the record is asked.
GOES_ON = frozenset(
    {"queued", "running", "step", "chunk", "error", "returned", "worker_lost", "degraded"}
)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as it stands. Times are seconds since the epoch by Redis' clock.

    `admission` is accepted, or best_effort for one that would probably be late when it came.
    `slack_s`, `queue_position` (0 is next) and `eta_s` are those of `as_of_s`, refreshed once a
    second while the job is active, and None where they do not apply. A push that no coordinator
    has read yet is `queued` and has an empty `stage`. `eta_margin_s` is by how much the first eta
    may be off where nothing of the job's size was ever measured, else 0.
    """

    id: str
    status: str
    is_terminal: bool
    stage: str = ""
    step: int = 0
    steps: int = 0
    progress: float = 0.0
    model: str = ""
    prompt: str = ""
    width: int = 0
    height: int = 0
    seed: int = 0
    priority: int = 0
    worker: str = ""
    attempts: int = 0
    created_s: float | None = None
    started_s: float | None = None
    finished_s: float | None = None
    deadline_s: float | None = None
    admission: str = ""
    queue_position: int | None = None
    slack_s: float | None = None
    eta_s: float | None = None
    eta_margin_s: float | None = None
    as_of_s: float | None = None
    error_code: str = ""
    error: str = ""
    entry: str = ""
    content: str = ""

    @classmethod
    def of(cls, job: str, raw: Mapping[bytes, bytes]) -> JobRecord:
        f = {k.decode(): v.decode("utf-8", "replace") for k, v in raw.items()}
        status = f.get("status", "")
        ended = f.get("is_terminal") == "1"
        return cls(
            id=f.get("id", job),
            status=status,
            is_terminal=ended,
            stage=f.get("stage", ""),
            step=_int(f.get("step")) or 0,
            steps=_int(f.get("steps")) or 0,
            progress=_float(f.get("progress")) or 0.0,
            model=f.get("model", ""),
            prompt=f.get("prompt", ""),
            width=_int(f.get("width")) or 0,
            height=_int(f.get("height")) or 0,
            seed=_int(f.get("seed")) or 0,
            priority=_int(f.get("priority")) or 0,
            worker=f.get("worker", ""),
            attempts=_int(f.get("attempts")) or 0,
            created_s=_seconds(f.get("created")),
            started_s=_seconds(f.get("started")),
            finished_s=_seconds(f.get("finished")),
            deadline_s=_seconds(f.get("deadline")) or None,
            admission=f.get("admission", ""),
            queue_position=_int(f.get("queue_position")),
            slack_s=_float(f.get("slack")),
            eta_s=_seconds(f.get("eta")),
            eta_margin_s=_seconds(f.get("eta_margin")),
            as_of_s=_seconds(f.get("as_of")),
            error_code=f.get("error_code", ""),
            error=f.get("error", ""),
            entry=f.get("entry", ""),
            content=f.get("content", ""),
        )

    @classmethod
    def pushed(cls, job: str, entry: str, prompt: str = "") -> JobRecord:
        """One that is in `sw:jobs` still."""
        return cls(
            id=job,
            status=JobStatus.QUEUED,
            is_terminal=False,
            created_s=int(entry.split("-", 1)[0]) / 1000,
            entry=entry,
            prompt=prompt,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One thing that happened to a job: a new status, a step, the end of a chunk, an error.

    `type` is queued, running (a stage began), step, chunk (a task was reported; `next` is the
    stage that follows), returned (handed back unrun), error, worker_lost (both are tried again),
    degraded (`steps` is what it will do now) or one of the ends.
    """

    type: str
    at_s: float
    is_terminal: bool = False
    stage: str = ""
    step: int | None = None
    steps: int | None = None
    next: str = ""
    worker: str = ""
    error_code: str = ""
    error: str = ""
    entry: str = ""  # its id in the stream: to go on after it

    @classmethod
    def of(cls, raw: Mapping[bytes, bytes], entry: str = "") -> JobEvent:
        f = {k.decode(): v.decode("utf-8", "replace") for k, v in raw.items()}
        kind = f.get("type", "")
        return cls(
            type=kind,
            at_s=_seconds(f.get("at")) or 0.0,
            is_terminal=kind in set(JobStatus) and JobStatus(kind).is_terminal,
            stage=f.get("stage", ""),
            step=_int(f.get("step")),
            steps=_int(f.get("steps")),
            next=f.get("next", ""),
            worker=f.get("worker", ""),
            error_code=f.get("error_code", ""),
            error=f.get("error", ""),
            entry=entry,
        )

    def to_json(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if v not in (None, "")}


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A registered worker whose lease has not run out.

    `hung` is the seq of the task on which it makes no step ("deaf": it reads no tasks), "" for a
    worker that gets on; it is given no more tasks. `late_reports` are those of its tasks that had
    been taken from it before it reported them.
    """

    name: str
    stage: str
    models: tuple[str, ...]
    host: str
    device: str
    pid: int
    draining: bool
    hung: str = ""
    late_reports: int = 0

    @classmethod
    def of(cls, name: str, raw: Mapping[bytes, bytes]) -> WorkerRecord:
        f = {k.decode(): v.decode("utf-8", "replace") for k, v in raw.items()}
        return cls(
            name=name,
            stage=f.get("stage", ""),
            models=tuple(f.get("models", "").split()),
            host=f.get("host", ""),
            device=f.get("device", ""),
            pid=_int(f.get("pid")) or 0,
            draining=f.get("draining") == "1",
            hung=f.get("hung", ""),
            late_reports=json.loads(f.get("counts", "{}")).get("late_reports", 0),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def in_queue_order(records: Iterable[JobRecord]) -> list[JobRecord]:
    """Running jobs first, then the queue as last refreshed, then those not yet placed."""

    def order(record: JobRecord) -> tuple[int, float, float]:
        place = record.queue_position
        rank = 3 if record.is_terminal else 0 if record.status != JobStatus.QUEUED else 1
        if rank == 1 and place is None:
            rank = 2
        return rank, place or 0, record.created_s or 0.0

    return sorted(records, key=order)


def _int(text: str | None) -> int | None:
    try:
        return int(text) if text else None
    except ValueError:
        return None


def _float(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _seconds(text: str | None) -> float | None:
    value = _float(text)
    return None if value is None else value / 1000
