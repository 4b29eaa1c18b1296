"""Jobs that stay on the device between their chunks, and which of them must go.

A job that stays keeps its Python side as it is; its tensors lie in the pool's blocks until its next
chunk takes them out. What lies here is never the truth: every state is written through to its
handle before it is reported. So leaving the device copies nothing, coming back reads the handle,
and a worker that dies loses none. The job with the most slack goes first, since it runs last; the
state of a step cache goes before any job. Nobody says that a job went on elsewhere or was canceled:
one whose time to go on has passed counts as one that need not be in time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from common.models.live import LiveJob
from common.models.rows import is_out_of_memory
from common.models.step_cache import CacheState
from denoise_svc.blocks import BlockPool, BlockTable, Kind
from denoise_svc.slots import Taken, put_back

# Timesteps and the like stay where they are: tensors whose memory is no more than this.
SMALL_BYTES = 1024


@dataclass(eq=False, slots=True)
class Resident:
    """One job's live state, or its step cache's, as it stood after the dispatch `seq`."""

    job: str
    seq: int
    latest_s: float  # when what is left of the job must go on at the latest, to be in time
    tables: list[BlockTable]
    restore: Callable[[list[list[torch.Tensor]]], Any]  # from the tensors of each table


class Residents:
    """At most one live state and one cache state a job. Threads may share it.

    `evictions` counts live jobs that had to go, or could not stay, for want of room.
    """

    def __init__(self, pool: BlockPool, clock: Callable[[], float] = time.time) -> None:
        """`clock` is what `latest_s` is by: Redis' time, to which this host's is near enough."""
        self.pool, self._clock = pool, clock
        self.evictions = self.cache_evictions = 0
        self._live: dict[str, Resident] = {}
        self._caches: dict[str, Resident] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._live)

    def has(self, job: str, seq: int) -> bool:
        """Whether the live state that this dispatch left is here."""
        with self._lock:
            found = self._live.get(job)
            return found is not None and found.seq == seq

    def put(self, name: str, seq: int, job: LiveJob, latest_s: float) -> bool:
        """Keep a job; it must not be used again before `take`. False if it cannot stay, and then
        it is as it was: no room beside those that have less slack, or no memory to copy it."""
        parts = _parts_of(job, self.pool.device)
        with self._lock:
            self._drop(self._live, name)
            tables = self._try_room(parts, latest_s)
            if tables is None:
                self.evictions += 1
                return False
            self._live[name] = Resident(name, seq, latest_s, tables, parts.restore)
            return True

    def take(self, name: str, seq: int) -> LiveJob | None:
        """The job as this dispatch left it, no longer kept here. Nothing of it is kept whatever
        the answer: a chunk moves it on, and no older state of it is wanted again."""
        with self._lock:
            found = self._live.get(name)
            job: LiveJob | None = None
            if found is not None and found.seq == seq:
                job = self._restored(found)
            self._drop(self._live, name)
            return job

    def put_cache(self, name: str, seq: int, state: CacheState, latest_s: float) -> bool:
        """Keep the state of a step cache, if there is room beside all jobs and the caches of
        those with less slack."""
        parts = _parts_of_cache(state, self.pool.device)
        with self._lock:
            self._drop(self._caches, name)
            tables = self._try_room(parts, latest_s, for_cache=True)
            if tables is None:
                self.cache_evictions += 1
                return False
            self._caches[name] = Resident(name, seq, latest_s, tables, parts.restore)
            return True

    def take_cache(self, name: str, seq: int) -> CacheState | None:
        """As `take`."""
        with self._lock:
            found = self._caches.get(name)
            state: CacheState | None = None
            if found is not None and found.seq == seq:
                state = self._restored(found)
            self._drop(self._caches, name)
            return state

    def drop(self, name: str, seq: int) -> None:
        """Forget what this dispatch left: the job went on from there, or has ended."""
        with self._lock:
            for kept in (self._live, self._caches):
                if name in kept and kept[name].seq == seq:
                    self._drop(kept, name)

    def clear(self) -> None:
        with self._lock:
            for kept in (self._live, self._caches):
                for name in list(kept):
                    self._drop(kept, name)

    def counts(self) -> dict[str, int]:
        """Blocks by what they hold, and who had to go, for the worker's record."""
        pool, used = self.pool, self.pool.used_bytes
        return {
            "pool_bytes": pool.nbytes,
            "pool_used_bytes": sum(used.values()),
            "latents_bytes": used["latents"],
            "embeds_bytes": used["embeds"],
            "cache_state_bytes": used["cache_state"],
            "residents": len(self._live),
            "evictions": self.evictions,
            "cache_evictions": self.cache_evictions,
        }

    # -- with the lock held --------------------------------------------------------------------

    def _try_room(
        self, parts: Parts, latest_s: float, for_cache: bool = False
    ) -> list[BlockTable] | None:
        """As `_room`; None too if the device has no memory for the copying. The state is in its
        handle: a chunk that is done does not fail for this."""
        try:
            return self._room(parts, latest_s, for_cache)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _room(
        self, parts: Parts, latest_s: float, for_cache: bool = False
    ) -> list[BlockTable] | None:
        """The parts in blocks of their own and nowhere else, or None and nobody has gone."""
        layouts = [self.pool.lay_out(tensors) for tensors in parts.tensors]
        need = sum(self.pool.blocks_of(nbytes) for _, nbytes in layouts)
        going, free = [], self.pool.free_blocks
        for kept, resident in self._leaving(latest_s, for_cache):
            if free >= need:
                break
            going.append((kept, resident))
            free += sum(len(table.blocks) for table in resident.tables)
        if free < need:
            return None
        for kept, resident in going:
            self._drop(kept, resident.job)
            if kept is self._live:
                self.evictions += 1
            else:
                self.cache_evictions += 1
        tables: list[BlockTable] = []
        try:
            for kind, tensors, (pieces, nbytes) in zip(
                parts.kinds, parts.tensors, layouts, strict=True
            ):
                table = self.pool.alloc(kind, nbytes)
                assert table is not None
                tables.append(table)
                self.pool.scatter(table, tensors, pieces)
        except BaseException:
            for table in tables:
                self.pool.free(table)
            raise
        parts.strip()
        return tables

    def _leaving(
        self, latest_s: float, for_cache: bool
    ) -> Iterator[tuple[dict[str, Resident], Resident]]:
        """Who may be sent away for a newcomer with this much slack, the first to go first; of
        equals the one that has been here longest."""
        now = self._clock()

        def due(latest_s: float) -> float:
            return inf if latest_s < now else latest_s

        def last_first(kept: dict[str, Resident]) -> list[tuple[float, Resident]]:
            found = [(due(resident.latest_s), resident) for resident in kept.values()]
            return sorted(found, key=lambda each: -each[0])

        own = due(latest_s)
        for other, resident in last_first(self._caches):
            if not for_cache or other >= own:
                yield self._caches, resident
        if for_cache:
            return
        for other, resident in last_first(self._live):
            if other >= own:
                yield self._live, resident

    def _restored(self, resident: Resident) -> Any:
        return resident.restore([self.pool.gather(table) for table in resident.tables])

    def _drop(self, kept: dict[str, Resident], name: str) -> None:
        resident = kept.pop(name, None)
        for table in resident.tables if resident is not None else ():
            self.pool.free(table)


@dataclass(slots=True)
class Parts:
    """Tensors by what they are; how to let go of them, and how to have them back."""

    kinds: list[Kind]
    tensors: list[list[torch.Tensor]]
    strip: Callable[[], None]
    restore: Callable[[list[list[torch.Tensor]]], Any]


def _parts_of(job: LiveJob, device: torch.device) -> Parts:
    """A live job's tensors: what changes from step to step, and what it only reads."""
    changing, reading = Taken(device, SMALL_BYTES), Taken(device, SMALL_BYTES)
    scheduler = job.pipe.scheduler
    carried = changing.take(job.carried)
    history = changing.take(job.marks.delta(scheduler)["values"])
    # What the loop carries stands in for what prepare left under the same names.
    values = reading.take({k: v for k, v in job.state.values.items() if k not in job.carried})

    def put(carried: Any, history: Any, values: Any) -> None:
        job.carried, job.state.values = carried, values
        for name, value in history.items():
            setattr(scheduler, name, value)

    def restore(tensors: list[list[torch.Tensor]]) -> LiveJob:
        own, read = tensors
        put(put_back(carried, own), put_back(history, own), put_back(values, read))
        return job

    return Parts(
        ["latents", "embeds"],
        [changing.tensors, reading.tensors],
        lambda: put(carried, history, values),
        restore,
    )


def _parts_of_cache(state: CacheState, device: torch.device) -> Parts:
    """The tensors in what diffusers' hooks keep for one job."""
    taken = Taken(device, SMALL_BYTES)
    kept = [(own, taken.take(vars(own))) for states in state.by_hook for own in states.values()]

    def strip() -> None:
        for own, values in kept:
            vars(own).update(values)

    def restore(tensors: list[list[torch.Tensor]]) -> CacheState:
        for own, values in kept:
            vars(own).update(put_back(values, tensors[0]))
        return state

    return Parts(["cache_state"], [taken.tensors], strip, restore)
