"""Replace the processes of a running pool one by one: each successor is ready before its
predecessor drains, so nothing is lost and nothing has to wait for a model to load.

It needs room for one process more than there are, on its predecessor's device.
"""

from __future__ import annotations

import argparse
import secrets
import time

from common.asks import Ask
from common.stage import STAGES
from services.cli import terminal
from services.cli.launcher import find_host
from services.cli.terminal import Exit, fail, print_json

ROLES = (*STAGES, "coordinator", "gateway", "celery")
FAILED = "failed: "  # what a launcher that gives up writes in the request's place


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "roles", nargs="*", metavar="SERVICE",
        help=f"{', '.join(ROLES)}; all that run if none is named",
    )  # fmt: skip
    parser.add_argument("--host", help="which host's launcher, where several run")
    parser.add_argument(
        "--wait", type=float, default=600.0, metavar="S",
        help="how long to wait for the end; 0 only asks (default 600)",
    )  # fmt: skip
    terminal.add_json(parser)
    terminal.add_connection(parser)


def run(args: argparse.Namespace) -> int:
    roles = list(dict.fromkeys(args.roles)) or list(ROLES)
    for role in roles:
        if role not in ROLES:
            fail(f"SERVICE: {role!r} cannot be restarted; {', '.join(ROLES)} can")
            return Exit.USAGE
    with terminal.client_of(args) as client:
        host = find_host(client, args.host)
        field = f"{host}/restart"
        request = f"{secrets.token_hex(8)} {' '.join(roles)}"
        client.ask(Ask((("HSET", client.keys.pool, field, request),)))
        until = time.monotonic() + args.wait
        answer: bytes | None = request.encode()
        while answer == request.encode() and time.monotonic() < until:
            time.sleep(0.1)
            [answer] = client.ask(Ask((("HGET", client.keys.pool, field),)))
    done = answer is None
    if args.json:
        print_json({"host": host, "roles": roles, "done": done})
    elif done:
        print(f"{', '.join(roles)} on {host}: replaced one by one")
    if answer is not None and answer.startswith(FAILED.encode()):
        fail(answer.decode().removeprefix(FAILED))
        return Exit.FAILED
    if not done and args.wait > 0:
        fail(f"not done after {args.wait:.0f} s; the launcher goes on, see its logs")
        return Exit.NOT_YET
    return Exit.OK
