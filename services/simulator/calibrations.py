"""What tasks cost: on machines that we do not have, as others published it, or as profiled.

A calibration gives seconds for one encode, one denoising step and one decode over image (or
video) tokens, on one rank. Between the published shapes a step is the polynomial through them
(attention makes it a·n² + b·n + c); outside them it is only as good as that. Where one shape was
published, others are scaled by the model's floating-point work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.stage import DECODE, DENOISE, ENCODE
from services.costs.model import CostModel, Quote, Shape
from services.costs.table import Fit, Profile, parse_profile

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
    fits: Mapping[str, Fit] = field(default_factory=dict)  # of a profile, instead of the curves

    def seconds(self, stage: str, tokens: int, n: int = 1, forwards: int = 1) -> float:
        """Of one task, or one step; n rows in one forward (services/costs/shape.py), `forwards` of
        them a step."""
        if stage in self.fits:
            of_encode = stage == ENCODE
            shape = Shape(0 if of_encode else tokens, n, forwards)
            return self.fits[stage].seconds(shape)
        curve = {ENCODE: self.encode, DENOISE: self.step, DECODE: self.decode}[stage]
        times = n if stage == DECODE else n * forwards
        return max(0.0, times * curve(tokens))

    def standalone_s(self, tokens: int, steps: int, n: int = 1, forwards: int = 1) -> float:
        """What a job takes alone: encode, all its steps, decode."""
        encode_s = self.seconds(ENCODE, tokens, 1, forwards)
        work_s = steps * self.seconds(DENOISE, tokens, n, forwards)
        return encode_s + work_s + self.seconds(DECODE, tokens, n)


class KnownCosts(CostModel):
    """A cost model that is told the truth (times `bias`) and learns nothing."""

    def __init__(self, calibration: Calibration, bias: float = 1.0) -> None:
        super().__init__()
        self._calibration, self._bias = calibration, bias
        self._known: dict[tuple[str, int, int, int], float] = {}

    def set_prior(self, model: str, costs: Mapping[str, Any]) -> None:
        """Nothing to learn from a manifest."""

    def observe(self, model: str, stage: str, shape: Shape, seconds: float) -> None:
        """Nothing to learn from a report."""

    def shared(
        self, model: str, stage: str, shape: Shape, mixed: bool = False
    ) -> tuple[float, bool]:
        return self.estimate(model, stage, shape), True

    def quote(self, model: str, stage: str, shape: Shape) -> Quote:
        return Quote(self.estimate(model, stage, shape), 0.0, known=True)

    def estimate(self, model: str, stage: str, shape: Shape) -> float:
        key = stage, shape.tokens, shape.n, shape.forwards  # hashes faster than the shape
        try:
            return self._known[key]
        except KeyError:
            seconds = self._known[key] = self._bias * self._calibration.seconds(*key)
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


def by_work(tokens: int, seconds: float, work: tuple[float, float]) -> Curve:
    """Through one published point; `work` is a model's operations a token and a token²."""

    def operations(n: int) -> float:
        return work[0] * n + work[1] * n * n

    return lambda n: seconds * operations(n) / operations(tokens)


def from_profile(profile: Profile) -> Calibration:
    """What `slackwater profile` measured, as the truth of a simulation."""
    fits = profile.fits
    return Calibration(
        profile.model,
        f"profiled {profile.date[:10]} on {profile.device_name or profile.device}",
        lambda n: fits[DENOISE].seconds(Shape(n)),
        lambda n: fits[ENCODE].seconds(Shape(0)),
        lambda n: fits[DECODE].seconds(Shape(n)),
        token_px=profile.token_px,
        sizes={f"{r['width']}x{r['height']}": r["tokens"] for r in profile.rows if r["width"]},
        fits=fits,
    )


QWEN_SIZES = {"512x512": 1024, "768x768": 2304, "1024x1024": 4096, "1536x1536": 9216}
# Operations of one forward: a token's, and a pair of tokens'.
QWEN_WORK = (13.6e9, 737_280.0)
WAN_WORK = (23.9e9, 819_200.0)
WAN_480P, HUNYUAN_720P = 32_760, 118_800  # tokens of 832×480 × 81 and 1280×720 × 129 frames
# GF-DiT's, for lack of others: encode and prepare; decode by voxels, 1,024 a token.
VIDEO_ENCODE, VIDEO_DECODE = 0.107, lambda n: 0.100 + 9e-11 * n * 1024
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
            "h100-flux-dev-compiled",
            "published: Flux-dev 1024² on an H100, 154 ms compiled; else as h100-flux-dev",
            lambda n: 0.154 * n / 4096, flat(0.035), lambda n: 0.017 * n / 1024,
            sizes=QWEN_SIZES,
        ),
        Calibration(
            "h200-qwen-image",
            "published: 167 ms at 512² and 243 ms at 1024² on an H200, batch 1, linear between and "
            "beyond; text 35 ms and VAE 17 ms at 512², the VAE taken as linear in pixels",
            through([(1024, 167.0), (4096, 243.0)]), flat(0.035), lambda n: 0.017 * n / 1024,
            sizes=QWEN_SIZES,
        ),
        Calibration(
            "h800-qwen-image",
            "published: 2250 ms at 2048² on an H800; other sizes by floating-point work; encode "
            "and decode as h20-qwen-image",
            by_work(16_384, 2.250, QWEN_WORK), flat(0.035), lambda n: 0.017 * n / 1024,
            sizes=QWEN_SIZES,
        ),
        Calibration(
            "h100-wan2.1-i2v",
            "published: Wan2.1-I2V-14B 480p, 81 frames, with CFG on an H100, 9.77 s (diffusers); "
            "other sizes by floating-point work; encode and decode as wan-gfdit",
            by_work(WAN_480P, 9.77, WAN_WORK), flat(VIDEO_ENCODE), VIDEO_DECODE,
        ),
        Calibration(
            "h100-hunyuan-video",
            "published: HunyuanVideo 720p, 129 frames on an H100, 38.1 s; other sizes by the work "
            "of Wan-A14B; encode and decode as wan-gfdit",
            by_work(HUNYUAN_720P, 38.1, WAN_WORK), flat(VIDEO_ENCODE), VIDEO_DECODE,
        ),
        Calibration(
            "h20-hunyuan-video",
            "published: HunyuanVideo 720p, 129 frames on an H20, 133 s; else as h100-hunyuan-video",
            by_work(HUNYUAN_720P, 133.0, WAN_WORK), flat(VIDEO_ENCODE), VIDEO_DECODE,
        ),
        Calibration(
            "wan-gfdit",
            "GF-DiT's simulator, SP 1: 0.1323 ms a token a step; encode 55 ms and "
            "prepare 52 ms; decode 100 ms + 9e-8 ms a voxel (1,024 voxels a token)",
            lambda n: 0.1323e-3 * n, flat(VIDEO_ENCODE), VIDEO_DECODE,
        ),
    )
}  # fmt: skip


def calibration(name: str) -> Calibration:
    """By name, or from a profile's file; ValueError says which there are or what is wrong."""
    if name in CALIBRATIONS:
        return CALIBRATIONS[name]
    if not name.endswith(".json"):
        known = ", ".join(sorted(CALIBRATIONS))
        raise ValueError(f"costs {name!r} are neither a profile's .json file nor one of {known}")
    try:
        return from_profile(parse_profile(Path(name).read_bytes()))
    except KeyError as error:
        raise ValueError(f"costs {name}: a row lacks {error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"costs {name}: {error}") from error
