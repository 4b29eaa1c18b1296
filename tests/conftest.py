"""What the tests share: a real Redis, an arena, and a look at what each test left behind."""

from __future__ import annotations

import os

# Before anything imports torch or numpy: see common.settings.single_threaded.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.arena import Arena
from common.connect import writing
from common.keys import Keys
from tests.servers import leaks, serving

ARENA_BYTES = 8 << 20
EXIT_S = 20.0

# What processes of the tests leave in the folder for temporary files goes with it at the end; what
# `tmp_path` made stays where it always is, for a look at a test that failed.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
TEMPORARY = tempfile.mkdtemp(prefix="sw-tests-")
tempfile.tempdir = os.environ["TMPDIR"] = TEMPORARY
# After multiprocessing's own folder in it, which goes at -100.
multiprocessing.util.Finalize(
    None, shutil.rmtree, (TEMPORARY,), {"ignore_errors": True}, exitpriority=-101
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Remember whether the test itself passed: a failed one may leave what it likes."""
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


PASSED = pytest.StashKey[bool]()


def _passed(request: pytest.FixtureRequest) -> bool:
    return bool(request.node.stash.get(PASSED, False))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """The url of a real server for the whole session: noeviction, no persistence."""
    with serving() as server:
        yield server.url


@pytest.fixture
def keys() -> Keys:
    """Under a prefix that is not the default (and a hash tag), so that a spelled-out key shows."""
    return Keys("{t}:")


@pytest.fixture
def redis_client(redis_server: str, keys: Keys, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A client on an empty database; after the test nothing may be left that stays for ever."""
    client = writing(redis_server)
    client.config_set("maxmemory", 0)
    client.flushall()
    yield client
    client.config_set("maxmemory", 0)  # a test that failed may have left it full
    left = leaks(client, keys.permanent() | Keys().permanent()) if _passed(request) else []
    client.flushall()
    client.close()
    assert not left, "left in Redis: " + "; ".join(left)


@pytest.fixture
def arena_path() -> Iterator[str]:
    """Where on tmpfs an arena may be made; gone after the test."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="slackwater-test-", dir=root)
    yield str(Path(folder) / "arena")
    shutil.rmtree(folder)


@pytest.fixture
def arena(arena_path: str, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """A small arena; after the test every block must have been given back."""
    with Arena.open(arena_path, ARENA_BYTES, block_bytes=4096) as opened:
        yield opened
        if _passed(request):
            left = [f"{owner} holds {extent.nbytes} bytes" for owner, extent, _ in opened.owners()]
            assert not left, "left in the arena: " + "; ".join(left)


@pytest.fixture(autouse=True)
def _no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test ends the processes it started."""
    before = children()
    yield
    patience = time.monotonic() + EXIT_S
    while (left := children().keys() - before.keys()) and time.monotonic() < patience:
        time.sleep(0.01)
    alive = [f"{pid} ({children().get(pid)})" for pid in left]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if _passed(request):
        assert not alive, "processes left: " + "; ".join(alive)


def children() -> dict[int, str]:
    """Running children and theirs, pid to command line.

    Without Python's own two bookkeepers, which stay; what the fork server started is a child like
    any other.
    """
    stay = {
        multiprocessing.forkserver._forkserver._forkserver_pid,
        multiprocessing.resource_tracker._resource_tracker._pid,
    }
    parent_of: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):  # none where there is no /proc
        try:
            _, _, rest = stat.read_text().rpartition(") ")
        except OSError:
            continue  # it ended meanwhile
        state, parent, *_ = rest.split()
        if state not in "ZX":
            parent_of[int(stat.parent.name)] = int(parent)
    found: dict[int, str] = {}
    for pid in parent_of:
        above = pid
        while above in parent_of and above != os.getpid():
            above = parent_of[above]
        if above == os.getpid() != pid and pid not in stay:
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if line:
                found[pid] = line
    return found
