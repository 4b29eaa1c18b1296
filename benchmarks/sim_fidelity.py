"""Whether the simulator says what really happens: real runs against their simulation.

`python -m benchmarks.sim_fidelity [--only timed|model] [--runs N] [--jobs N] [--load L]
[--policy NAME] [--json]`

A real pool (one encoder, one denoiser, one decoder) serves open-loop traces, with stages that only
take time and with the bundled model. The simulator gets the same traces, the pool's own settings,
and a profile measured in that pool beforehand from the stamps of its events (`running` and `chunk`,
milliseconds):

- costs: the median length of a class's tasks, per step, while the pool has a backlog;
- `report_s`: from the end of a job's last task to its end in Redis, jobs alone;
- `dispatch_s`: from a job's task's end to its next one's start, jobs alone, less `report_s`;
- `submit_s`: from a job's arrival to its first task's start, jobs alone, less `dispatch_s`;
- `switch_s`: from the end of a denoiser's task to the start of another job's, with a backlog, less
  `dispatch_s`;
- `jitter`: the spread of a task's length per step, as a robust standard deviation.

Each trace is simulated several times with another jitter and the mean is compared.
`on_time_difference_points` and `median_latency_error` are means over the runs of what each differs
by, whichever way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from benchmarks.openloop import Pool, run_all, run_trace, running_pool
from benchmarks.traffic import (
    MIXES,
    costs_of,
    make_trace,
    params_of,
    params_of_trace,
    sample,
)
from common.record import JobEvent
from common.settings import Settings
from common.stage import DENOISE
from services.coordinator.build import core_maker
from services.simulator.generate import Kind
from services.simulator.pool import Overheads
from services.simulator.report import report
from services.simulator.simulation import Setting, simulate

NOOP = "encode_ms=8,step_ms=10,token_ms=0.1,decode_ms=15"
TIMED = (Kind("S", 64, 20, 0.8), Kind("M", 128, 40, 0.15), Kind("L", 256, 110, 0.05))
SIMULATIONS = 20  # of each run, with another jitter each
# From a median absolute deviation to a standard deviation of normal errors.
ROBUST = 1.4826


# -- a profile from events -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """One task of one job; times by Redis' clock."""

    job: str
    kind: str  # the job's class
    stage: str
    worker: str
    steps: int  # 0 where it is not a chunk
    begun_s: float
    ended_s: float

    @property
    def each_s(self) -> float:
        """Seconds, of one step where it is a chunk."""
        return (self.ended_s - self.begun_s) / max(1, self.steps)


@dataclass(frozen=True, slots=True)
class Story:
    """A job's life as its events tell it."""

    kind: str
    arrived_s: float
    ended_s: float
    pieces: tuple[Piece, ...]


def story_of(job: str, kind: str, arrived_s: float, events: Iterable[JobEvent]) -> Story:
    pieces: list[Piece] = []
    begun: JobEvent | None = None
    step, at = 0, arrived_s
    for event in events:
        at = event.at_s
        if event.type == "running":
            begun = event
        elif event.type == "chunk" and begun is not None:
            steps = (event.step or 0) - step if begun.stage == DENOISE else 0
            step += steps
            pieces.append(Piece(job, kind, begun.stage, begun.worker, steps, begun.at_s, at))
            begun = None
    return Story(kind, arrived_s, at, tuple(pieces))


@dataclass(frozen=True, slots=True)
class Profile:
    """What the simulator is told of a pool."""

    stage_s: dict[str, dict[str, float]]  # class -> stage -> seconds, all steps
    standalone_s: dict[str, float]  # class -> from arrival to end, alone
    overheads: Overheads


def profile(pool: Pool, kinds: Sequence[Kind], seed: int) -> Profile:
    """Measure it: some jobs one after another, then more at once."""
    run_all(pool, params_of(sample(kinds, 1, seed), seed), "warm")
    jobs = sample(kinds, 1, seed + 1)
    alone = []
    for number, (kind, params) in enumerate(zip(jobs, params_of(jobs, seed + 1), strict=True)):
        alone += stories(pool, [kind], [params], f"alone-{number}")
    jobs = sample(kinds, 2, seed + 2)
    busy = [
        piece
        for story in stories(pool, jobs, params_of(jobs, seed + 2), "busy")
        for piece in story.pieces
    ]
    steps = {kind.name: kind.steps for kind in kinds}
    latencies = {
        kind.name: [s.ended_s - s.arrived_s for s in alone if s.kind == kind.name] for kind in kinds
    }
    return Profile(
        costs(busy, steps),
        {name: statistics.median(found) for name, found in latencies.items()},
        overheads(alone, busy),
    )


def stories(
    pool: Pool, jobs: Sequence[Kind], params: Sequence[Mapping[str, Any]], prefix: str
) -> list[Story]:
    """Of jobs pushed at once."""
    ran = run_all(pool, params, prefix)
    return [
        story_of(name, kind.name, ran[name].arrived_s, pool.events(name))
        for name, kind in zip(ran, jobs, strict=True)
    ]


def costs(busy: Sequence[Piece], steps: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Class -> stage -> seconds of all its tasks."""
    found: dict[str, dict[str, list[float]]] = {}
    for piece in busy:
        found.setdefault(piece.kind, {}).setdefault(piece.stage, []).append(piece.each_s)
    return {
        name: {
            stage: statistics.median(each) * (steps[name] if stage == DENOISE else 1)
            for stage, each in stages.items()
        }
        for name, stages in found.items()
    }


def overheads(alone: Sequence[Story], busy: Sequence[Piece]) -> Overheads:
    """As the module says."""
    to_end = [story.ended_s - story.pieces[-1].ended_s for story in alone]
    to_next = [b.begun_s - a.ended_s for story in alone for a, b in pairwise(story.pieces)]
    report_s = statistics.fmean(to_end)
    dispatch_s = max(0.0, statistics.fmean(to_next) - report_s)
    on_rank = sorted((p for p in busy if p.stage == DENOISE), key=lambda p: (p.worker, p.begun_s))
    switching = [
        b.begun_s - a.ended_s
        for a, b in pairwise(on_rank)
        if a.worker == b.worker and a.job != b.job
    ]
    switch_s = max(0.0, statistics.median(switching) - dispatch_s)
    # The median: one push that met a busy machine would count for all.
    to_begin = statistics.median(s.pieces[0].begun_s - s.arrived_s for s in alone)
    submit_s = max(0.0, to_begin - dispatch_s)
    return Overheads(dispatch_s, switch_s, report_s, submit_s, jitter=spread(busy))


def spread(busy: Sequence[Piece]) -> float:
    """Of the length of denoise tasks per step, relative to their class's median."""
    by_kind: dict[str, list[float]] = {}
    for piece in busy:
        if piece.stage == DENOISE:
            by_kind.setdefault(piece.kind, []).append(piece.each_s)
    off = [abs(each / statistics.median(found) - 1) for found in by_kind.values() for each in found]
    return ROBUST * statistics.median(off)


# -- comparing -----------------------------------------------------------------------------


def setting_of(settings: Settings, kinds: Sequence[Kind], found: Profile, seed: int) -> Setting:
    """The pool with these settings, one worker a stage, as the simulator would have it."""
    view = core_maker(settings)().view
    return Setting(
        policy=settings.policy, costs=costs_of(kinds, found.stage_s), overheads=found.overheads,
        chunk_s=view.chunk_s, lead_s=view.lead_s, pack_s=view.pack_s, switch_s=view.switch_s,
        error=view.error, seed=seed,
    )  # fmt: skip


def figures(full: Mapping[str, Any]) -> dict[str, Any]:
    classes = full["classes"]
    return {
        "on_time": full["all"]["on_time"],
        "p50_s": full["all"]["p50_s"],
        "p95_s": full["all"]["p95_s"],
        "switches_per_job": full["all"]["switches_per_job"],
        "on_time_by_class": {name: c["on_time"] for name, c in classes.items()},
        "p50_s_by_class": {name: c["p50_s"] for name, c in classes.items()},
    }


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of figures that are alike, nested ones too."""
    return {
        key: means([row[key] for row in rows])
        if isinstance(value, Mapping)
        else statistics.fmean(row[key] for row in rows)
        for key, value in rows[0].items()
    }


def compare(name: str, settings: Settings, kinds: Sequence[Kind], options: Any) -> dict[str, Any]:
    """All runs of one pool and their simulations."""
    runs: list[dict[str, Any]] = []
    with running_pool(settings) as pool:
        found = profile(pool, kinds, seed=1000)
        say(f"{name}: {found.overheads}")
        for seed in range(options.runs):
            trace = make_trace(
                kinds, found.stage_s, found.standalone_s, options.load, options.jobs, seed
            )
            params = params_of_trace(kinds, trace, seed)
            real = figures(report(run_trace(pool, trace, params, f"{seed}-").outcome))
            simulated = means(
                [
                    figures(report(simulate(trace, setting_of(settings, kinds, found, jitter))))
                    for jitter in range(SIMULATIONS)
                ]
            )
            runs.append({"real": real, "simulated": simulated, **apart(real, simulated)})
            say(f"{name}: {runs[-1]}")
    return {
        "on_time_difference_points": statistics.fmean(r["on_time_difference_points"] for r in runs),
        "median_latency_error": statistics.fmean(r["median_latency_error"] for r in runs),
        "profile": asdict(found),
        "runs": runs,
    }


def apart(real: Mapping[str, Any], simulated: Mapping[str, Any]) -> dict[str, float]:
    """How far a simulation is from what it simulates."""
    return {
        "on_time_difference_points": 100 * abs(real["on_time"] - simulated["on_time"]),
        "median_latency_error": abs(simulated["p50_s"] / real["p50_s"] - 1),
    }


# -- saying it -----------------------------------------------------------------------------


def table(name: str, found: Mapping[str, Any]) -> str:
    lines = [f"{name:6} run      on time          median            p95       switches a job"]
    for number, run in enumerate(found["runs"]):
        for what in ("real", "simulated"):
            r = run[what]
            lines.append(
                f"{number if what == 'real' else '':>6} {what:10}{100 * r['on_time']:5.1f} %"
                f"{r['p50_s']:15.3f} s{r['p95_s']:13.2f} s{r['switches_per_job']:12.2f}"
            )
    lines.append(
        f"apart by {found['on_time_difference_points']:.2f} points on time, "
        f"{100 * found['median_latency_error']:.1f} % of the median latency"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", choices=("timed", "model"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=70)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--policy", default="slack")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    wanted = {
        "timed": (Settings(policy=options.policy, noop=NOOP), TIMED),
        "model": (Settings(policy=options.policy), MIXES["mixed"]),
    }
    found = {
        name: compare(name, settings, kinds, options)
        for name, (settings, kinds) in wanted.items()
        if options.only in (None, name)
    }
    if not options.json:
        print("\n\n".join(table(name, one) for name, one in found.items()))
        return
    heads = ("on_time_difference_points", "median_latency_error")
    out = {head: {name: one[head] for name, one in found.items()} for head in heads}
    given = {"load": options.load, "jobs": options.jobs, "policy": options.policy}
    print(json.dumps({"benchmark": "sim_fidelity", **given, **out, "pools": found}))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
