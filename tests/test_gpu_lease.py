"""GPUs shared out by leases: real processes and locks, and a listed GPU for each name given."""

from __future__ import annotations

import multiprocessing
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from common.gpu_lease import NoGpu, claim, installed, visible
from common.settings import Settings
from services.pool.local import LocalPool
from tests.processes import until

GPUS = [f"GPU-{n}0000000-0000-0000-0000-00000000000{n}" for n in range(4)]
_context = multiprocessing.get_context("fork")  # quick, and no lock is held here


def _hold(stage: str, arena: str, when_taken: str, gpus: list[str], pipe: Connection) -> None:
    """A worker that says what it got and holds it until it is told to end."""
    environment: dict[str, str] = {}
    try:
        lease = claim(stage, "cuda", arena, when_taken, lambda: gpus, environment)
    except NoGpu as why:
        pipe.send(("refused", str(why)))
        return
    assert lease is not None
    assert environment["CUDA_VISIBLE_DEVICES"] == lease.gpu
    pipe.send(("took", lease.gpu))
    pipe.recv()


class Workers:
    """Processes that hold leases; all of them end with the test."""

    def __init__(self, arena: str) -> None:
        self.arena = arena
        self.running: list[tuple[Any, Connection]] = []

    def start(self, stage: str, when_taken: str = "refuse", gpus: list[str] = GPUS) -> int:
        here, there = _context.Pipe()
        process = _context.Process(target=_hold, args=(stage, self.arena, when_taken, gpus, there))
        process.start()
        there.close()
        self.running.append((process, here))
        return len(self.running) - 1

    def answer(self, worker: int) -> tuple[str, str]:
        said: tuple[str, str] = self.running[worker][1].recv()
        return said

    def kill(self, worker: int) -> None:
        self.running[worker][0].kill()
        self.running[worker][0].join()


@pytest.fixture
def workers(arena_path: str) -> Iterator[Workers]:
    made = Workers(arena_path)
    yield made
    for process, _ in made.running:
        process.kill()
        process.join()


def test_workers_of_a_stage_take_one_gpu_each(workers: Workers) -> None:
    """Four denoisers that start at once on four GPUs get four different ones."""
    started = [workers.start("denoise") for _ in range(4)]
    assert sorted(workers.answer(each) for each in started) == [("took", gpu) for gpu in GPUS]


def test_another_stage_may_share_a_gpu_and_begins_at_the_other_end(workers: Workers) -> None:
    """An encoder shares a GPU with a denoiser, but the last one while there are some to spare."""
    assert workers.answer(workers.start("denoise")) == ("took", GPUS[0])
    assert workers.answer(workers.start("encode")) == ("took", GPUS[3])
    assert workers.answer(workers.start("decode", gpus=GPUS[:1])) == ("took", GPUS[0])


def test_one_worker_too_many_is_refused_and_told_who_has_the_gpus(workers: Workers) -> None:
    """The message names the processes that hold the GPUs, and what to do."""
    first = workers.start("denoise", gpus=GPUS[:1])
    assert workers.answer(first) == ("took", GPUS[0])
    said, why = workers.answer(workers.start("denoise", gpus=GPUS[:1]))
    assert said == "refused"
    assert f"process {workers.running[first][0].pid} of {os.uname().nodename}" in why
    assert "cuda:0" in why


def test_the_gpu_of_a_killed_worker_is_free_at_once(workers: Workers) -> None:
    """A lease needs no clean end: kill -9 gives the GPU to the worker that waits for it."""
    first = workers.start("denoise", gpus=GPUS[:1])
    assert workers.answer(first) == ("took", GPUS[0])
    second = workers.start("denoise", "wait", GPUS[:1])
    workers.kill(first)
    assert workers.answer(second) == ("took", GPUS[0])


def test_pods_with_a_gpu_each_do_not_take_each_others_for_theirs(workers: Workers) -> None:
    """Each sees one GPU, number 0, and they share an arena: UUIDs tell the GPUs apart."""
    assert workers.answer(workers.start("denoise", gpus=[GPUS[2]])) == ("took", GPUS[2])
    assert workers.answer(workers.start("denoise", gpus=[GPUS[1]])) == ("took", GPUS[1])


def test_a_named_device_or_no_lease_leaves_the_choice_alone(arena_path: str) -> None:
    """`cuda:1`, `cpu` and gpu_lease off take no lease and change no environment."""
    for device, when_taken in (("cuda:1", "refuse"), ("cpu", "refuse"), ("cuda", "off")):
        environment: dict[str, str] = {}
        assert claim("denoise", device, arena_path, when_taken, lambda: GPUS, environment) is None
        assert environment == {}


def test_only_visible_gpus_are_taken() -> None:
    """CUDA_VISIBLE_DEVICES may name numbers and UUIDs; what is not there ends the list."""
    assert visible(GPUS, None) == GPUS
    assert visible(GPUS, "2,0") == [GPUS[2], GPUS[0]]
    assert visible(GPUS, f"{GPUS[3]},GPU-1") == [GPUS[3], GPUS[1]]
    assert visible(GPUS, "1,9,2") == [GPUS[1]]
    assert visible(GPUS, "") == []


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the place of nvidia-smi that lists four GPUs."""
    program = tmp_path / "nvidia-smi"
    lines = "".join(f"GPU {n}: Some GPU (UUID: {gpu})\n" for n, gpu in enumerate(GPUS))
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}END\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("four_gpus")
def test_gpus_are_listed_by_the_driver() -> None:
    assert installed() == GPUS


@pytest.mark.usefixtures("four_gpus")
def test_a_pool_scales_to_one_denoiser_a_gpu_and_no_further(redis_server: str) -> None:
    """With device cuda, four denoisers run on four GPUs, and a fifth says that all are taken."""
    settings = Settings(noop="step_ms=1", device="cuda", prefix="gpus:", arena_bytes=4 << 20)
    with LocalPool(denoisers=2, settings=settings, redis_url=redis_server) as pool:
        pool.scale("denoise", 4)
        logs = [each.log.read_text() for each in pool.processes() if each.role == "denoise"]
        taken = [re.findall(r"denoise takes (GPU-\S+),", log) for log in logs]
        assert sorted(taken) == [[gpu] for gpu in GPUS]
        pool.scale("denoise", 5, wait_s=0)
        fifth = pool.log_dir / "denoise-5.log"
        until(
            lambda: fifth.exists() and "no GPU for this worker: each of the 4" in fifth.read_text(),
            "the fifth to be refused",
        )
        with pool.client() as client:
            assert client.submit("a red circle").wait(30).status == "succeeded"


def test_choosing_a_gpu_imports_no_torch() -> None:
    """CUDA reads its variable when torch is imported or soon after, so torch must come later."""
    code = "import sys, common.gpu_lease; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"
