"""A Gantt chart in characters: one line a rank, half a character the unit of time.

With color a job's class (or the job) is its color; a letter says the same where there is none.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from string import ascii_letters

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.style import Style
from rich.text import Text

from services.timeline.colors import JOBS, LATE, REFUSED, Pair, in_turn, of_classes
from services.timeline.runs import Bar, Run

MISS = "▲"
TICK_COLUMNS = 12
# A letter at the begin of a job's stretch of at least so many half characters.
LETTER_HALVES = 4
SHOWN = 24  # entries of a legend of jobs


class Gantt:
    """`run` as rich can print it; `by` is "class" or "job", `clock` labels times of day."""

    def __init__(self, run: Run, by: str = "class", clock: bool = True, dark: bool = True) -> None:
        self.run, self.by, self.clock, self.ground = run, by, clock, int(dark)
        names = list(run.classes) if by == "class" else list(run.shown)
        self.colors: Mapping[str, Pair] = (
            of_classes(names) if by == "class" else in_turn(names, JOBS)
        )
        self.letters = {n: ascii_letters[i % len(ascii_letters)] for i, n in enumerate(names)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.run.bars:
            yield Text("nothing ran in this time")
            return
        label = max(map(cell_len, self.run.labels.values())) + 2
        width = max(10, options.max_width - label - 1)
        mono = console.color_system is None
        yield Group(*(self._rank(rank, label, width, mono) for rank in self.run.ranks))
        late = [name for name in self.run.shown if self.run.missed(name)]
        if late:
            yield self._misses(late, label, width)
        yield self._axis(label, width)
        yield self._legend(late, mono)

    # -- lines ---------------------------------------------------------------------------

    def _rank(self, rank: str, label: int, width: int, mono: bool) -> Text:
        halves = self._halves(rank, 2 * width)
        text = Text(self.run.labels[rank].ljust(label), no_wrap=True)
        told = None  # the job whose letter stands to the left
        for column in range(width):
            left, right = halves[2 * column], halves[2 * column + 1]
            job = right if right is not None else left
            if mono:
                text.append(" " if job is None else self._letter(job))
                continue
            if left is None and right is None:
                told = None
            starts = job is not None and job != told and self._alike(left, right)
            if starts and self._alike(*halves[2 * column : 2 * column + LETTER_HALVES]):
                told = job
                style = Style(color="black", bgcolor=self._color(job))
                text.append(self._letter(job or ""), style)
            else:
                text.append(*self._cell(left, right))
        return text

    def _halves(self, rank: str, count: int) -> list[str | None]:
        """For each half character the job that the rank was busiest with, None where idle, ""
        where the work counted for nobody."""
        jobs: list[str | None] = [None] * count
        most = [0.0] * count
        scale = count / max(1e-9, self.run.end_s - self.run.begin_s)
        for bar in self.run.bars:
            if bar.rank != rank:
                continue
            first = max(0.0, (bar.start_s - self.run.begin_s) * scale)
            last = min(float(count), (bar.end_s - self.run.begin_s) * scale)
            for half in range(int(first), min(count, int(last) + 1)):
                share = min(last, half + 1) - max(first, half)
                if share > most[half]:
                    most[half], jobs[half] = share, _job_of(bar)
        return jobs

    def _name(self, job: str) -> str:
        """What a job's color stands for."""
        found = self.run.jobs.get(job)
        return job if self.by == "job" else found.job.request_class if found else ""

    def _letter(self, job: str) -> str:
        return self.letters.get(self._name(job), "x")

    def _color(self, job: str | None) -> str:
        return self._shade(self._name(job or ""))

    def _shade(self, name: str) -> str:
        return self.colors.get(name, REFUSED)[self.ground]

    def _alike(self, *jobs: str | None) -> bool:
        return None not in jobs and len({self._color(job) for job in jobs}) == 1

    def _cell(self, left: str | None, right: str | None) -> tuple[str, Style]:
        if left is None and right is None:
            return "·", Style(dim=True)
        if left is None:
            return "▐", Style(color=self._color(right))
        ground = None if right is None else self._color(right)
        return "▌", Style(color=self._color(left), bgcolor=ground)

    def _misses(self, late: Sequence[str], label: int, width: int) -> Text:
        """Where jobs ended too late, or became late."""
        scale = width / max(1e-9, self.run.end_s - self.run.begin_s)
        line = [" "] * width
        for name in late:
            job = self.run.jobs[name]
            at = job.job.deadline_s if job.finished_s is None else job.finished_s
            column = int((at - self.run.begin_s) * scale)
            if 0 <= column < width:
                line[column] = MISS
        text = Text("late".ljust(label), no_wrap=True)
        return text.append("".join(line).rstrip(), Style(color=LATE[self.ground]))

    def _axis(self, label: int, width: int) -> Text:
        span = self.run.end_s - self.run.begin_s
        every = round_step(span * TICK_COLUMNS / width)
        line = ""
        at = math.ceil(self.run.begin_s / every) * every
        while at < self.run.end_s:
            column = int((at - self.run.begin_s) * width / span)
            mark = "╵" + self._time(at)
            if column + len(mark) <= width:
                line = line.ljust(column)[:column] + mark
            at += every
        return Text(" " * label + line, style="dim", no_wrap=True)

    def _time(self, at_s: float) -> str:
        if self.clock:
            return time.strftime("%H:%M:%S", time.localtime(at_s))
        return f"{at_s:.6g} s"

    def _legend(self, late: Sequence[str], mono: bool) -> Text:
        text = Text()
        for name in list(self.colors)[:SHOWN]:
            style = Style() if mono else Style(color="black", bgcolor=self._shade(name))
            text.append(f" {self.letters[name]} ", style).append(f" {short(name)}   ")
        if len(self.colors) > SHOWN:
            text.append(f"and {len(self.colors) - SHOWN} more   ")
        if late:
            style = Style() if mono else Style(color=LATE[self.ground])
            text.append(f"{MISS} missed its deadline ", style)
        return text.append(f"({len(late)} of {len(self.run.shown)} late)", "dim")


def _job_of(bar: Bar) -> str:
    """A bar's first job whose work counted, "" if there is none."""
    return next((row.job for row in bar.rows if row.end in ("done", "member")), "")


def short(job: str) -> str:
    """An id that a client drew at random says little beyond its beginning."""
    return job[:8] if re.fullmatch("[0-9a-f]{32}", job) else job


def round_step(least_s: float) -> float:
    """The shortest time between ticks that people count in, of at least `least_s`."""
    counted = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)
    return next((step for step in counted if step >= least_s), 3600 * math.ceil(least_s / 3600))


def gantts(runs: Sequence[Run], by: str, clock: bool) -> Group:
    """Several runs under each other."""
    parts: list[Gantt | Text] = []
    for run in runs:
        if len(runs) > 1:
            parts.append(Text(run.name, style="bold"))
        parts.append(Gantt(run, by, clock))
    return Group(*parts)
