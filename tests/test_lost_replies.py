"""A pool behind a proxy that loses replies, cuts and silences; a Redis that is killed, or emptied.

Each worker keeps a journal outside the system, so that work done twice would show.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.chaos_parts import checks, journal
from benchmarks.chaos_parts.journal import TaskRun
from benchmarks.chaos_parts.members import COORDINATOR, Member, Members, preload
from common.client import Client, JobHandle
from common.errors import JobLost
from common.noop import expected
from common.scripts import SHA, Scripts
from common.stage import DECODE, DENOISE, ENCODE, STAGES
from tests.processes import until

preload(noop=True)
STEPS = 40
NAME_OF = {sha: name for name, sha in SHA.items()}
# What one job, one that is canceled and one that is refused need, from the first hello to the bye.
NEEDED = {
    COORDINATOR: {"lead", "submit", "dispatch", "ack", "finish", "refresh", "cancel", "refuse"},
    ENCODE: {"register", "start", "report", "leave"},
    DENOISE: {"register", "start", "progress", "report", "leave"},
    DECODE: {"register", "start", "upload", "report", "leave"},
}


@pytest.fixture
def pool() -> Iterator[Members]:
    """One of each, not started: Redis with an append-only file, each member behind its own link."""
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="slackwater-test-", dir=shm) as folder:
        settings = {
            "noop": "encode_ms=5,step_ms=10,decode_ms=5,state_kb=64", "chunk_ms": 100,
            "arena_bytes": 4 << 20,
        }  # fmt: skip
        members = Members(Path(folder), settings, 1, [(stage, 1) for stage in STAGES])
        try:
            yield members
        finally:
            members.close()
    assert members.left() == []


@pytest.fixture
def client(pool: Members) -> Iterator[Client]:
    url = f"redis://127.0.0.1:{pool.client_link.port}/0"
    with Client(url, prefix=pool.keys.prefix) as made:
        yield made


def runs_of(pool: Members, job: str) -> list[TaskRun]:
    return [run for run in journal.read(pool.folder / "journal") if run.job == job]


def check_once(pool: Members, client: Client, job: str) -> None:
    """It succeeded, its file is right, and each of its steps was done once."""
    result = client.wait(job, timeout=60)
    assert result.status == "succeeded", result.error
    assert json.loads(client.output(job))["chain"] == expected(job, 7, STEPS)
    runs = runs_of(pool, job)
    assert Counter(run.stage for run in runs if run.stage != DENOISE) == {ENCODE: 1, DECODE: 1}
    steps = Counter(step for run in runs for step in run.steps)
    assert steps == dict.fromkeys(range(1, STEPS + 1), 1)
    assert journal.repeats(runs) == []


def check_left(pool: Members) -> None:
    until(lambda: not checks.undrained(pool), "empty streams")
    until(lambda: checks.arena_claims(pool) == 0, "an empty arena")
    assert pool.stop() == []
    assert checks.immortal(pool) == []


def log_of(pool: Members, member: Member) -> str:
    path = pool.folder / "logs" / f"{member.name}.log"
    return path.read_text() if path.exists() else ""


def says(pool: Members, member: Member, what: str) -> bool:
    return what in log_of(pool, member)


def begins_more(pool: Members, than: int) -> bool:
    return len(journal.read(pool.folder / "journal")) > than


def push(client: Client, job: str) -> JobHandle:
    return client.submit(job, id=job, seed=7, num_inference_steps=STEPS, slo_ms=600_000)


def test_the_first_reply_of_every_script_is_lost_and_each_chunk_runs_once(
    pool: Members, client: Client
) -> None:
    """To each member, for each script that it runs: the script did run, and its connection ends."""
    pool.start_redis()
    pool.await_redis()
    Scripts(pool.checker).load()  # else the first reply would be that there is no such script
    for member in pool.all:
        member.link.loses_first = True
        pool.start(member)
    until(lambda: pool.checker.scard(pool.keys.workers) == len(STAGES), "all workers")
    pool.client_link.replies_to_lose = 1  # of the push
    push(client, "a")
    canceled = client.submit("b", num_inference_steps=1000)
    canceled.cancel()
    assert client.submit("c", width=33).wait(60).error_code == "invalid_request"
    assert canceled.wait(60).status == "canceled"
    check_once(pool, client, "a")
    assert client.status("a").attempts == 0
    check_left(pool)
    for member in pool.all:
        lost = {NAME_OF[sha] for sha in member.link.lost}
        assert lost >= NEEDED[member.role], member.name


def test_redis_is_killed_under_load_and_each_chunk_runs_once(pool: Members, client: Client) -> None:
    """What was on its way is sent again, and whoever was there is not taken for dead."""
    pool.start_all()
    jobs = [f"j{i}" for i in range(4)]
    for job in jobs:
        push(client, job)
    until(lambda: any(run.steps for run in runs_of(pool, "j0")), "a step")
    for _ in range(2):
        begun = len(journal.read(pool.folder / "journal"))
        pool.kill_redis()
        pool.start_redis()
        until(partial(begins_more, pool, begun + 1), "the next task")
    for job in jobs:
        check_once(pool, client, job)
        assert client.status(job).attempts == 0
    check_left(pool)


def test_services_that_are_started_before_redis_wait_for_it(pool: Members, client: Client) -> None:
    """None of them ends over it, and each says once what it waits for."""
    for member in pool.all:
        pool.start(member)
    for member in pool.all:
        until(partial(says, pool, member, "waiting for it"), f"{member.name}'s word")
    pool.start_redis()
    push(client, "a")
    check_once(pool, client, "a")
    assert all(log_of(pool, member).count("Redis is away") == 1 for member in pool.all)
    check_left(pool)


@pytest.mark.parametrize("how", ["cut", "silent"])
def test_a_worker_that_reaches_no_redis_ends_its_chunk_and_waits_quietly(
    pool: Members, client: Client, how: str
) -> None:
    """It holds its report, tries again with growing pauses, and says so once; then nothing is done
    again. The leader lost its way to Redis at the same moment."""
    pool.settings["worker_lease_s"] = 60.0  # it is not the lease that is in question here
    pool.start_all()
    push(client, "a")
    [denoiser] = pool.of(DENOISE)
    [leader] = pool.of(COORDINATOR)
    until(lambda: any(run.steps for run in runs_of(pool, "a")), "a step")
    tries = {member.name: member.link.tries for member in (denoiser, leader)}
    for member in (denoiser, leader):
        if how == "cut":
            member.link.cut()
        else:
            member.link.is_silent = True
    if how == "cut":
        # Four or so of each of its threads: a pause of 0.05 s that doubles.
        until(lambda: denoiser.link.tries >= tries[denoiser.name] + 12, "its tries")
        until(lambda: not pool.is_busy(denoiser), "the end of its chunk")
        assert log_of(pool, denoiser).count("Redis is away") <= 3
    else:
        until(lambda: not pool.is_busy(denoiser), "the end of its chunk")
        until(lambda: "Redis is away" in log_of(pool, leader), "the leader's word", 30)
    done = len(runs_of(pool, "a"))
    for member in (denoiser, leader):
        member.link.mend()
    check_once(pool, client, "a")
    assert len(runs_of(pool, "a")) > done
    said = log_of(pool, denoiser)
    away, back = said.count("Redis is away"), said.count("Redis is back")
    assert away == back <= 3  # its inbox, its pulse, and the one that reports
    assert log_of(pool, leader).count("Redis is away") == 1
    # A hot loop would have made thousands.
    assert denoiser.link.tries - tries[denoiser.name] < 60
    assert leader.link.tries - tries[leader.name] < 30
    check_left(pool)


def test_an_emptied_redis_ends_the_jobs_it_held_and_serves_the_next(
    pool: Members, client: Client
) -> None:
    """FLUSHALL in the middle of a job: whoever waits for it is told that it is lost; workers
    register anew, the leader begins anew, and what a lost job had in the arena is swept."""
    pool.start_all()
    handle = push(client, "lost")
    until(lambda: any(run.steps for run in runs_of(pool, "lost")), "a step")
    waiting = client.job("lost").events()
    next(waiting)
    pool.checker.flushall()
    with pytest.raises(JobLost, match="push it again"):
        handle.wait(timeout=30)
    with pytest.raises(JobLost):
        list(waiting)
    until(lambda: pool.checker.scard(pool.keys.workers) == len(STAGES), "all workers")
    push(client, "next")
    check_once(pool, client, "next")
    until(lambda: not any(pool.is_busy(m) for m in pool.of(*STAGES)), "idle workers")
    checks.sweep_arena(pool)
    push(client, "lost")  # its id is free again
    assert client.wait("lost", timeout=60).status == "succeeded"
    check_left(pool)
