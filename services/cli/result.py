"""How a job ended: its error or its timings, its effective parameters; saves its pictures."""

from __future__ import annotations

import argparse

from services.cli import terminal
from services.cli.terminal import Exit, exit_of, fail, print_json, result_json


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID")
    parser.add_argument("--save", metavar="DIR", help="write the pictures to DIR")
    terminal.add_json(parser)
    terminal.add_connection(parser)


def run(args: argparse.Namespace) -> int:
    with terminal.client_of(args) as client:
        job = client.job(args.id)
        result = job.result()
        if result is None:
            from services.cli.watch import describe

            fail(f"job {args.id} has not ended: {describe(job.status())}")
            return Exit.NOT_YET
        saved = terminal.save(job, result, args.save)
    if args.json:
        print_json({**result_json(result), "saved": saved})
        return exit_of(result)
    lines = terminal.summary(result)
    if result.params:
        given = (f"{k}={v}" for k, v in result.params.items() if v not in (None, ""))
        lines.append("  " + " ".join(given))
    lines += [f"  {o.mime} {o.width}x{o.height}, {o.bytes} bytes" for o in result.outputs]
    print("\n".join([*lines, *(f"  {path}" for path in saved)]))
    return exit_of(result)
