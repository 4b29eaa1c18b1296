"""One self-contained HTML page: Gantt charts, latency curves, the table. No network, one file.

The parts are in the folder page/; this puts a run's data and the parts into one text.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.simulator.outcome import JobOutcome
from services.simulator.report import HEAD, cells
from services.timeline.colors import JOBS, LATE, POLICIES, REFUSED, in_turn, of_classes
from services.timeline.runs import Bar, Run, classes_of, figures, said_of

PARTS = Path(__file__).parent / "page"
SCRIPTS = ("data.js", "gantt.js", "curves.js", "main.js")
FIRST_BARS = 150  # on one rank, when the page opens
ENDS = ("done", "error", "refused", "returned", "member")  # as page/data.js numbers them


def page(
    runs: Sequence[Run], title: str, said: str, *, live: bool = False,
    window: tuple[float, float] | None = None,
) -> str:  # fmt: skip
    """The page as text. `window` is what is seen first, in seconds on the runs' clock; `live`
    labels times as times of day."""
    filled = {
        "title": html.escape(title),
        "said": html.escape(said),
        "css": _part("page.css"),
        "script": "\n".join(_part(name) for name in SCRIPTS),
        "table": _table([figures(run) for run in runs]),
        # Inside a script element only "<" could end it.
        "data": json.dumps(_data(runs, live, window), separators=(",", ":")).replace(
            "<", "\\u003c"
        ),
    }
    pieces = _part("page.html").split("{{")
    text = pieces[0]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        text += filled[name] + rest
    return text


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8").rstrip("\n")


def _data(runs: Sequence[Run], live: bool, window: tuple[float, float] | None) -> dict[str, Any]:
    begin_s = min(run.begin_s for run in runs)
    length_s = max(max(run.end_s for run in runs) - begin_s, 1e-3)
    first, last = window or (begin_s, _first_view(runs))
    classes = classes_of(runs)
    curves = in_turn([run.name for run in runs], POLICIES)
    return {
        "zero": begin_s,
        "epoch": begin_s if live else None,
        "length": length_s,
        "window": [max(0.0, first - begin_s), min(length_s, last - begin_s)],
        "classes": list(of_classes(classes).items()),
        "series": JOBS,
        "late": LATE,
        "refused": REFUSED,
        "runs": [
            {
                "name": run.name,
                "said": said_of(run),
                "color": curves[run.name],
                "ranks": [[rank, run.labels[rank], run.stage_of[rank]] for rank in run.ranks],
                **_bars_and_jobs(run, classes, begin_s),
            }
            for run in runs
        ],
    }


def _first_view(runs: Sequence[Run]) -> float:
    """Up to when the busiest rank has no more bars than an eye can tell apart."""
    ends = [run.end_s for run in runs]
    for run in runs:
        seen = dict.fromkeys(run.ranks, 0)
        for bar in run.bars:
            seen[bar.rank] += 1
            if seen[bar.rank] > FIRST_BARS:
                ends.append(bar.start_s)
                break
    return min(ends)


def _bars_and_jobs(run: Run, classes: Sequence[str], zero_s: float) -> dict[str, Any]:
    """Jobs and ranks are named by their place: a page of 20,000 chunks stays small."""
    unknown = [job for job in run.shown if job not in run.jobs]
    place = {job: i for i, job in enumerate([*run.jobs, *unknown])}
    rank = {name: i for i, name in enumerate(run.ranks)}
    jobs: list[list[Any]] = [
        _job(run, job, classes.index(job.job.request_class), zero_s) for job in run.jobs.values()
    ]
    jobs += [[job, -1, 0, 0, None, None, "unknown", 0, 0, ""] for job in unknown]
    return {"bars": [_bar(bar, rank, place, zero_s) for bar in run.bars], "jobs": jobs}


def _job(run: Run, found: JobOutcome, place: int, zero_s: float) -> list[Any]:
    job = found.job

    def at(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds - zero_s, 3)

    return [
        job.id, place, at(job.arrival_s), at(job.deadline_s), at(found.started_s),
        at(found.finished_s), found.status, job.steps, int(run.missed(job.id)),
        f"{job.width}x{job.height}" if job.width else "",
    ]  # fmt: skip


def _bar(bar: Bar, rank: dict[str, int], place: dict[str, int], zero_s: float) -> list[Any]:
    rows = [
        [
            place[row.job], row.start, row.stop, row.planned,
            None if row.slack_s is None else round(row.slack_s, 3), ENDS.index(row.end),
        ]
        for row in bar.rows
    ]  # fmt: skip
    begin, end = round(bar.start_s - zero_s, 4), round(bar.end_s - zero_s, 4)
    return [rank[bar.rank], begin, end, bar.seq, int(bar.asked), rows]


def _table(reports: Sequence[dict[str, Any]]) -> str:
    lines = ["<table>", f"<tr>{_cells('th', HEAD)}</tr>"]
    for row in cells(reports):
        kind = ' class="first"' if row[0] else ""
        lines.append(f"<tr{kind}>{_cells('td', row)}</tr>")
    return "\n".join([*lines, "</table>"])


def _cells(kind: str, words: Sequence[str]) -> str:
    return "".join(f"<{kind}>{html.escape(word)}</{kind}>" for word in words)
