"""Rows of several jobs in one forward: what may differ, and what must not."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from common.batching import batch_key, forward_rows
from tests.tiny_models import shared_qwenimage
from tests.tiny_pipeline import Control, Job, Stages

# fp32, against the same job alone. Measured up to 2e-6 on latents of about 4.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    return Stages(shared_qwenimage(), tmp_path_factory.mktemp("arena") / "arena")


@pytest.fixture
def fresh(tmp_path: Path) -> Stages:
    """Stages that have not learned yet what fits."""
    return Stages(shared_qwenimage(), tmp_path / "arena")


MIX: dict[str, dict[str, Any]] = {
    "plain": {"num_inference_steps": 6},
    "guided": {"num_inference_steps": 9, "negative_prompt": "blurry", "seed": 1},
    "strong": {"num_inference_steps": 5, "negative_prompt": "", "true_cfg_scale": 9.0, "seed": 2},
    "two": {"num_inference_steps": 7, "n": 2, "prompt": "a small green triangle, left", "seed": 3},
}


def alone(stages: Stages, params: dict[str, Any]) -> torch.Tensor:
    job = stages.job("alone", **params)
    job.run("encode")
    job.denoise([job.params["num_inference_steps"]])
    latents = job.latents()
    job.free()
    return latents


def start(stages: Stages, mix: dict[str, dict[str, Any]] = MIX) -> list[Job]:
    jobs = [stages.job(name, **params) for name, params in mix.items()]
    for job in jobs:
        job.run("encode")
    return jobs


def test_a_batch_of_unlike_jobs_equals_each_alone(stages: Stages) -> None:
    """Other steps, scales, prompts, with and without guidance, n = 2: rounding only."""
    jobs = start(stages)
    jobs[1].denoise([2])  # joins two steps ahead
    while any(job.step < job.params["num_inference_steps"] for job in jobs):
        stages.forget()
        assert not any(o.error for o in stages.together(jobs, 3))
    for job in jobs:
        off = (job.latents() - alone(stages, MIX[job.id])).abs().max().item()
        assert off < TOLERANCE
        job.free()


def test_jobs_leave_a_batch_when_they_are_done(stages: Stages) -> None:
    """One task to everyone's end: those with fewer steps leave, the rest go on."""
    jobs = start(stages)
    control = Control()
    outcomes = stages.together(jobs, 99, control)
    assert [o.step for o in outcomes] == [6, 9, 5, 7]
    assert control.told.count(("guided", 9)) == 1
    for job in jobs:
        assert (job.latents() - alone(stages, MIX[job.id])).abs().max() < TOLERANCE
        job.free()


def test_a_yield_stops_all_rows_at_the_same_boundary(stages: Stages) -> None:
    """Every row says how far it got, and all go on from there."""
    jobs = start(stages)
    outcomes = stages.together(jobs, 5, Control(stop_after=2))
    assert [o.step for o in outcomes] == [2, 2, 2, 2]
    stages.forget()
    stages.together(jobs, 99)
    for job in jobs:
        assert (job.latents() - alone(stages, MIX[job.id])).abs().max() < TOLERANCE
        job.free()


def test_exact_rows_stay_exact_beside_a_batch(stages: Stages) -> None:
    """A task may mix both; the exact row's bits are those of the job alone."""
    jobs = start(stages)
    rows = [dataclasses.replace(job.row(0, 5), exact=job.id == "plain") for job in jobs]
    for job, outcome in zip(jobs, stages.run(stages.task("denoise", *rows)), strict=True):
        assert not outcome.error
        job.accept(outcome)
    jobs[0].denoise([6])
    assert torch.equal(jobs[0].latents(), alone(stages, MIX["plain"]))
    for job in jobs:
        job.free()


def test_a_neighbour_changes_nothing(stages: Stages) -> None:
    """The same job beside quite another neighbour of the same shape: the same bits."""
    seen = []
    for prompt, seed in (("a red circle", 5), ("a blue square", 6)):
        jobs = start(stages, {"mine": MIX["guided"], "other": {"prompt": prompt, "seed": seed}})
        stages.together(jobs, 4)
        seen.append(jobs[0].latents())
        for job in jobs:
            job.free()
    assert torch.equal(*seen)


def test_a_row_that_overflows_fails_alone(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in one row's latents does not reach the rows beside it."""
    jobs = start(stages)
    scheduler = type(stages.by_kind["denoise"].model.pipe.scheduler)
    step = scheduler.step

    def poisoned(self: Any, noise: Any, t: Any, sample: Any, **kw: Any) -> Any:
        out = step(self, noise, t, sample, **kw)
        return (out[0] * float("nan"),) if sample.shape[0] == 2 else out

    monkeypatch.setattr(scheduler, "step", poisoned)
    outcomes = stages.together(jobs, 99)
    assert [o.error_code for o in outcomes] == ["", "", "", "non_finite"]
    monkeypatch.undo()
    for job in jobs[:3]:
        assert (job.latents() - alone(stages, MIX[job.id])).abs().max() < TOLERANCE
    for job in jobs:
        job.free()


def test_a_batch_that_breaks_is_run_row_by_row(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in the joint forward costs the batch, not the jobs."""
    from common.models.joint import JointGuider

    calls: list[int] = []
    prepare = JointGuider.prepare_inputs

    def broken(self: Any, data: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no")
        return prepare(self, data)

    jobs = start(stages)
    monkeypatch.setattr(JointGuider, "prepare_inputs", broken)
    assert not any(o.error for o in stages.together(jobs, 99))
    for job in jobs:
        assert torch.equal(job.latents(), alone(stages, MIX[job.id]))
        job.free()


def test_a_batch_that_does_not_fit_is_halved(
    fresh: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory costs no job and no step: forwards shrink until they fit, and stay so."""
    forwards = limit_rows(fresh, monkeypatch, most=3)
    jobs = start(fresh)  # 7 rows
    outcomes = fresh.together(jobs, 3)
    assert [o.step for o in outcomes] == [3, 3, 3, 3]
    assert {o.rows for o in outcomes} == {3, 2}
    counts = fresh.by_kind["denoise"].counts()
    assert (counts["refused_rows"], counts["batch_rows"]) == (7, 3)
    forwards.clear()
    fresh.together(jobs, 99)
    assert max(forwards) <= 3  # no second try of what did not fit
    monkeypatch.undo()
    for job in jobs:
        assert (job.latents() - alone(fresh, MIX[job.id])).abs().max() < TOLERANCE
        job.free()


def test_a_guided_job_that_only_fits_branch_by_branch_runs_so(
    fresh: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last resort is the job alone, its branches apart; nothing is lost."""
    limit_rows(fresh, monkeypatch, most=1)
    jobs = start(fresh, {"a": MIX["guided"], "b": {**MIX["strong"], "seed": 9}})
    outcomes = fresh.together(jobs, 99)
    assert [(o.step, o.rows) for o in outcomes] == [(9, 0), (5, 0)]
    monkeypatch.undo()
    assert torch.equal(jobs[0].latents(), alone(fresh, MIX["guided"]))
    for job in jobs:
        job.free()


def test_what_a_jobs_own_scheduler_raises_fails_that_job(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on in the same batch, without a step done twice."""
    jobs = start(stages)
    scheduler = type(stages.by_kind["denoise"].model.pipe.scheduler)
    step = scheduler.step

    def broken(self: Any, noise: Any, t: Any, sample: Any, **kw: Any) -> Any:
        if sample.shape[0] == 2 and self.step_index == 2:
            raise RuntimeError("no third step")
        return step(self, noise, t, sample, **kw)

    monkeypatch.setattr(scheduler, "step", broken)
    control = Control()
    outcomes = stages.together(jobs, 99, control)
    assert [o.error_code for o in outcomes] == ["", "", "", "stage_error"]
    assert control.told.count(("guided", 1)) == 1
    monkeypatch.undo()
    for job in jobs[:3]:
        assert (job.latents() - alone(stages, MIX[job.id])).abs().max() < TOLERANCE
    for job in jobs:
        job.free()


def test_a_canceled_job_leaves_the_batch(stages: Stages) -> None:
    """Its row is gone from the next step on; the others finish."""

    class Cancels(Control):
        def has_left(self, job: str) -> bool:
            return job == "guided" and ("guided", 2) in self.told

    jobs = start(stages)
    control = Cancels()
    outcomes = stages.together(jobs, 99, control)
    assert [o.step for o in outcomes] == [6, 2, 5, 7]
    for job in jobs:
        if job.id != "guided":
            assert (job.latents() - alone(stages, MIX[job.id])).abs().max() < TOLERANCE
        job.free()


def test_jobs_of_one_batch_key_share_a_forward(stages: Stages) -> None:
    """What the coordinator computes from the manifest holds in the worker."""
    manifest = stages.by_kind["denoise"].manifest()
    jobs = start(stages)
    keys = {batch_key(job.params, manifest, exact=False) for job in jobs}
    assert len(keys) == 1
    assert "" not in keys
    rows = sum(forward_rows(job.params, manifest) for job in jobs)
    assert {outcome.rows for outcome in stages.together(jobs, 1)} == {rows}
    for job in jobs:
        job.free()


def limit_rows(stages: Stages, monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """A device with memory for `most` rows a forward; the list fills with what was asked."""
    transformer = stages.by_kind["denoise"].model.pipe.transformer
    forward, asked = transformer.forward, []

    @functools.wraps(forward)
    def limited(**given: Any) -> Any:
        rows = given["hidden_states"].shape[0]
        asked.append(rows)
        if rows > most:
            raise torch.OutOfMemoryError(f"{rows} rows")
        return forward(**given)

    monkeypatch.setattr(transformer, "forward", limited)
    return asked


def test_sizes_are_not_mixed_in_a_forward(stages: Stages) -> None:
    """Jobs of another size in the task form a batch of their own, or run alone."""
    mix: dict[str, dict[str, Any]] = {
        "a": {"negative_prompt": "x"},
        "b": {"width": 96, "seed": 1},
        "c": {"seed": 2},
        "d": {"width": 96, "height": 32, "seed": 3},
    }
    jobs = start(stages, mix)
    assert not any(o.error for o in stages.together(jobs, 99))
    for job in jobs:
        assert (job.latents() - alone(stages, mix[job.id])).abs().max() < TOLERANCE
        job.free()
    assert stages.store.arena is not None
    assert stages.store.arena.stats().claims == 0
