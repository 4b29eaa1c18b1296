"""Ask workers to leave: each ends its chunk at the next step and hands back what waits for it.

A launcher (`slackwater up`) starts another in its place; `slackwater scale` changes how many
there are.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from common.asks import Ask
from common.scripts import SHA, SOURCES, Transitions, Ttls
from services.cli import terminal
from services.cli.terminal import Exit, fail, print_json

if TYPE_CHECKING:
    from common.client import Client


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workers", nargs="+", metavar="WORKER", help="see `slackwater ps --workers`"
    )
    parser.add_argument(
        "--wait", type=float, default=60.0, metavar="S",
        help="how long to wait until they have left; 0 only asks (default 60)",
    )  # fmt: skip
    terminal.add_json(parser)
    terminal.add_connection(parser)


def run(args: argparse.Namespace) -> int:
    worst = Exit.OK
    with terminal.client_of(args) as client:
        asked = []
        for name in dict.fromkeys(args.workers):
            if ask(client, name) == "gone":
                there = ", ".join(w.name for w in client.workers()) or "none"
                fail(f"no worker {name!r}; there are {there}")
                worst = Exit.UNKNOWN
            else:
                asked.append(name)
        until = time.monotonic() + args.wait
        left = wait_until_gone(client, asked, until)
    for name in asked:
        gone = name in left
        if args.json:
            print_json({"worker": name, "left": gone})
        else:
            print(f"{name} {'has left' if gone else 'was asked to leave'}")
    if args.wait > 0 and len(left) < len(asked):
        fail(f"{len(asked) - len(left)} are still there after {args.wait:.0f} s")
        return Exit.NOT_YET
    return worst


def ask(client: Client, worker: str) -> str:
    """The script's verdict: asked, draining or gone."""
    call = Transitions(client.keys, Ttls()).drain(worker)
    # Loaded first: a command line does not know whether Redis has the script.
    load = ("SCRIPT", "LOAD", SOURCES[call.script])
    run = ("EVALSHA", SHA[call.script], len(call.keys), *call.keys, *call.args)
    [_, reply] = client.ask(Ask((load, run)))
    return str(reply[0].decode())


def wait_until_gone(client: Client, names: list[str], until: float) -> set[str]:
    """Those of `names` that have left by `until` (monotonic)."""
    while True:
        there = {worker.name for worker in client.workers()}
        left = {name for name in names if name not in there}
        if len(left) == len(names) or time.monotonic() >= until:
            return left
        time.sleep(0.1)
