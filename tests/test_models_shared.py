"""Encoders and decoders over several jobs at once, and the decoder's other forms."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.models import parcels
from common.models.embed_cache import EmbedCache
from common.stage import Outcome
from tests.tiny_models import shared_qwenimage
from tests.tiny_pipeline import Job, Stages, open_picture

PROMPTS = ("a red circle", "a red square", "a small green triangle on the left")


def make(path: Path, **settings: Any) -> Stages:
    return Stages(shared_qwenimage(), path / "arena", **settings)


def run_all(stages: Stages, kind: str, jobs: list[Job], exact: bool = False) -> list[Outcome]:
    steps = jobs[0].params["num_inference_steps"] if kind == "denoise" else 0
    rows = [dataclasses.replace(job.row(0, steps), exact=exact) for job in jobs]
    outcomes = stages.run(stages.task(kind, *rows))
    for job, outcome in zip(jobs, outcomes, strict=True):
        assert not outcome.error
        job.accept(outcome)
    return outcomes


def embeds(job: Job) -> dict[str, Any]:
    with job.stages.store.borrow(job.handles["embeds"]) as parcel:
        values: dict[str, Any] = parcels.read("embeds", parcel, torch.device("cpu"))["values"]
    return values


def calls_of(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Batch sizes of the module's forward passes from now on."""
    sizes: list[int] = []
    forward = module.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs["input_ids"]
        sizes.append(first.shape[0])
        return forward(*args, **kwargs)

    monkeypatch.setattr(module, "forward", counted)
    return sizes


def test_prompts_of_equal_length_are_encoded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three in one forward; each job's embeddings are its own up to rounding."""
    stages = make(tmp_path)
    sizes = calls_of(stages.by_kind["encode"].model.pipe.text_encoder, monkeypatch)
    jobs = [stages.job(f"j{i}", prompt=p) for i, p in enumerate(PROMPTS)]
    run_all(stages, "encode", jobs)
    assert sorted(sizes) == [1, 2]
    for job in jobs:
        alone = stages.job("alone", **{**job.params, "seed": 1})
        alone.run("encode")  # exact, and so never from what was encoded with others
        mine, theirs = embeds(job), embeds(alone)
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert mine[name].shape == value.shape
                assert torch.allclose(mine[name].float(), value.float(), atol=1e-5)
    assert sorted(sizes) == [1, 1, 1, 2]  # the third was encoded alone, and that is exact


def test_guided_prompts_go_together_with_their_negatives(tmp_path: Path) -> None:
    stages = make(tmp_path)
    jobs = [
        stages.job(f"j{i}", prompt=p, negative_prompt="blurry") for i, p in enumerate(PROMPTS[:2])
    ]
    run_all(stages, "encode", jobs)
    alone = stages.job("alone", prompt=PROMPTS[1], negative_prompt="blurry")
    alone.run("encode")
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        assert torch.allclose(embeds(jobs[1])[name], embeds(alone)[name], atol=1e-5)


def test_an_exact_job_gets_no_embeddings_that_were_made_with_others(tmp_path: Path) -> None:
    """They share one budget, and not more than the place in it."""
    stages = make(tmp_path)
    encode = stages.by_kind["encode"]
    jobs = [stages.job(f"j{i}", prompt=p) for i, p in enumerate(PROMPTS[:2])]
    fresh = run_all(stages, "encode", jobs)
    assert encode.counts() == {"embed_hits": 0, "embed_misses": 2}
    again = run_all(stages, "encode", jobs)
    assert [o.skipped for o in (*fresh, *again)] == [0, 0, 1, 1]  # said to who learns from it
    assert encode.counts() == {"embed_hits": 2, "embed_misses": 2}
    run_all(stages, "encode", jobs, exact=True)
    assert encode.counts() == {"embed_hits": 2, "embed_misses": 4}


def test_the_embeddings_of_an_encoder_keep_to_one_budget(tmp_path: Path) -> None:
    """Those encoded alone and those encoded together: no more than the setting in all."""
    budget = 20_000
    stages = make(tmp_path, cache_bytes=budget)
    encode = stages.by_kind["encode"]
    for colour in ("red", "blue", "green", "white", "black", "pink"):
        for exact, words in (True, ("circle", "square")), (False, ("ring", "heart")):
            jobs = [stages.job(f"{colour}-{word}", prompt=f"a {colour} {word}") for word in words]
            run_all(stages, "encode", jobs, exact)
    caches = [own for own in vars(encode).values() if isinstance(own, EmbedCache)]
    assert 0 < sum(cache.used_bytes for cache in caches) <= budget


def test_exact_rows_are_encoded_and_decoded_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = make(tmp_path)
    prompts = calls_of(stages.by_kind["encode"].model.pipe.text_encoder, monkeypatch)
    latents = calls_of(stages.by_kind["decode"].model.pipe.vae.decoder, monkeypatch)
    jobs = [stages.job(f"j{i}", prompt=p) for i, p in enumerate(PROMPTS[:2])]
    for kind in ("encode", "denoise", "decode"):
        run_all(stages, kind, jobs, exact=True)
    assert prompts == [1, 1]
    assert latents == [1, 1]


def test_latents_of_one_size_are_decoded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of one size, one with two pictures, and one of another: each its own pictures."""
    stages = make(tmp_path)
    own: list[dict[str, Any]] = [{}, {"n": 2}, {"seed": 1}, {"width": 96}]
    jobs = [stages.job(f"j{i}", **params) for i, params in enumerate(own)]
    for kind in ("encode", "denoise"):
        run_all(stages, kind, jobs)
    exact = [[open_picture(o.content) for o in job.run("decode").outputs] for job in jobs]
    sizes = calls_of(stages.by_kind["decode"].model.pipe.vae.decoder, monkeypatch)
    outcomes = run_all(stages, "decode", jobs)
    assert sorted(sizes) == [1, 4]
    for outcome, expected in zip(outcomes, exact, strict=True):
        assert len(outcome.outputs) == len(expected)
        for output, picture in zip(outcome.outputs, expected, strict=True):
            apart = np.abs(open_picture(output.content).astype(int) - picture)
            assert apart.max() <= 1


def test_one_jobs_broken_latents_fail_that_job(tmp_path: Path) -> None:
    """NaN among latents that are decoded together: the others have their pictures."""
    stages = make(tmp_path)
    jobs = [stages.job(f"j{i}", seed=i) for i in range(3)]
    for kind in ("encode", "denoise"):
        run_all(stages, kind, jobs)
    decoder = stages.by_kind["decode"]
    rows = [dataclasses.replace(job.row(), exact=False) for job in jobs]
    task = stages.task("decode", *rows)
    staged = decoder.stage_in(task)
    staged["j1"]["latents"]["carried"]["latents"].fill_(float("nan"))
    outcomes = decoder.run(task, staged, None)
    assert [o.error_code for o in outcomes] == ["", "non_finite", ""]


def test_fast_decode_is_two_dimensional_and_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one 3-D convolution for jobs that need not be exact; exact ones have theirs."""
    stages = make(tmp_path, fast_decode=True)
    (job,) = jobs = [stages.job(width=96)]
    for kind in ("encode", "denoise"):
        run_all(stages, kind, jobs)
    exact = job.pictures()[0]
    calls: list[Any] = []
    solid = torch.nn.functional.conv3d

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return solid(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "conv3d", counted)
    fast = open_picture(run_all(stages, "decode", jobs)[0].outputs[0].content)
    assert not calls
    assert np.abs(fast.astype(int) - exact).max() <= 1
    assert np.array_equal(job.pictures()[0], exact)
    assert calls


def test_tiled_decode_is_diffusers_own(tmp_path: Path) -> None:
    """A picture larger than a tile equals the classic pipeline with tiling enabled."""
    from diffusers import QwenImagePipeline

    stages = make(tmp_path, tiled_decode=True)
    job = stages.job(width=320, height=64, num_inference_steps=2)
    for kind in ("encode", "denoise"):
        run_all(stages, kind, [job], exact=True)
    pipe = QwenImagePipeline.from_pretrained(shared_qwenimage())
    pipe.set_progress_bar_config(disable=True)
    pipe.vae.enable_tiling()
    picture = pipe(
        prompt=job.params["prompt"],
        width=320,
        height=64,
        num_inference_steps=2,
        generator=torch.Generator("cpu").manual_seed(job.params["seed"]),
    ).images[0]
    assert np.array_equal(job.pictures()[0], np.array(picture))
