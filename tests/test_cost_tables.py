"""The fit of measured rows, and the table it is kept in."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from common.stage import DECODE, DENOISE, ENCODE
from services.costs.fit import Sample, TooFewSizes, error_of, fit, held_out_error, line
from services.costs.model import Shape
from services.costs.table import Fit, Profile, fits_of, parse_profile

MODEL = "m"
# Seconds of one forward over t tokens, by pictures: 4 ms + 60 µs·t + 0.05 µs·t², and less than
# twice as much for two.
TRUE = Fit({1: (4e-3, 6e-5, 5e-8), 2: (5e-3, 1.1e-4, 9e-8)}, fixed_s=3e-4)
SHAPES = [Shape(t, n, f) for t in (4, 16, 64, 144, 256) for n in (1, 2) for f in (1, 2)]
RANGE = {"tokens": (4, 256), "n": (1, 2), "forwards": (1, 2)}


def table(scale: float = 1.0, **changed: Any) -> Fit:
    """The true costs of a machine that is `scale` times slower."""
    pictures = {n: tuple(scale * c for c in poly) for n, poly in TRUE.pictures.items()}
    return Fit(
        **{
            "pictures": pictures, "fixed_s": scale * TRUE.fixed_s, "range": RANGE,
            "error": 0.05, "beyond": 0.2, **changed,
        }
    )  # fmt: skip


def samples(noise: float, seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    return [Sample(DENOISE, s, TRUE.seconds(s) * (1 + rng.gauss(0, noise))) for s in SHAPES]


# -- the fit -------------------------------------------------------------------------------------


def test_a_fit_finds_the_coefficients_that_made_the_rows() -> None:
    found = fit(samples(0.0))
    for n, polynomial in TRUE.pictures.items():
        assert found.pictures[n] == pytest.approx(polynomial, rel=1e-3)
    assert found.fixed_s == pytest.approx(TRUE.fixed_s, rel=1e-2)
    assert found.r2 == pytest.approx(1.0)
    assert found.range == RANGE


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_two_percent_leaves_unseen_shapes_within_five(seed: int) -> None:
    found = fit(samples(0.02, seed))
    unseen = [
        Sample(DENOISE, s, TRUE.seconds(s), held_out=True) for s in (Shape(32), Shape(200, 2))
    ]
    assert max(abs(error_of(found, sample)) for sample in unseen) < 0.05
    assert held_out_error(found, unseen) < 0.05  # type: ignore[operator]


def test_rows_that_were_disturbed_do_not_bend_the_curve() -> None:
    """One row in seven took twice as long because somebody else had the core."""
    rows = [
        Sample(s.stage, s.shape, s.seconds * (2 if i % 7 == 3 else 1))
        for i, s in enumerate(samples(0.01))
    ]
    found = fit(rows)
    assert max(abs(found.seconds(s) / TRUE.seconds(s) - 1) for s in SHAPES) < 0.1


def test_nothing_gets_cheaper_by_being_more() -> None:
    """Seconds that fall with size are noise; a falling curve would be below zero further out."""
    falling = [Sample(DENOISE, Shape(t), s) for t, s in ((16, 1.2), (64, 1.1), (256, 1.0))]
    found = fit(falling)
    assert min(found.pictures[1]) >= 0
    assert found.seconds(Shape(65536)) > 0


def test_pictures_between_two_that_were_measured_cost_something_between() -> None:
    uneven = Fit({1: (2.0, 0.0, 0.0), 2: (1.0, 0.0, 0.0), 4: (3.0, 0.0, 0.0)})
    assert uneven.seconds(Shape(16, 3)) == pytest.approx(2.0)
    assert uneven.seconds(Shape(16, 8)) == pytest.approx(6.0)  # beyond: in proportion


def test_too_few_rows_for_the_coefficients_are_refused() -> None:
    rows = [Sample(DENOISE, Shape(16), 1.0), Sample(DENOISE, Shape(64, 1, 2), 2.0)]
    with pytest.raises(TooFewSizes, match="measure more sizes"):
        fit(rows)


def test_a_straight_line_has_an_r_squared_of_one() -> None:
    intercept, slope, r2 = line([2, 4, 8], [2.5, 4.5, 8.5])
    assert (intercept, slope, r2) == pytest.approx((0.5, 1.0, 1.0))
    assert line([1, 2, 3], [1.0, 5.0, 1.0])[2] == pytest.approx(0.0)


# -- the file ------------------------------------------------------------------------------------


def a_profile(**changed: Any) -> dict[str, Any]:
    made = Profile(model=MODEL, fits={ENCODE: table(), DENOISE: table(), DECODE: table()})
    return {**made.to_json(), **changed}


def test_a_table_reads_back_as_it_was_written() -> None:
    fits = parse_profile(json.dumps(a_profile())).fits
    assert fits[DENOISE] == table()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"version": 2}, r"version: 2; this reads version 1"),
        ({"model": None}, r"model: None is not a model's name"),
        ({"stages": {"denoise": {}}}, r"stages: encode, decode missing"),
        ({"stages": {"paint": {}}}, r"stages: .* is not an object with encode, denoise, decode"),
        (
            {"stages": {"denoise": {"pictures": {"1": {"token_s": -1}}}}},
            r"stages\.denoise\.pictures\.1\.token_s: -1 is not a number of 0 or more",
        ),
        (
            {"stages": {"denoise": {"range": {"tokens": [9, 4]}}}},
            r"stages\.denoise\.range\.tokens: \[9, 4\] is not \[lowest, highest\]",
        ),
        ({"stages": {"denoise": {"range": 5}}}, r"stages\.denoise\.range: 5 is not an object"),
        ({"stages": {"denoise": {"pictures": {}}}}, r"stages\.denoise\.pictures: {} is not an"),
        ({"rows": 5}, r"rows: 5 is not a list of objects"),
        ({"batch": [1]}, r"batch: \[1\] is not a list of objects"),
    ],
)
def test_a_table_that_is_wrong_is_refused_by_field(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_profile(json.dumps(a_profile(**changed)))


def test_a_claim_is_a_table_without_a_range() -> None:
    (claim,) = fits_of({"denoise": {"fixed_s": 0.5, "token_s": 0.001}}).values()
    assert claim.seconds(Shape(100, 2, 2)) == pytest.approx(0.5 + 0.001 * 400)
    assert not claim.range
