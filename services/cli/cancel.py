"""Cancel jobs. A running one ends within one step; one that has ended stays as it is."""

from __future__ import annotations

import argparse

from common.errors import UnknownJob
from services.cli import terminal
from services.cli.terminal import Exit, fail, print_json


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", nargs="+", metavar="ID")
    parser.add_argument(
        "--wait", type=float, default=10.0, metavar="S",
        help="how long to wait for the end; 0 only asks (default 10)",
    )  # fmt: skip
    terminal.add_json(parser)
    terminal.add_connection(parser)


def run(args: argparse.Namespace) -> int:
    worst = Exit.OK
    with terminal.client_of(args) as client:
        asked = []
        for id in dict.fromkeys(args.ids):
            try:
                client.status(id)
            except UnknownJob as error:
                fail(str(error))
                worst = Exit.UNKNOWN
                continue
            client.cancel(id)
            asked.append(id)
        for id in asked:
            status = client.wait(id, args.wait).status if args.wait > 0 else "canceling"
            if args.json:
                print_json({"id": id, "status": status})
            else:
                late = "" if status in ("canceled", "canceling") else " before the cancel came"
                print(f"{id} {status}{late}")
    return worst
