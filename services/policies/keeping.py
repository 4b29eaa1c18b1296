"""Who is kept and who is not: the keep-set brought up to date with the pool as it is now."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

from common.stage import DECODE, DENOISE
from services.policies.base import Candidate, Decision, Degrade, Doomed, Rank, View
from services.policies.batches import Pace
from services.policies.groups import Group, Groups
from services.policies.index import AgedLanes, Index, Lanes

# Dropped jobs that a plan tries to take back: the shortest, and another in turn.
TRIES = 2
# One step of priority counts as much as half the work; beyond this many it makes no difference.
MOST_PRIORITY = 60


def is_late(candidate: Candidate, now: float, view: View) -> bool:
    """Whether it cannot make its deadline even alone, beyond what the estimate may be wrong by."""
    return candidate.slack_s(now) < -view.error * candidate.remaining_s


@dataclass(frozen=True, slots=True)
class Terms:
    """What a job's entry depends on besides the job and the number of ranks."""

    switch_s: float = 0.0
    error: float = 0.05
    pace: float = 1.0  # how much more gets done than one by one, since jobs share passes
    stretch: float = 1.0  # how much longer one takes for that


class Keeping:
    """Moves waiting jobs between `kept` (by deadline) and `out` (by work left), which the policy
    walks. Jobs under way stay in the keep-sets, with all their work until their chunk ends."""

    def __init__(self, kept: Mapping[str, Lanes], out: Mapping[str, AgedLanes]) -> None:
        self._kept, self._out = kept, out
        self._groups = Groups()
        self._arranged: object = None  # the pool as the groups know it
        self._terms = Terms()
        self.pace = Pace()
        self.dropped: set[str] = set()  # waiting or under way
        self._known: dict[str, Candidate] = {}  # waiting, not decoding
        self._away: dict[str, Candidate] = {}  # under way
        self._again = Index()  # dropped, waiting, and not hopeless: by work left
        self._lost_at: list[tuple[float, str]] = []  # heap: when such a job becomes hopeless
        self._turn = 0
        self.longest_step_s = 0.0  # of any job so far

    def add(self, candidate: Candidate) -> None:
        """It waits; in the set until the next `settle` finds no room."""
        job = candidate.job
        self._away.pop(job, None)
        self.dropped.discard(job)
        if candidate.stage == DECODE:
            self._discard(job)
            return
        self._known[job] = candidate
        self.longest_step_s = max(self.longest_step_s, candidate.step_s)
        self._put(candidate)

    def remove(self, job: str) -> None:
        """It has ended."""
        self._known.pop(job, None)
        self._away.pop(job, None)
        self._again.remove(job)
        self.dropped.discard(job)
        self._discard(job)

    def sent(self, candidate: Candidate) -> None:
        """It is given to a rank for a chunk."""
        if candidate.stage != DECODE:
            self._away[candidate.job] = candidate

    def left(self, job: str) -> None:
        """It does not wait any more: it is under way."""
        self._known.pop(job, None)
        self._again.remove(job)

    def settle(self, view: View, now: float) -> list[Decision]:
        """Drop whom there is no room for, take back whom there is."""
        decisions: list[Decision] = []
        self._look_at_pool(view)
        # The clock costs a look at every rank, and mostly there is room to spare.
        soon = now + self.longest_step_s
        pressed = [g for g in self._groups.all if self._again or g.jobs.spare_s < soon]
        if pressed:
            self._forget_stray(view)
        for group in pressed:
            group.clock_s = clock(group.ranks, now)
            while (job := group.jobs.evict(group.clock_s)) is not None:
                self._discard(job)
                if not self._degraded(job, decisions):
                    self._dropped(job, now, decisions)
        while self._lost_at and self._lost_at[0][0] < now:
            _, job = heappop(self._lost_at)
            lost = self._again.get(job)
            if lost is not None and is_late(lost, now, view):
                self._again.remove(job)
                _say(lost, decisions)
        if self._again:
            self._take_back()
        return decisions

    def fits(self, candidate: Candidate, view: View, now: float) -> bool:
        """Whether `candidate`, which does not wait yet, would make its deadline and all that are
        kept theirs."""
        self._look_at_pool(view)
        for group in self._groups.of(candidate.model):
            group.clock_s = clock(group.ranks, now)
        return not is_late(candidate, now, view) and self._fits(candidate)

    def drop(self, candidate: Candidate, now: float, decisions: list[Decision]) -> None:
        """It is late by itself."""
        self._discard(candidate.job)
        self._known.setdefault(candidate.job, candidate)
        self._dropped(candidate.job, now, decisions)

    # -- what is in the set ----------------------------------------------------------------

    def _entry(self, candidate: Candidate, group: Group) -> tuple[float, float, float, float]:
        """due, limit, load and size for KeepSet.put."""
        terms = self._terms
        work = (candidate.steps - candidate.step) * candidate.step_s
        due = candidate.deadline_s - (candidate.remaining_s - work)
        size = work / 2.0 ** max(-MOST_PRIORITY, min(MOST_PRIORITY, candidate.priority))
        load = (work / terms.pace + terms.switch_s) / group.size
        limit = due + terms.error * candidate.remaining_s
        if candidate.batch:  # it must begin early enough to bear company
            limit -= work * max(0.0, terms.stretch - 1 / terms.pace)
        return due, limit, load, size

    def _put(self, candidate: Candidate) -> None:
        for group in self._groups.of(candidate.model):
            group.jobs.put(candidate.job, *self._entry(candidate, group))

    def _discard(self, job: str) -> None:
        for group in self._groups.all:
            group.jobs.discard(job)

    # -- the pool --------------------------------------------------------------------------

    def _look_at_pool(self, view: View) -> None:
        changed = False
        if view.by_stage is not self._arranged:
            self._arranged = view.by_stage
            changed = self._groups.arrange(view.by_stage.get(DENOISE, ()))
        terms = Terms(view.switch_s, view.error, self.pace.now, self.pace.stretch)
        if terms != self._terms:
            self._terms = terms
            changed = True
        if changed:
            for job, candidate in chain(self._known.items(), self._away.items()):
                if job not in self.dropped:
                    self._put(candidate)

    def _forget_stray(self, view: View) -> None:
        """Jobs that were sent and that no rank shows: packed behind others, or ended since."""
        ranks = (rank for rank in view.ranks if rank.stage != DECODE)
        held = (held for rank in ranks for held in (rank.running, rank.queued) if held)
        at_work = {job for each in held for job in (each.candidate.job, *each.company)}
        if len(self._away) <= len(at_work):
            return
        for job in [job for job in self._away if job not in at_work and job not in self._known]:
            del self._away[job]
            self.dropped.discard(job)
            self._discard(job)

    # -- who goes and who comes back -------------------------------------------------------

    def _dropped(self, job: str, now: float, decisions: list[Decision]) -> None:
        self.dropped.add(job)
        candidate = self._known.get(job)
        if candidate is None:
            return  # under way; it is looked at again when it comes back
        if self._kept[candidate.stage].remove(job) is not None:
            self._out[candidate.stage].enter(candidate, candidate.remaining_s, now)
        lost_at = candidate.deadline_s - (1 - self._terms.error) * candidate.remaining_s
        if lost_at < now or candidate.stage == DECODE:
            _say(candidate, decisions)
            return
        self._again.add(candidate, candidate.remaining_s)
        heappush(self._lost_at, (lost_at, job))

    def _degraded(self, job: str, decisions: list[Decision]) -> bool:
        """Keep a job that would rather do fewer steps than be late, with as many as fit."""
        candidate = self._known.get(job)
        if candidate is None or not 0 < candidate.fewest < candidate.steps:
            return False
        fit = bisect_left(
            range(candidate.fewest, candidate.steps), True,
            key=lambda steps: not self._fits(candidate.cut_to(steps)),
        )  # fmt: skip
        if fit == 0:
            return False  # not even the fewest
        shorter = candidate.cut_to(candidate.fewest + fit - 1)
        self._known[job] = shorter
        self._put(shorter)
        self._kept[shorter.stage].add(shorter, shorter.deadline_s, -shorter.priority)
        decisions.append(Degrade(job, shorter.steps))
        return True

    def _take_back(self) -> None:
        for number in range(TRIES):
            if not self._again:
                return
            self._turn = (self._turn + 1) % len(self._again) if number else self._turn
            candidate = self._again.at(self._turn if number else 0)
            if not self._fits(candidate):
                continue
            self._again.remove(candidate.job)
            self.dropped.discard(candidate.job)
            self._put(candidate)
            if self._out[candidate.stage].remove(candidate.job) is not None:
                kept = self._kept[candidate.stage]
                kept.add(candidate, candidate.deadline_s, -candidate.priority)

    def _fits(self, candidate: Candidate) -> bool:
        for group in self._groups.of(candidate.model):
            due, limit, load, _ = self._entry(candidate, group)
            if not group.jobs.fits(candidate.job, due, limit, load, group.clock_s):
                return False
        return True


def clock(ranks: Sequence[Rank], now: float) -> float:
    """When work begins: now, or when those who run could make way, on average."""
    total = 0.0
    for rank in ranks:
        running = rank.running
        if running is not None:
            wait = running.ends_s - now
            if wait > 0:
                step_s = running.candidate.step_s
                total += step_s if wait > step_s else wait
    return now + total / max(1, len(ranks))


def _say(candidate: Candidate, decisions: list[Decision]) -> None:
    """Once a job."""
    if not candidate.doomed:
        candidate.doomed = True
        decisions.append(Doomed(candidate.job))
