"""Cancel jobs. A running one ends within one step; one that has ended stays as it is."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from common.errors import ResultExpired, UnknownJob, WaitTimeout
from services.cli import terminal
from services.cli.terminal import Exit, fail, print_json

if TYPE_CHECKING:
    from common.client import Client


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", nargs="+", metavar="ID")
    parser.add_argument(
        "--wait", type=float, default=10.0, metavar="S",
        help="how long to wait for their ends; 0 only asks (default 10)",
    )  # fmt: skip
    terminal.add_json(parser)
    terminal.add_connection(parser)


def run(args: argparse.Namespace) -> int:
    worst = Exit.OK
    with terminal.client_of(args) as client:
        ids = list(dict.fromkeys(args.ids))
        for id in ids:
            client.cancel(id)
        until = time.monotonic() + args.wait
        for id in ids:
            try:
                status = _end_of(client, id, until) if args.wait > 0 else _asked(client, id)
            except UnknownJob as error:
                fail(f"{error}; should it come within the hour, it is canceled")
                worst = max(worst, Exit.UNKNOWN)
                continue
            except WaitTimeout:
                fail(f"{id} was asked to end and has not within {args.wait:g} s")
                status = "canceling"
                worst = max(worst, Exit.NOT_YET)
            if args.json:
                print_json({"id": id, "status": status})
            else:
                late = "" if status in ("canceled", "canceling") else " before the cancel came"
                print(f"{id} {status}{late}")
    return worst


def _end_of(client: Client, id: str, until: float) -> str:
    """How the job has ended. Raises WaitTimeout, UnknownJob."""
    try:
        return client.wait(id, max(0.0, until - time.monotonic())).status
    except ResultExpired as expired:
        return expired.status


def _asked(client: Client, id: str) -> str:
    """Raises UnknownJob."""
    record = client.status(id)
    return record.status if record.is_terminal else "canceling"
