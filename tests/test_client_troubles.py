"""The clients and a Redis that is slow, full, refuses, or stops being the master; and a crowd."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import NoPermissionError

from common import asks, client
from common.asks import Ask
from common.connect import writing
from common.job import JobStatus, OutputFile, Result
from slackwater import (
    AsyncClient,
    Client,
    JobRefused,
    RedisAway,
    RedisRefused,
    SlackwaterError,
)
from tests.processes import until
from tests.servers import RedisServer, serving

CROWD = 150
WAIT_S = 30.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with serving() as running:
        yield running


@pytest.fixture
def raw(server: RedisServer) -> Iterator[Any]:
    opened = writing(server.url)
    yield opened
    opened.close()


Do = Callable[[str, float, Callable[[Any], Any]], Any]


def blockingly(url: str, patience: float, do: Callable[[Any], Any]) -> Any:
    with Client(url, patience=patience) as opened:
        return do(opened)


def by_asyncio(url: str, patience: float, do: Callable[[Any], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with AsyncClient(url, patience=patience) as opened:
            return await do(opened)

    return asyncio.run(main())


both = pytest.mark.parametrize("do", [blockingly, by_asyncio])


def end(raw: Any, job: Any, outputs: tuple[OutputFile, ...] = ()) -> None:
    """As the coordinator ends a job."""
    result = Result(id=job.id, status=JobStatus.SUCCEEDED, outputs=outputs)
    keys, fields = job.client.keys, {"status": "succeeded", "is_terminal": "1"}
    raw.set(keys.result(job.id), result.to_wire())
    raw.hset(keys.job(job.id), mapping={**fields, "id": job.id, "content": job.ticket.content})
    raw.xadd(keys.events(job.id), {"type": "succeeded", "at": "1"})


# -- a crowd, a slow connection ------------------------------------------------------------


def test_more_threads_than_a_hundred_wait_on_one_client(server: RedisServer, raw: Any) -> None:
    with Client(server.url, patience=1.0) as crowd, ThreadPoolExecutor(CROWD) as threads:
        jobs = crowd.submit_many({"prompt": str(i)} for i in range(CROWD))
        waits = [threads.submit(job.wait, WAIT_S) for job in jobs]
        try:
            until(lambda: raw.info("clients")["blocked_clients"] == CROWD, "all to wait at once")
        finally:
            for job in jobs:
                end(raw, job)
        assert [wait.result().id for wait in waits] == [job.id for job in jobs]


def test_more_tasks_than_a_hundred_wait_on_one_client(server: RedisServer, raw: Any) -> None:
    async def main(crowd: AsyncClient) -> list[str]:
        jobs = await crowd.submit_many({"prompt": str(i)} for i in range(CROWD))
        waits = [asyncio.create_task(job.wait(WAIT_S)) for job in jobs]

        def all_wait() -> bool:
            return bool(raw.info("clients")["blocked_clients"] == CROWD)

        await asyncio.to_thread(until, all_wait, "all to wait at once")
        for job in jobs:
            end(raw, job)
        assert [(await wait).id for wait in waits] == [job.id for job in jobs]
        return []

    by_asyncio(server.url, 1.0, main)


def test_a_large_file_may_take_longer_than_an_answer(
    server: RedisServer, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only silence is a sign of a connection that is dead."""
    monkeypatch.setattr(client, "ANSWER_S", 0.4)
    content = bytes(range(256)) * 4096
    pieces = 12

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", server.port)

        async def to_redis() -> None:
            while data := await reader.read(1 << 16):
                back.write(data)
            back.close()

        pushing = asyncio.create_task(to_redis())
        while data := await there.read(len(content) // pieces):
            writer.write(data)
            if len(data) > 10_000:
                await asyncio.sleep(0.05)
        writer.close()
        await pushing

    async def main() -> bytes:
        proxy = await asyncio.start_server(slowly, "127.0.0.1", 0)
        port = proxy.sockets[0].getsockname()[1]
        async with proxy, AsyncClient(f"redis://127.0.0.1:{port}/0", patience=1.0) as far:
            job = await far.submit("x")
            key = far.keys.output(job.id, 0)
            raw.set(key, content)
            end(raw, job, (OutputFile(key, "image/png", 1, 1, len(content), ""),))
            return await job.output()

    assert asyncio.run(main()) == content


# -- no writes for a while, or for good ----------------------------------------------------


@both
def test_writes_refused_for_a_while_are_waited_for(server: RedisServer, raw: Any, do: Do) -> None:
    raw.config_set("min-replicas-to-write", 1)
    with pytest.raises(RedisAway, match="takes no writes for now: NOREPLICAS"):
        do(server.url, 0.05, lambda c: c.cancel("early"))
    raw.config_resetstat()

    def refused() -> bool:
        return bool(raw.info("commandstats").get("cmdstat_xadd", {}).get("rejected_calls"))

    def let_through() -> None:
        until(refused, "a push")
        raw.config_set("min-replicas-to-write", 0)

    operator = threading.Thread(target=let_through)
    operator.start()
    job = do(server.url, WAIT_S, lambda c: c.submit("x", id="patient"))
    operator.join()
    assert [fields[b"id"] for _, fields in raw.xrange("sw:jobs")] == [b"patient"]
    assert job.ticket.entry == raw.xrange("sw:jobs")[0][0].decode()


@both
def test_a_node_that_is_no_master_any_more_is_not_asked_again(
    server: RedisServer, raw: Any, do: Do
) -> None:
    """What was connected to it connects anew: the address may lead to the next master by now."""
    who = Ask((("CLIENT", "ID"),))

    def demoted() -> None:
        raw.replicaof("127.0.0.1", 1)
        raw.config_resetstat()
        operator.start()

    def promote() -> None:
        until(lambda: "cmdstat_xadd" in raw.info("commandstats"), "a push that is refused")
        raw.replicaof("NO", "ONE")

    operator = threading.Thread(target=promote)

    def blocking(c: Client) -> tuple[Any, Any]:
        before = c.ask(who)
        demoted()
        c.submit("x")
        return before, c.ask(who)

    async def main(c: AsyncClient) -> tuple[Any, Any]:
        before = await c.ask(who)
        demoted()
        await c.submit("x")
        return before, await c.ask(who)

    before, after = do(server.url, WAIT_S, blocking if do is blockingly else main)
    operator.join()
    assert before != after


def test_a_wait_outlives_the_end_of_its_master(server: RedisServer, raw: Any) -> None:
    """Which ends blocked commands with an error of its own."""
    with Client(server.url) as waiting, ThreadPoolExecutor(1) as threads:
        job = waiting.submit("x")
        wait = threads.submit(job.wait, WAIT_S)
        until(lambda: raw.info("clients")["blocked_clients"] == 1, "it to wait")
        raw.replicaof("127.0.0.1", 1)
        raw.replicaof("NO", "ONE")
        end(raw, job)
        assert wait.result().id == job.id


@both
def test_of_many_jobs_a_full_redis_says_which_were_pushed(
    server: RedisServer, raw: Any, do: Do
) -> None:
    jobs = [{"prompt": str(i) + "x" * 5000, "id": f"j{i}"} for i in range(2000)]
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] + 4_000_000)
    with pytest.raises(JobRefused, match=r"maxmemory .*of 2000 were pushed") as caught:
        do(server.url, 1.0, lambda c: c.submit_many(jobs))
    accepted = [job.id for job in caught.value.accepted]
    assert accepted
    assert sorted([*accepted, *caught.value.ids]) == sorted(job["id"] for job in jobs)
    raw.config_set("maxmemory", 0)
    assert [fields[b"id"].decode() for _, fields in raw.xrange("sw:jobs")] == accepted
    entries = [entry.decode() for entry, _ in raw.xrange("sw:jobs")]
    assert [job.ticket.entry for job in caught.value.accepted] == entries


@both
def test_at_maxmemory_a_cancel_says_that_it_was_not_taken(
    server: RedisServer, raw: Any, do: Do
) -> None:
    raw.config_set("maxmemory", 1)
    with pytest.raises(RedisRefused, match="Redis is at maxmemory"):
        do(server.url, 1.0, lambda c: c.cancel("x"))


@both
def test_a_missing_right_is_an_error_of_the_client(server: RedisServer, raw: Any, do: Do) -> None:
    raw.execute_command("ACL", "SETUSER", "reader", "on", "nopass", "~*", "+@read", "+ping")
    url = server.url.replace("redis://", "redis://reader:x@")
    with pytest.raises(RedisRefused, match="permission") as caught:
        do(url, 1.0, lambda c: c.submit("x", id="mine"))
    assert isinstance(caught.value, SlackwaterError)
    assert isinstance(caught.value, NoPermissionError)
    assert caught.value.ids == ("mine",)


# -- who one is ----------------------------------------------------------------------------


@both
def test_a_wrong_password_is_said_and_not_waited_for(server: RedisServer, raw: Any, do: Do) -> None:
    raw.execute_command("ACL", "SETUSER", "u", "on", ">right", "~*", "+@all")
    url = server.url.replace("redis://", "redis://u:wrong@")
    with pytest.raises(RedisRefused, match="login of user 'u' was refused") as caught:
        do(url, 1e9, lambda c: c.status("x"))
    assert "wrong" not in str(caught.value)


def test_a_password_that_is_being_changed_is_read_again(
    server: RedisServer, raw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text("former")
    raw.execute_command("ACL", "SETUSER", "u", "on", ">new", "~*", "+@all")
    url = server.url.replace("redis://", "redis://u@") + f"?password_file={file}"
    monkeypatch.setattr(client.time, "sleep", lambda _: file.write_text("new"))
    with Client(url) as opened:
        assert opened.ps() == []


@both
def test_where_redis_went_away_the_ids_that_may_have_arrived_are_said(do: Do) -> None:
    with serving() as server:
        server.kill()
        with pytest.raises(RedisAway, match="the same id and content") as caught:
            do(server.url, 0.05, lambda c: c.submit("x"))
        [job] = caught.value.ids
        assert job in str(caught.value)


# -- a long backlog ------------------------------------------------------------------------


@both
def test_a_push_is_found_however_many_wait_before_somebody_reads_them(
    server: RedisServer, do: Do
) -> None:
    deep = asks.PUSHES + 100

    def blocking(c: Client) -> Any:
        c.submit("first", id="first")
        c.submit_many({"prompt": "x"} for _ in range(deep))
        return c.status("first")

    async def main(c: AsyncClient) -> Any:
        await c.submit("first", id="first")
        await c.submit_many({"prompt": "x"} for _ in range(deep))
        return await c.status("first")

    record = do(server.url, WAIT_S, blocking if do is blockingly else main)
    assert (record.id, record.status) == ("first", "queued")
