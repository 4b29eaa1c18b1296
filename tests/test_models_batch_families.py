"""Families whose jobs share a forward: unlike jobs in a batch against the same jobs alone.

Tiny random weights and embeddings. A family has an entry `batching` in quirks.py only if it
stands here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.models import batch, chunk, live, quirks
from tests.test_models_families import FAMILIES, Tiny

pytestmark = pytest.mark.filterwarnings("ignore")

# fp32, relative to the largest latent.
TOLERANCE = 1e-5

# What may differ from job to job, whatever the family.
MIX: list[dict[str, Any]] = [
    {"num_inference_steps": 6, "seed": 1},
    {"num_inference_steps": 9, "seed": 2, "guidance_scale": 7.0},
    {"num_inference_steps": 5, "seed": 3, "guidance_scale": 0.0},
    {"num_inference_steps": 7, "seed": 4, "n": 2},
]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Tiny:
    torch.manual_seed(0)
    return FAMILIES[request.param]()


def embeds_of(model: Tiny, seed: int) -> dict[str, Any]:
    """Another prompt: other values, and another length where the family can mask it."""
    draw = torch.Generator().manual_seed(seed)
    how = model.quirks.batching
    extra = seed % 3 if how is not None and how.pads else 0

    def other(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [other(name, item) for item in value]
        if "mask" in name:
            return torch.ones(value.shape[0], value.shape[1] + extra, dtype=value.dtype)
        shape = list(value.shape)
        if "pooled" not in name:
            shape[-2] += extra
        return torch.randn(shape, generator=draw)

    values = {name: other(name, value) for name, value in model.embeds["values"].items()}
    return {**model.embeds, "values": values}


def prepare(model: Tiny, own: dict[str, Any], seed: int) -> live.LiveJob:
    return live.prepare(model, {**model.params, **own}, embeds_of(model, seed))


def advance(model: Tiny, job: live.LiveJob, stop: int) -> live.LiveJob:
    """Alone, in the way exact jobs run."""
    done = chunk.run(
        job.pipe, model.split, job.state, job.iteration, stop, job.carried,
        timestep_per_picture=model.quirks.timestep_per_picture,
    )  # fmt: skip
    job.iteration, job.carried = done.iteration, done.carried
    return job


def together(model: Tiny, jobs: list[live.LiveJob], steps: int, **more: Any) -> batch.Batched:
    ran = batch.run(model, jobs, [job.iteration + steps for job in jobs], **more)
    for job, done in zip(jobs, ran.jobs, strict=True):
        if isinstance(done, chunk.Chunk):
            job.iteration, job.carried = done.iteration, done.carried
    return ran


def off(latents: torch.Tensor, expected: torch.Tensor) -> float:
    return float((latents - expected).abs().max() / expected.abs().max())


def test_a_batch_of_unlike_jobs_equals_each_alone(model: Tiny) -> None:
    """Other steps, scales, prompts, guided and not, n = 2, one a step ahead: rounding only."""
    expected = [advance(model, prepare(model, own, i), 99) for i, own in enumerate(MIX)]
    jobs = [prepare(model, own, i) for i, own in enumerate(MIX)]
    advance(model, jobs[1], 1)
    assert len({batch.key(model, job) for job in jobs}) == 1
    assert None not in {batch.key(model, job) for job in jobs}
    while left := [job for job in jobs if job.iteration < job.iterations]:
        ran = together(model, left, 3)
        assert all(isinstance(done, chunk.Chunk) for done in ran.jobs)
    for job, alone in zip(jobs, expected, strict=True):
        assert set(alone.carried) == {"latents"}
        assert off(job.carried["latents"], alone.carried["latents"]) < TOLERANCE


def test_a_neighbour_changes_nothing(model: Tiny) -> None:
    """The same job beside another prompt, seed and scale of the same shape: the same bits."""
    seen = []
    for other in (4, 7):
        own = {"seed": other, "guidance_scale": float(other)}
        jobs = [prepare(model, MIX[0], 1), prepare(model, own, other)]
        together(model, jobs, 4)
        seen.append(jobs[0].carried["latents"])
    assert torch.equal(*seen)


def test_families_are_marked_only_where_they_were_tried() -> None:
    """Every family that batches is among those tested here, or in test_models_batch.py."""
    tried = {"qwenimage"} | {str(FAMILIES[name]().pipe.blocks.model_name) for name in FAMILIES}
    marked = {name for name, quirk in quirks.QUIRKS.items() if quirk.batching}
    assert marked <= tried
