"""The chaos harness: that its books would notice what must not happen, and one short run."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from benchmarks import chaos
from benchmarks.chaos_parts import checks, plan
from benchmarks.chaos_parts.faults import Happened
from benchmarks.chaos_parts.journal import Journal, TaskRun, is_in_task, read, repeats
from benchmarks.chaos_parts.ledger import Ledger, Line
from benchmarks.chaos_parts.plan import Fault, Job
from benchmarks.chaos_parts.proxy import Link, Proxy
from common import connect
from common.job import OutputFile, Result
from common.keys import Keys
from common.noop import expected


@pytest.fixture
def link(redis_server: str) -> Iterator[Link]:
    proxy = Proxy(int(redis_server.rpartition(":")[2].partition("/")[0]))
    yield proxy.link()
    proxy.close()


def over(link: Link) -> Any:
    return connect.writing(f"redis://127.0.0.1:{link.port}/0")


def test_a_plan_is_its_seed_and_has_every_kind() -> None:
    assert plan.faults(1, 240) == plan.faults(1, 240) != plan.faults(2, 240)
    found = plan.faults(1, 240)
    assert len(found) >= 30
    assert {fault.kind for fault in found} == set(plan.KINDS)
    variants = plan.variants(1, noop=True)
    assert plan.jobs(1, 240, chaos.RATE, variants) == plan.jobs(1, 240, chaos.RATE, variants)
    assert len(plan.jobs(1, 240, chaos.RATE, variants)) > 300


def test_a_lost_reply_is_of_a_command_that_has_run(link: Link, redis_client: Any) -> None:
    client = over(link)
    link.replies_to_lose = 1
    with pytest.raises(redis.ConnectionError):
        client.xadd("s", {"a": "1"})
    assert redis_client.xlen("s") == 1
    client.xadd("s", {"a": "2"})
    assert redis_client.xlen("s") == 2
    redis_client.delete("s")
    client.close()


def test_a_halved_request_never_runs_and_a_cut_link_can_be_mended(
    link: Link, redis_client: Any
) -> None:
    client = over(link)
    link.halve_next = True
    with pytest.raises(redis.ConnectionError):
        client.xadd("s", {"a": "1"})
    link.cut()
    with pytest.raises(redis.ConnectionError):
        client.ping()
    link.mend()
    assert client.ping()
    assert redis_client.xlen("s") == 0
    client.close()


def test_a_blocking_read_ends_though_its_connection_was_forgotten(
    link: Link, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall that lost its state closes nothing; a coordinator has to notice by itself."""
    monkeypatch.setattr(connect, "READ_TIMEOUT_S", 0.3)
    client = connect.blocking(f"redis://127.0.0.1:{link.port}/0")
    assert client.ping()
    link.forget()
    with pytest.raises(redis.TimeoutError):
        client.xread({"s": "0"}, block=100)
    assert client.ping()  # over a new connection
    client.close()


def test_journals_tell_what_was_done_twice(tmp_path: Path) -> None:
    """The first run dies in its fourth step; the second does that step again, the third none."""
    first, second = Journal(tmp_path, "denoise-0"), Journal(tmp_path, "denoise-1")
    first.write("begin", 1, "a", "denoise", 0, 6)
    for step in (1, 2, 3):
        first.write("step", 1, "a", step)
    second.write("begin", 2, "a", "denoise", 3, 5)
    second.write("step", 2, "a", 4)
    assert is_in_task(next(tmp_path.glob("denoise-1.*")))
    second.write("step", 2, "a", 5)
    second.write("end", 2, "a", 5)
    assert not is_in_task(next(tmp_path.glob("denoise-1.*")))
    second.write("begin", 3, "a", "denoise", 5, 6)
    second.write("end", 3, "a", 6)
    runs = read(tmp_path)
    assert [(again.seq, lost.seq) for again, lost in repeats(runs)] == [(2, 1)]


def test_work_done_twice_is_laid_at_the_door_of_the_fault_that_cost_it() -> None:
    lost = TaskRun("denoise-0", 7, 1, "a", "denoise", 0, begun_s=1.0, steps={1: 1.5})
    again = TaskRun("denoise-1", 8, 2, "a", "denoise", 0, begun_s=9.0, steps={1: 9.5, 2: 10.0})
    faults = [
        Happened("kill_denoise", 2.0, "denoise-0", 7, seq=1),
        Happened("kill_standby", 3.0, "coordinator-1", 3, seq=1),
    ]
    assert checks.blame([lost, again], faults) == {0: 1}
    assert checks.recovery_s(faults[0], [lost, again]) == 7.5
    assert checks.recovery_s(faults[1], [lost, again]) == 6.0


def test_the_ledger_notices_a_wrong_a_changed_and_a_missing_result(
    link: Link, redis_client: Any, keys: Keys
) -> None:
    variants = [{"prompt": "x", "seed": 1, "num_inference_steps": 2}]
    members: Any = SimpleNamespace(
        keys=keys, direct=redis_client, checker=redis_client, client_link=link
    )
    ledger = Ledger(members, variants)
    for job in ("right", "wrong", "changed", "twice", "missing"):
        ledger.lines[job] = Line(Job(0.0, job, 0, variants[0]), 0.0)
        if job != "missing":
            finish(redis_client, keys, job, "0" if job == "wrong" else expected("x", 1, 2))
    ledger.look()
    redis_client.set(keys.output("changed", 0), "{}", ex=60)
    redis_client.xadd(keys.events("twice"), {"type": "succeeded"})
    found = checks.verdicts(ledger, [expected("x", 1, 2)], noop=True)
    ledger.close()
    assert found["lost"] == ["missing"]
    assert found["mismatched"] == ["wrong"]
    assert found["duplicated"] == ["changed", "twice"]


def test_the_books_can_be_closed_while_a_customer_waits_for_a_lost_job(
    link: Link, redis_client: Any, keys: Keys
) -> None:
    members: Any = SimpleNamespace(keys=keys, direct=redis_client, client_link=link)
    ledger = Ledger(members, [])
    ledger.serve(Job(0.0, "lost", 0, {"prompt": "x"}))
    redis_client.xread({keys.jobs: "0"}, block=10_000)  # it has been pushed
    closing = threading.Thread(target=ledger.close, daemon=True)
    closing.start()
    closing.join(30.0)
    assert not closing.is_alive()
    assert ledger.lines["lost"].answer is None
    redis_client.delete(keys.jobs)


def finish(client: Any, keys: Keys, job: str, chain: str) -> None:
    """A job's end as the system leaves it."""
    content = json.dumps({"job": job, "chain": chain}).encode()
    digest = hashlib.sha256(content).hexdigest()
    file = OutputFile(keys.output(job, 0), "application/json", 1, 1, len(content), digest)
    client.set(file.key, content, ex=60)
    client.set(keys.result(job), Result(job, "succeeded", (file,)).to_wire(), ex=60)
    client.xadd(keys.events(job), {"type": "succeeded"})
    client.expire(keys.events(job), 60)


SMOKE = [
    Fault(0.5, "client_killed", 0.0, 0.2),
    Fault(0.8, "kill_denoise", 0.2, 0.1),
    Fault(1.5, "worker_lost_replies", 1.0, 0.3),
    Fault(2.0, "client_killed", 0.0, 0.7),
    Fault(2.5, "kill_leader", 0.2, 0.1),
    Fault(4.5, "freeze_worker", 1.8, 0.2),
    Fault(5.0, "worker_cut", 1.5, 0.8),
    Fault(6.0, "redis_kill", 0.2, 0.5),
    Fault(7.5, "drain_worker", 0.2, 0.4),
]


def test_a_short_run_loses_and_doubles_nothing() -> None:
    """Nine faults of eight kinds in nine seconds, on no-op stages whose files name every step."""
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="slackwater-chaos-", dir=shm) as folder:
        out = chaos.run(
            1, 9.0, True, Path(folder), faults=SMOKE, worker_lease_s=1.0, leader_lease_s=1.0,
            arena_patience_s=1.0,
        )  # fmt: skip
    assert (out["faults"], out["fault_kinds"]) == (9, 8)
    assert out["jobs"] > 10
    assert out["chunks_redone"] >= 1  # the harness did hurt somebody
    wrong = {name: out[name] for name in ("lost", "duplicated", "mismatched") if out[name]}
    assert not wrong, out["why"]
    assert out["chunks_redone_per_fault"] <= 1
    assert out["streams_left"] == out["keys_left"] == out["unclean_exits"] == []
    assert out["processes_left"] == []
    assert out["arena_blocks_after_sweep"] == 0
