"""A pool whose Redis is watched by Sentinels: the master dies, the pool goes on with the next."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections import Counter
from typing import Any

import pytest

from common.connect import async_pool, blocking, writing
from common.noop import expected
from common.settings import Settings
from services.coordinator.replicas import Replicas
from services.pool.local import LocalPool
from slackwater import AsyncClient
from tests.processes import until
from tests.sentinels import Watched, watched
from tests.servers import serving

WAIT_S = 90.0
# In an outage of some seconds, by all of a pool's connections, each with growing pauses; one that
# asked without a pause would ask as often in a second.
MOST_QUESTIONS = 1000


@pytest.fixture(scope="module")
def watch() -> Any:
    with watched() as made:
        yield made


def _port(client: Any) -> int:
    """Where the master is by the Sentinels."""
    _, port = client.connection_pool.get_master_address()
    return int(port)


def test_every_kind_of_client_finds_the_master(watch: Watched) -> None:
    for make in (blocking, writing):
        client: Any = make(watch.url)
        assert client.info("replication")["role"] == "master"
        assert _port(client) == watch.master.port
        client.close()

    async def ask() -> Any:
        pool: Any = async_pool(watch.url, 5.0, 2.0)
        connection = await pool.get_connection()
        await connection.send_command("ROLE")
        answer = await connection.read_response()
        await pool.release(connection)
        await pool.disconnect()
        return answer[0]

    assert asyncio.run(ask()) == b"master"


def test_a_name_that_no_sentinel_watches_is_an_outage_not_a_hang(watch: Watched) -> None:
    from redis.exceptions import ConnectionError as RedisConnectionError

    client = writing(watch.url.replace("themaster", "another"))
    with pytest.raises(RedisConnectionError, match="another"):
        client.ping()


def test_the_master_is_killed_and_no_job_is_lost_or_done_twice() -> None:
    """What the replica has is ended once, new jobs come through, and meanwhile nobody asks the
    Sentinels without a pause or fills the log."""
    settings = Settings(
        noop="step_ms=20", redis_wait_replicas=1, worker_lease_s=6.0, leader_lease_s=4.0
    )
    names = [f"job-{i}" for i in range(6)]
    with (
        watched() as watch,
        LocalPool(denoisers=2, settings=settings, redis_url=watch.url) as pool,
        pool.client() as client,
        contextlib.closing(writing(watch.url)) as observer,
    ):
        client.submit("before", id="before", num_inference_steps=3).wait(WAIT_S)
        jobs = [client.submit(n, id=n, seed=7, num_inference_steps=60) for n in names]
        next(event for event in jobs[0].events(WAIT_S) if event.type == "step")
        # What is not on the replica yet, a failover loses: the settings wait for it, so must we.
        assert observer.wait(1, 5000) == 1
        asked_before = watch.questions()
        watch.kill_master()
        assert [job.wait(WAIT_S).status for job in jobs] == ["succeeded"] * len(jobs)
        asked = watch.questions() - asked_before
        assert asked < MOST_QUESTIONS
        assert _port(observer) == watch.replica.port
        for name in names:
            found = json.loads(client.output(name))
            assert found == {"job": name, "chain": expected(name, 7, 60)}
            ends: Any = observer.xrange(pool.keys.events(name))
            assert [f[b"type"] for _, f in ends].count(b"succeeded") == 1
        assert client.submit("after", num_inference_steps=4).wait(WAIT_S).status == "succeeded"
        assert client.wait("before").status == "succeeded"
        assert asyncio.run(_succeeds(watch.url)) == "succeeded"
        for log in pool.log_dir.glob("*.log"):
            away = Counter(
                line.split(" ", 2)[2].split(" (")[0]
                for line in log.read_text().splitlines()
                if "Redis is away" in line
            )
            # One for each connection that noticed; a second one if the new master was not ready.
            assert all(count <= 2 for count in away.values()), (log.name, away)


async def _succeeds(url: str) -> str:
    async with AsyncClient(url) as client:
        job = await client.submit("async", num_inference_steps=2)
        return (await job.wait(WAIT_S)).status


# -- waiting for replicas --------------------------------------------------------------------


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_missing_replica_is_said_once_and_does_not_stop_the_pool(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is waited for again after a while only; one that follows again is said too."""
    caplog.set_level(logging.WARNING, "slackwater.coordinator")
    clock = _Clock()
    with serving("--repl-diskless-sync-delay", "0") as alone:
        client = writing(alone.url)
        replicas = Replicas(client, 1, clock)
        for _ in range(3):
            replicas.wait()
        assert [r.getMessage() for r in caplog.records] == [
            "0 of 1 replicas have the last transitions; a failover now could lose them"
        ]
        stats: Any = client.info("commandstats")
        assert stats["cmdstat_wait"]["calls"] == 1
        with serving("--replicaof", "127.0.0.1", str(alone.port)):
            until(
                lambda: client.info("replication")["connected_slaves"] == 1,  # type: ignore[index]
                "a replica",
            )
            until(lambda: client.wait(1, 100) == 1, "its answer")
            clock.now += 10.0
            replicas.wait()
        assert re.search("1 replicas keep up again", caplog.records[-1].getMessage())
        client.close()


def test_nobody_is_waited_for_by_default() -> None:
    class Untouchable:
        def execute_command(self, *args: Any) -> Any:
            raise AssertionError(args)

    Replicas(Untouchable()).wait()
