"""Factory of tiny diffusers model directories with random weights.

Each `make_*` writes a complete model directory in the ordinary diffusers format (what
`save_pretrained` of the classic pipeline writes) in a second or two, so that tests need
neither a network nor a trained model. Weights are random but seeded: the same call gives
the same model. Nothing here is fit for pictures; it is fit for `torch.equal`.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

# Before torch is imported: the thread count is part of exactness, and spinning threads
# beside a busy process turn 8 ms into a second.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

torch.set_num_threads(1)

QWEN_SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]

# What the tokenizer's merges are learned from: the prompt template, so that it takes tens
# of tokens and not hundreds, and a few words that tests use.
CORPUS = [
    "system Describe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background: user assistant",
    "a red circle on a blue square, a green triangle, small, large, left, right, blurry, ugly",
] * 4


def qwen_tokenizer(vocab_size: int = 480) -> Any:
    """A byte-level BPE Qwen2 tokenizer; every string has an encoding."""
    from transformers import Qwen2Tokenizer

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    bpe = json.loads(core.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in bpe["merges"]]
    return Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=merges,
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[AddedToken(s, special=True) for s in QWEN_SPECIALS],
    )


@functools.cache
def shared_root() -> Path:
    """A directory for models that several test files share; gone when the process ends."""
    root = Path(tempfile.mkdtemp(prefix="slackwater-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def shared_qwenimage() -> Path:
    """One tiny Qwen-Image for all tests that only read it."""
    return make_qwenimage(shared_root() / "tiny-qwen")


def _disturb(*modules: torch.nn.Module) -> None:
    """Give zero-initialised parameters values: a zero residual branch would hide errors."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.numel() and not parameter.detach().any():
                torch.nn.init.normal_(parameter, std=0.05)


def make_qwenimage(
    path: Path | str,
    seed: int = 0,
    layers: int = 2,
    heads: int = 2,
    head_dim: int = 32,
    base_dim: int = 8,
    scheduler: Any = None,
    dtype: torch.dtype = torch.float32,
    guidance_embeds: bool = False,
    **save: Any,
) -> Path:
    """A QwenImage directory: transformer, VAE (8 x per side), Qwen2.5-VL encoder, tokenizer."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(seed)
    tokenizer = qwen_tokenizer()
    hidden = 64
    rope = {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"}
    text_encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "hidden_size": hidden,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "rope_scaling": rope,
                "rope_theta": 1000000.0,
                "vocab_size": len(tokenizer),
                "max_position_embeddings": 4096,
                "bos_token_id": 0,
                "eos_token_id": 2,
                "pad_token_id": 0,
            },
            vision_config={
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_heads": 2,
                "out_hidden_size": hidden,
            },
            vocab_size=len(tokenizer),
        )
    ).eval()
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=layers,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        joint_attention_dim=hidden,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(head_dim // 4, head_dim * 3 // 8, head_dim * 3 // 8),
    ).eval()
    vae = AutoencoderKLQwenImage(
        base_dim=base_dim,
        z_dim=16,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1 * (i % 3 - 1) for i in range(16)],
        latents_std=[1.0 + 0.05 * i for i in range(16)],
    ).eval()
    _disturb(transformer, vae)
    pipe = QwenImagePipeline(
        scheduler=scheduler
        or FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            shift_terminal=0.02,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            time_shift_type="exponential",
        ),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
    if dtype != torch.float32:
        pipe.to(dtype)
    pipe.save_pretrained(path, **save)
    return Path(path)


def save_denoiser(
    path: Path | str,
    class_name: str,
    encoders: dict[str, str],
    parts: dict[str, Any],
    **config: Any,
) -> Path:
    """A model directory without text encoders: enough for the denoise and decode stages.

    `encoders` are listed in the index by class, but have no files; `parts` are saved.
    """
    root = Path(path)
    root.mkdir(parents=True)
    index: dict[str, Any] = {"_class_name": class_name, **config}
    for name, cls in encoders.items():
        index[name] = ["transformers", cls]
    for name, part in parts.items():
        index[name] = ["diffusers", type(part).__name__]
        part.save_pretrained(root / name)
    (root / "model_index.json").write_text(json.dumps(index))
    return root


def flux_parts() -> dict[str, Any]:
    """Components of a tiny Flux with embedded guidance."""
    import diffusers

    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=1,
        scaling_factor=1.5,
        shift_factor=0.06,
    )
    _disturb(transformer, vae)
    return {
        "transformer": transformer.eval(),
        "vae": vae.eval(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    }


def wan22_parts() -> dict[str, Any]:
    """Components of a tiny Wan 2.2: two experts, UniPC, a VAE that keeps time."""
    import diffusers

    torch.manual_seed(0)

    def expert() -> Any:
        return diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16,
            out_channels=16, text_dim=32, freq_dim=32, ffn_dim=32, num_layers=1,
            qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
        ).eval()  # fmt: skip

    parts = {
        "transformer": expert(),
        "transformer_2": expert(),
        "vae": diffusers.AutoencoderKLWan(
            base_dim=3,
            z_dim=16,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        ).eval(),
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    }
    _disturb(parts["transformer"], parts["transformer_2"], parts["vae"])
    return parts


def ltx_vae() -> Any:
    """A tiny autoencoder of LTX: 8 frames make one, 32 pixels of a side."""
    import diffusers

    return diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4,
        layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5,
    ).eval()  # fmt: skip
