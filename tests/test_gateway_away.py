"""What a gateway answers when Redis fails it: before a push or behind, full, without a right."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from common.checks import InvalidRequest
from common.connect import writing
from common.errors import RedisAway
from common.job import OutputFile, Result
from common.keys import Keys
from common.settings import Settings
from services.gateway import movies
from services.gateway.access import Caller
from services.gateway.movies import Movies
from services.gateway.quota import Quota
from slackwater import Client
from tests.gateway_server import Http, error_of, serving_http
from tests.servers import RedisServer, serving


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with serving() as made:
        yield made


def test_a_job_that_was_pushed_is_not_to_be_pushed_again(server: RedisServer) -> None:
    """Redis goes away while requests wait for their jobs: each is told where its job is, and
    OpenAI's client, which heeds `x-should-retry`, pushes no second one."""
    paths = ("/v1/images/generations", "/v1/jobs", "/v1/videos")
    with (
        serving_http(Settings(redis_url=server.url)) as serves,
        Http(serves) as http,
        ThreadPoolExecutor() as threads,
        writing(server.url) as redis,
    ):
        body = {"prompt": "x"}
        waiting = [threads.submit(http.post, path, json=body) for path in paths]
        http.until_waiting(len(paths))
        entries: Any = redis.xrange(Keys().jobs)
        pushed = {fields[b"id"].decode() for _, fields in entries}
        server.kill()
        told = set()
        for each in waiting:
            answer = each.result()
            error = error_of(answer, 503)
            assert error["code"] == "unavailable"
            assert answer.headers["x-should-retry"] == "false"
            assert "retry-after" not in answer.headers
            job = answer.headers["location"].removeprefix("/v1/jobs/")
            assert f"job {job} was pushed and goes on" in error["message"]
            told.add(job)
        assert told == pushed
        late = http.post("/v1/jobs", json=body)
        assert error_of(late, 503)["code"] == "unavailable"
        assert "x-should-retry" not in late.headers, "that one was never pushed"
        server.start()


def test_what_is_only_noted_of_a_push_may_fail(server: RedisServer) -> None:
    """The list of videos cannot be written: the video is made all the same."""
    settings = Settings(redis_url=server.url)
    with (
        serving_http(settings) as serves,
        Http(serves) as http,
        writing(server.url) as redis,
    ):
        redis.set(Keys().videos, "something else")
        answer = http.post("/v1/videos", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["status"]) == (200, "queued")


def test_a_count_that_cannot_be_written_fails_no_push() -> None:
    class Away:
        keys = Keys()

        async def ask(self, _: Any) -> list[Any]:
            raise RedisAway("gone")

    quota, caller = Quota(Away(), 1.0), Caller("a", max_jobs=1)  # type: ignore[arg-type]
    ticket: Any = type("Ticket", (), {"id": "a", "entry": "1-1"})
    asyncio.run(quota.pushed(caller, ticket))
    asyncio.run(quota.release(caller, "a"))


def test_a_full_redis_is_a_full_queue_also_where_jobs_are_counted(server: RedisServer) -> None:
    settings = Settings(redis_url=server.url, http_max_jobs=5)
    with (
        serving_http(settings) as serves,
        Http(serves) as http,
        writing(server.url) as redis,
    ):
        redis.config_set("maxmemory", 1)
        answer = http.post("/v1/jobs", json={"prompt": "x"})
        assert error_of(answer, 429)["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1


def test_a_user_of_redis_without_a_right_is_told_which(server: RedisServer) -> None:
    """That Redis is away would send its operator to look for the wrong thing."""
    with writing(server.url) as redis:
        redis.execute_command("ACL", "SETUSER", "default", "-scan")
        with serving_http(Settings(redis_url=server.url)) as serves, Http(serves) as http:
            answer = http.get("/v1/jobs", params={"status": "all"})
            error = error_of(answer, 503)
            assert error["code"] == "no_permission"
            assert "scan" in error["message"]
            assert "slackwater acl" in error["message"]
            assert http.get("/v1/jobs").status_code == 200


def test_a_parameters_name_that_is_no_text_is_refused(server: RedisServer) -> None:
    """Half of a surrogate pair, which JSON can carry and nothing else."""
    with serving_http(Settings(redis_url=server.url)) as serves, Http(serves) as http:
        body = rb'{"prompt": "x", "\ud800": 1}'
        headers = {"Content-Type": "application/json"}
        error = error_of(http.post("/v1/jobs", content=body, headers=headers), 400)
        assert (error["code"], error["param"]) == ("invalid_request", "?")
    with Client(server.url) as client, pytest.raises(InvalidRequest, match="cannot be sent"):
        client.submit("x", **{"\ud800": 1})


# -- movies --------------------------------------------------------------------------------


class Nothing:
    """A Redis with nothing in it."""

    keys = Keys()

    async def ask(self, _: Any) -> list[Any]:
        return [None]


def of(job: str, content: str) -> Result:
    file = OutputFile(f"sw:output:{job}:0", "image/png", 1, 1, 1, content)
    return Result(job, "succeeded", outputs=(file,))


def test_a_video_of_the_same_id_is_another_video(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its predecessor was deleted, and its MP4 must not come again."""
    monkeypatch.setattr(movies, "_made", lambda animated, params: b"mp4 of " + animated)

    async def shown() -> list[bytes | None]:
        made = Movies(Nothing())  # type: ignore[arg-type]
        return [
            await made.of(of("a", "1"), 0, b"the first"),
            await made.of(of("a", "2"), 0, b"the second"),
        ]

    assert asyncio.run(shown()) == [b"mp4 of the first", b"mp4 of the second"]


def test_one_that_was_made_does_not_wait_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movies, "_made", lambda animated, params: animated)

    async def shown() -> bytes | None:
        made = Movies(Nothing())  # type: ignore[arg-type]
        await made.of(of("a", "1"), 0, b"a")
        async with made._turn:  # another one is being made
            return await asyncio.wait_for(made.of(of("a", "1"), 0, b"a"), 20)

    assert asyncio.run(shown()) == b"a"
