"""Work spread over the ranks that can do it: how long it takes until a job's turn comes.

Models that share ranks share their time, and models which do not leave each other alone, as in
the keep-set (services/policies/groups.py): work counts in its model's group of denoisers and in
every larger one around it, and who waits for it waits for the slowest of their own groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from common.stage import DENOISE, ENCODE
from services.policies.base import View
from services.policies.groups import Group, Groups


class Spread:
    def __init__(self) -> None:
        self._groups = Groups()
        self._arranged: object = None  # the pool as the groups know it

    def groups(self, model: str, view: View) -> tuple[Group, ...]:
        """The groups of ranks that work of `model` counts in."""
        if view.by_stage is not self._arranged:
            self._arranged = view.by_stage
            self._groups.arrange(view.by_stage.get(DENOISE, ()))
        return self._groups.of(model)

    def wait_s(
        self, model: str, view: View, work_s: Mapping[str, float], ahead_s: float = inf
    ) -> float:
        """Seconds until the work that goes before a job of `model` is done: `ahead_s`, as far as
        there is so much on the ranks that it counts on; `work_s` is all there is, by model."""
        longest_s = 0.0
        for group in self.groups(model, view):
            here_s = sum(
                other_s
                for other, other_s in work_s.items()
                if any(each is group for each in self.groups(other, view))
            )
            longest_s = max(longest_s, min(ahead_s, here_s) / group.size)
        return longest_s


class Ahead:
    """Work that is counted job by job, in the order in which it will be done."""

    def __init__(self, spread: Spread, view: View) -> None:
        self._spread, self._view = spread, view
        self._work_s: dict[int, float] = {}  # by the id of a group

    def add(self, model: str, seconds: float) -> None:
        for group in self._spread.groups(model, self._view):
            self._work_s[id(group)] = self._work_s.get(id(group), 0.0) + seconds

    def wait_s(self, model: str) -> float:
        """Until a job of `model` would begin that comes next."""
        groups = self._spread.groups(model, self._view)
        return max(self._work_s.get(id(group), 0.0) / group.size for group in groups)


def in_hand_s(view: View, now: float) -> dict[str, float]:
    """Denoising left of all jobs that workers have in hand, by model, in seconds of one rank."""
    work_s: dict[str, float] = {}
    for stage in (ENCODE, DENOISE):
        for rank in view.by_stage.get(stage, ()):
            for held in (rank.running, rank.queued):
                if held is not None:
                    task = held.candidate
                    left_s = (task.steps - task.step) * task.step_s + held.company_s
                    if stage == DENOISE:
                        left_s -= held.done_s(now)
                    work_s[task.model] = work_s.get(task.model, 0.0) + left_s
    return work_s
