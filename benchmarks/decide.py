"""What one `core.handle` costs with 100 to 100,000 jobs waiting.

`python -m benchmarks.decide [--waiting N …] [--events N] [--policy NAME] [--json]`

The core as the coordinator runs it (a cost model that learns, standings once a second, 8 denoise
ranks) under a simulated pool: arrivals, reports, cancels and decisions as they come. Answers to
dispatches are handled but not counted: they cost next to nothing and would flatter the median.
Standings are said once a second of the pool's time, by one event in some fifty, and look at 200
jobs: they are what the p99 shows. On a machine that others use the wall clock's p99 shows them
instead, so that the time on the CPU stands beside it. Deadlines are spread so that about half of
those who wait can make theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import random
import time
from typing import Any

from common.stage import STAGES
from services.coordinator import events as ev
from services.costs.model import CostModel, Shape
from services.simulator.calibrations import QWEN_SIZES, calibration
from services.simulator.generate import MIXES, generate, mean_work_s
from services.simulator.simulation import MODEL, Setting, Simulation

RANKS = 8
LOAD = 1.5  # of arrivals: about as many come as end or are canceled
COUNTED = (ev.Submitted, ev.Reported, ev.CancelNoted, ev.Tick)
WARM_UP = 200  # events: the first decision looks at everybody once
CANCEL_EVERY = 50


class Enough(Exception):
    """All events that were wanted have been measured."""


def measure(waiting: int, events: int, policy: str) -> dict[str, Any]:
    costs = calibration("h20-qwen-image")
    rng = random.Random(7)
    told = CostModel()
    for stage in STAGES:
        for tokens in QWEN_SIZES.values():
            told.observe(MODEL, stage, Shape(tokens), costs.seconds(stage, tokens))
    backlog = generate(waiting, 1.0, costs, ranks=RANKS, seed=3)
    span = 2 * waiting * mean_work_s(MIXES["toy"], costs) / RANKS
    trace = [
        dataclasses.replace(
            job, arrival_s=0.0, deadline_s=job.standalone_s * 1.5 + rng.random() * span, id=f"b{i}"
        )
        for i, job in enumerate(backlog)
    ]
    trace += [
        dataclasses.replace(job, arrival_s=job.arrival_s + 1e-3)
        for job in generate(events, LOAD, costs, ranks=RANKS, seed=4)
    ]
    setting = Setting(
        policy=policy, costs=costs, told=told, denoise=RANKS, encode=2, decode=2, lead_s=0.02,
        pack_s=0.005,
    )  # fmt: skip
    simulation = Simulation(trace, setting)
    core = simulation.core
    core.refresh_s = 1.0  # standings as in a real pool
    inner = core.handle
    samples: list[tuple[str, float]] = []
    on_cpu: list[float] = []
    with_standings: list[float] = []
    seen = 0
    filled = False

    def timed(event: ev.Event, now: float) -> list[ev.Effect]:
        nonlocal seen, filled
        filled = filled or isinstance(event, ev.Tick)
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        effects = inner(event, now)
        took, cpu = time.perf_counter() - begun, time.thread_time() - cpu_begun
        if not filled or not isinstance(event, COUNTED):
            return effects
        seen += 1
        if seen > WARM_UP:
            samples.append((type(event).__name__, took))
            on_cpu.append(1000 * cpu)
            if any(isinstance(effect, ev.Refresh) for effect in effects):
                with_standings.append(1000 * cpu)
        if len(samples) >= events:
            raise Enough
        if seen % CANCEL_EVERY == 0:
            job = next((j for j in reversed(core.jobs.values()) if not j.ending), None)
            if job is not None:
                effects = [*effects, *timed(ev.CancelNoted(job.spec.id, "canceling"), now)]
        return effects

    core.handle = timed  # type: ignore[method-assign]
    gc.collect()
    gc.freeze()
    with contextlib.suppress(Enough):
        simulation.run()
    took = sorted(1000 * seconds for _, seconds in samples)
    by_kind: dict[str, list[float]] = {}
    for kind, seconds in samples:
        by_kind.setdefault(kind, []).append(1000 * seconds)
    return {
        "waiting": len(core.jobs),
        "events": len(samples),
        "p50_ms": round(took[len(took) // 2], 4),
        "p90_ms": round(took[int(len(took) * 0.9)], 4),
        "p99_ms": round(took[int(len(took) * 0.99)], 4),
        "p99_cpu_ms": round(sorted(on_cpu)[int(len(on_cpu) * 0.99)], 4),
        "p50_cpu_ms_with_standings": round(middle(with_standings), 4),
        "p50_ms_by_kind": {kind: round(middle(found), 4) for kind, found in by_kind.items()},
    }


def middle(found: list[float]) -> float:
    return sorted(found)[len(found) // 2] if found else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--waiting", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000])
    parser.add_argument("--events", type=int, default=3_000)
    parser.add_argument("--policy", default="slack")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: dict[int, dict[str, Any]] = {}
    for waiting in args.waiting:
        rows[waiting] = measure(waiting, args.events, args.policy)
        if not args.json:
            print(f"{waiting:>7} waiting: {rows[waiting]}", flush=True)
    out: dict[str, Any] = {"policy": args.policy, "by_waiting": rows}
    if 10_000 in rows:
        out["p50_ms_at_10000"] = rows[10_000]["p50_ms"]
        out["p99_ms_at_10000"] = rows[10_000]["p99_ms"]
    if 100 in rows and 100_000 in rows:
        out["growth_100_to_100000"] = round(rows[100_000]["p50_ms"] / rows[100]["p50_ms"], 2)
    if args.json:
        print(json.dumps(out))
    elif "growth_100_to_100000" in out:
        print(f"growth 100 → 100,000: {out['growth_100_to_100000']}×")


if __name__ == "__main__":
    main()
