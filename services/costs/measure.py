"""What is measured for a profile, and how: sizes × pictures × guidance, rows, steps.

Others use the machine too, and what they take is only ever added to a measurement: the least of
several repeats is nearest to the truth. The repeats of all shapes are interleaved, in another
order each round, so that a busy minute falls on no shape alone. A step's time is the median of
a chunk, as workers report it, and on one CPU thread it is CPU time (services/costs/bench.py).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from common.stage import DECODE, DENOISE, ENCODE
from services.costs.bench import Bench, Handles
from services.costs.fit import Sample, line
from services.costs.shape import Shape, shape_of
from services.costs.table import LEAST_S

Size = tuple[int, int]  # width, height in pixels

SIZES = 6  # on a ladder from the largest size down to an eighth of it
PICTURES = (1, 2, 4)
ROWS = (1, 2, 4, 8)
STEPS = (2, 4, 8, 16, 32)  # for the line of time against steps
WORDS = (2, 6, 12, 24)  # of the prompts encoded
MIX = (4, 1, 1)  # jobs of the smallest, middle and largest size that are timed together
# A chunk that is timed takes about so long, and at least and at most so many steps.
CHUNK_S, LEAST_STEPS, MOST_STEPS = 0.1, 3, 12


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes to fit on and sizes to judge by; how often everything is repeated."""

    sizes: tuple[Size, ...]
    held_out: tuple[Size, ...]
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """Least seconds of everything in a plan."""

    samples: list[Sample]
    prompt_tokens: int  # of a usual prompt
    batch: list[dict[str, Any]]
    steps: dict[str, Any]
    mixed: dict[str, Any]


def plan_of(
    manifest: dict[str, Any], sizes: Sequence[Size] = (), repeats: int = 5, count: int = SIZES
) -> Plan:
    """The given sizes, or a ladder of `count` squares; between each two one that is not square."""
    chosen = sorted(set(sizes), key=lambda size: size[0] * size[1]) or _ladder(manifest, count)
    between = [(small[0], large[1]) for small, large in pairwise(chosen)]
    return Plan(tuple(chosen), tuple(s for s in between if s not in chosen), repeats)


def _ladder(manifest: dict[str, Any], count: int) -> list[Size]:
    width = manifest["parameters"]["width"]
    each = int(width.get("multiple_of") or 1)
    most = min(int(width["max"]), math.isqrt(int(manifest["limits"]["max_pixels"])))
    least = max(int(width["min"]), most // 8, each)
    sides = (least * (most / least) ** (i / (count - 1)) for i in range(count))
    return sorted({(side, side) for side in (max(each, int(s / each + 0.5) * each) for s in sides)})


@dataclass(slots=True)
class Probe:
    """One thing that is timed, and the least it took."""

    run: Callable[[], Mapping[str, float]]  # once more: seconds by stage
    shape: Shape
    size: Size = (0, 0)
    held_out: bool = False
    count: int = 1  # rows in one forward, or steps in one chunk
    least: dict[str, float] = field(default_factory=dict)

    def again(self) -> None:
        for stage, seconds in self.run().items():
            self.least[stage] = min(max(seconds, LEAST_S), self.least.get(stage, math.inf))

    def sample(self, stage: str) -> Sample:
        return Sample(stage, self.shape, self.least[stage], *self.size, self.held_out)


def measure(bench: Bench, plan: Plan, say: Callable[[str], None]) -> Measured:
    """Time everything in `plan`, telling `say` how far it has come.

    Raises StageFailed (services/costs/bench.py) or InvalidRequest where a size cannot be done.
    """
    embeds = {k: bench.encode(bench.params(k)).handles[0] for k in bench.forwards()}
    try:
        say("warming up")
        prompts = list(_prompts(bench))
        shapes = list(_shapes(bench, plan, embeds))
        rows = list(_rows(bench, plan, embeds[1]))
        steps = list(_steps(bench, plan, embeds[1]))
        mixed = list(_mixed(bench, plan, embeds[1]))
        probes = [*prompts, *shapes, *rows, *steps, *mixed]
        for number in range(plan.repeats):
            say(f"round {number + 1} of {plan.repeats}, {len(probes)} measurements each")
            random.Random(number).shuffle(probes)
            for probe in probes:
                probe.again()
        usual = bench.prompt_tokens(bench.params(1), embeds[1])
    finally:
        for handles in embeds.values():
            bench.free(handles)
    samples = [probe.sample(ENCODE) for probe in prompts]
    samples += [
        probe.sample(stage)
        for stage in (DENOISE, DECODE)
        for probe in shapes
        if stage in probe.least
    ]
    return Measured(
        samples, usual, _curves(rows), _line_through(steps), _packed_against_grouped(plan, mixed)
    )


def _prompts(bench: Bench) -> Iterator[Probe]:
    for forwards in bench.forwards():
        for words in WORDS:
            params = bench.params(forwards, prompt=" ".join(["red"] * words))

            def run(params: dict[str, Any] = params) -> Mapping[str, float]:
                done = bench.encode(params)
                bench.free(done.handles[0])
                return {ENCODE: done.seconds}

            (embeds,) = bench.encode(params).handles
            tokens = bench.prompt_tokens(params, embeds)
            bench.free(embeds)
            yield Probe(run, Shape(tokens, 1, forwards))


def _shapes(bench: Bench, plan: Plan, embeds: Mapping[int, Handles]) -> Iterator[Probe]:
    most = int(bench.manifest["limits"].get("max_n", 1))
    largest = max(w * h for w, h in plan.sizes)
    for size in (*plan.sizes, *plan.held_out):
        for forwards in bench.forwards():
            for n in PICTURES:
                # The largest size with many pictures takes longest and tells least.
                if n <= most and n * size[0] * size[1] <= 2 * largest:
                    yield _shape(bench, size, n, forwards, embeds[forwards], size in plan.held_out)


def _shape(
    bench: Bench, size: Size, n: int, forwards: int, embeds: Handles, held_out: bool
) -> Probe:
    """Denoising and decoding one shape; the chunk's length is chosen by a first try."""
    given = {"width": size[0], "height": size[1], "n": n}

    def run(steps: int) -> Mapping[str, float]:
        params = bench.params(forwards, num_inference_steps=steps, **given)
        done = bench.denoise(params, embeds)
        took = {DENOISE: done.step_s}
        if forwards == 1:  # a decode is the same with guidance and without
            took[DECODE] = bench.decode(params, done.handles[0]).seconds
        bench.free(done.handles[0])
        return took

    least, most = _bounds(bench, LEAST_STEPS, MOST_STEPS)
    step_s = run(least)[DENOISE]
    steps = max(least, min(most, round(CHUNK_S / max(step_s, 1e-6))))
    shape = shape_of(bench.params(forwards, **given), bench.manifest)
    return Probe(lambda: run(steps), shape, size, held_out)


def _rows(bench: Bench, plan: Plan, embeds: Handles) -> Iterator[Probe]:
    """Several jobs of one size in one forward, where the model's family can."""
    for size in plan.sizes if bench.manifest.get("batch") else ():
        for rows in ROWS:
            steps, _ = _bounds(bench, LEAST_STEPS, MOST_STEPS)
            params = bench.params(1, width=size[0], height=size[1], num_inference_steps=steps)

            def run(params: dict[str, Any] = params, rows: int = rows) -> Mapping[str, float]:
                done = bench.denoise(params, embeds, rows)
                for handles in done.handles:
                    bench.free(handles)
                return {DENOISE: done.step_s}

            run()
            yield Probe(run, shape_of(params, bench.manifest), size, count=rows)


def _mixed(bench: Bench, plan: Plan, embeds: Handles) -> Iterator[Probe]:
    """Jobs of several sizes in one forward and in one a size, where the model can do the first."""
    sizes = mix_of(plan)
    if "mixed" not in (bench.manifest.get("batch") or {}) or len(set(sizes)) < 2:
        return
    steps, _ = _bounds(bench, LEAST_STEPS, MOST_STEPS)
    jobs = [bench.params(1, width=w, height=h, num_inference_steps=steps) for w, h in sizes]

    def run() -> Mapping[str, float]:
        took = {}
        for name, packed in (("packed_s", True), ("grouped_s", False)):
            done = bench.denoise_mix(jobs, embeds, packed)
            for handles in done.handles:
                bench.free(handles)
            took[name] = done.seconds / steps
        return took

    run()
    yield Probe(run, shape_of(jobs[0], bench.manifest))


def mix_of(plan: Plan) -> list[Size]:
    """The sizes of the jobs that are timed together."""
    sizes = plan.sizes[0], plan.sizes[len(plan.sizes) // 2], plan.sizes[-1]
    return [size for size, count in zip(sizes, MIX, strict=True) for _ in range(count)]


def _steps(bench: Bench, plan: Plan, embeds: Handles) -> Iterator[Probe]:
    """Whole chunks of more and more steps, at the middle size."""
    width, height = plan.sizes[len(plan.sizes) // 2]
    least, most = _bounds(bench, STEPS[0], STEPS[-1])
    for steps in STEPS:
        if not least <= steps <= most:
            continue
        params = bench.params(1, width=width, height=height, num_inference_steps=steps)

        def run(params: dict[str, Any] = params) -> Mapping[str, float]:
            done = bench.denoise(params, embeds)
            bench.free(done.handles[0])
            return {DENOISE: done.seconds}

        yield Probe(run, shape_of(params, bench.manifest), (width, height), count=steps)


def _bounds(bench: Bench, least: int, most: int) -> tuple[int, int]:
    """Numbers of steps, as far as the model takes them."""
    rule = bench.manifest["parameters"]["num_inference_steps"]
    low = max(least, int(rule.get("min") or 1))
    return low, max(low, min(most, int(rule.get("max") or most)))


def _curves(probes: Sequence[Probe]) -> list[dict[str, Any]]:
    """Seconds a step over the number of rows, a curve a size."""
    curves: dict[Shape, dict[str, Any]] = {}
    for probe in probes:
        curve = curves.setdefault(
            probe.shape, {"tokens": probe.shape.tokens, "rows": [], "step_s": []}
        )
        curve["rows"].append(probe.count)
        curve["step_s"].append(probe.least[DENOISE])
    return list(curves.values())


def _packed_against_grouped(plan: Plan, probes: Sequence[Probe]) -> dict[str, Any]:
    """Seconds a step of all jobs of the mix; empty where none was timed."""
    for probe in probes:
        least = probe.least
        return {
            "sizes": [list(size) for size in mix_of(plan)],
            **least,
            "speedup": least["grouped_s"] / least["packed_s"],
        }
    return {}


def _line_through(probes: Sequence[Probe]) -> dict[str, Any]:
    """The chunks' seconds over their steps, and how straight they lie."""
    counts = [probe.count for probe in probes]
    seconds = [probe.least[DENOISE] for probe in probes]
    chunk_s, step_s, r2 = line(counts, seconds)
    return {
        "tokens": probes[0].shape.tokens,
        "steps": counts,
        "seconds": seconds,
        "chunk_s": chunk_s,
        "step_s": step_s,
        "r2": r2,
    }
