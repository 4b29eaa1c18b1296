"""What a task's cost depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Frames that video models make one of, after the first: Wan, HunyuanVideo and Qwen's VAE.
FRAMES = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Image or video tokens (0 for an encode), pictures, forwards a step (2 with CFG)."""

    tokens: int
    n: int = 1
    forwards: int = 1

    @property
    def units(self) -> float:
        """Work in tokens, with a floor for what each forward costs whatever its size."""
        return (self.tokens + 24) * self.n * self.forwards

    def key(self) -> str:
        return f"{self.tokens}x{self.n}x{self.forwards}"

    @classmethod
    def from_key(cls, key: str) -> Shape:
        tokens, n, forwards = map(int, key.split("x"))
        return cls(tokens, n, forwards)


def shape_of(params: Mapping[str, Any], manifest: Mapping[str, Any]) -> Shape:
    """The shape of a job from its effective parameters and its model's manifest."""
    px = manifest.get("token_px") or 16
    tokens = -(-int(params.get("width") or px) // px) * -(-int(params.get("height") or px) // px)
    tokens *= 1 + (int(params.get("num_frames") or 1) - 1) // FRAMES
    cfg = manifest.get("cfg") or {}
    guided = bool(cfg) and (params.get(cfg.get("scale", "")) or 0) > 1
    if guided and cfg.get("needs"):
        guided = params.get(cfg["needs"]) is not None
    return Shape(tokens=tokens, n=int(params.get("n") or 1), forwards=2 if guided else 1)


def of_prompt(shape: Shape) -> Shape:
    """The shape of a job's encode: only the number of forwards counts."""
    return Shape(0, 1, shape.forwards)
