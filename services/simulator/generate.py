"""Traces made up: Poisson, bursty or in phases, over standard mixes. Seeded, hence repeatable.

The mix is stratified: of every block of arrivals each class gets its share, in random order, so
that two seeds differ in when jobs come and not in how much work there is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from common.stage import DENOISE
from services.simulator.calibrations import Calibration
from services.simulator.traces import TraceJob


@dataclass(frozen=True, slots=True)
class Kind:
    """One class of a mix; `share` of the jobs, `slo_scale` × standalone until the deadline."""

    name: str
    side: int
    steps: int
    share: float
    slo_scale: float = 3.0
    priority: int = 0


MIXES: dict[str, tuple[Kind, ...]] = {
    # The one-server table of docs/scheduling.md.
    "toy": (Kind("S", 512, 20, 0.6), Kind("M", 1024, 20, 0.3), Kind("L", 1536, 20, 0.1)),
    # The standard image mix of public serving benchmarks.
    "images": (
        Kind("512", 512, 20, 0.15),
        Kind("768", 768, 20, 0.25),
        Kind("1024", 1024, 25, 0.45),
        Kind("1536", 1536, 35, 0.15),
    ),
}

# Jobs in a block in which every class has its share.
BLOCK = 20


def mean_work_s(mix: Sequence[Kind], costs: Calibration) -> float:
    """Denoising seconds of an average job on one rank: the bottleneck stage sets the load."""
    return sum(k.share * k.steps * costs.seconds(DENOISE, _tokens(k, costs)) for k in mix)


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Arrival times at `rate` a second."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def bursty(rate: float, rng: random.Random, burst: int = 8) -> Iterator[float]:
    """Bursts of `burst` jobs on average (geometric), each within a second, `rate` over all."""
    now = 0.0
    while True:
        now += rng.expovariate(rate / burst)
        size = 1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / burst))
        yield from sorted(now + rng.random() for _ in range(size))


def phases(
    rate: float, rng: random.Random, shape: Sequence[float] = (0.5, 1.5, 0.8, 1.2), jobs: int = 50
) -> Iterator[float]:
    """Poisson whose rate shifts by `shape` in turn, each phase as long as `jobs` take at `rate`."""
    now, length = 0.0, jobs / rate
    while True:
        # Thinning: drawn at the highest rate, kept in proportion to the present one.
        now += rng.expovariate(rate * max(shape))
        if rng.random() * max(shape) <= shape[int(now / length) % len(shape)]:
            yield now


ARRIVALS: dict[str, Callable[[float, random.Random], Iterator[float]]] = {
    "poisson": poisson,
    "bursty": bursty,
    "phases": phases,
}


def generate(
    jobs: int,
    load: float,
    costs: Calibration,
    *,
    mix: str = "toy",
    arrivals: str = "poisson",
    ranks: int = 1,
    seed: int = 0,
    slo_scale: float | None = None,
) -> list[TraceJob]:
    """`jobs` arrivals that offer `ranks` denoise ranks `load` times what they can do."""
    if mix not in MIXES:
        raise ValueError(f"mix {mix!r} is not one of {', '.join(MIXES)}")
    if arrivals not in ARRIVALS:
        raise ValueError(f"arrivals {arrivals!r} are not one of {', '.join(ARRIVALS)}")
    kinds = MIXES[mix]
    rng = random.Random(seed)
    rate = load * ranks / mean_work_s(kinds, costs)
    out = []
    drawn = stratified(kinds, rng)
    # Bursts may overlap, so times are put in order.
    came = ARRIVALS[arrivals](rate, rng)
    for number, at in enumerate(sorted(next(came) for _ in range(jobs))):
        kind = next(drawn)
        tokens = _tokens(kind, costs)
        alone = costs.standalone_s(tokens, kind.steps)
        out.append(
            TraceJob(
                id=f"{kind.name}_{number:06}",
                request_class=kind.name,
                arrival_s=at,
                deadline_s=at + (slo_scale or kind.slo_scale) * alone,
                standalone_s=alone,
                tokens=tokens,
                steps=kind.steps,
                width=kind.side,
                height=kind.side,
                priority=kind.priority,
            )
        )
    return out


def _tokens(kind: Kind, costs: Calibration) -> int:
    side = -(-kind.side // costs.token_px)
    return side * side


def stratified(kinds: Sequence[Kind], rng: random.Random) -> Iterator[Kind]:
    """Classes without end: of every BLOCK each has its share, in random order."""
    while True:
        block = [kind for kind in kinds for _ in range(round(kind.share * BLOCK))]
        rng.shuffle(block)
        yield from block
