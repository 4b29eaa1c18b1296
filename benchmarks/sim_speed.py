"""How fast the simulator is: 100,000 jobs on 64 ranks through the real core and `slack`.

`python -m benchmarks.sim_speed [--jobs N] [--ranks N] [--load L] [--chunk-s S] [--json]`

The mix of the one-server table (docs/scheduling.md) in chunks of two seconds, with encode and
decode stages. CPU time stands beside the wall clock's, since the machine may be shared. Making
the trace is not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import time

from services.simulator.calibrations import calibration
from services.simulator.generate import generate
from services.simulator.pool import Overheads
from services.simulator.report import report
from services.simulator.simulation import Setting, Simulation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--chunk-s", type=float, default=2.0)
    parser.add_argument("--policy", default="slack")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    costs = calibration("h20-qwen-image")
    trace = generate(args.jobs, args.load, costs, ranks=args.ranks, seed=1)
    stages = max(1, args.ranks // 16)
    setting = Setting(
        policy=args.policy, costs=costs, denoise=args.ranks, encode=stages, decode=stages,
        overheads=Overheads(switch_s=0.015), chunk_s=args.chunk_s,
    )  # fmt: skip
    # The trace's and the records' half a million objects live to the end: no use in walking them.
    gc.freeze()
    gc.disable()
    wall, cpu = time.perf_counter(), time.process_time()
    outcome = Simulation(trace, setting).run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    figures = report(outcome)
    out = {
        "jobs": args.jobs,
        "ranks": args.ranks,
        "load": args.load,
        "chunk_s": args.chunk_s,
        "policy": args.policy,
        "wall_s": round(wall, 1),
        "cpu_s": round(cpu, 1),
        "decisions": outcome.decisions,
        "cpu_us_per_decision": round(1e6 * cpu / outcome.decisions, 1),
        "chunks_per_job": round(figures["all"]["chunks_per_job"], 2),
        "on_time": round(figures["all"]["on_time"], 4),
        "simulated_s": round(outcome.ended_s),
    }
    print(json.dumps(out) if args.json else "\n".join(f"{k:<20} {v}" for k, v in out.items()))


if __name__ == "__main__":
    main()
