"""Which jobs may share a forward pass, from parameters and manifest alone. Pure, without torch.

The batch key is a short text; jobs of equal keys may stand in one denoise task together and
share forwards there. It holds the model and what the manifest's `batch.same` lists, so that
two jobs of one key need not agree in anything else: steps, guidance, seed, prompt, number of
pictures. A worker checks the tensors themselves and runs alone what the key could not tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def batch_key(params: Mapping[str, Any], manifest: Mapping[str, Any], exact: bool) -> str:
    """The key of a job, such as `tiny-qwen-image width=64 height=64`; empty if it runs alone.

    `params` are effective parameters, every default filled in. Alone run exact jobs, those with
    a step cache (one decision a forward, which neighbours cannot share), and all of models
    whose manifest has no `batch`.
    """
    batch = manifest.get("batch")
    if exact or not batch or (params.get("cache") or "none") != "none":
        return ""
    same = (f"{name}={params.get(name)}" for name in batch["same"])
    return " ".join([str(manifest["model"]), *same])


def forward_rows(params: Mapping[str, Any], manifest: Mapping[str, Any]) -> int:
    """Rows a job adds to a forward: one a picture and CFG branch.

    A batch's size is the sum of these; measured costs of batches are by this number.
    """
    cfg = manifest.get("cfg") or {}
    scale = params.get(cfg["scale"]) if cfg.get("scale") else None
    guided = scale is not None and scale > cfg.get("above", 1.0)
    if guided and cfg.get("needs"):
        guided = params.get(cfg["needs"]) is not None
    return int(params.get("n") or 1) * (2 if guided else 1)


def row_tokens(params: Mapping[str, Any], manifest: Mapping[str, Any]) -> int:
    """Image or video tokens of one row of a job. A video's VAE makes one latent frame of every
    `token_frames` (Wan 4, LTX 8) after the first."""
    px, frames = manifest.get("token_px") or 16, manifest.get("token_frames") or 4
    tokens = -(-int(params.get("width") or px) // px) * -(-int(params.get("height") or px) // px)
    return tokens * (1 + (int(params.get("num_frames") or 1) - 1) // frames)
