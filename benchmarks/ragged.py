"""Jobs of several sizes: all in one forward pass, one forward a size, and one by one.

`python -m benchmarks.ragged [--mixes MIX …] [--repeats N] [--json]`

Two mixes, whose jobs differ in size, prompt, seed, steps, guidance and n: `few sizes` has sizes
that several jobs share, `all unlike` none. Each is run in every way:

    packed, padded   one forward for all (common/models/ragged.py)
    grouped          one forward a size
    one by one       each job alone, its CFG branches apart: what exact jobs get
    diffusers        the classic pipeline, job after job

A step's time is that of one step of all jobs: CPU time of the one thread, which neighbours on the
machine disturb less than the wall clock; the ways take turns and the best of their repeats
counts. Accuracy: every step against the job's own step alone from the same latents, relative to
the largest of them. Leakage: rows of other jobs in which any bit changes when one job's latents
and prompts become large noise and everybody's padding is filled with junk.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.batching import PROMPTS, SCALES, Diffusers, Job, Ours
from common.settings import single_threaded

single_threaded()

WAYS = ("packed", "padded", "grouped", "one by one")
MIXES: dict[str, list[tuple[int, int]]] = {
    "few sizes": [(64, 64)] * 4 + [(128, 128), (256, 256)],
    "all unlike": [(64, 64), (80, 80), (96, 64), (64, 96), (112, 112), (128, 96), (128, 128),
                   (160, 96)],
}  # fmt: skip
TIMED = 5  # steps of each repeat
CLOSE = 1e-5
JUNK = 1e4


def jobs_of(mix: str) -> list[Job]:
    """Every second one guided, every third of two pictures, TIMED to TIMED + 3 steps."""
    return [
        {
            "prompt": PROMPTS[i % 4],
            "negative_prompt": "blurry" if i % 2 == 0 else None,
            "true_cfg_scale": SCALES[i % 4],
            "num_inference_steps": TIMED + i % 4,
            "width": width,
            "height": height,
            "seed": i,
            "n": 2 if i % 3 == 2 else 1,
        }
        for i, (width, height) in enumerate(MIXES[mix])
    ]


class Steps:
    """Steps of many jobs in one of the ways, and the CPU seconds of one step of all."""

    def __init__(self, ours: Ours, way: str) -> None:
        self._ours, self._way = ours, way
        self._form: Any = way if way in ("packed", "padded") else None
        self.step_s = 0.0

    def run(self, jobs: list[Any], steps: int) -> None:
        """`steps` more of each job, which is moved on."""
        self.step_s = sum(self._group(group, steps) for group in self._groups(jobs))

    def _groups(self, jobs: list[Any]) -> list[list[Any]]:
        from common.models import batch

        if self._way == "one by one":
            return [[job] for job in jobs]
        groups: dict[Any, list[Any]] = {}
        for job in jobs:
            groups.setdefault(batch.key(self._ours.denoiser, job, self._form), []).append(job)
        return list(groups.values())

    def _group(self, jobs: list[Any], steps: int) -> float:
        """Those that go together; seconds of one step."""
        from common.models import batch, chunk

        model, laps = self._ours.denoiser, [time.thread_time()]
        stops = [job.iteration + steps for job in jobs]

        def told(*_: int) -> None:
            laps.append(time.thread_time())

        if self._way == "one by one" or sum(batch.branches(job) for job in jobs) == 1:
            (job,) = jobs
            ran = [
                chunk.run(
                    job.pipe, model.split, job.state, job.iteration, stops[0], job.carried,
                    progress=told,
                )
            ]  # fmt: skip
        else:
            ran = batch.run(model, jobs, stops, progress=told, mixed=self._form).jobs  # type: ignore[assignment]
        for job, done in zip(jobs, ran, strict=True):
            if isinstance(done, Exception):
                raise done
            job.iteration, job.carried = done.iteration, dict(done.carried)
        # Of every step the last job's; before the first one the forward is laid out.
        ends = laps[len(jobs) :: len(jobs)]
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0] - laps[0]


def times(ours: Ours, theirs: Diffusers, mix: str, repeats: int) -> dict[str, float]:
    """Best seconds of one step of all jobs, by way."""
    jobs = jobs_of(mix)
    kinds: dict[str, Callable[[], float]] = {
        way: lambda way=way: _step_s(ours, way, jobs)  # type: ignore[misc]
        for way in WAYS
    }
    kinds["diffusers"] = lambda: sum(_by_diffusers(theirs, job) for job in jobs)
    best = dict.fromkeys(kinds, math.inf)
    for _ in range(repeats):
        for name, run in kinds.items():
            best[name] = min(best[name], run())
    return best


def _step_s(ours: Ours, way: str, jobs: list[Job]) -> float:
    steps = Steps(ours, way)
    steps.run([ours.open(job) for job in jobs], TIMED)
    return steps.step_s


def _by_diffusers(theirs: Diffusers, job: Job) -> float:
    """Seconds of a step of the classic pipeline; it takes n as more prompts."""
    return theirs.run([job] * int(job["n"]))[1].step_s


def difference(ours: Ours, way: str, mix: str) -> float:
    """Largest of any job after any step, relative, against its step alone from the same latents."""
    alone, shared = ([ours.open(job) for job in jobs_of(mix)] for _ in range(2))
    most = 0.0
    while left := [i for i, job in enumerate(alone) if job.iteration < job.iterations]:
        Steps(ours, way).run([shared[i] for i in left], 1)
        Steps(ours, "one by one").run([alone[i] for i in left], 1)
        for i in left:
            a, b = shared[i].carried["latents"], alone[i].carried["latents"]
            most = max(most, float((a - b).abs().max() / b.abs().max()))
            shared[i].carried = dict(alone[i].carried)
    return most


def leaked(ours: Ours, way: str, mix: str) -> int:
    """Rows of others that changed, summed over every job disturbed in turn."""
    import torch

    jobs = jobs_of(mix)

    def latents(disturbed: int | None) -> list[Any]:
        opened = [ours.open(job) for job in jobs]
        if disturbed is not None:
            noise = torch.Generator().manual_seed(disturbed)
            values = opened[disturbed].state.values
            for name in ("latents", "prompt_embeds", "negative_prompt_embeds"):
                if isinstance(values.get(name), torch.Tensor):
                    like = values[name]
                    values[name] = JUNK * torch.randn(like.shape, generator=noise, dtype=like.dtype)
        Steps(ours, way).run(opened, 1)
        return [job.carried["latents"] for job in opened]

    usual, changed = latents(None), 0
    with junk_in_padding(ours.denoiser.pipe.transformer):
        for disturbed in range(len(jobs)):
            for i, now in enumerate(latents(disturbed)):
                if i != disturbed:
                    rows = zip(now, usual[i], strict=True)
                    changed += sum(not torch.equal(a, b) for a, b in rows)
    return changed


@contextmanager
def junk_in_padding(transformer: Any) -> Iterator[None]:
    """Large values wherever pictures and prompts are padded, in front of every forward."""
    from common.models.ragged import MixedSizes

    def prompts(texts: Any, mask: Any) -> Any:
        return texts if mask is None else texts.masked_fill(~mask.bool()[:, :, None], -JUNK)

    def in_prompts(module: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        texts, mask = given["encoder_hidden_states"], given.get("encoder_hidden_states_mask")
        return args, {**given, "encoder_hidden_states": prompts(texts, mask)}

    plain = MixedSizes.__call__

    def in_both(
        self: Any,
        hidden_states: Any,
        encoder_hidden_states: Any,
        encoder_hidden_states_mask: Any,
        img_shapes: Any = None,
        **more: Any,
    ) -> Any:
        images = hidden_states.clone()
        for image, shapes in zip(images, self.shapes, strict=True):
            image[sum(math.prod(shape) for shape in shapes) :] = JUNK
        texts = prompts(encoder_hidden_states, encoder_hidden_states_mask)
        return plain(self, images, texts, encoder_hidden_states_mask, **more)

    hook = transformer.register_forward_pre_hook(in_prompts, with_kwargs=True)
    MixedSizes.__call__ = in_both  # type: ignore[method-assign]
    try:
        yield
    finally:
        MixedSizes.__call__ = plain  # type: ignore[method-assign]
        hook.remove()


def chosen(ours: Ours) -> str:
    """What the model's own setting, `auto`, comes to."""
    return ours.denoiser.mixed or "grouped"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/tiny-qwen-image")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    ours, theirs = Ours(options.model, "float32"), Diffusers(options.model, "float32")
    profile = ours.denoiser.directory.profile.get("mixed") or {}
    lines: list[dict[str, Any]] = []
    print("mix        way         step [ms]  × one by one  × grouped  difference  rows leaked to")
    for mix in options.mixes:
        best = times(ours, theirs, mix, options.repeats)
        for way, step_s in best.items():
            line: dict[str, Any] = {
                "mix": mix,
                "way": way,
                "step_ms": round(1e3 * step_s, 2),
                "of_one_by_one": round(best["one by one"] / step_s, 3),
                "of_grouped": round(best["grouped"] / step_s, 3),
            }
            if way in WAYS:
                line["difference"] = difference(ours, way, mix)
                line["allclose"] = line["difference"] <= CLOSE
                line["leaked"] = leaked(ours, way, mix)
            lines.append(line)
            print(
                f"{mix:10} {way:10} {line['step_ms']:10} {line['of_one_by_one']:13} "
                f"{line['of_grouped']:10} {line.get('difference', math.nan):11.1e} "
                f"{line.get('leaked', '-'):>12}",
                flush=True,
            )
    ours_lines = [line for line in lines if line["way"] in WAYS]
    out = {
        "benchmark": "ragged",
        "chosen": chosen(ours),
        "profile_speedup": profile.get("speedup"),
        "allclose": all(line["allclose"] for line in ours_lines),
        "leaked": sum(line["leaked"] for line in ours_lines),
        "repeats": options.repeats,
        "mixes": {mix: [f"{w}x{h}" for w, h in MIXES[mix]] for mix in options.mixes},
        "lines": lines,
    }
    speedup = out["profile_speedup"]
    print(
        f"mixed_sizes=auto is {out['chosen']} here: the model's profile "
        + (f"says packed is {speedup:.2f} × as fast" if speedup else "does not say")
    )
    if options.json:
        print(json.dumps(out))


if __name__ == "__main__":
    main()
