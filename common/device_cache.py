"""What a worker keeps on its device between chunks: a cache, never the truth.

States are written through to the arena before a chunk is reported, so an entry may be dropped
at any time and costs one copy back.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

Key = tuple[str, int, str]  # job, seq, part: a seq writes a part once, so entries never go stale


class DeviceCache:
    """Live objects by (job, seq, part), least recently used first out, within `budget_bytes`.

    Objects are opaque; dropping one drops our reference, and one in use lives on through its
    user's. Threads may share it (`stage_in` reads while `run` writes).
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = self.hits = self.misses = self.evictions = 0
        self._entries: OrderedDict[Key, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, job: str, seq: int, part: str, value: Any, nbytes: int) -> bool:
        """Keep `value`, evicting as needed. False if it alone is over the budget."""
        with self._lock:
            self._drop((job, seq, part))
            if nbytes > self.budget_bytes:
                return False
            while self.used_bytes + nbytes > self.budget_bytes:
                self._drop(next(iter(self._entries)))
                self.evictions += 1
            self._entries[job, seq, part] = (value, nbytes)
            self.used_bytes += nbytes
            return True

    def get(self, job: str, seq: int, part: str) -> Any | None:
        """The object, now the most recently used, or None."""
        with self._lock:
            entry = self._entries.get((job, seq, part))
            if entry is None:
                self.misses += 1
                return None
            self._entries.move_to_end((job, seq, part))
            self.hits += 1
            return entry[0]

    def drop(self, job: str, seq: int, part: str) -> bool:
        """Forget one entry; False if there was none."""
        with self._lock:
            return self._drop((job, seq, part))

    def drop_job(self, job: str) -> int:
        """Forget everything of `job` (finished, canceled or moved away); how many entries."""
        with self._lock:
            return sum([self._drop(key) for key in list(self._entries) if key[0] == job])

    def shrink(self, to_bytes: int) -> int:
        """Evict until at most `to_bytes` are used; the bytes given back."""
        with self._lock:
            before = self.used_bytes
            while self.used_bytes > to_bytes:
                self._drop(next(iter(self._entries)))
                self.evictions += 1
            return before - self.used_bytes

    def _drop(self, key: Key) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self.used_bytes -= entry[1]
        return True
