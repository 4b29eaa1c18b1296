"""From a job's parameters to what its blocks read: the state, the guider, the scheduler."""

from __future__ import annotations

import copy
from typing import Any

import torch
from diffusers import ModularPipeline
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from common.models import guidance, schedulers
from common.models.errors import BadInput
from common.models.split import Named, Split

# Our parameter → diffusers' input. All others have the same name on both sides. LTX places frames
# in time by the rate they are played at; models without that input are not told.
FRAME_RATE = "frame_rate"
RENAMED = {"n": "num_images_per_prompt", "fps": FRAME_RATE}
# Read elsewhere than through the blocks' inputs.
NOT_INPUTS = {"seed"}


def own_pipeline(
    pipe: ModularPipeline, rule: guidance.Rule | None, params: dict[str, Any]
) -> ModularPipeline:
    """A job's own view of the pipeline: weights shared, scheduler and guiders its own.

    A shallow copy and no proxy: properties such as `requires_unconditional_embeds` must run
    on the object that has the job's guider.
    """
    own = copy.copy(pipe)
    for name, guider in guidance.guiders(pipe, rule, params).items():
        setattr(own, name, guider)
    scheduler = getattr(pipe, "scheduler", None)
    if scheduler is not None:
        own.scheduler = schedulers.fresh(scheduler)
    return own


def generator(params: dict[str, Any]) -> torch.Generator:
    """The job's random numbers, drawn on the CPU so that every device gives the same noise."""
    seed = params.get("seed")
    if seed is None:
        raise BadInput("seed is not set; the coordinator draws one where a job has none")
    return torch.Generator("cpu").manual_seed(int(seed))


def initial_state(split: Split, params: dict[str, Any]) -> PipelineState:
    """A state with every input of the request: the job's value, or the block's default."""
    given = {RENAMED.get(k, k): v for k, v in params.items() if k not in NOT_INPUTS}
    state = PipelineState()
    for param in split.inputs:
        value = given.get(param.name)
        state.set(param.name, param.default if value is None else value, param.kwargs_type)
    return state


def run_blocks(blocks: tuple[Named, ...], pipe: ModularPipeline, state: PipelineState) -> None:
    """Run blocks in order; a ValueError of diffusers' own input checks becomes BadInput."""
    with torch.no_grad():
        for _, block in blocks:
            try:
                block(pipe, state)
            except ValueError as error:
                raise BadInput(str(error)) from error
