"""What batches are worth under deadlines: `slack` with and without them, on small pictures.

`python -m benchmarks.slo --small [--load L …] [--jobs N] [--seed S] [--repeat N] [--json]`

One open-loop trace of jobs of 64 and 128 px that need not be exact goes through two fresh pools in
turn, alike but for the setting `batch`. Without it every job runs its steps alone (its guided
branches share a forward pass all the same); load is by what jobs take there. Deadlines are as in
benchmarks/slo.py. Goodput is jobs finished in time by the seconds from the first arrival to the
last deadline.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.openloop import Pool, Run, run_all, run_trace, running_pool
from benchmarks.slo_score import Measured, ahead, slowdown
from benchmarks.traffic import params_of, sample
from common.settings import Settings
from services.simulator.generate import Kind
from services.simulator.report import report
from services.simulator.traces import TraceJob

KINDS: tuple[Kind, ...] = (Kind("S", 64, 19, 0.8), Kind("M", 128, 24, 0.2))
OFF, ON = "off", "on"


def settings_of(batch: str, policy: str = "slack") -> Settings:
    return Settings(policy=policy, exact=False, batch=batch == ON)


def run_small(
    batch: str, trace: Sequence[TraceJob], params: Sequence[dict[str, Any]], seed: int
) -> tuple[Run, float]:
    """The trace through a fresh pool, warmed up; and the mean rows of its jobs' steps."""
    with running_pool(settings_of(batch)) as pool:
        run_all(pool, params_of(sample(KINDS, 2, seed), seed + 2), "warm")
        run = run_trace(pool, trace, params)
        return run, _rows_per_step(pool, trace)


def _rows_per_step(pool: Pool, trace: Sequence[TraceJob]) -> float:
    rows = steps = 0.0
    for job in trace:
        result = pool.client.result(job.id)
        if result is not None and "rows_per_step" in result.timings:
            rows += result.timings["rows_per_step"] * job.steps
            steps += job.steps
    return rows / max(1.0, steps)


def compared(
    runs: dict[str, list[tuple[Run, float]]], trace: Sequence[TraceJob], measured: Measured
) -> dict[str, Any]:
    """Both sides, and how they compare; of several runs the mean."""
    span_s = max(job.deadline_s for job in trace) - trace[0].arrival_s
    sides = {name: _side([run for run, _ in of], span_s, measured) for name, of in runs.items()}
    for name, of in runs.items():
        sides[name]["rows_per_step"] = statistics.fmean(rows for _, rows in of)
    points, error = ahead([run for run, _ in runs[ON]], [run for run, _ in runs[OFF]])
    goodput = {name: side["on_time_per_s"] for name, side in sides.items()}
    return {
        "batch": sides,
        "span_s": span_s,
        "goodput_ratio": goodput[ON] / goodput[OFF] if goodput[OFF] else None,
        "ahead_points": points,
        "ahead_se_points": error,
    }


def _side(runs: Sequence[Run], span_s: float, measured: Measured) -> dict[str, Any]:
    in_time = [sum(job.on_time for job in run.outcome.jobs.values()) for run in runs]
    reports = [report(run.outcome) for run in runs]
    return {
        "on_time": statistics.fmean(r["all"]["on_time"] for r in reports),
        "on_time_by_class": {
            name: statistics.fmean(r["classes"][name]["on_time"] for r in reports)
            for name in reports[0]["classes"]
        },
        "on_time_per_s": statistics.fmean(in_time) / span_s,
        "p50_s": statistics.fmean(r["all"]["p50_s"] for r in reports),
        "p95_s": statistics.fmean(r["all"]["p95_s"] for r in reports),
        "work_over_measured": slowdown(runs, measured),
        "failed": sum(not j.succeeded for run in runs for j in run.outcome.jobs.values()),
    }


def table(out: dict[str, Any]) -> str:
    classes = list(out["batch"][ON]["on_time_by_class"])
    lines = [
        f"load {out['load']}: {out['jobs']} jobs of 64 and 128 px in {out['arrivals_s']:.0f} s, "
        "not exact",
        "batch  on time  in time/s  rows a step"
        + "".join(f"{name:>7}" for name in classes)
        + "     p50     p95",
    ]
    for name, side in out["batch"].items():
        by_class = "".join(f"{100 * side['on_time_by_class'][c]:7.1f}" for c in classes)
        lines.append(
            f"{name:5} {100 * side['on_time']:7.1f} % {side['on_time_per_s']:9.2f}  "
            f"{side['rows_per_step']:11.2f}{by_class} {side['p50_s']:5.2f} s {side['p95_s']:5.2f} s"
        )
    ratio = out["goodput_ratio"]
    lines.append(
        f"in time with batches over without: {'-' if ratio is None else f'{ratio:.2f}'}; "
        f"{out['ahead_points']:+.1f} points, standard error {out['ahead_se_points']:.1f}"
    )
    return "\n".join(lines)
