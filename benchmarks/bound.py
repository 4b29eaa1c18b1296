"""The most jobs of a trace that any schedule could finish in time, knowing all arrivals.

`python -m benchmarks.bound [TRACE | --load L --jobs N --seed S] [--ranks N] [--costs NAME]
[--limit S] [--policies A,B] [--json]`

For one rank: choose jobs so that for all a < b the work that they must have done between a and b
fits, Σ xⱼ·max(0, pⱼ − (a − rⱼ)⁺ − (dⱼ − b)⁺) ≤ m(b − a), where r and d are arrivals and deadlines
shifted by encode and decode, and m the ranks. This is a relaxation (a job may have its work cut
anyhow, switches are free), so its optimum is an upper bound; and the solver's dual bound, not its
incumbent, is what is printed, so that a solver stopped early does not flatter us. The rows are made
lazily: n² of them do not fit, and a few thousand are ever violated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from common.stage import DECODE, DENOISE, ENCODE
from services.simulator.calibrations import Calibration, calibration
from services.simulator.generate import generate
from services.simulator.pool import Overheads
from services.simulator.simulation import Setting, simulate
from services.simulator.traces import TraceJob, read_trace

# Rows added in a round: the most violated interval of each beginning, so many at most.
ROWS_A_ROUND = 300
ROUNDS = 60
# Jobs that a round with parts of jobs must cut off the bound for another to follow.
WORTH = 0.02
# What the search for violated intervals looks at: see _violated.
NEAR = 100
GRID = 150


def bound(
    jobs: Sequence[TraceJob],
    costs: Calibration,
    ranks: int = 1,
    weights: Sequence[float] | None = None,
    limit_s: float = 60.0,
) -> dict[str, Any]:
    """`bound`: at most this much weight (jobs, by default) can be in time; and its share of all."""
    begun = time.perf_counter()
    encode = np.array([costs.seconds(ENCODE, j.tokens, 1, j.forwards) for j in jobs])
    decode = np.array([costs.seconds(DECODE, j.tokens, j.n) for j in jobs])
    work = np.array([j.steps * costs.seconds(DENOISE, j.tokens, j.n, j.forwards) for j in jobs])
    release = np.array([j.arrival_s for j in jobs]) + encode
    due = np.array([j.deadline_s for j in jobs]) - decode
    weight = np.ones(len(jobs)) if weights is None else np.asarray(weights, dtype=float)
    possible = work <= due - release + 1e-9
    starts, ends = np.unique(release[possible]), np.unique(due[possible])
    rows: list[np.ndarray] = []
    rights: list[float] = []
    # A job that fits nowhere is out; the rest may be in, wholly or (while rows are sought) in part.
    top = possible.astype(float)
    best, exact = float(weight @ top), False
    for integral in (False, True):
        for _ in range(ROUNDS):
            left = limit_s - (time.perf_counter() - begun)
            if left <= 0:
                break
            solved = _solve(weight, rows, rights, top, integral, left)
            if solved is None:
                break
            x, dual = solved
            gained, best = best - dual, min(best, dual)
            fresh = _violated(x, release, due, work, starts, ends, ranks)
            if not fresh:
                exact = integral
                break
            if not integral and rows and gained < WORTH:
                break
            rows += [row for row, _ in fresh]
            rights += [right for _, right in fresh]
    # Whole jobs: no fraction of one counts where all weigh alike.
    if weights is None:
        best = float(np.floor(best + 1e-6))
    return {
        "bound": best,
        "share": best / float(weight.sum()),
        "exact": exact,  # no row that is looked at is violated, and the solver finished
        "rows": len(rows),
        "wall_s": round(time.perf_counter() - begun, 2),
    }


def _solve(
    weight: np.ndarray, rows: list[np.ndarray], rights: list[float], top: np.ndarray,
    integral: bool, limit_s: float,
) -> tuple[np.ndarray, float] | None:  # fmt: skip
    """A solution (or fraction of one) and the upper bound that the solver proved."""
    constraints = LinearConstraint(csr_matrix(np.array(rows)), ub=np.array(rights)) if rows else ()
    result = milp(
        -weight,
        integrality=np.full(len(weight), int(integral)),
        bounds=Bounds(0, top),
        constraints=constraints,
        options={"time_limit": limit_s, "mip_rel_gap": 1e-4},
    )
    if result.x is None:
        return None
    proved = result.mip_dual_bound if integral else result.fun
    return result.x, -float(result.fun if proved is None else proved)


def _violated(
    x: np.ndarray, release: np.ndarray, due: np.ndarray, work: np.ndarray,
    starts: np.ndarray, ends: np.ndarray, ranks: int,
) -> list[tuple[np.ndarray, float]]:  # fmt: skip
    """The most violated interval for each beginning, the worst first: its row and right side.

    All intervals that hold up to NEAR ends, and of the longer ones those between every so manieth
    beginning and end. Rows that are left out make the bound larger, never wrong.
    """
    chosen = np.nonzero(x > 1e-6)[0]
    r, d, p, share = release[chosen], due[chosen], work[chosen], x[chosen]
    found: list[tuple[float, float, float]] = []
    grid = max(1, len(starts) // GRID)
    for number, a in enumerate(starts):
        first = int(np.searchsorted(ends, a, side="right"))
        b = ends[first : first + NEAR]
        if number % grid == 0:
            b = np.concatenate([b, ends[first + NEAR :: grid]])
        if not len(b):
            continue
        in_it = np.nonzero((d > a) & (r < b[-1]))[0]
        before = p[in_it] - np.maximum(0.0, a - r[in_it])
        must = before[:, None] - np.maximum(0.0, d[in_it, None] - b[None, :])
        excess = share[in_it] @ np.maximum(0.0, must) - ranks * (b - a)
        worst = int(np.argmax(excess))
        if excess[worst] > 1e-4:
            found.append((float(excess[worst]), float(a), float(b[worst])))
    found.sort(reverse=True)
    out = []
    for _, begin, end in found[:ROWS_A_ROUND]:
        must = work - np.maximum(0.0, begin - release) - np.maximum(0.0, due - end)
        out.append((np.maximum(0.0, must), ranks * (end - begin)))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--load", type=float, nargs="+", default=[0.7, 0.9, 1.1, 1.4])
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--costs", default="toy")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each bound")
    parser.add_argument("--policies", default="slack,edf-doomed-last")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    costs = calibration(args.costs)
    if args.trace:
        traces = {args.trace: read_trace(args.trace, costs)}
    else:
        traces = {
            f"load {load}": generate(args.jobs, load, costs, ranks=args.ranks, seed=args.seed)
            for load in args.load
        }
    out: dict[str, Any] = {}
    for name, trace in traces.items():
        found = bound(trace, costs, args.ranks, limit_s=args.limit)
        for policy in args.policies.split(","):
            setting = Setting(
                policy=policy, costs=costs, denoise=args.ranks, switch_s=0.015, error=0.0,
                overheads=Overheads(switch_s=0.015, jitter=0.0),
            )  # fmt: skip
            on_time = sum(j.on_time for j in simulate(trace, setting).jobs.values())
            found[policy] = on_time / len(trace)
            found[f"{policy}_vs_bound"] = round(on_time / max(1.0, found["bound"]), 4)
        out[name] = found
        if not args.json:
            print(f"{name}: {found}", flush=True)
    if args.json:
        print(json.dumps(out))


if __name__ == "__main__":
    main()
