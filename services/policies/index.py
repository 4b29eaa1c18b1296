"""Sorted indices of ready tasks: insert, remove and walk by key, one lane for each model."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterator, Sequence
from heapq import merge
from itertools import takewhile

from services.policies.base import Candidate

Key = tuple[float, float, str]
# Entries that a sum over part of an index looks at: 60 µs.
SAMPLE = 512


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

    def candidate(self, job: str) -> Candidate:
        return self._candidates[job]

    def get(self, job: str) -> Candidate | None:
        return self._candidates.get(job)

    def at(self, position: int) -> Candidate:
        """The entry before which `position` others come."""
        return self._candidates[self._order[position][2]]

    def position(self, *key: float) -> int:
        """How many entries come before `key`."""
        return bisect_left(self._order, tuple(key))

    def work_before(self, *key: float) -> float:
        """About how much denoising there is in the entries before `key`, in seconds of one rank:
        of a long index every so manieth is asked."""
        count = self.position(*key)
        every = count // SAMPLE + 1
        asked = (self._candidates[entry[2]] for entry in self._order[:count:every])
        return every * sum((c.steps - c.step) * c.step_s for c in asked)

    def keyed(self) -> Iterator[tuple[Key, Candidate]]:
        candidates = self._candidates
        return ((key, candidates[key[2]]) for key in self._order)


class Lanes:
    """An index for each model, so that a rank looks at no job that it cannot run."""

    def __init__(self) -> None:
        self._lanes: dict[str, Index] = {}
        self._model: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._model)

    def __contains__(self, job: str) -> bool:
        return job in self._model

    def __iter__(self) -> Iterator[Candidate]:
        return self.of(list(self._lanes))

    def add(self, candidate: Candidate, *key: float) -> None:
        self.remove(candidate.job)
        self._model[candidate.job] = candidate.model
        lane = self._lanes.get(candidate.model)
        if lane is None:
            lane = self._lanes[candidate.model] = Index()
        lane.add(candidate, *key)

    def remove(self, job: str) -> Candidate | None:
        model = self._model.pop(job, None)
        return None if model is None else self._lanes[model].remove(job)

    def work_before(self, *key: float) -> float:
        """As Index.work_before, of all models together."""
        return sum(lane.work_before(*key) for lane in self._lanes.values())

    def get(self, job: str) -> Candidate | None:
        model = self._model.get(job)
        return None if model is None else self._lanes[model].get(job)

    def heads(self, but: Container[str]) -> list[Candidate]:
        """The first of each model that is not one of `but`, by key."""
        lanes = (
            ((key, candidate) for key, candidate in lane.keyed() if candidate.job not in but)
            for lane in self._lanes.values()
        )
        found = (next(lane, None) for lane in lanes)
        return [candidate for _, candidate in sorted(head for head in found if head is not None)]

    def of(self, models: Sequence[str]) -> Iterator[Candidate]:
        """The jobs of these models by key."""
        if len(models) == 1:
            lane = self._lanes.get(models[0])
            return iter(()) if lane is None else iter(lane)
        lanes = [self._lanes[model] for model in models if model in self._lanes]
        return (candidate for _, candidate in merge(*(lane.keyed() for lane in lanes)))


class AgedLanes(Lanes):
    """Lanes that also know since when each job has been in them."""

    def __init__(self) -> None:
        super().__init__()
        self._since: dict[str, float] = {}
        self._aged = Lanes()  # the same jobs, the one that has been in longest first

    def enter(self, candidate: Candidate, key: float, since: float) -> None:
        """Add `candidate`; it counts as having been in since `since`."""
        self.add(candidate, key)
        self._since[candidate.job] = since
        self._aged.add(candidate, since)

    def remove(self, job: str) -> Candidate | None:
        if self._since.pop(job, None) is not None:
            self._aged.remove(job)
        return super().remove(job)

    def longest(self, models: Sequence[str], until: float) -> Iterator[Candidate]:
        """Those of these models that have been in it since `until` or before, the longest
        first."""
        return takewhile(lambda found: self._since[found.job] <= until, self._aged.of(models))
