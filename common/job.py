"""A job as its user knows it: what was asked, where it stands, what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from common.messages import pack, unpack


class JobStatus(StrEnum):
    """queued -> running -> one of the four ends. `is_terminal` stands in the record too, so
    that a client which does not know a later state still knows when to stop waiting."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        return self not in (JobStatus.QUEUED, JobStatus.RUNNING)


def known_status(text: str) -> str:
    """`text` as a JobStatus if it is one."""
    return JobStatus(text) if text in set(JobStatus) else text


class ErrorCode(StrEnum):
    """Why a job failed; docs/protocol.md has the table with remedies."""

    INVALID_REQUEST = "invalid_request"
    CONFLICT = "conflict"
    QUEUE_FULL = "queue_full"
    STAGE_ERROR = "stage_error"
    NON_FINITE = "non_finite"
    NOT_CAPTURABLE = "not_capturable"
    OUT_OF_MEMORY = "out_of_memory"
    STORAGE_FULL = "storage_full"
    STATE_LOST = "state_lost"
    WORKER_LOST = "worker_lost"
    OUTPUT_LOST = "output_lost"
    DEADLINE_MISSED = "deadline_missed"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    QUEUE_TIMEOUT = "queue_timeout"
    RUN_TIMEOUT = "run_timeout"


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One accepted job, every default filled in.

    Times are seconds since the epoch by Redis' clock. `deadline_s` is None until the core
    has fixed it from `slo_ms`, `deadline_ms` or the default (arrival + slo_scale × standalone).
    """

    id: str
    entry: str
    content: str
    model: str
    params: dict[str, Any]
    arrival_s: float
    priority: int = 0
    deadline_s: float | None = None
    slo_scale: float | None = None
    on_late: str = "run"
    exact: bool = True
    user: str = ""
    notes: tuple[str, ...] = ()
    min_steps: int = 0  # on_late degrade: the fewest steps it may be cut to
    queue_timeout_s: float | None = None  # from its arrival until a task of it begins
    run_timeout_s: float | None = None  # that ranks may work on it in all
    callback_url: str = ""  # who is told of its end
    upload_url: str = ""  # where its files are copied to
    traceparent: str = ""  # the span of whoever pushed it, if they trace

    def to_wire(self) -> bytes:
        return pack(
            [
                self.id,
                self.entry,
                self.content,
                self.model,
                self.params,
                self.arrival_s,
                self.priority,
                self.deadline_s,
                self.slo_scale,
                self.on_late,
                self.exact,
                self.user,
                list(self.notes),
                self.min_steps,
                self.queue_timeout_s,
                self.run_timeout_s,
                self.callback_url,
                self.upload_url,
                self.traceparent,
            ]
        )

    @classmethod
    def from_wire(cls, data: bytes) -> JobSpec:
        fields: list[Any] = unpack(data)
        fields[12] = tuple(fields[12])  # notes
        return cls(*fields)  # fields that an earlier version did not write have defaults


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One picture of a result; its bytes stand at `key`."""

    key: str
    mime: str
    width: int
    height: int
    bytes: int
    sha256: str

    @classmethod
    def of(cls, wire: dict[str, Any]) -> OutputFile:
        """From a result; what a later version says beyond is left out."""
        return cls(**{f.name: wire[f.name] for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class Result:
    """What `sw:result:{id}` holds, msgpack, written once."""

    id: str
    status: str  # a JobStatus, or the word of a later version
    outputs: tuple[OutputFile, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    timings: dict[str, float] = field(default_factory=dict)
    on_time: bool | None = None
    notes: tuple[str, ...] = ()
    error_code: str = ""
    error: str = ""
    field: str = ""  # the parameter an invalid_request is about
    retry_after_s: float | None = None

    def raise_for_status(self) -> Result:
        """Itself if the job succeeded; else raises JobRefused, JobCanceled or JobFailed."""
        from common.errors import raise_for

        raise_for(self)
        return self

    def to_wire(self) -> bytes:
        return pack(
            {
                "id": self.id,
                "status": str(self.status),
                "outputs": [
                    {
                        "key": o.key,
                        "mime": o.mime,
                        "width": o.width,
                        "height": o.height,
                        "bytes": o.bytes,
                        "sha256": o.sha256,
                    }
                    for o in self.outputs
                ],
                "params": self.params,
                "seed": self.seed,
                "timings": self.timings,
                "on_time": self.on_time,
                "notes": list(self.notes),
                "error_code": self.error_code,
                "error": self.error,
                "field": self.field,
                "retry_after_s": self.retry_after_s,
            }
        )

    @classmethod
    def from_wire(cls, data: bytes) -> Result:
        wire = unpack(data)
        return cls(
            id=wire["id"],
            status=known_status(wire["status"]),
            outputs=tuple(OutputFile.of(o) for o in wire["outputs"]),
            params=wire["params"],
            seed=wire["seed"],
            timings=wire["timings"],
            on_time=wire["on_time"],
            notes=tuple(wire["notes"]),
            error_code=wire["error_code"],
            error=wire["error"],
            field=wire["field"],
            retry_after_s=wire["retry_after_s"],
        )
