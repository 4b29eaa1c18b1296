"""Single accidents, each a story: what once went wrong, told step by step on a simulated pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common.arena import Arena
from common.job import Result
from common.keys import Keys
from common.stage import DENOISE
from tests.faults import Actor, Fate
from tests.simulated import Pool, SimulatedWorker, small_pool


@pytest.fixture
def pool(redis_client: Any, keys: Keys, arena: Arena) -> Iterator[Pool]:
    with small_pool(redis_client, keys, arena) as made:
        yield made


def push(pool: Pool, job: str, steps: int = 6) -> None:
    pool.client.xadd(pool.keys.jobs, {"id": job, "prompt": "x", "num_inference_steps": steps})


def status(pool: Pool, job: str) -> str:
    return str(Result.from_wire(pool.client.get(pool.keys.result(job))).status)


def run_until_denoising(pool: Pool) -> SimulatedWorker:
    """Everybody goes on until the denoiser stands at a step."""
    worker = next(w for w in pool.workers if w.who.stage == DENOISE)
    for _ in range(200):
        if worker.actor.at == "step":
            return worker
        pool.let_run(1)
    raise AssertionError(pool.report())


def stand_at(pool: Pool, actor: Actor, what: str) -> None:
    """One actor alone goes on until it stands at `what`."""
    for _ in range(50):
        if what in actor.at:
            return
        actor.step()
    raise AssertionError(f"{actor.name} never came to {what}: {pool.report()}")


def test_a_cancel_that_meets_an_unread_report_leaks_nothing(pool: Pool) -> None:
    """The report replaces the state that the coordinator knows just before it ends the job; the
    state that is freed is the one in the record."""
    push(pool, "a")
    worker = run_until_denoising(pool)
    pool.client.xadd(pool.keys.cancel, {"id": "a"})
    stand_at(pool, pool.coordinators[0], "EVALSHA")
    stand_at(pool, worker.actor, "EVALSHA")
    worker.actor.step()  # the report counts
    assert pool.client.hget(pool.keys.trajectory("a"), "step") != b"0"
    pool.settle()
    assert status(pool, "a") == "canceled"


def test_a_drained_worker_frees_what_it_was_told_and_had_not_read(pool: Pool) -> None:
    """Its goodbye brings back the unread free messages; nobody else would know."""
    push(pool, "a")
    worker = run_until_denoising(pool)
    pool.is_deaf = lambda: True
    pool.client.xadd(pool.keys.cancel, {"id": "a"})
    stand_at(pool, worker.actor, "EVALSHA")
    pool.let_run(20)
    for each in pool.workers:
        each.drain()
    pool.let_run(20)
    assert not pool.living_workers()
    assert status(pool, "a") == "canceled"
    pool.is_deaf = lambda: False
    pool.settle()


def test_a_leader_that_lost_a_reply_leads_on_under_another_nonce(pool: Pool) -> None:
    """So that what it sent before, and arrives late, is fenced; and the job is not run twice."""
    nonce = pool.client.get(pool.keys.leader)
    push(pool, "a")
    coordinator = pool.coordinators[0]
    stand_at(pool, coordinator, "EVALSHA")
    coordinator.step(Fate.LATE)
    pool.let_run(20)
    assert pool.client.get(pool.keys.leader) not in (None, nonce)
    pool.deliver_late()
    pool.settle()
    assert status(pool, "a") == "succeeded"


def test_a_worker_does_not_free_what_may_have_counted(pool: Pool) -> None:
    """Its report counted, the reply was lost, and before it could ask again the record expired."""
    push(pool, "a")
    worker = run_until_denoising(pool)
    stand_at(pool, worker.actor, "EVALSHA")
    seq = pool.client.hget(pool.keys.trajectory("a"), "seq")
    worker.actor.step(Fate.LOST_REPLY)
    pool.client.delete(pool.keys.task(int(seq)))
    stand_at(pool, worker.actor, "idle")
    pool.settle()
    assert status(pool, "a") == "succeeded"
    pool.store.sweep(lambda owner: True, min_age_s=0)


def test_a_report_that_cannot_be_read_costs_nothing(pool: Pool) -> None:
    """Of a worker of another version, say: what it reported stands in the trajectory."""
    push(pool, "a")
    worker = run_until_denoising(pool)
    pool.is_deaf = lambda: True
    stand_at(pool, worker.actor, "EVALSHA")
    worker.actor.step()
    [(entry, fields)] = pool.client.xrange(pool.keys.reports)
    pool.client.xdel(pool.keys.reports, entry)
    pool.client.xadd(pool.keys.reports, {**fields, b"body": b"\xc1"})
    pool.is_deaf = lambda: False
    pool.settle()
    assert status(pool, "a") == "succeeded"


def test_a_record_outlives_no_job_without_a_ttl(pool: Pool) -> None:
    """A job ends while its chunk runs, the coordinator forgets it, the worker dies: the record of
    that dispatch goes by itself."""
    push(pool, "a")
    worker = run_until_denoising(pool)
    seq = int(pool.client.hget(pool.keys.trajectory("a"), "seq"))
    pool.client.xadd(pool.keys.cancel, {"id": "a"})
    pool.coordinators[0].step()
    for _ in range(20):
        pool.coordinators[0].step()
    assert status(pool, "a") == "canceled"
    pool.coordinators[0].kill()
    worker.actor.kill()
    assert pool.client.ttl(pool.keys.task(seq)) > 0
    pool.settle()
    pool.store.sweep(lambda owner: True, min_age_s=0)


def test_a_dying_worker_and_its_unread_frees_do_not_stop_the_coordinator(pool: Pool) -> None:
    """What the dead one's stream held is bytes of all kinds."""
    push(pool, "a")
    run_until_denoising(pool)
    pool.is_deaf = lambda: True
    pool.client.xadd(pool.keys.cancel, {"id": "a"})
    pool.let_run(10)
    for worker in pool.workers:
        worker.actor.kill()
    pool.is_deaf = lambda: False
    pool.settle()
    push(pool, "b")
    pool.settle()
    assert status(pool, "b") == "succeeded"
    pool.store.sweep(lambda owner: True, min_age_s=0)


def test_a_leader_whose_lease_lapsed_reads_the_records_anew(pool: Pool) -> None:
    """Though nobody leads: somebody may have led, and gone, while it slept."""
    nonce = pool.client.get(pool.keys.leader)
    pool.expire_lead()
    pool.now += 4_000.0  # time to renew a lease of FOREVER_S
    pool.let_run(20)
    assert pool.client.get(pool.keys.leader) not in (None, nonce)
    push(pool, "a")
    pool.settle()
    assert status(pool, "a") == "succeeded"


def test_a_former_leader_takes_no_report_from_the_present_one(pool: Pool) -> None:
    """Both read the stream; only the one that leads may delete what it has read."""
    push(pool, "a")
    worker = run_until_denoising(pool)
    former = pool.coordinators[0]
    stand_at(pool, former, "XREAD")
    pool.expire_lead()
    stand_at(pool, pool.add_coordinator(), "XREAD")
    stand_at(pool, worker.actor, "EVALSHA")
    worker.actor.step()
    former.step()  # reads the report
    former.step()  # and acts on it
    assert pool.client.xlen(pool.keys.reports) == 1
    pool.settle()
    assert status(pool, "a") == "succeeded"
