"""Sweep up what deaths and accidents have left in a pool's Redis: counts by kind. The leader does
it once a minute too.

Nothing that a job needs is touched, whatever runs meanwhile.
"""

from __future__ import annotations

import argparse

from services.cli import terminal
from services.cli.terminal import Exit, print_json


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only say what is there")
    parser.add_argument(
        "--arena", metavar="PATH",
        help="also free, in this arena of the pool on this host, blocks of jobs that have ended",
    )  # fmt: skip
    terminal.add_json(parser)
    terminal.add_connection(parser)


def run(args: argparse.Namespace) -> int:
    from common.arena import Arena, ArenaError
    from common.arena_file import is_arena
    from common.connect import writing
    from services.janitor import sweep
    from services.janitor.orphans import KINDS

    if args.arena and not is_arena(args.arena):  # opening it would make one
        terminal.fail(f"--arena: there is no arena of this version at {args.arena}")
        return Exit.USAGE
    with terminal.client_of(args) as client:
        url, prefix = client.url, client.keys.prefix
    settings = terminal.settings_of(argparse.Namespace(redis_url=url, prefix=prefix))
    try:
        arena = Arena.open(args.arena) if args.arena else None
    except ArenaError as error:
        terminal.fail(f"--arena: {error}")
        return Exit.USAGE
    redis = writing(url)
    try:
        found = sweep(redis, settings, act=not args.dry_run, arena=arena)
    finally:
        redis.close()
        if arena is not None:
            arena.close()
    if args.json:
        print_json(found)
        return Exit.OK
    if not found:
        print("nothing was left over")
    for kind, what in KINDS.items():
        if kind in found:
            print(f"{found[kind]:6}  {kind:<9} {what}")
    return Exit.OK
