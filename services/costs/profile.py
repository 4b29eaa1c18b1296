"""Measure a model and fit its table: what `slackwater profile` does, without the printing."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.settings import Settings
from common.stage import DECODE, DENOISE, ENCODE
from services.costs.bench import open_bench
from services.costs.fit import Sample, fit, held_out_error
from services.costs.measure import SIZES, Measured, Size, measure, plan_of
from services.costs.shape import Shape
from services.costs.table import Fit, Profile


def make_profile(
    settings: Settings,
    sizes: Sequence[Size] = (),
    repeats: int = 5,
    count: int = SIZES,
    say: Callable[[str], None] = lambda line: None,
) -> Profile:
    """Load the model of `settings` into this process, time its stages, fit.

    `sizes` are those to fit on, or `count` are chosen. Raises RefusedModel, InvalidRequest and
    StageFailed, each with what was wrong; TooFewSizes where nothing can be fitted.
    """
    with open_bench(settings) as bench:
        measured = measure(bench, plan_of(bench.manifest, sizes, repeats, count), say)
        manifest = bench.manifest
    return _profile(measured, manifest, settings, repeats)


def _profile(
    measured: Measured, manifest: dict[str, Any], settings: Settings, repeats: int
) -> Profile:
    by_stage = {
        stage: [sample for sample in measured.samples if sample.stage == stage]
        for stage in (ENCODE, DENOISE, DECODE)
    }
    by_stage[DENOISE] += batch_samples(measured.batch)
    fits = {
        stage: fit(samples, measured.prompt_tokens if stage == ENCODE else 0)
        for stage, samples in by_stage.items()
    }
    errors = {stage: held_out_error(fits[stage], samples) for stage, samples in by_stage.items()}
    return Profile(
        model=settings.served_name(),
        fits=fits,
        fingerprint=str(manifest.get("fingerprint", "")),
        device=settings.device.partition(":")[0],
        device_name=_device_name(settings.device),
        dtype=settings.dtype,
        attention=str(manifest.get("attention", "")),
        threads=settings.threads,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        token_px=int(manifest.get("token_px") or 16),
        repeats=repeats,
        rows=tuple(_row(sample, fits[sample.stage]) for sample in measured.samples),
        batch=tuple(measured.batch),
        steps=measured.steps,
        mixed=measured.mixed,
        held_out_error={stage: error for stage, error in errors.items() if error is not None},
    )


def batch_samples(batch: Iterable[Mapping[str, Any]]) -> list[Sample]:
    """Rows of several jobs in one forward pass, as a job with so many pictures: the same work."""
    return [
        Sample(DENOISE, Shape(int(entry["tokens"]), rows, 1), seconds)
        for entry in batch
        for rows, seconds in zip(entry["rows"], entry["step_s"], strict=True)
    ]


def _row(sample: Sample, fit: Fit) -> dict[str, Any]:
    shape = sample.shape
    return {
        "stage": sample.stage,
        "width": sample.width,
        "height": sample.height,
        "tokens": shape.tokens,
        "n": shape.n,
        "forwards": shape.forwards,
        "seconds": sample.seconds,
        "fitted_s": fit.seconds(shape),
        "held_out": sample.held_out,
    }


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
