"""Change the number of workers of one stage of a running pool: slackwater scale denoise 3"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from common.asks import Ask
from common.stage import STAGES
from services.cli import terminal
from services.cli.launcher import find_host
from services.cli.terminal import Exit, fail, print_json

if TYPE_CHECKING:
    from common.client import Client


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("count", type=int, metavar="N")
    parser.add_argument("--host", help="which host's launcher, where several run")
    parser.add_argument(
        "--wait", type=float, default=60.0, metavar="S",
        help="how long to wait until it is so; 0 does not wait (default 60)",
    )  # fmt: skip
    terminal.add_json(parser)
    terminal.add_connection(parser)


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.count <= 256:
        fail(f"N: {args.count} workers of a stage; 0 to 256 are possible")
        return Exit.USAGE
    with terminal.client_of(args) as client:
        host = find_host(client, args.host)
        before = _count(client, host, args.stage)
        client.ask(Ask((("HSET", client.keys.pool, f"{host}/{args.stage}", args.count),)))
        until = time.monotonic() + args.wait
        now = before
        while now != args.count and time.monotonic() < until:
            time.sleep(0.1)
            now = _count(client, host, args.stage)
    if args.json:
        print_json({"host": host, "stage": args.stage, "workers": now, "wanted": args.count})
    else:
        print(f"{args.stage} workers on {host}: {before} → {args.count}")
    if now != args.count and args.wait > 0:
        fail(f"{now} are there after {args.wait:.0f} s; the launcher goes on, see its logs")
        return Exit.NOT_YET
    return Exit.OK


def _count(client: Client, host: str, stage: str) -> int:
    return sum(w.host == host and w.stage == stage and not w.draining for w in client.workers())
