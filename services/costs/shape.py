"""What a task's cost depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.batching import row_tokens
from common.stage import DECODE, ENCODE

# Of a step cache's threshold: who varies it a little must not fill what is remembered.
THRESHOLD_DIGITS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """Image or video tokens (0 for an encode), pictures, forwards a step (2 with CFG).

    Where several jobs, or a job's CFG branches, share a forward pass, `n` are its rows in all and
    `forwards` is 1: a row is a prompt, a picture and branch, or a picture, by stage.

    Steps under a step cache are short or long as it hits or misses, so jobs with one have times of
    their own, by its setting (`cached`); until some were reported, those without a cache.
    """

    tokens: int
    n: int = 1
    forwards: int = 1
    cached: str = ""

    @property
    def units(self) -> float:
        """Work in tokens, with a floor for what each forward costs whatever its size."""
        return (self.tokens + 24) * self.n * self.forwards

    @property
    def is_sound(self) -> bool:
        """Whether there can be such a job: False of what somebody has written by hand."""
        return self.tokens >= 0 and self.n >= 1 and self.forwards >= 1

    def key(self) -> str:
        plain = f"{self.tokens}x{self.n}x{self.forwards}"
        return f"{plain}x{self.cached}" if self.cached else plain

    @classmethod
    def from_key(cls, key: str) -> Shape:
        tokens, n, forwards, *cached = key.split("x", 3)
        return cls(int(tokens), int(n), int(forwards), *cached)


def shape_of(params: Mapping[str, Any], manifest: Mapping[str, Any]) -> Shape:
    """The shape of a job from its effective parameters and its model's manifest."""
    tokens = row_tokens(params, manifest)
    cfg = manifest.get("cfg") or {}
    guided = bool(cfg) and (params.get(cfg.get("scale", "")) or 0) > 1
    if guided and cfg.get("needs"):
        guided = params.get(cfg["needs"]) is not None
    cached = params.get("cache") or "none"
    if cached != "none" and params.get("cache_threshold") is not None:
        cached = f"{cached}@{round(params['cache_threshold'], THRESHOLD_DIGITS)}"
    return Shape(
        tokens=tokens,
        n=int(params.get("n") or 1),
        forwards=2 if guided else 1,
        cached="" if cached == "none" else cached,
    )


def at_stage(shape: Shape, stage: str) -> Shape:
    """What of a shape counts at a stage: of an encode only the forwards, of a decode the pictures,
    with guidance as without. A pass of several prompts is a shape without tokens."""
    if stage == ENCODE:
        return Shape(0, 1 if shape.tokens else shape.n, shape.forwards)
    return Shape(shape.tokens, shape.n, 1) if stage == DECODE else shape
