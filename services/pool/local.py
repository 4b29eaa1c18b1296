"""A whole pool on this machine, as a context manager: for `slackwater up`, tests, benchmarks.

    with LocalPool(denoisers=2, settings=Settings(noop="step_ms=50")) as pool:
        print(pool.client().submit("a red circle").wait().status)

Everything it starts ends with it: on `stop()`, when this process ends, and (on Linux) when this
process is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from redis.exceptions import RedisError

from common.arena import Arena, ArenaError
from common.handed import HTTP_FDS
from common.keys import Keys
from common.metrics.http import listen as listen_metrics
from common.settings import Settings, from_command_line
from common.stage import DECODE, DENOISE, ENCODE, STAGES
from services.pool import redis_server
from services.pool.arena_dir import arena_dir
from services.pool.child import LONGEST_PAUSE_S, Child
from services.pool.gateway import PortTaken, address, listen
from services.pool.state_dir import Address, StateDir
from services.pool.supervisor import (
    CELERY,
    COORDINATOR,
    GATEWAY,
    REDIS,
    PoolError,
    Supervisor,
    orphan_signal,
)

if TYPE_CHECKING:
    from common.client import Client

__all__ = ["LocalPool", "PoolError", "Process"]

log = logging.getLogger("slackwater.pool")

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = {
    ENCODE: "encoder_svc",
    DENOISE: "denoise_svc",
    DECODE: "decoder_svc",
    COORDINATOR: "services.coordinator",
    GATEWAY: "services.gateway",
    CELERY: "services.celery_app",
}
# Loading a large model from a cold disk takes minutes; a broken one says so at once.
START_S = 600.0
STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Process:
    """One running child as `slackwater up` lists it."""

    name: str
    role: str
    pid: int
    log: Path


class LocalPool:
    """Redis (unless a URL is given), coordinators and workers, all on this machine.

    `state_dir` keeps Redis' data and the logs, so that what was queued goes on at the next
    start; None stands for a temporary one. `port` is tried first for the pool's own Redis. `http`
    starts a gateway too, at the settings' http_host and http_port; `celery` what Celery's programs,
    webhooks and uploads need.
    `start` waits until every worker has registered, `start_s` seconds at most; `stop` gives
    running chunks `stop_s` seconds. What dies again and again is started again after growing
    pauses, `longest_pause_s` at most. `say` hears one line for each thing worth knowing.
    """

    def __init__(
        self,
        encoders: int = 1,
        denoisers: int = 1,
        decoders: int = 1,
        settings: Settings | None = None,
        redis_url: str | None = None,
        *,
        coordinators: int = 1,
        http: bool = False,
        celery: bool = False,
        state_dir: str | Path | None = None,
        port: int | None = None,
        start_s: float = START_S,
        stop_s: float = STOP_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self._counts = {ENCODE: encoders, DENOISE: denoisers, DECODE: decoders}
        for name, count in self._counts.items():
            if count < 0:
                raise ValueError(f"{name}: {count} workers; 0 or more are possible")
        self._coordinators, self._http, self._celery = coordinators, http, celery
        self._given_settings = settings or from_command_line("slackwater", [])
        self._given_url, self._port = redis_url, port
        self._temporary = state_dir is None
        self._start_s, self._stop_s, self._say = start_s, stop_s, say
        self._longest_pause_s = longest_pause_s
        self.state_dir = Path(state_dir or ".")
        self._kept = None if state_dir is None else StateDir(self.state_dir)
        self.settings = self._given_settings
        self._arena_dir: Path | None = None
        self._arena_lock = -1
        self._sockets: list[socket.socket] = []  # the gateway's
        self._owner = 0  # the process that started it: a forked child must not stop it
        self._supervisor: Supervisor | None = None

    # -- life ----------------------------------------------------------------------------

    def start(self) -> Self:
        """Start everything and wait until it is ready.

        Raises PoolError (nothing is left running then), RedisNotFound, StateDirTaken.
        """
        if self._supervisor is not None:
            raise PoolError("this pool has been started already")
        if self._temporary:
            self.state_dir = Path(tempfile.mkdtemp(prefix="slackwater-"))
        if self._kept is not None:
            self._kept.lock()
        try:
            self._prepare()
        except BaseException:
            self._clear()
            raise
        self._owner = os.getpid()
        atexit.register(self.stop)
        assert self._supervisor is not None
        self._supervisor.start()
        try:
            self.wait_settled(self._start_s)
        except BaseException:
            self.stop()
            raise
        if self._kept is not None:
            self._kept.write(
                Address(
                    pid=os.getpid(),
                    redis_url=self.redis_url,
                    prefix=self.settings.prefix,
                    host=self.settings.host,
                    log_dir=str(self.log_dir),
                )
            )
        return self

    def stop(self) -> None:
        """Drain the workers, stop the rest, leave nothing behind. Safe to call twice."""
        atexit.unregister(self.stop)
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None or self._owner != os.getpid():
            return
        waiting = self._active_jobs(supervisor)
        supervisor.stop()
        if supervisor.ident is not None:
            supervisor.join()
        self._clear(keep_states=bool(waiting) and not self._temporary)
        if waiting and not self._temporary:
            self._say(
                f"{waiting} job(s) had not ended; they go on where they were at the next start"
            )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # -- what is there -------------------------------------------------------------------

    @property
    def redis_url(self) -> str:
        return self.settings.redis_url

    @property
    def http_url(self) -> str:
        """Where the gateway is, "" without one."""
        return address(self.settings) if self._http else ""

    @property
    def keys(self) -> Keys:
        return Keys(self.settings.prefix)

    def client(self) -> Client:
        """A new client of this pool; the caller closes it."""
        from common.client import Client

        return Client(self.redis_url, prefix=self.settings.prefix)

    def workers(self, stage: str) -> list[int]:
        """Pids of a stage's workers, oldest first; those that are leaving are not listed."""
        return [child.pid for child in self._running().of(_stage(stage)) if child.pid]

    def processes(self) -> list[Process]:
        """All running children, Redis first."""
        roles = (REDIS, COORDINATOR, *STAGES, GATEWAY, CELERY)
        children = [child for role in roles for child in self._running().of(role)]
        return [Process(c.name, c.role, c.pid, c.log) for c in children if c.pid]

    def wait_for_end(self) -> None:
        """Block until `slackwater down` is called for this host. Raises what made the pool fail."""
        supervisor = self._running()
        while not supervisor.down_asked.wait(0.5):
            if supervisor.over.is_set():
                raise supervisor.failure or PoolError("the pool has ended")

    def kill_workers(self) -> None:
        """Have no patience with running chunks: kill -9, which loses nothing."""
        if self._supervisor is not None:
            for child in list(self._supervisor.children):
                if child.role in STAGES and child.process is not None:
                    child.process.kill()

    # -- changing it ---------------------------------------------------------------------

    def scale(self, stage: str, count: int, wait_s: float = 60.0) -> None:
        """Have `count` workers of a stage. Waits until new ones are ready and old ones gone.

        Raises PoolError after `wait_s` seconds (0: does not wait); the wish stands.
        """
        if count < 0:
            raise ValueError(f"{count} workers; 0 or more are possible")
        self._running().want(_stage(stage), count)
        if wait_s > 0:
            self.wait_settled(wait_s)

    def wait_settled(self, timeout_s: float) -> None:
        """Wait until what runs is what is wanted. Raises PoolError."""
        supervisor = self._running()
        settled = supervisor.settled.wait(timeout_s)
        if supervisor.failure is not None:
            raise supervisor.failure
        if not settled:
            late = [c for c in supervisor.children if not c.ready or c.leaving]
            names = ", ".join(c.name for c in late)
            last = "".join(f"\n{c.log} ends:\n{c.last_words()}" for c in late[:1])
            raise PoolError(f"after {timeout_s:.0f} s these are not ready yet: {names}{last}")

    def _running(self) -> Supervisor:
        if self._supervisor is None:
            raise PoolError("this pool is not running; call start()")
        return self._supervisor

    # -- making it -----------------------------------------------------------------------

    def _prepare(self) -> None:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for old in self.log_dir.glob("*.log"):
            old.unlink()
        given = self._given_settings
        changed = {}
        if given.arena_path == Settings.model_fields["arena_path"].get_default():
            self._arena_dir, self._arena_lock = arena_dir(
                None if self._temporary else self.state_dir
            )
            changed["arena_path"] = str(self._arena_dir / "arena")
        server, port = "", 0
        if self._given_url is None:
            server, port = redis_server.find_server(), redis_server.choose_port(self._port)
            changed["redis_url"] = f"redis://127.0.0.1:{port}/0"
        else:
            changed["redis_url"] = self._given_url
        self.settings = settings = given.model_copy(update=changed)
        if self._http:
            self._listen()
        if any(self._counts.values()):
            self._make_arena()
        environment = _environment(settings)
        data = self.state_dir / "redis"

        def make(role: str, index: int) -> Child:
            name = role if role == REDIS else f"{role}-{index}"
            command = [sys.executable, "-m", MODULES.get(role, "")]
            if role == REDIS:
                data.mkdir(exist_ok=True)
                command = redis_server.command(server, port, data)
            env = environment
            if role in STAGES:
                env = {**environment, "SLACKWATER_DEVICE": _device(settings.device, index)}
            sockets = [each.fileno() for each in self._sockets] if role == GATEWAY else []
            if role == GATEWAY:
                handed = {HTTP_FDS: " ".join(map(str, sockets))}
                env = {**environment, **handed, "SLACKWATER_HTTP_KEYS": settings.http_keys}
            if role == CELERY:
                env = {**environment, "SLACKWATER_WEBHOOK_SECRET": settings.webhook_secret}
            tells = settings.metrics_port > 0 and role != REDIS
            log_file = self.log_dir / f"{name}.log"
            return Child(
                name, command, env, log_file, role=role, orphan_signal=orphan_signal(role),
                longest_pause_s=self._longest_pause_s, sockets=sockets,
                announces=role in (COORDINATOR, GATEWAY, CELERY),
                listen=partial(listen_metrics, settings) if tells else None,
            )  # fmt: skip

        counts = {
            REDIS: 1 if server else 0,
            COORDINATOR: self._coordinators,
            **self._counts,
            GATEWAY: int(self._http),
            CELERY: int(self._celery),
        }
        self._supervisor = Supervisor(
            make, settings.redis_url, self.keys, settings.host, counts, self._stop_s, self._say
        )

    def _make_arena(self) -> None:
        """Now, and not by the first worker: one that does not fit is said at once, in a line."""
        try:
            Arena.open(self.settings.arena_path, self.settings.arena_bytes).close()
        except ArenaError as error:
            raise PoolError(f"--arena-bytes {self.settings.arena_bytes}: {error}") from error

    def _listen(self) -> None:
        """Here, not in the gateway: the port stays open while one gateway follows another."""
        try:
            self._sockets = listen(self.settings)
        except PortTaken as error:
            raise PoolError(str(error)) from error

    @property
    def log_dir(self) -> Path:
        return self.state_dir / "logs"

    def _active_jobs(self, supervisor: Supervisor) -> int:
        try:
            return int(supervisor._redis.scard(self.keys.active))  # type: ignore[arg-type]
        except (RedisError, OSError):
            return 0

    def _clear(self, keep_states: bool = False) -> None:
        if self._arena_dir is not None and not keep_states:
            shutil.rmtree(self._arena_dir, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty: another pool of this host
                self._arena_dir.parent.rmdir()
        if self._arena_lock >= 0:
            os.close(self._arena_lock)
            self._arena_lock = -1
        while self._sockets:
            self._sockets.pop().close()
        if self._temporary:
            shutil.rmtree(self.state_dir, ignore_errors=True)
        if self._kept is not None:
            self._kept.release()


def _stage(name: str) -> str:
    if name not in STAGES:
        raise ValueError(f"stage {name!r} is none of {', '.join(STAGES)}")
    return name


def _device(devices: str, index: int) -> str:
    """One of "cuda:0,cuda:1" for the worker with this index, from 1, in turn."""
    names = [name.strip() for name in devices.split(",") if name.strip()]
    return names[(index - 1) % len(names)] if names else devices


def _environment(settings: Settings) -> dict[str, str]:
    """This process' environment with every setting in it, and one thread that sleeps."""
    values = {f"SLACKWATER_{k.upper()}": str(v) for k, v in settings.model_dump().items()}
    values["SLACKWATER_HTTP_KEYS"] = ""  # the gateway's alone
    values["SLACKWATER_WEBHOOK_SECRET"] = ""  # the sender's alone
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {
        **os.environ,
        **values,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(settings.threads),
        "MKL_NUM_THREADS": str(settings.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
