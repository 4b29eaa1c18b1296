"""The examples run as they are, on a pool of stages that only wait."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.connect import writing
from common.settings import Settings
from services.pool.local import LocalPool
from services.pool.redis_server import find_server
from tests.servers import free_port

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RUN_S = 120


@pytest.fixture(scope="module")
def pool(redis_server: str) -> Iterator[LocalPool]:
    """A pool under the usual prefix, with HTTP."""
    settings = Settings(noop="step_ms=20", arena_bytes=4 << 20, http_port=free_port())
    with LocalPool(settings=settings, redis_url=redis_server, http=True) as running:
        yield running
    with writing(redis_server) as left:
        left.flushall()


def _run(*command: str, folder: Path, **environment: str) -> str:
    said = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), **environment},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=RUN_S,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout
    return said.stdout


def test_redis_cli_alone_pushes_follows_and_fetches(pool: LocalPool, tmp_path: Path) -> None:
    """A shell script sees what happens and saves the very bytes of the output."""
    port = pool.redis_url.rpartition(":")[2].partition("/")[0]
    redis_cli = Path(find_server()).parent / "redis-cli"
    said = _run(
        str(EXAMPLES / "push_redis_cli.sh"), "a red circle", "out.bin",
        folder=tmp_path, REDIS_CLI=f"{redis_cli} -p {port}",
    ).split()  # fmt: skip
    assert (said[0], said[2], said[3]) == ("job", "queued", "running")
    assert said[-2:] == ["succeeded", "out.bin"]
    with pool.client() as client:
        # redis-cli ends what it prints with a newline of its own.
        assert (tmp_path / "out.bin").read_bytes() == client.job(said[1]).output() + b"\n"


def test_redis_cli_alone_says_what_was_wrong(pool: LocalPool, tmp_path: Path) -> None:
    """A push that is refused ends the script with the reason, it does not wait for ever."""
    port = pool.redis_url.rpartition(":")[2].partition("/")[0]
    redis_cli = Path(find_server()).parent / "redis-cli"
    said = subprocess.run(
        [str(EXAMPLES / "push_redis_cli.sh"), "", "out.bin"], cwd=tmp_path, timeout=RUN_S,
        env={**os.environ, "REDIS_CLI": f"{redis_cli} -p {port}"}, capture_output=True, text=True,
    )  # fmt: skip
    assert said.returncode == 1
    assert "failed: prompt" in said.stderr


def test_the_asyncio_client_runs_several_jobs_at_once(pool: LocalPool, tmp_path: Path) -> None:
    said = _run(sys.executable, str(EXAMPLES / "async_client.py"), pool.redis_url, folder=tmp_path)
    assert said.count("succeeded, on time: True") == 2
    assert "a picture nobody waits for: canceled" in said
    assert "refused: " in said
    assert "33 is not a multiple of 16" in said


def test_events_come_over_http(pool: LocalPool, tmp_path: Path) -> None:
    script = str(EXAMPLES / "images_sse.py")
    said = _run(sys.executable, script, pool.http_url, "star.png", folder=tmp_path)
    steps = [int(line.split()[1]) for line in said.splitlines() if line.endswith(" of 12")]
    assert steps
    assert steps == sorted(set(steps))
    assert "succeeded, on time: True" in said
    assert (tmp_path / "star.png").stat().st_size > 0


def test_openais_client_is_served_unmodified(pool: LocalPool, tmp_path: Path) -> None:
    """Pictures in the answer and by address, and errors as that client's own exceptions."""
    script = str(EXAMPLES / "http_openai.py")
    said = _run(sys.executable, script, pool.http_url, folder=tmp_path)
    assert "b64_json: 128x128" in said
    assert f"url: {pool.http_url}/v1/jobs/" in said
    assert "BadRequestError: param 'width'" in said
    assert "NotFoundError" in said
