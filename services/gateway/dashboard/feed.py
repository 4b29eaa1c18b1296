"""One reader for all viewers: it looks at Redis while somebody watches, and tells what changed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from common.errors import SlackwaterError
from services.gateway.client import GatewayClient
from services.gateway.dashboard.board import Board
from services.gateway.dashboard.sight import Sight, look
from services.gateway.links import Links

log = logging.getLogger("slackwater.gateway")

# Between two looks: steps seem to flow, and a look costs three round trips.
LOOK_S = 0.5
AWAY_S = 1.0
# Frames a viewer may be behind; one that is further behind gets a snapshot instead.
MOST_BEHIND = 16
PING_S = 15.0


@dataclass(eq=False, slots=True)
class Viewer:
    """Frames to send, None for the end. `behind`: one found no room."""

    news: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(MOST_BEHIND))
    behind: bool = False

    def tell(self, content: bytes | None) -> None:
        if self.news.full():
            self.behind = True
        else:
            self.news.put_nowait(content)

    def catch_up(self) -> None:
        """Forget what a snapshot says better."""
        self.behind = False
        while not self.news.empty():
            self.news.get_nowait()


class Feed:
    """`watch()` for each viewer; the reader runs while there is one."""

    def __init__(self, client: GatewayClient, links: Links) -> None:
        self._client, self._links = client, links
        self._board = Board()
        self._ready = asyncio.Event()  # the board has something to show
        self._viewers: set[Viewer] = set()
        self._reader: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    async def watch(self) -> AsyncIterator[bytes]:
        """Frames of server-sent events: a snapshot, then changes, until the gateway stops."""
        viewer = Viewer()
        self._viewers.add(viewer)
        try:
            if self._reader is None or self._reader.done():
                self._board, self._ready = Board(), asyncio.Event()
                self._reader = asyncio.create_task(self._read(), name="dashboard")
            async for _ in self._first_look():
                yield frame("away", {})
            while not self._closed:
                # No await between the snapshot and the frames behind it: nothing is missed.
                viewer.catch_up()
                yield frame("snapshot", self._board.snapshot())
                while not viewer.behind:
                    content = await _next(viewer)
                    if content is None:
                        return
                    if not viewer.behind:
                        yield content
        finally:
            self._viewers.discard(viewer)

    async def _first_look(self) -> AsyncIterator[None]:
        """Ends when there is something to show; yields now and then until then."""
        while not self._ready.is_set() and not self._closed:
            try:
                async with asyncio.timeout(AWAY_S):
                    await self._ready.wait()
            except TimeoutError:
                yield

    async def close(self) -> None:
        """Streams end."""
        self._closed = True
        self._ready.set()
        for viewer in self._viewers:
            viewer.catch_up()
            viewer.tell(None)
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader

    async def _read(self) -> None:
        while self._viewers:
            try:
                change = self._board.fold(await self._look())
            except (SlackwaterError, RedisError, OSError):
                self._tell(frame("away", {}))
                await asyncio.sleep(AWAY_S)
                continue
            except Exception:  # what a later version wrote must not end the page for good
                log.exception("the dashboard cannot read the pool")
                self._tell(frame("away", {}))
                await asyncio.sleep(AWAY_S)
                continue
            if self._ready.is_set():
                self._tell(frame("change", change))
            self._ready.set()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> Sight:
        board, client = self._board, self._client
        return await client.do(look(client.keys, self._links, board.last, board.known, board.seen))

    def _tell(self, content: bytes) -> None:
        for viewer in self._viewers:
            viewer.tell(content)


def frame(kind: str, content: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


async def _next(viewer: Viewer) -> bytes | None:
    try:
        async with asyncio.timeout(PING_S):
            return await viewer.news.get()
    except TimeoutError:
        return b": still here\n\n"
