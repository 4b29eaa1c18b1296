"""Ours: slack says who can still make it, the deadline orders those who can.

`slack = deadline − now − remaining`. Jobs that can jointly make their deadlines (the keep-set,
keepset.py) run earliest deadline first: the textbook least-slack order thrashes, and plain EDF
collapses under load because it runs jobs that are late already (the domino effect). The others
come last, shortest first, and get a bounded share of the ranks so that nothing starves; one that
fits again later is taken back. A running chunk is asked to yield only where waiting for its end
would cost a job its deadline.

Sources: Moore 1968 (keep-set); Liu and Layland 1973 (EDF); the RFC on chunked EDF scheduling for
vLLM-Omni (chunks, slack); docs/scheduling.md has what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain

from common.stage import DENOISE, ENCODE, STAGES
from services.policies.base import (
    Candidate,
    Decision,
    Preempt,
    Rank,
    Recall,
    Run,
    View,
    chunk_stop,
    cost_s,
    pack,
    unfinished,
)
from services.policies.index import AgedIndex, Index
from services.policies.keeping import Keeping, is_late

# What jobs that are not kept get of a stage's time while others wait that can make it.
DOOMED_SHARE = 0.05
# What they got while nobody else waited is set off against later turns: so many chunks a rank at
# most. Turns given on top of that cost 0.5 to 2 % of the jobs their deadlines (docs/scheduling.md).
CREDIT_CHUNKS = 100
# Of their turns every so manieth goes to the one that has waited longest.
OLDEST_EVERY = 8
# Encoded jobs per denoiser whatever their length.
MOST_AHEAD = 64


class Slack:
    name = "slack"

    def __init__(self) -> None:
        self._kept = {stage: Index() for stage in STAGES}  # by deadline
        self._out = {stage: AgedIndex() for stage in STAGES}  # by work left
        self._stage: dict[str, str] = {}
        self._sent: set[str] = set()  # given to a rank by the plan that is being carried out
        self._keeping = Keeping(self._kept, self._out)
        self._owed_s = dict.fromkeys(STAGES, 0.0)  # to those who are out, of each stage
        self._turns = dict.fromkeys(STAGES, 1)

    def add(self, candidate: Candidate) -> None:
        if candidate.job in self._stage:
            self.remove(candidate.job)
        self._sent.discard(candidate.job)
        self._stage[candidate.job] = candidate.stage
        self._kept[candidate.stage].add(candidate, candidate.deadline_s, -candidate.priority)
        self._keeping.add(candidate)

    def remove(self, job: str) -> None:
        stage = self._stage.pop(job, None)
        if stage is not None and self._kept[stage].remove(job) is None:
            self._out[stage].remove(job)
        if job in self._sent:
            self._sent.discard(job)
            self._keeping.left(job)
        else:
            self._keeping.remove(job)

    def order(self, now: float) -> Iterable[str]:
        kept = merge(*(((c.deadline_s, c.job) for c in i) for i in self._kept.values()))
        out = merge(*(((c.remaining_s, c.job) for c in i) for i in self._out.values()))
        return (job for _, job in chain(kept, out))

    def plan(self, view: View, now: float) -> list[Decision]:
        self._sent.clear()
        decisions: list[Decision] = self._keeping.settle(view, now)
        taken: set[str] = set()
        lead = now + view.lead_s
        for stage in STAGES:
            if not self._kept[stage] and not self._out[stage]:
                continue
            free = [
                rank
                for rank in view.by_stage.get(stage, ())
                if rank.queued is None and (rank.running is None or rank.running.ends_s <= lead)
            ]
            if len(free) > 1:
                free.sort(key=lambda rank: rank.free_at(now))
            nothing_for: set[tuple[str, ...]] = set()
            for rank in free:
                if rank.models in nothing_for:
                    continue
                candidate = self._next(rank, view, now, taken, decisions)
                if candidate is None:
                    nothing_for.add(rank.models)
                    continue
                if self._continues(rank, candidate, now, view):
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
        self._send(first, view)

        def following() -> Candidate | None:
            candidate = self._next(rank, view, now, taken, decisions)
            if candidate is None or candidate.suspect or candidate.model != first.model:
                return None
            taken.add(candidate.job)
            self._send(candidate, view)
            return candidate

        return Run(rank.name, pack(first, view, following))

    def _send(self, candidate: Candidate, view: View) -> None:
        """`candidate` is about to be given to a rank for a chunk."""
        cost = cost_s(candidate, chunk_stop(candidate, view.chunk_s))
        stage = candidate.stage
        if candidate.job in self._out[stage]:
            # What they got while nobody else waited counts as well, up to a limit.
            ranks = len(view.by_stage.get(stage, ()))
            most = CREDIT_CHUNKS * ranks * cost
            self._owed_s[stage] = max(self._owed_s[stage] - cost, -most)
            self._turns[stage] += 1
        elif self._out[stage]:
            self._owed_s[stage] += DOOMED_SHARE / (1 - DOOMED_SHARE) * cost
        self._sent.add(candidate.job)
        self._keeping.sent(candidate, cost)

    # -- who is next ---------------------------------------------------------------------

    def _next(
        self, rank: Rank, view: View, now: float, taken: set[str], decisions: list[Decision]
    ) -> Candidate | None:
        stage, out = rank.stage, self._out[rank.stage]
        if out and self._owed_s[stage] > 0:
            # Their turn comes once the share has grown to a chunk.
            for candidate in self._of_those_out(stage):
                if candidate.job not in taken and candidate.model in rank.models:
                    cost = cost_s(candidate, chunk_stop(candidate, view.chunk_s))
                    if self._owed_s[stage] < cost:
                        break
                    if stage == ENCODE and self._enough_encoded(candidate, view, taken):
                        break
                    return candidate
        found = self._first_kept(rank, view, now, taken, decisions)
        if found:
            return found
        for candidate in out:
            if candidate.job not in taken and candidate.model in rank.models:
                if stage == ENCODE and self._enough_encoded(candidate, view, taken):
                    return None
                return candidate
        return None

    def _of_those_out(self, stage: str) -> Iterator[Candidate]:
        """The shortest first; every so often who has waited longest."""
        out = self._out[stage]
        return out.longest_first() if self._turns[stage] % OLDEST_EVERY == 0 else iter(out)

    def _first_kept(
        self, rank: Rank, view: View, now: float, taken: set[str], decisions: list[Decision]
    ) -> Candidate | None:
        stage, late = rank.stage, []
        found = None
        for candidate in self._kept[stage]:
            if candidate.job in taken:
                continue
            if is_late(candidate, now, view):
                late.append(candidate)
                continue
            if candidate.model not in rank.models:
                continue
            if stage == ENCODE and self._enough_encoded(candidate, view, taken):
                break
            found = candidate
            break
        for candidate in late:
            self._keeping.drop(candidate, now, decisions)
        return found

    def _enough_encoded(self, candidate: Candidate, view: View, taken: set[str]) -> bool:
        """Whether the jobs that are encoded and go before `candidate` keep the denoisers busy,
        both by number and by time: embeddings that wait only take memory."""
        denoisers = max(1, len(view.by_stage.get(DENOISE, ())))
        count = len(taken)
        work_s = 0.0
        is_out = candidate.job in self._out[ENCODE]
        for encoded in chain(self._kept[DENOISE], self._out[DENOISE] if is_out else ()):
            if not is_out and encoded.deadline_s > candidate.deadline_s:
                break
            count += 1
            work_s += cost_s(encoded, encoded.steps)
            if count >= view.ahead * denoisers and work_s >= view.ahead_s * denoisers:
                return True
        return count >= MOST_AHEAD * denoisers

    def _continues(self, rank: Rank, following: Candidate, now: float, view: View) -> bool:
        """Whether the job that runs there goes on and comes before `following`."""
        task = unfinished(rank)
        if task is None:
            return False
        if following.job not in self._out[following.stage]:
            return not self._precedes(following, task, now, view)
        if self._is_out(task, now, view):
            return task.remaining_s <= following.remaining_s
        cost = cost_s(following, chunk_stop(following, view.chunk_s))
        return self._owed_s[following.stage] < cost  # unless it is their turn

    def _is_out(self, candidate: Candidate, now: float, view: View) -> bool:
        return candidate.job in self._keeping.dropped or is_late(candidate, now, view)

    def _precedes(self, first: Candidate, second: Candidate, now: float, view: View) -> bool:
        """Whether `first` goes before `second`: it is due earlier, or `second` is not kept."""
        return self._is_out(second, now, view) or first.deadline_s < second.deadline_s

    # -- who must make way ----------------------------------------------------------------

    def _interrupt(self, view: View, now: float, taken: set[str]) -> list[Decision]:
        """Yield or recall where the first waiting job would miss its deadline otherwise.

        One job a plan: once its task is queued the next plan looks at the next one.
        """
        urgent = next((c for c in self._kept[DENOISE] if c.job not in taken), None)
        if urgent is None:
            return []
        slack = urgent.slack_s(now)
        if slack < -view.error * urgent.remaining_s:
            return []
        victims = []
        soonest = float("inf")
        for rank in view.by_stage.get(DENOISE, ()):
            if urgent.model not in rank.models:
                continue
            if rank.running is None:
                if rank.queued is None:
                    return []
                continue
            if rank.running.candidate.stage != DENOISE:
                continue
            wait = max(0.0, rank.running.ends_s - now)
            if rank.queued:
                wait += rank.queued.candidate.step_s
            victims.append(rank)
            soonest = min(soonest, wait)
        if not victims or soonest + view.switch_s <= slack / 2:
            return []  # it can wait for the first chunk to end, with as much again to spare
        return self._make_way(urgent, victims, view, now)

    def _make_way(
        self, urgent: Candidate, victims: list[Rank], view: View, now: float
    ) -> list[Decision]:
        open_to = []
        for rank in victims:
            running, queued = rank.running, rank.queued
            assert running is not None
            if queued and not self._precedes(urgent, queued.candidate, now, view):
                continue
            interrupts = (
                not running.yielding
                and running.ends_s - now > running.candidate.step_s + view.switch_s
                and self._precedes(urgent, running.candidate, now, view)
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
            self._send(urgent, view)
            decisions.append(Run(rank.name, ((urgent.job, chunk_stop(urgent, view.chunk_s)),)))
        return decisions
