"""Jobs of the bundled model, what they cost, and when they come: an open-loop trace.

Arrivals are Poisson, classes stratified. Load is the share of its capacity that the trace asks of
the stage with most to do, by stage times measured in the same run.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from common.stage import DECODE, DENOISE, ENCODE, STAGES
from services.simulator.calibrations import Calibration
from services.simulator.generate import Kind, poisson, stratified
from services.simulator.traces import TraceJob

# By name. `mixed`: a long job costs over twenty times what a short one does, and denoising is the
# bottleneck by far (a 240 px decode takes as long as a dozen of its steps).
MIXES: dict[str, tuple[Kind, ...]] = {
    "mixed": (Kind("S", 64, 19, 0.8), Kind("M", 128, 24, 0.15), Kind("L", 240, 134, 0.05)),
}
GUIDANCE: dict[str, Any] = {"true_cfg_scale": 3.0, "negative_prompt": " "}
TOKEN_PX = 16

StageTimes = Mapping[str, Mapping[str, float]]  # class -> stage -> seconds, all steps of a job


def tokens_of(kind: Kind) -> int:
    return (kind.side // TOKEN_PX) ** 2


def params_of(kinds: Sequence[Kind], seed: int) -> list[dict[str, Any]]:
    """Parameters of one job for each of `kinds`; no two have one prompt, so that no encoder's
    cache helps."""
    from models.training.world import random_captions

    rng = random.Random(seed)
    captions: list[str] = []
    while len(captions) < len(kinds):
        captions = list(dict.fromkeys(captions + random_captions(len(kinds), rng.randrange(2**31))))
    return [
        {
            "prompt": caption,
            "width": kind.side,
            "height": kind.side,
            "num_inference_steps": kind.steps,
            "seed": rng.randrange(2**31),
            **GUIDANCE,
        }
        for kind, caption in zip(kinds, captions, strict=False)
    ]


def sample(kinds: Sequence[Kind], rounds: int, seed: int, short: int = 3) -> list[Kind]:
    """Jobs to measure or warm up with: in each round, shuffled, `short` of every class but the
    longest, and one of that."""
    rng = random.Random(seed)
    longest = max(kinds, key=lambda kind: kind.steps * tokens_of(kind))
    out = []
    for _ in range(rounds):
        a_round = [kind for kind in kinds for _ in range(1 if kind is longest else short)]
        rng.shuffle(a_round)
        out += a_round
    return out


def medians(rows: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Of (class, stage -> seconds): class -> stage -> median seconds."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, stage_s in rows:
        for stage, seconds in stage_s.items():
            found.setdefault(name, {}).setdefault(stage, []).append(seconds)
    return {
        name: {stage: statistics.median(values) for stage, values in stages.items()}
        for name, stages in found.items()
    }


def costs_of(kinds: Sequence[Kind], stage_s: StageTimes) -> Calibration:
    """Stage times as a calibration, by tokens: the mean over classes of one size."""
    table: dict[str, dict[int, float]] = {stage: {} for stage in STAGES}
    for tokens in {tokens_of(kind) for kind in kinds}:
        same = [kind for kind in kinds if tokens_of(kind) == tokens]
        for stage in STAGES:
            table[stage][tokens] = statistics.fmean(
                stage_s[kind.name][stage] / (kind.steps if stage == DENOISE else 1) for kind in same
            )
    return Calibration(
        "measured", "this run", step=table[DENOISE].__getitem__,
        encode=table[ENCODE].__getitem__, decode=table[DECODE].__getitem__, token_px=TOKEN_PX,
    )  # fmt: skip


def bottleneck(kinds: Sequence[Kind], stage_s: StageTimes) -> tuple[str, float]:
    """The stage with most to do, one worker each, and its seconds for an average job."""
    means = {
        stage: sum(kind.share * stage_s[kind.name][stage] for kind in kinds) for stage in STAGES
    }
    busiest = max(means, key=means.__getitem__)
    return busiest, means[busiest]


def make_trace(
    kinds: Sequence[Kind],
    stage_s: StageTimes,
    standalone_s: Mapping[str, float],
    load: float,
    jobs: int,
    seed: int,
) -> list[TraceJob]:
    """`jobs` arrivals that offer the bottleneck `load` times its capacity; each is due `slo_scale`
    of its class × `standalone_s` after it came.

    The gaps are exponential, then stretched so that the last job comes when the bottleneck could
    have done `1/load` of all the work: over 150 jobs a Poisson count is 8 % off by chance, and
    with it the load.
    """
    rng = random.Random(seed)
    drawn = list(islice(stratified(kinds, rng), jobs))
    stage, _ = bottleneck(kinds, stage_s)
    work_s = sum(stage_s[kind.name][stage] for kind in drawn)
    arrivals = list(islice(poisson(1.0, rng), jobs))
    stretch = work_s / load / arrivals[-1]
    return [
        TraceJob(
            id=f"{kind.name}-{number:04}",
            request_class=kind.name,
            arrival_s=at * stretch,
            deadline_s=at * stretch + kind.slo_scale * standalone_s[kind.name],
            standalone_s=standalone_s[kind.name],
            tokens=tokens_of(kind),
            steps=kind.steps,
            width=kind.side,
            height=kind.side,
        )
        for number, (kind, at) in enumerate(zip(drawn, arrivals, strict=True))
    ]


def params_of_trace(
    kinds: Sequence[Kind], trace: Sequence[TraceJob], seed: int
) -> list[dict[str, Any]]:
    by_name = {kind.name: kind for kind in kinds}
    return params_of([by_name[job.request_class] for job in trace], seed)
