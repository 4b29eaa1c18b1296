"""A handle store that times what it moves, by path: arena, redis or inline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from common.handles import Handle, HandleStore
from common.payload import Parcel

PUT, GET = "put", "get"

Moved = Callable[[str, str, float, int], None]  # put or get, path, seconds, bytes


class TimedStore(HandleStore):
    """`moved` is called after each put and get, from whichever thread did it."""

    def __init__(self, *args: Any, moved: Moved, **options: Any) -> None:
        super().__init__(*args, **options)
        self._moved = moved

    def put(self, job: str, seq: int, part: str, parcel: Parcel, where: str = "auto") -> Handle:
        begun = perf_counter()
        handle = super().put(job, seq, part, parcel, where)
        self._moved(PUT, handle.where, perf_counter() - begun, handle.nbytes)
        return handle

    def get(self, handle: Handle) -> Parcel:
        begun = perf_counter()
        parcel = super().get(handle)
        self._moved(GET, handle.where, perf_counter() - begun, handle.nbytes)
        return parcel

    @contextlib.contextmanager
    def borrow(self, handle: Handle) -> Iterator[Parcel]:
        begun = perf_counter()
        with super().borrow(handle) as parcel:
            yield parcel
        if handle.where == "arena":  # else it was a `get`, which has counted itself
            self._moved(GET, handle.where, perf_counter() - begun, handle.nbytes)
