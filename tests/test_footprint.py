"""What forwards need, from the peaks they reached: a batch grows to what fits and no further."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.models.batch import largest_forward
from common.models.errors import BadInput
from common.models.stages import build_stage
from denoise_svc.footprint import Footprint, Meter, prompt_tokens
from tests.tiny_models import shared_qwenimage
from tests.tiny_pipeline import Stages

MIB = 2**20
CPU = torch.device("cpu")


class Scale(Meter):
    """A device whose memory is told."""

    def __init__(self, *peaks: int) -> None:
        self.peaks = list(peaks)

    def now(self) -> int:
        return 0

    def begin(self) -> int:
        return 0

    def peak(self) -> int:
        return self.peaks.pop(0)


def footprint(*peaks: int, budget: int = 100 * MIB, pool: int = 20 * MIB) -> Footprint:
    """Of a process whose first forward, which teaches nothing, has been."""
    known = Footprint(CPU, budget, pool, Scale(*peaks))
    with known.watch(1, 16):
        pass
    return known


def test_a_batch_is_bounded_by_what_one_row_was_seen_to_need() -> None:
    """Here 8 MiB a row where 80 are left; of rows four times as large, a quarter at most."""
    known = footprint(16 * MIB)
    assert known.most_rows(16) is None  # nothing is known yet
    with known.watch(2, 16):
        pass
    rows = known.most_rows(16)
    assert rows is not None
    assert 7 <= rows <= 9  # with a margin
    larger = known.most_rows(64)
    assert larger is not None
    assert larger <= rows // 4
    assert known.most_units() == pytest.approx(16 * rows, abs=16)


def test_the_margin_grows_with_estimates_that_were_too_low_and_shrinks_slowly() -> None:
    known = footprint(8 * MIB, 12 * MIB, 12 * MIB)
    with known.watch(1, 16):
        pass
    first = known.most_rows(16)
    with known.watch(1, 16):
        pass
    taught = known.margin
    assert taught == pytest.approx(1.5)
    with known.watch(1, 16):
        pass
    assert 1.2 < known.margin < taught
    assert first is not None
    assert (known.most_rows(16) or 0) < first


def test_a_job_that_cannot_fit_alone_is_told_what_it_needs() -> None:
    known = footprint(130 * MIB, 120 * MIB)
    for _ in range(2):  # one peak may be another thread's
        known.check(2, 16)
        with known.watch(2, 16):
            pass
    known.check(1, 16)
    for rows, tokens in (2, 16), (3, 16), (2, 4096):
        with pytest.raises(BadInput, match="at least 120 MiB and the device's budget leaves 80"):
            known.check(rows, tokens)


def test_a_job_is_not_refused_by_an_estimate() -> None:
    """Ten pictures need less than ten times what one does: weights of a pass and text are there
    once. They are tried, and what they were seen to need is what counts."""
    known = footprint(60 * MIB, 70 * MIB)
    with known.watch(1, 16):
        pass
    assert known.need_bytes(10, 16) > known.room
    known.check(10, 16)
    with known.watch(10, 16):
        pass
    known.check(10, 16)


def test_what_runs_again_disproves_a_peak() -> None:
    """Two peaks had what another thread took; then as large a forward is seen to fit."""
    known = footprint(90 * MIB, 90 * MIB, 70 * MIB)
    for _ in range(3):
        with known.watch(2, 16):
            pass
    known.check(2, 16)


def test_a_small_job_with_a_long_prompt_leaves_the_others_their_batches() -> None:
    """One MiB a token, of text or picture: what fits is nearly the same for all sizes."""
    known = footprint(budget=60_020 * MIB)
    large, small, prompt = 4096, 16, 500
    known.learn(1, large + prompt, (large + prompt) * MIB)
    rows = known.most_units() / large
    known.learn(1, small + prompt, (small + prompt) * MIB)
    assert known.most_units() / large == pytest.approx(rows, rel=0.15)
    assert rows > 10


def test_sizes_that_run_no_more_bound_no_batches() -> None:
    """A large video was once here; pictures are together as before it once it is forgotten."""
    known = footprint()
    known.learn(1, 64, MIB)
    before = known.most_units()
    known.learn(1, 4096, 1000 * MIB)
    assert known.most_units() < before / 2
    for _ in range(200):
        known.learn(1, 64, MIB)
    assert known.most_units() >= before


def test_one_peak_that_was_too_high_is_forgotten() -> None:
    """Another thread read a state just then: later forwards of the size say what they need."""
    known = footprint()
    known.learn(1, 64, MIB)
    rows = known.most_rows(64) or 0
    known.learn(1, 64, 20 * MIB)
    assert (known.most_rows(64) or 0) < rows / 10
    for _ in range(200):
        known.learn(1, 64, MIB)
    assert (known.most_rows(64) or 0) >= rows


def test_a_size_that_never_ran_may_try() -> None:
    """Scaled from a small job its estimate is far beyond the device; it is measured instead."""
    known = footprint(60 * MIB, 70 * MIB)
    with known.watch(1, 16):
        pass
    assert known.need_bytes(1, 256) > known.room
    known.check(1, 256)
    with known.watch(1, 256):
        pass
    known.check(1, 256)
    assert known.need_bytes(1, 256) == 70 * MIB


def test_the_first_forward_of_a_process_teaches_nothing() -> None:
    """Its peak has all that is needed once: kernels, workspaces, the allocator's own."""
    known = Footprint(CPU, 100 * MIB, 0, Scale(8 * MIB))
    with known.watch(1, 16):
        pass
    assert known.most_rows(16) is None
    with known.watch(1, 16):
        pass
    assert known.need_bytes(1, 16) == 8 * MIB


def test_a_forward_that_took_nothing_more_leaves_its_size_unknown() -> None:
    known = footprint(0)
    with known.watch(1, 16):
        pass
    assert known.most_rows(16) is None
    assert known.most_units() == 0


def test_units_may_be_asked_for_while_sizes_are_learned() -> None:
    """The heartbeat does, on a thread of its own."""
    known = footprint()

    known._recent.append(64)

    class Growing(dict[int, float]):
        """One size more whenever somebody looks at one."""

        def __contains__(self, tokens: object) -> bool:
            self.setdefault(len(self), 1.0)
            return super().__contains__(tokens)

    known._per_unit = Growing({640: 1.0})
    assert known.most_units() > 0


def test_what_ran_out_of_memory_is_tried_at_half_the_size() -> None:
    known = Footprint(CPU, 0, 0)
    assert known.most_units() == 0  # no limit
    known.refused(12, 16)
    assert known.most_units() == 12 * 16 // 2
    assert known.most_rows(16) == 6
    for _ in range(100):  # the device has more room by and by
        with known.watch(6, 16):
            pass
    assert (known.most_rows(16) or 0) > 12


def test_a_job_alone_that_runs_out_of_memory_bounds_batches_too() -> None:
    known = Footprint(CPU, 0, 0)
    with pytest.raises(torch.OutOfMemoryError), known.watch(8, 16):
        raise torch.OutOfMemoryError("8 rows")
    assert known.most_rows(16) == 4


def test_a_host_that_tells_no_peaks_loses_no_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where /proc may not be written to, nothing is learned, which is said once."""
    meter = Meter(CPU)
    meter._clear = tmp_path / "missing" / "clear_refs"
    known = Footprint(CPU, 10_000 * MIB, 0, meter)
    for _ in range(3):
        with known.watch(1, 16):
            pass
    assert known.most_rows(16) is None
    assert len([r for r in caplog.records if "cannot be measured" in r.message]) == 1


def test_a_meter_sees_this_process() -> None:
    """A peak that has passed is still seen, and forgotten by the next one."""
    meter = Meter(CPU)
    before = meter.begin()
    block = torch.ones(16 * MIB)  # 64 MiB
    del block
    assert meter.peak() - before > 50 * MIB
    assert meter.peak() - meter.begin() > 0
    assert meter.peak() - meter.now() < 30 * MIB


def test_a_batch_is_cut_to_the_budget_and_its_jobs_succeed(tmp_path: Path) -> None:
    """Five rows that may not share one forward run in several; each is its own picture."""
    stages = Stages(shared_qwenimage(), tmp_path / "arena")
    denoise: Any = stages.by_kind["denoise"]
    denoise.footprint = footprint(*[40 * MIB] * 9, budget=50 * MIB)
    jobs = [stages.job(f"job-{i}", seed=i, num_inference_steps=4) for i in range(5)]
    for job in jobs:
        job.run("encode")

    def run(stop: int) -> list[Any]:
        rows = [replace(job.row(job.step, stop), exact=False) for job in jobs]
        return stages.run(stages.task("denoise", *rows))

    first = run(2)
    assert {outcome.rows for outcome in first} == {5}  # nothing was known
    assert denoise.counts()["most_units"] > 0
    for job, outcome in zip(jobs, first, strict=True):
        job.accept(outcome)
    second = run(4)
    assert {outcome.rows for outcome in second} == {3, 2}
    assert all(outcome.step == 4 and not outcome.error_code for outcome in second)


def test_what_is_learned_of_a_batch_is_what_its_largest_forward_had(tmp_path: Path) -> None:
    """A guided job of two pictures has four rows in one forward, though fewer surely fit."""
    stages = Stages(shared_qwenimage(), tmp_path / "arena")
    denoise: Any = stages.by_kind["denoise"]
    denoise.footprint = known = footprint(40 * MIB, budget=50 * MIB)
    job = stages.job(n=2, negative_prompt="x", num_inference_steps=2)
    job.run("encode")
    row = replace(job.row(0, 2), exact=False)
    tokens = denoise._tokens(row) + prompt_tokens(denoise._open(row, None)[0])
    known.learn(1, tokens, 10 * MIB)
    assert known.most_rows(tokens) == 2
    assert stages.run(stages.task("denoise", row))[0].rows == 4
    assert known.need_bytes(4, tokens) == 40 * MIB  # 10 a row, as before


@pytest.mark.parametrize("exact", [True, False])
def test_the_tokens_of_prompts_are_counted(tmp_path: Path, exact: bool) -> None:
    """Of the longer of prompt and negative prompt, beside the picture's; in a batch the longest."""
    stages = Stages(shared_qwenimage(), tmp_path / "arena")
    denoise: Any = stages.by_kind["denoise"]
    denoise.footprint = known = footprint(*[MIB] * 9)
    seen: list[int] = []
    known.learn = lambda rows, tokens, nbytes: seen.append(tokens)  # type: ignore[method-assign]
    words = ["a circle", "a circle " * 40]
    jobs = [
        stages.job("short", prompt=words[0], num_inference_steps=2),
        stages.job("long", prompt=words[0], negative_prompt=words[1], num_inference_steps=2),
    ]
    for job in jobs:
        job.run("encode")
    rows = [replace(job.row(0, 2), exact=exact) for job in jobs]
    assert not any(o.error_code for o in stages.run(stages.task("denoise", *rows)))
    picture = denoise._tokens(rows[0])
    assert all(tokens > picture for tokens in seen)
    assert max(seen) > picture + 40
    assert len(seen) == (2 if exact else 1)


@pytest.mark.parametrize(
    ("rows", "most", "largest"),
    [([2, 2], None, 4), ([2, 2], 3, 2), ([4], 2, 4), ([1, 1, 1], 2, 2), ([1, 2, 1], 3, 3)],
)
def test_the_largest_forward_of_a_batch(rows: list[int], most: int | None, largest: int) -> None:
    assert largest_forward(rows, most) == largest


def test_a_stage_takes_its_budget_as_a_setting(tmp_path: Path) -> None:
    """One that weights and pool exhaust is said in the log, and the job says why it fails."""
    stages = Stages(shared_qwenimage(), tmp_path / "arena")
    stage: Any = build_stage("denoise", shared_qwenimage(), stages.store, budget_bytes=MIB)
    stages.by_kind["denoise"] = stage
    job = stages.job()
    job.run("encode")
    for _ in range(2):
        stage.footprint.learn(1, stage._tokens(job.row(0, 2)), 8 * MIB)
    outcome = stages.run(stages.task("denoise", job.row(0, 2)))[0]
    assert outcome.error_code == "invalid_request"  # no other try would mend it
    assert "device_budget_bytes" in outcome.error
