"""What tasks cost on machines that we do not have, as others published it.

A calibration gives seconds for one encode, one denoising step and one decode over image (or
video) tokens, on one rank. Between the published shapes a step is the polynomial through them
(attention makes it a·n² + b·n + c); outside them it is only as good as that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.stage import DECODE, DENOISE, ENCODE
from services.costs.model import CostModel, Shape

Curve = Callable[[int], float]  # tokens -> seconds


@dataclass(frozen=True)
class Calibration:
    """Costs by stage; `token_px` is the side of the square that one token covers."""

    name: str
    source: str
    step: Curve
    encode: Curve
    decode: Curve
    token_px: int = 16
    sizes: Mapping[str, int] = field(default_factory=dict)  # "512x512" -> tokens, as published

    def seconds(self, stage: str, tokens: int) -> float:
        curve = {ENCODE: self.encode, DENOISE: self.step, DECODE: self.decode}[stage]
        return max(0.0, curve(tokens))

    def standalone_s(self, tokens: int, steps: int) -> float:
        """What a job takes alone: encode, all its steps, decode."""
        work = steps * self.seconds(DENOISE, tokens)
        return work + self.seconds(ENCODE, tokens) + self.seconds(DECODE, tokens)


class KnownCosts(CostModel):
    """A cost model that is told the truth (times `bias`) and learns nothing."""

    def __init__(self, calibration: Calibration, bias: float = 1.0) -> None:
        super().__init__()
        self._calibration, self._bias = calibration, bias
        self._known: dict[tuple[str, int], float] = {}

    def set_prior(self, model: str, costs: Mapping[str, Any]) -> None:
        """Nothing to learn from a manifest."""

    def observe(self, model: str, stage: str, shape: Shape, seconds: float) -> None:
        """Nothing to learn from a report."""

    def estimate(self, model: str, stage: str, shape: Shape) -> float:
        try:
            return self._known[stage, shape.tokens]
        except KeyError:
            seconds = self._bias * self._calibration.seconds(stage, shape.tokens)
            self._known[stage, shape.tokens] = seconds
            return seconds


def flat(seconds: float) -> Curve:
    return lambda _: seconds


def through(points: Sequence[tuple[int, float]]) -> Curve:
    """The polynomial of least degree through (tokens, milliseconds), in seconds (Lagrange)."""

    def curve(tokens: int) -> float:
        total = 0.0
        for i, (x, y) in enumerate(points):
            term = y / 1000
            for j, (other, _) in enumerate(points):
                if i != j:
                    term *= (tokens - other) / (x - other)
            total += term
        return total

    return curve


QWEN_SIZES = {"512x512": 1024, "768x768": 2304, "1024x1024": 4096, "1536x1536": 9216}
QWEN_H20 = through([(1024, 155.0), (4096, 605.0), (9216, 1557.0)])

CALIBRATIONS = {
    c.name: c
    for c in (
        Calibration(
            "toy",
            "one server; Qwen-Image's step times on an H20, nothing but steps",
            QWEN_H20, flat(0.0), flat(0.0), sizes=QWEN_SIZES,
        ),
        Calibration(
            "h20-qwen-image",
            "published: steps 512²/1024²/1536² on an H20, one forward; text 35 ms and VAE 17 ms at "
            "512² from an H200, the VAE taken as linear in pixels",
            QWEN_H20, flat(0.035), lambda n: 0.017 * n / 1024, sizes=QWEN_SIZES,
        ),
        Calibration(
            "a100-qwen-image",
            "published: 904 ms at 1024² on an A100; other sizes scaled as on the H20; encode and "
            "decode as h20-qwen-image",
            lambda n: QWEN_H20(n) * 904 / 605, flat(0.035), lambda n: 0.017 * n / 1024,
            sizes=QWEN_SIZES,
        ),
        Calibration(
            "h100-flux-dev",
            "published: Flux-dev 1024² on an H100, 240 ms eager; linear in tokens; encode and "
            "decode as h20-qwen-image",
            lambda n: 0.240 * n / 4096, flat(0.035), lambda n: 0.017 * n / 1024,
            sizes=QWEN_SIZES,
        ),
        Calibration(
            "wan-gfdit",
            "GF-DiT's simulator, SP 1: 0.1323 ms a token a step; encode 55 ms and "
            "prepare 52 ms; decode 100 ms + 9e-8 ms a voxel (1,024 voxels a token)",
            lambda n: 0.1323e-3 * n, flat(0.107), lambda n: 0.100 + 9e-11 * n * 1024,
        ),
    )
}  # fmt: skip


def calibration(name: str) -> Calibration:
    """By name; ValueError names those there are."""
    if name not in CALIBRATIONS:
        raise ValueError(f"costs {name!r} are not one of {', '.join(sorted(CALIBRATIONS))}")
    return CALIBRATIONS[name]
