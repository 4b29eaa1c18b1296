"""Active jobs in queue order, and with --workers who works on them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from common import asks
from common.record import WorkerRecord
from services.cli import terminal
from services.cli.terminal import Exit, fail, print_json, seconds


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="also jobs that have ended")
    parser.add_argument("--workers", action="store_true", help="show the workers instead")
    terminal.add_json(parser)
    terminal.add_connection(parser)


def run(args: argparse.Namespace) -> int:
    with terminal.client_of(args) as client:
        if args.workers:
            workers = client.workers()
            if args.json:
                print_json([worker.to_json() for worker in workers])
                return Exit.OK
            _table(
                ("worker", "stage", "model", "host", "device", "pid", ""),
                [
                    (w.name, w.stage, " ".join(w.models), w.host, w.device, str(w.pid),
                     _state(w))
                    for w in workers
                ],
                "no workers",
            )  # fmt: skip
            return Exit.OK
        records = client.ps(ended=args.all)
        if sum(not record.content for record in records) >= asks.PUSHES:
            fail(f"of the pushes that nobody has read yet only the first {asks.PUSHES:,} are shown")
        if args.json:
            print_json([record.to_json() for record in records])
            return Exit.OK
        now = time.time()
        rows = [
            (
                r.id,
                r.status if r.is_terminal or r.status == "queued" else r.stage or r.status,
                f"{r.step}/{r.steps}" if r.steps else "",
                "" if r.queue_position is None else str(r.queue_position),
                seconds(r.slack_s),
                seconds(max(0.0, now - r.created_s)) if r.created_s else "",
                f"{r.width}x{r.height}" if r.width else "",
                r.error or r.prompt[:60],
            )
            for r in records
        ]
        head = ("job", "status", "steps", "ahead", "slack", "age", "size", "prompt")
        _table(head, rows, "no jobs" if args.all else "no active jobs")
        if records and not client.workers():
            print("no workers are there: the jobs wait")
    return Exit.OK


def _state(worker: WorkerRecord) -> str:
    said = []
    if worker.draining:
        said.append("draining")
    if worker.hung:
        said.append("deaf" if worker.hung == "deaf" else f"hung (seq {worker.hung})")
    if worker.late_reports:
        said.append(f"{worker.late_reports} late reports")
    return ", ".join(said)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], nothing: str) -> None:
    """Columns as wide as they need: it is read by people and by grep, so nothing is cut."""
    if not rows:
        print(nothing)
        return
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
