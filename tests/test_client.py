"""The clients against a pool of no-op stages: what a program that pushes jobs can rely on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from common.job import JobStatus, OutputFile, Result
from common.keys import Keys
from common.messages import pack, unpack
from common.noop import expected
from common.settings import Settings
from services.pool.local import LocalPool
from slackwater import (
    AsyncClient,
    Client,
    InvalidRequest,
    JobCanceled,
    JobFailed,
    JobHandle,
    JobRefused,
    RedisAway,
    ResultExpired,
    SlackwaterError,
    UnknownJob,
    WaitTimeout,
)
from tests.servers import serving

WAIT_S = 30.0
LONG = 1000  # steps of 5 ms: a job that is still running when a test looks


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with LocalPool(
        denoisers=2, settings=Settings(noop="encode_ms=1,step_ms=5,decode_ms=1")
    ) as running:
        yield running


@pytest.fixture
def client(pool: LocalPool) -> Iterator[Client]:
    with pool.client() as opened:
        yield opened


@pytest.fixture
def lonely(pool: LocalPool) -> Iterator[Client]:
    """A client under a prefix that no coordinator reads."""
    with Client(pool.redis_url, prefix="lonely:") as opened:
        yield opened
        for key in raw(opened).scan_iter("lonely:*"):
            raw(opened).delete(key)


def raw(client: Client) -> redis.Redis:
    return redis.Redis.from_url(client.url)


def eventually(true: Callable[[], Any], within_s: float = WAIT_S) -> Any:
    until = time.monotonic() + within_s
    while not (value := true()):
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.01)
    return value


def until_running(job: JobHandle) -> None:
    for event in job.events(WAIT_S):
        if event.type == "step":
            return


# -- pushing and waiting -------------------------------------------------------------------


def test_a_job_comes_back_with_its_file_and_effective_parameters(
    client: Client, tmp_path: Path
) -> None:
    job = client.submit("a red circle", num_inference_steps=3, seed=5)
    result = job.wait(WAIT_S)
    assert result.status == JobStatus.SUCCEEDED
    assert result.raise_for_status() is result
    assert (result.params["width"], result.params["num_inference_steps"]) == (128, 3)
    assert json.loads(job.output())["chain"] == expected("a red circle", 5, 3)
    [path] = job.save(tmp_path / "made" / "here")
    assert path.name == f"{job.id}.json"
    assert path.read_bytes() == job.output()
    assert client.result(job.id) == result
    with pytest.raises(IndexError, match="has 1 outputs"):
        job.output(1)


def test_many_jobs_are_pushed_in_order_with_a_handle_each(client: Client) -> None:
    jobs = client.submit_many(
        {"prompt": f"p{i}", "num_inference_steps": 1 + i % 3, "seed": i} for i in range(60)
    )
    for i, job in enumerate(jobs):
        assert job.wait(WAIT_S).status == "succeeded"
        assert json.loads(job.output())["chain"] == expected(f"p{i}", i, 1 + i % 3)


def test_values_as_text_become_what_the_model_wants(client: Client) -> None:
    job = client.submit_text({"prompt": "words", "width": "64", "seed": "3", "exact": "no"})
    params = job.wait(WAIT_S).raise_for_status().params
    assert (params["width"], params["seed"], params["exact"]) == (64, 3, False)


def test_a_refused_push_names_the_field_and_the_remedy(client: Client) -> None:
    job = client.submit("x", width=33)
    result = job.wait(WAIT_S)
    assert (result.status, result.error_code, result.field) == (
        "failed",
        "invalid_request",
        "width",
    )
    with pytest.raises(JobRefused, match="33 is not a multiple of 16; 32 and 48 are") as caught:
        result.raise_for_status()
    assert caught.value.field == "width"
    with pytest.raises(JobRefused):
        job.save()
    assert [event.type for event in job.events(WAIT_S)] == ["failed"]
    assert job.status().is_terminal


def test_what_cannot_be_sent_is_refused_before_it_is_pushed(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="sigmas: cannot be sent"):
        client.submit("x", sigmas=object())
    with pytest.raises(InvalidRequest, match="id: 'no spaces'"):
        client.submit("x", id="no spaces")
    with pytest.raises(InvalidRequest, match="payload: is 3"):
        client.submit("x" * 300_000)
    with pytest.raises(SlackwaterError, match="id: '' must be"):  # a variable that is not set
        client.submit_text({"prompt": "x"}, id="")
    with pytest.raises(InvalidRequest, match="id: '' must be"):
        client.submit_many([{"prompt": "x", "id": ""}])


def test_the_same_id_with_the_same_content_is_the_same_job(client: Client) -> None:
    first = client.submit("twice", id="twice-1", num_inference_steps=20)
    second = client.submit("twice", num_inference_steps=20, id="twice-1")
    assert first.wait(WAIT_S) == second.wait(WAIT_S)
    assert second.output() == first.output()


@pytest.mark.parametrize("ended", [False, True])
def test_a_taken_id_is_a_conflict_and_never_shows_the_other_jobs_picture(
    client: Client, ended: bool
) -> None:
    steps = 1 if ended else LONG
    first = client.submit("mine", id=f"taken-{ended}", num_inference_steps=steps)
    first.wait(WAIT_S) if ended else until_running(first)
    second = client.submit("other", id=first.id)
    result = second.wait(WAIT_S)
    assert (result.error_code, result.field, result.outputs) == ("conflict", "id", ())
    assert second.status().error_code == "conflict"
    assert [event.type for event in second.events(WAIT_S)] == ["failed"]
    with pytest.raises(JobRefused, match="use another id"):
        second.output()
    assert second.cancel() is False
    if not ended:
        assert not first.status().is_terminal
        first.cancel()
        assert first.wait(WAIT_S).status == "canceled"


def test_a_wait_ends_when_its_time_is_over_and_the_job_goes_on(client: Client) -> None:
    job = client.submit("long", num_inference_steps=LONG)
    before = time.monotonic()
    with pytest.raises(WaitTimeout, match="goes on"):
        job.wait(0.3)
    with pytest.raises(TimeoutError):
        list(job.events(0.1))
    assert time.monotonic() - before < 10.0
    assert not job.status().is_terminal
    assert job.result() is None
    with pytest.raises(WaitTimeout):
        job.output()
    job.cancel()
    job.wait(WAIT_S)


def test_cancel_stops_a_running_job(client: Client) -> None:
    job = client.submit("long", num_inference_steps=LONG)
    until_running(job)
    assert job.cancel() is True
    result = job.wait(WAIT_S)
    with pytest.raises(JobCanceled):
        result.raise_for_status()
    assert job.status().step < LONG
    assert job.cancel() is False


# -- following -----------------------------------------------------------------------------


def test_events_tell_a_jobs_story_live_and_once_more_afterwards(client: Client) -> None:
    job = client.submit("story", num_inference_steps=40)
    live = list(job.events(WAIT_S))
    types = [event.type for event in live]
    assert types[0] == "queued"
    assert types[-1] == "succeeded"
    assert [e.is_terminal for e in live] == [False] * (len(live) - 1) + [True]
    assert [e.stage for e in live if e.type == "running"] == ["encode", "denoise", "decode"]
    steps = [e.step for e in live if e.type == "step"]
    assert steps == sorted(steps, key=lambda step: step or 0)
    assert all(e.steps == 40 for e in live if e.type == "step")
    assert list(client.events(job.id, WAIT_S)) == live


def test_events_of_a_job_whose_stream_has_expired_are_its_end(client: Client) -> None:
    job = client.submit("gone")
    job.wait(WAIT_S)
    raw(client).delete(client.keys.events(job.id))
    [event] = job.events(WAIT_S)
    assert (event.type, event.is_terminal) == ("succeeded", True)


def test_ps_lists_running_jobs_first_and_then_the_queue(client: Client) -> None:
    jobs = client.submit_many(
        {"prompt": f"q{i}", "num_inference_steps": LONG, "slo_ms": 3_600_000 + 1000 * i}
        for i in range(6)
    )

    def placed() -> list[Any]:
        records = client.ps()
        waiting = [r for r in records if r.queue_position is not None]
        return records if len(waiting) >= 2 else []

    records = eventually(placed)
    assert {r.id for r in records} == {job.id for job in jobs}
    ranks = [0 if r.status == "running" else 1 for r in records]
    assert ranks == sorted(ranks)
    positions = [r.queue_position for r in records if r.queue_position is not None]
    assert positions == sorted(positions)
    for job in jobs:
        job.cancel()
    assert {job.wait(WAIT_S).status for job in jobs} == {"canceled"}
    assert client.ps() == []
    assert {job.id for job in jobs} <= {record.id for record in client.ps(ended=True)}


def test_workers_and_models_are_shown(client: Client, pool: LocalPool) -> None:
    assert [w.stage for w in client.workers()] == ["encode", "denoise", "denoise", "decode"]
    pids = [pid for stage in ("encode", "denoise", "decode") for pid in pool.workers(stage)]
    assert sorted(w.pid for w in client.workers()) == sorted(pids)
    assert client.models()["noop"]["parameters"]["width"]["multiple_of"] == 16


# -- what is not there ---------------------------------------------------------------------


def test_unknown_differs_from_expired(client: Client) -> None:
    for ask in (client.status, client.result, client.wait, client.output):
        with pytest.raises(UnknownJob, match="'nobody'"):
            ask("nobody")
    with pytest.raises(UnknownJob):
        next(client.events("nobody"))
    job = client.submit("short-lived")
    job.wait(WAIT_S)
    raw(client).delete(client.keys.output(job.id, 0))
    with pytest.raises(ResultExpired, match="its output has expired"):
        job.output()
    raw(client).delete(client.keys.result(job.id))
    for ask in (job.result, job.wait, job.output):
        with pytest.raises(ResultExpired, match="succeeded, but its result has expired"):
            ask()
    assert job.status().status == "succeeded"


def test_a_push_that_nobody_reads_is_queued(lonely: Client) -> None:
    job = lonely.submit("anybody there?", id="lonely-1")
    for record in (job.status(), lonely.status("lonely-1"), *lonely.ps()):
        assert (record.id, record.status, record.stage) == ("lonely-1", "queued", "")
    with pytest.raises(WaitTimeout):
        lonely.wait("lonely-1", 0.1)
    with pytest.raises(WaitTimeout):
        next(job.events(0.1))


def test_a_push_that_was_lost_is_not_waited_for(lonely: Client) -> None:
    job = lonely.submit("lost")
    raw(lonely).delete(lonely.keys.jobs)
    with pytest.raises(UnknownJob):
        job.wait(WAIT_S)


def test_an_end_that_this_version_does_not_know_is_an_end(lonely: Client) -> None:
    """`is_terminal` in the record decides, so no client waits for ever."""
    keys, there = Keys("lonely:"), raw(lonely)
    there.hset(keys.job("odd"), mapping={"id": "odd", "status": "archived", "is_terminal": "1"})
    there.xadd(keys.events("odd"), {"type": "archived", "at": "5000"})
    with pytest.raises(ResultExpired, match="archived"):
        lonely.wait("odd", WAIT_S)
    wire = Result(id="odd", status="archived", error="put away").to_wire()
    there.set(keys.result("odd"), wire)
    result = lonely.wait("odd", WAIT_S)
    with pytest.raises(JobFailed, match="put away"):
        result.raise_for_status()
    *_, last = lonely.events("odd", WAIT_S)
    assert (last.type, last.is_terminal) == ("archived", True)


def test_what_a_later_version_says_of_a_file_does_not_hide_the_rest(lonely: Client) -> None:
    keys, there = Keys("lonely:"), raw(lonely)
    there.hset(keys.job("film"), mapping={"status": "succeeded", "is_terminal": "1"})
    file = OutputFile(keys.output("film", 0), "video/mp4", 64, 48, 3, "")
    wire = unpack(Result(id="film", status="succeeded", outputs=(file,)).to_wire())
    wire["outputs"][0]["frames"] = 33
    there.set(keys.result("film"), pack(wire))
    assert lonely.wait("film", WAIT_S).outputs == (file,)


# -- a Redis with troubles -----------------------------------------------------------------


def test_a_full_redis_refuses_at_the_door() -> None:
    with serving() as server, Client(server.url) as client:
        raw(client).config_set("maxmemory", 1)
        with pytest.raises(JobRefused, match="maxmemory") as caught:
            client.submit("x")
        assert (caught.value.error_code, caught.value.retry_after_s) == ("queue_full", 10.0)


def test_a_frozen_redis_does_not_hold_a_wait_longer_than_its_time() -> None:
    with serving() as server, Client(server.url) as client:
        job = client.submit("x")
        assert server._process is not None
        os.kill(server._process.pid, signal.SIGSTOP)
        try:
            before = time.monotonic()
            with pytest.raises(WaitTimeout):
                job.wait(0.5)
            assert time.monotonic() - before < 4.0

            async def wait() -> None:
                async with AsyncClient(server.url) as other:
                    await other.wait(job.id, 0.5)

            with pytest.raises(WaitTimeout):
                asyncio.run(wait())
            assert time.monotonic() - before < 8.0
        finally:
            os.kill(server._process.pid, signal.SIGCONT)


def test_a_redis_that_comes_back_is_waited_for_and_one_that_does_not_is_named() -> None:
    with serving(persist=True) as server, Client(server.url, patience=10) as client:
        job = client.submit("x", id="patient")
        server.kill()
        with pytest.raises(RedisAway), Client(server.url, patience=0.1) as hasty:
            hasty.status("patient")
        server.start()
        assert job.status().status == "queued"


# -- asyncio -------------------------------------------------------------------------------


@pytest.fixture
def url(pool: LocalPool) -> str:
    return pool.redis_url


def test_asyncio_waits_for_many_jobs_at_once(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client:
            jobs = await client.submit_many({"prompt": f"a{i}", "seed": i} for i in range(40))
            results = await asyncio.gather(*(job.wait(WAIT_S) for job in jobs))
            assert {r.status for r in results} == {"succeeded"}
            assert [r.seed for r in results] == list(range(40))
            [path] = await jobs[3].save(tmp_path)
            assert path.read_bytes() == await client.output(jobs[3].id)

    asyncio.run(main())


def test_asyncio_events_cancel_and_conflict(url: str) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client:
            job = await client.submit("long", num_inference_steps=LONG)
            other = await client.submit("not the same", id=job.id)
            assert (await other.wait(WAIT_S)).error_code == "conflict"
            types = []
            events: AsyncIterator[Any] = job.events(WAIT_S)
            async for event in events:
                types.append(event.type)
                if event.type == "step" and types.count("step") == 1:
                    assert await job.cancel()
            assert (types[0], types[-1]) == ("queued", "canceled")
            assert [r.id for r in await client.ps()] == []
            assert len(await client.workers()) == 4

    asyncio.run(main())


def test_an_abandoned_asyncio_wait_leaves_the_client_usable(url: str) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client:
            job = await client.submit("long", num_inference_steps=LONG)
            for _ in range(20):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await job.wait()
            assert (await client.status(job.id)).id == job.id
            await job.cancel()
            assert (await job.wait(WAIT_S)).status == "canceled"

    asyncio.run(main())
