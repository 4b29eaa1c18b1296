"""A TCP proxy before Redis with a port for each member, so that any one can be cut off alone."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
CHUNK = 1 << 16
# Replies to these are worth losing: whether the command has run cannot be told then.
WRITES = (b"EVALSHA", b"XADD")
SHA = re.compile(rb"EVALSHA\r\n\$40\r\n([0-9a-f]{40})")


class Link:
    """One member's way to Redis. Set from any thread, heeded at the next bytes."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self.port = 0
        self.is_cut = False  # connections end and new ones are closed at once
        self.is_silent = False  # bytes wait, in both directions, until it is over
        self.delay_s = 0.0  # added to each burst of bytes, in each direction
        self.replies_to_lose = 0  # a write has run, its reply is dropped, the connection ends
        self.halve_next = False  # half of the next write arrives, then the connection ends
        self.loses_first = False  # the first reply of each script is lost, as with replies_to_lose
        self.lost: set[str] = set()  # shas of scripts whose first reply was
        self.tries = 0  # connections that were asked for
        self.was_hit = threading.Event()  # a reply was lost or a request halved
        self._writers: set[asyncio.StreamWriter] = set()
        self._open: set[Conversation] = set()

    def forget(self) -> None:
        """As a firewall that lost its state: open connections swallow everything from now on and
        never end; new ones work."""
        for conversation in list(self._open):
            conversation.is_forgotten = True

    def cut(self) -> None:
        self.is_cut = True
        self._proxy.call_soon(self._end_all)

    def mend(self) -> None:
        """As on the first day, but for `loses_first`, which is no accident."""
        self.is_cut = self.is_silent = self.halve_next = False
        self.delay_s, self.replies_to_lose = 0.0, 0

    def _end_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tries += 1
        with contextlib.suppress(OSError):
            if not self.is_cut:
                up, down = await asyncio.open_connection("127.0.0.1", self._proxy.target)
                self._writers |= {writer, down}
                conversation = Conversation(self, reader, writer, up, down)
                self._open.add(conversation)
                await conversation.go_on()
                self._open.discard(conversation)
                self._writers -= {writer, down}
                down.transport.abort()
        writer.transport.abort()


class Conversation:
    """One connection of a member and the one to Redis behind it."""

    def __init__(
        self,
        link: Link,
        asked: asyncio.StreamReader,
        answer: asyncio.StreamWriter,
        answered: asyncio.StreamReader,
        ask: asyncio.StreamWriter,
    ) -> None:
        self._link = link
        self._requests, self._replies = (asked, ask), (answered, answer)
        self._has_written = False  # the last request was a write
        self._scripts: set[str] = set()  # shas in it
        self.is_forgotten = False

    async def go_on(self) -> None:
        """Until either end closes or the link ends it."""
        pumps = [
            asyncio.ensure_future(self._pump(*self._requests, self._pass_request)),
            asyncio.ensure_future(self._pump(*self._replies, self._pass_reply)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        passed: Callable[[bytes], tuple[bytes, bool]],
    ) -> None:
        with contextlib.suppress(OSError):
            goes_on = True
            while goes_on and (data := await source.read(CHUNK)):
                while self._link.is_silent:
                    await asyncio.sleep(0.02)
                if self._link.delay_s:
                    await asyncio.sleep(self._link.delay_s)
                if self.is_forgotten:
                    continue
                data, goes_on = passed(data)
                sink.write(data)
                await sink.drain()
                if not goes_on:
                    self._link.was_hit.set()

    def _pass_request(self, data: bytes) -> tuple[bytes, bool]:
        """What of it arrives, and whether the connection goes on."""
        self._has_written = any(word in data for word in WRITES)
        self._scripts = {sha.decode() for sha in SHA.findall(data)}
        if self._has_written and self._link.halve_next:
            self._link.halve_next = False
            return data[: len(data) // 2], False
        return data, True

    def _pass_reply(self, data: bytes) -> tuple[bytes, bool]:
        if self._has_written and self._link.replies_to_lose:
            self._link.replies_to_lose -= 1
            return b"", False
        if self._link.loses_first and (new := self._scripts - self._link.lost):
            self._link.lost |= new
            return b"", False
        return data, True


class Proxy:
    """Runs in a thread of the harness; `target` is the port of Redis on 127.0.0.1."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    def link(self) -> Link:
        made = Link(self)
        server = self._await(asyncio.start_server(made.serve, "127.0.0.1", 0))
        made.port = server.sockets[0].getsockname()[1]
        self._servers.append(server)
        return made

    def call_soon(self, action: Any) -> None:
        self._loop.call_soon_threadsafe(action)

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def close(self) -> None:
        self._await(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        mine = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not mine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
