"""Stage 3: scenes drawn and encoded once, so that the next stage never waits for the VAE."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage

from models.training import vae as autoencoder
from models.training import world

# Scenes encoded for each (height, width). 128 px gets the bulk: it is where the demos run and where
# accuracy is measured; the others teach that the same words hold at another number of tokens.
COUNTS: dict[tuple[int, int], int] = {
    (128, 128): 24_000,
    (64, 64): 16_000,
    (96, 160): 3_000,
    (160, 96): 3_000,
    (192, 128): 1_500,
    (128, 192): 1_500,
    (256, 256): 4_000,
}


def scene_and_rng(
    seed: int, height: int, width: int, index: int
) -> tuple[world.Scene, random.Random]:
    """The index-th training scene of a size, and the rng to render it with."""
    rng = random.Random(f"scene {seed} {height}x{width} {index}")
    return world.random_scene(rng), rng


def scale(vae: AutoencoderKLQwenImage) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents' mean and spread as (1, channels, 1, 1) tensors."""
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1)
    return mean, torch.tensor(vae.config.latents_std).view(1, -1, 1, 1)


def pack(z: torch.Tensor) -> torch.Tensor:
    """(batch, 8, h, w) latents to (batch, h/2 * w/2, 32) tokens, in the pipeline's own order."""
    b, c, h, w = z.shape
    return (
        z.view(b, c, h // 2, 2, w // 2, 2)
        .permute(0, 2, 4, 1, 3, 5)
        .reshape(b, h // 2 * w // 2, c * 4)
    )


def encode_all(work: Path, seed: int, size: tuple[int, int]) -> Path:
    """Encode one size's scenes; returns the .npy file of (count, 8, h/8, w/8) normalised latents.

    float16 on disk: its rounding is a hundredth of the noise that the VAE was trained with.
    """
    height, width = size
    file = work / f"latents-{height}x{width}.npy"
    if file.exists():
        return file
    vae = AutoencoderKLQwenImage.from_pretrained(work / "vae")
    mean, std = scale(vae)
    began, count, batch = time.monotonic(), COUNTS[size], max(1, 4 * 128 * 128 // (height * width))
    found = np.empty((count, 8, height // 8, width // 8), dtype=np.float16)
    with torch.inference_mode(), autoencoder.single_frame(vae):
        for first in range(0, count, batch):
            indices = range(first, min(first + batch, count))
            drawn = [scene_and_rng(seed, height, width, i) for i in indices]
            stack = np.stack(
                [world.pixels(world.render(s, height, width, rng)) for s, rng in drawn]
            )
            x = torch.from_numpy(stack).permute(0, 3, 1, 2).contiguous()
            z = (autoencoder.encode_mean(vae, x) - mean) / std
            found[first : first + len(drawn)] = z.numpy()
    with open(file.with_suffix(".part"), "wb") as sink:
        np.save(sink, found)
    file.with_suffix(".part").rename(file)
    print(f"latents {height}x{width}: {count} in {time.monotonic() - began:.0f} s", flush=True)
    return file
