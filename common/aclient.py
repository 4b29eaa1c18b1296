"""The asyncio client: the same methods as common.client.Client, awaited.

    async with AsyncClient() as client:
        job = await client.submit("a red circle")
        async for event in job.events():
            print(event.type, event.step)
        (await job.wait()).raise_for_status()

A wait holds a connection while it blocks; canceling it gives the connection up.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from redis.exceptions import OutOfMemoryError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common import asks
from common.asks import Ask, Plan, Push, Ticket
from common.client import (
    AWAY,
    CONNECT_S,
    DEFAULT_URL,
    PATIENCE_S,
    Patience,
    answer_s,
    checked,
    file_names,
    full,
    new_id,
    write_whole,
)
from common.connect import async_pool
from common.errors import JobRefused
from common.job import Result
from common.keys import Keys
from common.params import merge_manifests
from common.record import JobEvent, JobRecord, WorkerRecord

T = TypeVar("T")


class AsyncClient:
    """A pool as its users see it; used from one event loop."""

    def __init__(
        self, url: str = DEFAULT_URL, prefix: str = "sw:", patience: float = PATIENCE_S
    ) -> None:
        self.url, self.keys, self.patience = url, Keys(prefix), patience
        self._pool = async_pool(url, None, CONNECT_S)  # asyncio.timeout in _round_trip

    # -- pushing -------------------------------------------------------------------------

    async def submit(self, prompt: str, *, id: str | None = None, **params: Any) -> AsyncJobHandle:
        """As Client.submit."""
        push = asks.typed_push(id or new_id(), {"prompt": prompt, **params})
        return (await self._push([push]))[0]

    async def submit_many(self, jobs: Iterable[Mapping[str, Any]]) -> list[AsyncJobHandle]:
        """As Client.submit_many."""
        pushes = []
        for job in jobs:
            params = dict(job)
            pushes.append(asks.typed_push(params.pop("id", None) or new_id(), params))
        return await self._push(pushes)

    async def submit_text(
        self, fields: Mapping[str, str], *, id: str | None = None
    ) -> AsyncJobHandle:
        """As Client.submit_text."""
        return (await self._push([asks.text_push(id or new_id(), fields)]))[0]

    async def _push(self, pushes: list[Push]) -> list[AsyncJobHandle]:
        try:
            tickets = await self._do(asks.submit(self.keys, pushes))
        except OutOfMemoryError as error:
            raise JobRefused(full(pushes[0].id)) from error
        return [AsyncJobHandle(self, ticket) for ticket in tickets]

    # -- one job -------------------------------------------------------------------------

    def job(self, id: str) -> AsyncJobHandle:
        """A handle on a job that somebody else pushed."""
        return AsyncJobHandle(self, Ticket(id))

    async def status(self, id: str) -> JobRecord:
        return await self._do(asks.status(self.keys, Ticket(id)))

    async def result(self, id: str) -> Result | None:
        return await self._do(asks.result(self.keys, Ticket(id)))

    async def wait(self, id: str, timeout: float | None = None) -> Result:
        return await self._wait(Ticket(id), timeout)

    def events(
        self, id: str, timeout: float | None = None, after: str = "0"
    ) -> AsyncIterator[JobEvent]:
        """As Client.events; `after` is the `entry` of an event, to go on behind it."""
        return self._events(Ticket(id), timeout, after)

    async def cancel(self, id: str) -> None:
        await self._do(asks.cancel(self.keys, Ticket(id)))

    async def output(self, id: str, n: int = 0) -> bytes:
        return await self._do(asks.output(self.keys, Ticket(id), n))

    # -- the pool ------------------------------------------------------------------------

    async def ps(self, ended: bool = False) -> list[JobRecord]:
        return await self._do(asks.ps(self.keys, ended))

    async def statuses(self, ids: Iterable[str]) -> list[JobRecord | None]:
        return await self._do(asks.statuses(self.keys, list(ids)))

    async def workers(self) -> list[WorkerRecord]:
        return await self._do(asks.workers(self.keys))

    async def models(self) -> dict[str, dict[str, Any]]:
        published = await self._do(asks.manifests(self.keys))
        return merge_manifests({k.decode(): json.loads(v) for k, v in published.items()})

    async def ask(self, ask: Ask) -> list[Any]:
        """Run plain commands in one round trip, patiently; for what has no method here."""
        return await self._ask(ask, None)

    async def close(self) -> None:
        await self._pool.disconnect()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # -- talking to Redis ----------------------------------------------------------------

    async def _wait(self, ticket: Ticket, timeout: float | None) -> Result:
        deadline = None if timeout is None else time.monotonic() + timeout
        return await self._do(asks.wait(self.keys, ticket, deadline), deadline)

    async def _events(
        self, ticket: Ticket, timeout: float | None, after: str = "0"
    ) -> AsyncIterator[JobEvent]:
        deadline = None if timeout is None else time.monotonic() + timeout
        plan = asks.events(self.keys, ticket, deadline, after)
        replies: list[Any] | None = None
        while True:
            try:
                step = plan.send(replies)
            except StopIteration:
                return
            replies = None
            if isinstance(step, Ask):
                replies = await self._ask(step, deadline)
            else:
                yield step

    async def _do(self, plan: Plan[T], deadline: float | None = None) -> T:
        replies: Any = None
        while True:
            try:
                ask = plan.send(replies)
            except StopIteration as end:
                answer: T = end.value
                return answer
            replies = await self._ask(ask, deadline)

    async def _ask(self, ask: Ask, deadline: float | None) -> list[Any]:
        patience = Patience(self.patience, deadline)
        while True:
            try:
                return await self._round_trip(ask, deadline)
            except AWAY as error:
                await asyncio.sleep(patience.pause_after(error))

    async def _round_trip(self, ask: Ask, deadline: float | None) -> list[Any]:
        if not ask.commands:
            return []
        try:
            async with asyncio.timeout(answer_s(ask, deadline)):
                return checked(await self._exchange(ask))
        except TimeoutError as error:
            raise RedisTimeoutError("Redis does not answer") from error

    async def _exchange(self, ask: Ask) -> list[Any]:
        pool: Any = self._pool  # half typed in redis-py
        connection = await pool.get_connection()
        replies: list[Any] = []
        try:
            await connection.send_packed_command(connection.pack_commands(ask.commands))
            for _ in ask.commands:
                try:
                    replies.append(await connection.read_response())
                except ResponseError as error:
                    replies.append(error)
        except BaseException:  # replies that nobody reads would be taken for the next one's
            await connection.disconnect(nowait=True)
            raise
        finally:
            await pool.release(connection)
        return replies


@dataclass(frozen=True, slots=True)
class AsyncJobHandle:
    """A job that was pushed here; see common.client.JobHandle."""

    client: AsyncClient
    ticket: Ticket

    @property
    def id(self) -> str:
        return self.ticket.id

    async def status(self) -> JobRecord:
        return await self.client._do(asks.status(self.client.keys, self.ticket))

    async def result(self) -> Result | None:
        return await self.client._do(asks.result(self.client.keys, self.ticket))

    async def wait(self, timeout: float | None = None) -> Result:
        return await self.client._wait(self.ticket, timeout)

    async def admitted(self, timeout: float | None = None) -> JobRecord:
        async for _ in self.events(timeout):
            break
        return await self.status()

    def events(self, timeout: float | None = None) -> AsyncIterator[JobEvent]:
        return self.client._events(self.ticket, timeout)

    async def cancel(self) -> bool:
        return await self.client._do(asks.cancel(self.client.keys, self.ticket))

    async def output(self, n: int = 0) -> bytes:
        return await self.client._do(asks.output(self.client.keys, self.ticket, n))

    async def save(self, directory: str | Path = ".") -> list[Path]:
        outputs = (await self.result() or await self.wait()).raise_for_status().outputs
        paths = file_names(self.id, outputs, Path(directory))
        for n, path in enumerate(paths):
            content = await self.output(n)
            await asyncio.to_thread(write_whole, path, content)
        return paths
