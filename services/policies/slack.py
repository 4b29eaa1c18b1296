"""Ours: slack says who can still make it, the deadline orders those who can.

`slack = deadline − now − remaining`. Jobs with slack (within the error of the estimate) run
earliest deadline first: the textbook least-slack order thrashes, and plain EDF collapses under
load because it runs jobs that are late already (the domino effect). Those come last instead,
shortest first, and get a bounded share of the ranks so that nothing starves. A running chunk
is asked to yield only where waiting for its end would cost a job its deadline.

Sources: the RFC on chunked EDF scheduling for vLLM-Omni (chunks, slack); Liu and Layland 1973
(EDF); docs/scheduling.md has what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.stage import DENOISE, ENCODE, STAGES
from services.policies.base import (
    Candidate,
    Decision,
    Doomed,
    Preempt,
    Rank,
    Recall,
    Run,
    View,
    chunk_stop,
    cost_s,
    pack,
)
from services.policies.index import Index

# What doomed jobs get of a stage's time while others wait that can still make it.
DOOMED_SHARE = 0.05
# Encoded jobs per denoiser whatever their length.
MOST_AHEAD = 64


class Slack:
    name = "slack"

    def __init__(self) -> None:
        self._feasible = {stage: Index() for stage in STAGES}  # by deadline
        self._doomed = {stage: Index() for stage in STAGES}  # by work left
        self._spent = dict.fromkeys(STAGES, 0.0)
        self._spent_doomed = dict.fromkeys(STAGES, 0.0)

    def add(self, candidate: Candidate) -> None:
        self.remove(candidate.job)
        self._feasible[candidate.stage].add(candidate, candidate.deadline_s, -candidate.priority)

    def remove(self, job: str) -> None:
        for stage in STAGES:
            self._feasible[stage].remove(job)
            self._doomed[stage].remove(job)

    def order(self, now: float) -> Iterable[str]:
        feasible = [(c.deadline_s, c.job) for index in self._feasible.values() for c in index]
        doomed = [(c.remaining_s, c.job) for index in self._doomed.values() for c in index]
        return [job for _, job in sorted(feasible)] + [job for _, job in sorted(doomed)]

    def plan(self, view: View, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        taken: set[str] = set()
        for stage in STAGES:
            for rank in sorted(view.by_stage.get(stage, ()), key=lambda r: r.free_at(now)):
                if rank.queued or (rank.running and rank.running.ends_s - now > view.lead_s):
                    continue
                candidate = self._next(rank, view, now, taken, decisions)
                if candidate is None:
                    continue
                decisions.append(self._pack(candidate, rank, view, now, taken, decisions))
            if stage == DENOISE:
                decisions += self._interrupt(view, now, taken)
        return decisions

    def _pack(
        self,
        first: Candidate,
        rank: Rank,
        view: View,
        now: float,
        taken: set[str],
        decisions: list[Decision],
    ) -> Run:
        taken.add(first.job)
        self._account(first, chunk_stop(first, view.chunk_s))

        def following() -> Candidate | None:
            candidate = self._next(rank, view, now, taken, decisions)
            if candidate is None or candidate.model != first.model:
                return None
            taken.add(candidate.job)
            self._account(candidate, chunk_stop(candidate, view.chunk_s))
            return candidate

        return Run(rank.name, pack(first, view, following))

    # -- who is next ---------------------------------------------------------------------

    def _next(
        self, rank: Rank, view: View, now: float, taken: set[str], decisions: list[Decision]
    ) -> Candidate | None:
        stage = rank.stage
        doomed_turn = (
            len(self._doomed[stage]) > 0
            and self._spent_doomed[stage] < DOOMED_SHARE * self._spent[stage]
        )
        if not doomed_turn:
            found = self._first_feasible(rank, view, now, taken, decisions)
            if found:
                return found
        for candidate in self._doomed[stage]:
            if candidate.job not in taken and candidate.model in rank.models:
                if stage == ENCODE and self._enough_encoded(candidate, view, taken):
                    return None
                return candidate
        if doomed_turn:
            return self._first_feasible(rank, view, now, taken, decisions)
        return None

    def _first_feasible(
        self, rank: Rank, view: View, now: float, taken: set[str], decisions: list[Decision]
    ) -> Candidate | None:
        stage, late = rank.stage, []
        found = None
        for candidate in self._feasible[stage]:
            if candidate.job in taken:
                continue
            if candidate.slack_s(now) < -view.error * candidate.remaining_s:
                late.append(candidate)
                continue
            if candidate.model not in rank.models:
                continue
            if stage == ENCODE and self._enough_encoded(candidate, view, taken):
                break
            found = candidate
            break
        for candidate in late:
            self._feasible[stage].remove(candidate.job)
            self._doomed[stage].add(candidate, candidate.remaining_s)
            if not candidate.doomed:
                candidate.doomed = True
                decisions.append(Doomed(candidate.job))
        return found

    def _enough_encoded(self, candidate: Candidate, view: View, taken: set[str]) -> bool:
        """Whether the jobs that are encoded and go before `candidate` keep the denoisers busy,
        both by number and by time: embeddings that wait only take memory."""
        denoisers = max(1, len(view.by_stage.get(DENOISE, ())))
        count = len(taken)
        work_s = 0.0
        for encoded in self._feasible[DENOISE]:
            if encoded.deadline_s > candidate.deadline_s:
                break
            count += 1
            work_s += cost_s(encoded, encoded.steps)
            if count >= view.ahead * denoisers and work_s >= view.ahead_s * denoisers:
                return True
        return count >= MOST_AHEAD * denoisers

    def _account(self, candidate: Candidate, stop: int) -> None:
        cost = cost_s(candidate, stop)
        self._spent[candidate.stage] += cost
        if candidate.doomed:
            self._spent_doomed[candidate.stage] += cost

    # -- who must make way ----------------------------------------------------------------

    def _interrupt(self, view: View, now: float, taken: set[str]) -> list[Decision]:
        """Yield or recall where the first waiting job would miss its deadline otherwise.

        One job a plan: once its task is queued the next plan looks at the next one.
        """
        urgent = next((c for c in self._feasible[DENOISE] if c.job not in taken), None)
        if urgent is None:
            return []
        slack = urgent.slack_s(now)
        if slack < -view.error * urgent.remaining_s:
            return []
        ranks = [r for r in view.by_stage.get(DENOISE, ()) if urgent.model in r.models]
        if any(not r.running and not r.queued for r in ranks):
            return []
        victims = []
        for rank in ranks:
            if rank.running is None or rank.running.candidate.stage != DENOISE:
                continue
            wait = max(0.0, rank.running.ends_s - now)
            if rank.queued:
                wait += rank.queued.candidate.step_s
            victims.append((wait, rank))
        if not victims or min(w for w, _ in victims) + view.switch_s <= slack / 2:
            return []  # it can wait for the first chunk to end, with as much again to spare
        return self._make_way(urgent, victims, view, now)

    def _make_way(
        self, urgent: Candidate, victims: list[tuple[float, Rank]], view: View, now: float
    ) -> list[Decision]:
        open_to = []
        for _, rank in victims:
            running, queued = rank.running, rank.queued
            assert running is not None
            if queued and not _precedes(urgent, queued.candidate, now, view):
                continue
            interrupts = (
                not running.yielding
                and running.ends_s - now > running.candidate.step_s + view.switch_s
                and _precedes(urgent, running.candidate, now, view)
            )
            if queued or interrupts or running.yielding:
                open_to.append((running.candidate.deadline_s, rank, interrupts))
        if not open_to:
            return []
        # The one with most time left makes way.
        _, rank, interrupts = max(open_to, key=lambda entry: entry[0])
        decisions: list[Decision] = []
        if rank.queued:
            decisions.append(Recall(rank.queued.seq))
        assert rank.running is not None
        if interrupts:
            decisions.append(Preempt(rank.running.seq))
        if not rank.queued:
            self._account(urgent, chunk_stop(urgent, view.chunk_s))
            decisions.append(Run(rank.name, ((urgent.job, chunk_stop(urgent, view.chunk_s)),)))
        return decisions


def _precedes(first: Candidate, second: Candidate, now: float, view: View) -> bool:
    """Whether `first` goes before `second`: it can make it and is due earlier, or `second` cannot."""
    if second.slack_s(now) < -view.error * second.remaining_s:
        return True
    return first.deadline_s < second.deadline_s
