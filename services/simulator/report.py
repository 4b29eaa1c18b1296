"""What a run was worth: a row a class and one for all, as a table for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from services.simulator.outcome import JobOutcome, Outcome

HEAD = ("policy", "class", "jobs", "on time", "mean", "p50", "p95", "p99", "late by", "goodput",
        "switches", "wasted")  # fmt: skip


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of sorted numbers, by the nearest rank; 0 if there are none."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def summary(jobs: Iterable[JobOutcome], span_s: float) -> dict[str, Any]:
    """Figures of some jobs, seconds throughout. A job that did not succeed is a miss.

    `late_mean_s` is over those that ended late; `goodput` is jobs in time a minute;
    `wasted_share` the part of all work that went into jobs that missed.
    """
    found = list(jobs)
    latencies = sorted(j.latency_s for j in found if j.latency_s is not None)
    late = [j.lateness_s for j in found if j.lateness_s > 0]
    work = sum(j.work_s for j in found)
    alone = sum(j.job.standalone_s for j in found)
    good = [j for j in found if j.on_time]
    count = max(1, len(found))
    return {
        "jobs": len(found),
        "on_time": len(good) / count,
        "on_time_by_work": sum(j.job.standalone_s for j in good) / alone if alone else 0.0,
        "mean_s": sum(latencies) / max(1, len(latencies)),
        "p50_s": percentile(latencies, 0.50),
        "p95_s": percentile(latencies, 0.95),
        "p99_s": percentile(latencies, 0.99),
        "late_mean_s": sum(late) / max(1, len(late)),
        "goodput_per_minute": 60 * len(good) / span_s if span_s else 0.0,
        "switches_per_job": sum(j.switches for j in found) / count,
        "chunks_per_job": sum(j.chunks for j in found) / count,
        "wasted_s": sum(j.work_s for j in found if not j.on_time),
        "wasted_share": sum(j.work_s for j in found if not j.on_time) / work if work else 0.0,
        "longest_without_a_step_s": max((j.longest_wait_s for j in found), default=0.0),
        "dropped": sum(j.status == "expired" for j in found),
    }


def by_size(jobs: Iterable[JobOutcome]) -> list[str]:
    """Names of the jobs' classes, the shortest jobs' first."""
    alone: dict[str, list[float]] = {}
    for job in jobs:
        alone.setdefault(job.job.request_class, []).append(job.job.standalone_s)
    return sorted(alone, key=lambda name: (sum(alone[name]) / len(alone[name]), name))


def report(outcome: Outcome) -> dict[str, Any]:
    """One run as JSON: all jobs together, and by class."""
    jobs = list(outcome.jobs.values())
    begun = min((j.job.arrival_s for j in jobs), default=0.0)
    span = outcome.ended_s - begun
    classes = by_size(jobs)
    return {
        "policy": outcome.policy,
        "ranks": outcome.ranks,
        "span_s": span,
        "busy_share": (outcome.busy_s / (span * outcome.ranks) if span and outcome.ranks else 0.0),
        "decisions": outcome.decisions,
        "failures": outcome.failures,
        "last_failure": outcome.last_failure,
        "wall_s": outcome.wall_s,
        "all": summary(jobs, span),
        "classes": {
            name: summary((j for j in jobs if j.job.request_class == name), span)
            for name in classes
        },
    }


def job_lines(outcome: Outcome) -> list[dict[str, Any]]:
    """Every job of a run as JSON, in the order of arrival."""
    return [line_of_job(job) for job in outcome.jobs.values()]


def line_of_job(job: JobOutcome) -> dict[str, Any]:
    return {
        **job.job.to_json(),
        "status": job.status,
        "started_s": job.started_s,
        "finished_s": job.finished_s,
        "on_time": job.on_time,
        "steps_run": job.steps_run,
        "switches": job.switches,
        "chunks": job.chunks,
        "work_s": job.work_s,
    }


def chunk_lines(outcome: Outcome) -> list[dict[str, Any]]:
    """The timeline as JSON: every row of every task."""
    return [{name: getattr(c, name) for name in c.__slots__} for c in outcome.chunks]


def cells(reports: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """All policies under each other, a row a class, as text under HEAD."""
    rows: list[tuple[str, ...]] = []
    for run in reports:
        rows.append(_row(run["policy"], "all", run["all"]))
        if len(run["classes"]) > 1:
            rows += [_row("", name, figures) for name, figures in run["classes"].items()]
    return rows


def table(reports: Sequence[dict[str, Any]]) -> str:
    """`cells` in columns."""
    rows = [HEAD, *cells(reports)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = []
    for row in rows:
        padded = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def warnings(reports: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each policy whose figures are not its own, since it failed."""
    return [
        f"{run['policy']} failed {run['failures']} times, and fcfs decided in its place; at last: "
        f"{run['last_failure']}"
        for run in reports
        if run["failures"]
    ]


def _row(policy: str, name: str, f: dict[str, Any]) -> tuple[str, ...]:
    return (
        policy, name, str(f["jobs"]), f"{100 * f['on_time']:.1f} %",
        *(f"{f[key]:.1f} s" for key in ("mean_s", "p50_s", "p95_s", "p99_s", "late_mean_s")),
        f"{f['goodput_per_minute']:.2f}/min", f"{f['switches_per_job']:.2f}",
        f"{100 * f['wasted_share']:.1f} %",
    )  # fmt: skip
