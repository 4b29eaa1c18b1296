"""Jobs that failed again and again: which, why, and the same once more.

slackwater dead list | show ID | retry ID…
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from services.cli import terminal
from services.cli.dead_letters import Letter, push_again, read_letters
from services.cli.terminal import Exit, fail, is_refused, print_json, seconds

if TYPE_CHECKING:
    from common.client import Client


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="list|show|retry", required=True)
    listing = actions.add_parser("list", help="all of them, oldest first")
    show = actions.add_parser("show", help="one, with its parameters and the last traceback")
    retry = actions.add_parser("retry", help="push the same parameters again, under a new id")
    show.add_argument("id", metavar="ID")
    retry.add_argument("ids", nargs="+", metavar="ID")
    retry.add_argument(
        "--wait", type=float, default=10.0, metavar="S",
        help="how long to wait until the pool has accepted each (default 10)",
    )  # fmt: skip
    for part in (listing, show, retry):
        terminal.add_json(part)
        terminal.add_connection(part)


def run(args: argparse.Namespace) -> int:
    with terminal.client_of(args) as client:
        letters = read_letters(client)
        if args.action == "show":
            return _show(letters, args.id, args.json)
        if args.action == "retry":
            return _retry(client, letters, args)
        return _list(letters, args.json)


def _list(letters: dict[str, Letter], as_json: bool) -> int:
    if as_json:
        print_json([letter.to_json() for letter in letters.values()])
        return Exit.OK
    if not letters:
        print("no dead letters")
    now = time.time()
    for letter in letters.values():
        age = seconds(max(0.0, now - letter.at_s))
        print(f"{letter.job}  {age} ago  {letter.error_code}  {letter.error}")
    return Exit.OK


def _show(letters: dict[str, Letter], id: str, as_json: bool) -> int:
    letter = letters.get(id)
    if letter is None:
        fail(f"no dead letter of {id!r}; `slackwater dead list` shows those there are")
        return Exit.UNKNOWN
    if as_json:
        print_json(letter.to_json())
        return Exit.OK
    print(f"{letter.job} failed at {letter.place}, {letter.attempts} attempts")
    print(f"  {letter.error_code}: {letter.error}")
    for name, value in letter.push().items():
        print(f"  {name} {value}")
    if letter.trace:
        print("the last traceback:")
        print(letter.trace)
    return Exit.OK


def _retry(client: Client, letters: dict[str, Letter], args: argparse.Namespace) -> int:
    """The letter of a job that is not accepted stays."""
    worst = Exit.OK
    for id in dict.fromkeys(args.ids):
        letter = letters.get(id)
        if letter is None:
            fail(f"no dead letter of {id!r}; `slackwater dead list` shows those there are")
            worst = Exit.UNKNOWN
            continue
        new, record = push_again(client, letter, args.wait)
        if record is None:
            fail(f"{new} was pushed, and not accepted within {args.wait:g} s; {id} stays")
            worst = Exit.NOT_YET
        elif is_refused(record):
            fail(f"{new} was refused: {record.error}; {id} stays")
            worst = Exit.REFUSED
        elif args.json:
            print_json({"id": id, "retry": new})
        else:
            print(f"{id} was pushed again as {new}")
    return worst
