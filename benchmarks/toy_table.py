"""The one-server table of docs/scheduling.md, from the simulator.

`python -m benchmarks.toy_table [--ranks N …] [--policies A,B] [--jobs N] [--seeds N] [--json]`

155 / 605 / 1557 ms a step × 20 steps in a mix of 0.6 / 0.3 / 0.1, Poisson, deadline 3 × alone,
15 ms a switch, chunks of 600 ms, costs known exactly. Per cell: share on time in percent (mean of
the seeds), and switches a job. The mix is stratified, the prototype's probably was not.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from services.simulator.calibrations import calibration
from services.simulator.generate import generate
from services.simulator.pool import Overheads
from services.simulator.report import summary
from services.simulator.simulation import Setting, simulate

LOADS = (0.7, 0.9, 1.1, 1.4)
SWITCH_S = 0.015
POLICIES = ("monolithic", "fcfs", "sjf", "edf", "least_slack", "srtf", "srtf-doomed-last",
            "least_slack-doomed-last", "edf-doomed-last", "slack")  # fmt: skip
# What the prototype simulation gave, before this code was written; one rank.
PROTOTYPE = {
    "fcfs": (58.8, 30.7, 2.2, 0.8),
    "edf": (90.3, 55.6, 4.6, 1.7),
    "least_slack": (85.0, 45.0, 3.2, 1.5),
    "srtf": (94.9, 86.8, 77.5, 66.3),
    "least_slack-doomed-last": (95.0, 87.5, 78.5, 65.7),
    "edf-doomed-last": (97.4, 94.5, 90.4, 84.0),
    "slack": (97.5, 94.6, 90.9, 85.0),
}


def cell(policy: str, load: float, ranks: int, jobs: int, seeds: int) -> dict[str, Any]:
    """One policy at one load: figures over all jobs of all seeds, and by class."""
    costs = calibration("toy")
    found, span = [], 0.0
    for seed in range(seeds):
        trace = generate(jobs, load, costs, ranks=ranks, seed=seed)
        outcome = simulate(
            trace,
            Setting(
                policy=policy,
                costs=costs,
                denoise=ranks,
                overheads=Overheads(switch_s=SWITCH_S, jitter=0.0),
                switch_s=SWITCH_S,
                error=0.0,
            ),
        )
        found += list(outcome.jobs.values())
        span += outcome.ended_s
    figures = summary(found, span)
    figures["classes"] = {
        name: round(
            100 * summary((j for j in found if j.job.request_class == name), span)["on_time"], 1
        )
        for name in ("S", "M", "L")
    }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--jobs", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    out: dict[str, Any] = {"loads": LOADS, "jobs": args.jobs, "seeds": args.seeds, "ranks": {}}
    for ranks in args.ranks:
        if not args.json:
            print(f"{ranks} rank{'s' * (ranks > 1)}: % on time (switches a job) at load {LOADS}")
        rows: dict[str, Any] = {}
        for policy in args.policies.split(","):
            cells = [cell(policy, load, ranks, args.jobs, args.seeds) for load in LOADS]
            rows[policy] = {
                "on_time_percent": [round(100 * c["on_time"], 2) for c in cells],
                "work_on_time_percent": [round(100 * c["on_time_by_work"], 2) for c in cells],
                "switches_per_job": [round(c["switches_per_job"], 2) for c in cells],
                "wasted_share": [round(c["wasted_share"], 3) for c in cells],
                "longest_without_a_step_s": [round(c["longest_without_a_step_s"]) for c in cells],
                "classes": [c["classes"] for c in cells],
            }
            if ranks == 1 and policy in PROTOTYPE:
                rows[policy]["prototype_percent"] = PROTOTYPE[policy]
            if not args.json:
                said = "  ".join(
                    f"{100 * c['on_time']:5.1f} ({c['switches_per_job']:.2f})" for c in cells
                )
                design = PROTOTYPE.get(policy) if ranks == 1 else None
                print(
                    f"  {policy:<24} {said}" + (f"   prototype {design}" if design else ""),
                    flush=True,
                )
        out["ranks"][str(ranks)] = rows
    if args.json:
        print(json.dumps(out))


if __name__ == "__main__":
    main()
