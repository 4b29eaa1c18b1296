"""One connection that waits for many: everyone hears what is theirs, at once, and only that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from common.keys import Keys
from services.gateway import reads as module
from services.gateway.client import GatewayClient
from services.gateway.reads import Closed, SharedReads

WAIT_S = 20.0
Test = Callable[[SharedReads], Awaitable[None]]


@pytest.fixture
def run(redis_server: str, redis_client: Any, keys: Keys) -> Any:
    """Runs a coroutine with reads of its own; what it left in Redis is deleted."""

    def runner(test: Test) -> None:
        async def main() -> None:
            client = GatewayClient(redis_server, keys.prefix)
            try:
                async with asyncio.timeout(WAIT_S):
                    await test(client.reads)
            finally:
                await client.close()

        asyncio.run(main())
        redis_client.flushall()

    return runner


def seen(reply: list[Any] | None) -> dict[str, list[str]]:
    """What came, by stream, as the value of the one field."""
    return {
        stream.decode(): [flat[1].decode() for _, flat in entries]
        for stream, entries in reply or ()
    }


def readers(redis_client: Any) -> set[str]:
    """Connections whose last command was a read, also those of tests before this one."""
    return {each["id"] for each in redis_client.client_list() if each["cmd"] == "xread"}


async def until_waiting(reads: SharedReads, count: int) -> None:
    """Until so many wait and the reader blocks."""
    while reads.waiting != count or not reads._blocked:
        await asyncio.sleep(0.001)  # lets the reader go on; it tells nobody that it blocks


def test_each_hears_of_its_own_streams_from_where_it_was(run: Any, redis_client: Any) -> None:
    first = redis_client.xadd("a", {"n": 1}).decode()

    async def test(reads: SharedReads) -> None:
        whole = asyncio.create_task(reads.read({"a": "0", "b": "0"}, WAIT_S))
        assert seen(await whole) == {"a": ["1"]}
        later = asyncio.create_task(reads.read({"a": first}, WAIT_S))
        other = asyncio.create_task(reads.read({"b": "0"}, WAIT_S))
        await until_waiting(reads, 2)
        redis_client.xadd("a", {"n": 2})
        assert seen(await later) == {"a": ["2"]}
        assert not other.done()
        both = [asyncio.create_task(reads.read({"a": at}, WAIT_S)) for at in ("0", first)]
        assert [seen(r) for r in await asyncio.gather(*both)] == [
            {"a": ["1", "2"]}, {"a": ["2"]},
        ]  # fmt: skip
        redis_client.xadd("b", {"n": 3})
        assert seen(await other) == {"b": ["3"]}
        assert reads.waiting == 0

    run(test)


def test_a_newcomer_does_not_wait_for_the_reader_to_look_up(
    run: Any, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_S", 10 * WAIT_S)  # only an interruption ends a read
    redis_client.xadd("b", {"n": 1})

    async def test(reads: SharedReads) -> None:
        waiting = asyncio.create_task(reads.read({"a": "0"}, WAIT_S))
        for _ in range(20):
            await until_waiting(reads, 1)
            assert seen(await reads.read({"b": "0"}, WAIT_S)) == {"b": ["1"]}
        assert not waiting.done()
        waiting.cancel()

    run(test)


def test_no_news_is_none_and_leaves_nothing_behind(run: Any) -> None:
    async def test(reads: SharedReads) -> None:
        assert await reads.read({"a": "0"}, 0.01) is None
        assert reads.waiting == 0
        assert not reads._wishes

    run(test)


def test_a_lost_connection_is_told_and_the_next_read_has_a_new_one(
    run: Any, redis_client: Any
) -> None:
    before = readers(redis_client)

    async def test(reads: SharedReads) -> None:
        waiting = asyncio.create_task(reads.read({"a": "0"}, WAIT_S))
        await until_waiting(reads, 1)
        [reader] = readers(redis_client) - before
        redis_client.client_kill_filter(_id=reader)
        with pytest.raises(RedisConnectionError):
            await waiting
        redis_client.xadd("a", {"n": 1})
        assert seen(await reads.read({"a": "0"}, WAIT_S)) == {"a": ["1"]}
        assert reads.alive

    run(test)


def test_closing_sends_everyone_home(run: Any) -> None:
    async def test(reads: SharedReads) -> None:
        waiting = [asyncio.create_task(reads.read({f"s{i}": "0"}, WAIT_S)) for i in range(5)]
        await until_waiting(reads, 5)
        await reads.close()
        for task in waiting:
            with pytest.raises(Closed):
                await task
        with pytest.raises(Closed):
            await reads.read({"a": "0"}, WAIT_S)

    run(test)


def test_a_thousand_wait_on_one_connection(run: Any, redis_client: Any) -> None:
    before = readers(redis_client)

    async def test(reads: SharedReads) -> None:
        waiting = [asyncio.create_task(reads.read({f"s{i}": "0"}, WAIT_S)) for i in range(1000)]
        await until_waiting(reads, 1000)
        assert len(readers(redis_client) - before) == 1
        pipe = redis_client.pipeline(transaction=False)
        for i in range(1000):
            pipe.xadd(f"s{i}", {"n": i})
        pipe.execute()
        replies = await asyncio.gather(*waiting)
        assert [seen(reply) for reply in replies] == [{f"s{i}": [str(i)]} for i in range(1000)]

    run(test)


def test_a_newcomer_misses_nothing_that_the_running_read_is_past(
    run: Any, redis_client: Any
) -> None:
    """One that is further behind than the read under way hears all of it from the next."""
    first = redis_client.xadd("a", {"n": 1}).decode()

    async def not_interrupted(_: int) -> bool:
        return False

    async def test(reads: SharedReads) -> None:
        reads._interrupt = not_interrupted
        ahead = asyncio.create_task(reads.read({"a": first}, WAIT_S))
        await until_waiting(reads, 1)
        behind = asyncio.create_task(reads.read({"a": "0"}, WAIT_S))
        await until_waiting(reads, 2)
        redis_client.xadd("a", {"n": 2})
        assert seen(await ahead) == {"a": ["2"]}
        assert seen(await behind) == {"a": ["1", "2"]}

    run(test)
