"""One walk for all policies that are an order and nothing else: srtf.py, edf.py, … give the key.

An idle rank takes the first ready task of its stage by key. Whoever runs is interrupted at the
end of a chunk only, and chunks are of about `chunk_s`, of one step, or the whole rest of the job.
With `doomed_last`, jobs that can no longer make their deadline wait behind all others, the
shortest first: the fair comparison with `slack`, since without it deadline orders collapse under
load (docs/scheduling.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import Literal

from common.stage import DENOISE, ENCODE, STAGES
from services.policies.base import (
    Candidate,
    Decision,
    Doomed,
    Outlook,
    Rank,
    Run,
    View,
    cost_s,
    pack,
    under_way_s,
    unfinished,
)
from services.policies.index import Index

Key = Callable[[Candidate], float]
# "Whole": longer than any job, yet a number that arithmetic can bear.
WHOLE_S = 1e9
# Encoded jobs per denoiser whatever their length, as in slack.py.
MOST_AHEAD = 64


@dataclass(frozen=True, slots=True)
class Rule:
    """An order. `chunk`: after how much of a job another may come."""

    name: str
    key: Key
    chunk: Literal["step", "chunk", "whole"] = "chunk"

    def policy(self) -> Ordered:
        return Ordered(self)

    def doomed_last(self) -> Ordered:
        """The fair comparison; of "step" it keeps the order but not the thrashing."""
        chunk = "chunk" if self.chunk == "step" else self.chunk
        name = f"{self.name}-doomed-last"
        return Ordered(replace(self, name=name, chunk=chunk), doomed_last=True)


class Ordered:
    def __init__(self, rule: Rule, doomed_last: bool = False) -> None:
        self.name = rule.name
        self._rule, self._doomed_last = rule, doomed_last
        self._ready = {stage: Index() for stage in STAGES}  # by key
        self._doomed = {stage: Index() for stage in STAGES}  # by work left
        self._stage: dict[str, str] = {}
        self._given: View | None = None
        self._view: View | None = None

    def add(self, candidate: Candidate) -> None:
        self.remove(candidate.job)
        self._stage[candidate.job] = candidate.stage
        if candidate.doomed and self._doomed_last:
            self._doomed[candidate.stage].add(candidate, candidate.remaining_s)
        else:
            self._ready[candidate.stage].add(candidate, self._rule.key(candidate))

    def remove(self, job: str) -> None:
        stage = self._stage.pop(job, None)
        if stage is not None and self._ready[stage].remove(job) is None:
            self._doomed[stage].remove(job)

    def order(self, now: float) -> Iterable[str]:
        """By key, work behind first: who has come further is nearer its end."""
        key = self._rule.key
        ready = [(key(c), c.arrival_s, c.job) for index in self._ready.values() for c in index]
        doomed = [(c.remaining_s, c.arrival_s, c.job) for i in self._doomed.values() for c in i]
        return [job for _, _, job in chain(sorted(ready), sorted(doomed))]

    def outlook(self, candidate: Candidate, view: View, now: float) -> Outlook:
        key = self._rule.key(candidate)
        late = self._doomed_last and is_late(candidate, view, now)
        ahead_s = under_way_s(view, now, lambda held: late or self._rule.key(held.candidate) <= key)
        for stage in STAGES:
            if late:
                ahead_s += self._ready[stage].work_before(inf)
                ahead_s += self._doomed[stage].work_before(candidate.remaining_s)
            else:
                ahead_s += self._ready[stage].work_before(key, inf)
        return Outlook(ahead_s)

    def plan(self, view: View, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        taken: dict[str, str] = {}  # job -> model
        for stage in STAGES:
            if not self._ready[stage] and not self._doomed[stage]:
                continue
            lead = now + view.lead_s
            for rank in view.by_stage.get(stage, ()):
                if rank.queued or (rank.running and rank.running.ends_s > lead):
                    continue
                rows = self._rows(rank, view, now, taken, decisions)
                if rows:
                    decisions.append(Run(rank.name, rows))
        return decisions

    def _rows(
        self, rank: Rank, view: View, now: float, taken: dict[str, str], decisions: list[Decision]
    ) -> tuple[tuple[str, int], ...]:
        walk = self._walk(rank, view, now, taken, decisions)
        first = next(walk, None)
        if first is None or self._continues(rank, first):
            return ()
        taken[first.job] = first.model

        def following() -> Candidate | None:
            candidate = next(walk, None)
            if candidate is None or candidate.suspect or candidate.model != first.model:
                return None
            taken[candidate.job] = candidate.model
            return candidate

        return pack(first, self._sized(view), following)

    def _walk(
        self, rank: Rank, view: View, now: float, taken: dict[str, str], decisions: list[Decision]
    ) -> Iterator[Candidate]:
        """What `rank` could run, the first first."""
        stage, late = rank.stage, []
        full: set[str] = set()  # models of which enough is encoded, for all that follow too

        def may_run(candidate: Candidate) -> bool:
            model = candidate.model
            if stage != ENCODE or model in full:
                return model not in full
            if self._enough_encoded(candidate, view, taken):
                full.add(model)
            return model not in full

        try:
            for candidate in self._ready[stage]:
                if candidate.job in taken or candidate.model not in rank.models:
                    continue
                if self._doomed_last and is_late(candidate, view, now):
                    late.append(candidate)
                    continue
                if may_run(candidate):
                    yield candidate
                elif full.issuperset(rank.models):
                    return
            for candidate in chain(self._doomed[stage], sorted(late, key=lambda c: c.remaining_s)):
                if candidate.job in taken or candidate.model not in rank.models:
                    continue
                if may_run(candidate):
                    yield candidate
        finally:
            for candidate in late:
                self._give_up(candidate, decisions)

    def _give_up(self, candidate: Candidate, decisions: list[Decision]) -> None:
        if self._ready[candidate.stage].remove(candidate.job) is None:
            return
        self._doomed[candidate.stage].add(candidate, candidate.remaining_s)
        if not candidate.doomed:
            candidate.doomed = True
            decisions.append(Doomed(candidate.job))

    def _continues(self, rank: Rank, first: Candidate) -> bool:
        """Whether the job that runs there goes on and comes before `first`."""
        task = unfinished(rank)
        if task is None:
            return False
        if task.doomed != first.doomed and self._doomed_last:
            return first.doomed
        return self._rule.key(task) <= self._rule.key(first)

    def _enough_encoded(self, candidate: Candidate, view: View, taken: Mapping[str, str]) -> bool:
        """Whether the encoded jobs of its model that go before `candidate` keep the denoisers
        busy, both by number and by time: embeddings that wait only take memory."""
        model, ranks = candidate.model, view.by_stage.get(DENOISE, ())
        denoisers = max(1, sum(model in rank.models for rank in ranks))
        key = self._rule.key(candidate)
        count, work_s = sum(other == model for other in taken.values()), 0.0
        doomed = self._doomed[DENOISE] if candidate.doomed else ()
        for encoded in chain(self._ready[DENOISE], doomed):
            if not candidate.doomed and self._rule.key(encoded) > key:
                break
            if encoded.model != model:
                continue
            count += 1
            work_s += cost_s(encoded, encoded.steps)
            if count >= view.ahead * denoisers and work_s >= view.ahead_s * denoisers:
                return True
        return count >= MOST_AHEAD * denoisers

    def _sized(self, view: View) -> View:
        if self._rule.chunk == "chunk":
            return view
        if self._view is None or self._given is not view:
            wanted = WHOLE_S if self._rule.chunk == "whole" else 0.0
            self._given, self._view = view, replace(view, chunk_s=wanted)
        return self._view


def is_late(candidate: Candidate, view: View, now: float) -> bool:
    """Whether it can no longer make its deadline, beyond what the estimate may be wrong by."""
    return candidate.slack_s(now) < -view.error * candidate.remaining_s
