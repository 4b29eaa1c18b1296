"""Ours: slack says who can still make it, the deadline orders those who can.

`slack = deadline − now − remaining`. Jobs that can jointly make their deadlines (the keep-set,
keeping.py) run earliest deadline first: the textbook least-slack order thrashes, and plain EDF
collapses under load because it runs jobs that are late already (the domino effect). The others
come last, shortest first; one that fits again later is taken back, and one that has gone without
a step for too long gets a turn (turns.py). A running chunk is asked to yield only where waiting
for its end would cost a job its deadline. Jobs that are not exact share passes where that pays
(batches.py).

Sources: Moore 1968 (keep-set); Liu and Layland 1973 (EDF); the RFC on chunked EDF scheduling for
vLLM-Omni (chunks, slack); docs/scheduling.md has what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain, islice, repeat
from math import inf
from typing import Literal

from common.stage import DENOISE, ENCODE, STAGES
from services.policies.base import (
    Candidate,
    Decision,
    Outlook,
    Preempt,
    Rank,
    Run,
    Running,
    View,
    chunk_stop,
    cost_s,
    longest_chunk_s,
    pack,
    under_way_s,
    unfinished,
)
from services.policies.batches import OTHERS, SKIM, run_together, share, shares
from services.policies.index import AgedLanes, Lanes
from services.policies.keeping import Keeping, is_late
from services.policies.places import Places, has_another, place_elsewhere
from services.policies.turns import Turns, turn_stop
from services.policies.yielding import make_way

# Encoded jobs per denoiser whatever their length: where steps are so short that `ahead_s` asks
# for hundreds, hand-overs are the limit and not embeddings.
MOST_AHEAD = 64


@dataclass(slots=True)
class Round:
    """One plan as it is being made."""

    view: View
    now: float
    decisions: list[Decision]
    taken: dict[str, str] = field(default_factory=dict)  # waiting jobs given to a rank: model
    given: set[str] = field(default_factory=set)  # ranks that were given one
    yields: int = 0  # the seq that was asked to


@dataclass(slots=True)
class Next:
    """What a rank should run next, and as what."""

    candidate: Candidate
    why: Literal["due", "kept", "early", "out"]  # the overdue's turn, or who is first of these

    @property
    def is_turn(self) -> bool:
        return self.why in ("due", "early")


class Slack:
    name = "slack"

    def __init__(self) -> None:
        self._kept = {stage: Lanes() for stage in STAGES}  # by deadline
        self._out = {stage: AgedLanes() for stage in STAGES}  # by work left
        self._stage: dict[str, str] = {}
        self._waiting = dict.fromkeys(STAGES, 0)
        self._keeping = Keeping(self._kept, self._out)
        self._turns = Turns(self._out)
        self._places = Places()

    def add(self, candidate: Candidate) -> None:
        if candidate.job in self._stage:
            self.remove(candidate.job)
        self._stage[candidate.job] = candidate.stage
        self._waiting[candidate.stage] += 1
        self._kept[candidate.stage].add(candidate, candidate.deadline_s, -candidate.priority)
        self._keeping.add(candidate)

    def remove(self, job: str) -> None:
        stage = self._stage.pop(job, None)
        if stage is not None:
            self._waiting[stage] -= 1
            if self._kept[stage].remove(job) is None:
                self._out[stage].remove(job)
        self._keeping.remove(job)

    def order(self, now: float) -> Iterable[str]:
        kept = merge(*(((c.deadline_s, c.job) for c in lanes) for lanes in self._kept.values()))
        out = merge(*(((c.remaining_s, c.job) for c in lanes) for lanes in self._out.values()))
        return (job for _, job in chain(kept, out))

    def outlook(self, candidate: Candidate, view: View, now: float) -> Outlook:
        """It fits if all that are kept would still be in time with it; else it would be out, or
        push out one that is larger."""
        fits = self._keeping.fits(candidate, view, now)
        plan = Round(view, now, [])

        def goes_before(held: Running) -> bool:
            task = held.candidate
            if self._is_out(task, plan, held.done_s(now)):
                return not fits and task.remaining_s <= candidate.remaining_s
            return not fits or task.deadline_s <= candidate.deadline_s

        ahead_s = under_way_s(view, now, goes_before)
        for stage in (ENCODE, DENOISE):
            ahead_s += self._kept[stage].work_before(candidate.deadline_s if fits else inf, inf)
            if not fits:
                ahead_s += self._out[stage].work_before(candidate.remaining_s)
        return Outlook(ahead_s, fits)

    def plan(self, view: View, now: float) -> list[Decision]:
        plan = Round(view, now, self._keeping.settle(view, now))
        for stage in STAGES:
            if self._waiting[stage]:
                self._fill(stage, plan)
                if stage == DENOISE:
                    self._interrupt(plan)
        return plan.decisions

    def _fill(self, stage: str, plan: Round) -> None:
        """Something to do for every rank of `stage` that is free, or soon will be."""
        lead = plan.now + plan.view.lead_s
        free = [
            rank
            for rank in plan.view.by_stage.get(stage, ())
            if rank.queued is None and (rank.running is None or rank.running.ends_s <= lead)
        ]
        if len(free) > 1:
            # Those whose last job may go on first, lest others take its place.
            kept, last = self._kept[stage], self._places.last
            free.sort(
                key=lambda rank: (
                    rank.running.ends_s if rank.running else 0.0,
                    last(rank) not in kept,
                )
            )
        nothing_for: set[tuple[str, ...]] = set()
        for rank in free:
            if rank.models in nothing_for:
                continue
            following = self._next(rank, plan)
            if following is None:
                nothing_for.add(rank.models)
            elif not self._continues(rank, following, plan):
                self._give(rank, following, plan)

    # -- who is next ---------------------------------------------------------------------

    def _next(self, rank: Rank, plan: Round) -> Next | None:
        view, now, taken = plan.view, plan.now, plan.taken
        due = self._turns.due(rank, view, now, taken)
        if due is not None:
            return Next(due, "due")
        kept = self._first_kept(rank, plan)
        if kept is not None:
            return Next(kept, "kept")
        early = self._turns.early(rank, view, now, taken)
        if early is not None:
            return Next(early, "early")
        for candidate in self._out[rank.stage].of(rank.models):
            if candidate.job not in taken:
                if rank.stage == ENCODE and self._enough_encoded(candidate, plan):
                    return None
                return Next(candidate, "out")
        return None

    def _first_kept(self, rank: Rank, plan: Round) -> Candidate | None:
        late: list[Candidate] = []
        found = None
        for candidate in self._kept[rank.stage].of(rank.models):
            if candidate.job in plan.taken:
                continue
            if is_late(candidate, plan.now, plan.view):
                late.append(candidate)
                continue
            if rank.stage != ENCODE or not self._enough_encoded(candidate, plan):
                found = candidate
            break
        for candidate in late:
            self._keeping.drop(candidate, plan.now, plan.decisions)
        if found is not None and rank.stage == DENOISE:
            last = self._kept[DENOISE].get(self._places.last(rank))
            if last is not None and last.job not in plan.taken and last.job != found.job:
                return last if self._elsewhere(found, last, rank, plan) else found
        return found

    def _elsewhere(self, first: Candidate, last: Candidate, rank: Rank, plan: Round) -> bool:
        return place_elsewhere(first, last, rank, plan.given, plan.view, plan.now)

    def _enough_encoded(self, candidate: Candidate, plan: Round, beside: int = 0) -> bool:
        """Whether the jobs of its model that are encoded and go before `candidate`, and those
        `beside` it in its task, keep the denoisers busy, both by number and by time: embeddings
        that wait only take memory."""
        view, model = plan.view, candidate.model
        ranks = view.by_stage.get(DENOISE, ())
        denoisers = max(1, sum(model in rank.models for rank in ranks))
        ahead = view.ahead * denoisers
        if shares(candidate, view):  # as many chunks, and of one member more than of late
            ahead *= 1 + round(self._keeping.pace.members)
        count = beside + sum(other == model for other in plan.taken.values())
        work_s = 0.0
        is_out = candidate.job in self._out[ENCODE]
        out = self._out[DENOISE].of((model,)) if is_out else ()
        for encoded in chain(self._kept[DENOISE].of((model,)), out):
            if not is_out and encoded.deadline_s > candidate.deadline_s:
                break
            count += 1
            work_s += cost_s(encoded, encoded.steps)
            if count >= ahead and work_s >= view.ahead_s * denoisers:
                return True
        return count >= MOST_AHEAD * denoisers

    def _continues(self, rank: Rank, following: Next, plan: Round) -> bool:
        """Whether the job that runs there goes on and comes before `following`."""
        if self._joins(following.candidate, rank, plan):
            return True
        held, task = rank.running, unfinished(rank)
        if held is None or task is None or following.why == "due":
            return False
        is_out = self._is_out(task, plan, held.done_s(plan.now))
        if following.why == "kept":
            if not self._precedes(following.candidate, held, plan):
                return True
            return not is_out and self._elsewhere(following.candidate, task, rank, plan)
        if not is_out:
            return True
        left_s = task.remaining_s - cost_s(task, held.stop)
        return following.why == "out" and left_s <= following.candidate.remaining_s

    def _joins(self, candidate: Candidate, rank: Rank, plan: Round) -> bool:
        """Whether jobs that run there come back from their chunk to share the next with it."""
        running = rank.running
        if rank.stage != DENOISE or running is None:
            return False
        if not (running.goes_on or running.yielding or plan.yields == running.seq):
            return False
        return shares(candidate, plan.view) and running.candidate.batch == candidate.batch

    def _is_out(self, candidate: Candidate, plan: Round, done_s: float = 0.0) -> bool:
        """Whether it is not kept. Under way, `done_s` of its work is done already."""
        dropped = candidate.job in self._keeping.dropped
        return dropped or is_late(candidate, plan.now - done_s, plan.view)

    def _precedes(self, first: Candidate, held: Running, plan: Round) -> bool:
        """Whether `first` goes before the job that a rank holds: it is due earlier, or that one is
        not kept."""
        second = held.candidate
        is_out = self._is_out(second, plan, held.done_s(plan.now))
        return is_out or first.deadline_s < second.deadline_s

    # -- handing over ----------------------------------------------------------------------

    def _give(self, rank: Rank, first: Next, plan: Round) -> None:
        if first.is_turn:
            stop = turn_stop(first.candidate)
            self._turns.took(rank, first.candidate, plan.view)
            self._note(first.candidate, rank, plan)
            plan.decisions.append(Run(rank.name, ((first.candidate.job, stop),)))
            return

        if shares(first.candidate, plan.view) and self._give_together(rank, first.candidate, plan):
            return

        def following() -> Candidate | None:
            found = self._next(rank, plan)
            if found is None or found.is_turn or found.candidate.suspect:
                return None
            if found.candidate.model != first.candidate.model:
                return None
            self._send(found.candidate, rank, plan)
            return found.candidate

        self._send(first.candidate, rank, plan)
        plan.decisions.append(Run(rank.name, pack(first.candidate, plan.view, following)))

    def _give_together(self, rank: Rank, first: Candidate, plan: Round) -> bool:
        """A task of `first` and of whoever can share its forward passes: first of the kept, by
        deadline, then of those that are out. False where that is nobody, and `first` may be
        packed with others instead."""
        company, others = self._company(first, plan), self._others(first, rank, plan)
        members, each_s = share(first, company, plan.view, plan.now, rank.most_units, others)
        if len(members) == 1 and rank.stage != DENOISE:
            return False
        run = run_together(rank.name, members, each_s, plan.view)
        took_s = each_s
        if rank.stage == DENOISE:
            did = [(m, stop - m.step) for m, (_, stop) in zip(members, run.rows, strict=True)]
            took_s *= max(steps for _, steps in did)
            alone_s = sum(m.step_s * steps for m, steps in did)
            self._keeping.pace.ran(alone_s, took_s, len(members))
            self._keeping.longest_step_s = max(self._keeping.longest_step_s, each_s)
        self._turns.passed(rank, took_s, plan.view, plan.now)
        for member in members:
            self._note(member, rank, plan)
        plan.decisions.append(run)
        return True

    def _company(self, first: Candidate, plan: Round) -> Iterator[Candidate]:
        """Who could share a task with `first`: the kept of its key, by deadline; and if all who
        are kept come along, those that are out, of whom the late only with another late one: they
        would take their company's time for nothing."""
        offered, others = 1, False
        late = self._is_out(first, plan)
        kept = islice(self._kept[first.stage].of((first.model,)), SKIM)
        out = islice(self._out[first.stage].of((first.model,)), SKIM)
        for candidate, is_kept in chain(zip(kept, repeat(True)), zip(out, repeat(False))):
            if candidate.job in plan.taken or candidate.job == first.job:
                continue
            if candidate.batch != first.batch or candidate.suspect:
                others = others or is_kept
                continue
            if not is_kept and (others or (not late and is_late(candidate, plan.now, plan.view))):
                continue
            if first.stage == ENCODE and self._enough_encoded(candidate, plan, offered):
                return
            offered += 1
            yield candidate

    def _others(self, first: Candidate, rank: Rank, plan: Round) -> list[Candidate]:
        """The next of the kept that cannot share a task with `first` and wait for its rank, since
        no other is theirs soon enough."""
        found = (
            candidate
            for candidate in islice(self._kept[rank.stage].of(rank.models), SKIM)
            if (candidate.batch != first.batch or candidate.suspect)
            and candidate.job not in plan.taken
            and candidate.job != first.job
            and not has_another(candidate, rank, plan.given, plan.view, plan.now)
        )
        return list(islice(found, OTHERS))

    def _send(self, candidate: Candidate, rank: Rank, plan: Round) -> int:
        """`candidate` gets a chunk on `rank`; the step that it ends before."""
        stop = chunk_stop(candidate, plan.view.chunk_s)
        spent_s = cost_s(candidate, stop)
        self._turns.passed(rank, spent_s, plan.view, plan.now)
        if self._keeping.pace.now > 1.0 and rank.stage == DENOISE:
            self._keeping.pace.ran(spent_s, spent_s)
        self._note(candidate, rank, plan)
        return stop

    def _note(self, candidate: Candidate, rank: Rank, plan: Round) -> None:
        plan.taken[candidate.job] = candidate.model
        plan.given.add(rank.name)
        if rank.stage == DENOISE:
            self._places.ran(rank, candidate.job, plan.view.ranks)

    def _interrupt(self, plan: Round) -> None:
        """Make way for the first waiting job of a model where it would be late otherwise.

        One job a plan: once its task is queued the next plan looks at the next one.
        """
        chunk_s = longest_chunk_s(plan.view, self._keeping.longest_step_s)

        def precedes(first: Candidate, held: Running) -> bool:
            return self._precedes(first, held, plan)

        def is_turn(held: Running) -> bool:
            return held.stop == turn_stop(held.candidate) and self._is_out(held.candidate, plan)

        for urgent in self._kept[DENOISE].heads(plan.taken):
            decisions, rank = make_way(
                urgent, plan.view, plan.now, chunk_s, plan.given, precedes, is_turn
            )
            plan.decisions += decisions
            plan.yields = next((d.seq for d in decisions if isinstance(d, Preempt)), 0)
            if rank is not None and not self._joins(urgent, rank, plan):
                self._give(rank, Next(urgent, "kept"), plan)
            if decisions or rank is not None:
                return
