"""From the trained parts to a directory that `QwenImagePipeline.from_pretrained` reads."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer


def new_transformer() -> QwenImageTransformer2DModel:
    """An untrained transformer: one token is 16x16 pixels, so 64 px are 16 and 256 px 256 tokens.

    Five layers rather than six, so that the whole directory stays under 40 MB in float32. Half
    precision would be smaller, but transformers loads a text encoder in the precision it is stored
    in and diffusers does not: the parts would end up in different ones.
    """
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=32,
        out_channels=8,
        num_layers=5,
        attention_head_dim=48,
        num_attention_heads=4,
        joint_attention_dim=128,
        axes_dims_rope=(8, 20, 20),
    )


def new_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Euler over a shifted schedule; the larger the picture, the longer it stays noisy."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        time_shift_type="exponential",
        base_image_seq_len=16,
        base_shift=0.7,
        max_image_seq_len=256,
        max_shift=1.8,
    )


def save_pipeline(
    out: Path,
    vae: AutoencoderKLQwenImage,
    transformer: QwenImageTransformer2DModel,
    text_encoder: Qwen2_5_VLForConditionalGeneration,
    tokenizer: Qwen2Tokenizer,
) -> None:
    """Write the pipeline to `out`, file by file in place, so that no reader sees half a file."""
    pipe = QwenImagePipeline(
        scheduler=new_scheduler(),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
    out.mkdir(parents=True, exist_ok=True)
    # Beside `out`, as a rename is only atomic within a file system.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as fresh:
        pipe.save_pretrained(fresh, safe_serialization=True)
        for file in sorted(Path(fresh).rglob("*")):
            target = out / file.relative_to(fresh)
            if file.is_dir():
                target.mkdir(exist_ok=True)
            else:
                file.chmod(0o644)  # safetensors writes files that only their owner reads
                os.replace(file, target)
