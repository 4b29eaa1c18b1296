"""Stop a running pool: its workers drain, then the coordinator and its Redis end."""

from __future__ import annotations

import argparse
import time

from common.asks import Ask
from common.errors import RedisAway
from services.cli import terminal
from services.cli.launcher import find_host, hosts
from services.cli.terminal import Exit, fail


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", help="which host's launcher, where several run")
    parser.add_argument(
        "--wait", type=float, default=60.0, metavar="S", help="how long to wait (default 60)"
    )
    terminal.add_connection(parser)


def run(args: argparse.Namespace) -> int:
    with terminal.client_of(args) as client:
        host = find_host(client, args.host)
        client.patience = 0.5
        client.ask(Ask((("HSET", client.keys.pool, f"{host}/down", "1"),)))
        until = time.monotonic() + args.wait
        try:
            while host in hosts(client) and time.monotonic() < until:
                time.sleep(0.1)
            if host in hosts(client):
                fail(f"the pool on {host} is still there after {args.wait:.0f} s")
                return Exit.NOT_YET
        except RedisAway:
            pass  # it was the pool's own Redis
    print(f"the pool on {host} has stopped")
    return Exit.OK
