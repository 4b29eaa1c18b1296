"""A job live in this process: prepared from its embeddings, or resumed from its parts."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from diffusers import ModularPipeline
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from common.models import request, schedulers, state
from common.models.errors import BadInput
from common.models.guidance import Rule
from common.models.quirks import Quirks
from common.models.split import Split

log = logging.getLogger(__name__)

# What diffusers' code raises of values that it was not written for. Nothing but parameters and
# embeddings enters the prepare blocks, so another try, or another worker, would raise it again.
OF_VALUES = (TypeError, LookupError, ArithmeticError, AttributeError, AssertionError)


class Denoiser(Protocol):
    """What is needed of a loaded model (common/models/model.py)."""

    pipe: ModularPipeline
    split: Split
    rule: Rule | None
    quirks: Quirks


@dataclass
class LiveJob:
    """One job in this process, ready for its next chunk. Nothing in it is shared."""

    pipe: ModularPipeline  # the job's own copy
    state: PipelineState
    generator: torch.Generator
    marks: schedulers.Marks
    iteration: int = 0  # of the loop; a step of the user's is one or more of them
    carried: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0  # forward passes that its step cache has left out so far

    # Heun's loop runs 2·n − 1 times for n steps, PNDM's n + 9 times. Everyone outside counts
    # steps as users do, 0 to num_inference_steps; these two translate, rounding so that the end of
    # a chunk at step k reads as step k again.

    @property
    def iterations(self) -> int:
        return len(self.state.get("timesteps"))

    @property
    def steps(self) -> int:
        return int(self.state.get("num_inference_steps") or self.iterations)

    def step_at(self, iteration: int) -> int:
        """Steps of the user's that are done after `iteration` runs of the loop."""
        return iteration * self.steps // self.iterations

    def iteration_at(self, step: int) -> int:
        """Where a chunk that is to end at `step` ends; at least one iteration from here."""
        at = self.iterations if step >= self.steps else -(-step * self.iterations // self.steps)
        return max(at, self.iteration + 1)


def prepare(model: Denoiser, params: dict[str, Any], embeds: dict[str, Any]) -> LiveJob:
    """Step 0: timesteps, initial latents from the seed, everything the loop reads.

    Raises BadInput where the blocks can do nothing with these parameters, or the scheduler makes
    other timesteps of them than the job was admitted with.
    """
    job = _blank(model, params)
    state.restore_embeds(job.state, embeds)
    try:
        request.run_blocks(model.split.prepare, job.pipe, job.state)
    except OF_VALUES as error:
        log.warning("a job's parameters cannot be prepared", exc_info=True)
        what = f"{type(error).__name__}: {error}"
        raise BadInput(f"this model can do nothing with these parameters ({what})") from error
    model.quirks.prepared(job.pipe, job.state)
    _check_timesteps(job, params)
    job.marks = schedulers.Marks.of(job.pipe.scheduler)
    return job


def _check_timesteps(job: LiveJob, params: dict[str, Any]) -> None:
    own = params.get("sigmas") is not None
    field = "sigmas" if own else "num_inference_steps"
    if not bool(torch.isfinite(job.state.get("timesteps")).all()):
        remedy = "give falling ones that end below 1" if own else "use more"
        raise BadInput(f"{field}: the scheduler makes no finite timesteps of these; {remedy}")
    steps = params.get("num_inference_steps")
    if steps is not None and job.steps != steps:
        raise BadInput(
            f"{field}: the scheduler makes {job.steps} steps of these, where the job has {steps}"
        )


def resume(model: Denoiser, params: dict[str, Any], parts: dict[str, Any]) -> LiveJob:
    """The job as it stood when its latents were written."""
    job = _blank(model, params)
    prepared, latents = parts[state.PREPARED], parts[state.LATENTS]
    state.restore_prepared(job.state, prepared, parts[state.EMBEDS])
    schedulers.restore(job.pipe.scheduler, prepared["scheduler"], latents["scheduler"])
    job.marks = schedulers.Marks(prepared["scheduler"])
    job.iteration, job.carried = latents["iteration"], latents["carried"]
    job.skipped = latents.get("skipped", 0)
    if latents["generator"] is not None:
        job.generator.set_state(latents["generator"].cpu())
    return job


def capture_latents(split: Split, job: LiveJob) -> dict[str, Any]:
    """The changing part, at a step boundary."""
    return {
        "iteration": job.iteration,
        "skipped": job.skipped,
        "carried": job.carried,
        "scheduler": job.marks.delta(job.pipe.scheduler),
        "generator": job.generator.get_state() if split.draws else None,
    }


def _blank(model: Denoiser, params: dict[str, Any]) -> LiveJob:
    pipe = request.own_pipeline(model.pipe, model.rule, params)
    values = request.initial_state(model.split, params)
    generator = request.generator(params)
    values.set("generator", generator)
    return LiveJob(pipe, values, generator, schedulers.Marks({}))
