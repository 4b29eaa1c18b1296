"""What the commands share: exit codes, the connection flags, errors in words, small formats."""

from __future__ import annotations

import argparse
import json
import os
import sys
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.client import Client, JobHandle
    from common.job import Result
    from common.record import JobRecord
    from common.settings import Settings


class Exit(IntEnum):
    """docs/cli.md has the table."""

    OK = 0
    FAILED = 1  # a job failed, expired or was canceled; a pool could not be started
    USAGE = 2  # argparse's own
    REFUSED = 3  # invalid_request, conflict, queue_full
    NOT_YET = 4  # the job has not ended, or not in the given time
    NO_REDIS = 5
    UNKNOWN = 6  # no such job, or its result has expired
    REDIS_REFUSES = 7  # a right that the user lacks, no room, no writes for now
    INTERRUPTED = 130


# A person waits: say soon that nothing is there.
PATIENCE_S = 5.0


def add_connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--redis",
        metavar="URL",
        help="the pool's Redis (SLACKWATER_REDIS_URL; else that of a running `slackwater up`, else "
        "redis://127.0.0.1:6379/0)",
    )
    parser.add_argument("--prefix", help="key prefix (SLACKWATER_PREFIX; default sw:)")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def client_of(args: argparse.Namespace) -> Client:
    from common.client import DEFAULT_URL, Client
    from services.pool.state_dir import running

    url = args.redis or os.environ.get("SLACKWATER_REDIS_URL")
    prefix = args.prefix or os.environ.get("SLACKWATER_PREFIX")
    if url is None:
        pool = running()
        url = pool.redis_url if pool else DEFAULT_URL
        prefix = prefix or (pool.prefix if pool else None)
    try:
        return Client(url, prefix=prefix or "sw:", patience=PATIENCE_S)
    except ValueError as error:
        fail(f"--redis: {error}")
        raise SystemExit(Exit.USAGE) from error


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings among the flags given, else from the environment; a bad one ends the command."""
    from pydantic import ValidationError

    from common.settings import Settings, problems

    known = Settings.model_fields
    given = {k: v for k, v in vars(args).items() if k in known and v is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        for line in problems(error):
            fail(line)
        raise SystemExit(Exit.USAGE) from error


def fail(message: str) -> None:
    print(f"slackwater: {message}", file=sys.stderr)


def print_json(value: Any) -> None:
    print(json.dumps(value, default=str, ensure_ascii=False), flush=True)


def result_json(result: Result) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(result)


def exit_of(result: Result) -> Exit:
    """The exit code that stands for how a job ended."""
    from common.errors import JobRefused

    if result.status == "succeeded":
        return Exit.OK
    return Exit.REFUSED if result.error_code in JobRefused.CODES else Exit.FAILED


def is_refused(record: JobRecord) -> bool:
    """Whether the pool took the push for no job."""
    from common.errors import JobRefused

    return record.is_terminal and record.error_code in JobRefused.CODES


def save(job: JobHandle, result: Result, directory: str | None) -> list[Path]:
    """Write the pictures of a job that succeeded, if it is asked for; a place that cannot be
    written ends the command."""
    from common.errors import SlackwaterError

    if not directory or result.status != "succeeded":
        return []
    try:
        return job.save(directory)
    except SlackwaterError:  # among them one that is an OSError: Redis is away
        raise
    except OSError as error:
        fail(f"--save: {error}; `slackwater result {job.id} --save DIR` writes them elsewhere")
        raise SystemExit(Exit.USAGE) from error


def seconds(value: float | None) -> str:
    """ "1.8 s", "−3.2 s", "2 min 5 s"; "" for None."""
    if value is None:
        return ""
    sign, value = "−" if value <= -0.05 else "", abs(value)  # no “−0.0 s”
    if value < 100:
        return f"{sign}{value:.1f} s"
    if value < 6000:
        return f"{sign}{value // 60:.0f} min {value % 60:.0f} s"
    return f"{sign}{value / 3600:.1f} h"


def summary(result: Result) -> list[str]:
    """A result in lines: how it ended, where the time went, what to know."""
    lines = [f"{result.id} {result.status}{f': {result.error}' if result.error else ''}"]
    t = result.timings
    if t:
        late = {True: "on time", False: "late", None: ""}[result.on_time]
        parts = [
            f"{name} {seconds(t[key])}"
            for name, key in (("run", "run_s"), ("wait", "wait_s"), ("total", "total_s"))
            if key in t
        ]
        lines.append("  " + ", ".join(filter(None, [*parts, late])))
    if result.seed is not None and result.status == "succeeded":
        lines.append(f"  seed {result.seed}")
    lines += [f"  note: {note}" for note in result.notes]
    if result.retry_after_s:
        lines.append(f"  try again in {seconds(result.retry_after_s)}")
    return lines
