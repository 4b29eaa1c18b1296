"""Which trace a job is part of, known to every service by itself: W3C Trace Context, pure.

A job's trace id follows from its id, or is its client's (`traceparent`), and the id of its own span
follows from both. So nothing but a client's `traceparent` travels with a task.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b

_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED = 1
MOST_CHARS = 256  # a later version may be longer than the 55 of this one


@dataclass(frozen=True, slots=True)
class Parent:
    """A `traceparent` taken apart: the trace and the span that something is part of."""

    trace: int
    span: int
    sampled: bool

    @classmethod
    def of(cls, traceparent: str) -> Parent | None:
        """None for what is no traceparent."""
        found = _FORM.fullmatch(traceparent)
        if found is None:
            return None
        trace, span, flags = (int(part, 16) for part in found.groups()[:3])
        return cls(trace, span, bool(flags & SAMPLED)) if trace and span else None

    def __str__(self) -> str:
        return f"00-{self.trace:032x}-{self.span:016x}-{int(self.sampled):02x}"


@dataclass(frozen=True, slots=True)
class Trace:
    """A job's trace: `job` is the span of the whole job, `parent` the one around it (0: none)."""

    trace: int
    job: int
    parent: int
    sampled: bool

    @classmethod
    def of(cls, job: str, traceparent: str = "", ratio: float = 1.0) -> Trace:
        """`ratio`: the share of jobs that are traced where the client does not say."""
        given = Parent.of(traceparent)
        if given is not None:
            return cls(given.trace, _hash(f"{given} {job}", 8), given.span, given.sampled)
        trace = _hash(job, 16)
        sampled = (trace & (2**64 - 1)) < ratio * 2**64  # every service comes to the same
        return cls(trace, _hash(f"{trace} {job}", 8), 0, sampled)


def _hash(text: str, size: int) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=size).digest()) or 1
