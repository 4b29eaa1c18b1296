"""Latent handles: small records that say where a job's tensors lie, and the store behind them.

A handle travels through Redis in a few hundred bytes; the tensors lie in this host's arena, in
Redis in pieces when the arena is full or the reader is elsewhere, or, if tiny, in the handle
itself. Every handle is a claim of its own, and freeing one twice frees nothing more.
docs/handles.md has the life of a block.

Torch-free; common/payload.py says what a parcel of tensors is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from common.arena import SWEEP_MIN_AGE_S, Arena, ArenaError, Extent
from common.owners import owner_of
from common.payload import ITEM_BYTES, Parcel, TensorSpec, WarmBuffers, assemble, digest, lay_out
from common.spill import PIECE_BYTES, TTL_S, Spill, SpillFull

__all__ = ["Handle", "HandleError", "HandleStore", "Parcel", "TensorSpec"]

WHERES = ("device", "cuda_ipc", "arena", "redis", "inline")
# Above this a state has no business in a task message, which must stay under 8 kB for all rows.
INLINE_LIMIT_BYTES = 1024

Kind = Literal["lost", "corrupt", "unreachable", "full", "malformed"]


class HandleError(Exception):
    """A state cannot be had. `kind` says what that means for the job:

    lost         its bytes are gone (freed, expired, host restarted): go back to an older state
    corrupt      its bytes are not what was written: as lost, and worth an alarm
    unreachable  it exists, but not from here: run where it lies, or have it spilled first
    full         there was no room to write it
    malformed    this is not a handle; the message names the field
    """

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind


@dataclass(frozen=True, slots=True)
class Handle:
    """Where one part ("embeds", "prepared", "latents", …) of a job's state lies.

    `nbytes` and `xxh3` (64 bits, hex) are of the whole payload: the tensors at their offsets,
    zeros between them, then the meta bytes. `location` depends on `where`:

        arena     path, arena (its id), offset, slot, gen   the extent, and which arena it is in
        redis     key, pieces, claim
        inline    data
        device    worker                  the owner's, readable only there
        cuda_ipc  pool, blocks, worker    see common/cuda_ipc.py
    """

    job: str
    seq: int
    part: str
    where: str
    host: str
    tensors: tuple[TensorSpec, ...]
    nbytes: int
    xxh3: str
    location: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.part} of job {self.job} (seq {self.seq}, {self.nbytes} bytes, {self.where})"

    def to_wire(self) -> dict[str, Any]:
        """Plain maps, lists, strings, numbers and bytes, for msgpack."""
        return {
            "job": self.job,
            "seq": self.seq,
            "part": self.part,
            "where": self.where,
            "host": self.host,
            "t": [[t.name, t.dtype, list(t.shape), t.offset] for t in self.tensors],
            "nbytes": self.nbytes,
            "xxh3": self.xxh3,
            "loc": dict(self.location),
        }

    @classmethod
    def from_wire(cls, wire: Any) -> Handle:
        """The handle `to_wire` gave; HandleError("malformed") names the first bad field."""
        if not isinstance(wire, dict):
            raise _malformed("handle", "a map", wire)
        where = _field(wire, "where", str)
        if where not in WHERES:
            raise _malformed("where", f"one of {', '.join(WHERES)}", where)
        nbytes = _field(wire, "nbytes", int)
        specs = _field(wire, "t", list)
        location = _field(wire, "loc", dict)
        for name, kind in _LOCATION[where].items():
            _field(location, name, kind, "loc.")
        if where == "inline" and len(location["data"]) != nbytes:
            raise _malformed("loc.data", f"{nbytes} bytes", f"{len(location['data'])} bytes")
        return cls(
            job=_field(wire, "job", str),
            seq=_field(wire, "seq", int),
            part=_field(wire, "part", str),
            where=where,
            host=_field(wire, "host", str),
            tensors=tuple(_spec(i, spec, nbytes) for i, spec in enumerate(specs)),
            nbytes=nbytes,
            xxh3=_field(wire, "xxh3", str),
            location=location,
        )


class HandleStore:
    """Puts states where this host can, and gets them back checked.

    `counts` holds how many states went where, and how many `spilled` because the arena was
    full. Threads may share a store.
    """

    def __init__(
        self,
        host: str,
        arena: Arena | None = None,
        redis: Any = None,
        prefix: str = "sw:",
        piece_bytes: int = PIECE_BYTES,
        spill_ttl_s: float | None = TTL_S,
        inline_bytes: int = 0,
        prefer: str = "auto",
    ) -> None:
        """`redis` is a sync redis-py client without decode_responses; `prefix` the pool's, also
        in an arena that others share.

        `inline_bytes` lets `put(where="auto")` carry states up to that size in the handle; off
        by default, since a batch's handles together must fit the task message. `prefer` is what
        "auto" means here: "redis" leaves states where any host can read them.
        """
        self.host, self.arena, self._prefix = host, arena, prefix
        self._spill = Spill(redis, prefix, piece_bytes, spill_ttl_s) if redis is not None else None
        self._inline_bytes = min(inline_bytes, INLINE_LIMIT_BYTES)
        self._prefer = prefer
        self._buffers = WarmBuffers()
        self.counts = {"arena": 0, "redis": 0, "inline": 0, "spilled": 0}

    def put(self, job: str, seq: int, part: str, parcel: Parcel, where: str = "auto") -> Handle:
        """Write `parcel` to fresh space; never in place, so older handles stay readable.

        "auto" takes the arena and, when that is full or absent, Redis. HandleError("full")
        where there is no room; ValueError for a buffer that does not fit its dtype and shape.
        There is one writer per (job, seq, part).
        """
        if where not in ("auto", "arena", "redis", "inline"):
            raise ValueError(f'put takes "auto", "arena", "redis" or "inline", not {where!r}')
        specs, chunks, nbytes = lay_out(parcel)
        blank = Handle(job, seq, part, "", self.host, specs, nbytes, "", {})
        if where == "inline" or (where == "auto" and nbytes <= self._inline_bytes):
            if nbytes > INLINE_LIMIT_BYTES:
                raise HandleError(
                    "full", f"{part} of {nbytes} bytes is over the {INLINE_LIMIT_BYTES} of inline"
                )
            data = bytearray(nbytes)
            checksum = assemble(chunks, memoryview(data))
            self.counts["inline"] += 1
            return replace(blank, where="inline", xxh3=checksum, location={"data": bytes(data)})
        if where == "auto":
            where = self._prefer
        if where != "redis" and self.arena is not None:
            extent = self.arena.alloc(nbytes, owner_of(self._prefix, job))
            if extent is not None:
                try:
                    view = self.arena.view(extent)
                    checksum = assemble(chunks, view)
                except BaseException:
                    self.arena.free(extent)
                    raise
                self.counts["arena"] += 1
                place = self._place(extent)
                return replace(blank, where="arena", xxh3=checksum, location=place)
        if where == "arena" or self._spill is None:
            room = "is full" if self.arena is not None else "is not open in this process"
            raise HandleError(
                "full",
                f"no room for {part} of job {job} ({nbytes} bytes): the arena of {self.host} {room}"
                + ("" if where == "arena" else " and there is no Redis to spill to"),
            )
        payload = self._buffers.take(nbytes)
        checksum = assemble(chunks, payload)
        try:
            place = self._spill.put(job, seq, part, payload)
        except SpillFull as err:
            raise HandleError("full", f"no room for {part} of job {job}: {err}") from err
        self.counts["redis"] += 1
        self.counts["spilled"] += where == "auto" and self.arena is not None
        return replace(blank, where="redis", xxh3=checksum, location=place)

    def get(self, handle: Handle) -> Parcel:
        """A private, writable copy, checked for shape, size and checksum; else HandleError.

        A copy, because the coordinator may let another process free the block while the caller
        still computes.
        """
        if handle.where == "inline":
            payload = memoryview(bytearray(handle.location["data"]))
            return _open(handle, payload, digest(payload))
        if handle.where == "arena":
            arena, extent = self._reach(handle)
            view = _view(arena, extent, handle)
            payload = self._buffers.take(handle.nbytes)
            checksum = assemble([(0, view)], payload)
            if not arena.is_live(extent):  # freed, and maybe reused, while we copied
                raise _lost(handle, "it was freed while it was being read")
        elif handle.where == "redis" and self._spill is not None:
            payload = self._buffers.take(handle.nbytes)
            size = self._spill.get(handle.location, payload)
            if size is None:
                raise _lost(handle, "its pieces in Redis were freed or have expired")
            if size != handle.nbytes:
                raise _corrupt(handle, f"it has {size} bytes where {handle.nbytes} were put")
            checksum = digest(payload)
        else:
            raise self._unreachable(handle)
        return _open(handle, payload, checksum)

    @contextlib.contextmanager
    def borrow(self, handle: Handle) -> Iterator[Parcel]:
        """As `get`, but arena bytes are shown in place, read-only: for a copy to a device.

        HandleError("lost"), at the end of the block too, if they were freed meanwhile; then
        throw away what was read.
        """
        if handle.where != "arena":
            yield self.get(handle)
            return
        arena, extent = self._reach(handle)
        view = _view(arena, extent, handle).toreadonly()
        checksum = digest(view)
        if arena.is_live(extent):  # else what does not match is somebody else's by now
            yield _open(handle, view, checksum)
        if not arena.is_live(extent):
            raise _lost(handle, "it was freed while it was being read")

    def free(self, handle: Handle) -> bool:
        """Give this handle's claim back. False if that was done before or it is not ours to free.

        Idempotent: a repeat, also by another process, never touches a newer block.
        """
        if handle.where == "arena":
            if self.arena is None or handle.location["arena"] != self.arena.id:
                return False
            return self.arena.free(_extent(handle))
        if handle.where == "redis" and self._spill is not None:
            return self._spill.free(handle.location)
        return handle.where == "inline"

    def can_read(self, handle: Handle) -> bool:
        """Whether `get` could reach it from this process; not whether it still exists."""
        if handle.where == "arena":
            return self.arena is not None and handle.location["arena"] == self.arena.id
        return handle.where == "inline" or (handle.where == "redis" and self._spill is not None)

    def stop_waiting(self) -> None:
        """A Redis that is away is waited for; no longer from now on. What this leaves there has a
        TTL."""
        if self._spill is not None:
            self._spill.stop_waiting()

    def sweep(self, orphan: Callable[[str], bool], min_age_s: float = SWEEP_MIN_AGE_S) -> int:
        """Free this host's arena claims of owners that are orphans (see common/owners.py)."""
        return self.arena.free_owned_by(orphan, min_age_s) if self.arena is not None else 0

    def _place(self, extent: Extent) -> dict[str, Any]:
        assert self.arena is not None
        return {
            "path": self.arena.path,
            "arena": self.arena.id,
            "offset": extent.offset,
            "slot": extent.slot,
            "gen": extent.generation,
        }

    def _reach(self, handle: Handle) -> tuple[Arena, Extent]:
        if self.arena is not None and handle.location["arena"] == self.arena.id:
            return self.arena, _extent(handle)
        if self.arena is not None and handle.host == self.host:
            raise _lost(handle, f"the arena of {self.host} was made anew since (host restarted?)")
        raise self._unreachable(handle)

    def _unreachable(self, handle: Handle) -> HandleError:
        if handle.where in ("device", "cuda_ipc"):
            why = f"it lies on the device of worker {handle.location.get('worker', '?')}"
        elif handle.where == "redis":
            why = "it lies in Redis, and this process was given no Redis client"
        elif handle.host == self.host:
            why = f"it lies in the arena {handle.location['path']}, not open in this process"
        else:
            why = f"it lies in the arena of host {handle.host}, and this is host {self.host}"
        return HandleError("unreachable", f"{handle} cannot be read here: {why}")


def _open(handle: Handle, payload: memoryview, checksum: str) -> Parcel:
    if checksum != handle.xxh3:
        raise _corrupt(handle, f"its checksum is {checksum} where {handle.xxh3} was put")
    end, tensors = 0, {}
    for spec in handle.tensors:
        end = spec.offset + spec.nbytes
        tensors[spec.name] = (spec.dtype, spec.shape, payload[spec.offset : end])
    return Parcel(tensors, bytes(payload[end:]))


def _view(arena: Arena, extent: Extent, handle: Handle) -> memoryview:
    if not arena.is_live(extent):
        raise _lost(handle, "its block was freed")
    try:
        return arena.view(extent)
    except ArenaError as err:
        raise _corrupt(handle, str(err)) from err


def _extent(handle: Handle) -> Extent:
    place = handle.location
    return Extent(place["offset"], handle.nbytes, place["slot"], place["gen"])


def _corrupt(handle: Handle, why: str) -> HandleError:
    return HandleError("corrupt", f"{handle} is corrupt: {why}")


def _lost(handle: Handle, why: str) -> HandleError:
    return HandleError("lost", f"{handle} is no longer there: {why}")


# -- the wire --------------------------------------------------------------------------------

_LOCATION: dict[str, dict[str, type]] = {
    "arena": {"path": str, "arena": str, "offset": int, "slot": int, "gen": int},
    "redis": {"key": str, "pieces": int, "claim": str},
    "inline": {"data": bytes},
    "device": {"worker": str},
    "cuda_ipc": {"pool": str, "blocks": list, "worker": str},
}


def _field(wire: dict[str, Any], name: str, kind: type, prefix: str = "") -> Any:
    value: Any = wire.get(name)
    # not isinstance: True is no size
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise _malformed(prefix + name, "an int ≥ 0" if kind is int else kind.__name__, value)
    return value


def _spec(i: int, wire: Any, nbytes: int) -> TensorSpec:
    if type(wire) is not list or len(wire) != 4:
        raise _malformed(f"t[{i}]", "[name, dtype, shape, offset]", wire)
    named: dict[str, Any] = dict(zip(("name", "dtype", "shape", "offset"), wire, strict=True))
    name = _field(named, "name", str, f"t[{i}].")
    dtype = _field(named, "dtype", str, f"t[{i}].")
    if dtype not in ITEM_BYTES:
        raise _malformed(f"t[{i}].dtype", f"one of {', '.join(ITEM_BYTES)}", dtype)
    shape = _field(named, "shape", list, f"t[{i}].")
    if any(type(n) is not int or n < 0 for n in shape):
        raise _malformed(f"t[{i}].shape", "ints ≥ 0", shape)
    spec = TensorSpec(name, dtype, tuple(shape), _field(named, "offset", int, f"t[{i}]."))
    if spec.offset + spec.nbytes > nbytes:
        raise _malformed(f"t[{i}]", f"a tensor within the payload's {nbytes} bytes", wire)
    return spec


def _malformed(name: str, wanted: str, value: Any) -> HandleError:
    return HandleError("malformed", f"handle field {name} should be {wanted}, got {value!r:.80}")
