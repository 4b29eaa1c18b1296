"""The keep-set: which jobs can jointly make their deadlines (Moore and Hodgson 1968).

Jobs stand in the order of when they are due. Run in this order, a job is done once all before it
and itself are; where that is too late for one, the set is over-full up to there, and the largest
job among those is dropped, since that makes most room for the price of one. What remains is a
largest set that fits. Kept up to date job by job rather than computed anew: blocks of a sorted
list, and over the blocks a tree of sums, so that a change costs about log n.

With m ranks a job's load is its work / m, as if work could be shared out evenly. That a job must
also begin a whole work before it is due was tried as well: it dropped more than it had to.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from operator import sub

Key = tuple[float, str]  # (due, job)
# Entries a block holds before it is split: a change walks its block once, in C.
MOST = 128


class _Block:
    __slots__ = ("keys", "limits", "loads", "sizes")

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.limits: list[float] = []
        self.loads: list[float] = []
        self.sizes: list[float] = []

    def summary(self) -> tuple[float, float, float]:
        """Loads together, the least of (limit − loads up to and with it), the largest size."""
        if not self.keys:
            return 0.0, math.inf, -math.inf
        sums = list(accumulate(self.loads))
        return sums[-1], min(map(sub, self.limits, sums)), max(self.sizes)


class KeepSet:
    """Jobs with a `limit` (when the loads before it and its own must be done, on the clock of
    `spare_s`), a `load` in seconds, and a `size`: of those that could go the largest does."""

    def __init__(self) -> None:
        self._blocks = [_Block()]
        self._lasts: list[Key] = []  # per block but the last: no key in it is greater
        self._due: dict[str, Key] = {}
        self._leaves = 1
        self._sum = [0.0, 0.0]
        self._low = [math.inf, math.inf]
        self._big = [-math.inf, -math.inf]
        self._empty = 0

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, job: str) -> bool:
        return job in self._due

    @property
    def spare_s(self) -> float:
        """The latest moment at which all of it would still fit if work began then."""
        return self._low[1]

    def put(self, job: str, due_s: float, limit_s: float, load_s: float, size: float) -> None:
        """Add `job`, or change it."""
        key = (due_s, job)
        old = self._due.get(job)
        if old is not None and old != key:
            self.discard(job)
            old = None
        number = bisect_left(self._lasts, key)
        block = self._blocks[number]
        if old is not None:
            at = bisect_left(block.keys, key)
            block.limits[at], block.loads[at], block.sizes[at] = limit_s, load_s, size
            self._sum_up(number)
            return
        if not block.keys and len(self._blocks) > 1:
            self._empty -= 1
        at = bisect_left(block.keys, key)
        block.keys.insert(at, key)
        block.limits.insert(at, limit_s)
        block.loads.insert(at, load_s)
        block.sizes.insert(at, size)
        self._due[job] = key
        if len(block.keys) > MOST:
            self._split(number)
        else:
            self._sum_up(number)

    def discard(self, job: str) -> None:
        key = self._due.pop(job, None)
        if key is None:
            return
        number = bisect_left(self._lasts, key)
        block = self._blocks[number]
        at = bisect_left(block.keys, key)
        del block.keys[at], block.limits[at], block.loads[at], block.sizes[at]
        self._sum_up(number)
        if not block.keys and len(self._blocks) > 1:
            self._empty += 1
            if self._empty > 8 + len(self._blocks) // 2:
                self._compact()

    def fits(self, job: str, due_s: float, limit_s: float, load_s: float, clock_s: float) -> bool:
        """Whether all would still fit with this one added, if work begins at `clock_s`."""
        key = (due_s, job)
        number = bisect_left(self._lasts, key)
        block = self._blocks[number]
        at = bisect_left(block.keys, key)
        before = self._before(number) + sum(block.loads[:at])
        if limit_s - before - load_s < clock_s:
            return False
        needed = clock_s + load_s
        total = before
        for limit, load in zip(block.limits[at:], block.loads[at:], strict=True):
            total += load
            if limit - total < needed:
                return False
        # Blocks behind: from leaf to root, what lies to the right.
        node = self._leaves + number
        while node > 1:
            if node % 2 == 0:
                if self._low[node + 1] - total < needed:
                    return False
                total += self._sum[node + 1]
            node //= 2
        return True

    def evict(self, clock_s: float) -> str | None:
        """Drop one job so that it fits better if work begins at `clock_s`; None if it fits.

        At the first job that would be late: itself if it could not make it even alone, since
        then nobody's going helps; else the largest of those up to it.
        """
        if self._low[1] >= clock_s:
            return None
        node, before = 1, 0.0
        while node < self._leaves:
            node *= 2
            # Rounded, it may look as if all fitted: still not beyond the last entry.
            if self._low[node] - before >= clock_s and self._low[node + 1] < math.inf:
                before += self._sum[node]
                node += 1
        number = node - self._leaves
        block = self._blocks[number]
        sums = accumulate(block.loads, initial=before)
        next(sums)
        spares = map(sub, block.limits, sums)
        at = next((i for i, spare in enumerate(spares) if spare < clock_s), len(block.keys) - 1)
        if block.limits[at] - block.loads[at] < clock_s:
            job = block.keys[at][1]
        else:
            job = self._largest(number, at)
        self.discard(job)
        return job

    def _largest(self, number: int, at: int) -> str:
        """The job of the largest size up to entry `at` of block `number`; of equals the last."""
        block = self._blocks[number]
        best = max(block.sizes[: at + 1])
        found = -1
        node = self._leaves + number
        while node > 1:
            if node % 2 == 1 and self._big[node - 1] > best:
                best, found = self._big[node - 1], node - 1
            node //= 2
        if found < 0:
            last = max(i for i, size in enumerate(block.sizes[: at + 1]) if size == best)
            return block.keys[last][1]
        while found < self._leaves:
            found = 2 * found + 1 if self._big[2 * found + 1] == best else 2 * found
        block = self._blocks[found - self._leaves]
        return block.keys[block.sizes.index(best)][1]

    # -- blocks and the tree over them -----------------------------------------------------

    def _before(self, number: int) -> float:
        """Loads of all blocks before block `number`."""
        node, total = self._leaves + number, 0.0
        while node > 1:
            if node % 2 == 1:
                total += self._sum[node - 1]
            node //= 2
        return total

    def _sum_up(self, number: int) -> None:
        """Bring the tree up to date with block `number`."""
        sums, lows, bigs = self._sum, self._low, self._big
        node = self._leaves + number
        sums[node], lows[node], bigs[node] = self._blocks[number].summary()
        node //= 2
        while node:
            left, right = 2 * node, 2 * node + 1
            sums[node] = sums[left] + sums[right]
            low, other = lows[left], lows[right] - sums[left]
            lows[node] = low if low < other else other
            big, other = bigs[left], bigs[right]
            bigs[node] = big if big > other else other
            node //= 2

    def _split(self, number: int) -> None:
        block, rest = self._blocks[number], _Block()
        half = len(block.keys) // 2
        for name in _Block.__slots__:
            entries = getattr(block, name)
            setattr(rest, name, entries[half:])
            del entries[half:]
        self._blocks.insert(number + 1, rest)
        self._lasts.insert(number, block.keys[-1])
        self._build()

    def _compact(self) -> None:
        """Without the blocks that have become empty."""
        full = [block for block in self._blocks if block.keys] or [_Block()]
        self._blocks = full
        self._lasts = [block.keys[-1] for block in full[:-1]]
        self._empty = 0
        self._build()

    def _build(self) -> None:
        """The tree anew: once in some MOST / 2 changes of a block."""
        count = len(self._blocks)
        leaves = 1
        while leaves < count:
            leaves *= 2
        if leaves == 1:
            leaves = 2  # so that the root is a node of its own
        self._leaves = leaves
        none = leaves - count
        found = [block.summary() for block in self._blocks]
        self._sum = [0.0] * leaves + [s for s, _, _ in found] + [0.0] * none
        self._low = [math.inf] * leaves + [low for _, low, _ in found] + [math.inf] * none
        self._big = [-math.inf] * leaves + [big for _, _, big in found] + [-math.inf] * none
        sums, lows, bigs = self._sum, self._low, self._big
        for node in range(leaves - 1, 0, -1):
            left, right = 2 * node, 2 * node + 1
            sums[node] = sums[left] + sums[right]
            lows[node] = min(lows[left], lows[right] - sums[left])
            bigs[node] = max(bigs[left], bigs[right])
