"""Ready tasks and ranks for tests of policies, and what a plan gives to whom."""

from __future__ import annotations

from typing import Any

from common.stage import DENOISE
from services.policies.base import Candidate, Decision, Rank, Run, Running, View

NOW = 1000.0


def candidate(job: str, stage: str = DENOISE, due_s: float = 100.0, **changes: Any) -> Candidate:
    """A job of 10 steps of 0.1 s that is due in `due_s`."""
    fields: dict[str, Any] = {
        "job": job, "stage": stage, "model": "m", "arrival_s": NOW, "deadline_s": NOW + due_s,
        "priority": 0, "remaining_s": 1.0, "task_s": 0.1, "step_s": 0.1, "step": 0, "steps": 10,
    }  # fmt: skip
    return Candidate(**{**fields, **changes})


def view(*ranks: Rank, **changes: Any) -> View:
    by_stage: dict[str, list[Rank]] = {}
    for rank in ranks:
        by_stage.setdefault(rank.stage, []).append(rank)
    return View(ranks=list(ranks), by_stage=by_stage, **{"chunk_s": 0.3, "pack_s": 0.0, **changes})


def rank(name: str, stage: str = DENOISE) -> Rank:
    return Rank(name, stage, ("m",))


def busy(name: str, task: Candidate, left_s: float, seq: int = 1) -> Rank:
    return Rank(name, task.stage, ("m",), running=Running(seq, task, NOW + left_s, begins_s=NOW))


def runs(decisions: list[Decision]) -> dict[str, list[str]]:
    """Rank to jobs."""
    return {d.rank: [job for job, _ in d.rows] for d in decisions if isinstance(d, Run)}
