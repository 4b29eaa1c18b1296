"""The arena: no byte has two owners, none is lost, whoever is killed and whenever."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

import common.arena
from common.arena import OWNER_BYTES, Arena, ArenaError, Extent, owner_name
from common.arena_file import Word

BLOCK = 4096
MANY_BLOCKS_BYTES = 64 * BLOCK
ROOT = Path(__file__).parent.parent


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with Arena.open(str(tmp_path / "arena"), MANY_BLOCKS_BYTES, block_bytes=BLOCK) as opened:
        yield opened


def assert_sound(arena: Arena, *, at_rest: bool = True) -> None:
    """Extents of different blocks do not overlap; at rest, the used count is their sum."""
    spans = {
        (e.offset, e.offset + max(1, -(-e.nbytes // BLOCK)) * BLOCK) for _, e, _ in arena.owners()
    }
    ordered = sorted(spans)
    for (_, end), (start, _) in itertools.pairwise(ordered):
        assert end <= start
    if at_rest:
        assert arena.stats().used_bytes == sum(end - start for start, end in spans)


def test_a_block_keeps_what_was_written_until_it_is_freed(arena: Arena) -> None:
    extent = arena.alloc(10_000, "job-1")
    assert extent is not None
    arena.view(extent)[:] = b"x" * 10_000
    with Arena.open(arena.path) as other:
        assert bytes(other.view(extent)) == b"x" * 10_000
        assert other.free(extent)
    with pytest.raises(ArenaError, match="was freed"):
        arena.view(extent)


def test_a_stale_free_never_touches_a_newer_block(arena: Arena) -> None:
    old = arena.alloc(BLOCK, "old")
    assert old is not None
    assert arena.free(old)
    new = arena.alloc(BLOCK, "new")
    assert new is not None
    assert new.offset == old.offset
    assert not arena.free(old)
    assert arena.is_live(new)


def test_a_full_arena_says_none_and_recovers(arena: Arena) -> None:
    held = []
    while (extent := arena.alloc(5 * BLOCK, "greedy")) is not None:
        held.append(extent)
    assert arena.stats().refused == 1
    for extent in held:
        arena.free(extent)
    stats = arena.stats()
    assert stats.used_bytes == 0
    assert stats.largest_free_bytes == stats.size_bytes
    assert stats.high_water_bytes == len(held) * 5 * BLOCK
    assert arena.alloc(stats.size_bytes, "all of it") is not None


def test_a_sweep_frees_orphans_but_no_block_that_may_still_be_written(arena: Arena) -> None:
    for owner in ("dead", "dead", "alive"):
        arena.alloc(100, owner)
    assert arena.free_owned_by(lambda owner: owner == "dead") == 0
    assert arena.free_owned_by(lambda owner: owner == "dead", min_age_s=0.0) == 2
    assert [owner for owner, _, _ in arena.owners()] == ["alive"]


def test_owners_are_short_and_long_job_ids_keep_apart(arena: Arena) -> None:
    long_a, long_b = "é" * 200 + "a", "é" * 200 + "b"
    assert owner_name("short") == "short"
    assert owner_name(long_a) != owner_name(long_b)
    assert len(owner_name(long_a).encode()) <= OWNER_BYTES
    arena.alloc(1, owner_name(long_a))
    with pytest.raises(ValueError, match="owner_name"):
        arena.alloc(1, long_a)


def test_a_file_system_that_is_too_small_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    with pytest.raises(ArenaError, match=r"wants .* has .* free; .*--shm-size"):
        Arena.open(str(path), size_bytes=1 << 46)
    assert path.stat().st_size == 0, "its pages are given back"


def test_a_file_that_is_no_arena_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_bytes(b"precious" * 1000)
    with pytest.raises(ArenaError, match="not an arena"):
        Arena.open(str(path), MANY_BLOCKS_BYTES)
    assert path.read_bytes() == b"precious" * 1000


def test_a_path_that_cannot_be_written_says_what_it_has_to_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArenaError, match="as one user on one tmpfs"):
        Arena.open(str(tmp_path / "file" / "arena"), MANY_BLOCKS_BYTES)


def test_a_creator_killed_half_way_leaves_a_file_that_the_next_one_finishes(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    path.write_bytes(bytes(10_000))
    with Arena.open(str(path), MANY_BLOCKS_BYTES, block_bytes=BLOCK) as arena:
        assert arena.alloc(BLOCK, "job") is not None


def test_an_arena_made_anew_has_another_id(tmp_path: Path) -> None:
    path = str(tmp_path / "arena")
    with Arena.open(path, MANY_BLOCKS_BYTES, block_bytes=BLOCK) as old:
        old.unlink()
        with Arena.open(path, MANY_BLOCKS_BYTES, block_bytes=BLOCK) as new:
            assert new.id != old.id
            old.unlink()
            assert os.path.exists(path), "the old one may not unlink the new one's file"


def test_one_of_many_openers_creates_and_all_share(tmp_path: Path) -> None:
    path, ids = str(tmp_path / "arena"), []

    def attach() -> None:
        with Arena.open(path, MANY_BLOCKS_BYTES, block_bytes=BLOCK) as arena:
            ids.append(arena.id)

    threads = [threading.Thread(target=attach) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 12
    assert len(set(ids)) == 1


def test_threads_of_one_process_get_different_blocks(arena: Arena) -> None:
    clashes = []

    def work(name: str) -> None:
        for _ in range(200):
            extent = arena.alloc(BLOCK, name)
            if extent is None:
                continue
            arena.view(extent)[:8] = name.encode().ljust(8)
            time.sleep(0)
            if bytes(arena.view(extent)[:8]).strip() != name.encode():
                clashes.append(name)
            arena.free(extent)

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    assert arena.stats().used_bytes == 0


class ArenaMachine(RuleBasedStateMachine):
    """Any order of alloc, retain, free, stale free and crashed writers against a plain model."""

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.path = f"/dev/shm/slackwater-test-{os.getpid()}-{id(self)}"
        self.arena = Arena.open(self.path, 24 * BLOCK, block_bytes=BLOCK)
        self.live: dict[Extent, bytes] = {}  # claim -> what its bytes should be
        self.stamp = 0

    def teardown(self) -> None:
        for extent in self.live:
            assert self.arena.free(extent)
        assert self.arena.stats().used_bytes == 0
        assert self.arena.stats().claims == 0
        self.arena.unlink()
        self.arena.close()

    @rule(target=claims, nbytes=st.integers(0, 6 * BLOCK))
    def alloc(self, nbytes: int) -> Extent | None:
        room = self.arena.stats().largest_free_bytes
        extent = self.arena.alloc(nbytes, "model")
        if extent is None:
            assert room < max(nbytes, 1)
            return None
        self.stamp += 1
        content = (self.stamp.to_bytes(4, "little") * (nbytes // 4 + 1))[:nbytes]
        self.arena.view(extent)[:] = content
        self.live[extent] = content
        return extent

    @rule(extent=consumes(claims))
    def free(self, extent: Extent | None) -> None:
        if extent is not None:
            assert self.arena.free(extent) == (self.live.pop(extent, None) is not None)
            assert not self.arena.free(extent)

    @rule()
    def maps_in_doubt(self) -> None:
        """As after a kill -9 inside: the maps are junk, the claims are not."""
        lay = self.arena._lay
        self.arena._mm[lay.used : lay.used + self.arena.blocks] = b"\1" * self.arena.blocks
        self.arena._head[Word.DIRTY] = 1

    @invariant()
    def every_live_claim_has_its_own_bytes(self) -> None:
        assert_sound(self.arena)
        for extent, content in self.live.items():
            assert self.arena.view(extent) == content


ArenaMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, database=None
)
TestArenaMachine = ArenaMachine.TestCase


def die_at(line: int, work: Any) -> bool:
    """Run `work` in a forked child killed at the `line`-th line it enters of arena.py.

    True if it died there, False if it finished first.
    """
    pid = os.fork()
    if pid == 0:
        seen = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal seen
            if frame.f_code.co_filename != common.arena.__file__:
                return None
            seen += event == "line"
            if seen >= line:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        with contextlib.suppress(BaseException):
            work()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("action", ["alloc", "free", "rebuild"])
def test_kill_9_at_every_single_line_of_an_operation_is_harmless(arena: Arena, action: str) -> None:
    """After each death: tables sound, bystanders intact, all space returns by sweeping."""
    bystander = arena.alloc(2 * BLOCK, "bystander")
    assert bystander is not None
    arena.view(bystander)[:] = b"b" * (2 * BLOCK)
    before = arena.stats().used_bytes
    # a rebuild repeats the same lines slot by slot, so every seventh will do
    for line in range(1, 1000, 7 if action == "rebuild" else 1):
        victim = arena.alloc(3 * BLOCK, "victim")
        assert victim is not None
        if action == "rebuild":
            arena._head[Word.DIRTY] = 1
        work = {
            "alloc": lambda: arena.alloc(5 * BLOCK, "victim"),
            "free": lambda v=victim: arena.free(v),
            "rebuild": lambda: arena.alloc(BLOCK, "victim"),
        }[action]
        died = die_at(line, work)
        assert_sound(arena)
        fresh = arena.alloc(BLOCK, "victim")
        assert fresh is not None
        arena.view(fresh)[:] = b"f" * BLOCK
        assert arena.view(bystander) == b"b" * (2 * BLOCK)
        arena.free_owned_by(lambda owner: owner == "victim", min_age_s=0.0)
        assert arena.stats().used_bytes == before
        if not died:
            break
    else:
        pytest.fail("the operation never ran to its end")
    assert line > 8, "the kills must have reached the operation"


WORKER = """
import os, random, sys
from common.arena import Arena
name, path = sys.argv[1], sys.argv[2]
arena, rng, held = Arena.open(path), random.Random(name), []
print("ready", flush=True)
while True:
    if rng.random() < 0.55 and len(held) < 6:
        extent = arena.alloc(rng.randrange(1, 30000), name)
        if extent is not None:
            mark = os.urandom(8)
            arena.view(extent)[:8] = mark[: extent.nbytes]
            held.append((extent, mark[: extent.nbytes]))
    elif held:
        extent, mark = held.pop(rng.randrange(len(held)))
        if bytes(arena.view(extent)[:8]) != mark:
            print("CLASH", flush=True)
        arena.free(extent)
"""


def test_killed_processes_leave_only_orphans_that_a_sweep_returns(arena: Arena) -> None:
    rng = random.Random(7)
    running: dict[str, subprocess.Popen[str]] = {}

    def start(name: str) -> None:
        command = [sys.executable, "-c", WORKER, name, arena.path]
        running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    try:
        for i in range(12):
            start(f"w{i}")
            if i < 2:
                continue
            time.sleep(0.02)
            name = rng.choice(sorted(running))
            victim = running.pop(name)
            assert victim.stdout is not None
            assert victim.stdout.readline() == "ready\n"
            time.sleep(rng.random() * 0.03)
            victim.kill()
            rest, _ = victim.communicate()
            assert "CLASH" not in rest
            assert_sound(arena, at_rest=False)
            arena.free_owned_by(name.__eq__, min_age_s=0.0)
            assert name not in {owner for owner, _, _ in arena.owners()}
    finally:
        for process in running.values():
            process.kill()
            rest, _ = process.communicate()
            assert "CLASH" not in rest
    assert arena.stats().allocations > 100
    arena.free_owned_by(lambda owner: True, min_age_s=0.0)
    assert arena.stats().used_bytes == 0
