"""A first cost model: seconds per task by shape, learned from what workers report.

A shape that has been seen costs the median of its last observations, so that a slow first
step or a paused process does not poison it. An unseen shape is scaled from the nearest seen
one by its units of work; a model nobody has run yet costs what its manifest says, or a
guess. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from common.stage import DECODE, DENOISE, ENCODE

# Odd, so that the median is an observation; short, so that a change of machine shows soon.
WINDOW = 9
# Guesses for a model that nobody has run and whose manifest says nothing (s, and s per token).
UNKNOWN = {
    ENCODE: {"fixed_s": 0.05, "token_s": 0.0},
    DENOISE: {"fixed_s": 0.02, "token_s": 2e-4},
    DECODE: {"fixed_s": 0.1, "token_s": 1e-3},
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a task's cost depends on: image tokens, pictures, forwards a step (2 with CFG)."""

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
    cfg = manifest.get("cfg") or {}
    guided = bool(cfg) and (params.get(cfg.get("scale", "")) or 0) > 1
    if guided and cfg.get("needs"):
        guided = params.get(cfg["needs"]) is not None
    return Shape(tokens=tokens, n=int(params.get("n") or 1), forwards=2 if guided else 1)


class CostModel:
    """Estimates by (model, stage); a denoise cost is seconds per step."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], dict[Shape, deque[float]]] = {}
        self._prior: dict[tuple[str, str], Mapping[str, float]] = {}

    def set_prior(self, model: str, costs: Mapping[str, Any]) -> None:
        """`costs` as a manifest publishes it: {stage: {"fixed_s": …, "token_s": …}}."""
        for stage, prior in costs.items():
            self._prior[model, stage] = prior

    def observe(self, model: str, stage: str, shape: Shape, seconds: float) -> None:
        if seconds <= 0:
            return
        shapes = self._seen.setdefault((model, stage), {})
        shapes.setdefault(shape, deque(maxlen=WINDOW)).append(seconds)

    def estimate(self, model: str, stage: str, shape: Shape) -> float:
        """Seconds for one task of `stage`, or for one denoising step."""
        if stage == ENCODE:  # the prompt's length is not in the shape: all encodes are alike
            shape = Shape(0, 1, shape.forwards)
        shapes = self._seen.get((model, stage))
        if shapes:
            if shape in shapes:
                return median(shapes[shape])
            near = min(shapes, key=lambda s: abs(s.units - shape.units))
            return median(shapes[near]) * shape.units / near.units
        prior = self._prior.get((model, stage), UNKNOWN[stage])
        work = shape.tokens * shape.n * shape.forwards
        return prior["fixed_s"] + prior.get("token_s", 0.0) * work

    def dump(self) -> dict[str, float]:
        """What was learned, as "{model}/{stage}/{shape}" -> seconds."""
        return {
            f"{model}/{stage}/{shape.key()}": median(seen)
            for (model, stage), shapes in self._seen.items()
            for shape, seen in shapes.items()
        }

    def load(self, learned: Mapping[str, float]) -> None:
        for name, seconds in learned.items():
            model, stage, key = name.rsplit("/", 2)
            self.observe(model, stage, Shape.from_key(key), float(seconds))
