"""Embeddings by content: a repeated prompt is not encoded again.

Holds parcels, ready to be put under the next job's name. A hit therefore costs one copy
into the arena and leaves every job with a block of its own, freed when the job ends; no
block outlives the jobs that use it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import xxhash

from common.handles import Parcel


class EmbedCache:
    """Least recently used parcels go first once `budget_bytes` are exceeded."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._parcels: OrderedDict[str, tuple[Parcel, int]] = OrderedDict()

    @staticmethod
    def key(content: dict[str, Any]) -> str:
        """128 bits of xxh3 over everything that the embeddings depend on."""
        return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())

    def __contains__(self, key: str) -> bool:
        return key in self._parcels

    def get(self, key: str) -> Parcel | None:
        entry = self._parcels.get(key)
        if entry is None:
            return None
        self._parcels.move_to_end(key)
        return entry[0]

    def put(self, key: str, parcel: Parcel) -> None:
        nbytes = len(parcel.meta) + sum(
            memoryview(buffer).nbytes for _, _, buffer in parcel.tensors.values()
        )
        if key in self._parcels or nbytes > self.budget_bytes:
            return
        self._parcels[key] = (parcel, nbytes)
        self.used_bytes += nbytes
        while self.used_bytes > self.budget_bytes:
            _, (_, freed) = self._parcels.popitem(last=False)
            self.used_bytes -= freed

    def clear(self) -> None:
        self._parcels.clear()
        self.used_bytes = 0
