"""Runs as a picture: a panel a policy on one time axis. Needs matplotlib (the extra `report`).

In each panel a lane a rank, the jobs' arrivals above, and a number on each stretch of a job, the
same in every panel. What ran after its job's deadline is underlined in red, and a red mark shows
where such a job ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from services.timeline.colors import LATE, REFUSED, of_classes
from services.timeline.runs import Bar, Run, classes_of, said_of

WIDTH_PX, DPI = 1800, 150
# In pixels: heights of lanes, by whether they are what the eye should rest on.
WIDE, NARROW, ARRIVALS, GAP, HEAD, FOOT = 46, 20, 24, 7, 52, 92
MOST_WIDE = 8  # ranks; more are drawn narrower
LEFT, RIGHT = 120, 44
INK, MUTED, GRID, GROUND = "#1f1e1b", "#6f6d66", "#e4e2da", "#fcfcfa"
# A number needs this much room.
DIGIT_PX = 9
# A gap is drawn between bars of at least this width; a bar is never narrower than THIN_PX.
GAP_FROM_PX, THIN_PX = 5.0, 1.6


class NoMatplotlib(RuntimeError):
    """Says what to install."""


@dataclass(frozen=True)
class Lane:
    """Of one rank; pixels from the panel's top downward."""

    rank: str
    top: float
    height: float


def matplotlib() -> tuple[Any, Any]:
    """Its Agg canvas and its Figure, without pyplot's global state. Raises NoMatplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib(
            "--png needs matplotlib: pip install 'slackwater[report]' (--html needs nothing)"
        ) from error
    return FigureCanvasAgg, Figure


def draw(
    runs: Sequence[Run], path: str | Path, window: tuple[float, float] | None = None,
    live: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """Write `runs` as a PNG; its width and height in pixels. `window`: the part from … to, in
    seconds on the runs' clock; `live` labels times as times of day.

    Raises NoMatplotlib.
    """
    canvas, figure_class = matplotlib()
    begin_s, end_s = window or (min(r.begin_s for r in runs), max(r.end_s for r in runs))
    views = [run.within(begin_s, end_s) for run in runs]
    lanes = [list(_lanes(view)) for view in views]
    heights = [HEAD + ARRIVALS + _bottom(of) for of in lanes]
    size = WIDTH_PX, int(sum(heights)) + FOOT
    figure = figure_class(figsize=(size[0] / DPI, size[1] / DPI), dpi=DPI, facecolor=GROUND)
    canvas(figure)
    panels = _Panels(views, figure, size)
    top = 0.0
    for run, view, of, height in zip(runs, views, lanes, heights, strict=True):
        panels.draw(view, said_of(run), of, top, height)
        top += height
    panels.foot(live)
    figure.savefig(path, dpi=DPI, facecolor=GROUND)
    return size


def _lanes(run: Run) -> Iterator[Lane]:
    wide = sum(run.stage_of[rank] == "denoise" for rank in run.ranks)
    tall = WIDE if wide <= MOST_WIDE else max(6.0, WIDE * MOST_WIDE / wide)
    top = 0.0
    for rank in run.ranks:
        height = tall if run.stage_of[rank] == "denoise" else min(NARROW, tall)
        yield Lane(rank, top, height)
        top += height + min(GAP, height / 4)


def _bottom(lanes: Sequence[Lane]) -> float:
    return lanes[-1].top + lanes[-1].height + GAP if lanes else WIDE


class _Panels:
    """Draws panels one under the other; all lengths are pixels, times seconds."""

    def __init__(self, runs: Sequence[Run], figure: Any, size: tuple[int, int]) -> None:
        self.figure, self.width, self.height = figure, *size
        self.begin_s, self.end_s = runs[0].begin_s, runs[0].end_s
        self.colors: Mapping[str, tuple[str, str]] = of_classes(classes_of(runs))
        self.numbers = _numbers(runs)
        self.axes: Any = None

    def draw(self, run: Run, said: str, lanes: Sequence[Lane], top: float, height: float) -> None:
        inner = height - HEAD
        self.axes = axes = self.figure.add_axes(
            (
                LEFT / self.width,
                1 - (top + height) / self.height,
                (self.width - LEFT - RIGHT) / self.width,
                inner / self.height,
            )
        )
        axes.set_xlim(self.begin_s, self.end_s)
        axes.set_ylim(inner, 0)
        axes.set_facecolor(GROUND)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelsize=8, colors=MUTED, labelbottom=False)
        axes.set_yticks(
            [ARRIVALS / 2, *(ARRIVALS + lane.top + lane.height / 2 for lane in lanes)],
            ["arrivals", *(run.labels[lane.rank] for lane in lanes)],
        )
        axes.set_title(run.name, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
        axes.set_title(said, loc="right", fontsize=8.5, color=MUTED, pad=8)
        self._arrivals(run)
        for lane in lanes:
            self._lane(run, lane, [bar for bar in run.bars if bar.rank == lane.rank])

    def foot(self, live: bool) -> None:
        """The time axis, under the last panel, and the legend."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        self.axes.tick_params(axis="x", labelbottom=True)
        label = _time_of_day if live else _seconds
        self.axes.xaxis.set_major_formatter(label)
        handles: list[Any] = [Patch(color=c[0], label=name) for name, c in self.colors.items()]
        handles.append(
            Line2D([], [], color=LATE[0], linewidth=2.5, marker="v", markersize=5,
                   label="past its deadline")
        )  # fmt: skip
        self.figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(LEFT / self.width, 12 / self.height),
            ncols=len(handles),
            frameon=False,
            fontsize=8.5,
            labelcolor=INK,
            handlelength=1.2,
            columnspacing=1.8,
            borderpad=0,
            borderaxespad=0,
        )

    # -- one panel -----------------------------------------------------------------------

    def _px(self, seconds: float) -> float:
        return seconds * (self.width - LEFT - RIGHT) / max(1e-9, self.end_s - self.begin_s)

    def _arrivals(self, run: Run) -> None:
        close: list[list[tuple[float, str]]] = []  # whose labels would lie on each other
        for name, job in run.jobs.items():
            at = job.job.arrival_s
            if not self.begin_s <= at <= self.end_s:
                continue
            color = self.colors[job.job.request_class][0]
            self.axes.plot([at], [ARRIVALS - 5], marker="v", markersize=4.5, color=color)
            mark = (at, self.numbers[name])
            if close and self._px(at - _middle(close[-1])) < DIGIT_PX * (
                len(_label(close[-1])) / 2 + len(mark[1]) / 2 + 1
            ):
                close[-1].append(mark)
            else:
                close.append([mark])
        for marks in close:
            self._text(_middle(marks), ARRIVALS / 2 - 5, _label(marks), MUTED)

    def _lane(self, run: Run, lane: Lane, bars: Sequence[Bar]) -> None:
        top = ARRIVALS + lane.top
        boxes: dict[str, list[tuple[float, float]]] = {}
        late: list[tuple[float, float]] = []
        for bar in bars:
            for row, (at, share) in zip(bar.rows, _shares(top, lane.height, bar), strict=True):
                color = self._color(run, row.job, row.end)
                if len(bar.rows) > 1:
                    self._boxes([(bar.start_s, bar.end_s)], at, share, color)
                else:
                    boxes.setdefault(color, []).append((bar.start_s, bar.end_s))
                found = run.jobs.get(row.job)
                if found is not None and run.missed(row.job) and bar.end_s > found.job.deadline_s:
                    late.append((max(bar.start_s, found.job.deadline_s), bar.end_s))
        for color, spans in boxes.items():
            self._boxes(spans, top, lane.height, color)
        self._boxes(late, top + lane.height - 3, 3, LATE[0])
        if lane.height >= NARROW + 4:
            self._label(run, bars, top + lane.height / 2)
            self._ends(run, bars, top)

    def _boxes(
        self, spans: Sequence[tuple[float, float]], top: float, height: float, color: str
    ) -> None:
        """Rectangles with a gap after each that is wide enough for one."""
        px = 1 / max(1e-9, self._px(1.0))  # in seconds
        widths = [end - begin for begin, end in spans]
        gaps = [px if width > GAP_FROM_PX * px and color != LATE[0] else 0.0 for width in widths]
        self.axes.broken_barh(
            [
                (begin, max(THIN_PX * px, width - gap))
                for (begin, _), width, gap in zip(spans, widths, gaps, strict=True)
            ],
            (top, height),
            facecolors=color,
            linewidth=0,
        )

    def _label(self, run: Run, bars: Sequence[Bar], middle: float) -> None:
        """A number on each stretch of chunks of one job, where there is room for it."""
        for name, first, last in _stretches(bars):
            begin, end = max(first, self.begin_s), min(last, self.end_s)
            number = self.numbers.get(name, "")
            if number and self._px(end - begin) > DIGIT_PX * len(number) + 6:
                self._text((begin + end) / 2, middle, number, "white", self._color(run, name))

    def _ends(self, run: Run, bars: Sequence[Bar], top: float) -> None:
        """A mark where a job that missed its deadline left the denoiser for good."""
        last = {row.job: bar.end_s for bar in bars for row in bar.rows if row.end == "done"}
        for name, end in last.items():
            found = run.jobs.get(name)
            if found is not None and run.missed(name) and end > found.job.deadline_s:
                self.axes.plot([end], [top - 1], marker="v", markersize=5, color=LATE[0])

    def _color(self, run: Run, job: str, end: str = "done") -> str:
        found = run.jobs.get(job)
        if found is None or end not in ("done", "member"):
            return REFUSED[0]
        return self.colors[found.job.request_class][0]

    def _text(self, x: float, y: float, text: str, color: str, ground: str = "") -> None:
        """`ground`: the color of what it stands on, put around it where gaps run through."""
        from matplotlib.patheffects import withStroke

        if self.begin_s <= x <= self.end_s:
            around = [withStroke(linewidth=2.5, foreground=ground)] if ground else []
            self.axes.text(
                x, y, text, color=color, fontsize=7.5, fontweight="bold" if ground else "normal",
                ha="center", va="center", path_effects=around,
            )  # fmt: skip


def _seconds(value: float, _: int) -> str:
    return f"{value:g} s"


def _time_of_day(value: float, _: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(value))


def _numbers(runs: Sequence[Run]) -> dict[str, str]:
    """1, 2, … for the jobs that are seen or arrive, by arrival; the same in every panel."""
    begin_s, end_s = runs[0].begin_s, runs[0].end_s
    seen = {name for run in runs for name in run.shown}
    jobs = {
        name: job.job.arrival_s
        for run in runs
        for name, job in run.jobs.items()
        if name in seen or begin_s <= job.job.arrival_s <= end_s
    }
    ordered = sorted(jobs, key=lambda name: (jobs[name], name))
    return {name: str(number) for number, name in enumerate(ordered, 1)}


def _middle(marks: Sequence[tuple[float, str]]) -> float:
    return (marks[0][0] + marks[-1][0]) / 2


def _label(marks: Sequence[tuple[float, str]]) -> str:
    """ "7", "7 8", "7–9": numbers go by arrival, so what lies close is in a row."""
    numbers = [number for _, number in marks]
    return " ".join(numbers) if len(numbers) < 3 else f"{numbers[0]}–{numbers[-1]}"


def _shares(top: float, height: float, bar: Bar) -> Iterator[tuple[float, float]]:
    """Rows of one task share its lane."""
    each = height / len(bar.rows)
    for place in range(len(bar.rows)):
        yield top + place * each, each


def _stretches(bars: Sequence[Bar]) -> Iterator[tuple[str, float, float]]:
    """(job, begin, end) of bars of one job with no other's between them."""
    if not bars:
        return
    begin = bars[0].start_s
    for bar, after in pairwise([*bars, None]):
        assert bar is not None
        if after is None or after.rows[0].job != bar.rows[0].job:
            yield bar.rows[0].job, begin, bar.end_s
            begin = after.start_s if after is not None else begin
