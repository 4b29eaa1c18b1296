"""The `slackwater` command. A subcommand is a module with `configure(parser)` and `run(args)`,
imported only when it is asked for, so that `slackwater --help` is quick."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from services.cli.terminal import Exit, fail

# name -> (module, what `slackwater --help` says)
COMMANDS = {
    "up": ("services.cli.up", "start a pool on this machine: Redis, coordinator, workers"),
    "submit": ("services.cli.submit", "push a job"),
    "watch": ("services.cli.watch", "follow jobs until they end"),
    "result": ("services.cli.result", "how a job ended; save its pictures"),
    "cancel": ("services.cli.cancel", "cancel jobs"),
    "ps": ("services.cli.ps", "active jobs in queue order, and workers"),
    "dead": ("services.cli.dead", "jobs that failed again and again: list, show, retry"),
    "drain": ("services.cli.drain", "ask workers to hand back their work and leave"),
    "restart": ("services.cli.restart", "replace the workers of a running pool one by one"),
    "scale": ("services.cli.scale", "change the number of workers of a running pool"),
    "profile": ("services.cli.profile", "measure a model's stages and fit a cost table"),
    "timeline": ("services.cli.timeline", "what the ranks did and when, as a Gantt chart"),
    "record": ("services.cli.record", "write a live pool's jobs as a trace"),
    "policies": ("services.cli.policies", "scheduling policies; which one leads; change it"),
    "simulate": ("services.cli.simulate", "run a trace through policies, without a machine"),
    "janitor": ("services.cli.janitor", "sweep up what deaths have left in Redis"),
    "acl": ("services.cli.acl", "print Redis users for a pool, one for each role"),
    "down": ("services.cli.down", "stop a running pool"),
}


def usage() -> str:
    lines = ["usage: slackwater COMMAND …", "", "commands:"]
    lines += [f"  {name:<9} {text}" for name, (_, text) in COMMANDS.items()]
    lines += ["", "`slackwater COMMAND --help` says more; docs/cli.md has everything."]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run one command; the process' exit code (services/cli/terminal.py)."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return Exit.OK if words else Exit.USAGE
    if words[0] == "--version":
        print(f"slackwater {_version()}")
        return Exit.OK
    name = words[0]
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(COMMANDS)}"
        fail(f"no command {name!r}{hint}")
        return Exit.USAGE
    return run(importlib.import_module(COMMANDS[name][0]), name, words[1:])


def run(command: Any, name: str, words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        f"slackwater {name}",
        description=command.__doc__.split("\n\n")[0],
        allow_abbrev=False,
    )
    command.configure(parser)
    try:
        if hasattr(command, "prepare"):
            words = command.prepare(words)
        args = parser.parse_args(words)
    except SystemExit as stop:  # argparse has said why
        return int(stop.code or 0)
    try:
        return int(command.run(args))
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:  # `slackwater ps | head`
        sys.stderr.close()
        return Exit.OK
    except SystemExit as stop:
        return int(stop.code or 0)
    except Exception as error:
        found = said_of(error)
        if found is None:
            raise
        code, message = found
        fail(message)
        return code


def said_of(error: Exception) -> tuple[Exit, str] | None:
    """The exit code and the line of an error for which a line is enough; None for a bug."""
    from common import errors
    from common.checks import InvalidRequest

    match error:
        case InvalidRequest() | errors.JobRefused():
            return Exit.REFUSED, str(error)
        case errors.JobError():
            return Exit.FAILED, str(error)
        case errors.WaitTimeout():
            return Exit.NOT_YET, str(error)
        case errors.UnknownJob() | errors.ResultExpired():
            return Exit.UNKNOWN, str(error)
        case errors.RedisAway():
            return Exit.NO_REDIS, str(error)
    from redis import exceptions

    from common.acl import NO_RIGHT

    match error:
        case exceptions.NoPermissionError():
            return Exit.REDIS_REFUSES, NO_RIGHT.format(error)
        case exceptions.ConnectionError() | exceptions.TimeoutError():
            return Exit.NO_REDIS, f"Redis is away: {error}"
        case exceptions.RedisError():
            return Exit.REDIS_REFUSES, f"Redis refused it: {error}"
    return None


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("slackwater")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
