"""A sorted index of ready tasks: insert, remove and walk by key."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from services.policies.base import Candidate

Key = tuple[float, float, str]


class Index:
    """Candidates of one stage in the order of a key.

    A sorted list: at 100,000 entries an insert moves 0.4 MB, some 20 µs, and walking it
    is as fast as a list can be.
    """

    def __init__(self) -> None:
        self._order: list[Key] = []
        self._keys: dict[str, Key] = {}
        self._candidates: dict[str, Candidate] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, job: str) -> bool:
        return job in self._keys

    def __iter__(self) -> Iterator[Candidate]:
        candidates = self._candidates
        return (candidates[key[2]] for key in self._order)

    def add(self, candidate: Candidate, *key: float) -> None:
        self.remove(candidate.job)
        full = (key[0], key[1] if len(key) > 1 else candidate.arrival_s, candidate.job)
        insort(self._order, full)
        self._keys[candidate.job] = full
        self._candidates[candidate.job] = candidate

    def remove(self, job: str) -> Candidate | None:
        key = self._keys.pop(job, None)
        if key is None:
            return None
        del self._order[bisect_left(self._order, key)]
        return self._candidates.pop(job)

    def get(self, job: str) -> Candidate | None:
        return self._candidates.get(job)

    def at(self, position: int) -> Candidate:
        """The entry before which `position` others come."""
        return self._candidates[self._order[position][2]]

    def position(self, *key: float) -> int:
        """How many entries come before `key`."""
        return bisect_left(self._order, tuple(key))


class AgedIndex(Index):
    """An index that also knows who has been in it longest."""

    def __init__(self) -> None:
        super().__init__()
        self._since: OrderedDict[str, Candidate] = OrderedDict()

    def add(self, candidate: Candidate, *key: float) -> None:
        super().add(candidate, *key)
        self._since[candidate.job] = candidate

    def remove(self, job: str) -> Candidate | None:
        self._since.pop(job, None)
        return super().remove(job)

    def longest_first(self) -> Iterator[Candidate]:
        return iter(self._since.values())
