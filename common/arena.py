"""The arena: one file on tmpfs per host, shared by every worker process, handing out blocks.

A warm, mapped file takes an 8 MB state in about the time of its memcpy; a fresh file in
/dev/shm costs 40 times that. The arena belongs to the host, so a worker's death loses nothing
that was written.

**What is true.** The file holds a table of *claims*. A claim gives one run of blocks to one
owner, and its slot's generation word is the only commit point: non-zero means live, zero means
free, and it is written with a single aligned 8-byte store after (alloc) or before (free)
everything else. Giving back the same claim twice is harmless. The maps that make allocation
fast (which blocks and slots are used) are derived from the claims: a word says when they are
being changed, and whoever next takes the lock after a `kill -9` finds it set and rebuilds them.
So a half-done alloc is either not there or an orphan under its owner's name, and no block is
ever handed out twice.

Offsets, sizes and limits are bytes; ages are seconds. This module imports no torch, no numpy.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from common.arena_file import (
    HEADER_BYTES,
    MAGIC,
    SLOT,
    ArenaError,
    Layout,
    Word,
    human,
    lay_out,
    map_file,
    open_file,
    still_at,
)

log = logging.getLogger(__name__)

__all__ = ["Arena", "ArenaError", "ArenaStats", "Extent", "owner_name"]

DEFAULT_PATH = "/dev/shm/slackwater/arena"
# 64 KiB: a 256 px latent wastes at most one block, and 4 GiB need a map of only 64 KiB, which
# is searched in microseconds. Alloc + free takes the same time from 16 KiB to 256 KiB.
BLOCK_BYTES = 64 * 1024
OWNER_BYTES = 96
# A younger claim may be one whose owner is still copying into it: freeing that block would let
# two processes write to the same bytes. A copy takes milliseconds; a minute is generous.
SWEEP_MIN_AGE_S = 60.0


@dataclass(frozen=True, slots=True)
class Extent:
    """One claim on a contiguous run of blocks; plain integers, so it travels in a handle.

    `offset` counts from the start of the data area, `nbytes` is what was asked for. `slot` and
    `generation` name the claim: a generation is used once in the life of the arena.
    """

    offset: int
    nbytes: int
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """A moment's figures. `claims` is how many extents are given out."""

    size_bytes: int
    used_bytes: int
    free_bytes: int
    largest_free_bytes: int
    high_water_bytes: int
    claims: int
    allocations: int
    refused: int


def owner_name(job: str) -> str:
    """`job` as an owner: itself, or a recognisable prefix and a digest where it is too long."""
    raw = job.encode()
    if len(raw) <= OWNER_BYTES:
        return job
    head = raw[: OWNER_BYTES - 33].decode(errors="ignore")
    return f"{head}~{hashlib.blake2b(raw, digest_size=16).hexdigest()}"


class Arena:
    """An open arena. Threads and forked children may use one object; processes open their own."""

    def __init__(self, path: str, lock_fd: int, mapping: mmap.mmap) -> None:
        """Use `Arena.open`; this takes a file that is already laid out."""
        self.path = path
        self._fd = lock_fd
        self._mm = mapping
        self._thread_lock = threading.Lock()
        self._closed = False
        whole = memoryview(mapping)
        self._head = whole[:HEADER_BYTES].cast("Q")
        self.block_bytes, self.blocks = self._head[Word.BLOCK], self._head[Word.BLOCKS]
        self._slots, self._data_at = self._head[Word.SLOTS], self._head[Word.DATA]
        self.id = f"{self._head[Word.ID]:016x}"
        lay = Layout(self.blocks, self._slots, self.block_bytes)
        self._gens = whole[lay.gens : lay.info].cast("Q")
        self._lay = lay
        self._data = whole[self._data_at : self._data_at + self.blocks * self.block_bytes]
        self._whole = whole
        _open_arenas.add(self)

    @classmethod
    def open(
        cls,
        path: str = DEFAULT_PATH,
        size_bytes: int | None = None,
        *,
        block_bytes: int = BLOCK_BYTES,
    ) -> Arena:
        """Attach to the arena at `path`, or create it if there is none.

        Any number of processes may call this at once: one lays the file out, under the lock, the
        others wait and attach. `size_bytes` is the size of the whole file and only matters to
        the creator; None takes 1 GiB, or less where the file system is small. All of it is
        allocated and faulted in here, so that a tmpfs that is too small is an ArenaError now
        and not a SIGBUS later.
        """
        while True:
            fd = open_file(path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if not still_at(path, fd):  # unlinked while we waited: that file is history
                    os.close(fd)
                    continue
                if os.pread(fd, 8, 0) != MAGIC:
                    lay_out(path, fd, size_bytes, block_bytes)
                elif size_bytes and abs(os.fstat(fd).st_size - size_bytes) >= 2 * block_bytes:
                    log.warning(
                        "arena %s exists with %s; the %s asked for here do not change it",
                        path,
                        human(os.fstat(fd).st_size),
                        human(size_bytes),
                    )
                mapping = map_file(path, fd)
                fcntl.flock(fd, fcntl.LOCK_UN)
                return cls(path, fd, mapping)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.close(fd)
                raise

    # -- handing out -------------------------------------------------------------------------

    def alloc(self, nbytes: int, owner: str) -> Extent | None:
        """A fresh extent of at least `nbytes` (its content is undefined), or None when full."""
        name = _owner_bytes(owner)
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative, got {nbytes}")
        count = max(1, -(-nbytes // self.block_bytes))
        with self._locked():
            # A copy of the map and bytes.find, since mmap.find compares byte by byte.
            first = self._mm[self._lay.used : self._lay.used + self.blocks].find(bytes(count))
            extent = self._claim(first, count, nbytes, name) if first >= 0 else None
            self._head[Word.ALLOCS if extent else Word.REFUSED] += 1
            return extent

    def free(self, extent: Extent) -> bool:
        """Give a claim and its blocks back. False if it was stale."""
        with self._locked():
            if not self.is_live(extent):
                return False
            self._head[Word.DIRTY] = 1
            first, count, _, _, _ = self._slot(extent.slot)
            self._gens[extent.slot] = 0  # from here the claim is gone, whatever happens
            self._mm[self._lay.taken + extent.slot] = 0
            self._mark(first, count, 0)
            self._head[Word.DIRTY] = 0
            return True

    def is_live(self, extent: Extent) -> bool:
        """Whether the claim still stands. One load, no lock: check again after a copy."""
        return (
            extent.generation > 0
            and 0 <= extent.slot < self._slots
            and self._gens[extent.slot] == extent.generation
        )

    def view(self, extent: Extent) -> memoryview:
        """The extent's bytes, writable and without a copy; ArenaError if it is stale.

        The view stays readable after a free, but then shows someone else's bytes.
        """
        if not self.is_live(extent):
            raise ArenaError(f"extent at {extent.offset} in {self.path} was freed")
        end = extent.offset + extent.nbytes
        if extent.offset < 0 or extent.nbytes < 0 or end > len(self._data):
            raise ArenaError(f"extent {extent.offset}..{end} lies outside the arena {self.path}")
        return self._data[extent.offset : end]

    @property
    def data(self) -> memoryview:
        """All of the data area, for registering it with a device; blocks come from `view`."""
        return self._data

    # -- looking after -----------------------------------------------------------------------

    def owners(self) -> list[tuple[str, Extent, float]]:
        """Every live claim: owner, extent, age in seconds."""
        with self._locked():
            now, found = time.monotonic(), []
            for slot in self._live_slots():
                first, _, nbytes, born, owner = self._slot(slot)
                extent = Extent(first * self.block_bytes, nbytes, slot, self._gens[slot])
                found.append((owner.rstrip(b"\0").decode(), extent, max(0.0, now - born)))
            return found

    def free_owned_by(
        self, orphan: Callable[[str], bool], min_age_s: float = SWEEP_MIN_AGE_S
    ) -> int:
        """Free the claims of owners for which `orphan(owner)` is true; the number freed.

        `orphan` is asked once per owner and without the lock, so it may ask Redis. Claims
        younger than `min_age_s` stay: their writer may still be writing.
        """
        verdict: dict[str, bool] = {}
        freed = 0
        for owner, extent, age in self.owners():
            if age < min_age_s:
                continue
            if owner not in verdict:
                verdict[owner] = orphan(owner)
            freed += verdict[owner] and self.free(extent)
        return freed

    def stats(self) -> ArenaStats:
        """Figures as of now."""
        with self._locked():
            used_map = self._mm[self._lay.used : self._lay.used + self.blocks]
            taken = self._mm[self._lay.taken : self._lay.taken + self._slots]
            size, head = self.block_bytes, self._head
            used = head[Word.USED]
            return ArenaStats(
                size_bytes=self.blocks * size,
                used_bytes=used * size,
                free_bytes=(self.blocks - used) * size,
                largest_free_bytes=max(map(len, used_map.split(b"\1"))) * size,
                high_water_bytes=head[Word.HIGH] * size,
                claims=taken.count(1),
                allocations=head[Word.ALLOCS],
                refused=head[Word.REFUSED],
            )

    def close(self) -> None:
        """Unmap. The file and its content stay; views still held keep the mapping alive."""
        with self._thread_lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._fd)
            for view in (self._head, self._gens, self._data, self._whole):
                with contextlib.suppress(BufferError):
                    view.release()
            with contextlib.suppress(BufferError):
                self._mm.close()

    def unlink(self) -> None:
        """Remove the file if it is still ours; processes that mapped it keep their mapping."""
        if not self._closed and still_at(self.path, self._fd):
            os.unlink(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- under the lock ----------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone in the tables: against threads by a lock, against processes by flock.

        The kernel drops a flock with its process. A set dirty word then says that the maps
        may be wrong, whoever died.
        """
        with self._thread_lock:
            if self._closed:
                raise ArenaError(f"arena {self.path} is closed in this process")
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                if self._head[Word.DIRTY]:
                    self._rebuild()
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _claim(self, first: int, count: int, nbytes: int, owner: bytes) -> Extent:
        # There is one: as many slots as blocks, and a claim has a block at least.
        slot = self._mm[self._lay.taken : self._lay.taken + self._slots].find(0)
        self._head[Word.DIRTY] = 1
        generation = self._head[Word.NEXT_GEN]
        self._head[Word.NEXT_GEN] = generation + 1
        at = self._lay.info + slot * SLOT.size
        SLOT.pack_into(self._mm, at, first, count, nbytes, time.monotonic(), owner)
        self._mm[self._lay.taken + slot] = 1
        self._mark(first, count, 1)
        self._gens[slot] = generation  # the commit: before this line nothing was handed out
        self._head[Word.DIRTY] = 0
        return Extent(first * self.block_bytes, nbytes, slot, generation)

    def _mark(self, first: int, count: int, used: int) -> None:
        start = self._lay.used + first
        self._mm[start : start + count] = (b"\1" if used else b"\0") * count
        total = self._head[Word.USED] + (count if used else -count)
        self._head[Word.USED] = total
        self._head[Word.HIGH] = max(self._head[Word.HIGH], total)

    def _rebuild(self) -> None:
        """Derive every map from the claims; safe to be killed in and to repeat."""
        log.warning("arena %s: a process died inside it; rebuilding its maps", self.path)
        lay = self._lay
        self._mm[lay.used : lay.used + self.blocks] = bytes(self.blocks)
        self._mm[lay.taken : lay.taken + self._slots] = bytes(self._slots)
        self._head[Word.USED] = 0
        for slot, generation in enumerate(self._gens.tolist()):
            if generation:
                first, count, *_ = self._slot(slot)
                self._mm[lay.taken + slot] = 1
                self._mark(first, count, 1)
        self._head[Word.DIRTY] = 0

    def _slot(self, slot: int) -> tuple[int, int, int, float, bytes]:
        return SLOT.unpack_from(self._mm, self._lay.info + slot * SLOT.size)

    def _live_slots(self) -> Iterator[int]:
        taken = self._mm[self._lay.taken : self._lay.taken + self._slots]
        slot = taken.find(1)
        while slot >= 0:
            yield slot
            slot = taken.find(1, slot + 1)

    def _after_fork(self) -> None:
        """A flock belongs to the open file, which a fork shares: take our own, at once.

        A thread of the parent may have held either lock; its child must not keep them.
        """
        if not self._closed:
            own = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR)
            os.close(self._fd)
            self._fd = own
        self._thread_lock = threading.Lock()


def _owner_bytes(owner: str) -> bytes:
    raw = owner.encode()
    if not raw or len(raw) > OWNER_BYTES or b"\0" in raw:
        raise ValueError(f"an owner is 1 to {OWNER_BYTES} bytes (see owner_name), got {owner!r}")
    return raw


_open_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _reopen_all() -> None:
    for arena in list(_open_arenas):
        arena._after_fork()


os.register_at_fork(after_in_child=_reopen_all)
