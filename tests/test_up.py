"""`slackwater up` and LocalPool: what they start, keep running, and leave behind (nothing)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from common.settings import Settings
from services.cli.main import main
from services.pool import redis_server
from services.pool.gateway import PortTaken, listen
from services.pool.local import LocalPool, PoolError
from services.pool.state_dir import StateDirTaken, running
from slackwater import Client
from tests.servers import free_port

ROOT = Path(__file__).resolve().parent.parent
NOOP = "encode_ms=1,step_ms=5,decode_ms=1"
WAIT_S = 30.0
LEASE_S = 3.0  # shorter than the default: the tests that kill wait for it


def noop(**settings: Any) -> Settings:
    return Settings(noop=NOOP, worker_lease_s=LEASE_S, **settings)


def eventually(true: Callable[[], Any], within_s: float = WAIT_S) -> Any:
    until = time.monotonic() + within_s
    while not (value := true()):
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    """Running, not a zombie that its new parent has yet to reap."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(") ")[2][0] not in "ZX"


@contextmanager
def up(state_dir: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """`slackwater up` as a process of its own, and what it says once it is ready."""
    command = [sys.executable, "-m", "services.cli.main", "up", "--json", "--noop", NOOP,
               "--state-dir", str(state_dir), "--worker-lease-s", str(LEASE_S), *flags]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], WAIT_S)
        line = process.stdout.readline() if readable else ""
        assert line, f"it did not start: {process.stderr.read()}"
        yield process, json.loads(line)
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_S)


def pids(said: dict[str, Any]) -> list[int]:
    return [child["pid"] for child in said["processes"]]


def arena_of(state_dir: Path) -> Path:
    """Where the pool of a state directory keeps its arena."""
    name = hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:12]
    return Path(f"/dev/shm/slackwater-{os.getuid()}/state-{name}/arena")


# -- slackwater up -------------------------------------------------------------------------


def test_up_serves_until_it_is_told_to_stop_and_leaves_nothing(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with up(state, "--denoisers", "2") as (process, said):
        assert [p["role"] for p in said["processes"]] == [
            "redis", "coordinator", "encode", "denoise", "denoise", "decode",
        ]  # fmt: skip
        there = running(state)
        assert there is not None
        assert (there.pid, there.redis_url) == (process.pid, said["redis_url"])
        assert arena_of(state).exists()
        with Client(said["redis_url"]) as client:
            assert client.submit("x").wait(WAIT_S).status == "succeeded"
            config = redis.Redis.from_url(client.url).config_get()
            assert config["appendonly"] == "yes"
            assert config["maxmemory-policy"] == "noeviction"
            assert config["bind"] == "127.0.0.1"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
        assert not [pid for pid in pids(said) if alive(pid)]
        assert running(state) is None
        assert not arena_of(state).exists()


def test_killing_the_launcher_takes_everything_along_and_the_next_one_goes_on(
    tmp_path: Path,
) -> None:
    """kill -9: no process is left, and no pushed job is lost."""
    state = tmp_path / "state"
    with up(state) as (process, said):
        with Client(said["redis_url"]) as client:
            job = client.submit("survivor", id="survivor", num_inference_steps=400)
            next(e for e in job.events(WAIT_S) if e.type == "step")
        time.sleep(1.1)  # appendfsync everysec: a second at most is not on disk yet
        process.kill()
        process.wait(WAIT_S)
        eventually(lambda: not any(alive(pid) for pid in pids(said)))
    with up(state) as (process, said), Client(said["redis_url"]) as client:
        assert client.wait("survivor", WAIT_S).status == "succeeded"


def test_a_stop_in_the_middle_of_a_job_resumes_it_at_the_next_start(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with up(state) as (process, said):
        with Client(said["redis_url"]) as client:
            job = client.submit("paused", id="paused", num_inference_steps=400)
            next(e for e in job.events(WAIT_S) if e.type == "step")
        process.terminate()
        _, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        assert "1 job(s) had not ended" in err
    with up(state) as (_, said), Client(said["redis_url"]) as client:
        result = client.wait("paused", WAIT_S)
        assert result.status == "succeeded"
        # Drained at a step's end, so that no step was run twice.
        assert result.timings["denoise_s"] == pytest.approx(400 * 0.005)


def test_a_state_directory_serves_one_launcher_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with up(tmp_path) as (process, said):
        with pytest.raises(StateDirTaken, match=rf"pid {process.pid}.*slackwater scale"):
            LocalPool(settings=noop(), state_dir=tmp_path).start()
        with pytest.raises(PoolError, match="already"):  # one host name, one launcher a Redis
            LocalPool(settings=noop(), redis_url=said["redis_url"]).start()
        assert main(["down", "--redis", said["redis_url"]]) == 0
        assert process.wait(WAIT_S) == 0
        assert "has stopped" in capsys.readouterr().out


def test_wrong_flags_are_named_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for flags, remedy in (
        (("--threads", "many"), "--threads: "),
        (("--encoders", "-1"), "--encoders: -1"),
        (("--model", str(tmp_path / "nowhere")), "it is a path that is not there"),
    ):
        assert main(["up", "--state-dir", str(tmp_path / "state"), *flags]) == 2
        assert remedy in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


# -- LocalPool -----------------------------------------------------------------------------


def test_a_worker_that_cannot_start_is_shown_with_the_end_of_its_log() -> None:
    with pytest.raises(PoolError, match=r"exited with 1 before it was ready(.|\n)*bogus_ms"):
        LocalPool(settings=Settings(noop="bogus_ms=1")).start()


def test_a_pool_scales_up_and_down_while_it_works() -> None:
    with LocalPool(settings=noop()) as pool, pool.client() as client:
        first = pool.workers("denoise")
        jobs = client.submit_many({"prompt": f"s{i}", "num_inference_steps": 40} for i in range(12))
        pool.scale("denoise", 3)
        assert len(pool.workers("denoise")) == 3
        assert pool.workers("denoise")[:1] == first
        pool.scale("denoise", 1)
        assert pool.workers("denoise") == first
        assert {job.wait(WAIT_S).status for job in jobs} == {"succeeded"}
        assert all(job.status().attempts == 0 for job in jobs)
        pool.scale("encode", 0)
        assert pool.workers("encode") == []
        with pytest.raises(ValueError, match="none of encode, denoise, decode"):
            pool.scale("paint", 1)


def test_a_worker_that_is_killed_is_replaced_and_its_job_goes_on() -> None:
    said: list[str] = []
    with LocalPool(settings=noop(), say=said.append) as pool, pool.client() as client:
        [before] = pool.workers("denoise")
        job = client.submit("hit", num_inference_steps=300)
        next(e for e in job.events(WAIT_S) if e.type == "step")
        os.kill(before, signal.SIGKILL)
        assert job.wait(WAIT_S).status == "succeeded"
        [after] = eventually(lambda: pool.workers("denoise"))
        assert after != before
        assert [line for line in said if "was killed by SIGKILL; starting it again" in line]


def test_a_machine_that_refuses_a_process_is_asked_again() -> None:
    """No place for its log, here; no memory would be the same. All others go on meanwhile."""
    said: list[str] = []
    with LocalPool(settings=noop(), say=said.append) as pool, pool.client() as client:
        gone = pool.log_dir.with_name("gone")
        pool.log_dir.rename(gone)
        os.kill(pool.workers("encode")[0], signal.SIGKILL)
        pool.scale("denoise", 2, wait_s=0)
        for name in ("encode-1", "denoise-2"):
            eventually(lambda n=name: any(f"{n} could not be started" in line for line in said))
        job = client.submit("x")
        gone.rename(pool.log_dir)
        assert job.wait(WAIT_S).status == "succeeded"
        pool.wait_settled(WAIT_S)
        assert len(pool.workers("denoise")) == 2
        assert len([line for line in said if "denoise-2 could not be started" in line]) == 1


def test_the_port_stays_open_while_a_gateway_is_started_again() -> None:
    """A connection made meanwhile waits for it."""
    settings = noop(http_port=free_port())
    with LocalPool(0, 0, 0, settings=settings, coordinators=0, http=True) as pool:
        [before] = [p.pid for p in pool.processes() if p.role == "gateway"]
        os.kill(before, signal.SIGKILL)
        eventually(lambda: not alive(before))
        answer = httpx.get(f"{pool.http_url}/livez", timeout=WAIT_S)
        assert answer.json()["pid"] != before


def test_a_gateway_listens_on_every_address_of_its_host() -> None:
    port = free_port()
    listening = listen(Settings(http_host="localhost", http_port=port))
    assert {each.getsockname()[:2] for each in listening} <= {("127.0.0.1", port), ("::1", port)}
    with socket.create_connection(("127.0.0.1", port)):
        pass
    with pytest.raises(PortTaken, match=rf"port {port} of localhost: address already in use"):
        listen(Settings(http_host="localhost", http_port=port))
    for each in listening:
        each.close()
    with pytest.raises(PortTaken, match=r"port 80 of no\.such\.host\.invalid: "):
        listen(Settings(http_host="no.such.host.invalid", http_port=80))


def test_a_redis_that_is_killed_comes_back_with_its_jobs() -> None:
    with LocalPool(settings=noop()) as pool, pool.client() as client:
        job = client.submit("hit", num_inference_steps=600)
        next(e for e in job.events(WAIT_S) if e.type == "step")
        server = next(p for p in pool.processes() if p.role == "redis")
        time.sleep(1.1)  # appendfsync everysec
        os.kill(server.pid, signal.SIGKILL)
        assert job.wait(WAIT_S).status == "succeeded"


@pytest.mark.usefixtures("redis_client")
def test_a_pool_can_use_a_redis_that_is_there_already(redis_server: str) -> None:
    with LocalPool(settings=noop(prefix="{up}:"), redis_url=redis_server) as pool:
        assert [p.role for p in pool.processes()] == ["coordinator", "encode", "denoise", "decode"]
        with pool.client() as client:
            assert client.submit("x").wait(WAIT_S).status == "succeeded"
            left = redis.Redis.from_url(redis_server)
    assert left.hgetall("{up}:pool") == {}
    assert not left.keys("{up}:launcher:*")
    left.flushdb()


def test_a_temporary_pool_leaves_no_file() -> None:
    with LocalPool(settings=noop()) as pool:
        state, arena = pool.state_dir, Path(pool.settings.arena_path)
        assert arena.exists()
        started = [p.pid for p in pool.processes()]
    assert not state.exists()
    assert not arena.parent.exists()
    assert not [pid for pid in started if alive(pid)]
    pool.stop()  # twice is harmless


def test_the_demo_shows_every_job_and_succeeds(tmp_path: Path) -> None:
    """All thirteen; short ones overtake the last of the long ones, which came before them."""
    command = [sys.executable, "-m", "examples.demo", "--noop", "step_ms=20"]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * WAIT_S)
    assert done.returncode == 0, done.stderr
    *_, table = done.stdout.partition("on time\n")
    ended = re.findall(r"^((?:long|short)-\d+) ", table, re.MULTILINE)
    assert sorted(ended) == sorted(
        [*(f"long-{n}" for n in (1, 2, 3)), *(f"short-{n}" for n in range(1, 11))]
    )
    assert "short-1" in ended[: max(ended.index(f"long-{n}") for n in (1, 2, 3))]
    assert re.search(r"^\d+ of 13 on time; ", table, re.MULTILINE)


# -- a server program ----------------------------------------------------------------------


def test_an_old_redis_server_is_passed_over_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.0.16 sha=0 malloc=libc bits=64'\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = redis_server.find_server()
    assert found != str(old)
    assert redis_server.version_of(found) >= redis_server.FLOOR
    monkeypatch.setattr(redis_server, "candidates", lambda: [str(old)])
    with pytest.raises(redis_server.RedisNotFound, match=r"6\.0\.16.*slackwater\[embedded\]"):
        redis_server.find_server()
    monkeypatch.setattr(redis_server, "candidates", list)
    with pytest.raises(redis_server.RedisNotFound, match="there is no redis-server"):
        redis_server.find_server()


def test_a_taken_port_is_not_chosen(redis_server: str) -> None:
    from services.pool.redis_server import choose_port

    port = int(redis_server.rsplit(":", 1)[1].split("/")[0])
    assert choose_port(port) != port
    free = choose_port()
    assert choose_port(free) == free
