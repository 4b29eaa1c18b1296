"""Turns of those who are out: what keeps them from starving, and how long they wait at most.

A job is out when it cannot make its deadline, or not without another's missing its own. One that
has gone `patience_s` without a step is overdue. A turn is one step (a whole task where the stage
is not denoise) of the job that has been overdue longest. Ranks that have nothing that is kept
take turns before anything else, and from half the patience on; the others give `SHARE` of their
time to turns, and none while nobody is overdue.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from services.policies.base import Candidate, Rank, View, cost_s, longest_chunk_s
from services.policies.index import AgedLanes

# Figures: % on time on one rank at load 1.4, seeds 100 to 102 of benchmarks/toy_table.py.
#
# The patience itself is View.patience_s. 600, 1,200, 2,400, 3,600 s: 83.9, 84.8, 85.7, 85.7 and
# 3.2, 2.4, 1.9, 1.7 switches a job; without turns 85.9 and 1.4.
#
# Of the time of ranks for which kept jobs wait. 0.03, 0.05, 0.1: 85.8, 85.7, 85.6; in an overload
# without end it is what the kept ones lose, and the stated wait grows with 1 / SHARE.
SHARE = 0.05
# Of the patience, after which a rank with nothing kept to do gives a turn: time that costs nobody
# a deadline. 0.5, 0.75, 1: 85.7, 85.5, 85.0.
EARLY = 0.5

Pool = tuple[str, tuple[str, ...]]  # stage and models: ranks that can run the same jobs


class Turns:
    def __init__(self, out: Mapping[str, AgedLanes]) -> None:
        self._out = out
        self._owed_s: dict[Pool, float] = {}

    def due(self, rank: Rank, view: View, now: float, taken: Container[str]) -> Candidate | None:
        """Whose turn it is on `rank` though jobs wait that can make it."""
        owed_s = self._owed_s.get((rank.stage, rank.models), 0.0)
        if owed_s <= 0:
            return None
        first = self._first(rank, now - view.patience_s, taken)
        return first if first is not None and owed_s >= turn_s(first, view) else None

    def early(self, rank: Rank, view: View, now: float, taken: Container[str]) -> Candidate | None:
        """Whose turn it is on `rank` where nothing waits that is kept."""
        return self._first(rank, now - EARLY * view.patience_s, taken)

    def took(self, rank: Rank, candidate: Candidate, view: View) -> None:
        """`candidate` has its turn on `rank`."""
        pool = rank.stage, rank.models
        self._owed_s[pool] = max(0.0, self._owed_s.get(pool, 0.0) - turn_s(candidate, view))

    def passed(self, rank: Rank, spent_s: float, view: View, now: float) -> None:
        """`rank` was given something else, which takes `spent_s`."""
        pool = rank.stage, rank.models
        if self._first(rank, now - view.patience_s, ()) is None:
            self._owed_s.pop(pool, None)  # what nobody waits for is not saved up
            return
        share_s = SHARE / (1 - SHARE) * (spent_s + view.switch_s)
        self._owed_s[pool] = self._owed_s.get(pool, 0.0) + share_s

    def _first(self, rank: Rank, until: float, taken: Container[str]) -> Candidate | None:
        if not self._out[rank.stage]:
            return None
        longest = self._out[rank.stage].longest(rank.models, until)
        return next((c for c in longest if c.job not in taken), None)


def turn_stop(candidate: Candidate) -> int:
    """The step before which a turn ends."""
    return min(candidate.steps, candidate.step + 1)


def turn_s(candidate: Candidate, view: View) -> float:
    """What a turn takes of a rank's time."""
    return cost_s(candidate, turn_stop(candidate)) + view.switch_s


def longest_wait_s(out: int, ranks: int, step_s: float, view: View) -> float:
    """How long a job that is out can go without a step, if the costs are exact: never more than
    `out` of them at a time, on `ranks` ranks that can run them, no step longer than `step_s`.

    Its patience; then at worst everybody else's turn and its own, each of which takes a step and
    comes once the ranks have spent 1 / SHARE of it; and the chunks that had begun when it became
    overdue, and when its turn came.
    """
    chunk_s = longest_chunk_s(view, step_s)
    return view.patience_s + 2 * chunk_s + out * (step_s + view.switch_s) / (SHARE * ranks)
