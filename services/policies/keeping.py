"""Who is kept and who is not: the keep-set brought up to date with the pool as it is now.

A job under way counts with what it has left once it could make way, and the step that runs until
then counts as time in which nobody else begins. So a job weighs as much when it runs as when it
waits: none falls out of the set because it was given a rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain

from common.stage import DECODE, DENOISE
from services.policies.base import Candidate, Decision, Degrade, Doomed, Running, View
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
    walks. Jobs under way stay in the keep-sets; which those are the ranks tell."""

    def __init__(self, kept: Mapping[str, Lanes], out: Mapping[str, AgedLanes]) -> None:
        self._kept, self._out = kept, out
        self._groups = Groups()
        self._arranged: object = None  # the pool as the groups know it
        self._terms = Terms()
        self.pace = Pace()
        self.dropped: set[str] = set()  # waiting or under way
        self._known: dict[str, Candidate] = {}  # waiting, not decoding
        self._away: dict[str, Candidate] = {}  # under way, as they were sent
        self._ended: set[str] = set()  # and still shown by a rank
        self._begun: dict[str, int] = {}  # by job under way: steps counted as done in the sets
        # Since when it would have been out without a break, and how far it was: by job
        self._since: dict[str, tuple[float, tuple[str, int]]] = {}
        self._again = Index()  # dropped, waiting, and not hopeless: by work left
        self._lost_at: list[tuple[float, str]] = []  # heap: when such a job becomes hopeless
        self._turn = 0
        self.longest_step_s = 0.0  # of any job so far

    def add(self, candidate: Candidate) -> None:
        """It waits; in the set until the next `settle` finds no room."""
        job = candidate.job
        self._away.pop(job, None)
        self._begun.pop(job, None)
        self._ended.discard(job)
        self.dropped.discard(job)
        if job in self._since and self._since[job][1] != (candidate.stage, candidate.step):
            del self._since[job]
        if candidate.stage == DECODE:
            self._discard(job)
            return
        self._known[job] = candidate
        self.longest_step_s = max(self.longest_step_s, candidate.step_s)
        self._put(candidate)

    def remove(self, job: str) -> None:
        """It does not wait any more: given to a rank or ended, as the ranks will tell; or it has
        ended under way."""
        self._again.remove(job)
        candidate = self._known.pop(job, None)
        if candidate is not None:
            self._away[job] = candidate
        elif job in self._away:
            self._forget(job)
            self._ended.add(job)

    def settle(self, view: View, now: float) -> list[Decision]:
        """Drop whom there is no room for, take back whom there is."""
        decisions: list[Decision] = []
        self._look_at_pool(view)
        # What runs is looked at closely only if need be: mostly there is room to spare.
        soon = now + self.longest_step_s
        pressed = [g for g in self._groups.all if self._again or g.jobs.spare_s < soon]
        if pressed:
            self._look_at_work(view, now)
        for group in pressed:
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
        self._look_at_work(view, now)
        return not is_late(candidate, now, view) and self._fits(candidate)

    def drop(self, candidate: Candidate, now: float, decisions: list[Decision]) -> None:
        """It is late by itself."""
        self._discard(candidate.job)
        self._known.setdefault(candidate.job, candidate)
        self._dropped(candidate.job, now, decisions)

    # -- what is in the set ----------------------------------------------------------------

    def _entry(
        self, candidate: Candidate, group: Group, begun: int = 0
    ) -> tuple[float, float, float, float]:
        """due, limit, load and size for KeepSet.put, of a job that has `begun` so many steps since
        it was sent."""
        terms = self._terms
        work = (candidate.steps - candidate.step) * candidate.step_s
        due = candidate.deadline_s - (candidate.remaining_s - work)
        work -= begun * candidate.step_s
        size = work / 2.0 ** max(-MOST_PRIORITY, min(MOST_PRIORITY, candidate.priority))
        load = (work / terms.pace + terms.switch_s) / group.size
        limit = due + terms.error * candidate.remaining_s
        if candidate.batch:  # it must begin early enough to bear company
            limit -= work * max(0.0, terms.stretch - 1 / terms.pace)
        return due, limit, load, size

    def _put(self, candidate: Candidate, begun: int = 0) -> None:
        for group in self._groups.of(candidate.model):
            group.jobs.put(candidate.job, *self._entry(candidate, group, begun))

    def _discard(self, job: str) -> None:
        for group in self._groups.all:
            group.jobs.discard(job)

    # -- the pool --------------------------------------------------------------------------

    def _forget(self, job: str) -> None:
        """It is no longer under way."""
        del self._away[job]
        self._begun.pop(job, None)
        self._since.pop(job, None)
        self.dropped.discard(job)
        self._discard(job)

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
                    self._put(candidate, self._begun.get(job, 0))
        self._look_who_is_away(view)

    def _look_who_is_away(self, view: View) -> None:
        """Forget jobs that no rank shows any more, and learn of those that were under way before
        this policy led."""
        held: list[Running] = []
        shown: set[str] = set()
        for rank in view.ranks:
            if rank.running is None or rank.stage == DECODE:
                continue
            for each in (rank.running, rank.queued):
                if each is not None:
                    held.append(each)
                    shown.add(each.candidate.job)
                    if each.company:
                        shown.update(each.company)
        self._ended &= shown
        if shown == self._away.keys():
            return
        for job in self._away.keys() - shown:
            self._forget(job)
        for each in held:
            for job in (each.candidate.job, *each.company):
                if not (job in self._away or job in self._ended or job in self._known):
                    # Of company only the name is known: as much as of the first.
                    self._away[job] = replace(each.candidate, job=job)
                    self._put(self._away[job])

    def _look_at_work(self, view: View, now: float) -> None:
        """What jobs under way have left, and so when others' work can begin."""
        yields_in_s: dict[str, float] = {}
        for rank in view.by_stage.get(DENOISE, ()):
            if rank.running is not None:
                self._count_begun(rank.running, now)
                yields_in_s[rank.name] = self._yields_in_s(rank.running, now)
        for group in self._groups.all:
            total_s = sum(yields_in_s.get(rank.name, 0.0) for rank in group.ranks)
            group.clock_s = now + total_s / group.size

    def _count_begun(self, running: Running, now: float) -> None:
        begun = running.begun(now)
        # Rows that run one after another are short: the others' count when they are done.
        for job in self._members(running):
            candidate = self._away.get(job)
            if candidate is None or self._begun.get(job, 0) == begun:
                continue
            self._begun[job] = begun
            if job not in self.dropped:
                self._put(candidate, min(begun, candidate.steps - candidate.step))

    def _yields_in_s(self, running: Running, now: float) -> float:
        """How long nobody else can begin there. Of a first pass no more than what its jobs weigh
        less in the sets for it, since else its start would push somebody out."""
        wait_s = running.yields_in_s(now)
        if running.begun(now) != 1 or (self._terms.pace == 1.0 and not running.step_s):
            return wait_s
        jobs = (job for job in self._members(running) if job not in self.dropped)
        away = (self._away[job] for job in jobs if job in self._away)
        less_s = sum(candidate.step_s for candidate in away) / self._terms.pace
        over_s = max(0.0, running.each_s - less_s) if less_s else 0.0
        return max(0.0, wait_s - over_s)

    def _members(self, running: Running) -> tuple[str, ...]:
        """Those whose steps are done at once."""
        first = running.candidate.job
        return (first, *running.company) if running.step_s else (first,)

    # -- who goes and who comes back -------------------------------------------------------

    def _dropped(self, job: str, now: float, decisions: list[Decision]) -> None:
        self.dropped.add(job)
        candidate = self._known.get(job)
        if candidate is None:
            return  # under way; it is looked at again when it comes back
        if self._kept[candidate.stage].remove(job) is not None:
            place = candidate.stage, candidate.step
            since, _ = self._since.setdefault(job, (now, place))
            self._out[candidate.stage].enter(candidate, candidate.remaining_s, since)
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


def _say(candidate: Candidate, decisions: list[Decision]) -> None:
    """Once a job."""
    if not candidate.doomed:
        candidate.doomed = True
        decisions.append(Doomed(candidate.job))
