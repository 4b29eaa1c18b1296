"""The janitor: what deaths and accidents leave behind goes, and nothing that a job needs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.arena import Arena
from common.arena_file import MAGIC
from common.connect import writing
from common.handles import HandleStore, Parcel
from common.job import Result
from common.keys import Keys
from common.owners import owner_of
from common.settings import Settings
from services.cli.main import main
from services.cli.terminal import Exit
from services.janitor import Janitor, sweep
from services.janitor.orphans import KINDS
from tests.fakes import Table
from tests.processes import Processes, processes, until

STATE = Parcel({"x": ("uint8", (4,), b"abcd")}, b"")
DAY_MS = 86_400_000


@pytest.fixture
def table(redis_client: Any, keys: Keys) -> Iterator[Table]:
    made = Table(redis_client, keys)
    yield made
    for job in redis_client.smembers(keys.active):
        made.run(made.t.finish(job.decode(), "canceled", b"r", [], 1.0))


def swept(redis: Any, keys: Keys, **more: Any) -> dict[str, int]:
    return sweep(redis, Settings(prefix=keys.prefix), **more)


def contents(redis: Any) -> dict[bytes, bytes]:
    return {key: redis.dump(key) for key in redis.scan_iter()}


def end(table: Table, job: str) -> None:
    table.run(table.t.finish(job, "canceled", b"r", [], 1.0))


# -- one kind after the other --------------------------------------------------------------------


def test_files_and_states_of_ended_jobs_go_and_those_of_live_ones_stay(
    table: Table, redis_client: Any, keys: Keys
) -> None:
    store = HandleStore("here", redis=redis_client, prefix=keys.prefix)
    for job in ("dead:1", "live:1"):
        table.job(id=job)
        table.run(table.worker_t.upload(job, 7, 0, b"picture"))
        handle = store.put(job, 7, "latents", STATE, where="redis")
    end(table, "dead:1")
    assert swept(redis_client, keys) == {"staged": 1, "latents": 1}
    assert redis_client.exists(keys.staged("live:1", 7, 0))
    assert bytes(store.get(handle).tensors["x"][2]) == b"abcd"
    assert swept(redis_client, keys) == {}
    end(table, "live:1")
    assert swept(redis_client, keys) == {"staged": 1, "latents": 1}


def test_a_dry_run_says_the_same_and_changes_nothing(
    table: Table, redis_client: Any, keys: Keys
) -> None:
    table.job(id="dead")
    table.run(table.worker_t.upload("dead", 1, 0, b"picture"))
    end(table, "dead")
    redis_client.sadd(keys.active, "ghost")
    redis_client.set(keys.output("old", 0), b"x")
    before = contents(redis_client)
    said = swept(redis_client, keys, act=False)
    assert contents(redis_client) == before
    assert said == {"staged": 1, "names": 1, "ttls": 1}
    assert swept(redis_client, keys) == said


def test_a_job_whose_state_was_deleted_ends_and_its_clients_hear_of_it(
    table: Table, redis_client: Any, keys: Keys
) -> None:
    """Nobody could go on with it, and nobody would ever have said so."""
    lost, live = table.job(id="lost"), table.job(id="live")
    redis_client.delete(keys.trajectory("lost"))
    assert swept(redis_client, keys) == {"jobs": 1}
    record = table.record(lost)
    assert (record["status"], record["is_terminal"]) == ("failed", "1")
    result = Result.from_wire(redis_client.get(keys.result("lost")))
    assert result.error_code == "state_lost"
    assert "push it again" in result.error
    last = redis_client.xrevrange(keys.events("lost"), count=1)[0][1]
    assert last[b"type"] == b"failed"
    assert redis_client.smembers(keys.active) == {b"live"}
    assert table.record(live)["status"] == "queued"
    assert swept(redis_client, keys) == {}


def test_a_job_that_fell_out_of_the_active_set_is_put_back(
    table: Table, redis_client: Any, keys: Keys
) -> None:
    """A new leader would not have found it; nor does it lose anything before it is found."""
    table.job(id="a")
    table.run(table.worker_t.upload("a", 7, 0, b"picture"))
    redis_client.srem(keys.active, "a")
    assert swept(redis_client, keys) == {"unlisted": 1}
    assert redis_client.smembers(keys.active) == {b"a"}
    assert redis_client.ttl(keys.events("a")) == -1
    redis_client.delete(keys.staged("a", 7, 0))


def test_records_of_tasks_that_nobody_waits_for_go_soon(
    table: Table, redis_client: Any, keys: Keys
) -> None:
    """Its job has ended and its worker is dead: there is nobody to end the record, which was to
    last for a week. A task that runs keeps it."""
    orphan, live = table.job(id="a"), table.job(id="b")
    for worker in ("gone", "here"):
        table.register(worker)
    first, _ = table.dispatch([orphan], ["gone"])
    second, _ = table.dispatch([live], ["here"])
    end(table, "a")
    assert swept(redis_client, keys) == {}  # its worker may still report it
    redis_client.delete(keys.worker("gone"))
    assert swept(redis_client, keys) == {"tasks": 1}
    assert redis_client.pttl(keys.task(first)) <= 600_000
    assert redis_client.pttl(keys.task(second)) > DAY_MS
    for worker in ("gone", "here"):
        table.run(table.worker_t.leave(worker, tell=False))
    redis_client.delete(keys.worker("here"), keys.tasks("here"), keys.reports)
    redis_client.srem(keys.workers, "here")


def test_a_worker_that_is_long_dead_is_forgotten(
    table: Table, redis_client: Any, keys: Keys
) -> None:
    """Not one that has just died: the leader has to take its tasks away first, and count them."""
    spec = table.job(id="a")
    for worker in ("long", "just"):
        table.register(worker)
        redis_client.delete(keys.worker(worker))
    redis_client.xadd(keys.tasks("just"), {"kind": "yield", "seq": "1"})
    redis_client.expire(keys.tasks("just"), 60)
    assert swept(redis_client, keys) == {"workers": 1}
    assert redis_client.smembers(keys.workers) == {b"just"}
    assert table.record(spec)["status"] == "queued"
    redis_client.delete(keys.tasks("just"), keys.reports)
    assert swept(redis_client, keys) == {"workers": 1}


def test_keys_get_the_ttl_that_they_should_have(
    table: Table, redis_client: Any, keys: Keys
) -> None:
    """A restored backup, or a careless PERSIST. Keys of others are counted and left alone."""
    spec = table.job(id="a")
    end(table, "a")
    table.job(id="live")
    ours = [keys.job("a"), keys.events("a"), keys.result("a"), keys.worker("w"), keys.tasks("w")]
    redis_client.hset(keys.worker("w"), "stage", "encode")
    redis_client.xadd(keys.tasks("w"), {"kind": "drain"})
    for key in ours:
        redis_client.persist(key)
    redis_client.set(keys.prefix + "mine", "precious")
    redis_client.set("elsewhere", "not even looked at")
    redis_client.set(keys.prefix + "ünïcode", "x")
    assert swept(redis_client, keys) == {"ttls": 4, "unknown": 1}  # the stream's worker is there
    assert all(redis_client.ttl(key) > 0 for key in ours[:4])
    assert redis_client.ttl(keys.job("live")) == redis_client.ttl(keys.events("live")) == -1
    assert redis_client.get(keys.prefix + "mine") == b"precious"
    assert table.record(spec)["status"] == "canceled"
    redis_client.delete(keys.worker("w"))
    assert swept(redis_client, keys) == {"ttls": 1, "unknown": 1}
    redis_client.delete(keys.prefix + "mine", "elsewhere", keys.prefix + "ünïcode", keys.tasks("w"))


def test_two_janitors_at_once_find_everything_once(
    table: Table, redis_client: Any, keys: Keys
) -> None:
    """Page by page in turn; and a job may come between a look and a verdict."""
    for i in range(50):
        table.job(id=f"j{i}")
        table.run(table.worker_t.upload(f"j{i}", 1, 0, b"picture"))
        if i % 2:
            end(table, f"j{i}")
    first, second = (Janitor(redis_client, keys, table.t.ttls) for _ in range(2))
    sweeping = [first, second]
    while sweeping:
        sweeping = [janitor for janitor in sweeping if janitor.step()]
    assert first.counts + second.counts == {"staged": 25}
    assert len(list(redis_client.scan_iter(keys.staged("*", 1, 0)))) == 25


def test_what_was_swept_is_added_up_for_everyone_to_see(
    table: Table, redis_client: Any, keys: Keys
) -> None:
    for round_ in (1, 2):
        redis_client.set(keys.staged("x", 1, 0), b"x", ex=60)
        redis_client.sadd(keys.active, "ghost")
        assert swept(redis_client, keys) == {"staged": 1, "names": 1}
        said = redis_client.hgetall(keys.janitor)
        assert int(said[b"at"]) / 1000 == pytest.approx(time.time(), abs=60)
        assert (said[b"staged"], said[b"names"]) == (b"%d" % round_,) * 2
    assert redis_client.ttl(keys.janitor) > 0


def test_blocks_of_ended_jobs_are_freed_where_an_arena_is_named(
    table: Table, redis_client: Any, keys: Keys, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other pools, whose jobs nobody here knows, stay."""
    table.job(id="live")
    store = HandleStore("here", arena, prefix=keys.prefix)
    another = HandleStore("here", arena, prefix=f"{keys.prefix}more:")
    for each, job in ((store, "live"), (store, "dead"), (another, "live"), (another, "dead")):
        each.put(job, 1, "latents", Parcel({}, b"x" * 100))
    assert swept(redis_client, keys, arena=arena) == {}  # its writer may still be writing
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61.0)
    assert swept(redis_client, keys, arena=arena, act=False) == {"arena": 1}
    assert swept(redis_client, keys, arena=arena) == {"arena": 1}
    assert [owner for owner, _, _ in arena.owners()] == [
        owner_of(keys.prefix, "live"),
        owner_of(f"{keys.prefix}more:", "live"),
        owner_of(f"{keys.prefix}more:", "dead"),
    ]
    arena.free_owned_by(lambda _: True)


# -- the command, and the leader -----------------------------------------------------------------


def test_the_command_prints_what_it_found(
    redis_server: str, redis_client: Any, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--redis", redis_server, "--prefix", keys.prefix)
    redis_client.set(keys.staged("x", 1, 0), b"x", ex=60)
    assert main(["janitor", "--dry-run", "--json", *flags]) == Exit.OK
    assert json.loads(capsys.readouterr().out) == {"staged": 1}
    assert redis_client.exists(keys.staged("x", 1, 0))
    assert main(["janitor", *flags]) == Exit.OK
    assert KINDS["staged"] in capsys.readouterr().out
    assert main(["janitor", *flags]) == Exit.OK
    assert capsys.readouterr().out == "nothing was left over\n"


@pytest.mark.parametrize("content", [None, b"", bytes(16), b"root:x:0:0\n", MAGIC])
def test_only_an_arena_is_taken_for_one(
    redis_server: str, redis_client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    content: bytes | None,
) -> None:  # fmt: skip
    """A file that is none, also an empty one, is named and left as it was."""
    path = tmp_path / "arena"
    if content is not None:
        path.write_bytes(content)
    assert main(["janitor", "--arena", str(path), "--redis", redis_server]) == Exit.USAGE
    assert f"{path}" in capsys.readouterr().err
    assert path.exists() == (content is not None)
    assert not path.exists() or path.read_bytes() == content


@pytest.fixture
def pool(redis_server: str, redis_client: Any, keys: Keys, arena_path: str) -> Iterator[Processes]:
    long = {"worker_lease_s": 10.0, "leader_lease_s": 10.0}
    with processes(redis_server, redis_client, keys, arena_path, **long) as made:
        yield made


def test_a_sweep_beside_running_jobs_takes_what_the_dead_left_and_nothing_else(
    pool: Processes, redis_server: str, keys: Keys
) -> None:
    """A client that died over its push, a decoder killed with its file uploaded, a state spilled by
    a process that is gone; and six jobs in all stages, swept over and over until their ends."""
    pool.settings.update(states="redis")
    pool.pool(denoisers=2)
    client = writing(redis_server)
    store = HandleStore("here", redis=client, prefix=keys.prefix)
    store.put("never-was", 3, "latents", STATE, where="redis")
    client.set(keys.staged("never-was", 4, 0), b"half a picture", ex=3600)
    client.set(keys.staged("j0", 10**6, 0), b"of a run that did not count", ex=3600)
    for i in range(6):
        pool.push(f"j{i}", steps=20)
    pool.wait_for_event("j0", "step")
    found: dict[str, int] = {}
    while client.scard(keys.active):
        for kind, count in swept(client, keys).items():
            found[kind] = found.get(kind, 0) + count
    for i in range(6):
        pool.check(f"j{i}", steps=20)
        assert pool.record(f"j{i}")["attempts"] == "0"
        assert "rewound" not in pool.events(f"j{i}")
    pool.drained()
    for kind, count in swept(client, keys).items():
        found[kind] = found.get(kind, 0) + count
    # What a job left at its end may have been freed by its worker before it was found.
    assert found.pop("staged") == 2
    assert found.pop("latents") >= 1
    assert found == {}
    until(lambda: not list(client.scan_iter(f"{keys.prefix}latents:*")), "no spilled state")
    client.close()
