"""Families beside their classic pipelines: tiny random weights, random embeddings, one call each.

Where a classic pipeline computes both branches in one batch, rounding differs; a wrong formula
differs by a thousand times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from common.models import batch, chunk, live
from common.models.errors import BadInput
from tests.test_models_families import Tiny, ltx, sdxl, wan22, z_image
from tests.tiny_models import ltx_vae

pytestmark = pytest.mark.filterwarnings("ignore")
ROUNDING = 3e-6  # of the largest latent


def ours(model: Tiny) -> torch.Tensor:
    job = live.prepare(model, model.params, model.embeds)
    latents: torch.Tensor = chunk.run(job.pipe, model.split, job.state, 0, 999).carried["latents"]
    return latents


def classic(name: str, model: Tiny, parts: dict[str, Any], **given: Any) -> Any:
    """What the classic pipeline of these components makes of the job's embeddings."""
    pipe = getattr(diffusers, name)(**parts)
    pipe.set_progress_bar_config(disable=True)
    embeds = model.embeds["values"]
    params = {k: model.params[k] for k in ("width", "height", "num_inference_steps")}
    generator = torch.Generator("cpu").manual_seed(model.params["seed"])
    return pipe(**embeds, **params, **given, generator=generator, output_type="latent")


def none(*names: str) -> dict[str, None]:
    return dict.fromkeys(names)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 3.0])
def test_z_image_guides_as_its_classic_pipeline(scale: float) -> None:
    """pos + scale·(pos − neg), on above 0: at 1 it guides, at 0 it does not."""
    torch.manual_seed(0)
    model = z_image()
    model.params["guidance_scale"] = scale
    parts = {n: getattr(model.pipe, n) for n in ("transformer", "vae", "scheduler")}
    parts |= none("text_encoder", "tokenizer")
    theirs = classic("ZImagePipeline", model, parts, guidance_scale=scale).images
    assert apart(ours(model), theirs) < ROUNDING


@pytest.mark.parametrize("second", [1.0, 0.5, 0.0, 3.0])
def test_wans_second_expert_guides_at_any_scale(second: float) -> None:
    """Once guidance is on, at 1 too, where u + 1·(c − u) is not c to the bit."""
    torch.manual_seed(0)
    model = wan22()
    model.params["guidance_scale_2"] = second
    names = ("transformer", "transformer_2", "vae", "scheduler")
    parts = {n: getattr(model.pipe, n) for n in names} | none("text_encoder", "tokenizer")
    parts["boundary_ratio"] = model.pipe.config.get("boundary_ratio")
    scales = {"guidance_scale": model.params["guidance_scale"], "guidance_scale_2": second}
    theirs = classic("WanPipeline", model, parts, num_frames=5, **scales).frames
    assert torch.equal(ours(model), theirs)


def test_sdxl_takes_the_sigmas_that_its_classic_pipeline_takes() -> None:
    """Euler's last sigma is where its last step ends: one more than steps."""
    torch.manual_seed(0)
    model = sdxl(diffusers.EulerDiscreteScheduler())
    sigmas = [14.6, 8.0, 4.0, 2.0, 1.0, 0.5, 0.1]
    model.params |= {"sigmas": sigmas, "num_inference_steps": 6}
    parts = {n: getattr(model.pipe, n) for n in ("unet", "vae", "scheduler")}
    parts |= none("text_encoder", "tokenizer", "tokenizer_2")
    text = CLIPTextConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, projection_dim=32,
    )  # fmt: skip
    parts["text_encoder_2"] = CLIPTextModelWithProjection(text)
    scale = model.params["guidance_scale"]
    theirs = classic(
        "StableDiffusionXLPipeline", model, parts, sigmas=sigmas, guidance_scale=scale
    ).images
    assert apart(ours(model), theirs) < ROUNDING


def test_ltx_places_frames_by_the_rate_they_are_played_at() -> None:
    torch.manual_seed(0)
    model = ltx()
    model.params |= {"fps": 12, "num_frames": 17}
    parts = {n: getattr(model.pipe, n) for n in ("transformer", "scheduler")}
    parts |= {"vae": ltx_vae(), **none("text_encoder", "tokenizer")}
    given = {"guidance_scale": 3.0, "num_frames": 17}
    theirs, others = (
        classic("LTXPipeline", model, parts, **given, frame_rate=rate).frames for rate in (12, 25)
    )
    assert apart(ours(model), theirs) < ROUNDING < apart(others, theirs)
    # Positions are what all rows of a forward have in common.
    jobs = [live.prepare(model, {**model.params, "fps": fps}, model.embeds) for fps in (12, 12, 25)]
    one, same, other = (batch.key(model, job) for job in jobs)
    assert one == same != other


# -- what a job cannot have --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "params", "said"),
    [
        (wan22, {"sigmas": [1.0, 0.5], "num_inference_steps": 2}, "TypeError"),
        (wan22, {"num_frames": 6}, "num_frames"),
        (lambda: sdxl(diffusers.EulerDiscreteScheduler()),
         {"sigmas": [14.6, 8.0, 4.0], "num_inference_steps": 3}, "^sigmas: .* 2 steps .* has 3"),
        (z_image, {"sigmas": [float("nan")] * 6}, "^sigmas: .*finite"),
    ],
)  # fmt: skip
def test_what_the_blocks_can_do_nothing_with_is_the_jobs_own_fault(
    family: Callable[[], Tiny], params: dict[str, Any], said: str
) -> None:
    """Whatever diffusers raises of it: it is not tried again, and no worker is blamed."""
    model = family()
    with pytest.raises(BadInput, match=said) as caught:
        live.prepare(model, {**model.params, **params}, model.embeds)
    assert caught.value.code == "invalid_request"
