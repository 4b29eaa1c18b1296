"""One connection on which any number of requests wait for events.

A waiting request asks for news of one or two streams. The reader puts all wishes into one XREAD
and hands each its share. A wish is answered once; whoever wants more asks again from where it
was, so a slow client holds no memory here: Redis keeps the last 256 events of each job.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from common.asks import BLOCK_S
from common.client import ANSWER_S, CONNECT_S
from common.connect import async_pool

# Of one stream in one reply: many streams begin at once when a crowd connects.
MOST_ENTRIES = 64
# Between two reads, so that those just answered can ask again and events come in bunches; it
# grows with the streams named, whose names have to be sent anew each time.
PAUSE_S = 0.001
PAUSE_A_STREAM_S = 10e-6
# A read that was sent but has not reached Redis cannot be interrupted yet.
UNBLOCK_AGAIN_S = 0.001

Entries = list[Any]  # [entry id, [field, value, …]] as Redis sends them


class Closed(Exception):
    """The gateway stops: nobody waits any more."""


@dataclass(eq=False, slots=True)
class Wish:
    """What one request waits for: by stream, the id of the last entry that it has."""

    last: dict[bytes, tuple[int, int]]
    answer: asyncio.Future[list[Any]]
    found: list[Any] = field(default_factory=list)


class SharedReads:
    """Waits for events of many streams with one XREAD; used from one event loop.

    `interrupt` ends the blocking command of the connection whose id it is given, and says
    whether it was blocked (CLIENT UNBLOCK).
    """

    def __init__(self, url: str, interrupt: Callable[[int], Awaitable[bool]]) -> None:
        self._pool = async_pool(url, None, CONNECT_S)  # asyncio.timeout in _xread
        self._interrupt = interrupt
        self._wishes: dict[bytes, set[Wish]] = {}
        self._since: dict[bytes, tuple[int, int]] = {}  # where the read under way begins
        self._wake = asyncio.Event()
        self._unseen = self._blocked = False
        self._connection: Any = None
        self._connection_id = 0
        self._reader: asyncio.Task[None] | None = None
        self._interrupter: asyncio.Task[None] | None = None
        self._closed = False
        self.waiting = 0  # requests that wait this moment

    async def read(self, last: Mapping[str, str], timeout_s: float) -> list[Any] | None:
        """New entries of the streams in `last` after the ids given there, as XREAD replies.

        None after `timeout_s` without any. Raises Closed, or why Redis cannot be read.
        """
        if self._closed:
            raise Closed
        if self._reader is None:
            self._reader = asyncio.create_task(self._run(), name="shared-reads")
        ids = {stream.encode(): _parsed(entry.encode()) for stream, entry in last.items()}
        wish = Wish(ids, asyncio.get_running_loop().create_future())
        for stream in ids:
            self._wishes.setdefault(stream, set()).add(wish)
        self.waiting += 1
        self._look_again()
        try:
            async with asyncio.timeout(timeout_s):
                return await wish.answer
        except TimeoutError:
            return None
        finally:
            self._forget(wish)

    @property
    def alive(self) -> bool:
        """False once the reader has died of something it does not know."""
        return self._reader is None or not self._reader.done()

    async def close(self) -> None:
        """Whoever waits gets Closed."""
        self._closed = True
        self._fail(Closed())
        for task in (self._reader, self._interrupter):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        await self._pool.disconnect()

    # -- the reader ----------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            if not self._wishes:
                self._wake.clear()
                await self._wake.wait()
            try:
                self._deliver(await self._xread())
            except (RedisError, OSError) as error:
                await self._disconnect()
                self._fail(error)
            await asyncio.sleep(PAUSE_S + PAUSE_A_STREAM_S * len(self._wishes))

    async def _xread(self) -> list[Any]:
        self._unseen = False
        names = list(self._wishes)
        since = [min(wish.last[name] for wish in self._wishes[name]) for name in names]
        self._since = dict(zip(names, since, strict=True))
        try:
            async with asyncio.timeout(BLOCK_S + ANSWER_S):
                if self._connection is None:
                    await self._connect()
                await self._connection.send_command(
                    "XREAD", "COUNT", MOST_ENTRIES, "BLOCK", round(1000 * BLOCK_S), "STREAMS",
                    *names, *(f"{ms}-{n}" for ms, n in since),
                )  # fmt: skip
                self._blocked = True
                return await self._connection.read_response() or []
        except TimeoutError as error:
            raise RedisConnectionError("Redis does not answer") from error
        finally:
            self._blocked = False

    async def _connect(self) -> None:
        pool: Any = self._pool  # half typed in redis-py
        self._connection = await pool.get_connection()
        await self._connection.send_command("CLIENT", "ID")
        self._connection_id = await self._connection.read_response()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)

    def _deliver(self, reply: list[Any]) -> None:
        answered: set[Wish] = set()
        for stream, entries in reply:
            ids = [_parsed(entry[0]) for entry in entries]
            for wish in self._wishes.get(stream, ()):
                since = wish.last[stream]
                if since < self._since[stream]:
                    continue  # it came while the read was under way; the next one begins there
                new = [e for e, at in zip(entries, ids, strict=True) if at > since]
                if new:
                    wish.found.append([stream, new])
                    answered.add(wish)
        for wish in answered:
            if not wish.answer.done():
                wish.answer.set_result(wish.found)

    def _fail(self, error: Exception) -> None:
        for wish in {wish for wishes in self._wishes.values() for wish in wishes}:
            if not wish.answer.done():
                wish.answer.set_exception(error)

    def _forget(self, wish: Wish) -> None:
        self.waiting -= 1
        for stream in wish.last:
            there = self._wishes[stream]
            there.discard(wish)
            if not there:
                del self._wishes[stream]
        if wish.answer.done() and not wish.answer.cancelled():
            wish.answer.exception()  # seen, even if its request went away meanwhile

    # -- a new wish while the reader blocks ------------------------------------------------

    def _look_again(self) -> None:
        self._unseen = True
        self._wake.set()
        if self._blocked and (self._interrupter is None or self._interrupter.done()):
            self._interrupter = asyncio.create_task(self._unblock(), name="shared-reads-unblock")

    async def _unblock(self) -> None:
        while self._unseen and self._blocked:
            try:
                await self._interrupt(self._connection_id)
            except (RedisError, OSError):
                return  # the reader meets it too
            await asyncio.sleep(UNBLOCK_AGAIN_S)


def _parsed(entry: bytes) -> tuple[int, int]:
    ms, _, n = entry.partition(b"-")
    return int(ms), int(n or 0)
