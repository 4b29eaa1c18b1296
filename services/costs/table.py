"""A fitted cost table: coefficients a stage, the range they hold in, and the file they come in.

A profile file (`slackwater profile`, docs/costs.md) holds what was measured and what was fitted;
a manifest's "costs" holds the fitted part alone, or only some coefficients. No numpy here: the
coordinator reads tables, it does not make them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.stage import STAGES
from services.costs.shape import Shape

VERSION = 1
LEAST_S = 1e-6  # nothing takes no time, and ratios to it are taken
AXES = ("tokens", "n", "forwards")
# Of the polynomial in tokens, by power.
POWERS = ("forward_s", "token_s", "token2_s")
Polynomial = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds of one encode, one denoising step or one decode over t tokens and n pictures:

        fixed_s + forwards · (forward_s + token_s · t + token2_s · t²)

    with the polynomial of the n at hand, in a straight line between those that were measured
    (pictures in one forward need not cost n times one: convolutions choose other ways for one
    than for two), and n times as much as the largest beyond it.

    For an encode t is `prompt_tokens`, the length of a usual prompt, since a job's own is not
    known before it is encoded. `range` has the lowest and highest tokens, n and forwards that
    were measured; it is empty for a mere claim (a manifest without a profile).
    """

    pictures: Mapping[int, Polynomial]
    fixed_s: float = 0.0
    prompt_tokens: int = 0
    range: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    r2: float = 0.0
    error: float = 0.0  # relative; nine of ten shapes that were measured are nearer than this
    beyond: float = 0.0  # relative, for each doubling of the tokens outside of the range

    def seconds(self, shape: Shape) -> float:
        return max(LEAST_S, self.fixed_s + shape.forwards * self._forward(shape))

    def _forward(self, shape: Shape) -> float:
        """Seconds of one forward with all of a job's pictures."""
        tokens, n = self._tokens(shape), shape.n
        below = max((k for k in self.pictures if k <= n), default=min(self.pictures))
        above = min((k for k in self.pictures if k >= n), default=None)
        low = _at(self.pictures[below], tokens)
        if above is None:
            return low * n / below
        if above == below:
            return low
        high = _at(self.pictures[above], tokens)
        return low + (high - low) * (n - below) / (above - below)

    def _tokens(self, shape: Shape) -> int:
        return shape.tokens or self.prompt_tokens

    def doublings_outside(self, shape: Shape) -> float:
        """How far outside of the range a shape lies, in doublings; 0 within."""
        far = 0.0
        for axis, (low, high) in self.range.items():
            value = max(1, self._tokens(shape) if axis == "tokens" else getattr(shape, axis))
            far += max(0.0, math.log2(value / high), math.log2(low / value))
        return far

    def to_json(self) -> dict[str, Any]:
        out = {k: v for k, v in dataclasses.asdict(self).items() if v}
        out["pictures"] = {
            str(n): dict(zip(POWERS, polynomial, strict=True))
            for n, polynomial in self.pictures.items()
        }
        return out

    @classmethod
    def from_json(cls, value: Any, where: str = "costs") -> Fit:
        """From what `to_json` gave, or a manifest's claim: fixed_s, and coefficients for n = 1.

        Raises ValueError naming the field under `where` and what it should be.
        """
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: {value!r} is not an object")
        pictures = value.get("pictures", {"1": value})
        counted = isinstance(pictures, Mapping) and all(_is_count(n) for n in pictures)
        if not counted or not pictures:
            raise ValueError(f"{where}.pictures: {pictures!r:.80} is not an object by n, from 1")
        fields: dict[str, Any] = {
            name: _number(value.get(name, 0), f"{where}.{name}")
            for name in ("fixed_s", "r2", "error", "beyond")
        }
        return cls(
            pictures={
                int(n): _polynomial(each, f"{where}.pictures.{n}" if "pictures" in value else where)
                for n, each in pictures.items()
            },
            prompt_tokens=int(_number(value.get("prompt_tokens", 0), f"{where}.prompt_tokens")),
            range=_range(value.get("range") or {}, f"{where}.range"),
            **fields,
        )


def _at(polynomial: Polynomial, tokens: int) -> float:
    forward_s, token_s, token2_s = polynomial
    return forward_s + tokens * (token_s + tokens * token2_s)


def _is_count(text: Any) -> bool:
    return str(text).isdecimal() and int(text) > 0


def _polynomial(value: Any, where: str) -> Polynomial:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {value!r} is not an object with {', '.join(POWERS)}")
    forward, token, token2 = (_number(value.get(name, 0), f"{where}.{name}") for name in POWERS)
    return forward, token, token2


def _number(value: Any, where: str) -> float:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or (value < 0 and not where.endswith(".r2")):  # R² of a bad fit is below 0
        raise ValueError(f"{where}: {value!r} is not a number of 0 or more")
    return float(value)


def _objects(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise ValueError(f"{where}: {value!r:.80} is not a list of objects")
    return tuple(value)


def _range(value: Any, where: str) -> dict[str, tuple[int, int]]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {value!r:.80} is not an object with {', '.join(AXES)}")
    out = {}
    for axis, ends in value.items():
        try:
            low, high = map(int, ends)
        except (TypeError, ValueError):
            low, high = 0, 0
        if axis not in AXES or not 1 <= low <= high:
            raise ValueError(
                f"{where}.{axis}: {ends!r} is not [lowest, highest] of one of {', '.join(AXES)}"
            )
        out[axis] = (low, high)
    return out


def fits_of(costs: Any, where: str = "stages") -> dict[str, Fit]:
    """By stage, from a profile's "stages" or a manifest's "costs"; ValueError names the field."""
    if not isinstance(costs, Mapping) or not set(costs) <= set(STAGES):
        raise ValueError(f"{where}: {costs!r:.80} is not an object with {', '.join(STAGES)}")
    return {stage: Fit.from_json(fit, f"{where}.{stage}") for stage, fit in costs.items()}


@dataclass(frozen=True)
class Profile:
    """One measurement of a model on a device: the content of a profile file."""

    model: str
    fits: Mapping[str, Fit]
    fingerprint: str = ""  # of the model's files, as its manifest has it
    device: str = "cpu"
    device_name: str = ""
    dtype: str = "float32"
    attention: str = ""
    threads: int = 1
    date: str = ""
    token_px: int = 16
    repeats: int = 0
    # Measured and fitted seconds of every shape, with `held_out` for those not fitted on.
    rows: tuple[Mapping[str, Any], ...] = ()
    # Seconds a step with several jobs in one forward: {"tokens", "rows", "step_s"} each.
    batch: tuple[Mapping[str, Any], ...] = ()
    # Seconds of one chunk over its number of steps, and the line through them.
    steps: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Seconds a step of jobs of several `sizes` in one forward (`packed_s`) and in one a size
    # (`grouped_s`), and the second over the first (`speedup`); empty where they cannot be mixed.
    mixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Median relative error on the shapes not fitted on, by stage.
    held_out_error: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"version": VERSION}
        out |= {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "fits"}
        out["stages"] = {stage: fit.to_json() for stage, fit in self.fits.items()}
        rounded: dict[str, Any] = _rounded(out)
        return rounded

    def to_text(self) -> str:
        """As JSON, a row a line, so that two profiles can be compared line by line."""
        lines = []
        for name, value in self.to_json().items():
            text = json.dumps(value, ensure_ascii=False)
            if name in ("rows", "batch") and value:
                each = (json.dumps(row, ensure_ascii=False) for row in value)
                text = "[\n  " + ",\n  ".join(each) + "\n ]"
            lines.append(f' "{name}": {text}')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, value: Any) -> Profile:
        """Raises ValueError naming what is wrong and what would be right."""
        if not isinstance(value, Mapping):
            raise ValueError(f"{value!r:.80} is not a JSON object")
        if value.get("version") != VERSION:
            raise ValueError(f"version: {value.get('version')!r}; this reads version {VERSION}")
        if not isinstance(value.get("model"), str):
            raise ValueError(f"model: {value.get('model')!r} is not a model's name")
        fits = fits_of(value.get("stages"))
        lacking = [stage for stage in STAGES if stage not in fits]
        if lacking:
            raise ValueError(f"stages: {', '.join(lacking)} missing")
        names = {f.name for f in dataclasses.fields(cls)} - {"fits"}
        known = {k: v for k, v in value.items() if k in names}
        for field in dataclasses.fields(cls):
            kind = type(field.default)
            if field.name in known and kind in (str, int) and type(known[field.name]) is not kind:
                raise ValueError(f"{field.name}: {known[field.name]!r:.80} is not {kind.__name__}")
        known |= {k: _objects(value[k], k) for k in ("rows", "batch") if k in value}
        return cls(fits=fits, **known)


def _rounded(value: Any) -> Any:
    """Numbers to six digits, which is more than a measurement has."""
    match value:
        case float():
            return float(f"{value:.6g}")
        case Mapping():
            return {k: _rounded(v) for k, v in value.items()}
        case list() | tuple():
            return [_rounded(v) for v in value]
    return value


def parse_profile(text: str | bytes) -> Profile:
    """From a file's or a hash field's JSON; ValueError says what is wrong with it."""
    return Profile.from_json(json.loads(text))
