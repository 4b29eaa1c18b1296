"""Exact mode: prompt to pixels bit-identical to the classic QwenImagePipeline."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from common.handles import Handle
from tests.tiny_models import make_qwenimage, shared_qwenimage, shared_root
from tests.tiny_pipeline import Job, Stages

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    return Stages(shared_qwenimage(), tmp_path_factory.mktemp("arena") / "arena")


@pytest.fixture(scope="module")
def classic() -> Any:
    from diffusers import QwenImagePipeline

    pipe = QwenImagePipeline.from_pretrained(shared_qwenimage())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def reference(pipe: Any, job: Job) -> tuple[torch.Tensor, list[np.ndarray]]:
    """Latents and pictures of the classic pipeline for this job's parameters."""
    p = job.params
    keys = ("prompt", "negative_prompt", "width", "height", "num_inference_steps", "sigmas")
    inputs = {key: p[key] for key in (*keys, "true_cfg_scale", "max_sequence_length")}
    inputs["num_images_per_prompt"] = p["n"]

    def call(**more: Any) -> Any:
        generator = torch.Generator("cpu").manual_seed(p["seed"])
        return pipe(**inputs, generator=generator, **more).images

    return call(output_type="latent"), [np.array(picture) for picture in call()]


def check(pipe: Any, job: Job) -> None:
    latents, pictures = reference(pipe, job)
    ours = job.pictures()
    assert torch.equal(job.latents(), latents)
    assert len(ours) == len(pictures) == job.params["n"]
    for mine, theirs in zip(ours, pictures, strict=True):
        assert np.array_equal(mine, theirs)
    job.free()


CASES = {
    "plain": {},
    "guided": {"negative_prompt": "blurry, ugly"},
    "empty negative prompt": {"negative_prompt": ""},
    "scale not above 1 turns guidance off": {"negative_prompt": "x", "true_cfg_scale": 1.0},
    "scale 0 is no default": {"negative_prompt": "x", "true_cfg_scale": 0.0},
    "scale without a negative prompt": {"true_cfg_scale": 7.5},
    "two pictures": {"n": 2, "negative_prompt": "", "width": 96, "num_inference_steps": 5},
    "three pictures, wide": {"n": 3, "width": 128, "height": 32, "num_inference_steps": 3},
    "own sigmas": {"sigmas": [1.0, 0.7, 0.2], "num_inference_steps": 3},
    "cut prompt": {"prompt": "a small green triangle " * 40, "max_sequence_length": 12},
    "unicode": {"prompt": "ein rotes Rechteck 🟥 と 青い円", "seed": 2**40 + 1},
    "two steps": {"num_inference_steps": 2},
}


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_prompt_to_pixels_equals_the_classic_pipeline(
    stages: Stages, classic: Any, params: dict[str, Any]
) -> None:
    """Latents and pixels of an uncut job are bit-identical to QwenImagePipeline.__call__."""
    job = stages.job(**params)
    job.run("encode")
    job.denoise([job.params["num_inference_steps"]])
    check(classic, job)


@pytest.mark.parametrize("seed", range(4))
def test_any_cuts_change_nothing(stages: Stages, classic: Any, seed: int) -> None:
    """Random chunks, resumed live or from handles at random, give the uncut job's bits."""
    rng = random.Random(seed)
    steps = rng.randrange(6, 12)
    job = stages.job(
        num_inference_steps=steps,
        negative_prompt=rng.choice([None, "", "ugly"]),
        n=rng.randrange(1, 4),
        width=16 * rng.randrange(2, 7),
        height=16 * rng.randrange(2, 7),
        seed=seed,
    )
    job.run("encode")
    cuts = [*sorted(rng.sample(range(1, steps), rng.randrange(1, 5))), steps]
    for cut in cuts:
        job.denoise([cut], forget=rng.random() < 0.6)
    check(classic, job)


def test_jobs_interleaved_on_one_worker_do_not_disturb_each_other(
    stages: Stages, classic: Any
) -> None:
    """Each job has its own scheduler and guider: the best-known bug of diffusion servers."""
    jobs = [
        stages.job("a", num_inference_steps=6, negative_prompt="ugly"),
        stages.job("b", num_inference_steps=9, seed=1, width=96),
        stages.job("c", num_inference_steps=7, seed=2, n=2, negative_prompt=""),
    ]
    for job in jobs:
        job.run("encode")
    while any(job.step < job.params["num_inference_steps"] for job in jobs):
        for job in jobs:
            if job.step < job.params["num_inference_steps"]:
                job.denoise([job.step + 2])
    for job in jobs:
        check(classic, job)


CHILD = """
import sys, itertools, msgpack
from tests.tiny_pipeline import Stages
from common.handles import Handle
model, arena, chunks = sys.argv[1:4]
stages = Stages(model, arena)
stages.seq = itertools.count(100)  # dispatch numbers are global
wire = msgpack.unpackb(sys.stdin.buffer.read())
job = stages.job(**wire["params"])
job.step = wire["step"]
job.handles = {k: Handle.from_wire(v) for k, v in wire["handles"].items()}
job.denoise([int(c) for c in chunks.split(",")], forget=True)
sys.stdout.buffer.write(msgpack.packb({"step": job.step,
    "handles": {k: h.to_wire() for k, h in job.handles.items()}}))
"""


def test_state_moves_to_another_process_and_back(tmp_path: Path, classic: Any) -> None:
    """Chunks here, in a second process, and here again: the same bits, through the arena."""
    here = Stages(shared_qwenimage(), tmp_path / "arena")
    job = here.job(num_inference_steps=9, negative_prompt="blurry", n=2)
    job.run("encode")
    job.denoise([2])
    wire = {
        "params": job.params,
        "step": job.step,
        "handles": {part: handle.to_wire() for part, handle in job.handles.items()},
    }
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(shared_qwenimage()), str(tmp_path / "arena"), "4,7"],
        input=msgpack.packb(wire),
        capture_output=True,
        cwd=ROOT,
        check=False,
    )
    assert child.returncode == 0, child.stderr.decode()[-2000:]
    back = msgpack.unpackb(child.stdout)
    job.step = back["step"]
    job.handles = {part: Handle.from_wire(w) for part, w in back["handles"].items()}
    assert job.step == 7
    job.denoise([9])
    check(classic, job)


def test_bfloat16_is_exact_too(tmp_path: Path) -> None:
    """bf16 weights and latents cross chunk boundaries as bf16 and stay bit-identical."""
    from diffusers import QwenImagePipeline

    model = make_qwenimage(shared_root() / "tiny-qwen-bf16", dtype=torch.bfloat16)
    stages = Stages(model, tmp_path / "arena", dtype="bfloat16")
    pipe = QwenImagePipeline.from_pretrained(model, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    job = stages.job(num_inference_steps=5, negative_prompt="ugly")
    job.run("encode")
    job.denoise([2, 3, 5], forget=True)
    assert job.latents().dtype == torch.bfloat16
    check(pipe, job)
