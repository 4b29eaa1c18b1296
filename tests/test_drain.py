"""`slackwater drain` and `slackwater restart`: workers come and go, and jobs notice nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.asks import Ask
from common.keys import Keys
from common.settings import Settings
from common.stage import DECODE, DENOISE, ENCODE, STAGES
from services.cli.main import main
from services.cli.restart import ROLES
from services.cli.terminal import Exit
from services.pool.child import Child
from services.pool.local import LocalPool
from services.pool.rolling import Rolling
from tests.processes import Processes, processes, until
from tests.servers import free_port

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def sw(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; its exit code and what it printed."""

    def run(*words: str) -> tuple[int, str]:
        code = main(list(words))
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


# -- drain -------------------------------------------------------------------------------------


@pytest.fixture
def pool(redis_server: str, redis_client: Any, keys: Keys, arena_path: str) -> Iterator[Processes]:
    with processes(redis_server, redis_client, keys, arena_path) as made:
        yield made


def test_a_drained_worker_hands_its_job_to_another(pool: Processes, sw: Run) -> None:
    """At its next step, without an attempt; what was done stays done."""
    pool.settings.update(chunk_ms=10**6)
    flags = ("--redis", pool.settings["redis_url"], "--prefix", pool.keys.prefix)
    _, (first,) = pool.pool()
    pool.push("a", steps=60)
    pool.wait_for_event("a", "step")
    name = pool.record("a")["worker"]
    pool.worker("denoise")
    pool.wait_for_workers(4)
    code, said = sw("drain", name, *flags)
    assert (code, said) == (Exit.OK, f"{name} has left\n")
    first.join(20)
    assert first.exitcode == 0
    pool.check("a", steps=60)
    assert pool.record("a")["attempts"] == "0"
    assert pool.record("a")["worker"] != name
    code, said = sw("drain", name, *flags)
    assert code == Exit.UNKNOWN
    assert "there are" in said
    pool.drained()


def test_draining_without_waiting_only_asks(pool: Processes, sw: Run) -> None:
    """And twice is once."""
    pool.pool()
    name = next(n for n in pool.client.smembers(pool.keys.workers) if b"encode" in n).decode()
    flags = ("--redis", pool.settings["redis_url"], "--prefix", pool.keys.prefix, "--wait", "0")
    code, said = sw("drain", name, *flags, "--json")
    assert code == Exit.OK
    assert json.loads(said)["worker"] == name
    pool.wait_for_workers(2)


# -- restart -----------------------------------------------------------------------------------


@pytest.fixture
def local() -> Iterator[LocalPool]:
    settings = Settings(noop="encode_ms=1,step_ms=10,decode_ms=1")
    with LocalPool(denoisers=2, settings=settings) as running:
        yield running


class Census(threading.Thread):
    """Counts, all the while, the workers of each stage that may be given tasks."""

    def __init__(self, pool: LocalPool) -> None:
        super().__init__(daemon=True)
        self.pool, self.fewest = pool, dict.fromkeys(STAGES, 99)
        self.over = threading.Event()

    def run(self) -> None:
        with self.pool.client() as client:
            while not self.over.wait(0.01):
                workers = [w for w in client.workers() if not w.draining]
                for stage in STAGES:
                    count = sum(w.stage == stage for w in workers)
                    self.fewest[stage] = min(self.fewest[stage], count)


def test_a_rolling_restart_under_load_fails_no_job(local: LocalPool, sw: Run) -> None:
    """Every process is another one afterwards, and there was never one fewer than wanted."""
    before = {p.pid for p in local.processes() if p.role != "redis"}
    census = Census(local)
    with local.client() as client:
        jobs = client.submit_many({"prompt": f"r{i}", "num_inference_steps": 30} for i in range(40))
        census.start()
        code, said = sw("restart", "--redis", local.redis_url, "--wait", "90")
        census.over.set()
        census.join()
        assert (code, "replaced one by one" in said) == (Exit.OK, True), said
        jobs += client.submit_many({"prompt": f"s{i}", "num_inference_steps": 5} for i in range(5))
        assert {job.wait(60).status for job in jobs} == {"succeeded"}
        assert {job.status().attempts for job in jobs} == {0}
    local.wait_settled(30)
    after = {p.pid for p in local.processes() if p.role != "redis"}
    assert len(after) == len(before)
    assert not after & before
    assert census.fewest == {ENCODE: 1, DENOISE: 2, DECODE: 1}


def test_one_stage_alone_can_be_restarted(local: LocalPool, sw: Run) -> None:
    denoisers, encoders = local.workers(DENOISE), local.workers(ENCODE)
    code, said = sw("restart", DENOISE, "--redis", local.redis_url, "--json")
    assert code == Exit.OK
    assert json.loads(said)["done"]
    local.wait_settled(30)
    assert not set(local.workers(DENOISE)) & set(denoisers)
    assert local.workers(ENCODE) == encoders
    assert len(local.workers(DENOISE)) == 2
    code, said = sw("restart", "redis", "--redis", local.redis_url)
    assert (code, "'redis' cannot be restarted" in said) == (Exit.USAGE, True)
    code, said = sw("restart", "gateway", "--redis", local.redis_url)
    assert (code, "none of gateway runs here" in said) == (Exit.FAILED, True)


def succeeded_by(local: LocalPool, code: str) -> None:
    """What the pool starts from now on is this Python code."""
    supervisor = local._supervisor
    assert supervisor is not None
    make = supervisor.make

    def changed(role: str, index: int) -> Child:
        child = make(role, index)
        child.command = [sys.executable, "-c", code]
        return child

    supervisor.make = changed


def pids(local: LocalPool, role: str) -> list[int]:
    return [process.pid for process in local.processes() if process.role == role]


def test_a_restart_that_fails_leaves_the_pool_as_it_was(local: LocalPool, sw: Run) -> None:
    """Where the new version of something does not come up, the old one goes on serving."""
    before = pids(local, DENOISE)
    succeeded_by(local, "raise SystemExit(1)")
    code, said = sw("restart", DENOISE, "--redis", local.redis_url)
    assert code == Exit.FAILED
    assert "did not become ready" in said
    local.wait_settled(30)
    assert pids(local, DENOISE) == before
    with local.client() as client:
        assert client.submit("x", num_inference_steps=2).wait(30).status == "succeeded"


def test_a_coordinator_stays_until_its_successor_stands_by(local: LocalPool, sw: Run) -> None:
    """That another one leads does not make it ready."""
    field, [before] = f"{local.settings.host}/restart", pids(local, "coordinator")
    succeeded_by(local, "import time; time.sleep(600)")
    sw("restart", "coordinator", "--redis", local.redis_url, "--wait", "0")
    until(lambda: len(pids(local, "coordinator")) == 2, "a successor")
    with local.client() as client:
        assert client.submit("x", num_inference_steps=50).wait(30).status == "succeeded"
        os.kill(pids(local, "coordinator")[1], signal.SIGKILL)
        ask = Ask((("HGET", local.keys.pool, field),))
        until(lambda: b"did not become ready" in client.ask(ask)[0], "the end of the restart")
        local.wait_settled(30)
        assert pids(local, "coordinator") == [before]
        assert client.submit("x", num_inference_steps=2).wait(30).status == "succeeded"


def test_a_stage_can_be_scaled_down_while_it_is_restarted(local: LocalPool, sw: Run) -> None:
    """The youngest leaves, and that is the successor: the restart ends there, and says so."""
    field, said = f"{local.settings.host}/restart", b""
    succeeded_by(local, "import time; time.sleep(600)")
    sw("restart", DENOISE, "--redis", local.redis_url, "--wait", "0")
    until(lambda: len(local.workers(DENOISE)) == 3, "a successor")
    local.scale(DENOISE, 1)
    with local.client() as client:
        said = client.ask(Ask((("HGET", local.keys.pool, field),)))[0]
    assert b"fewer are wanted now" in said
    assert len(local.workers(DENOISE)) == 1


class Visitor(threading.Thread):
    """Makes one job after another by HTTP and waits for each, on a new connection every time."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__(daemon=True)
        self.url, self.number = url, number
        self.over = threading.Event()
        self.ends: list[str] = []
        self.refused: list[str] = []

    def run(self) -> None:
        while not self.over.is_set():
            id = f"v{self.number}-{len(self.ends)}"
            job = self._ask("POST", "", json={"id": id, "prompt": "x", "num_inference_steps": 3})
            while not job["is_terminal"]:
                self.over.wait(0.05)
                job = self._ask("GET", f"/{id}")
            self.ends.append(job["status"])

    def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        """What a gateway leaves unanswered as it stops is asked again."""
        while True:
            try:
                answer = httpx.request(
                    method, f"{self.url}/v1/jobs{path}", headers={"Prefer": "wait=10"},
                    timeout=60, **more,
                )  # fmt: skip
            except httpx.ConnectError as error:
                self.refused.append(str(error))
                self.over.wait(0.05)
                continue
            except httpx.TransportError:
                continue
            said: dict[str, Any] = answer.json()
            if answer.status_code == 503 and said["error"]["code"] == "stopping":
                continue
            assert answer.status_code in (200, 202), said
            return said


def test_everything_can_be_restarted_while_jobs_come_by_http(sw: Run) -> None:
    """No connection is refused, no job fails, and every process is another one afterwards."""
    settings = Settings(noop="encode_ms=1,step_ms=10,decode_ms=1", http_port=free_port())
    with LocalPool(settings=settings, http=True, celery=True) as pool:
        before = {role: pids(pool, role) for role in ROLES}
        visitors = [Visitor(pool.http_url, i) for i in range(3)]
        for visitor in visitors:
            visitor.start()
        code, said = sw("restart", "--redis", pool.redis_url, "--wait", "120")
        assert code == Exit.OK, said
        served = [len(visitor.ends) for visitor in visitors]
        for visitor, count in zip(visitors, served, strict=True):
            until(lambda v=visitor, n=count: len(v.ends) > n, "a job of the new ones", 60)
            visitor.over.set()
        for visitor in visitors:
            visitor.join(60)
            assert not visitor.is_alive()
        pool.wait_settled(30)
        after = {role: pids(pool, role) for role in ROLES}
        assert {role: len(there) for role, there in after.items()} == dict.fromkeys(ROLES, 1)
        assert not [role for role in ROLES if set(before[role]) & set(after[role])]
        assert not [error for visitor in visitors for error in visitor.refused]
        assert {end for visitor in visitors for end in visitor.ends} == {"succeeded"}


def test_a_launcher_replaces_a_worker_that_was_drained(local: LocalPool, sw: Run) -> None:
    with local.client() as client:
        [name] = [w.name for w in client.workers() if w.stage == DECODE]
        code, _ = sw("drain", name, "--redis", local.redis_url)
        assert code == Exit.OK
        until(
            lambda: [w for w in client.workers() if w.stage == DECODE and w.name != name],
            "its successor",
        )


def test_a_restart_ends_where_a_successor_does_not_come_up(tmp_path: Path) -> None:
    """What has not been replaced goes on, and why is said."""

    def child(name: str, code: str) -> Child:
        made = Child(name, [sys.executable, "-c", code], {}, tmp_path / f"{name}.log", role=DENOISE)
        made.start()
        return made

    old = [child(f"old-{i}", "import time; time.sleep(600)") for i in range(2)]
    children, said = list(old), list[str]()

    def succeed(_: Child) -> Child:
        children.append(child("new", "raise SystemExit('no such device')"))
        return children[-1]

    rolling = Rolling(succeed, lambda role: [c for c in children if not c.leaving], said.append)
    rolling.ask(f"token {DENOISE}")

    def ended() -> bool:
        rolling.tend(children)
        if rolling.under_way and children[-1].died():
            children[-1].bury()
        return not rolling.under_way

    try:
        until(ended, "the successor's end by itself")
        assert rolling.answer is not None
        assert rolling.answer.startswith("failed: the successor of old-0 did not become ready")
        assert not any(c.leaving for c in old)
        assert not any(c.died() for c in old)
        assert "new.log" in said[-1]
        rolling.done()
        rolling.ask(rolling.answer or "failed: x")  # what it wrote is no new request
        assert not rolling.under_way
    finally:
        for c in children:
            c.ask_to_stop()
            c.wait(time.monotonic() + 20)


class Crew:
    """Coordinators without processes, and a restart of them."""

    def __init__(self, size: int) -> None:
        self.children = [self.child(f"old-{i}") for i in range(size)]
        self.said: list[str] = []
        self.rolling = Rolling(self.succeed, lambda _: list(self.children), self.said.append)
        self.rolling.ask("token coordinator")
        self.go_on()

    def child(self, name: str) -> Child:
        return Child(name, [], {}, Path(f"{name}.log"), role="coordinator", ready=True)

    def succeed(self, old: Child) -> Child:
        self.children.append(self.child(f"new-{old.name}"))
        self.children[-1].ready = False
        return self.children[-1]

    def go_on(self) -> None:
        self.rolling.tend(self.children)

    def replace(self, old: Child, new: Child) -> None:
        """As it should go."""
        new.ready = True
        self.go_on()
        assert old.leaving
        self.children.remove(old)
        self.go_on()
        assert not new.ready, "it has to get on without the other one"
        new.ready = True
        self.go_on()


@pytest.mark.parametrize("has_left", [False, True])
def test_a_successor_that_dies_as_it_takes_over_is_kept_and_told_of(has_left: bool) -> None:
    """Its predecessor goes or has gone: there is nobody else to start again."""
    crew = Crew(1)
    old, new = crew.children
    new.ready = True
    crew.go_on()
    assert old.leaving
    if has_left:
        crew.children.remove(old)
    new.bury()
    crew.go_on()
    assert not new.leaving
    assert (crew.rolling.answer or "").startswith("failed: new-old-0 died when it had to take over")


def test_a_successor_that_dies_later_ends_the_restart_too() -> None:
    """Nobody else is replaced by what does not get on."""
    crew = Crew(3)
    old = crew.children[0]
    crew.replace(old, crew.children[-1])
    first = crew.children[2]
    crew.go_on()
    crew.replace(crew.children[0], crew.children[-1])
    first.bury()
    crew.go_on()
    assert (crew.rolling.answer or "").startswith("failed: new-old-0 died soon after")
    assert not any(child.leaving for child in crew.children)
    assert [child.name for child in crew.children] == ["old-2", "new-old-0", "new-old-1"]
