"""Scheduling policies: which there are, which leads, and `slackwater policies use NAME`."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from common.asks import Ask
from services.cli import terminal
from services.cli.terminal import Exit, fail, print_json
from services.policies import ABOUT, names

if TYPE_CHECKING:
    from common.client import Client

# The leader looks once a second; a new one must first come to lead.
WAIT_S = 10.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "use", nargs="*", metavar="use NAME",
        help="let NAME lead the running pool; `default` goes back to the pool's setting",
    )  # fmt: skip
    terminal.add_json(parser)
    terminal.add_connection(parser)


def run(args: argparse.Namespace) -> int:
    if not args.use:
        return _list(args)
    if len(args.use) != 2 or args.use[0] != "use":
        fail(f"{' '.join(args.use)!r}: either nothing, or `use NAME`")
        return Exit.USAGE
    with terminal.client_of(args) as client:
        return _use(client, args.use[1], args.json)


def _list(args: argparse.Namespace) -> int:
    from common.errors import RedisAway

    with terminal.client_of(args) as client:
        try:
            live = status(client)
        except RedisAway:
            live = {}  # without a pool it is a list of what there is
    if args.json:
        rows = [{"name": name, "about": ABOUT.get(name, "")} for name in names()]
        print_json({"policies": rows, "live": live})
        return Exit.OK
    for name in names():
        mark = "*" if name == live.get("current") else " "
        print(f"{mark} {name:<24} {ABOUT.get(name, 'from an installed package')}")
    if live.get("error"):
        print(f"\nthe pool stays with {live['current']}: {live['error']}")
    if int(live.get("failures") or 0):
        print(f"\n{live['current']} failed {live['failures']} times, fcfs decided then; the last: "
              f"{live['last_failure']}")  # fmt: skip
    return Exit.OK


def _use(client: Client, name: str, as_json: bool) -> int:
    if name == "default":
        ask: tuple[Any, ...] = ("HDEL", client.keys.policy, "wanted", "error", "asked")
    else:
        ask = ("HSET", client.keys.policy, "wanted", name, "error", "", "asked", "")
    before = status(client).get("current", "")
    client.ask(Ask((ask,)))
    until = time.monotonic() + WAIT_S
    live = status(client)
    while time.monotonic() < until and not live.get("asked"):
        time.sleep(0.1)
        live = status(client)
    if live.get("error"):
        fail(live["error"])
        client.ask(Ask((("HDEL", client.keys.policy, "wanted", "error"),)))
        return Exit.USAGE
    if not live.get("asked"):
        fail(f"no coordinator has answered for {WAIT_S:.0f} s; it will take {name} up when it runs")
        return Exit.NOT_YET
    if as_json:
        print_json({"before": before, "current": live["current"]})
    else:
        print(f"policy: {before or '(none)'} → {live['current']}")
    return Exit.OK


def status(client: Client) -> dict[str, str]:
    """What the leader has written down of its policy."""
    (raw,) = client.ask(Ask((("HGETALL", client.keys.policy),)))
    pairs = raw.items() if isinstance(raw, dict) else zip(raw[::2], raw[1::2], strict=True)
    return {k.decode(): v.decode("utf-8", "replace") for k, v in pairs}
