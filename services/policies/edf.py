"""Earliest deadline first, asked again at each chunk's end (Liu and Layland 1973)."""

from __future__ import annotations

from services.policies.base import Candidate
from services.policies.ordered import Rule


def deadline_s(candidate: Candidate) -> float:
    return candidate.deadline_s


EDF = Rule("edf", deadline_s)
