"""Step caches as a job's parameter: diffusers' numbers, a job's own state, nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, QwenImagePipeline, TaylorSeerCacheConfig

from common.models import chunk, quirks, step_cache
from common.models.step_cache import MOST_TWINS, Twin, Twins
from denoise_svc.blocks import BLOCK_BYTES, BlockPool
from denoise_svc.residents import Residents
from tests.test_models_batch_families import prepare
from tests.test_models_families import FAMILIES
from tests.tiny_models import shared_qwenimage
from tests.tiny_pipeline import Job, Stages

FIRST_BLOCK = {"cache": "first_block", "cache_threshold": 0.8}
TAYLOR = {"cache": "taylor_seer", "cache_threshold": None}
STEPS = 12


@pytest.fixture
def stages(tmp_path: Path) -> Stages:
    return Stages(shared_qwenimage(), tmp_path / "arena")


@pytest.fixture(scope="module")
def classic() -> Any:
    pipe = QwenImagePipeline.from_pretrained(shared_qwenimage())
    pipe.set_progress_bar_config(disable=True)
    return pipe


@contextlib.contextmanager
def enabled(pipe: Any, config: Any) -> Iterator[None]:
    pipe.transformer.enable_cache(config)
    try:
        yield
    finally:
        pipe.transformer.disable_cache()


def reference(pipe: Any, job: Job) -> torch.Tensor:
    p = job.params
    names = ("prompt", "negative_prompt", "width", "height", "num_inference_steps")
    latents: torch.Tensor = pipe(
        **{name: p[name] for name in names},
        true_cfg_scale=p["true_cfg_scale"],
        max_sequence_length=p["max_sequence_length"],
        generator=torch.Generator("cpu").manual_seed(p["seed"]),
        output_type="latent",
    ).images
    pipe.transformer._reset_stateful_cache()
    return latents


def start(stages: Stages, *own: dict[str, Any]) -> list[Job]:
    jobs = []
    for i, params in enumerate(own):
        more = {"num_inference_steps": STEPS, "seed": i, **params}
        jobs.append(stages.job(f"job-{i}", **more))
        jobs[-1].run("encode")
    return jobs


@pytest.mark.parametrize(
    ("cache", "config"),
    [(FIRST_BLOCK, FirstBlockCacheConfig(threshold=0.8)), (TAYLOR, TaylorSeerCacheConfig())],
    ids=["first_block", "taylor_seer"],
)
def test_interleaved_jobs_equal_the_classic_pipeline_with_that_cache(
    stages: Stages, classic: Any, cache: dict[str, Any], config: Any
) -> None:
    """Chunks of three jobs in turn, guided and not, one without a cache between them."""
    jobs = start(
        stages,
        {**cache, "negative_prompt": "blurry"},
        {**cache, "prompt": "a small green triangle, left"},
        {"negative_prompt": "ugly"},
    )
    for stop in range(2, STEPS + 1, 2):
        last = [job.run("denoise", stop) for job in jobs]
    assert last[0].skipped > 0
    assert last[1].skipped > 0
    assert last[2].skipped == 0
    with enabled(classic, config):
        for job in jobs[:2]:
            assert torch.equal(job.latents(), reference(classic, job))
    assert torch.equal(jobs[2].latents(), reference(classic, jobs[2]))


def test_nothing_is_left_of_a_finished_job(stages: Stages) -> None:
    """Neither in the stage nor in the hooks of the denoisers that jobs share."""
    stage = stages.by_kind["denoise"]
    job, other = start(stages, FIRST_BLOCK, FIRST_BLOCK)
    job.denoise([4])
    other.denoise([4])
    assert stage.counts()["cache_state_bytes"] > 0
    job.denoise([8, STEPS])
    other.free()  # canceled
    counts = stage.counts()
    assert counts["residents"] == counts["pool_used_bytes"] == 0
    twin = stage._twins.of(job.params)
    assert not any(manager._state_cache for manager in twin._managers.values())


def test_a_job_whose_cache_state_is_lost_begins_with_a_fresh_one(stages: Stages) -> None:
    """It goes on correctly: the forward after the loss is computed in full."""
    kept, lost = start(stages, FIRST_BLOCK, {**FIRST_BLOCK, "seed": 0})
    kept.denoise([6])
    lost.denoise([6])
    before = kept.latents()
    assert torch.equal(lost.latents(), before)
    so_far = skipped_in(stages, lost)
    assert so_far > 0
    stages.forget()
    plain = stages.job("plain", num_inference_steps=STEPS, seed=0)
    plain.handles, plain.step = dict(lost.handles), 6
    full = stages.run(stages.task("denoise", plain.row(6, 7)))[0]
    one = stages.run(stages.task("denoise", lost.row(6, 7)))[0]
    assert one.skipped == so_far
    plain.handles, lost.handles = {**plain.handles, **full.handles}, {**lost.handles, **one.handles}
    assert torch.equal(lost.latents(), plain.latents())


def skipped_in(stages: Stages, job: Job) -> int:
    """What the job's written state says of skipped forwards."""
    from common.models import parcels

    with stages.store.borrow(job.handles["latents"]) as parcel:
        values = parcels.read("latents", parcel, torch.device("cpu"))
    return int(values["skipped"])


def test_states_of_caches_never_push_out_a_live_job(tmp_path: Path) -> None:
    """With no room for them at all, jobs stay live and are right."""
    stages = Stages(shared_qwenimage(), tmp_path / "arena")
    stage = stages.by_kind["denoise"]
    # One block for its latents, one for what it was prepared with, none for its cache.
    stage.residents = Residents(BlockPool(torch.device("cpu"), 2 * BLOCK_BYTES))
    (job,) = start(stages, FIRST_BLOCK)
    job.denoise([6])
    assert stage.residents.has(job.id, job.handles["latents"].seq)
    assert stage.counts()["cache_evictions"] == 1
    assert job.denoise([STEPS]).step == STEPS


def test_every_threshold_asked_for_does_not_keep_a_denoiser(stages: Stages) -> None:
    """The last few stay; where a cache has no threshold, any is the same."""
    twins = Twins(stages.by_kind["denoise"].model.pipe)

    def of(threshold: float | None, cache: str = "first_block") -> Twin:
        return twins.of({"cache": cache, "cache_threshold": threshold})

    first = of(0.1)
    assert of(0.1) is first
    others = [of(0.1 + i / 100) for i in range(1, MOST_TWINS)]
    assert of(0.1) is first  # and is the latest now
    newest = of(0.9)
    assert of(0.1) is first
    gone = weakref.ref(others.pop(0))
    gc.collect()
    assert gone() is None
    assert [of(0.1 + i / 100) for i in range(2, MOST_TWINS)] == others
    assert of(0.9) is newest
    assert of(0.1, "taylor_seer") is of(None, "taylor_seer")


def test_a_cached_job_shares_no_forward(stages: Stages) -> None:
    """Beside others in a task that could share one it equals itself alone, bit for bit."""
    cached, other, third = start(stages, FIRST_BLOCK, {}, {"negative_prompt": "x"})
    rows = [dataclasses.replace(j.row(0, STEPS), exact=False) for j in (cached, other, third)]
    outcomes = stages.run(stages.task("denoise", *rows))
    assert [o.rows for o in outcomes] == [0, 3, 3]
    cached.accept(outcomes[0])
    (alone,) = start(stages, FIRST_BLOCK)
    alone.denoise([STEPS])
    assert torch.equal(cached.latents(), alone.latents())


def test_only_models_that_can_offer_the_parameter(stages: Stages) -> None:
    parameters = stages.by_kind["encode"].manifest()["parameters"]
    assert parameters["cache"]["choices"] == ["none", "first_block", "taylor_seer"]
    assert parameters["cache"]["default"] == "none"
    assert parameters["cache_threshold"]["default"] is None


# Families and the caches that quirks.py allows them.
TRIED = [
    (name, cache)
    for name, make in FAMILIES.items()
    for cache in quirks.of(str(make().pipe.blocks.model_name)).caches
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "cache"), TRIED)
def test_a_family_cut_into_chunks_equals_itself_uncut(family: str, cache: str) -> None:
    """Two interleaved jobs with a cache against each in one go."""
    torch.manual_seed(0)
    model = FAMILIES[family]()
    deepen(model)
    twin = step_cache.Twins(model.pipe).of({"cache": cache, "cache_threshold": 0.8})

    def run(job: Any, state: Any, stop: int) -> Any:
        with twin.running(job.pipe, state) as cached:
            done = chunk.run(job.pipe, model.split, job.state, job.iteration, stop, job.carried)
        job.iteration, job.carried = done.iteration, done.carried
        return cached

    whole = [prepare(model, {"seed": i, "num_inference_steps": STEPS}, i) for i in range(2)]
    cached = [run(job, None, 99) for job in whole]
    assert all(c.skipped > 0 for c in cached)
    jobs = [prepare(model, {"seed": i, "num_inference_steps": STEPS}, i) for i in range(2)]
    states: list[Any] = [None, None]
    while jobs[0].iteration < jobs[0].iterations:
        for i, job in enumerate(jobs):
            states[i] = run(job, states[i], job.iteration + 3).state
    for job, expected in zip(jobs, whole, strict=True):
        assert torch.equal(job.carried["latents"], expected.carried["latents"])


def deepen(model: Any) -> None:
    """A second and third block, so that there is something to skip."""
    for name in step_cache.DENOISERS:
        denoiser = getattr(model.pipe, name, None)
        for blocks in denoiser.children() if denoiser is not None else ():
            if isinstance(blocks, torch.nn.ModuleList):
                blocks.extend([copy.deepcopy(blocks[0]) for _ in range(2)])
