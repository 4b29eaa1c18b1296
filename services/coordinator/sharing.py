"""What a job asks of each stage's forward passes, and with whom it may share them. Pure.

A pass has rows: at the encoder a row is a prompt, at the denoiser a picture and CFG branch, at
the decoder a picture. Jobs that are not exact may share passes where their model's family can: of
denoising those of one batch key (common/batching.py), of encoding all of a model, since the stage
itself puts prompts of one length together, of decoding those of one size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.batching import batch_key
from common.job import JobSpec
from common.stage import DECODE, DENOISE, ENCODE, STAGES
from services.costs.model import Shape

SIZES = ("width", "height", "num_frames")


def keys_of(spec: JobSpec, manifest: Mapping[str, Any]) -> dict[str, str]:
    """By stage, the key of those that it may share a task's passes with; "": it runs alone."""
    if spec.exact or not manifest.get("batch"):
        return dict.fromkeys(STAGES, "")
    size = " ".join(f"{name}={spec.params.get(name)}" for name in SIZES)
    return {
        ENCODE: spec.model,
        DENOISE: batch_key(spec.params, manifest, spec.exact),
        DECODE: f"{spec.model} {size}",
    }


def shapes_of(shape: Shape, merges: bool) -> dict[str, Shape]:
    """By stage, the shape of a job alone. `merges`: its CFG branches are rows of one pass."""
    return {
        ENCODE: Shape(shape.tokens, 1, shape.forwards),
        DENOISE: Shape(shape.tokens, shape.n * shape.forwards, 1) if merges else shape,
        DECODE: Shape(shape.tokens, shape.n, 1),
    }


def rows_of(shape: Shape) -> int:
    """What a job of this shape adds to a pass that it shares."""
    return shape.n * shape.forwards
