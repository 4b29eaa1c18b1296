"""Which kernel attention runs on, through diffusers' own attention backends."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from common.models.errors import RefusedModel


def resolve(setting: str, device: str) -> str:
    """`auto` → `flash` where flash-attn is installed and the device is CUDA, else `native`.

    `native` is torch's scaled_dot_product_attention, which is what diffusers uses by
    default, so exact mode against a plain diffusers run means `native` on both sides.
    """
    if setting != "auto":
        return setting
    if torch.device(device).type == "cuda" and find_spec("flash_attn") is not None:
        from diffusers.utils import is_flash_attn_version

        # diffusers refuses older versions when the backend is set.
        return "flash" if is_flash_attn_version(">=", "2.6.3") else "native"
    return "native"


def apply(component: Any, backend: str) -> None:
    """Set the backend on a diffusers model; models without attention dispatch are left alone.

    Raises RefusedModel when the backend is unknown or not usable on this machine.
    """
    setter = getattr(component, "set_attention_backend", None)
    if setter is None:
        return
    try:
        setter(backend)
    except (ValueError, RuntimeError) as error:
        raise RefusedModel(f"attention backend {backend!r} is not usable here: {error}") from error
