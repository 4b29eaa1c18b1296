"""Runs written to files: a page, a picture, a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.client import write_whole
from services.timeline import png
from services.timeline.page import page
from services.timeline.runs import Run
from services.timeline.trace_events import trace_events


@dataclass(frozen=True)
class Files:
    """Where to write what; None: not wanted. `window`: the part of the clock to show, from … to."""

    html: str | None = None
    png: str | None = None
    trace: str | None = None
    window: tuple[float, float] | None = None

    def __bool__(self) -> bool:
        return any((self.html, self.png, self.trace))

    def check(self) -> None:
        """Raises NoMatplotlib, before there is anything to lose."""
        if self.png:
            png.matplotlib()

    def write(self, runs: Sequence[Run], title: str, said: str, live: bool = False) -> list[Path]:
        """The files written. Raises OSError, NoMatplotlib."""
        paths = []
        if self.html:
            text = page(runs, title, said, live=live, window=self.window)
            write_whole(Path(self.html), text.encode())
            paths.append(Path(self.html))
        if self.trace:
            write_whole(Path(self.trace), json.dumps(trace_events(runs)).encode())
            paths.append(Path(self.trace))
        if self.png:
            Path(self.png).parent.mkdir(parents=True, exist_ok=True)
            png.draw(runs, self.png, self.window, live=live)
            paths.append(Path(self.png))
        return paths


def window_of(text: str | None) -> tuple[float, float] | None:
    """ "200:260" as seconds. Raises ValueError that says what would be right."""
    if text is None:
        return None
    begin, colon, end = text.partition(":")
    try:
        found = float(begin), float(end)
    except ValueError:
        found = 0.0, 0.0
    if not colon or found[0] >= found[1]:
        raise ValueError(f"--window {text} is not FROM:TO in seconds, such as 200:260")
    return found
