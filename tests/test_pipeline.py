"""A pool of real processes on no-op stages: what its users count on when something dies."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from common.arena import Arena
from common.connect import writing
from common.keys import Keys
from tests.processes import Processes, processes, until
from tests.servers import serving

# Short, so that a death is noticed soon; long enough for a busy machine's heartbeats.
SHORT = {"worker_lease_s": 1.0, "leader_lease_s": 1.0}


@pytest.fixture
def pool(redis_server: str, redis_client: Any, keys: Keys, arena_path: str) -> Iterator[Processes]:
    with processes(redis_server, redis_client, keys, arena_path) as made:
        yield made


@pytest.fixture
def mortal(
    redis_server: str, redis_client: Any, keys: Keys, arena_path: str
) -> Iterator[Processes]:
    """A pool that notices deaths within about a second."""
    with processes(redis_server, redis_client, keys, arena_path, **SHORT) as made:
        yield made


def assert_arena_is_empty(pool: Processes) -> None:
    with Arena.open(pool.settings["arena_path"]) as arena:
        until(lambda: arena.stats().claims == 0, "an empty arena")
        assert arena.stats().allocations > 0, "nothing was ever in it"


def test_jobs_go_through_and_leave_nothing(pool: Processes) -> None:
    """Ten jobs of different lengths on two denoisers; afterwards streams and arena are empty."""
    pool.pool(denoisers=2)
    for i in range(10):
        pool.push(f"j{i}", steps=1 + i)
    for i in range(10):
        pool.check(f"j{i}", steps=1 + i)
    pool.drained()
    assert_arena_is_empty(pool)


def test_jobs_pushed_before_anybody_is_there_are_served(pool: Processes) -> None:
    """Not even a coordinator, let alone a manifest to validate them by."""
    pool.push("early")
    pool.client.xadd(pool.keys.jobs, {"prompt": "x", "width": "33", "id": "bad"})
    pool.pool()
    pool.check("early")
    assert pool.result("bad").field == "width"
    pool.drained()


def test_a_worker_killed_in_a_chunk_costs_one_chunk(mortal: Processes) -> None:
    """kill -9 of a denoiser: the other goes on from the last chunk, the file is right."""
    _, denoisers = mortal.pool(denoisers=2)
    mortal.push("a", steps=60)
    mortal.wait_for_event("a", "step")
    worker = until(lambda: mortal.record("a").get("worker", ""), "a worker")
    victim = next(p for p in denoisers if f"-{p.pid}-" in worker)
    mortal.kill(victim)
    mortal.check("a", steps=60)
    assert mortal.record("a")["attempts"] in ("0", "1")  # it may have died between two chunks
    mortal.drained()


def test_every_kind_of_worker_may_die_and_be_replaced(mortal: Processes) -> None:
    """All workers are killed while jobs run; new ones bring every job to its end."""
    mortal.settings["noop"] = "encode_ms=30,step_ms=20,decode_ms=30,state_kb=64"
    mortal.coordinator()
    first = [mortal.worker(kind) for kind in ("encode", "denoise", "decode")]
    mortal.wait_for_workers(3)
    for i in range(4):
        mortal.push(f"j{i}", steps=10)
    mortal.wait_for_event("j0", "step")
    for worker in first:
        mortal.kill(worker)
    for kind in ("encode", "denoise", "decode"):
        mortal.worker(kind)
    for i in range(4):
        mortal.check(f"j{i}", steps=10)
    mortal.drained()


def test_sigterm_drains_without_loss_or_blame(pool: Processes) -> None:
    """The chunk ends at its next step, what is queued goes back, no attempt is counted."""
    _, (first,) = pool.pool(denoisers=1)
    for i in range(3):
        pool.push(f"j{i}", steps=40)
    pool.wait_for_event("j0", "step")
    second = pool.worker("denoise")
    pool.wait_for_workers(4)
    pool.stop(first)
    for i in range(3):
        pool.check(f"j{i}", steps=40)
        assert pool.record(f"j{i}")["attempts"] == "0"
    pool.drained()
    pool.stop(second)
    assert_arena_is_empty(pool)


def test_a_coordinator_killed_in_mid_job_is_replaced(mortal: Processes) -> None:
    """Another one standing by takes over, waits for what runs, and nothing runs twice."""
    mortal.settings.update(worker_lease_s=10.0)  # they are well
    first, _ = mortal.pool()
    mortal.coordinator()
    mortal.push("a", steps=60)
    mortal.wait_for_event("a", "step")
    mortal.kill(first)
    mortal.push("b")
    mortal.check("a", steps=60)
    mortal.check("b")
    assert mortal.record("a")["attempts"] == "0"
    mortal.drained()


def test_a_frozen_coordinator_wakes_up_and_stands_by(mortal: Processes) -> None:
    """SIGSTOP for longer than its lease: another leads; thawed, the first does no harm, and leads
    again, under another nonce, once that one has gone."""
    first, _ = mortal.pool()
    leader = mortal.client.get(mortal.keys.leader)
    mortal.push("a", steps=60)
    mortal.wait_for_event("a", "step")
    mortal.signal(first, signal.SIGSTOP)
    second = mortal.coordinator()

    def led_by(*others: bytes) -> bytes | None:
        now: Any = mortal.client.get(mortal.keys.leader)
        return None if now in others else now

    other = until(lambda: led_by(leader), "another leader")
    mortal.signal(first, signal.SIGCONT)
    mortal.push("b")
    mortal.check("a", steps=60)
    mortal.check("b")
    mortal.kill(second)
    until(lambda: led_by(leader, other), "the first to lead again")
    mortal.push("c")
    mortal.check("c")
    mortal.drained()


def test_a_cancel_stops_a_running_job_within_a_step(pool: Processes) -> None:
    """And gives its memory back."""
    pool.settings.update(noop="step_ms=50,state_kb=64", chunk_ms=10**6)
    pool.pool()
    pool.push("a", steps=1000)
    pool.wait_for_event("a", "step")
    pool.client.xadd(pool.keys.cancel, {"id": "a"})
    begun = time.monotonic()
    assert pool.result("a").status == "canceled"
    pool.push("next")
    pool.check("next")  # the rank is free
    assert time.monotonic() - begun < 40.0  # the chunk would have gone on for 50 s
    pool.drained()
    assert_arena_is_empty(pool)


def test_an_urgent_job_interrupts_a_long_chunk(pool: Processes) -> None:
    """It is done long before the chunk would have ended, and the long job loses nothing."""
    pool.settings.update(noop="step_ms=20,state_kb=64", chunk_ms=10**6)
    pool.pool()
    pool.push("long", steps=250, slo_ms=10**7)
    pool.wait_for_event("long", "step")
    pool.push("urgent", steps=5, slo_ms=3000)
    pool.check("urgent")
    assert pool.record("long")["is_terminal"] == "0"
    pool.check("long", steps=250)
    pool.drained()


def test_a_frozen_worker_loses_its_task_and_its_report_is_refused(mortal: Processes) -> None:
    """SIGSTOP for longer than its lease: another runs the chunk again; thawed, it works on."""
    _, denoisers = mortal.pool(denoisers=1)
    mortal.push("a", steps=60)
    mortal.wait_for_event("a", "step")
    mortal.signal(denoisers[0], signal.SIGSTOP)
    mortal.wait_for_event("a", "worker_lost")
    mortal.worker("denoise")
    mortal.check("a", steps=60)
    mortal.signal(denoisers[0], signal.SIGCONT)
    mortal.wait_for_workers(4)
    mortal.push("b")
    mortal.check("b")
    mortal.drained()
    assert_arena_is_empty(mortal)


def test_a_prompt_too_long_for_a_message_arrives_whole(pool: Processes) -> None:
    """Over 8 kB it is left out of the task and read from the trajectory."""
    pool.pool()
    prompt = "a very long prompt " * 520
    pool.push("long", prompt=prompt)
    pool.check("long", prompt=prompt)
    assert pool.record("long")["progress"] == "1.000"
    pool.drained()


def test_states_that_do_not_fit_the_arena_spill(
    redis_server: str, redis_client: Any, keys: Keys, arena_path: str
) -> None:
    """A full arena costs time, never a job; what was spilled is freed too."""
    with (
        processes(redis_server, redis_client, keys, arena_path, arena_bytes=1 << 20) as pool,
        Arena.open(arena_path, 1 << 20) as arena,
    ):
        hog = arena.alloc(arena.stats().largest_free_bytes, "hog")
        assert hog
        pool.pool()
        pool.push("a", steps=12)
        pool.wait_for_event("a", "chunk")
        assert list(redis_client.scan_iter(f"{keys.prefix}latents:a:*"))
        pool.check("a", steps=12)
        pool.drained()
        stats = arena.stats()
        assert stats.allocations == 1  # the hog's
        assert stats.refused >= 3
        until(lambda: not list(redis_client.scan_iter(f"{keys.prefix}latents:*")), "no spill")
        arena.free(hog)


def test_redis_may_be_killed_and_come_back(keys: Keys, arena_path: str) -> None:
    """With an append-only file: everybody waits, reconnects, and the jobs go on."""
    with serving(persist=True) as server:
        client = writing(server.url)
        with processes(server.url, client, keys, arena_path, **SHORT) as pool:
            pool.pool()
            for i in range(3):
                pool.push(f"j{i}", steps=30)
            pool.wait_for_event("j0", "step")
            server.kill()
            time.sleep(0.3)  # nothing can be awaited of a dead Redis
            server.start()
            for i in range(3):
                pool.check(f"j{i}", steps=30)
            pool.drained()
        client.close()


def test_states_in_redis_outlast_an_outage(keys: Keys, arena_path: str) -> None:
    """A chunk that ends while Redis is away is not lost, and nobody is blamed for it."""
    with serving(persist=True) as server:
        client = writing(server.url)
        with processes(server.url, client, keys, arena_path, states="redis") as pool:
            pool.pool()
            pool.push("a", steps=60)
            pool.wait_for_event("a", "step")
            server.kill()
            time.sleep(0.3)  # nothing can be awaited of a dead Redis; the chunk ends meanwhile
            server.start()
            pool.check("a", steps=60)
            assert pool.record("a")["attempts"] == "0"
            pool.drained()
            until(lambda: not list(client.scan_iter(f"{keys.prefix}latents:*")), "no state")
        client.close()


def test_a_pool_learns_what_its_tasks_cost(pool: Processes, keys: Keys) -> None:
    """Seconds per step end in `costs` when the coordinator is stopped, for the next one; what
    could not be read there neither stops it nor stays."""
    pool.client.hset(keys.costs, mapping={"noop/denoise/9x1x1": "much", "odd": "1"})
    coordinator, _ = pool.pool()
    pool.push("a", steps=10)
    pool.check("a", steps=10)
    pool.drained()
    pool.stop(coordinator)
    learned: Any = pool.client.hgetall(keys.costs)
    denoise = [float(v) for k, v in learned.items() if b"/denoise/" in k]
    assert denoise == [pytest.approx(0.02, rel=0.5)]
    assert b"odd" not in learned
    assert not pool.client.exists(keys.leader)
