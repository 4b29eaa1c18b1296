"""First in, first out, each job in one piece: what diffusion servers do today."""

from __future__ import annotations

from services.policies.base import Candidate
from services.policies.ordered import Rule


def arrival_s(candidate: Candidate) -> float:
    return candidate.arrival_s


MONOLITHIC = Rule("monolithic", arrival_s, chunk="whole")
