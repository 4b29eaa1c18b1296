"""The dead-letter stream as an operator sees it, and pushing one of its jobs again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.asks import Ask
from common.errors import WaitTimeout
from common.job import JobSpec
from common.params import COMMON
from services.cli.terminal import is_refused

if TYPE_CHECKING:
    from common.client import Client
    from common.record import JobRecord

# Room for the suffix within an id's 128 characters.
STEM_CHARS = 112


@dataclass(frozen=True, slots=True)
class Letter:
    """A job that ended as failed though its request was good. `at_s`: seconds since the epoch."""

    entry: str
    job: str
    at_s: float
    error_code: str
    error: str
    attempts: int
    stage: str
    step: int
    trace: str
    spec: JobSpec

    @classmethod
    def of(cls, entry: bytes, flat: list[bytes]) -> Letter:
        raw = dict(zip(flat[::2], flat[1::2], strict=True))
        spec = JobSpec.from_wire(raw.pop(b"spec"))
        f = {k.decode(): v.decode("utf-8", "replace") for k, v in raw.items()}
        return cls(
            entry=entry.decode(),
            job=f["job"],
            at_s=int(f["at"]) / 1000,
            error_code=f["error_code"],
            error=f["error"],
            attempts=int(f["attempts"]),
            stage=f["stage"],
            step=int(f["step"]),
            trace=f["trace"],
            spec=spec,
        )

    @property
    def place(self) -> str:
        return f"{self.stage}, step {self.step}" if self.stage == "denoise" else self.stage

    def push(self) -> dict[str, Any]:
        """The parameters that make the same job again, its time as long as it was at first."""
        spec = self.spec
        wish: dict[str, Any] = {
            **spec.params,
            "model": spec.model,
            "priority": spec.priority,
            "slo_ms": _slo_ms(spec),
            "on_late": spec.on_late,
            "min_inference_steps": spec.min_steps or None,
            "queue_timeout_ms": _ms(spec.queue_timeout_s),
            "run_timeout_ms": _ms(spec.run_timeout_s),
            "exact": spec.exact,
            "user": spec.user,
            "callback_url": spec.callback_url or None,
            "upload_url": spec.upload_url or None,
        }
        return {name: value for name, value in wish.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.job,
            "at_s": self.at_s,
            "error_code": self.error_code,
            "error": self.error,
            "attempts": self.attempts,
            "stage": self.stage,
            "step": self.step,
            "trace": self.trace,
            "params": self.push(),
        }


def _slo_ms(spec: JobSpec) -> float | None:
    """None where there is no such slo: a deadline_ms may lie before its job's arrival, or years
    later."""
    if spec.deadline_s is None:
        return None
    slo_ms = round(1000 * (spec.deadline_s - spec.arrival_s), 3)
    return slo_ms if 0 < slo_ms <= COMMON["slo_ms"]["max"] else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def read_letters(client: Client) -> dict[str, Letter]:
    """By job, oldest first."""
    [entries] = client.ask(Ask((("XRANGE", client.keys.dead, "-", "+"),)))
    letters = (Letter.of(entry, flat) for entry, flat in entries)
    return {letter.job: letter for letter in letters}


def push_again(client: Client, letter: Letter, wait_s: float) -> tuple[str, JobRecord | None]:
    """Push a letter's job under its next id, and take the letter off the stream once the pool has
    accepted that. The new id and its record; None if nobody has decided within `wait_s`.

    In this order, and with an id that follows from the old one: whoever dies in between, or two
    who do it at once, push the same job twice, which is one job.
    """
    new = _next_id(client, letter.job)
    [handle] = client.submit_many([{"id": new, **letter.push()}])
    try:
        record = handle.admitted(wait_s)
    except WaitTimeout:
        return new, None
    if not is_refused(record):
        client.ask(Ask((("XDEL", client.keys.dead, letter.entry),)))
    return new, record


def _next_id(client: Client, job: str) -> str:
    """Not one that was refused before: the same push again would get the same answer."""
    stem, _, times = job.rpartition("-retry")
    if not (stem and times.isdigit()):
        stem, times = job, "0"
    number = int(times)
    while True:
        number += 1
        new = f"{stem[:STEM_CHARS]}-retry{number}"
        [there] = client.statuses([new])
        if there is None or not is_refused(there):
            return new
