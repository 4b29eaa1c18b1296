"""First come, first served: by arrival, never interrupting. The baseline, and the fallback."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import inf

from common.stage import DENOISE, ENCODE, STAGES
from services.policies.base import (
    Candidate,
    Decision,
    Outlook,
    Rank,
    Run,
    View,
    pack,
    under_way_s,
    unfinished,
)
from services.policies.index import Index


class Fcfs:
    name = "fcfs"

    def __init__(self) -> None:
        self._ready = {stage: Index() for stage in STAGES}

    def add(self, candidate: Candidate) -> None:
        self._ready[candidate.stage].add(candidate, candidate.arrival_s)

    def remove(self, job: str) -> None:
        for index in self._ready.values():
            index.remove(job)

    def plan(self, view: View, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        taken: set[str] = set()
        for rank in view.ranks:
            if rank.queued or (rank.running and rank.running.ends_s - now > view.lead_s):
                continue
            models = rank.models
            if rank.stage == ENCODE:
                models = tuple(m for m in models if not self._enough_encoded(m, view))
            first = self._next(rank, models, taken)
            running = unfinished(rank)
            if first is not None and running is not None and running.arrival_s <= first.arrival_s:
                taken.discard(first.job)
            elif first is not None:
                rows = pack(first, view, partial(self._next, rank, (first.model,), taken, True))
                decisions.append(Run(rank.name, rows))
        return decisions

    def _next(
        self, rank: Rank, models: tuple[str, ...], taken: set[str], sharing: bool = False
    ) -> Candidate | None:
        for candidate in self._ready[rank.stage]:
            if candidate.job not in taken and candidate.model in models:
                if sharing and candidate.suspect:
                    return None
                taken.add(candidate.job)
                return candidate
        return None

    def _enough_encoded(self, model: str, view: View) -> bool:
        denoisers = sum(model in rank.models for rank in view.by_stage.get(DENOISE, ()))
        encoded = sum(candidate.model == model for candidate in self._ready[DENOISE])
        return encoded >= max(1, denoisers) * view.ahead

    def outlook(self, candidate: Candidate, view: View, now: float) -> Outlook:
        waiting_s = sum(index.work_before(inf) for index in self._ready.values())
        return Outlook(waiting_s + under_way_s(view, now, lambda _: True))

    def order(self, now: float) -> Iterable[str]:
        merged = [(c.arrival_s, c.job) for index in self._ready.values() for c in index]
        return [job for _, job in sorted(merged)]
