"""Run a trace through policies without a machine: slackwater simulate TRACE --policy slack,edf

TRACE is a file of JSON lines or of Request(…) lines, or poisson, bursty or phases for a made-up
one. Prints a row a class and policy; with --timeline a Gantt chart a policy. --json prints
everything, with --jobs every job, with --timeline every chunk. docs/simulator.md says what is
simulated and how.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from services.cli import terminal
from services.cli.terminal import Exit, fail, print_json
from services.cli.timeline import add_files

if TYPE_CHECKING:
    from services.simulator.calibrations import Calibration
    from services.simulator.simulation import Setting
    from services.simulator.traces import TraceJob
    from services.timeline.runs import Run


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="a file, or poisson, bursty or phases")
    parser.add_argument(
        "--policy", default="slack", metavar="A,B,…", help="policies to compare (default: slack)"
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="denoise ranks")
    parser.add_argument("--encoders", type=int, metavar="N", help="default: one for 16 ranks")
    parser.add_argument("--decoders", type=int, metavar="N", help="default: one for 16 ranks")
    parser.add_argument(
        "--costs",
        default="h20-qwen-image",
        metavar="NAME|FILE",
        help="a calibration (docs/simulator.md), or what `slackwater profile` wrote",
    )
    parser.add_argument("--chunk-ms", type=float, default=600, metavar="MS")
    parser.add_argument("--switch-ms", type=float, default=15, metavar="MS", help="a change of job")
    parser.add_argument(
        "--dispatch-ms", type=float, default=0, metavar="MS", help="every hand-over"
    )
    parser.add_argument(
        "--lead-ms", type=float, metavar="MS",
        help="hand a task over this long before its rank is free (default: when it is free)",
    )  # fmt: skip
    parser.add_argument("--jitter", type=float, default=0.01, help="of a task's speed (0.01)")
    parser.add_argument(
        "--batch", action="store_true",
        help="jobs are not exact: those of a size share forward passes (slack only)",
    )  # fmt: skip
    parser.add_argument("--slo-scale", type=float, default=3.0, help="deadline where none is given")
    parser.add_argument("--load", type=float, default=0.9, help="of a made-up trace")
    parser.add_argument("--count", type=int, default=1000, help="jobs of a made-up trace")
    parser.add_argument("--mix", default="images", help="of a made-up trace: images or toy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", action="store_true", help="with --json: every job")
    parser.add_argument(
        "--timeline", action="store_true", help="every chunk: a Gantt chart, or JSON with --json"
    )
    parser.add_argument(
        "--window", metavar="FROM:TO", help="the part to draw, in seconds of the trace"
    )
    add_files(parser)
    terminal.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from services.simulator.calibrations import calibration
    from services.simulator.report import chunk_lines, job_lines, report, table, warnings
    from services.simulator.simulation import Stalled, simulate
    from services.simulator.traces import TraceError
    from services.timeline.files import Files, window_of
    from services.timeline.png import NoMatplotlib
    from services.timeline.runs import simulated

    if min(args.ranks, args.encoders or 1, args.decoders or 1) < 1:
        fail("--ranks, --encoders and --decoders are at least 1")
        return Exit.USAGE
    try:
        files = Files(args.html, args.png, args.trace_events, window_of(args.window))
        files.check()
        costs = calibration(args.costs)
        trace = _trace(args, costs)
        reports: list[dict[str, Any]] = []
        runs: list[Run] = []
        for name in filter(None, args.policy.split(",")):
            setting = _setting(args, name, costs, args.timeline or bool(files))
            try:
                outcome = simulate(trace, setting)
            except Stalled as error:
                fail(f"{name}: {error}")
                return Exit.FAILED
            reports.append(report(outcome))
            if args.jobs:
                reports[-1]["jobs"] = job_lines(outcome)
            if args.timeline:
                reports[-1]["timeline"] = chunk_lines(outcome)
            runs.append(simulated(outcome))
        said = f"{len(trace)} jobs, {args.ranks} ranks, costs {costs.name}: {costs.source}"
        paths = files.write(runs, f"slackwater simulate {args.trace}", said)
    except (TraceError, ValueError, OSError, NoMatplotlib) as error:
        fail(str(error))
        return Exit.USAGE
    for line in warnings(reports):
        fail(line)
    if args.json:
        print_json(
            {"trace": args.trace, "jobs": len(trace), "costs": costs.name, "runs": reports,
             "files": paths}
        )  # fmt: skip
        return Exit.OK
    print(f"{said}\n\n{table(reports)}")
    if args.timeline:
        _draw(runs, files.window)
    for path in paths:
        print(path)
    return Exit.OK


def _trace(args: argparse.Namespace, costs: Calibration) -> list[TraceJob]:
    from services.simulator.generate import ARRIVALS, generate
    from services.simulator.traces import read_trace

    if args.trace not in ARRIVALS:
        return read_trace(args.trace, costs, args.slo_scale)
    return generate(
        args.count, args.load, costs,
        mix=args.mix, arrivals=args.trace, ranks=args.ranks, seed=args.seed,
        slo_scale=args.slo_scale,
    )  # fmt: skip


def _setting(args: argparse.Namespace, policy: str, costs: Calibration, timeline: bool) -> Setting:
    from services.simulator.pool import Overheads
    from services.simulator.simulation import Setting

    side = max(1, args.ranks // 16)
    return Setting(
        policy=policy,
        costs=costs,
        denoise=args.ranks,
        encode=args.encoders or side,
        decode=args.decoders or side,
        overheads=Overheads(args.dispatch_ms / 1000, args.switch_ms / 1000, 0, args.jitter),
        chunk_s=args.chunk_ms / 1000,
        lead_s=-math.inf if args.lead_ms is None else args.lead_ms / 1000,
        switch_s=args.switch_ms / 1000,
        seed=args.seed,
        timeline=timeline,
        batch=args.batch,
    )


def _draw(runs: list[Run], window: tuple[float, float] | None) -> None:
    from rich.console import Console

    from services.timeline.terminal import gantts

    shown = [run.within(*window) for run in runs] if window else runs
    Console().print("", gantts(shown, "class", clock=False), sep="\n")
