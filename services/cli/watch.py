"""Follow jobs until they end: stage, steps, queue position, slack.

On a terminal one bar a job; elsewhere one line for every change; with --json one record a line.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from services.cli import terminal
from services.cli.terminal import Exit, exit_of, print_json, result_json, seconds

if TYPE_CHECKING:
    from common.client import Client, JobHandle
    from common.job import Result
    from common.record import JobRecord

# Often enough for a bar to look alive; a job's record changes at most 20 times a second.
LOOK_S = 0.1
# Lines, where nobody sees a bar: a stage at once, steps this often at most.
LINE_S = 2.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", nargs="+", metavar="ID")
    parser.add_argument("--timeout", type=float, metavar="S", help="give up after S seconds")
    terminal.add_json(parser)
    terminal.add_connection(parser)


def run(args: argparse.Namespace) -> int:
    with terminal.client_of(args) as client:
        handles = [client.job(id) for id in dict.fromkeys(args.ids)]
        results = follow(client, handles, args.timeout, args.json)
    worst = Exit.OK
    for result in results:
        if args.json:
            print_json(result_json(result))
        else:
            print("\n".join(terminal.summary(result)))
        worst = max(worst, exit_of(result))
    return worst


def follow(
    client: Client, handles: Sequence[JobHandle], timeout: float | None, as_json: bool
) -> list[Result]:
    """Show jobs until all have ended; their results, in order. Raises WaitTimeout."""
    deadline = None if timeout is None else time.monotonic() + timeout
    if as_json or not sys.stdout.isatty():
        _follow_in_lines(handles, deadline, as_json)
    else:
        _follow_in_bars(client, handles, deadline)
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    return [handle.wait(left) for handle in handles]


def _follow_in_lines(handles: Sequence[JobHandle], deadline: float | None, as_json: bool) -> None:
    shown: dict[str, tuple[object, object, float]] = {}  # id -> state, place, when it was said
    for handle, record in _records(handles, deadline):
        now = time.monotonic()
        state = (record.status, record.stage)
        place = (record.step, record.queue_position)
        old_state, old_place, said = shown.get(handle.id, (None, None, 0.0))
        if state != old_state or (place != old_place and now - said >= LINE_S):
            shown[handle.id] = (state, place, now)
            if as_json:
                print_json(record.to_json())
            elif not record.is_terminal:
                print(f"{handle.id} {describe(record)}", flush=True)


def _follow_in_bars(client: Client, handles: Sequence[JobHandle], deadline: float | None) -> None:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.fields[job]}", style="bold"),
        BarColumn(),
        TextColumn("{task.completed:>3.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[what]}"),
    )
    with Progress(*columns) as progress:
        bars = {h.id: progress.add_task("", job=h.id[:12], total=1, what="") for h in handles}
        nobody = False
        for handle, record in _records(handles, deadline):
            waits = not record.stage and not record.is_terminal
            nobody = waits and (nobody or not client.workers())
            progress.update(
                bars[handle.id],
                completed=record.step,
                total=max(1, record.steps),
                what=describe(record, steps=False) + (" · no worker is there yet" * nobody),
            )


def _records(
    handles: Sequence[JobHandle], deadline: float | None
) -> Iterator[tuple[JobHandle, JobRecord]]:
    """Records as they are seen, until every job has ended or the deadline has passed."""
    left = list(handles)
    while left and (deadline is None or time.monotonic() < deadline):
        for handle in list(left):
            record = handle.status()
            yield handle, record
            if record.is_terminal:
                left.remove(handle)
        if left:
            time.sleep(LOOK_S)


def describe(record: JobRecord, steps: bool = True) -> str:
    """ "denoise 12/30 · slack 1.8 s", "queued, 3 ahead", "succeeded"."""
    if record.is_terminal:
        return record.status + (f": {record.error}" if record.error else "")
    if record.status == "queued":
        if not record.stage:
            text = "pushed"
        elif record.queue_position is None:
            text = "queued"
        else:
            text = f"queued, {record.queue_position} ahead"
    else:
        text = record.stage or record.status
        if steps and record.steps:
            text += f" {record.step}/{record.steps}"
    if record.admission == "best_effort":
        text += " · best effort"
    if record.slack_s is not None:
        text += f" · slack {seconds(record.slack_s)}"
    return text
