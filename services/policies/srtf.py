"""Shortest remaining time first, asked again at each chunk's end (Schrage 1968)."""

from __future__ import annotations

from services.policies.base import Candidate
from services.policies.ordered import Rule


def remaining_s(candidate: Candidate) -> float:
    return candidate.remaining_s


SRTF = Rule("srtf", remaining_s)
