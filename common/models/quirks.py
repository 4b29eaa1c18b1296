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
from common.models.request import FRAME_RATE


def _nothing(pipe: ModularPipeline, state: PipelineState) -> None:
    return None


def _accept(pipe: ModularPipeline) -> None:
    return None


@dataclass(frozen=True)
class Batching:
    """How rows of several jobs share a forward of one family (batch.py, joint.py).

    A family has one only where tests/test_models_batch_families.py finds its jobs in a batch
    equal to the same jobs alone.
    """

    mask: str | None = None  # the denoiser's input that masks padded prompt tokens
    ragged: bool = False  # the denoiser takes prompts as a list, each of its own length
    rows: tuple[str, ...] = ()  # what blocks without a guider read by themselves, a row a picture
    geometry: tuple[str, ...] = ()  # tensors that jobs of one size have in common
    alone_with: tuple[str, ...] = ()  # values that keep a job out where they are set
    alike: tuple[str, ...] = ()  # inputs beside the sizes in which jobs must agree
    mixes: bool = False  # its jobs may differ in size (ragged.py)

    @property
    def pads(self) -> bool:
        """Whether prompts of unequal length may share a forward."""
        return self.ragged or self.mask is not None


@dataclass(frozen=True)
class Quirks:
    """Hooks of one family: at load time, and after a job's prepare blocks."""

    check: Callable[[ModularPipeline], None] = _accept
    prepared: Callable[[ModularPipeline, PipelineState], None] = _nothing
    encode_needs_cfg: bool = False  # its text block fails where guidance is off
    timestep_per_picture: bool = False  # see FLUX
    batching: Batching | None = None  # None: its jobs run one by one
    caches: tuple[str, ...] = ()  # step caches that its jobs may ask for (step_cache.py)


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
# FLUX has no guider; its blocks read embeddings and the embedded guidance by themselves.
# LTX: the frame rate scales the positions in time that all rows of a forward have in common.
# LTX, WAN: diffusers' TaylorSeer finds none of their attention modules (attn1, attn2).
# SDXL: timestep_cond (LCM) is read beside the guider.
QUIRKS = {
    "flux": Quirks(
        timestep_per_picture=True,
        caches=("first_block", "taylor_seer"),
        batching=Batching(
            rows=("prompt_embeds", "pooled_prompt_embeds", "guidance"),
            geometry=("txt_ids", "img_ids"),
        ),
    ),
    "ltx": Quirks(
        batching=Batching(mask="encoder_attention_mask", alike=(FRAME_RATE,)),
        caches=("first_block",),
    ),
    "qwenimage": Quirks(
        check=_qwen_check,
        prepared=_qwen_prepared,
        batching=Batching(mask="encoder_hidden_states_mask", mixes=True),
        caches=("first_block", "taylor_seer"),
    ),
    "stable-diffusion-3": Quirks(batching=Batching()),
    "stable-diffusion-xl": Quirks(batching=Batching(alone_with=("timestep_cond",))),
    "wan": Quirks(
        check=_wan_check,
        prepared=_wan_prepared,
        encode_needs_cfg=True,
        batching=Batching(),
        caches=("first_block",),
    ),
    "z-image": Quirks(batching=Batching(ragged=True)),
}


def of(family: str) -> Quirks:
    return QUIRKS.get(family, Quirks())
