"""From measured seconds to coefficients: least squares with no coefficient below zero.

Nothing gets cheaper by being more, so negative coefficients would only fit noise, and turn wild
outside of the range. Errors are relative, so that a small picture's step counts as much as a
large one's, and those beyond a few percent count by their size and not by its square (soft L1):
a row that was disturbed in every repeat must not bend the curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from common.stage import ENCODE
from services.costs.shape import Shape
from services.costs.table import AXES, POWERS, Fit

# Relative error for each doubling of tokens outside of the range: where too few sizes were
# measured to tell, and at least.
BEYOND, BEYOND_LEAST = 0.25, 0.05
# Relative errors above this are disturbances and no longer noise.
OUTLIER = 0.05
# A coefficient whose share of every row is below this is none.
NOTHING = 1e-5


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one encode, denoising step or decode; an encode's tokens are its prompt's."""

    stage: str
    shape: Shape
    seconds: float
    width: int = 0
    height: int = 0
    held_out: bool = False  # kept from the fit, to judge it by


class TooFewSizes(ValueError):
    """The samples do not tell the coefficients."""


def fit(samples: Sequence[Sample], prompt_tokens: int = 0) -> Fit:
    """The Fit of one stage's samples, judged by all of them, held out or not."""
    used = [sample for sample in samples if not sample.held_out]
    columns = _columns(used)
    if len(used) < len(columns):
        raise TooFewSizes(f"{len(used)} rows for {len(columns)} coefficients; measure more sizes")
    solved = _solve(used, columns)
    errors = sorted(abs(error_of(solved, sample)) for sample in samples)
    return replace(
        solved,
        prompt_tokens=prompt_tokens,
        range={axis: _ends(used, axis) for axis in AXES},
        r2=r_squared([s.seconds for s in used], [solved.seconds(s.shape) for s in used]),
        error=errors[math.ceil(0.9 * len(errors)) - 1],
        beyond=_beyond(used, columns),
    )


def error_of(fit: Fit, sample: Sample) -> float:
    """Relative: above 0 where the fit says too much."""
    return fit.seconds(sample.shape) / sample.seconds - 1


def held_out_error(fit: Fit, samples: Sequence[Sample]) -> float | None:
    """Median relative error on shapes that were not fitted on; None where there are none."""
    errors = [abs(error_of(fit, sample)) for sample in samples if sample.held_out]
    return median(errors) if errors else None


def r_squared(measured: Sequence[float], fitted: Sequence[float]) -> float:
    """Share of the variance that the fit explains; 1 where nothing varies."""
    mean = sum(measured) / len(measured)
    total = sum((m - mean) ** 2 for m in measured)
    rest = sum((m - f) ** 2 for m, f in zip(measured, fitted, strict=True))
    return 1.0 if total <= 1e-12 * mean**2 * len(measured) else 1 - rest / total


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Intercept, slope and R² of the straight line through (x, y), by ordinary least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )
    intercept = mean_y - slope * mean_x
    return intercept, slope, r_squared(y, [intercept + slope * a for a in x])


# A coefficient: of which number of pictures (0 for the one of all), and of which power.
Column = tuple[int, int]
FIXED: Column = (0, 0)


def _columns(samples: Sequence[Sample]) -> list[Column]:
    """The coefficients that these samples can tell apart."""
    columns = [FIXED] if len({s.shape.forwards for s in samples}) > 1 else []
    # Prompts are short: their square is noise.
    most = 1 if samples[0].stage == ENCODE else 2
    for n in sorted({s.shape.n for s in samples}):
        sizes = len({s.shape.tokens for s in samples if s.shape.n == n})
        columns += [(n, power) for power in range(min(sizes - 1, most) + 1)]
    return columns


def _factor(column: Column, shape: Shape) -> float:
    """What a coefficient is multiplied with in a shape's seconds."""
    n, power = column
    if column == FIXED:
        return 1.0
    return float(shape.forwards * shape.tokens**power) if n == shape.n else 0.0


def _solve(samples: Sequence[Sample], columns: Sequence[Column]) -> Fit:
    import numpy as np
    from scipy.optimize import least_squares, nnls

    relative = np.array([[_factor(c, s.shape) / s.seconds for c in columns] for s in samples])
    # Columns differ by ten powers of ten; solve for them at one scale.
    scale = relative.max(axis=0)
    relative /= scale
    ones = np.ones(len(samples))
    start, _ = nnls(relative, ones)
    solution = least_squares(
        lambda x: relative @ x - 1, start, jac=lambda _: relative, bounds=(0, np.inf),
        loss="soft_l1", f_scale=OUTLIER,
    ).x  # fmt: skip
    solution[solution < NOTHING] = 0.0
    found = dict(zip(columns, (solution / scale).tolist(), strict=True))
    pictures = sorted({n for n, _ in columns if n})
    return Fit(
        pictures={
            n: tuple(found.get((n, power), 0.0) for power in range(len(POWERS))) for n in pictures
        },
        fixed_s=found.get(FIXED, 0.0),
    )


def _beyond(samples: Sequence[Sample], columns: Sequence[Column]) -> float:
    """How wrong a fit without the largest size is there, for each doubling up to it."""
    sizes = sorted({sample.shape.tokens for sample in samples})
    rest = [sample for sample in samples if sample.shape.tokens < sizes[-1]]
    if len(sizes) < 4 or _columns(rest) != columns:
        return BEYOND
    short = _solve(rest, columns)
    largest = [sample for sample in samples if sample.shape.tokens == sizes[-1]]
    worst = max(abs(error_of(short, sample)) for sample in largest)
    return max(BEYOND_LEAST, worst / math.log2(sizes[-1] / sizes[-2]))


def _ends(samples: Sequence[Sample], axis: str) -> tuple[int, int]:
    values = [getattr(sample.shape, axis) for sample in samples]
    return min(values), max(values)
