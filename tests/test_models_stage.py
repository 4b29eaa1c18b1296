"""Stages as the worker loop meets them: yields, caches, lost state, rows that fail alone."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.models.chunk import Pacer
from common.models.errors import BadInput
from common.models.rows import is_fatal
from common.models.stages import build_stage
from common.stage import Row
from tests.tiny_models import make_qwenimage, shared_qwenimage
from tests.tiny_pipeline import DEFAULTS, Control, Stages

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    return Stages(shared_qwenimage(), tmp_path_factory.mktemp("arena") / "arena")


@pytest.fixture
def stages(shared: Stages) -> Iterator[Stages]:
    """The stages, with a check that no test leaves a block in the arena."""
    yield shared
    shared.forget()
    assert shared.store.arena is not None
    assert shared.store.arena.stats().claims == 0


def test_a_yield_ends_the_chunk_at_the_next_step(stages: Stages) -> None:
    """should_stop is asked between steps; the outcome says how far the chunk got."""
    job = stages.job(num_inference_steps=10)
    job.run("encode")
    control = Control(stop_after=3)
    outcome = job.run("denoise", 10, control)
    assert outcome.step == 3
    assert control.told == [("job", 1), ("job", 2), ("job", 3)]
    whole = stages.job("whole", num_inference_steps=10)
    whole.run("encode")
    whole.denoise([10])
    job.denoise([10], forget=True)
    assert torch.equal(job.latents(), whole.latents())
    job.free()
    whole.free()


def test_a_chunk_always_gets_somewhere(stages: Stages) -> None:
    """A yield that was asked for before the first step still lets one step run."""
    job = stages.job()
    job.run("encode")
    assert job.run("denoise", 4, Control(stop_after=1)).step == 1
    job.free()


def test_the_first_chunk_writes_two_parts_and_later_ones_one(stages: Stages) -> None:
    """What is written once is written once: a checkpoint costs only what changed."""
    job = stages.job(num_inference_steps=6)
    job.run("encode")
    assert set(job.run("denoise", 2).handles) == {"prepared", "latents"}
    assert set(job.run("denoise", 4).handles) == {"latents"}
    sizes = {part: handle.nbytes for part, handle in job.handles.items()}
    assert sizes["prepared"] < 2000  # the embeddings are referred to, not written again
    job.free()


def test_times_are_measured(stages: Stages) -> None:
    """Every outcome has its seconds; a chunk has the median of its steps."""
    job = stages.job()
    assert job.run("encode").seconds > 0
    outcome = job.run("denoise", 4)
    assert 0 < 4 * outcome.step_s < 3 * outcome.seconds
    assert job.run("decode").step_s == 0
    job.free()


def test_a_live_job_resumes_without_reading(stages: Stages) -> None:
    """Consecutive chunks on one worker need no read; staging them reads nothing either."""
    job = stages.job(num_inference_steps=6)
    job.run("encode")
    job.run("denoise", 2)
    denoise = stages.by_kind["denoise"]
    assert denoise.stage_in(stages.task("denoise", job.row(2, 4))) == {}
    job.free()
    stages.forget()
    assert denoise.stage_in(stages.task("denoise", job.row(2, 4)))["job"].kind == "lost"


def test_the_same_chunk_again_starts_from_its_handle(stages: Stages) -> None:
    """A refused report: the live job has moved on, so the checkpoint is read again."""
    job = stages.job(num_inference_steps=6)
    job.run("encode")
    job.run("denoise", 2)
    first = stages.run(stages.task("denoise", job.row(2, 5)))[0]
    again = stages.run(stages.task("denoise", job.row(2, 5)))[0]
    assert first.step == again.step == 5
    latents = []
    for outcome in (first, again):
        copy = stages.job("other")
        copy.handles = outcome.handles
        latents.append(copy.latents())
        copy.free()
    assert torch.equal(*latents)
    job.free()


def test_a_repeated_prompt_is_not_encoded_again(stages: Stages) -> None:
    """By content: other seeds and sizes hit, another negative prompt does not. The worker's
    record says how many."""
    encode = stages.by_kind["encode"]
    encode.cache.clear()
    before = encode.counts()
    jobs = [
        stages.job("a", negative_prompt="x"),
        stages.job("b", negative_prompt="x", seed=9, width=96),
        stages.job("c", negative_prompt="y"),
        stages.job("d", negative_prompt="y", true_cfg_scale=1.0),  # guidance off
        stages.job("e", negative_prompt="z", true_cfg_scale=1.0),  # so this is the same
    ]
    for job in jobs:
        job.run("encode")
        job.free()
    counts = encode.counts()
    assert counts["embed_misses"] - before["embed_misses"] == 3
    assert counts["embed_hits"] - before["embed_hits"] == 2


def test_the_embedding_cache_is_bounded(tmp_path: Path) -> None:
    """Least recently used prompts go first, by bytes."""
    stages = Stages(shared_qwenimage(), tmp_path / "arena")
    encode: Any = build_stage("encode", shared_qwenimage(), stages.store, cache_bytes=20_000)
    for i in range(12):
        row = Row("j", {**DEFAULTS, "prompt": f"circle {i}"})
        encode.run(stages.task("encode", row), None, Control())
        assert encode.cache.used_bytes <= 20_000
    before = encode.counts()
    for prompt in ("circle 11", "circle 0"):
        encode.run(stages.task("encode", Row("j", {**DEFAULTS, "prompt": prompt})), None, Control())
    after = encode.counts()
    assert [after[name] - before[name] for name in ("embed_hits", "embed_misses")] == [1, 1]


class Cancels(Control):
    """One job ends with its first step."""

    def has_left(self, job: str) -> bool:
        return job == "canceled" and bool(self.told)


def rows_of_two(stages: Stages, *names: str) -> tuple[list[Any], list[Row]]:
    jobs = [stages.job(name, num_inference_steps=8) for name in names]
    for job in jobs:
        job.run("encode")
    return jobs, [job.row(0, 8) for job in jobs]


def test_a_canceled_job_leaves_a_task_whose_rows_run_one_by_one(stages: Stages) -> None:
    """Within one step, or it is not begun at all; the other does its chunk."""
    jobs, rows = rows_of_two(stages, "canceled", "other")
    outcomes = stages.run(stages.task("denoise", *rows), Cancels())
    assert [(o.step, o.done) for o in outcomes] == [(1, True), (8, True)]
    for job, outcome in zip(jobs, outcomes, strict=True):
        job.accept(outcome)
    outcomes = stages.run(stages.task("denoise", rows[1], rows[0]), Cancels())
    assert [(o.step, o.done, bool(o.handles)) for o in outcomes] == [
        (8, True, True),
        (0, False, False),
    ]
    jobs[1].accept(outcomes[0])
    for job in jobs:
        job.free()


def test_a_yield_hands_back_the_rows_that_were_not_begun(stages: Stages) -> None:
    """The first does its one step, the others none; each goes on from where it stands."""
    jobs, rows = rows_of_two(stages, "a", "b", "c")
    outcomes = stages.run(stages.task("denoise", *rows), Control(stop_after=1))
    assert [(o.step, o.done) for o in outcomes] == [(1, True), (0, False), (0, False)]
    jobs[0].accept(outcomes[0])
    for job in jobs:
        job.denoise([8])
    assert torch.equal(jobs[0].latents(), jobs[1].latents())
    for job in jobs:
        job.free()


@pytest.mark.parametrize("device", ["cuda:1", "cuda"])
def test_a_step_is_waited_for_on_the_device_that_computes(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """With torch's CUDA calls replaced, since nothing here has run on a GPU: the event goes onto
    that device's stream, and the host is one step ahead at most."""
    said: list[Any] = []

    class Event:
        def record(self, stream: Any) -> None:
            said.append(("record", stream))

        def synchronize(self) -> None:
            said.append("wait")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: f"stream of {of}")
    pacer = Pacer(torch.device(device))
    pacer.step_issued()
    pacer.step_issued()
    pacer.drain()
    recorded = ("record", f"stream of {device}")
    assert said == [recorded, recorded, "wait", "wait"]


def test_each_thread_that_computes_makes_its_device_current(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what names no device goes to the first GPU; only numbered CUDA devices have to be."""
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    for kind in ("denoise", "decode"):
        stage = stages.by_kind[kind]
        for device in ("cpu", "cuda", "cuda:1"):
            monkeypatch.setattr(stage.model, "device", torch.device(device))
            stage.stage_in(stages.task(kind))
    assert made == [torch.device("cuda:1")] * 2


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (BadInput("prompt: 'CUDA error: x' is not it"), False),
        (ValueError("no such word in 'CUDA error: why?'"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
    ],
)
def test_a_dead_device_is_told_from_a_jobs_own_words(error: Exception, fatal: bool) -> None:
    assert is_fatal(error) == fatal


def test_a_row_fails_alone(stages: Stages) -> None:
    """A bad row and a row with lost state leave their neighbour's bits alone."""
    good, alone, lost, bad = (stages.job(name) for name in ("good", "alone", "lost", "bad"))
    for job in (good, alone, lost, bad):
        job.run("encode")
    alone.denoise([4])
    lost.free()
    bad.params["width"] = 33
    task = stages.task("denoise", lost.row(0, 4), good.row(0, 4), bad.row(0, 4))
    outcomes = stages.run(task)
    assert [o.error_code for o in outcomes] == ["state_lost", "", "invalid_request"]
    assert "33" in outcomes[2].error
    assert "embeds" in outcomes[0].error
    good.accept(outcomes[1])
    assert torch.equal(good.latents(), alone.latents())
    for job in (good, alone, bad):
        job.free()


def test_latents_that_overflow_fail_their_job_by_name(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN is said when it happens, and nothing of that chunk is left behind."""
    job = stages.job(num_inference_steps=4)
    job.run("encode")
    job.run("denoise", 2)
    scheduler = type(stages.by_kind["denoise"].model.pipe.scheduler)
    monkeypatch.setattr(
        scheduler, "step", lambda self, pred, t, sample, **kw: (sample * float("nan"),)
    )
    outcome = stages.run(stages.task("denoise", job.row(2, 4)))[0]
    assert outcome.error_code == "non_finite"
    assert "step 4" in outcome.error
    assert outcome.handles == {}
    job.free()


def test_a_job_too_short_for_its_scheduler_is_told_so(stages: Stages) -> None:
    """Qwen-Image's shift_terminal divides zero by zero at one step; the manifest says 2."""
    manifest = stages.by_kind["denoise"].manifest()
    assert manifest["parameters"]["num_inference_steps"]["min"] == 2
    job = stages.job(num_inference_steps=1)
    job.run("encode")
    with np.errstate(all="ignore"):
        outcome = stages.run(stages.task("denoise", job.row(0, 1)))[0]
    assert outcome.error_code == "invalid_request"
    assert "num_inference_steps" in outcome.error
    job.free()


def test_steps_outside_of_the_job_are_refused(stages: Stages) -> None:
    """A start that the state does not stand at, and a chunk past the end."""
    job = stages.job(num_inference_steps=4)
    job.run("encode")
    job.run("denoise", 2)
    ahead = stages.run(stages.task("denoise", job.row(3, 4)))[0]
    assert ahead.error_code == "state_lost"
    assert "starts at step 3" in ahead.error
    assert job.run("denoise", 99).step == 4
    past = stages.run(stages.task("denoise", job.row(4, 8)))[0]
    assert past.error_code == "invalid_request"
    job.free()


def test_a_scheduler_that_the_blocks_cannot_drive_is_told(tmp_path: Path) -> None:
    """Qwen's blocks hand over sigmas, which Heun's set_timesteps does not take."""
    from diffusers import FlowMatchHeunDiscreteScheduler

    model = make_qwenimage(tmp_path / "heun", scheduler=FlowMatchHeunDiscreteScheduler())
    stages = Stages(model, tmp_path / "arena")
    job = stages.job(num_inference_steps=4)
    job.run("encode")
    outcome = stages.run(stages.task("denoise", job.row(0, 2)))[0]
    assert outcome.error_code == "invalid_request"
    assert "sigmas" in outcome.error
    job.free()


def test_a_full_store_fails_the_row_and_leaves_nothing(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two writes fails: the first is given back."""
    from common.handles import HandleError

    job = stages.job()
    job.run("encode")
    put = stages.store.put

    def full(job_id: str, seq: int, part: str, parcel: Any, where: str = "auto") -> Any:
        if part == "latents":
            raise HandleError("full", "no room")
        return put(job_id, seq, part, parcel, where)

    monkeypatch.setattr(stages.store, "put", full)
    outcome = stages.run(stages.task("denoise", job.row(0, 4)))[0]
    assert outcome.error_code == "storage_full"
    monkeypatch.undo()
    job.free()


def test_damaged_state_is_refused(stages: Stages) -> None:
    """A part under another part's name is not taken for what it is not."""
    job = stages.job()
    job.run("encode")
    job.run("denoise", 2)
    stages.forget()
    row = job.row(2, 4)
    swapped = {**row.handles, "latents": row.handles["prepared"]}
    outcome = stages.run(stages.task("denoise", dataclasses.replace(row, handles=swapped)))[0]
    assert outcome.error_code == "state_lost"
    assert "'latents'" in outcome.error
    job.free()


def test_threads_are_set_before_torch() -> None:
    """build_stage imports no torch before the environment is right, and says so if it is late."""
    code = (
        "import sys\n"
        "from common.models import stages\n"
        "assert 'torch' not in sys.modules\n"
        "stages.set_threads(1)\n"
        "import torch, os\n"
        "assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE'\n"
        "assert torch.get_num_threads() == 1\n"
        "try: stages.set_threads(2)\n"
        "except RuntimeError as e: assert 'OMP_NUM_THREADS=2' in str(e)\n"
        "else: raise SystemExit('not refused')\n"
    )
    bare = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_"))}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=bare, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
