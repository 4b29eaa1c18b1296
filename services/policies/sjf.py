"""Shortest job first: the whole of it, by its estimated work. Never interrupts."""

from __future__ import annotations

from services.policies.base import Candidate
from services.policies.ordered import Rule


def work_s(candidate: Candidate) -> float:
    """All its denoising, done or not: what it was worth when it came."""
    return candidate.steps * candidate.step_s


SJF = Rule("sjf", work_s, chunk="whole")
