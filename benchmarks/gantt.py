"""The same jobs through a real pool under several policies, as pictures above each other.

`python -m benchmarks.gantt [--load L] [--jobs N] [--policies A,B] [--seed S] [--window FROM:TO]
[--png FILE] [--html FILE] [--json]`

The bundled model, one worker a stage; jobs, deadlines and load as in benchmarks/slo.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.openloop import run_all, run_trace, running_pool
from benchmarks.slo import measure, plan_of
from benchmarks.traffic import MIXES, params_of, sample
from common.settings import Settings
from services.timeline.files import Files, window_of
from services.timeline.live import read_run
from services.timeline.runs import Run


def shifted(run: Run, name: str, zero_s: float) -> Run:
    """On a clock that begins at `zero_s`, without what ran before."""
    jobs = {}
    for job, record in run.jobs.items():
        if record.job.arrival_s < zero_s:
            continue
        trace = replace(
            record.job,
            arrival_s=record.job.arrival_s - zero_s,
            deadline_s=record.job.deadline_s - zero_s,
        )
        started, finished = record.started_s, record.finished_s
        jobs[job] = replace(
            record,
            job=trace,
            started_s=None if started is None else started - zero_s,
            finished_s=None if finished is None else finished - zero_s,
        )
    bars = tuple(
        replace(bar, start_s=bar.start_s - zero_s, end_s=bar.end_s - zero_s)
        for bar in run.bars
        if bar.rows[0].job in jobs
    )
    return Run(name, bars, jobs, 0.0, max(bar.end_s for bar in bars))


def runs_of(policies: Sequence[str], load: float, jobs: int, seed: int) -> list[Run]:
    kinds = MIXES["mixed"]
    plan = plan_of(kinds, measure(kinds, seed), load, jobs, seed)
    runs = []
    for policy in policies:
        with running_pool(Settings(policy=policy)) as pool:
            run_all(pool, params_of(sample(kinds, 1, seed), seed + 2), "warm")
            zero_s = pool.clock()
            run_trace(pool, plan.trace, plan.params)
            run, _ = read_run(pool.client, pool.clock() - zero_s + 1.0)
            runs.append(shifted(run, policy, zero_s))
    return runs


def summary_of(run: Run) -> dict[str, Any]:
    """How many of its jobs were in time, and the pieces they were run in."""
    return {
        "jobs": len(run.jobs),
        "on_time": sum(job.on_time for job in run.jobs.values()),
        "bars": len(run.bars),
        "span_s": round(run.end_s - run.begin_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--policies", default="monolithic,slack")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", help="FROM:TO in seconds")
    parser.add_argument("--png", metavar="FILE")
    parser.add_argument("--html", metavar="FILE")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    files = Files(html=args.html, png=args.png, window=window_of(args.window))
    files.check()
    runs = runs_of(args.policies.split(","), args.load, args.jobs, args.seed)
    said = f"the bundled model, one worker a stage, load {args.load}"
    written = [
        str(path) for path in files.write(runs, f"{args.jobs} jobs under {args.policies}", said)
    ]
    for path in written:
        print(path)
    if args.json:
        policies = {run.name: summary_of(run) for run in runs}
        out = {"benchmark": "gantt", "load": args.load, "seed": args.seed, "policies": policies}
        print(json.dumps({**out, "files": written}))


if __name__ == "__main__":
    main()
