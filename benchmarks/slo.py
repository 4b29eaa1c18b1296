"""Deadlines kept by the real system, beside a plain diffusers worker and the best possible.

`python -m benchmarks.slo [--load L …] [--systems A,B] [--jobs N] [--seed S] [--repeat N]
[--mix NAME] [--out FILE] [--json]`

An open-loop trace of the bundled model's jobs (benchmarks/traffic.py) goes through each system in
turn, at several loads one after the other: `fifo`, a diffusers worker as people run it today,
`fifo-two`, two of them at one list, and a fresh pool of one encoder, one denoiser and one decoder
under each policy. All have the same two cores, of which `fifo` uses one. Every job is due three
times as long after its arrival as plain diffusers takes for it alone, measured here first; load is
that of the pool's bottleneck, by stage times measured here in a busy pool. Each system is warmed up
with the same few jobs of every class, so that every pool knows the costs. A job is on time if its
system had finished it by its deadline.

`--small` is another comparison: batches on and off, on small pictures (benchmarks/slo_small.py).

Beside each stands the bound (benchmarks/bound.py): the most jobs that any schedule of the pool's
denoiser could have finished in time, knowing all arrivals, by the measured stage times.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import slo_small
from benchmarks.bound import bound
from benchmarks.diffusers_loop import DiffusersLoop
from benchmarks.fifo_diffusers import WORKERS as FIFOS
from benchmarks.fifo_diffusers import fifo_diffusers
from benchmarks.openloop import Run, System, run_all, run_trace, running_pool
from benchmarks.slo_score import Measured, describe, note, slowdown, table, verdict
from benchmarks.traffic import (
    MIXES,
    bottleneck,
    costs_of,
    make_trace,
    medians,
    params_of,
    params_of_trace,
    sample,
)
from common.scripts import Ttls
from common.settings import BUNDLED_MODEL, Settings
from services.policies import names
from services.simulator.generate import Kind
from services.simulator.report import job_lines, summary
from services.simulator.traces import TraceJob

POLICIES = ("fcfs", "srtf", "edf", "least_slack", "edf-doomed-last", "srtf-doomed-last", "slack")
SYSTEMS = (*FIFOS, *POLICIES)
# Of samples (traffic.sample): three of each class, nine but for the longest.
MEASURED_ROUNDS = 3


# -- measuring -----------------------------------------------------------------------------


def measure(kinds: Sequence[Kind], seed: int, settings: Settings | None = None) -> Measured:
    """By plain diffusers, and in a pool of these settings, which run every job alone."""
    jobs = sample(kinds, MEASURED_ROUNDS, seed)
    params = params_of(jobs, seed)
    warm = params_of(kinds, seed + 1)
    loop = DiffusersLoop(str(BUNDLED_MODEL), threads=1)
    loop.run(warm)
    _, lines = loop.run(params)
    loop.close()
    alone: dict[str, list[float]] = {}
    for kind, line in zip(jobs, lines, strict=True):
        alone.setdefault(kind.name, []).append(line["s"])
    with running_pool(settings or Settings(policy="fcfs")) as pool:
        run_all(pool, warm, "warm")
        ran = list(run_all(pool, params, "measure").values())
    stage_s = medians([(kind.name, r.stage_s) for kind, r in zip(jobs, ran, strict=True)])
    return Measured(alone, stage_s)


@contextmanager
def started(name: str) -> Iterator[System]:
    if name in FIFOS:
        with fifo_diffusers(str(BUNDLED_MODEL), name) as fifo:
            yield fifo
    else:
        with running_pool(Settings(policy=name)) as pool:
            yield pool


@dataclass(frozen=True, slots=True)
class Plan:
    """One trace at one load, and the most jobs of it that could be in time."""

    load: float
    trace: list[TraceJob]
    params: list[dict[str, Any]]
    bound: dict[str, Any]


def plan_of(kinds: Sequence[Kind], measured: Measured, load: float, jobs: int, seed: int) -> Plan:
    trace = make_trace(kinds, measured.stage_s, measured.standalone_s, load, jobs, seed)
    takes_s = trace[-1].arrival_s * max(1.0, load)
    if takes_s > 0.9 * Ttls().task_s:
        sys.exit(
            f"slo: {jobs} jobs take about {takes_s:.0f} s; the records that switches are counted "
            f"from stay for {Ttls().task_s:.0f} s, so that fewer jobs are needed"
        )
    found = bound(trace, costs_of(kinds, measured.stage_s))
    say(f"{load}: {jobs} jobs in {trace[-1].arrival_s:.0f} s; at most {found['bound']:.0f} in time")
    # Other prompts at every load: the encoder remembers those of the last trace.
    return Plan(load, trace, params_of_trace(kinds, trace, seed + round(1000 * load)), found)


def run_system(
    name: str, kinds: Sequence[Kind], plans: Sequence[Plan], seed: int
) -> Iterator[tuple[Plan, Run]]:
    """Start it, warm it up, and put each trace through, one after the other."""
    with started(name) as system:
        run_all(system, params_of(sample(kinds, 1, seed), seed + 2), "warm")
        for plan in plans:
            yield plan, run_trace(system, plan.trace, plan.params, f"{plan.load}-")


# -- the whole ----------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--load", type=float, nargs="+", default=[0.9], help="one trace for each")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--jobs", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mix", default="mixed", choices=sorted(MIXES))
    parser.add_argument("--repeat", type=int, default=1, help="runs of each system, taking turns")
    parser.add_argument("--out", type=Path, help="every job of every run, as JSON lines")
    parser.add_argument("--small", action="store_true", help="batches on and off, 64 and 128 px")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.systems = options.systems.split(",")
    known = {*FIFOS, *names()}
    if unknown := set(options.systems) - known:
        parser.error(f"--systems: {', '.join(unknown)} is not one of {', '.join(sorted(known))}")
    return options


def main() -> None:
    options = parse()
    if options.small:
        small(options)
        return
    kinds = MIXES[options.mix]
    say("measuring what jobs take: plain diffusers, then the pool")
    measured = measure(kinds, options.seed)
    plans = [plan_of(kinds, measured, load, options.jobs, options.seed) for load in options.load]
    runs: dict[float, dict[str, list[Run]]] = {
        plan.load: {name: [] for name in options.systems} for plan in plans
    }
    fresh = True
    for turn in range(options.repeat):
        for name in options.systems:
            for plan, run in run_system(name, kinds, plans, options.seed):
                runs[plan.load][name].append(run)
                share = summary(run.outcome.jobs.values(), run.outcome.ended_s)["on_time"]
                took = f"its work took {slowdown([run], measured):.2f} x what was measured"
                say(f"{plan.load} {name}: {100 * share:.1f} % on time; {took}")
                if options.out:
                    save(options.out, turn, plan.load, run, fresh)
                    fresh = False
    found = [result(options, kinds, measured, plan, runs[plan.load]) for plan in plans]
    if options.json:
        print(json.dumps(found[0] if len(found) == 1 else {"loads": found}))
    else:
        print("\n\n".join(table(out) for out in found))


def small(options: argparse.Namespace) -> None:
    """Both pools and every load, one after the other."""
    kinds = slo_small.KINDS
    say("measuring what jobs take: plain diffusers, then a pool without batches")
    measured = measure(kinds, options.seed, slo_small.settings_of(slo_small.OFF, "fcfs"))
    found = []
    for load in options.load:
        plan = plan_of(kinds, measured, load, options.jobs, options.seed)
        runs: dict[str, list[tuple[Run, float]]] = {slo_small.OFF: [], slo_small.ON: []}
        for _ in range(options.repeat):
            for batch, of in runs.items():
                of.append(slo_small.run_small(batch, plan.trace, plan.params, options.seed))
                share = summary(of[-1][0].outcome.jobs.values(), of[-1][0].outcome.ended_s)
                say(f"{load} batch {batch}: {100 * share['on_time']:.1f} % on time")
        found.append(
            {
                "benchmark": "slo_small", "load": load, "jobs": options.jobs,
                "seed": options.seed, "repeat": options.repeat,
                "arrivals_s": plan.trace[-1].arrival_s, "classes": describe(kinds, measured),
                **slo_small.compared(runs, plan.trace, measured),
            }
        )  # fmt: skip
    if options.json:
        print(json.dumps(found[0] if len(found) == 1 else {"loads": found}))
    else:
        print("\n\n".join(slo_small.table(out) for out in found))


def result(
    options: argparse.Namespace, kinds: Sequence[Kind], measured: Measured, plan: Plan,
    runs: dict[str, list[Run]],
) -> dict[str, Any]:  # fmt: skip
    trace, alone = plan.trace, measured.standalone_s
    stage, stage_s = bottleneck(kinds, measured.stage_s)
    fifo_load = sum(job.standalone_s for job in trace) / trace[-1].arrival_s
    shortest = min(alone, key=alone.__getitem__)
    found_by_system = verdict(runs, plan.bound["bound"], shortest)
    for name, figures in found_by_system["systems"].items():
        figures["slowdown"] = slowdown(runs[name], measured)
    return {
        "benchmark": "slo",
        "load": plan.load, "mix": options.mix, "jobs": options.jobs, "seed": options.seed,
        "repeat": options.repeat, "arrivals_s": trace[-1].arrival_s,
        "bottleneck": stage, "bottleneck_s": stage_s,
        "classes": describe(kinds, measured), "cost_ratio": max(alone.values()) / alone[shortest],
        "fifo_load": fifo_load, "note": note(fifo_load), "bound": plan.bound,
        **found_by_system,
    }  # fmt: skip


def save(path: Path, turn: int, load: float, run: Run, fresh: bool) -> None:
    with path.open("w" if fresh else "a", encoding="utf-8") as file:
        for line in job_lines(run.outcome):
            file.write(
                json.dumps({"system": run.outcome.policy, "load": load, "run": turn, **line}) + "\n"
            )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
