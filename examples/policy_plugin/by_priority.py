"""A policy of your own: strictly by priority, and by arrival among equals.

Install it beside Slackwater where the coordinator runs (`pip install ./examples/policy_plugin`);
then `slackwater policies use by_priority`, `slackwater up --policy by_priority` and `slackwater
simulate … --policy by_priority,slack` know it.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.policies.base import Candidate, Decision, Rank, Run, View, chunk_stop


class ByPriority:
    name = "by_priority"

    def __init__(self) -> None:
        self._ready: dict[str, Candidate] = {}

    def add(self, candidate: Candidate) -> None:
        self._ready[candidate.job] = candidate

    def remove(self, job: str) -> None:
        self._ready.pop(job, None)

    def plan(self, view: View, now: float) -> list[Decision]:
        """Give each rank that is free, or about to be, the most important task it can run."""
        decisions: list[Decision] = []
        taken: set[str] = set()
        for rank in view.ranks:
            runs_on = rank.running is not None and rank.free_at(now) > now + view.lead_s
            if rank.queued or runs_on:
                continue
            for candidate in self._sorted():
                if candidate.job not in taken and self._suits(candidate, rank):
                    taken.add(candidate.job)
                    stop = chunk_stop(candidate, view.chunk_s)
                    decisions.append(Run(rank.name, ((candidate.job, stop),)))
                    break
        return decisions

    def order(self, now: float) -> Iterable[str]:
        return [candidate.job for candidate in self._sorted()]

    def _sorted(self) -> list[Candidate]:
        return sorted(self._ready.values(), key=lambda c: (-c.priority, c.arrival_s, c.job))

    @staticmethod
    def _suits(candidate: Candidate, rank: Rank) -> bool:
        return candidate.stage == rank.stage and candidate.model in rank.models
