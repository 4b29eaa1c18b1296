"""What a family needs beyond its diffusers blocks: one small entry each, with the reason.

Everything not listed runs through diffusers' blocks alone. Keyed by the blocks'
`model_name`; found by comparing with the classic pipeline, diffusers 0.42.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from diffusers import ModularPipeline
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from common.models.errors import RefusedModel


def _nothing(pipe: ModularPipeline, state: PipelineState) -> None:
    return None


def _accept(pipe: ModularPipeline) -> None:
    return None


@dataclass(frozen=True)
class Quirks:
    """Hooks of one family: at load time, and after a job's prepare blocks."""

    check: Callable[[ModularPipeline], None] = _accept
    prepared: Callable[[ModularPipeline, PipelineState], None] = _nothing
    encode_needs_cfg: bool = False  # its text block fails where guidance is off
    timestep_per_picture: bool = False  # see FLUX
    batches: bool = False  # rows of several jobs may share a forward (batch.py)


def _qwen_check(pipe: ModularPipeline) -> None:
    transformer = getattr(pipe, "transformer", None)
    if transformer is not None and transformer.config.guidance_embeds:
        raise RefusedModel(
            "QwenImage with guidance_embeds: its modular blocks never pass the embedded guidance"
        )


def _qwen_prepared(pipe: ModularPipeline, state: PipelineState) -> None:
    # The classic pipeline passes no mask where all tokens count. Ones give the same numbers
    # on the CPU, but flash attention refuses any mask.
    for name in ("prompt_embeds_mask", "negative_prompt_embeds_mask"):
        mask = state.values.get(name)
        if isinstance(mask, torch.Tensor) and bool(mask.all()):
            state.values[name] = None


def _wan_check(pipe: ModularPipeline) -> None:
    if pipe.config.get("expand_timesteps"):
        raise RefusedModel("Wan with expand_timesteps (TI2V-5B): its modular form lacks it")
    encodes = isinstance(getattr(pipe, "text_encoder", None), torch.nn.Module)
    if encodes and find_spec("ftfy") is None:
        raise RefusedModel("Wan's prompts are cleaned with ftfy: pip install ftfy")


def _wan_prepared(pipe: ModularPipeline, state: PipelineState) -> None:
    # Without it the scheduler looks its index up by timestep, and a large flow_shift makes
    # duplicate timesteps.
    pipe.scheduler.set_begin_index(0)


# FLUX: the classic pipeline expands the timestep to the batch, the modular block passes one
# for all n pictures, and a time embedding of batch 1 differs from one of batch n (4e-7).
QUIRKS = {
    "flux": Quirks(timestep_per_picture=True),
    "qwenimage": Quirks(check=_qwen_check, prepared=_qwen_prepared, batches=True),
    "wan": Quirks(check=_wan_check, prepared=_wan_prepared, encode_needs_cfg=True),
}


def of(family: str) -> Quirks:
    return QUIRKS.get(family, Quirks())
