"""A video autoencoder decoding one frame: its causal 3-D convolutions as 2-D ones.

With a single frame every temporal tap but the last sees only the zeros it is padded with, so
a 2-D convolution over the last tap is the same mathematics, up to rounding (2e-6), in a
fraction of the time: torch's 3-D convolution is slow on CPUs. So is the vector norm that
the RMS norm is written with there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import (
    QwenImageCausalConv3d,
    QwenImageRMS_norm,
)
from torch.nn import functional as fn


def applies(vae: Any) -> bool:
    """Whether this autoencoder has such a form."""
    return isinstance(vae, AutoencoderKLQwenImage)


@contextmanager
def single_frame(vae: Any) -> Iterator[None]:
    """Inside, `vae` decodes latents of one frame in 2-D; others it cannot decode."""
    faster: dict[type, Callable[..., torch.Tensor]] = {
        QwenImageCausalConv3d: _convolve,
        QwenImageRMS_norm: _normalise,
    }
    swapped = [module for module in vae.modules() if type(module) in faster]
    for module in swapped:
        module.forward = partial(faster[type(module)], module)
    try:
        yield
    finally:
        for module in swapped:
            del module.forward


def _convolve(conv: Any, x: torch.Tensor, cache_x: None = None) -> torch.Tensor:
    """x: b×c×1×h×w."""
    pad = conv._padding[2], conv._padding[0]
    flat = fn.conv2d(x.squeeze(2), conv.weight[:, :, -1], conv.bias, padding=pad)
    return flat.unsqueeze(2)


def _normalise(norm: Any, x: torch.Tensor) -> torch.Tensor:
    mean: torch.Tensor = x.float().square().mean(1, keepdim=True)
    scaled: torch.Tensor = x * mean.clamp_min(1e-20).rsqrt().to(x.dtype) * norm.gamma + norm.bias
    return scaled
