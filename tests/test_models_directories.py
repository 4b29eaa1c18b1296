"""Flux and Wan 2.2 from model directories, through the real denoise and decode stages.

Against the classic pipelines with the same embeddings. (Their text encoders are left out:
tiny ones would need tokenizers that only the hub has.)
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from common.arena import Arena
from common.checks import InvalidRequest
from common.handles import HandleStore
from common.models import parcels
from common.models.stages import build_stage
from common.params import PoolDefaults, accept
from common.push import read_push
from tests.fakes import raw_push
from tests.tiny_models import flux_parts, ltx_vae, save_denoiser, wan22_parts
from tests.tiny_pipeline import Job, Stages

pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")
FLUX_ENCODERS = {
    "text_encoder": "CLIPTextModel",
    "tokenizer": "CLIPTokenizer",
    "text_encoder_2": "T5EncoderModel",
    "tokenizer_2": "T5TokenizerFast",
}
LTX_ENCODERS = {"text_encoder": "T5EncoderModel", "tokenizer": "T5TokenizerFast"}
WAN_ENCODERS = {"text_encoder": "UMT5EncoderModel", "tokenizer": "T5TokenizerFast"}


class Denoisers(Stages):
    """A model whose encode stage is replaced by embeddings made up here."""

    KINDS = ("denoise", "decode")

    def __init__(self, model: Path, arena: Path) -> None:
        self.store = HandleStore("test", Arena.open(str(arena), 32 * 2**20))
        self.by_kind = {kind: build_stage(kind, model, self.store) for kind in self.KINDS}
        self.seq = iter(range(1, 1000))

    def embed(self, job: Job, embeds: dict[str, Any]) -> None:
        split = self.by_kind["denoise"].model.split
        kwargs: dict[str, list[str]] = {}
        for _, block in split.encode:
            for out in block.intermediate_outputs:
                if out.kwargs_type and out.name in embeds:
                    kwargs.setdefault(out.kwargs_type, []).append(out.name)
        parcel = parcels.write("embeds", {"values": embeds, "kwargs": kwargs}, CPU)
        job.handles["embeds"] = self.store.put(job.id, 0, "embeds", parcel)


def test_flux_equals_its_classic_pipeline(tmp_path: Path) -> None:
    """Embedded guidance, no guider, packed latents; two pictures, cut three times."""
    parts = flux_parts()
    model = save_denoiser(tmp_path / "flux", "FluxPipeline", FLUX_ENCODERS, parts)
    stages = Denoisers(model, tmp_path / "arena")
    made = stages.by_kind["denoise"].manifest()
    assert made["cfg"] is None
    assert made["token_px"] == made["parameters"]["width"]["multiple_of"] == 4
    assert made["parameters"]["guidance_scale"]["default"] == 3.5
    assert "alias_of" not in made["parameters"]["guidance_scale"]

    embeds = {"prompt_embeds": torch.randn(1, 5, 32), "pooled_prompt_embeds": torch.randn(1, 32)}
    job = stages.job(width=32, height=48, num_inference_steps=6, guidance_scale=2.5, n=2)
    stages.embed(job, embeds)
    job.denoise([1, 4, 6], forget=True)
    pictures = job.pictures()

    # Loaded from the same files: weights that lie in memory at another alignment (as those
    # just made do) give other bits.
    pipe = diffusers.FluxPipeline.from_pretrained(model, **dict.fromkeys(FLUX_ENCODERS))
    pipe.set_progress_bar_config(disable=True)
    theirs = pipe(
        **embeds,
        width=32,
        height=48,
        num_inference_steps=6,
        guidance_scale=2.5,
        num_images_per_prompt=2,
        generator=torch.Generator("cpu").manual_seed(job.params["seed"]),
    ).images
    assert len(theirs) == len(pictures) == 2
    assert all(np.array_equal(a, np.array(b)) for a, b in zip(pictures, theirs, strict=True))


def test_wan22_equals_its_classic_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts with a guidance scale each, UniPC history in the checkpoint, a video out."""
    # Keeping some modules in fp32 is what needs accelerate; here all are.
    monkeypatch.setattr(diffusers.WanTransformer3DModel, "_keep_in_fp32_modules", None)
    parts = wan22_parts()
    model = save_denoiser(
        tmp_path / "wan", "WanPipeline", WAN_ENCODERS, parts, boundary_ratio=0.875
    )
    stages = Denoisers(model, tmp_path / "arena")
    made = stages.by_kind["denoise"].manifest()
    assert made["task"] == "text-to-video"
    assert {"transformer", "transformer_2"} <= set(made["components"])
    assert {"num_frames", "fps", "guidance_scale", "guidance_scale_2"} <= set(made["parameters"])
    # WanPipeline takes none, and UniPC fails on a list of them.
    assert "sigmas" not in made["parameters"]
    assert (made["token_frames"], made["parameters"]["fps"]["default"]) == (4, 16)
    for frames, said in ((80, "77 and 81 are"), (258, "from 1 to 257"), (81, "")):
        assert said in refusal(made, num_frames=frames)

    embeds = {
        "prompt_embeds": torch.randn(1, 5, 32),
        "negative_prompt_embeds": torch.randn(1, 5, 32),
    }
    size = {"width": 32, "height": 16, "num_frames": 9, "num_inference_steps": 8}
    scales = {"guidance_scale": 4.0, "guidance_scale_2": 3.0}
    job = stages.job(**size, **scales, negative_prompt="y", output_format="png", fps=10)
    stages.embed(job, embeds)
    job.denoise([2, 3, 7, 8], forget=True)
    output = job.run("decode").outputs[0]
    video = Image.open(io.BytesIO(output.content))
    frames = [np.array(f.convert("RGB")) for f in ImageSequence.Iterator(video)]

    pipe = diffusers.WanPipeline.from_pretrained(model, **dict.fromkeys(WAN_ENCODERS))
    pipe.set_progress_bar_config(disable=True)
    theirs = pipe(
        **embeds,
        **size,
        **scales,
        generator=torch.Generator("cpu").manual_seed(job.params["seed"]),
        output_type="np",
    ).frames[0]
    expected = (theirs * 255).round().astype(np.uint8)
    assert len(frames) == len(expected) == 9
    assert np.array_equal(np.stack(frames), expected)
    assert video.info["duration"] == 100


def test_ltx_says_what_its_videos_may_be(tmp_path: Path) -> None:
    """Eight frames make one, and it is 25 a second where nobody says otherwise. The classic
    pipeline makes one frame of 8 without a word."""
    parts = {
        "transformer": diffusers.LTXVideoTransformer3DModel(
            in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16,
            cross_attention_dim=32, num_layers=1, caption_channels=32,
        ),
        "vae": ltx_vae(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    }  # fmt: skip
    model = save_denoiser(tmp_path / "ltx", "LTXPipeline", LTX_ENCODERS, parts)
    stages = Denoisers(model, tmp_path / "arena").by_kind
    for stage in stages.values():
        made = stage.manifest()
        assert made["token_frames"] == 8
        assert made["parameters"]["fps"]["default"] == 25
        assert made["parameters"]["num_frames"]["default"] == 161
        for frames, said in ((8, "1 and 9 are"), (9, "")):
            assert said in refusal(made, num_frames=frames)
    # Jobs of two rates have other positions in time, and cannot share a pass.
    assert "fps" in stages["denoise"].manifest()["batch"]["same"]


def refusal(manifest: dict[str, Any], **fields: Any) -> str:
    """Why a job of these fields is refused; "" if it is not."""
    push = read_push("1000-0", raw_push(prompt="x", **fields))
    try:
        accept(push, {manifest["model"]: manifest}, PoolDefaults())
    except InvalidRequest as error:
        return str(error)
    return ""
