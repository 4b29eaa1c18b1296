"""Push a job: slackwater submit "a red circle" --width 128 --wait --save out

Every parameter of the model, and slo_ms, priority, …, goes as --name value or -p name=value.
Prints the job's id; with --wait how it ended.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from services.cli import terminal
from services.cli.terminal import Exit, exit_of, fail, print_json, result_json, seconds

if TYPE_CHECKING:
    from common.client import JobHandle
    from common.record import JobRecord

# Flags of this command itself, and whether a value follows; all others are parameters.
OWN = {
    "--id": True, "--eta": False, "--wait": False, "--save": True, "--timeout": True,
    "--json": False, "--redis": True, "--prefix": True, "--help": False, "--param": True,
}  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "slackwater submit PROMPT [--NAME VALUE …] [-p NAME=VALUE …] [--id ID] [--eta] "
        "[--wait] [--timeout S] [--save DIR] [--json] [--redis URL] [--prefix PREFIX]"
    )
    parser.add_argument("prompt", metavar="PROMPT")
    parser.add_argument(
        "-p", "--param", action="append", default=[], metavar="NAME=VALUE",
        help="a parameter of the job; --NAME VALUE says the same",
    )  # fmt: skip
    parser.add_argument("--id", help="id of your own; same id and content is the same job")
    parser.add_argument(
        "--eta", action="store_true", help="say when it should be done, and whether in time"
    )
    parser.add_argument("--wait", action="store_true", help="wait until the job has ended")
    parser.add_argument("--timeout", type=float, metavar="S", help="wait up to S seconds")
    parser.add_argument("--save", metavar="DIR", help="wait, and write the pictures to DIR")
    terminal.add_json(parser)
    terminal.add_connection(parser)


def prepare(words: list[str]) -> list[str]:
    """Turn --NAME VALUE of parameters into -p NAME=VALUE, which argparse can tell apart."""
    out: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--":
            return [*out, word, *words[at:]]
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            out.append(word)
            if word == "-p" and at < len(words):
                out.append(words[at])
                at += 1
        elif name in OWN:
            out.append(word)
            if OWN[name] and not equals and at < len(words):
                out.append(words[at])
                at += 1
        else:
            if not equals:
                if at == len(words) or words[at].startswith("--"):
                    fail(f"{name} needs a value, such as {name} 1 or {name} true")
                    raise SystemExit(Exit.USAGE)
                value = words[at]
                at += 1
            out += ["-p", f"{name[2:].replace('-', '_')}={value}"]
    return out


def run(args: argparse.Namespace) -> int:
    fields = {"prompt": args.prompt}
    for param in args.param:
        name, equals, value = param.partition("=")
        if not equals or not name:
            fail(f"-p {param}: must be NAME=VALUE")
            return Exit.USAGE
        if name in fields:
            fail(f"{name} is given twice")
            return Exit.USAGE
        if name == "id":
            fail("give the id with --id")
            return Exit.USAGE
        fields[name] = value
    until = None if args.timeout is None else time.monotonic() + args.timeout
    with terminal.client_of(args) as client:
        job = client.submit_text(fields, id=args.id)
        record = _admitted(job, until) if args.eta else None
        waits = args.wait or args.save or args.timeout is not None
        if record and not args.json:
            _say_eta(record)
        if record and (terminal.is_refused(record) or not waits):
            if args.json:
                print_json(record.to_json())
            return exit_of(job.wait()) if record.is_terminal else Exit.OK
        if not waits:
            print_json({"id": job.id, "entry": job.ticket.entry}) if args.json else print(job.id)
            return Exit.OK
        if sys.stdout.isatty() and not args.json:
            from services.cli.watch import follow

            [result] = follow(client, [job], _left_s(until), as_json=False)
        else:
            result = job.wait(_left_s(until))
        saved = terminal.save(job, result, args.save)
    if args.json:
        admitted = {"admitted": record.to_json()} if record else {}
        print_json({**result_json(result), "saved": saved, **admitted})
    else:
        print("\n".join([*terminal.summary(result), *(f"  {path}" for path in saved)]))
    return exit_of(result)


def _left_s(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())


def _admitted(job: JobHandle, until: float | None) -> JobRecord:
    """What the pool has decided. Raises WaitTimeout."""
    from common.errors import WaitTimeout

    try:
        return job.admitted(_left_s(until))
    except WaitTimeout as error:
        raise WaitTimeout(
            f"{job.id} was pushed, and no coordinator has read it in the given time; it waits"
        ) from error


def _say_eta(record: JobRecord) -> None:
    if terminal.is_refused(record):
        fail(record.error)
    elif record.is_terminal:
        print(f"{record.id} has ended: {record.status}")
    else:
        effort = " as best effort: it will probably be late" * (record.admission == "best_effort")
        due_s = (record.eta_s or 0.0) - (record.as_of_s or 0.0)
        off = record.eta_margin_s
        doubt = f", give or take {seconds(off)}: its size was never measured" if off else ""
        print(f"{record.id} accepted{effort}; expected in {seconds(due_s)}{doubt}")
