"""Traces: what arrives when, how large, due when. Our JSONL, and vLLM-Omni's `Request(…)` lines.

A JSONL line has id, request_class, arrival_ms, deadline_ms (absolute, as arrival_ms is),
standalone_ms, width, height, num_inference_steps, and may have num_frames, tokens, n, forwards,
priority, on_late, min_inference_steps. What is missing is worked out from the costs.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.simulator.calibrations import Calibration

ON_LATE = ("run", "drop", "degrade")


class TraceError(ValueError):
    """A line that cannot be read, with its number and what to change."""


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One arrival. Seconds from the trace's beginning; `deadline_s` absolute on the same clock."""

    id: str
    request_class: str
    arrival_s: float
    deadline_s: float
    standalone_s: float
    tokens: int
    steps: int
    width: int = 0
    height: int = 0
    num_frames: int = 1
    priority: int = 0
    on_late: str = "run"
    min_steps: int = 0  # on_late degrade: the fewest steps it may be cut to
    n: int = 1  # pictures
    forwards: int = 1  # a step: 2 with guidance

    def to_json(self) -> dict[str, Any]:
        """As a line of our JSONL."""
        return {
            "id": self.id,
            "request_class": self.request_class,
            "arrival_ms": round(1000 * self.arrival_s, 3),
            "deadline_ms": round(1000 * self.deadline_s, 3),
            "standalone_ms": round(1000 * self.standalone_s, 3),
            # A model need not have them.
            **({"width": self.width, "height": self.height} if self.width and self.height else {}),
            "num_frames": self.num_frames,
            "num_inference_steps": self.steps,
            "tokens": self.tokens,
            "n": self.n,
            "forwards": self.forwards,
            "priority": self.priority,
            "on_late": self.on_late,
            **({"min_inference_steps": self.min_steps} if self.min_steps else {}),
        }


def read_trace(path: str | Path, costs: Calibration, slo_scale: float = 3.0) -> list[TraceJob]:
    """Jobs in the order of arrival, from a file of JSON lines or of `Request(…)` lines.

    Raises TraceError for a line that is neither, and OSError where there is no file.
    """
    text = Path(path).read_text(encoding="utf-8")
    return parse_trace(text.splitlines(), costs, slo_scale)


def parse_trace(lines: Iterable[str], costs: Calibration, slo_scale: float = 3.0) -> list[TraceJob]:
    jobs: list[TraceJob] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        words = line.strip()
        if not words or words.startswith("#"):
            continue
        try:
            fields = json.loads(words) if words.startswith("{") else parse_request(words)
            job = job_of(fields, f"r{number:06}", costs, slo_scale)
        except (ValueError, TypeError, KeyError, SyntaxError) as error:
            raise TraceError(f"line {number}: {error}") from error
        if job.id in seen:
            raise TraceError(f"line {number}: id {job.id!r} was there before; ids are unique")
        seen.add(job.id)
        jobs.append(job)
    return sorted(jobs, key=lambda job: (job.arrival_s, job.id))


def parse_request(line: str) -> dict[str, Any]:
    """`Request(request_id='a', timestamp=0.5, height=512, …)`: literals only, nothing is run."""
    node = ast.parse(line, mode="eval").body
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "Request":
        raise ValueError("neither JSON nor Request(name=value, …)")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("Request takes name=value only")
    return {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}


def _number(fields: Mapping[str, Any], *names: str) -> float | None:
    for name in names:
        value = fields.get(name)
        if value is not None:
            number = float(value)
            if not math.isfinite(number):
                raise ValueError(f"{name} is {value}; it must be a finite number")
            return number
    return None


def _count(fields: Mapping[str, Any], name: str, default: int, least: int = 1) -> int:
    number = _number(fields, name)
    if number is None:
        return default
    if number < least or number != int(number):
        raise ValueError(f"{name} is {fields[name]}; it is a whole number of at least {least}")
    return int(number)


def _positive(fields: Mapping[str, Any], name: str) -> float | None:
    number = _number(fields, name)
    if number is not None and number <= 0:
        raise ValueError(f"{name} is {fields[name]}; it must be above 0")
    return number


def job_of(
    fields: Mapping[str, Any], default_id: str, costs: Calibration, slo_scale: float
) -> TraceJob:
    """A line's fields as a job; names of ours first, then vLLM-Omni's."""
    width, height = _count(fields, "width", 1024), _count(fields, "height", 1024)
    frames, steps = _count(fields, "num_frames", 1), _count(fields, "num_inference_steps", 20)
    n, forwards = _count(fields, "n", 1), _count(fields, "forwards", 1)
    if forwards > 2:
        raise ValueError(f"forwards is {forwards}; it is 1, or 2 with guidance")
    px = costs.token_px
    # Video models compress time by four: 81 frames are 21 latent ones.
    across = -(-width // px) * -(-height // px) * (1 + (frames - 1) // 4)
    tokens = _count(fields, "tokens", across)
    arrival_ms = _number(fields, "arrival_ms")
    arrival = (
        arrival_ms / 1000 if arrival_ms is not None else _number(fields, "timestamp", "arrival_s")
    )
    if arrival is None:
        raise ValueError("arrival_ms (or timestamp, in seconds) is missing")
    standalone_ms = _number(fields, "standalone_ms")
    if standalone_ms is None:
        standalone = costs.standalone_s(tokens, steps, n, forwards)
    else:
        standalone = standalone_ms / 1000
    deadline_ms, slo_ms = _number(fields, "deadline_ms"), _number(fields, "slo_ms")
    if deadline_ms is not None:
        deadline = deadline_ms / 1000
    elif slo_ms is not None:
        deadline = arrival + slo_ms / 1000
    else:
        deadline = arrival + (_positive(fields, "slo_scale") or slo_scale) * standalone
    on_late = str(fields.get("on_late", "run"))
    if on_late not in ON_LATE:
        raise ValueError(f"on_late is {on_late!r}; it is one of {', '.join(ON_LATE)}")
    min_steps = _count(fields, "min_inference_steps", 0)
    if (on_late == "degrade") != (0 < min_steps <= steps):
        raise ValueError(
            f"min_inference_steps is {min_steps}; with on_late degrade it is 1 to {steps}, "
            "else it is not given"
        )
    named = fields.get("id", fields.get("request_id", default_id))
    return TraceJob(
        id=str(named),
        request_class=str(fields.get("request_class") or f"{width}x{height}"),
        arrival_s=arrival,
        deadline_s=deadline,
        standalone_s=standalone,
        tokens=tokens,
        steps=steps,
        width=width,
        height=height,
        num_frames=frames,
        priority=int(_number(fields, "priority") or 0),
        on_late=on_late,
        min_steps=min_steps,
        n=n,
        forwards=forwards,
    )


def write_trace(path: str | Path, jobs: Iterable[TraceJob]) -> None:
    """As JSON lines, a job each."""
    text = "".join(json.dumps(job.to_json()) + "\n" for job in jobs)
    Path(path).write_text(text, encoding="utf-8")
