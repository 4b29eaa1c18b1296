"""Stage 1: the autoencoder, trained on pictures of the world alone.

Ordinary training calls lead nowhere here, for two reasons: `vae.decode` clamps to -1..1, which
kills the gradient of every pixel that overshoots, and a 3-D convolution costs six times the 2-D one
it amounts to when there is a single frame. So this stage goes through the encoder and decoder
modules, with their convolutions swapped for the time of the training.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType

import numpy as np
import torch
import torch.nn.functional as fn
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import (
    QwenImageCausalConv3d,
    QwenImageRMS_norm,
)

from models.training import world

LATENT_NOISE = 0.05  # of a latent's spread: keeps neighbouring latents decoding alike
MEAN_PENALTY = 1e-4  # stands in for the KL term: keeps the latents' scale near 1, no more
LEARNING_RATE = 4e-4  # 1e-3 does not learn
# (steps, extra weight of pixels near an edge, whether the encoder learns too), each with a learning
# rate cycle of its own. Colours come first; but a star of 15 px that decodes as a blob costs a mean
# over all pixels next to nothing, so the second phase makes its points count. The third leaves the
# latents as they are: it may run beside the stages that build on them.
PHASES = ((3_500, 0.0, True), (1_500, 6.0, True), (2_000, 6.0, False))
# (height, width, batch, share). Edges look alike at every size, so small pictures teach most.
BATCHES = ((64, 64, 16, 0.75), (128, 128, 4, 0.15), (96, 160, 4, 0.05), (256, 256, 1, 0.05))


def new_vae() -> AutoencoderKLQwenImage:
    """An untrained autoencoder: 8x8 pixels to 8 channels."""
    return AutoencoderKLQwenImage(
        base_dim=16,
        z_dim=8,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        # Pictures only: without time convolutions the file is smaller. The number of entries
        # is what sets the pipeline's scale factor, 2 ** 3.
        temperal_downsample=[False, False, False],
        latents_mean=[0.0] * 8,
        latents_std=[1.0] * 8,
    )


def _conv_one_frame(
    conv: QwenImageCausalConv3d, x: torch.Tensor, cache_x: None = None
) -> torch.Tensor:
    pad = (conv._padding[2], conv._padding[0])
    return fn.conv2d(x.squeeze(2), conv.weight[:, :, -1], conv.bias, padding=pad).unsqueeze(2)


def _norm(norm: QwenImageRMS_norm, x: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = (
        x * x.square().mean(1, keepdim=True).clamp_min(1e-20).rsqrt() * norm.gamma
    )
    return normed


@contextmanager
def single_frame(vae: AutoencoderKLQwenImage) -> Iterator[None]:
    """Inside, every causal 3-D convolution runs as a 2-D one over its last temporal tap.

    With one frame the other taps only see the zeros it is padded with: the same mathematics. So is
    the norm, without torch's vector norm, which on CPU takes as long as all convolutions together.
    """
    faster: dict[type, Callable[..., torch.Tensor]] = {
        QwenImageCausalConv3d: _conv_one_frame,
        QwenImageRMS_norm: _norm,
    }
    swapped = [module for module in vae.modules() if type(module) in faster]
    for module in swapped:
        module.forward = MethodType(faster[type(module)], module)
    try:
        yield
    finally:
        for module in swapped:
            del module.forward


def encode_mean(vae: AutoencoderKLQwenImage, x: torch.Tensor) -> torch.Tensor:
    """Pictures (batch, 3, h, w) in -1..1 to latent means (batch, 8, h/8, w/8), not normalised."""
    moments = vae.quant_conv(vae.encoder(x.unsqueeze(2)))
    mean: torch.Tensor = moments.chunk(2, dim=1)[0].squeeze(2)
    return mean


def decode_raw(vae: AutoencoderKLQwenImage, z: torch.Tensor) -> torch.Tensor:
    """Latents (batch, 8, h, w) to pictures (batch, 3, 8h, 8w), not clamped."""
    pictures: torch.Tensor = vae.decoder(vae.post_quant_conv(z.unsqueeze(2))).squeeze(2)
    return pictures


def draw_batch(rng: random.Random, height: int, width: int, count: int) -> torch.Tensor:
    """Random scenes as a (count, 3, height, width) tensor in -1..1."""
    scenes = [world.render(world.random_scene(rng), height, width, rng) for _ in range(count)]
    stack = np.stack([world.pixels(picture) for picture in scenes])
    return torch.from_numpy(stack).permute(0, 3, 1, 2).contiguous()


def measure_latents(vae: AutoencoderKLQwenImage, seed: int) -> None:
    """Write the latents' mean and spread, channel by channel, into the VAE's config."""
    rng = random.Random(seed)
    with torch.no_grad(), single_frame(vae):
        z = torch.cat([encode_mean(vae, draw_batch(rng, 128, 128, 16)) for _ in range(16)])
    mean, std = z.mean((0, 2, 3)), z.std((0, 2, 3))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


def edge_weights(x: torch.Tensor, extra: float) -> torch.Tensor:
    """(batch, 1, h, w) loss weights with mean 1: `extra` more within 3 pixels of an edge."""
    contrast = fn.max_pool2d(x, 3, 1, 1) + fn.max_pool2d(-x, 3, 1, 1)
    edge = (contrast.amax(1, keepdim=True) > 0.3).float()
    weights = 1 + extra * fn.max_pool2d(edge, 5, 1, 2)
    return weights / weights.mean()


def step_loss(vae: AutoencoderKLQwenImage, seed: int, step: int, extra: float) -> torch.Tensor:
    """The loss of one batch, which the step's number decides."""
    rng = random.Random(f"vae {seed} {step}")
    height, width, count, _ = rng.choices(BATCHES, [share for *_, share in BATCHES])[0]
    x = draw_batch(rng, height, width, count)
    z = encode_mean(vae, x)
    spread = z.detach().std((0, 2, 3), keepdim=True)
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    noise = LATENT_NOISE * spread * torch.randn(z.shape, generator=generator)
    error = decode_raw(vae, z + noise) - x
    weighted = edge_weights(x, extra) * (error.abs() + error.square())
    return weighted.mean() + MEAN_PENALTY * z.square().mean()


def train(work: Path, seed: int, resume: bool) -> None:
    """Train through all phases; `work/vae` holds the result, `work/vae-N.pt` phase N's state."""
    torch.manual_seed(seed)
    vae = new_vae()
    with single_frame(vae):
        for phase in range(len(PHASES)):
            train_phase(vae, work / f"vae-{phase}.pt", phase, seed, resume)
    measure_latents(vae, seed)
    vae.save_pretrained(work / "vae")


def train_phase(
    vae: AutoencoderKLQwenImage, state_file: Path, phase: int, seed: int, resume: bool
) -> None:
    """Train the VAE, in place, for one entry of PHASES; resume from the file if asked to."""
    steps, extra, encoder_learns = PHASES[phase]
    for part in (vae.encoder, vae.quant_conv):
        part.requires_grad_(encoder_learns)
    learning = [weight for weight in vae.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=LEARNING_RATE, weight_decay=1e-4, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.05, final_div_factor=50
    )
    first = 0
    if resume and state_file.exists():
        state = torch.load(state_file, weights_only=True)
        vae.load_state_dict(state["vae"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first = state["step"]
    began, recent = time.monotonic(), 0.0
    before = sum(steps for steps, *_ in PHASES[:phase])
    for step in range(first, steps):
        loss = step_loss(vae, seed, before + step, extra)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        schedule.step()
        recent = loss.item() if step == first else 0.98 * recent + 0.02 * loss.item()
        if (step + 1) % 100 == 0:
            pace = (time.monotonic() - began) / (step + 1 - first)
            print(
                f"vae {phase}: {step + 1}/{steps} loss {recent:.4f} {pace:.3f} s a step", flush=True
            )
        if (step + 1) % 500 == 0 or step + 1 == steps:
            state = {"vae": vae.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"schedule": schedule.state_dict(), "step": step + 1}, state_file)
