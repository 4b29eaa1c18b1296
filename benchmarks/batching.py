"""Rows of several jobs in one forward pass, against diffusers one by one and in a static batch.

`python -m benchmarks.batching [--sizes 64 128 256] [--jobs 1 2 4 8 16] [--repeats N] [--json]`

Jobs differ in prompt, seed, number of steps, guidance scale and in the step they stand at; with
guidance, all of them are guided, at scales of their own, and `mixed` guides every second one.
The static batch is one call of diffusers' pipeline for as many jobs that are alike: same steps,
same scale. One thread; CPU time of that thread, which neighbours on the machine disturb less
than the wall clock; the kinds take turns. Ratios are taken within each repeat, and of them and of
times the median counts; a line has at least three repeats, unless --repeats says fewer.

A step's time is that of one step of all jobs. Jobs a second are whole jobs from prompt to
latents, encoding and preparation included. Accuracy: each step against the job's step alone from
the same latents, and whole runs, where guidance amplifies rounding, beside diffusers' own batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from common.settings import single_threaded

single_threaded()

PROMPTS = ("a red circle", "a small blue square, left", "two green triangles", "a yellow star")
SCALES = (4.0, 2.0, 7.0, 3.0)
GUIDANCE = ("with", "without", "mixed")
CELL_S = 10.0  # a line begins no repeat after this, but those of LEAST_REPEATS
LEAST_REPEATS = 3
CACHES = (("first_block", 0.05), ("first_block", 0.2), ("taylor_seer", None))
CACHE_STEPS = 20
STEPS = 6  # of a like job; others take up to three more

Job = dict[str, Any]


def jobs_of(count: int, size: int, guidance: str, alike: bool = False) -> list[Job]:
    """Parameters of `count` jobs."""
    jobs = []
    for i in range(count):
        own = {"num_inference_steps": STEPS + i % 4, "true_cfg_scale": SCALES[i % 4]}
        like = {"num_inference_steps": STEPS, "true_cfg_scale": SCALES[0]}
        guided = guidance == "with" or (guidance == "mixed" and i % 2 == 0)
        jobs.append(
            {
                "prompt": PROMPTS[i % 4],
                "negative_prompt": "blurry" if guided else None,
                "width": size,
                "height": size,
                "seed": i,
                "n": 1,
                **(like if alike else own),
            }
        )
    return jobs


class Laps:
    """CPU seconds of this thread: of a whole run, and of a step between its step boundaries."""

    def __init__(self) -> None:
        self._begun = time.thread_time()
        self._steps: list[float] = []
        self.whole_s = 0.0

    def step(self) -> None:
        self._steps.append(time.thread_time())

    def done(self) -> Laps:
        self.whole_s = time.thread_time() - self._begun
        return self

    @property
    def step_s(self) -> float:
        return (self._steps[-1] - self._steps[0]) / (len(self._steps) - 1)


class Diffusers:
    """diffusers' own pipeline, classic, as its users call it."""

    def __init__(self, model: str, dtype: str) -> None:
        import torch

        from benchmarks.diffusers_loop import load

        self.pipe = load(model, threads=1).to(getattr(torch, dtype))

    def run(self, jobs: list[Job]) -> tuple[Any, Laps]:
        """Latents and laps of one call for `jobs`, which are alike but for prompt and seed."""
        import torch

        first, laps = jobs[0], Laps()

        def lap(pipe: Any, i: int, t: Any, values: dict[str, Any]) -> dict[str, Any]:
            laps.step()
            return values

        guided = first["negative_prompt"] is not None
        latents = self.pipe(
            prompt=[job["prompt"] for job in jobs],
            negative_prompt=[job["negative_prompt"] for job in jobs] if guided else None,
            width=first["width"],
            height=first["height"],
            num_inference_steps=first["num_inference_steps"],
            true_cfg_scale=first["true_cfg_scale"],
            generator=[torch.Generator("cpu").manual_seed(job["seed"]) for job in jobs],
            output_type="latent",
            callback_on_step_end=lap,
        ).images
        return latents, laps.done()


class Ours:
    """The encode and denoise stages' own code on one model, without Redis."""

    def __init__(self, model: str, dtype: str) -> None:
        from common.models.model import Model
        from common.models.step_cache import Twins

        self.encoder = Model(model, "encode", dtype=dtype)
        self.denoiser = Model(model, "denoise", dtype=dtype)
        self.twins = Twins(self.denoiser.pipe)
        parameters = _defaults(self.denoiser)
        self.defaults = {name: rule.get("default") for name, rule in parameters.items()}

    def open(self, job: Job) -> Any:
        """One job, encoded and prepared."""
        from common.models import live, request, state

        params = {**self.defaults, **job}
        values = self.encoder.initial_state(params)
        request.run_blocks(self.encoder.split.encode, self.encoder.own_pipeline(params), values)
        embeds = state.capture_embeds(self.encoder.split, values)
        return live.prepare(self.denoiser, params, embeds)

    def run(self, jobs: list[Job]) -> tuple[list[Any], Laps]:
        """All jobs to their ends in one batch; they leave as they finish."""
        from common.models import batch

        laps = Laps()
        opened = [self.open(job) for job in jobs]
        stops = [job.iterations for job in opened]
        ran = batch.run(self.denoiser, opened, stops)
        latents = [_chunk(done).carried["latents"] for done in ran.jobs]
        return latents, laps.done()

    def alone(self, job: Job) -> tuple[Any, Laps, int]:
        """One job by itself, with the step cache it asks for; latents, laps, skipped forwards."""
        from common.models import chunk, step_cache

        opened, skipped = self.open(job), 0
        laps = Laps()
        run = partial(
            chunk.run,
            opened.pipe,
            self.denoiser.split,
            opened.state,
            0,
            opened.iterations,
            progress=lambda _: laps.step(),
        )
        if step_cache.wanted(job):
            with self.twins.of(job).running(opened.pipe, None) as cached:
                done = run()
            skipped = cached.skipped
        else:
            done = run()
        return done.carried["latents"], laps.done(), skipped

    def steps(self, jobs: list[Job]) -> Laps:
        """As many steps as all of them take, from where each stands: the i-th, i % 4 steps in."""
        from common.models import batch, chunk

        opened = [self.open(job) for job in jobs]
        for i, job in enumerate(opened):
            if i % 4:
                done = chunk.run(job.pipe, self.denoiser.split, job.state, 0, i % 4)
                job.iteration, job.carried = done.iteration, done.carried
        laps = Laps()
        last = len(opened) - 1

        def told(place: int, iteration: int) -> None:
            if place == last:
                laps.step()

        batch.run(self.denoiser, opened, [job.iterations for job in opened], progress=told)
        return laps.done()


def _defaults(model: Any) -> dict[str, Any]:
    from common.models import manifest

    parameters: dict[str, Any] = manifest.build(model)["parameters"]
    return parameters


def _chunk(done: Any) -> Any:
    if isinstance(done, Exception):
        raise done
    return done


def cell(
    ours: Ours, theirs: Diffusers, size: int, count: int, guidance: str, repeats: int
) -> dict[str, Any]:
    """One line of the table."""
    jobs, like = jobs_of(count, size, guidance), jobs_of(count, size, guidance, alike=True)
    kinds: dict[str, Callable[[], tuple[float, float]]] = {
        "ours": lambda: (ours.steps(jobs).step_s, ours.run(jobs)[1].whole_s),
        "one_by_one": lambda: _sum([theirs.run([job])[1] for job in jobs]),
    }
    if guidance != "mixed":  # diffusers cannot
        kinds["static"] = lambda: _sum([theirs.run(like)[1]])
    turns: list[dict[str, tuple[float, float]]] = []
    until = time.monotonic() + CELL_S
    while len(turns) < min(repeats, LEAST_REPEATS) or (
        len(turns) < repeats and time.monotonic() < until
    ):
        turns.append({name: run() for name, run in kinds.items()})
    line: dict[str, Any] = {"size": size, "jobs": count, "guidance": guidance}
    line["repeats"] = len(turns)
    for name in kinds:
        step_s, whole_s = (statistics.median(turn[name][i] for turn in turns) for i in (0, 1))
        line[f"{name}_step_ms"] = round(1e3 * step_s, 2)
        line[f"{name}_jobs_per_s"] = round(count / whole_s, 2)
    for figure, name in (("speedup", "one_by_one"), ("of_static", "static")):
        if name in kinds:
            ratios = [turn[name][0] / turn["ours"][0] for turn in turns]
            line[figure] = round(statistics.median(ratios), 3)
            line[f"{figure}_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
    return line


def beside_static(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By size: the least and most that a batch of several is of the static one, and whether it
    loses to it: the median over the numbers of jobs is below 1."""
    found: dict[str, Any] = {}
    for size in sorted({line["size"] for line in lines}):
        of = [
            line["of_static"]
            for line in lines
            if line["size"] == size and line["jobs"] > 1 and "of_static" in line
        ]
        if of:
            median = statistics.median(of)
            found[str(size)] = {
                "least": min(of), "median": round(median, 3), "most": max(of),
                "loses": median < 1.0,
            }  # fmt: skip
    return found


def _sum(laps: list[Laps]) -> tuple[float, float]:
    return sum(lap.step_s for lap in laps), sum(lap.whole_s for lap in laps)


def step_difference(ours: Ours, size: int) -> dict[str, Any]:
    """Latents after each step of a batch against each job's step alone, from the same latents.

    A job's step alone is diffusers', bit for bit (tests/test_models_exact.py).
    """
    import torch

    from common.models import batch, chunk

    jobs = jobs_of(4, size, "mixed")
    alone, shared = [ours.open(job) for job in jobs], [ours.open(job) for job in jobs]
    close, most = True, 0.0
    while left := [i for i, job in enumerate(alone) if job.iteration < job.iterations]:
        stops = [shared[i].iteration + 1 for i in left]
        ran = batch.run(ours.denoiser, [shared[i] for i in left], stops)
        for i, done in zip(left, ran.jobs, strict=True):
            job = alone[i]
            one = chunk.run(
                job.pipe,
                ours.denoiser.split,
                job.state,
                job.iteration,
                job.iteration + 1,
                job.carried,
            )
            job.iteration, job.carried = one.iteration, one.carried
            a, b = _chunk(done).carried["latents"].float(), one.carried["latents"].float()
            close = close and torch.allclose(a, b, rtol=1e-5, atol=1e-5)
            most = max(most, float((a - b).abs().max()))
            shared[i].carried = dict(one.carried)
    return {"allclose": close, "max_difference": most}


def run_difference(ours: Ours, theirs: Diffusers, size: int) -> dict[str, Any]:
    """What whole runs make of rounding: both kinds of batch against diffusers alone."""
    jobs = jobs_of(4, size, "with", alike=True)
    alone = [theirs.run([job])[0] for job in jobs]

    def apart(latents: Any) -> float:
        return max(float((a - b[0]).abs().max()) for a, b in zip(latents, alone, strict=True))

    return {
        "size": size,
        "max_difference": apart([a[0] for a in ours.run(jobs)[0]]),
        "static_max_difference": apart(theirs.run(jobs)[0]),
    }


def cached(ours: Ours, size: int, cache: str, threshold: float | None, n: int) -> dict[str, Any]:
    """A guided job with a step cache against the same job without."""
    import torch

    plain = {**jobs_of(1, size, "with")[0], "num_inference_steps": CACHE_STEPS}
    job = {**plain, "cache": cache, "cache_threshold": threshold}
    ours.alone({**job, "num_inference_steps": 2})  # the twin is made once
    without, times = ours.alone(plain)[0], {True: float("inf"), False: float("inf")}
    for _ in range(n):
        for use in (True, False):
            latents, laps, skipped = ours.alone(job if use else plain)
            times[use] = min(times[use], laps.step_s)
            if use:
                apart = float(torch.norm(latents - without) / torch.norm(without))
                left_out = skipped
    return {
        "size": size,
        "cache": cache,
        "threshold": threshold,
        "skipped": left_out,
        "forwards": 2 * CACHE_STEPS,
        "step_ms": round(1e3 * times[True], 2),
        "without_step_ms": round(1e3 * times[False], 2),
        "speedup": round(times[False] / times[True], 3),
        "relative_difference": round(apart, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/tiny-qwen-image")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--guidance", nargs="+", choices=GUIDANCE, default=list(GUIDANCE))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    ours, theirs = Ours(options.model, "float32"), Diffusers(options.model, "float32")
    lines = []
    print("size jobs guidance   step: ours  one by one  static [ms]   speed-up  of static  jobs/s")
    for size in options.sizes:
        for count in options.jobs:
            for guidance in options.guidance:
                # A batch of one is a job alone; its branches are merged.
                line = cell(ours, theirs, size, count, guidance, options.repeats)
                lines.append(line)
                print(
                    f"{size:4} {count:4} {guidance:8} {line['ours_step_ms']:12} "
                    f"{line['one_by_one_step_ms']:11} {line.get('static_step_ms', '-'):>7} "
                    f"{line['speedup']:15} {line.get('of_static', '-'):>10} "
                    f"{line['ours_jobs_per_s']:7}",
                    flush=True,
                )
    fp32 = [step_difference(ours, size) for size in options.sizes]
    half = step_difference(Ours(options.model, "bfloat16"), options.sizes[0])
    runs = [run_difference(ours, theirs, size) for size in options.sizes]
    caches = [
        cached(ours, size, cache, threshold, options.repeats)
        for size in options.sizes
        for cache, threshold in CACHES
    ]
    for line in caches:
        print(
            f"{line['size']} px, {line['cache']} {line['threshold'] or ''}: {line['skipped']} of "
            f"{line['forwards']} forwards skipped, {line['speedup']} × as fast, latents "
            f"{100 * line['relative_difference']:.1f} % apart"
        )
    small = {(x["size"], x["jobs"], x["guidance"]): x for x in lines}.get((64, 4, "with"), {})
    out = {
        "benchmark": "batching",
        "speedup_b4_small": small.get("speedup"),
        "speedup_b4_small_range": small.get("speedup_range"),
        "of_static_b4_small": small.get("of_static"),
        "of_static_b4_small_range": small.get("of_static_range"),
        "allclose": all(x["allclose"] for x in fp32),
        "fp32_max_difference": max(x["max_difference"] for x in fp32),
        "bf16_max_difference": half["max_difference"],
        "whole_runs": runs,
        "of_static_by_size": beside_static(lines),
        "repeats": options.repeats,
        "lines": lines,
        "caches": caches,
    }
    print(
        f"four guided jobs at 64 px: {out['speedup_b4_small']} × one by one, "
        f"{out['of_static_b4_small']} × the static batch; a step from the same latents: fp32 "
        f"{out['fp32_max_difference']:.1e} apart, bf16 {out['bf16_max_difference']:.1e}"
    )
    for size, of in out["of_static_by_size"].items():
        print(
            f"{size} px, several jobs: {of['least']} to {of['most']} x the static batch, median "
            f"{of['median']}" + (": it loses to it" if of["loses"] else "")
        )
    for run in runs:
        print(
            f"{run['size']} px, whole runs, against one by one: {run['max_difference']:.1e}"
            f" apart, diffusers' static batch {run['static_max_difference']:.1e}"
        )
    if options.json:
        print(json.dumps(out))


if __name__ == "__main__":
    main()
