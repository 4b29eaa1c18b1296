"""What a pool's ranks did and when: a Gantt chart in the terminal, as page, picture or trace.

A line a rank. Without a terminal, --follow prints one line a task; --json prints everything.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from services.cli import terminal
from services.cli.terminal import Exit, fail, print_json, seconds

if TYPE_CHECKING:
    from common.client import Client
    from services.timeline.files import Files
    from services.timeline.runs import Bar, Run

# A chart is drawn anew this often at most, and at least once in SILENCE_S, since time goes on.
DRAW_S, SILENCE_S = 0.25, 1.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--last", type=float, default=60.0, metavar="S", help="seconds (60)")
    parser.add_argument("--follow", action="store_true", help="go on as tasks end; Ctrl-C ends it")
    parser.add_argument("--by", choices=("class", "job"), default="class", help="what has a color")
    add_files(parser)
    terminal.add_json(parser)
    terminal.add_connection(parser)


def add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", metavar="FILE", help="write a page: Gantt, latency curves, table")
    parser.add_argument("--png", metavar="FILE", help="write the Gantt as a picture (matplotlib)")
    parser.add_argument(
        "--trace",
        dest="trace_events",
        metavar="FILE",
        help="write Chrome trace events, for Perfetto or chrome://tracing",
    )


def run(args: argparse.Namespace) -> int:
    from services.timeline.files import Files
    from services.timeline.live import read_run

    files = Files(args.html, args.png, args.trace_events)
    if not args.last > 0:
        fail(f"--last {args.last:g} is not a time; give seconds, such as 60")
        return Exit.USAGE
    if args.follow and files:
        fail("--follow shows; leave it out to write --html, --png or --trace")
        return Exit.USAGE
    with terminal.client_of(args) as client:
        found, last = read_run(client, args.last)
        if args.follow:
            return _follow(client, found, last, args)
        if files:
            return _write(files, found, args)
    if args.json:
        print_json(as_json(found))
    elif not found.bars:
        print(f"no task ended in the last {seconds(args.last)}")
    else:
        from rich.console import Console

        from services.timeline.terminal import Gantt

        Console().print(Gantt(found, args.by))
    return Exit.OK


def _write(files: Files, found: Run, args: argparse.Namespace) -> int:
    from services.timeline.png import NoMatplotlib

    said = f"the last {seconds(args.last)} of a pool, until {time.strftime('%c')}"
    try:
        paths = files.write([found], "slackwater timeline", said, live=True)
    except (NoMatplotlib, OSError) as error:
        fail(str(error))
        return Exit.USAGE
    print_json({"files": paths}) if args.json else print(*paths, sep="\n")
    return Exit.OK


# -- following -----------------------------------------------------------------------------


def _follow(client: Client, found: Run, last: str, args: argparse.Namespace) -> int:
    from services.timeline.stream import follow

    if args.json or not sys.stdout.isatty():
        for bars in itertools.chain([found.bars], follow(client, last)):
            for bar in bars:
                print_json(bar_json(bar)) if args.json else print(line_of(bar), flush=True)
        return Exit.OK
    return _follow_in_chart(client, found, last, args)


def _follow_in_chart(client: Client, found: Run, last: str, args: argparse.Namespace) -> int:
    from rich.live import Live

    from services.timeline.live import Pool, run_of
    from services.timeline.stream import follow, redis_now
    from services.timeline.terminal import Gantt

    bars, drawn, pool = list(found.bars), time.monotonic(), Pool(client)
    with Live(Gantt(found, args.by), auto_refresh=False) as screen:
        for new in follow(client, last, SILENCE_S):
            bars += new
            if new and time.monotonic() - drawn < DRAW_S:
                continue
            drawn, now = time.monotonic(), redis_now(client)
            bars = [bar for bar in bars if bar.end_s > now - args.last]
            current = run_of(client, bars, now - args.last, now, pool)
            screen.update(Gantt(current, args.by), refresh=True)
    return Exit.OK


def line_of(bar: Bar) -> str:
    """ "16:20:01 denoise-a-7 job-1 3–7 of 3–10, slack 1.2 s, yielded"."""
    rows = []
    for row in bar.rows:
        text = row.job
        if row.planned:
            text += f" {row.start}–{row.stop}"
        if row.slack_s is not None:
            text += f" slack {seconds(row.slack_s)}"
        rows.append(text + (f" {row.end}" if row.end != "done" else ""))
    at = time.strftime("%H:%M:%S", time.localtime(bar.start_s))
    took = f"{bar.end_s - bar.start_s:.3f} s"
    yielded = " yielded" if bar.yielded else ""
    return f"{at} {bar.rank} {bar.stage} {took}{yielded}: {', '.join(rows)}"


# -- JSON ----------------------------------------------------------------------------------


def bar_json(bar: Bar) -> dict[str, Any]:
    return {**asdict(bar), "yielded": bar.yielded}


def as_json(found: Run) -> dict[str, Any]:
    from services.simulator.report import line_of_job

    return {
        "begin_s": found.begin_s,
        "end_s": found.end_s,
        "tasks": [bar_json(bar) for bar in found.bars],
        "jobs": [
            {**line_of_job(job), "missed": found.missed(name)} for name, job in found.jobs.items()
        ],
    }
