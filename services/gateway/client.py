"""The asyncio client as the gateway uses it: all waits on one connection, the rest on a few."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeVar

from common.aclient import AsyncClient
from common.asks import Ask, Plan
from services.gateway.reads import SharedReads

# Connections for everything that does not wait for events.
CONNECTIONS = 16
# Without news for this long the record is looked at: its stream may have been lost.
LOOK_S = 20.0
# A request is held up no longer than this by a Redis that is away.
PATIENCE_S = 3.0

T = TypeVar("T")


class GatewayClient(AsyncClient):
    """An AsyncClient whose blocking reads are shared."""

    def __init__(self, url: str, prefix: str) -> None:
        super().__init__(url, prefix, patience=PATIENCE_S)
        self._turns = asyncio.Semaphore(CONNECTIONS)
        self.reads = SharedReads(url, self._interrupt)

    async def do(self, plan: Plan[T], deadline: float | None = None) -> T:
        """Carry out a plan of common.asks; `deadline` by the monotonic clock."""
        return await self._do(plan, deadline)

    async def close(self) -> None:
        await self.reads.close()
        await super().close()

    async def _round_trip(self, ask: Ask, deadline: float | None) -> list[Any]:
        if ask.block_s:
            return [await self.reads.read(_streams(ask), _patience_s(deadline))]
        async with self._turns:
            return await super()._round_trip(ask, deadline)

    async def _interrupt(self, connection: int) -> bool:
        [blocked] = await self._round_trip(Ask((("CLIENT", "UNBLOCK", connection),)), None)
        return bool(blocked)


def _streams(ask: Ask) -> dict[str, str]:
    """Stream to last id, of the one kind of blocking command there is: XREAD BLOCK ms STREAMS …"""
    [(_, _, _, _, *rest)] = ask.commands
    half = len(rest) // 2
    return dict(zip(rest[:half], rest[half:], strict=True))


def _patience_s(deadline: float | None) -> float:
    return LOOK_S if deadline is None else max(0.0, min(LOOK_S, deadline - time.monotonic()))
