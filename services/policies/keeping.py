"""Who is kept and who is not: the keep-set brought up to date with the pool as it is now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from common.stage import DECODE, DENOISE
from services.policies.base import Candidate, Decision, Doomed, View
from services.policies.index import Index
from services.policies.keepset import KeepSet

# Dropped jobs that a plan tries to take back: the shortest, and another in turn.
TRIES = 2
# One step of priority counts as much as half the work; beyond this many it makes no difference.
MOST_PRIORITY = 60


def is_late(candidate: Candidate, now: float, view: View) -> bool:
    """Whether it cannot make its deadline even alone, beyond what the estimate may be wrong by."""
    return candidate.slack_s(now) < -view.error * candidate.remaining_s


@dataclass(frozen=True, slots=True)
class Terms:
    """What a job's entry depends on besides the job."""

    ranks: int = 1
    switch_s: float = 0.0
    error: float = 0.05


class Keeping:
    """Moves waiting jobs between `kept` (by deadline) and `out` (by work left), indices that the
    policy walks. Jobs under way stay in the set with the work that their chunk will leave."""

    def __init__(self, kept: Mapping[str, Index], out: Mapping[str, Index]) -> None:
        self._kept, self._out = kept, out
        self._set = KeepSet()
        self._terms = Terms()
        self.dropped: set[str] = set()  # waiting or under way
        self._known: dict[str, Candidate] = {}  # waiting, not decoding
        self._away: dict[str, tuple[Candidate, float]] = {}  # under way: its chunk's cost
        self._again = Index()  # dropped, waiting, and not hopeless: by work left
        self._lost_at: list[tuple[float, str]] = []  # heap: when such a job becomes hopeless
        self._turn = 0
        self._longest_step_s = 0.0

    def add(self, candidate: Candidate) -> None:
        """It waits; in the set until the next `settle` finds no room."""
        job = candidate.job
        self._away.pop(job, None)
        self.dropped.discard(job)
        if candidate.stage == DECODE:
            self._set.discard(job)
            return
        self._known[job] = candidate
        self._longest_step_s = max(self._longest_step_s, candidate.step_s)
        self._put(candidate, 0.0)

    def remove(self, job: str) -> None:
        """It has ended."""
        self._known.pop(job, None)
        self._away.pop(job, None)
        self._again.remove(job)
        self.dropped.discard(job)
        self._set.discard(job)

    def sent(self, candidate: Candidate, chunk_s: float) -> None:
        """It is given to a rank for a chunk that costs `chunk_s`."""
        if candidate.stage == DECODE:
            return
        self._away[candidate.job] = (candidate, chunk_s if candidate.stage == DENOISE else 0.0)
        if candidate.stage == DENOISE and candidate.job in self._set:
            self._put(candidate, chunk_s)

    def left(self, job: str) -> None:
        """It does not wait any more: it is under way."""
        self._known.pop(job, None)
        self._again.remove(job)

    def settle(self, view: View, now: float) -> list[Decision]:
        """Drop whom there is no room for, take back whom there is."""
        decisions: list[Decision] = []
        ranks = view.by_stage.get(DENOISE, ())
        terms = Terms(max(1, len(ranks)), view.switch_s, view.error)
        if terms != self._terms:
            self._terms = terms
            self._rebuild()
        # The clock costs a look at every rank, and mostly there is room to spare.
        pressed = self._again or self._set.spare_s < now + self._longest_step_s
        clock = self._clock(view, now) if pressed else now
        while self._set.spare_s < clock:
            job = self._set.evict(clock)
            if job is None:
                break
            self._dropped(job, now, decisions)
        while self._lost_at and self._lost_at[0][0] < now:
            _, job = heappop(self._lost_at)
            lost = self._again.get(job)
            if lost is not None and is_late(lost, now, view):
                self._again.remove(job)
                _say(lost, decisions)
        if self._again:
            self._take_back(clock)
        return decisions

    def drop(self, candidate: Candidate, now: float, decisions: list[Decision]) -> None:
        """It is late by itself."""
        self._set.discard(candidate.job)
        self._known.setdefault(candidate.job, candidate)
        self._dropped(candidate.job, now, decisions)

    # -- what is in the set ----------------------------------------------------------------

    def _entry(self, candidate: Candidate, spent_s: float) -> tuple[float, float, float, float]:
        """due, limit, load and size for KeepSet.put, `spent_s` of its denoising taken as done."""
        terms = self._terms
        work = (candidate.steps - candidate.step) * candidate.step_s
        due = candidate.deadline_s - (candidate.remaining_s - work)
        left = work - spent_s
        size = left / 2.0 ** max(-MOST_PRIORITY, min(MOST_PRIORITY, candidate.priority))
        left = left + terms.switch_s if left > 1e-9 else 0.0
        load = left / terms.ranks
        limit = due + terms.error * candidate.remaining_s
        return due, limit, load, size

    def _put(self, candidate: Candidate, spent_s: float) -> None:
        self._set.put(candidate.job, *self._entry(candidate, spent_s))

    def _rebuild(self) -> None:
        for job, candidate in self._known.items():
            if job in self._set:
                self._put(candidate, 0.0)
        for job, (candidate, chunk_s) in self._away.items():
            if job in self._set:
                self._put(candidate, chunk_s)

    def _clock(self, view: View, now: float) -> float:
        """When work of the set begins: now, or when those who run could make way, on average."""
        ranks = view.by_stage.get(DENOISE, ())
        total = 0.0
        at_work = set()
        for rank in ranks:
            running = rank.running
            if running is None:
                continue
            task = running.candidate
            at_work.add(task.job)
            wait, step_s = running.ends_s - now, task.step_s
            if wait > step_s:
                total += step_s
            elif wait > 0:
                total += wait
            if rank.queued is not None:
                at_work.add(rank.queued.candidate.job)
        if len(self._away) > len(at_work):
            self._forget_stray(at_work, view)
        return now + total / max(1, len(ranks))

    def _forget_stray(self, at_work: set[str], view: View) -> None:
        """Jobs that were sent and that no rank shows: packed behind others, or ended since."""
        for stage, ranks in view.by_stage.items():
            if stage == DENOISE:
                continue
            for rank in ranks:
                at_work |= {held.candidate.job for held in (rank.running, rank.queued) if held}
        for job in [job for job in self._away if job not in at_work and job not in self._known]:
            del self._away[job]
            self.dropped.discard(job)
            self._set.discard(job)

    # -- who goes and who comes back -------------------------------------------------------

    def _dropped(self, job: str, now: float, decisions: list[Decision]) -> None:
        self.dropped.add(job)
        candidate = self._known.get(job)
        if candidate is None:
            return  # under way; it is looked at again when it comes back
        if self._kept[candidate.stage].remove(job) is not None:
            self._out[candidate.stage].add(candidate, candidate.remaining_s)
        lost_at = candidate.deadline_s - (1 - self._terms.error) * candidate.remaining_s
        if lost_at < now or candidate.stage == DECODE:
            _say(candidate, decisions)
            return
        self._again.add(candidate, candidate.remaining_s)
        heappush(self._lost_at, (lost_at, job))

    def _take_back(self, clock: float) -> None:
        for number in range(TRIES):
            if not self._again:
                return
            self._turn = (self._turn + 1) % len(self._again) if number else self._turn
            candidate = self._again.at(self._turn if number else 0)
            due, limit, load, size = self._entry(candidate, 0.0)
            if not self._set.fits(candidate.job, due, limit, load, clock):
                continue
            self._again.remove(candidate.job)
            self.dropped.discard(candidate.job)
            self._set.put(candidate.job, due, limit, load, size)
            if self._out[candidate.stage].remove(candidate.job) is not None:
                kept = self._kept[candidate.stage]
                kept.add(candidate, candidate.deadline_s, -candidate.priority)


def _say(candidate: Candidate, decisions: list[Decision]) -> None:
    """Once a job."""
    if not candidate.doomed:
        candidate.doomed = True
        decisions.append(Doomed(candidate.job))
