"""A pool's processes, each behind a link of its own: started, killed, frozen, woken, drained.

Workers and coordinators run their services' own code, forked from a server that has imported
everything, so that a restart costs the machine little. They end with the harness.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from benchmarks.chaos_parts.journal import Journal, JournaledStage, is_in_task
from benchmarks.chaos_parts.proxy import Link, Proxy
from common import connect
from common.keys import Keys
from services.pool import redis_server

COORDINATOR = "coordinator"
EXIT_S = 20.0
_context = multiprocessing.get_context("forkserver")


def preload(noop: bool) -> None:
    """What the fork server imports before the first member is started."""
    stages = ["encoder_svc.stage", "denoise_svc.stage", "decoder_svc.stage"]
    _context.set_forkserver_preload(
        ["common.stage_main", "services.coordinator.build", *([] if noop else stages)]
    )


# -- in a member's process ---------------------------------------------------------------------


def _settle_in(name: str, folder: Path, level: str) -> Journal:
    """Its output goes to a log file; it does not outlive the harness."""
    from common.logs import set_up

    log = os.open(folder / "logs" / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    set_up(level)
    threading.Thread(target=_end_with_harness, args=(os.getppid(),), daemon=True).start()
    return Journal(folder / "journal", name)


def _end_with_harness(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def _worker(name: str, folder: Path, kind: str, settings: dict[str, Any]) -> None:
    import common.stage_main as stage_main
    from common.settings import Settings

    made = Settings(**settings)
    journal = _settle_in(name, folder, made.log_level)
    plain = stage_main.make_stage

    def journaled(kind: str, settings: Settings, store: Any) -> Any:
        return JournaledStage(plain(kind, settings, store), journal)

    stage_main.make_stage = journaled
    stage_main.serve(kind, made)


def _coordinator(name: str, folder: Path, settings: dict[str, Any]) -> None:
    from common.connect import blocking
    from common.settings import Settings
    from services.coordinator.build import build

    made = Settings(**settings)
    journal = _settle_in(name, folder, made.log_level)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    coordinator = build(made, blocking(made.redis_url))
    journal.write("nonce", coordinator.transitions.nonce.partition(":")[0])
    coordinator.run(stopping.is_set)


def _pusher(url: str, prefix: str, job: str, params: dict[str, Any]) -> None:
    from common.client import Client

    Client(url, prefix=prefix).submit(**params, id=job)


# -- from outside ------------------------------------------------------------------------------


@dataclass(slots=True)
class Member:
    """A place in the pool and the process that fills it now."""

    name: str
    role: str
    link: Link
    process: BaseProcess | None = None
    frozen: bool = False
    leaving: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid or 0 if self.process is not None else 0

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive()

    @property
    def is_well(self) -> bool:
        return self.is_alive and not self.frozen and not self.leaving

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.join(EXIT_S)


class Members:
    """Redis with an append-only file, `coordinators`, and `workers` (stage, number)."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        coordinators: int,
        workers: Sequence[tuple[str, int]],
    ) -> None:
        for part in ("logs", "journal", "redis"):
            (folder / part).mkdir()
        self.folder, self.keys = folder, Keys()
        self.port = redis_server.choose_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.proxy = Proxy(self.port)
        self.client_link = self.proxy.link()
        self.settings = {**settings, "arena_path": str(folder / "arena"), "host": "chaos"}
        self.redis_frozen = False
        # For what goes on under faults, and for what is counted afterwards on a busy machine.
        self.direct = quick(self.url)
        self.checker: Any = connect.plain(self.url, 5.0, 5.0)
        self.started: list[int] = []  # pids
        self._redis: subprocess.Popen[bytes] | None = None
        self._leader = ""
        roles = [COORDINATOR] * coordinators
        for stage, count in workers:
            roles += [stage] * count
        self.all = [Member(f"{role}-{i}", role, self.proxy.link()) for i, role in enumerate(roles)]

    # -- Redis ---------------------------------------------------------------------------

    def start_redis(self) -> None:
        program = redis_server.find_server()
        with open(self.folder / "logs" / "redis.log", "ab") as log:
            self._redis = subprocess.Popen(
                redis_server.command(program, self.port, self.folder / "redis"), stdout=log
            )
        self.started.append(self._redis.pid)

    def kill_redis(self) -> int:
        assert self._redis is not None
        self._redis.kill()
        self._redis.wait()
        return self._redis.pid

    def signal_redis(self, number: int) -> int:
        assert self._redis is not None
        self._redis.send_signal(number)
        self.redis_frozen = number == signal.SIGSTOP
        return self._redis.pid

    @property
    def redis_is_well(self) -> bool:
        return self._redis is not None and self._redis.poll() is None and not self.redis_frozen

    def await_redis(self, patience_s: float = 30.0) -> None:
        until(self._answers, patience_s, "Redis")

    def _answers(self) -> bool:
        try:
            return bool(self.direct.ping())
        except (redis.RedisError, OSError):
            return False

    # -- members -------------------------------------------------------------------------

    def start(self, member: Member) -> None:
        member.link.mend()
        member.frozen = member.leaving = False
        settings = {**self.settings, "redis_url": f"redis://127.0.0.1:{member.link.port}/0"}
        args: tuple[Any, ...] = (member.name, self.folder)
        target: Callable[..., None] = _coordinator
        if member.role == COORDINATOR:
            args = (*args, settings)
        else:
            target, args = _worker, (*args, member.role, settings)
        member.process = _context.Process(target=target, args=args)
        member.process.start()
        self.started.append(member.pid)

    def start_all(self, patience_s: float = 120.0) -> None:
        self.start_redis()
        self.await_redis()
        for member in self.all:
            self.start(member)
        workers = sum(member.role != COORDINATOR for member in self.all)
        until(lambda: self.checker.scard(self.keys.workers) == workers, patience_s, "all workers")
        until(lambda: self.checker.exists(self.keys.leader), patience_s, "a leader")

    def of(self, *roles: str) -> list[Member]:
        return [member for member in self.all if member.role in roles and member.is_well]

    def leader(self) -> Member | None:
        """Who leads, or led when that was last known; None if that one is not well."""
        with contextlib.suppress(redis.RedisError, OSError):
            nonce: Any = self.direct.get(self.keys.leader)
            if nonce:
                self._leader = nonce.decode().partition(":")[0]
        for member in self.of(COORDINATOR):
            journal = self._journal(member)
            if journal.exists() and self._leader and self._leader in journal.read_text():
                return member
        return None

    def is_busy(self, worker: Member) -> bool:
        """Whether it is in a task, by its journal."""
        return is_in_task(self._journal(worker))

    def _journal(self, member: Member) -> Path:
        return self.folder / "journal" / f"{member.name}.{member.pid}"

    def push_and_die(self, job: str, params: dict[str, Any], link: Link) -> BaseProcess:
        """A client of its own that pushes over `link`; the caller kills it."""
        args = (f"redis://127.0.0.1:{link.port}/0", self.keys.prefix, job, params)
        process = _context.Process(target=_pusher, args=args)
        process.start()
        self.started.append(process.pid or 0)
        return process

    def stop(self) -> list[str]:
        """Drain everything, workers first; what did not end well, in words."""
        bad = []
        for coordinators in (False, True):
            group = [m for m in self.all if (m.role == COORDINATOR) == coordinators and m.process]
            for member in group:
                member.signal(signal.SIGTERM)
            for member in group:
                assert member.process is not None
                member.process.join(EXIT_S)
                if member.process.exitcode != 0:
                    bad.append(f"{member.name} ended with {member.process.exitcode}")
        return bad

    def close(self) -> None:
        """End what is left, however it stands."""
        for member in self.all:
            if member.is_alive:
                member.kill()
        if self._redis is not None and self._redis.poll() is None:
            self._redis.send_signal(signal.SIGCONT)
            self._redis.terminate()
            self._redis.wait(EXIT_S)
        self.direct.close()
        self.checker.close()
        self.proxy.close()

    def left(self) -> list[int]:
        """Pids of started processes that still run."""
        return [pid for pid in self.started if pid and _runs(pid)]


def quick(url: str) -> Any:
    """A connection that gives up within half a second."""
    return redis.Redis.from_url(
        url, socket_timeout=0.5, socket_connect_timeout=0.5, retry=Retry(NoBackoff(), 0), protocol=2
    )


def until(condition: Callable[[], Any], patience_s: float, what: str) -> bool:
    end = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end:
            print(f"waited {patience_s:.0f} s in vain for {what}", file=sys.stderr)
            return False
        time.sleep(0.02)
    return True


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(") ")[2][0] not in "ZX"
