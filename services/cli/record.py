"""Write the jobs of a live pool as a trace that `slackwater simulate` reads.

A JSON line a job: what was asked, and what became of it. Without --for and --last: all jobs
whose records remain.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli import terminal
from services.cli.terminal import Exit, fail, print_json

if TYPE_CHECKING:
    from common.client import Client
    from services.timeline.live import Known, Pool


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="FILE", help="the trace to write")
    span = parser.add_mutually_exclusive_group()
    span.add_argument(
        "--for", dest="for_s", type=float, metavar="S",
        help="jobs that arrive in the next S seconds; Ctrl-C ends it sooner",
    )  # fmt: skip
    span.add_argument(
        "--last", type=float, metavar="S", help="jobs that arrived in the last S seconds"
    )
    terminal.add_json(parser)
    terminal.add_connection(parser)


def run(args: argparse.Namespace) -> int:
    from common.client import write_whole
    from services.timeline.stream import redis_now

    with terminal.client_of(args) as client:
        begin_s = redis_now(client)
        if args.for_s is not None:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(max(0.0, args.for_s))
        elif args.last is not None:
            begin_s -= args.last
        else:
            begin_s = 0.0
        lines = record(client, begin_s, redis_now(client))
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    try:
        write_whole(Path(args.out), text.encode())
    except OSError as error:
        fail(f"--out: {error}")
        return Exit.USAGE
    if args.json:
        print_json({"jobs": len(lines), "path": args.out})
    else:
        print(f"{len(lines)} jobs written to {args.out}")
    return Exit.OK


def record(client: Client, begin_s: float, end_s: float) -> list[dict[str, Any]]:
    """Jobs that arrived between two moments by Redis' clock, in order of arrival; the first one's
    arrival is the trace's 0. What was refused, or has not been read yet, is left out."""
    from services.timeline.live import Pool, look_up

    arrived = [
        found.id
        for found in client.ps(ended=True)
        if found.created_s is not None and begin_s <= found.created_s <= end_s
    ]
    jobs = sorted(look_up(client, arrived), key=lambda k: (k.record.created_s or 0.0, k.record.id))
    pool = Pool(client)
    zero_s = min((known.record.created_s or 0.0 for known in jobs), default=0.0)
    return [line_of(known, pool, zero_s) for known in jobs]


def line_of(known: Known, pool: Pool, zero_s: float) -> dict[str, Any]:
    """One job: a trace's fields, then what became of it, on the trace's clock."""
    from services.timeline.live import trace_job

    found = known.record

    def after_ms(seconds: float | None) -> float | None:
        return None if seconds is None else round(1000 * (seconds - zero_s), 3)

    return {
        **trace_job(known, pool, zero_s).to_json(),
        "model": found.model,
        "user": known.user,
        "status": found.status,
        "error_code": found.error_code,
        "attempts": found.attempts,
        "started_ms": after_ms(found.started_s),
        "finished_ms": after_ms(found.finished_s),
        "on_time": known.on_time,
        "timings": known.timings,
        "epoch_ms": round(1000 * (found.created_s or 0.0)),
    }
