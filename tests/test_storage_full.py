"""No room: in the arena, in Redis, in both, on tmpfs before the start, or for one file alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common import reporting
from common.arena import Arena
from common.client import Client
from common.errors import JobRefused
from common.keys import Keys
from common.noop import NoopCosts
from common.stage import Outcome, Output
from services.cli.main import main
from services.cli.terminal import Exit
from tests.processes import Processes, processes, until

# States too large for a handle, and time to change the world while one is made.
SLOW = "encode_ms=800,step_ms=5,state_kb=64"


@pytest.fixture
def pool(redis_server: str, redis_client: Any, keys: Keys, arena_path: str) -> Iterator[Processes]:
    more = {"noop": SLOW, "arena_bytes": 2 << 20}
    with processes(redis_server, redis_client, keys, arena_path, **more) as made:
        yield made
        redis_client.config_set("maxmemory", 0)


@pytest.fixture
def arena(pool: Processes) -> Iterator[Arena]:
    with Arena.open(pool.settings["arena_path"], pool.settings["arena_bytes"]) as opened:
        yield opened


def fill(arena: Arena) -> list[Any]:
    """Every block of it."""
    taken = []
    while (extent := arena.alloc(arena.stats().largest_free_bytes or 1, "hog")) is not None:
        taken.append(extent)
    return taken


def fill_redis(pool: Processes) -> None:
    used: Any = pool.client.info("memory")["used_memory"]
    pool.client.config_set("maxmemory", max(1, used - 100_000))


def test_a_full_arena_spills_and_costs_no_job(pool: Processes, arena: Arena) -> None:
    """Into Redis, in pieces; and what was spilled is freed like the rest."""
    hog = fill(arena)
    pool.pool()
    pool.push("a", steps=12)
    pool.wait_for_event("a", "chunk")
    spilled = list(pool.client.scan_iter(f"{pool.keys.prefix}latents:a:*"))
    assert spilled
    assert all(pool.client.ttl(key) > 0 for key in spilled)
    pool.check("a", steps=12)
    pool.drained()
    until(lambda: not list(pool.client.scan_iter(f"{pool.keys.prefix}latents:*")), "no spill")
    for extent in hog:
        arena.free(extent)


def test_with_no_room_anywhere_a_job_fails_in_words_and_the_next_goes_on(
    pool: Processes, arena: Arena
) -> None:
    """Redis at maxmemory too: the first has nowhere to leave its state, three times. Then there is
    room in the arena again, and the one behind it ends well on the same workers, though Redis
    still takes no new jobs."""
    pool.settings.update(max_attempts=1)
    _, (denoiser,) = pool.pool()
    pool.push("a")
    pool.push("b")
    pool.wait_for_event("a", "running")
    until(lambda: not pool.client.xlen(pool.keys.jobs), "both are in")
    hog = fill(arena)
    fill_redis(pool)
    result = pool.result("a")
    for extent in hog:
        arena.free(extent)
    assert (result.status, result.error_code) == ("failed", "storage_full")
    assert "no room for latents of job a" in result.error
    with (
        Client(pool.settings["redis_url"], prefix=pool.keys.prefix) as client,
        pytest.raises(JobRefused) as refused,
    ):
        client.submit("c")
    assert refused.value.error_code == "queue_full"
    pool.check("b")
    assert denoiser.is_alive()
    assert pool.client.scard(pool.keys.workers) == 3
    pool.client.config_set("maxmemory", 0)
    pool.drained()
    until(lambda: arena.stats().claims == 0, "an empty arena")


def test_an_arena_that_does_not_fit_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with what there is, what was asked for and what to do; and nothing is left."""
    flags = ("--noop", "0", "--arena-bytes", str(1 << 50), "--state-dir", str(tmp_path / "state"))
    assert main(["up", *flags]) == Exit.FAILED
    said = capsys.readouterr()
    assert "--arena-bytes 1125899906842624: the arena " in said.err
    assert "wants 1048576.0 GiB, but " in said.err
    assert "ask for a smaller arena" in said.err
    assert "Traceback" not in said.err
    assert len(said.err.splitlines()) == 1


def test_a_file_that_redis_cannot_take_fails_its_job_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sent, it would end the worker's connection, again and again, for ever."""
    monkeypatch.setattr(reporting, "MOST_FILE_BYTES", 1000)
    small, large = (Output(bytes(size), "video/mp4", 1, 1) for size in (1000, 1001))
    good = Outcome("a", outputs=[small, small])
    assert reporting.deliverable(good) is good
    bad = reporting.deliverable(Outcome("b", outputs=[small, large]))
    assert (bad.error_code, bad.outputs) == ("storage_full", [])
    assert "1001 bytes; Redis takes 1000 at most" in bad.error


def test_no_op_states_may_be_given_a_size(arena: Arena) -> None:
    from common.handles import HandleStore
    from common.noop import NoopStage
    from common.stage import ENCODE, Row, Task

    store = HandleStore("here", arena, inline_bytes=64)
    sizes = []
    for state_kb in (0, 64):
        stage = NoopStage(ENCODE, store, NoopCosts.parse(f"encode_ms=0,state_kb={state_kb}"))
        row = Row("a", {"prompt": "x", "seed": 1})
        (outcome,) = stage.run(Task(1, ENCODE, "noop", (row,)), {}, None)  # type: ignore[arg-type]
        handle = outcome.handles["latents"]
        sizes.append((handle.where, handle.nbytes >= 1024 * state_kb))
        store.free(handle)
    assert sizes == [("inline", True), ("arena", True)]
