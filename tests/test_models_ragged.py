"""Jobs of several sizes in one forward: each as if alone, whatever stands beside it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from common.batching import batch_key, forward_rows
from common.models import batch, mixing, ragged
from common.models.model import Model
from common.models.ragged import Form, MixedSizes
from common.settings import Settings
from common.stage_main import make_stage
from services.costs.profile import make_profile
from services.costs.table import parse_profile
from tests.tiny_models import shared_qwenimage
from tests.tiny_pipeline import Control, Job, Stages

# fp32, relative to the largest latent; alone is the job by itself, its branches apart.
TOLERANCE = 1e-5
FORMS: list[Form] = ["packed", "padded"]

# Sizes, steps, scales, prompts, n, and pictures of as many tokens but of another shape.
MIX: dict[str, dict[str, Any]] = {
    "square": {"num_inference_steps": 4},
    "wide": {"width": 128, "height": 32, "num_inference_steps": 6, "negative_prompt": "blurry"},
    "tall": {"width": 32, "height": 128, "num_inference_steps": 3, "seed": 2},
    "strong": {
        "width": 96, "height": 96, "negative_prompt": "", "true_cfg_scale": 9.0,
        "num_inference_steps": 5, "seed": 3,
    },
    "two": {
        "width": 48, "height": 32, "n": 2, "prompt": "a small green triangle, left",
        "negative_prompt": "ugly", "num_inference_steps": 5, "seed": 4,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    path = tmp_path_factory.mktemp("arena") / "arena"
    return Stages(shared_qwenimage(), path, mixed_sizes="on")


@pytest.fixture(scope="module")
def expected(stages: Stages) -> dict[str, torch.Tensor]:
    """By job, its latents when it runs alone."""
    found = {}
    for name, params in MIX.items():
        job = stages.job("alone", **params)
        job.run("encode")
        job.denoise([params["num_inference_steps"]])
        found[name] = job.latents()
        job.free()
    return found


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, stages: Stages, monkeypatch: pytest.MonkeyPatch) -> Form:
    monkeypatch.setattr(stages.by_kind["denoise"].model, "mixed", request.param)
    form: Form = request.param
    return form


def start(stages: Stages, *names: str) -> list[Job]:
    jobs = [stages.job(name, **MIX[name]) for name in names or MIX]
    for job in jobs:
        job.run("encode")
    return jobs


def go_on(stages: Stages, jobs: list[Job], steps: int, control: Control | None = None) -> list[Any]:
    """One task of those that are not done; none of them fails."""
    outcomes = stages.together(jobs, steps, control)
    assert not any(outcome.error for outcome in outcomes)
    return outcomes


def off(job: Job, expected: dict[str, torch.Tensor]) -> float:
    alone = expected[job.id]
    return float((job.latents() - alone).abs().max() / alone.abs().max())


def check_and_free(jobs: list[Job], expected: dict[str, torch.Tensor]) -> None:
    for job in jobs:
        assert off(job, expected) < TOLERANCE
        job.free()


def test_jobs_of_several_sizes_equal_each_alone(
    stages: Stages, form: Form, expected: dict[str, torch.Tensor]
) -> None:
    """To everyone's end in one task, all rows in one forward; who is done leaves."""
    jobs = start(stages)
    outcomes = go_on(stages, jobs, 99)
    assert [outcome.step for outcome in outcomes] == [4, 6, 3, 5, 5]
    manifest = stages.by_kind["denoise"].manifest()
    rows = sum(forward_rows(job.params, manifest) for job in jobs)
    assert {outcome.rows for outcome in outcomes} == {rows}
    check_and_free(jobs, expected)


def test_jobs_join_and_leave_at_every_chunk(
    stages: Stages, expected: dict[str, torch.Tensor]
) -> None:
    """One is ahead, one comes late, all are read back from handles in between."""
    jobs = start(stages)
    jobs[1].denoise([2])
    go_on(stages, jobs[:2], 1)
    while left := [job for job in jobs if job.step < job.params["num_inference_steps"]]:
        stages.forget()
        go_on(stages, left, 2)
    check_and_free(jobs, expected)


def test_a_yield_stops_all_sizes_at_one_boundary(
    stages: Stages, expected: dict[str, torch.Tensor]
) -> None:
    jobs = start(stages)
    assert [o.step for o in go_on(stages, jobs, 99, Control(stop_after=2))] == [2] * len(jobs)
    go_on(stages, jobs, 99)
    check_and_free(jobs, expected)


def test_a_mix_that_does_not_fit_is_halved(
    tmp_path: Path, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory costs no job and no step, and each half keeps its own sizes."""
    stages = Stages(shared_qwenimage(), tmp_path / "arena", mixed_sizes="on")
    forward = MixedSizes.__call__

    def limited(self: MixedSizes, hidden_states: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if hidden_states.shape[0] > 4:
            raise torch.OutOfMemoryError("no")
        return forward(self, hidden_states, *rest, **more)

    monkeypatch.setattr(MixedSizes, "__call__", limited)
    jobs = start(stages)
    outcomes = go_on(stages, jobs, 99)
    assert max(outcome.rows for outcome in outcomes) <= 4
    assert stages.by_kind["denoise"].counts()["refused_rows"] == 5  # the smallest
    check_and_free(jobs, expected)


@pytest.mark.parametrize("disturbed", ["square", "two"])
def test_another_neighbour_changes_no_bit(stages: Stages, form: Form, disturbed: str) -> None:
    """Large noise in one job's latents and prompt leaves the others' bits as they were."""

    def latents(times: float) -> dict[str, torch.Tensor]:
        jobs = [opened(stages, name) for name in MIX]
        for name, job in zip(MIX, jobs, strict=True):
            if name == disturbed:
                for value in ("latents", "prompt_embeds", "negative_prompt_embeds"):
                    if isinstance(job.state.values.get(value), torch.Tensor):
                        job.state.values[value] = times * job.state.values[value]
        ran = batch.run(stages.by_kind["denoise"].model, jobs, [2] * len(jobs), mixed=form)
        return {
            name: done.carried["latents"]  # type: ignore[union-attr]
            for name, done in zip(MIX, ran.jobs, strict=True)
        }

    usual, other = latents(1.0), latents(-1e4)
    assert [name for name in MIX if not torch.equal(usual[name], other[name])] == [disturbed]


def opened(stages: Stages, name: str) -> Any:
    """The job, prepared, outside of any task."""
    job = stages.job(name, **MIX[name])
    job.run("encode")
    denoiser = stages.by_kind["denoise"]
    live, _ = denoiser._open(job.row(0, 1), None)
    job.free()
    return live


@pytest.mark.parametrize("form", FORMS)
def test_what_stands_in_the_padding_is_never_seen(stages: Stages, form: Form) -> None:
    """Junk after a row's last token, in pictures and prompts: the same bits everywhere."""
    transformer = stages.by_kind["denoise"].model.pipe.transformer
    draw = torch.Generator().manual_seed(0)
    shapes: list[ragged.Shapes] = [[(1, 4, 4)], [(1, 2, 8)], [(1, 2, 3)]]
    images = torch.randn(3, 16, transformer.config.in_channels, generator=draw)
    texts = torch.randn(3, 9, transformer.config.joint_attention_dim, generator=draw)
    mask = torch.ones(3, 9)
    mask[0, 5:] = 0

    def predicted() -> torch.Tensor:
        with torch.no_grad():
            return MixedSizes(transformer, shapes, form)(
                hidden_states=images,
                encoder_hidden_states=texts,
                encoder_hidden_states_mask=mask,
                timestep=torch.tensor([0.9, 0.5, 0.1]),
                return_dict=False,
            )[0]

    before = predicted()
    images[2, 6:], texts[0, 5:] = 1e6, -1e6
    assert torch.equal(predicted(), before)
    assert not before[2, 6:].any()
    assert before[2, :6].any()


def test_off_gives_each_size_a_forward_of_its_own(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    """Two guided jobs of two sizes: each shares with its own other branch only."""
    stages = Stages(shared_qwenimage(), tmp_path / "arena", mixed_sizes="off")
    assert stages.by_kind["denoise"].manifest()["batch"] == {
        "same": ["width", "height"],
        "mixed": False,
    }
    jobs = start(stages, "strong", "wide")
    assert [outcome.rows for outcome in go_on(stages, jobs, 99)] == [2, 2]
    check_and_free(jobs, expected)


def test_the_batch_key_has_no_size_where_sizes_are_mixed(stages: Stages) -> None:
    """So that the coordinator may put unlike jobs in one task; the worker then does share."""
    manifest = stages.by_kind["denoise"].manifest()
    assert manifest["batch"] == {"same": [], "mixed": True}
    jobs = start(stages)
    assert {batch_key(job.params, manifest, exact=False) for job in jobs} == {manifest["model"]}
    for stage in ("encode", "decode"):  # the denoiser decides
        assert "batch" not in stages.by_kind[stage].manifest()
    for job in jobs:
        job.free()


def test_exact_jobs_keep_their_bits_beside_a_mix(
    stages: Stages, expected: dict[str, torch.Tensor]
) -> None:
    jobs = start(stages)
    rows = [dataclasses.replace(job.row(0, 99), exact=job.id == "wide") for job in jobs]
    for job, outcome in zip(jobs, stages.run(stages.task("denoise", *rows)), strict=True):
        assert not outcome.error
        job.accept(outcome)
    assert torch.equal(jobs[1].latents(), expected["wide"])
    check_and_free(jobs, expected)


def test_auto_goes_by_the_models_profile(tmp_path: Path) -> None:
    """On where a profile of this kind of device says that it pays, off without one."""
    directory = tmp_path / "tiny"
    shutil.copytree(shared_qwenimage(), directory)
    model = Model(directory, "denoise")
    assert model.mixed is None

    def chosen(device: str, speedup: float) -> str | None:
        content = {"device": device, "mixed": {"speedup": speedup}}
        (directory / "profile.json").write_text(json.dumps(content))
        model.directory = dataclasses.replace(model.directory, profile=content)
        return mixing.choose("auto", model)

    assert chosen("cpu", 1.3) == "packed"
    assert chosen("cpu", 0.7) is None
    assert chosen("cuda", 1.3) is None
    assert mixing.choose("on", model) == "packed"
    assert mixing.choose("off", model) is None
    with pytest.raises(ValueError, match="'maybe' is none of auto, on, off"):
        mixing.choose("maybe", model)


def test_a_profile_times_a_mix_both_ways() -> None:
    """Four jobs of the smallest size, one of the middle, one of the largest."""
    settings = Settings(model=str(shared_qwenimage()))
    table = make_profile(settings, sizes=[(32, 32), (48, 48), (64, 64)], repeats=1)
    assert table.mixed["sizes"] == [[32, 32]] * 4 + [[48, 48], [64, 64]]
    ratio = table.mixed["grouped_s"] / table.mixed["packed_s"]
    assert table.mixed["speedup"] == pytest.approx(ratio)
    assert parse_profile(table.to_text()).mixed["speedup"] == pytest.approx(ratio, rel=1e-4)


def test_the_setting_reaches_the_denoiser(stages: Stages) -> None:
    settings = Settings(model=str(shared_qwenimage()), mixed_sizes="on")
    stage: Any = make_stage("denoise", settings, stages.store)
    assert stage.manifest()["batch"]["mixed"] is True


def test_a_transformer_that_a_view_would_go_around_is_left_alone(stages: Stages) -> None:
    """Hooks that put themselves in place of a forward (context parallelism) rule mixing out."""
    transformer = ragged._shallow(stages.by_kind["denoise"].model.pipe.transformer)
    assert ragged.usable(transformer)
    transformer.forward = transformer.forward
    assert not ragged.usable(transformer)
