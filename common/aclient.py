"""The asyncio client: the same methods as common.client.Client, awaited.

    async with AsyncClient() as client:
        job = await client.submit("a red circle")
        async for event in job.events():
            print(event.type, event.step)
        (await job.wait()).raise_for_status()

A wait holds a connection while it blocks; canceling it gives the connection up. As with the
blocking client, only a silence of the connection counts as a Redis that is away, not how long a
large reply takes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common import asks
from common.asks import Ask, Plan, Push, Ticket
from common.client import (
    CONNECT_S,
    DEFAULT_URL,
    PATIENCE_S,
    answer_s,
    checked,
    file_names,
    id_or_new,
    not_pushed,
    parts_of,
    pushes_of,
    write_whole,
)
from common.connect import async_pool, on_bytes
from common.errors import RedisAway
from common.job import Result
from common.keys import Keys
from common.params import merge_manifests
from common.patience import Patience, RedisRefused, is_away
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
        push = asks.typed_push(id_or_new(id), {"prompt": prompt, **params})
        return (await self._push([push]))[0]

    async def submit_many(self, jobs: Iterable[Mapping[str, Any]]) -> list[AsyncJobHandle]:
        """As Client.submit_many."""
        return await self._push(pushes_of(jobs))

    async def submit_text(
        self, fields: Mapping[str, str], *, id: str | None = None
    ) -> AsyncJobHandle:
        """As Client.submit_text."""
        return (await self._push([asks.text_push(id_or_new(id), fields)]))[0]

    async def _push(self, pushes: list[Push]) -> list[AsyncJobHandle]:
        accepted: dict[int, Ticket] = {}
        try:
            tickets = await self._do(asks.submit(self.keys, pushes, accepted))
        except (RedisRefused, RedisAway) as error:
            handles = [AsyncJobHandle(self, accepted[i]) for i in sorted(accepted)]
            raise not_pushed(error, pushes, accepted, handles) from error
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
        patience = Patience(self.patience, deadline, self.url)
        while True:
            try:
                return await self._round_trip(ask, deadline)
            except (RedisError, OSError) as error:
                await asyncio.sleep(patience.pause_after(error))

    async def _round_trip(self, ask: Ask, deadline: float | None) -> list[Any]:
        if not ask.commands:
            return []
        try:
            return checked(await self._exchange(ask, deadline), ask.one_by_one)
        except TimeoutError as error:
            raise RedisTimeoutError("Redis does not answer") from error
        except ResponseError as error:
            if is_away(error):  # see common.outage.connect_anew
                await self._pool.disconnect(inuse_connections=False)
            raise

    async def _exchange(self, ask: Ask, deadline: float | None) -> list[Any]:
        """The replies, errors among them. Raises TimeoutError once nothing comes or goes."""
        async with asyncio.timeout(answer_s(ask, deadline)) as silence:

            def heard() -> None:
                if not silence.expired():
                    now = asyncio.get_running_loop().time()
                    silence.reschedule(now + answer_s(ask, deadline))

            pool: Any = self._pool  # half typed in redis-py
            connection = await pool.get_connection()
            try:
                with on_bytes(connection, heard):
                    await _send(connection, ask, heard)
                    return [await _reply(connection) for _ in ask.commands]
            except BaseException:  # replies that nobody reads would be taken for the next one's
                await connection.disconnect(nowait=True)
                raise
            finally:
                await pool.release(connection)


async def _send(connection: Any, ask: Ask, sent: Callable[[], None]) -> None:
    for n, part in enumerate(parts_of(connection.pack_commands(ask.commands))):
        if not connection.is_connected:  # a new one must not begin in the middle of a command
            raise RedisConnectionError("the connection was closed meanwhile")
        await connection.send_packed_command(part, check_health=not n)
        sent()


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


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
