"""What a task is thought to cost: the order of belief, and what must not fool it."""

from __future__ import annotations

from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any

import pytest

from common.messages import Report, ReportRow
from common.stage import DECODE, DENOISE, ENCODE
from services.coordinator.learning import learn
from services.coordinator.sharing import rows_of
from services.coordinator.state import Job
from services.costs.model import CostModel, Shape, shape_of
from services.costs.shape import at_stage
from services.costs.table import Fit
from tests.fakes import MANIFEST, a_spec
from tests.test_cost_tables import MODEL, RANGE, SHAPES, TRUE, table


def told(costs: CostModel, shape: Shape, *seconds: float, stage: str = DENOISE) -> float:
    """Report these, and ask."""
    for each in seconds:
        costs.observe(MODEL, stage, shape, each)
    return costs.estimate(MODEL, stage, shape)


# -- the shape -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "shape"),
    [
        ({"width": 128, "height": 96}, Shape(48)),
        ({"width": 128, "height": 96, "n": 3}, Shape(48, 3)),
        ({"width": 100, "height": 96}, Shape(42)),
        ({"width": 64, "height": 64, "scale": 2.0, "negative": "x"}, Shape(16, 1, 2)),
        ({"width": 64, "height": 64, "scale": 1.0, "negative": "x"}, Shape(16)),
        ({"width": 64, "height": 64, "scale": 2.0}, Shape(16)),
        ({"width": 64, "height": 64, "num_frames": 81}, Shape(16 * 21)),
        (
            {"width": 64, "height": 64, "cache": "first_block", "cache_threshold": 0.2},
            Shape(16, cached="first_block@0.2"),
        ),
        (
            {"width": 64, "height": 64, "cache": "first_block", "cache_threshold": 0.20417},
            Shape(16, cached="first_block@0.2"),
        ),
        ({"width": 64, "height": 64, "cache": "none"}, Shape(16)),
    ],
)
def test_a_shape_is_tokens_pictures_and_forwards(params: dict[str, Any], shape: Shape) -> None:
    manifest = {"token_px": 16, "cfg": {"scale": "scale", "needs": "negative"}}
    assert shape_of(params, manifest) == shape


# -- whom to believe -----------------------------------------------------------------------------


def test_a_guess_gives_way_to_a_claim_to_a_neighbour_to_a_table_to_reports() -> None:
    costs, asked = CostModel(), Shape(64)
    guess = costs.estimate(MODEL, DENOISE, asked)
    costs.set_prior(MODEL, {"denoise": {"fixed_s": 7.0}})
    assert costs.estimate(MODEL, DENOISE, asked) == 7.0 != guess
    told(costs, Shape(152), 4.0, 4.0, 4.0)  # (64 + 24) / (152 + 24): half of the work
    assert costs.estimate(MODEL, DENOISE, asked) == pytest.approx(2.0)
    costs.set_table(MODEL, {DENOISE: Fit({1: (3.0, 0.0, 0.0)}, range=RANGE)})
    assert costs.estimate(MODEL, DENOISE, asked) == pytest.approx(4.0)  # 3 s, at 4/3 of its speed
    assert told(costs, asked, 5.0, 5.0, 5.0) == pytest.approx(5.0)


def test_a_step_cache_has_times_of_its_own() -> None:
    """Its jobs are thought to take what others take until some were reported; and what they
    then say, short and long steps, moves nobody else."""
    costs, plain, cached = CostModel(), Shape(64), Shape(64, cached="first_block@0.2")
    costs.set_table(MODEL, {DENOISE: Fit({1: (3.0, 0.0, 0.0)}, range=RANGE)})
    told(costs, plain, 3.0, 3.0, 3.0)
    assert costs.estimate(MODEL, DENOISE, cached) == pytest.approx(3.0)
    assert told(costs, cached, 1.0, 1.5, 1.0, 1.5, 1.0, 1.5) == pytest.approx(1.25, abs=0.3)
    assert costs.estimate(MODEL, DENOISE, plain) == pytest.approx(3.0)
    assert costs.estimate(MODEL, DENOISE, Shape(128)) == pytest.approx(3.0)
    again = CostModel()
    again.load(costs.dump())  # as a standby does
    assert again.estimate(MODEL, DENOISE, cached) == costs.estimate(MODEL, DENOISE, cached)


def test_a_table_from_a_slower_machine_is_scaled_by_the_first_reports() -> None:
    """One speed for all shapes of a stage: three reports of one correct the others."""
    costs = CostModel()
    costs.set_prior(MODEL, {"denoise": table(10.0).to_json()})
    told(costs, Shape(64), *[TRUE.seconds(Shape(64))] * 3)
    for shape in SHAPES:
        assert costs.estimate(MODEL, DENOISE, shape) == pytest.approx(TRUE.seconds(shape))
    # The other stages' speed is their own.
    costs.set_prior(MODEL, {"decode": table(10.0).to_json()})
    assert costs.estimate(MODEL, DECODE, Shape(64)) == pytest.approx(10 * TRUE.seconds(Shape(64)))


def test_a_table_measured_in_the_pool_stands_over_a_shipped_one() -> None:
    costs = CostModel()
    costs.set_table(MODEL, {DENOISE: table()})
    costs.set_prior(MODEL, {"denoise": table(10.0).to_json()})
    assert costs.estimate(MODEL, DENOISE, Shape(64)) == pytest.approx(TRUE.seconds(Shape(64)))


def test_encodes_are_alike_whatever_the_picture() -> None:
    costs = CostModel()
    told(costs, Shape(4096, 4, 2), 0.03, 0.03, 0.03, stage=ENCODE)
    assert costs.estimate(MODEL, ENCODE, Shape(16, 1, 2)) == pytest.approx(0.03)


@pytest.mark.parametrize("claim", [{"fixed_s": "much"}, {"pictures": {}}])
def test_a_manifest_with_costs_that_cannot_be_read_changes_nothing(claim: dict[str, Any]) -> None:
    costs = CostModel()
    costs.set_prior(MODEL, {"denoise": claim})
    assert costs.estimate(MODEL, DENOISE, Shape(64)) == CostModel().estimate(
        MODEL, DENOISE, Shape(64)
    )


# -- what must not fool it -----------------------------------------------------------------------


def test_a_slow_first_step_is_not_believed_where_a_table_knows_better() -> None:
    costs, shape = CostModel(), Shape(64)
    costs.set_table(MODEL, {DENOISE: table()})
    true = TRUE.seconds(shape)
    assert told(costs, shape, 50 * true) == pytest.approx(true)
    assert costs.estimate(MODEL, DENOISE, Shape(256)) == pytest.approx(TRUE.seconds(Shape(256)))
    assert told(costs, shape, true) == pytest.approx(true)
    assert told(costs, shape, true) == pytest.approx(true)


def test_a_slow_first_step_of_an_unknown_model_is_forgotten_with_the_second() -> None:
    costs = CostModel()
    assert told(costs, Shape(64), 5.0, 0.1) == pytest.approx(0.1)


@pytest.mark.parametrize("at", range(12))
def test_a_paused_process_poisons_nothing(at: int) -> None:
    """One report a hundred times too long, early or late."""
    costs, shape = CostModel(), Shape(64)
    told(costs, Shape(256), 4.0, 4.0, 4.0)
    for i in range(12):
        before = costs.estimate(MODEL, DENOISE, shape)
        told(costs, shape, 100.0 if i == at else 1.0)
        if i == at and i > 0:
            assert costs.estimate(MODEL, DENOISE, shape) == pytest.approx(before, rel=0.1)
    assert costs.estimate(MODEL, DENOISE, shape) == pytest.approx(1.0)
    assert costs.estimate(MODEL, DENOISE, Shape(256)) == pytest.approx(4.0)


@pytest.mark.parametrize("real", [1, 2, 3])
def test_embeddings_at_hand_make_no_encode_look_free(real: int) -> None:
    """Of four encoded in one task some were at hand: a pass of the others is what was seen."""
    told: list[tuple[Shape, float]] = []
    costs: Any = SimpleNamespace(observe=lambda model, stage, shape, s: told.append((shape, s)))
    manifest = {**MANIFEST, "model": "noop", "batch": {"same": ["width"]}}
    jobs = {f"j{i}": Job.of(a_spec(id=f"j{i}", exact=False), manifest) for i in range(4)}
    for job in jobs.values():
        job.seq = 1
    rows = tuple(
        ReportRow(name, 0, DENOISE, seconds=2.0 if i < real else 0.001, skipped=int(i >= real))
        for i, name in enumerate(jobs)
    )
    learn(costs, Report(1, "w", ENCODE, rows, 1.0), (True,) * 4, jobs)
    ((shape, seconds),) = told
    assert (rows_of(at_stage(shape, ENCODE)), seconds) == (real, 2.0 * real)
    told.clear()
    hits = tuple(ReportRow(name, 0, DENOISE, seconds=0.001, skipped=1) for name in jobs)
    learn(costs, Report(1, "w", ENCODE, hits, 1.0), (True,) * 4, jobs)
    assert told == []


def test_one_slow_pass_of_mixed_sizes_does_not_end_mixing() -> None:
    """What several sizes in one forward take is believed from enough reports on."""
    costs, shape = CostModel(), Shape(64, 2)
    costs.set_table(MODEL, {DENOISE: table()})
    plain, _ = costs.shared(MODEL, DENOISE, shape)
    for times in (12.0, 1.5):
        costs.observe_mixed(MODEL, shape, times * plain)
        assert costs.shared(MODEL, DENOISE, shape, mixed=True)[0] == plain
    costs.observe_mixed(MODEL, shape, 1.5 * plain)
    assert costs.shared(MODEL, DENOISE, shape, mixed=True)[0] == pytest.approx(1.5 * plain)
    assert costs.shared(MODEL, DENOISE, shape)[0] == plain


def test_a_shape_far_outside_of_the_table_moves_none_within() -> None:
    """The curve is wrong out there; the machine is as fast as it was."""
    costs, near, far, further = CostModel(), Shape(100), Shape(16384), Shape(32768)
    costs.set_table(MODEL, {DENOISE: table()})
    guessed = costs.estimate(MODEL, DENOISE, further)
    far_s = TRUE.seconds(far)
    told(costs, far, *[10 * far_s] * 9)
    assert costs.estimate(MODEL, DENOISE, near) == pytest.approx(TRUE.seconds(near))
    assert costs.quote(MODEL, DENOISE, near).margin_s < 0.1 * TRUE.seconds(near)
    assert costs.estimate(MODEL, DENOISE, further) == pytest.approx(10 * guessed)


def test_a_host_that_slept_with_all_its_workers_poisons_nothing() -> None:
    """Eight ranks each report one step a hundred times too long, one after the other."""
    costs, shape = CostModel(), Shape(64)
    told(costs, shape, *[1.0] * 9)
    assert told(costs, shape, *[100.0] * 8) == pytest.approx(1.0)
    assert told(costs, shape, 1.0) == pytest.approx(1.0)


def test_a_swapped_expert_poisons_nothing() -> None:
    """One slow step a job, while another expert's weights come in."""
    costs, shape = CostModel(), Shape(64)
    assert told(costs, shape, *[1.7, 1.7, 1.7, 1.7, 9.0] * 5) == pytest.approx(1.7)


def test_a_step_cache_that_hits_half_of_the_time_costs_about_the_mean() -> None:
    """A median would say one or the other, and be wrong by ten."""
    costs, shape = CostModel(), Shape(64)
    for seconds in islice(cycle([1.0, 0.1]), 20):
        told(costs, shape, seconds)
    for seconds in islice(cycle([1.0, 0.1]), 10):
        assert 0.4 <= told(costs, shape, seconds) <= 0.7


def test_a_step_cache_that_hit_nine_times_in_a_row_may_miss_again() -> None:
    """The misses look like pauses then, but not for ever."""
    costs, shape = CostModel(), Shape(64)
    told(costs, shape, *[0.1] * 9)
    assert told(costs, shape, *[1.0, 0.1] * 15) > 0.4


# -- a real change -------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [2.0, 0.5, 5.0])
@pytest.mark.parametrize("shapes", [1, 2, 5])
def test_a_machine_that_changes_is_followed_within_ten_reports(change: float, shapes: int) -> None:
    """Ten reports in all, of whatever shapes; those reported once or twice are right, too."""
    costs = CostModel()
    several = [Shape(t) for t in (16, 64, 144, 256, 1024)][:shapes]
    for shape in several:
        told(costs, shape, *[TRUE.seconds(shape)] * 9)
    for shape in islice(cycle(several), 10):
        told(costs, shape, change * TRUE.seconds(shape))
    for shape in several:
        assert costs.estimate(MODEL, DENOISE, shape) == pytest.approx(
            change * TRUE.seconds(shape), rel=0.15
        )


def test_shapes_a_little_slower_are_no_change_of_machine() -> None:
    """What is within noise moves the shapes that it was reported of, and no other."""
    costs = CostModel()
    for shape in (Shape(64), Shape(100), Shape(256)):
        told(costs, shape, *[1.0] * 9)
    for shape in (Shape(64), Shape(100)) * 6:
        told(costs, shape, 1.15)
    assert costs.estimate(MODEL, DENOISE, Shape(256)) == pytest.approx(1.0)


def test_a_cache_that_hits_for_one_shape_moves_no_other() -> None:
    """The same prompt again and again: its encodes cost nothing, others' what they did."""
    costs = CostModel()
    told(costs, Shape(0, 1, 1), *[0.03] * 9, stage=ENCODE)
    told(costs, Shape(0, 1, 2), *[0.06] * 9, stage=ENCODE)
    assert told(costs, Shape(0, 1, 1), *[0.001] * 9, stage=ENCODE) == pytest.approx(0.001)
    assert costs.estimate(MODEL, ENCODE, Shape(64, 1, 2)) == pytest.approx(0.06)


def test_shapes_that_only_a_table_knows_follow_too() -> None:
    costs, shape = CostModel(), Shape(64)
    costs.set_table(MODEL, {DENOISE: table()})
    told(costs, shape, *[TRUE.seconds(shape)] * 9)
    told(costs, shape, *[2 * TRUE.seconds(shape)] * 10)
    assert costs.estimate(MODEL, DENOISE, Shape(256)) == pytest.approx(
        2 * TRUE.seconds(Shape(256)), rel=0.1
    )


def test_a_machine_a_hundred_times_slower_is_believed_in_the_end() -> None:
    costs, shape = CostModel(), Shape(64)
    told(costs, shape, *[1.0] * 9)
    assert told(costs, shape, *[100.0] * 10) == pytest.approx(100.0, rel=0.1)


# -- quotes --------------------------------------------------------------------------------------


def test_a_quote_within_the_range_is_known_and_as_good_as_the_fit() -> None:
    costs, shape = CostModel(), Shape(100)
    costs.set_table(MODEL, {DENOISE: table()})
    quote = costs.quote(MODEL, DENOISE, shape)
    assert quote.known
    assert quote.seconds == costs.estimate(MODEL, DENOISE, shape)
    assert quote.margin_s == pytest.approx(0.05 * quote.seconds)


@pytest.mark.parametrize(
    ("shape", "doublings"),
    [(Shape(512), 1), (Shape(1024), 2), (Shape(2), 1), (Shape(64, 4), 1), (Shape(64, 1, 4), 1)],
)
def test_a_quote_outside_the_range_says_so_and_carries_a_margin(
    shape: Shape, doublings: int
) -> None:
    costs = CostModel()
    costs.set_table(MODEL, {DENOISE: table()})
    quote = costs.quote(MODEL, DENOISE, shape)
    assert not quote.known
    assert quote.margin_s == pytest.approx((0.05 + 0.2 * doublings) * quote.seconds)


def test_a_shipped_table_is_known_only_once_reports_have_told_its_speed() -> None:
    costs, shape = CostModel(), Shape(64)
    costs.set_prior(MODEL, {"denoise": table().to_json()})
    before = costs.quote(MODEL, DENOISE, Shape(100))
    assert not before.known
    assert before.margin_s >= before.seconds
    told(costs, shape, *[TRUE.seconds(shape)] * 3)
    assert costs.quote(MODEL, DENOISE, Shape(100)).known


def test_speeds_that_differ_widen_the_margin_of_a_table() -> None:
    """Reports of other shapes at 0.9 to 1.1 times what the table says: it is as uncertain."""
    costs, true = CostModel(), TRUE.seconds(Shape(64))
    costs.set_table(MODEL, {DENOISE: table()})
    told(costs, Shape(64), *[0.9 * true, true, 1.1 * true] * 3)
    quote = costs.quote(MODEL, DENOISE, Shape(100))
    assert quote.seconds == pytest.approx(TRUE.seconds(Shape(100)), rel=0.02)
    assert quote.margin_s == pytest.approx(0.15 * quote.seconds, rel=0.05)


def test_what_was_never_measured_is_not_known() -> None:
    costs = CostModel()
    assert not costs.quote(MODEL, DENOISE, Shape(64)).known
    told(costs, Shape(64), 1.0, 1.0, 1.0)
    assert costs.quote(MODEL, DENOISE, Shape(64)).known
    near, far = costs.quote(MODEL, DENOISE, Shape(80)), costs.quote(MODEL, DENOISE, Shape(4096))
    assert not near.known
    assert near.margin_s / near.seconds < far.margin_s / far.seconds


def test_the_margin_of_what_was_reported_is_how_much_the_reports_differ() -> None:
    costs = CostModel()
    told(costs, Shape(64), *[1.0] * 9)
    told(costs, Shape(256), *[1.0, 1.2, 1.1] * 3)
    steady, varied = (costs.quote(MODEL, DENOISE, Shape(t)) for t in (64, 256))
    assert steady.margin_s == 0.0
    assert varied.margin_s == pytest.approx(0.1)


# -- keeping -------------------------------------------------------------------------------------


def test_what_was_learned_survives_a_restart_and_a_slow_first_report_after_it() -> None:
    costs, shape = CostModel(), Shape(64, 2, 2)
    told(costs, shape, *[1.0] * 9)
    again = CostModel()
    again.load(costs.dump())
    assert again.estimate(MODEL, DENOISE, shape) == pytest.approx(1.0)
    assert told(again, shape, 30.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("odd", "1"), (f"{MODEL}/denoise/64x1", "1"), (f"{MODEL}/denoise/64x0x1", "1"),
        (f"{MODEL}/paint/64x1x1", "1"), (f"{MODEL}/denoise/9x1x1", "much"),
        (f"{MODEL}/denoise/9x1x1", "nan"), (f"{MODEL}/denoise/9x1x1", "inf"),
    ],
)  # fmt: skip
def test_learned_costs_that_cannot_be_read_are_passed_over(name: str, seconds: str) -> None:
    costs = CostModel()
    costs.load({name: seconds, f"{MODEL}/denoise/64x1x1": "2.5"})
    assert costs.dump() == {f"{MODEL}/denoise/64x1x1": 2.5}


def test_a_shape_learned_before_the_table_came_tells_the_tables_speed() -> None:
    """As a new coordinator does it: what was learned first, then the tables."""
    costs = CostModel()
    costs.load({f"{MODEL}/denoise/64x1x1": 2 * TRUE.seconds(Shape(64))})
    costs.set_table(MODEL, {DENOISE: table()})
    told(costs, Shape(64), *[2 * TRUE.seconds(Shape(64))] * 3)
    assert costs.estimate(MODEL, DENOISE, Shape(256)) == pytest.approx(2 * TRUE.seconds(Shape(256)))


def test_users_who_ask_for_every_size_do_not_fill_the_memory() -> None:
    costs = CostModel()
    for tokens in range(1, 1500):
        told(costs, Shape(tokens), 1.0)
    assert len(costs.dump()) == 1000
