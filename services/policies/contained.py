"""A policy that cannot do harm: what raises or answers nonsense is counted, and fcfs decides.

Third parties write policies. One that names a rank that is not there, a task that is not ready or
a chunk that ends before it begins must cost that one decision and nothing else; one that loses
track of jobs (its `add` or `remove` raised), or of time (it leaves every rank idle while jobs
wait), must not strand them. What is not contained: a `plan` that never returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from common.stage import DENOISE, ENCODE
from services.policies.base import (
    MOST_ROWS,
    Candidate,
    Decision,
    Degrade,
    Doomed,
    Foresees,
    Outlook,
    Policy,
    Preempt,
    Rank,
    Recall,
    Run,
    View,
)
from services.policies.fcfs import Fcfs

# Every rank may be left idle while jobs wait for this long: a policy may wait for company.
IDLE_S = 5.0
# Longer than any task or wait is, yet a number that arithmetic and records can bear.
MOST_S = 1e9


class Contained:
    def __init__(self, policy: Policy) -> None:
        self.name = str(getattr(policy, "name", "") or type(policy).__name__)
        self.failures = 0
        self.last_failure = ""
        self.dismissed = False  # it lost track of jobs: fcfs decides until another is chosen
        self._policy = policy
        self._instead: Fcfs | None = None
        # Denoising left of all that wait, in seconds of one rank, by model.
        self.waiting_s: dict[str, float] = {}
        self.to_encode = 0  # jobs that wait for an encoder
        self._waiting: dict[str, Candidate] = {}
        self._ranks: dict[str, Rank] = {}
        self._arranged: object = None  # the pool as `_ranks` knows it
        self._idle_since: float | None = None

    def add(self, candidate: Candidate) -> None:
        self._forget(candidate.job)
        self._waiting[candidate.job] = candidate
        self.to_encode += candidate.stage == ENCODE
        self._weigh(candidate, 1)
        if self._instead is not None:
            self._instead.add(candidate)
        if not self.dismissed:
            try:
                self._policy.add(candidate)
            except Exception as error:
                self._dismiss(f"add raised {error!r}")

    def remove(self, job: str) -> None:
        """It does not wait any more, or has ended: a policy may remember one that is under way."""
        self._forget(job)
        if self._instead is not None:
            self._instead.remove(job)
        if not self.dismissed:
            try:
                self._policy.remove(job)
            except Exception as error:
                self._dismiss(f"remove raised {error!r}")

    def waiting(self, job: str) -> Candidate:
        """As it was handed to the policy. Raises KeyError for a job that does not wait."""
        return self._waiting[job]

    def _forget(self, job: str) -> None:
        candidate = self._waiting.pop(job, None)
        if candidate is None:
            return
        self.to_encode -= candidate.stage == ENCODE
        self._weigh(candidate, -1)
        if not self._waiting:
            self.waiting_s.clear()  # what rounding has left

    def _weigh(self, candidate: Candidate, sign: int) -> None:
        work_s = sign * (candidate.steps - candidate.step) * candidate.step_s
        self.waiting_s[candidate.model] = self.waiting_s.get(candidate.model, 0.0) + work_s

    def plan(self, view: View, now: float) -> list[Decision]:
        if self.dismissed:
            return self._fallback().plan(view, now)
        try:
            decisions = list(self._policy.plan(view, now))
            wrong = self._wrong_with(decisions, view)
            if any(isinstance(decision, Run) for decision in decisions):
                self._idle_since = None
            else:
                wrong = wrong or self._idles(view, now)
        except Exception as error:
            decisions, wrong = [], f"plan raised {error!r}"
        if not wrong:
            return decisions
        return self.instead(view, now, wrong)

    def instead(self, view: View, now: float, wrong: str) -> list[Decision]:
        """What fcfs would do, since something is `wrong` with what the policy wants."""
        self._failed(wrong)
        return self._fallback().plan(view, now)

    def order(self, now: float) -> Iterator[str]:
        """Waiting jobs, the next first; cut short where the policy fails."""
        try:
            names = self._fallback().order(now) if self.dismissed else self._policy.order(now)
            for job in islice(names, len(self._waiting)):
                if job in self._waiting:
                    yield job
        except Exception as error:
            self._failed(f"order raised {error!r}")

    def outlook(self, candidate: Candidate, view: View, now: float) -> Outlook:
        if not self.dismissed and isinstance(self._policy, Foresees):
            try:
                found = self._policy.outlook(candidate, view, now)
                says = isinstance(found, Outlook) and found.fits in (None, True, False)
                if says and _is_time(found.ahead_s):
                    return found
                self._failed(f"outlook answered {found!r}, not an Outlook")
            except Exception as error:
                self._failed(f"outlook raised {error!r}")
        return self._fallback().outlook(candidate, view, now)

    # -- what is wrong -------------------------------------------------------------------

    def _failed(self, wrong: str) -> None:
        self.failures += 1
        self.last_failure = wrong[:500]

    def _dismiss(self, wrong: str) -> None:
        self._failed(f"{wrong}; fcfs decides from now on")
        self.dismissed = True
        self._fallback()

    def _fallback(self) -> Fcfs:
        if self._instead is None:
            self._instead = Fcfs()
            for candidate in self._waiting.values():
                self._instead.add(candidate)
        return self._instead

    def _idles(self, view: View, now: float) -> str:
        """Says so if nothing has run for a while though something could."""
        if not self._waiting or any(rank.running for rank in view.ranks):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= IDLE_S and self._fallback().plan(view, now):
            return f"every rank was left idle for {now - self._idle_since:.0f} s while jobs wait"
        return ""

    def _wrong_with(self, decisions: list[Decision], view: View) -> str:
        """What cannot be done of `decisions`; "" if all can."""
        if view.by_stage is not self._arranged:
            self._arranged, self._ranks = view.by_stage, {rank.name: rank for rank in view.ranks}
        given: dict[str, int] = {}  # rank -> runs in this plan
        taken: set[str] = set()
        cut: set[str] = set()
        for decision in decisions:
            match decision:
                case Run(rank=name, rows=rows):
                    rank = self._ranks.get(name)
                    if rank is None:
                        return f"{name!r} is not a rank"
                    given[name] = given.get(name, 0) + 1
                    held = (rank.running is not None) + (rank.queued is not None)
                    if held + given[name] > 2:
                        return f"rank {name} runs a task and holds another already"
                    if not _is_time(decision.step_s):
                        return f"{decision.step_s!r} is not a time in seconds"
                    wrong = self._wrong_rows(rank, rows, taken)
                    if not wrong and decision.step_s:
                        wrong = self._wrong_company(rows)
                    if wrong:
                        return wrong
                case Preempt(seq=seq):
                    running = (r.running for r in view.ranks)
                    if not _is_whole(seq) or not any(h and h.seq == seq for h in running):
                        return f"seq {seq} does not run, so that it cannot be preempted"
                case Recall(seq=seq):
                    queued = (r.queued for r in view.ranks)
                    if not _is_whole(seq) or not any(h and h.seq == seq for h in queued):
                        return f"seq {seq} is not queued, so that it cannot be recalled"
                case Degrade(job=job, steps=steps):
                    candidate = self._waiting.get(job)
                    if candidate is None or job in taken or job in cut:
                        return f"job {job!r} does not wait, so that it cannot be degraded"
                    whole = _is_whole(steps) and not candidate.step
                    if not whole or not 0 < candidate.fewest <= steps < candidate.steps:
                        return f"job {job!r} may not be degraded to {steps!r} steps"
                    cut.add(job)
                case Doomed(job=job):
                    if job not in self._waiting or job in taken:
                        return f"job {job!r} does not wait, so that it cannot be called doomed"
                case _:
                    return f"{decision!r} is not a decision"
        return ""

    def _wrong_company(self, rows: tuple[tuple[str, int], ...]) -> str:
        keys = {self._waiting[job].batch for job, _ in rows}
        if len(keys) == 1 and "" not in keys:
            return ""
        return f"jobs of batch keys {', '.join(map(repr, sorted(keys)))} cannot share a pass"

    def _wrong_rows(self, rank: Rank, rows: tuple[tuple[str, int], ...], taken: set[str]) -> str:
        if not 0 < len(rows) <= MOST_ROWS:
            return f"a task of {len(rows)} rows; there may be 1 to {MOST_ROWS}"
        models = set()
        for job, stop in rows:
            candidate = self._waiting.get(job)
            if candidate is None or job in taken:
                return f"job {job!r} is not ready"
            taken.add(job)
            models.add(candidate.model)
            if candidate.stage != rank.stage:
                return f"job {job!r} is ready to {candidate.stage}; rank {rank.name} does not"
            if candidate.model not in rank.models:
                return f"rank {rank.name} has not loaded {candidate.model}, which {job!r} needs"
            if not _is_whole(stop):
                return f"a chunk of job {job!r} that ends before step {stop!r}, no whole number"
            if candidate.suspect and len(rows) > 1:
                return f"job {job!r} has failed before and may not share a task"
            if candidate.stage == DENOISE and not candidate.step < stop <= candidate.steps:
                return (
                    f"a chunk of job {job!r} that ends before step {stop!r}; "
                    f"it stands at {candidate.step} of {candidate.steps}"
                )
        return "" if len(models) == 1 else f"a task of {len(models)} models"


def _is_time(seconds: Any) -> bool:
    """Whether it is a number of seconds that can be reckoned with, which nan and inf are not."""
    return isinstance(seconds, int | float) and 0 <= seconds <= MOST_S


def _is_whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)
