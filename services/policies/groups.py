"""Whose time a job counts on: a keep-set for each group of ranks that may be short of it.

A group is all the ranks that can run some model. A job counts in the group of its model and in
every larger one that this is part of, so that models which share ranks share their time, and
models which do not leave each other alone. Groups that overlap without one being part of the
other are covered by a further one, of all their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.policies.base import Rank
from services.policies.keepset import KeepSet


@dataclass(slots=True)
class Group:
    ranks: list[Rank]
    jobs: KeepSet = field(default_factory=KeepSet)
    clock_s: float = 0.0  # when work of its jobs begins, as last looked at

    @property
    def size(self) -> int:
        """Jobs that no rank can run yet count on one that may come."""
        return max(1, len(self.ranks))


class Groups:
    def __init__(self) -> None:
        self._nobody = Group([])  # of models that no rank has
        self.all: tuple[Group, ...] = (self._nobody,)
        self._of: dict[str, tuple[Group, ...]] = {}
        self._alike: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def of(self, model: str) -> tuple[Group, ...]:
        """The groups that a job of `model` counts in, the smallest first."""
        found = self._of.get(model)
        return (self._nobody,) if found is None else found

    def arrange(self, ranks: Sequence[Rank]) -> bool:
        """Bring the groups up to date; True if they are others now, without a job in them."""
        by_name = {rank.name: rank for rank in ranks}
        alike = tuple((rank.name, rank.models) for rank in ranks)
        if alike == self._alike:
            for group in self.all:
                group.ranks = [by_name[rank.name] for rank in group.ranks]
            return False
        self._alike = alike
        able: dict[str, set[str]] = {}
        for rank in ranks:
            for model in rank.models:
                able.setdefault(model, set()).add(rank.name)
        sets: list[set[str]] = []
        for names in (*able.values(), *_joined(list(able.values()))):
            if names not in sets:
                sets.append(names)
        sets.sort(key=len)
        groups = [Group([rank for rank in ranks if rank.name in names]) for names in sets]
        self._of = {
            model: tuple(g for g, names in zip(groups, sets, strict=True) if mine <= names)
            for model, mine in able.items()
        }
        self._nobody = Group([])
        self.all = (*groups, self._nobody)
        return True


def _joined(sets: list[set[str]]) -> list[set[str]]:
    """Those that overlap, directly or by way of others, as one."""
    joined: list[set[str]] = []
    for names in sets:
        apart = [other for other in joined if not other & names]
        joined = [*apart, names.union(*(other for other in joined if other & names))]
    return joined
