"""A master, a replica and Sentinels that watch them, as real processes of a test."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from common.connect import writing
from tests.processes import until
from tests.servers import RedisServer, binary, free_port

SERVICE = "themaster"
# How long the Sentinels watch a silent master before they call it down.
DOWN_MS = 2000
QUORUM, SENTINELS = 2, 3


class Watched:
    """`url` asks the Sentinels; `master` and `replica` are as they began."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.master = self._server("master")
        port = self.master.port
        self.replica = self._server("replica", "--replicaof", "127.0.0.1", str(port))
        self._ports = [free_port() for _ in range(SENTINELS)]
        self._sentinels = [self._sentinel(i, port) for i in range(SENTINELS)]
        self.hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        self.url = f"sentinel://{self.hosts}/{SERVICE}/0"

    def _server(self, name: str, *options: str) -> RedisServer:
        (self._folder / name).mkdir()
        # A replica that begins at once, not with the next five seconds' batch.
        return RedisServer(str(self._folder / name), "--repl-diskless-sync-delay", "0", *options)

    def _sentinel(self, index: int, master_port: int) -> subprocess.Popen[bytes]:
        file = self._folder / f"sentinel-{index}.conf"
        file.write_text(
            f"port {self._ports[index]}\nbind 127.0.0.1\ndir {self._folder}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {master_port} {QUORUM}\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_MS}\n"
            f"sentinel failover-timeout {SERVICE} 3000\n"
        )
        return subprocess.Popen([binary(), str(file), "--sentinel"], stdout=subprocess.DEVNULL)

    def until_watched(self) -> None:
        """The replica follows, and every Sentinel knows it and the others."""
        with contextlib.closing(writing(self.master.url)) as client:
            until(lambda: _replicas_in_step(client), "the replica to follow")
        for port in self._ports:
            with contextlib.closing(writing(f"redis://127.0.0.1:{port}/0")) as sentinel:
                until(lambda: _knows_all(sentinel), "a Sentinel to know all")

    def questions(self) -> int:
        """How many commands the Sentinels had to answer: their own, and the pool's."""
        asked = 0
        for port in self._ports:
            with contextlib.closing(writing(f"redis://127.0.0.1:{port}/0")) as sentinel:
                stats: Any = sentinel.info("stats")
                asked += stats["total_commands_processed"]
        return asked

    def kill_master(self) -> None:
        """kill -9."""
        self.master.kill()

    def close(self) -> None:
        for sentinel in self._sentinels:
            sentinel.kill()
            sentinel.wait()
        for server in (self.master, self.replica):
            with contextlib.suppress(ProcessLookupError):
                server.kill()


def _replicas_in_step(client: Any) -> bool:
    info: Any = client.info("replication")
    return bool(info["connected_slaves"] == 1 and info["slave0"]["state"] == "online")


def _knows_all(sentinel: Any) -> bool:
    try:
        raw: Any = sentinel.execute_command("SENTINEL", "MASTERS")
    except redis.RedisError:
        return False
    [said] = raw if isinstance(raw, list) else raw.values()
    fields = said if isinstance(said, dict) else dict(zip(said[::2], said[1::2], strict=True))
    known = {_text(k): _text(v) for k, v in fields.items()}
    return (known["num-slaves"], known["num-other-sentinels"]) == ("1", str(SENTINELS - 1))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """Closed after the block."""
    with tempfile.TemporaryDirectory(prefix="slackwater-sentinel-") as folder:
        made = Watched(Path(folder))
        try:
            made.until_watched()
            yield made
        finally:
            made.close()
