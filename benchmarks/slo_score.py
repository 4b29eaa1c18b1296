"""How the systems of benchmarks/slo.py did: scores, comparisons, and the table of them.

Several runs of one system count as their mean. `slack` is compared with the other policies job by
job: all had the same trace.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fifo_diffusers import WORKERS as FIFOS
from benchmarks.openloop import Run
from benchmarks.traffic import StageTimes
from services.simulator.generate import Kind
from services.simulator.report import report


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds a job of each class takes."""

    alone_s: Mapping[str, Sequence[float]]  # by plain diffusers: one process, one thread
    stage_s: StageTimes  # in our pool, medians

    @property
    def standalone_s(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self.alone_s.items()}


def slowdown(runs: Sequence[Run], measured: Measured) -> float:
    """Work of all jobs over what was measured beforehand: far from 1, the machine had other
    things to do, then or now, and the load is not what it says."""
    took = expected = 0.0
    for run in runs:
        for job in run.outcome.jobs.values():
            name = job.job.request_class
            alone = run.outcome.policy in FIFOS
            took += job.work_s
            expected += (
                measured.standalone_s[name] if alone else sum(measured.stage_s[name].values())
            )
    return took / expected


def score(runs: Sequence[Run], most: float) -> dict[str, Any]:
    """One system: means over its runs. `most` jobs could have been on time (the bound)."""
    reports = [report(run.outcome) for run in runs]

    def mean(figure: str, of: str = "") -> float:
        rows = [r["classes"][of] if of else r["all"] for r in reports]
        return statistics.fmean(row[figure] for row in rows)

    jobs = len(runs[0].outcome.jobs)
    last = runs[-1]
    return {
        "on_time": mean("on_time"),
        "on_time_runs": [r["all"]["on_time"] for r in reports],
        "on_time_by_class": {name: mean("on_time", name) for name in reports[0]["classes"]},
        "on_time_by_work": mean("on_time_by_work"),
        "vs_bound": mean("on_time") * jobs / max(1.0, most),
        "wasted_s": mean("wasted_s"),
        "wasted_share": mean("wasted_share"),
        "switches_per_job": mean("switches_per_job"),
        "chunks_per_job": mean("chunks_per_job"),
        "p50_s": mean("p50_s"),
        "p95_s": mean("p95_s"),
        "failed": sum(not j.succeeded for run in runs for j in run.outcome.jobs.values()),
        "span_s": reports[-1]["span_s"],
        "busy": {stage: s / reports[-1]["span_s"] for stage, s in last.busy_s.items()},
        "stage_s": last.stage_s,
        "driver_lag_ms": 1000 * max(run.lag_s for run in runs),
    }


def ahead(first: Sequence[Run], second: Sequence[Run]) -> tuple[float, float]:
    """By how many points `first` has more jobs on time than `second`, and the standard error of
    that difference over the jobs of the trace."""
    shares = [
        {
            job: statistics.fmean(run.outcome.jobs[job].on_time for run in runs)
            for job in runs[0].outcome.jobs
        }
        for runs in (first, second)
    ]
    differences = [shares[0][job] - shares[1][job] for job in shares[0]]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return 100 * statistics.fmean(differences), 100 * error


def verdict(runs: Mapping[str, Sequence[Run]], most: float, shortest: str) -> dict[str, Any]:
    """All systems, and how `slack` stands among the policies."""
    systems = {name: score(of, most) for name, of in runs.items()}
    policies = [name for name in systems if name not in FIFOS]
    out: dict[str, Any] = {"systems": systems}
    if "slack" not in policies:
        return out
    # Where several are best, slack is.
    best = max(policies, key=lambda name: (systems[name]["on_time"], name == "slack"))
    behind, error = ahead(runs[best], runs["slack"])
    for name in systems:
        points, its_error = ahead(runs["slack"], runs[name])
        systems[name] |= {"slack_ahead_points": points, "slack_ahead_se_points": its_error}
    return {
        "slack_vs_bound": systems["slack"]["vs_bound"],
        "best_policy": best,
        "slack_behind_best_points": behind,
        "slack_behind_best_se_points": error,
        "short_class_on_time": systems["slack"]["on_time_by_class"][shortest],
        **out,
    }


# -- saying it -----------------------------------------------------------------------------


def table(out: Mapping[str, Any]) -> str:
    lines = [
        f"load {out['load']}: {out['jobs']} jobs in {out['arrivals_s']:.0f} s; an average job has "
        f"{out['bottleneck_s']:.2f} s of {out['bottleneck']}, the pool's bottleneck",
        "class  share  picture       alone, due in      encode, denoise, decode",
    ]
    for name, c in out["classes"].items():
        stages = " ".join(f"{1000 * s:6.0f}" for s in c["stage_s"].values())
        lines.append(
            f"{name:5} {100 * c['share']:4.0f} %  {c['px']:3} px x {c['steps']:3}  "
            f"{c['standalone_s']:5.2f} s {c['due_s']:6.2f} s     {stages} ms"
        )
    classes = list(out["classes"])
    lines += [
        "",
        f"{'system':17} on time  of bound  "
        + "".join(f"{name:>7}" for name in classes)
        + "  by work  wasted  switches     p50     p95  slowdown",
    ]
    for name, s in out["systems"].items():
        by_class = "".join(f"{100 * s['on_time_by_class'].get(c, 0.0):7.1f}" for c in classes)
        lines.append(
            f"{name:17} {100 * s['on_time']:7.1f}  {s['vs_bound']:8.3f}  {by_class}"
            f"  {100 * s['on_time_by_work']:7.1f} {s['wasted_s']:5.0f} s"
            f"  {s['switches_per_job']:8.2f} {s['p50_s']:5.2f} s {s['p95_s']:5.1f} s"
            f"  {s['slowdown']:8.2f}"
        )
    exact = "" if out["bound"]["exact"] else ", the solver stopped early"
    lines.append(f"{'bound':17} {100 * out['bound']['share']:7.1f}{exact}")
    if "best_policy" in out:
        lines.append(
            f"best policy: {out['best_policy']}; slack behind it by "
            f"{out['slack_behind_best_points']:.1f} points, standard error "
            f"{out['slack_behind_best_se_points']:.1f}"
        )
    lines += [
        "",
        "% on time; slowdown: work over what was measured beforehand, 1 on a quiet machine;",
        out["note"],
    ]
    return "\n".join(lines)


def describe(kinds: Sequence[Kind], measured: Measured) -> dict[str, Any]:
    return {
        kind.name: {
            "share": kind.share,
            "px": kind.side,
            "steps": kind.steps,
            "standalone_s": measured.standalone_s[kind.name],
            "standalone_least_s": min(measured.alone_s[kind.name]),
            "due_s": kind.slo_scale * measured.standalone_s[kind.name],
            "stage_s": dict(measured.stage_s[kind.name]),
        }
        for kind in kinds
    }


def note(fifo_load: float) -> str:
    return (
        "fifo is one process on one core and does all three stages, so that its own load is "
        f"{fifo_load:.2f}; fifo-two is two such processes on two cores, with {fifo_load / 2:.2f} "
        "each, where the pool has one denoiser; the pool is an encoder, a denoiser and a decoder, "
        "a coordinator and Redis, on two cores (`busy` has each stage's share of the time)"
    )
