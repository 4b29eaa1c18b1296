"""Other families through the generic cutter: tiny random weights, random embeddings, random cuts.

Each family's own prepare, loop and decode blocks run uncut once, and then in chunks whose
state goes through parcel bytes into fresh objects at every cut. No code of ours names these
families, except where `quirks.py` and `guidance.py` do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import pytest
import torch

import tests.tiny_models  # noqa: F401 - sets threads
from common.models import chunk, guidance, live, parcels, quirks, request, schedulers, state
from common.models.components import StandIn
from common.models.model import quiet_diffusers
from common.models.split import Split, split

pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")
L = 5  # prompt tokens


@dataclass
class Tiny:
    """What a Denoiser needs, around components made here and now."""

    pipe: Any
    split: Split
    rule: Any
    quirks: Any
    embeds: dict[str, Any]
    params: dict[str, Any]


def tiny(name: str, components: dict[str, Any], embeds: dict[str, Any], **params: Any) -> Tiny:
    quiet_diffusers()
    pipe = getattr(diffusers, name)()
    for key, component in components.items():
        if isinstance(component, torch.nn.Module):
            component.eval().requires_grad_(False)
            for parameter in component.parameters():
                if not parameter.any():
                    torch.nn.init.normal_(parameter, std=0.05)
        setattr(pipe, key, component)
    cut = split(pipe, prompt="x")
    values = diffusers.modular_pipelines.modular_pipeline.PipelineState()
    for _, block in cut.encode:
        for out in block.intermediate_outputs:
            if out.name in embeds:
                values.set(out.name, embeds[out.name], out.kwargs_type)
    steps = {"num_inference_steps": 6, "seed": 3, "width": 32, "height": 32, "n": 1}
    return Tiny(
        pipe,
        cut,
        guidance.rule(pipe),
        quirks.of(str(pipe.blocks.model_name)),
        state.capture_embeds(cut, values),
        {"prompt": "x", **steps, **params},
    )


def kl(channels: int) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=1,
        scaling_factor=1.5,
        shift_factor=0.06,
    )


def flux() -> Tiny:
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return tiny(
        "FluxModularPipeline",
        {"transformer": transformer, "scheduler": scheduler, "vae": kl(4)},
        {"prompt_embeds": torch.randn(1, L, 32), "pooled_prompt_embeds": torch.randn(1, 32)},
        guidance_scale=3.5, n=2,
    )  # fmt: skip


def sd3() -> Tiny:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=32,
        pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip
    return tiny(
        "StableDiffusion3ModularPipeline",
        {"transformer": transformer, "vae": kl(4),
         "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)},
        {"prompt_embeds": torch.randn(1, L, 32), "negative_prompt_embeds": torch.randn(1, L, 32),
         "pooled_prompt_embeds": torch.randn(1, 64),
         "negative_pooled_prompt_embeds": torch.randn(1, 64)},
        guidance_scale=4.0, negative_prompt="y",
    )  # fmt: skip


def sdxl(scheduler: Any) -> Tiny:
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(2, 4), layers_per_block=1, sample_size=32, in_channels=4,
        out_channels=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=(2, 4),
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1), projection_class_embeddings_input_dim=80,
        cross_attention_dim=64, norm_num_groups=1,
    )  # fmt: skip
    return tiny(
        "StableDiffusionXLModularPipeline",
        {"unet": unet, "vae": kl(4), "scheduler": scheduler},
        {"prompt_embeds": torch.randn(1, L, 64), "negative_prompt_embeds": torch.randn(1, L, 64),
         "pooled_prompt_embeds": torch.randn(1, 32),
         "negative_pooled_prompt_embeds": torch.randn(1, 32)},
        guidance_scale=5.0, negative_prompt="y", num_inference_steps=7,
    )  # fmt: skip


def wan_transformer() -> Any:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16,
        out_channels=16, text_dim=32, freq_dim=32, ffn_dim=32, num_layers=1,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip


def wan22() -> Tiny:
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )  # fmt: skip
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return tiny(
        "Wan22ModularPipeline",
        {"transformer": wan_transformer(), "transformer_2": wan_transformer(), "vae": vae,
         "scheduler": scheduler},
        {"prompt_embeds": torch.randn(1, L, 32), "negative_prompt_embeds": torch.randn(1, L, 32)},
        guidance_scale=4.0, guidance_scale_2=3.0, negative_prompt="y", num_frames=5,
        num_inference_steps=8,
    )  # fmt: skip


def z_image() -> Tiny:
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=16, dim=32, n_layers=1,
        n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16, axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )  # fmt: skip
    return tiny(
        "ZImageModularPipeline",
        {"transformer": transformer, "vae": kl(16),
         "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)},
        {"prompt_embeds": [torch.randn(L, 16)], "negative_prompt_embeds": [torch.randn(L, 16)]},
        guidance_scale=3.0, negative_prompt="y",
    )  # fmt: skip


def ltx() -> Tiny:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16,
        cross_attention_dim=32, num_layers=1, caption_channels=32,
    )  # fmt: skip
    with torch.device("meta"):
        vae = diffusers.AutoencoderKLLTXVideo(latent_channels=8)
    return tiny(
        "LTXModularPipeline",
        {"transformer": transformer, "vae": StandIn(vae),
         "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)},
        {"prompt_embeds": torch.randn(1, L, 32), "negative_prompt_embeds": torch.randn(1, L, 32),
         "prompt_attention_mask": torch.ones(1, L),
         "negative_prompt_attention_mask": torch.ones(1, L)},
        guidance_scale=3.0, negative_prompt="y", num_frames=9, width=64, height=64,
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], Tiny]] = {
    "flux": flux,
    "sd3": sd3,
    "sdxl, Euler": lambda: sdxl(diffusers.EulerDiscreteScheduler()),
    "sdxl, Euler ancestral": lambda: sdxl(diffusers.EulerAncestralDiscreteScheduler()),
    "sdxl, Heun": lambda: sdxl(diffusers.HeunDiscreteScheduler()),
    "sdxl, DPM++": lambda: sdxl(diffusers.DPMSolverMultistepScheduler()),
    "wan 2.2, UniPC, two experts": wan22,
    "z-image": z_image,
    "ltx": ltx,
}


def uncut(model: Tiny) -> tuple[Any, dict[str, Any]]:
    """diffusers' own blocks, one after another, untouched by the cutter."""
    job = live._blank(model, model.params)
    state.restore_embeds(job.state, model.embeds)
    request.run_blocks(model.split.prepare, job.pipe, job.state)
    model.quirks.prepared(job.pipe, job.state)
    with torch.no_grad():
        model.split.loop(job.pipe, job.state)
    return job.state.get("latents"), job.state.values


def through(part: str, values: dict[str, Any]) -> dict[str, Any]:
    return parcels.read(part, parcels.write(part, values, CPU), CPU)


def decoded(model: Tiny, params: dict[str, Any], values: dict[str, Any]) -> torch.Tensor:
    end = request.initial_state(model.split, params)
    end.values.update(values)
    end.values["output_type"] = "pt"
    request.run_blocks(model.split.decode, model.pipe, end)
    made = end.get("images")
    if made is None:
        made = end.get("videos")
    return made if isinstance(made, torch.Tensor) else torch.stack(list(made))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_cut_at_random_equals_itself_uncut(family: str) -> None:
    """Three sets of random cuts: latents and decoded pixels bit-identical to the uncut loop."""
    torch.manual_seed(0)
    model = FAMILIES[family]()
    expected, end = uncut(model)
    assert torch.isfinite(expected).all()
    decodes = not isinstance(model.pipe.vae, StandIn)
    picture = decoded(model, model.params, end) if decodes else None
    for seed in range(3):
        rng = random.Random(seed)
        embeds = through("embeds", model.embeds)
        job = live.prepare(model, model.params, embeds)
        once = state.capture_prepared(model.split, job.state, job.marks, embeds)
        once = through("prepared", once)
        while job.iteration < job.iterations:
            stop = job.iteration + rng.randrange(1, 4)
            done = chunk.run(job.pipe, model.split, job.state, job.iteration, stop, job.carried)
            job.iteration, job.carried = done.iteration, done.carried
            latents = through("latents", live.capture_latents(model.split, job))
            parts = {"embeds": through("embeds", model.embeds), "prepared": once}
            job = live.resume(model, model.params, {**parts, "latents": latents})
        assert torch.equal(job.carried["latents"], expected)
        if picture is not None:
            values = {**once["values"], **job.carried}
            assert torch.equal(decoded(model, model.params, values), picture)


@pytest.mark.parametrize(("steps", "iterations"), [(6, 6), (4, 7), (5, 14), (1, 1), (4, 3)])
def test_steps_are_counted_as_users_count_them(steps: int, iterations: int) -> None:
    """Heun's loop runs 2·n − 1 times for n steps; outside there are n, and every chunk moves."""
    values = diffusers.modular_pipelines.modular_pipeline.PipelineState()
    values.set("timesteps", torch.zeros(iterations))
    values.set("num_inference_steps", steps)
    job = live.LiveJob(None, values, torch.Generator(), schedulers.Marks({}))
    for step in range(1, steps + 1):
        before = job.iteration
        if before < iterations:
            job.iteration = job.iteration_at(step)
            assert before < job.iteration <= iterations
        if iterations >= steps:
            assert job.step_at(job.iteration) == step
    assert job.step_at(job.iteration) == steps
