"""Where jobs ran last, so that one who comes takes the place of the one that is due last.

A rank whose chunk ends could give its next one to whoever is due first. Where several ranks run
jobs, that job's place is not the right one, though: the one that has to leave would take the
next rank that comes free, and so on, and each pays for a switch. So a job stays where it is while
one that is due later runs, if who comes can wait for that one's chunk to end.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from services.policies.base import Candidate, Rank, View


class Places:
    def __init__(self) -> None:
        self._last: dict[str, str] = {}  # job by rank

    def ran(self, rank: Rank, job: str, ranks: Sequence[Rank]) -> None:
        """`job` is given to `rank`, one of `ranks`."""
        self._last[rank.name] = job
        if len(self._last) > 2 * len(ranks):  # workers come and go
            names = {each.name for each in ranks}
            self._last = {name: job for name, job in self._last.items() if name in names}

    def last(self, rank: Rank) -> str:
        """The job that `rank` ran last; empty if none."""
        return self._last.get(rank.name, "")


def has_another(job: Candidate, rank: Rank, given: Set[str], view: View, now: float) -> bool:
    """Whether `job` can have another rank than this one: a free one that was not `given` anything,
    or, with as much time again to spare, one that becomes free."""
    able_s = job.slack_s(now) / 2 - view.switch_s
    for other in view.by_stage[rank.stage]:
        if other is rank or other.queued is not None or job.model not in other.models:
            continue
        if other.name not in given and other.free_at(now) - now <= able_s:
            return True
    return False


def place_elsewhere(
    first: Candidate, last: Candidate, rank: Rank, given: Set[str], view: View, now: float
) -> bool:
    """Whether `first`, due before `last` which ran on `rank`, has a better place: a free rank that
    was not `given` anything, or, with as much time again to spare, one that runs a job due after
    `last`."""
    able_s = first.slack_s(now) / 2 - view.switch_s
    latest_s, wait_s = last.deadline_s, 0.0
    for other in view.by_stage[rank.stage]:
        if other is rank or other.queued is not None or first.model not in other.models:
            continue
        running = other.running
        if running is None:
            if other.name not in given:
                return True
        elif running.candidate.deadline_s > latest_s:
            latest_s, wait_s = running.candidate.deadline_s, running.ends_s - now
    return latest_s > last.deadline_s and wait_s <= able_s
