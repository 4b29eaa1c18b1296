"""The last few reports of one thing, and what they say whatever one or two of them claim."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from statistics import fmean, median_low

# Odd, so that the middle is in the middle; short, so that a change shows within ten reports.
WINDOW = 9
# Left out at each end once there are enough: a slow first step and a pause may come together.
TRIM = 2


class Window:
    """At most nine positive values, each with the number of the report that brought it.

    Their interquartile mean: like a median it ignores two outliers of nine, and where reports
    come in two kinds (a step cache that hits or misses) it lies between them as their shares
    do, where a median would jump from one to the other. Of fewer than five the lower median: a
    first step is slow more often than a machine is fast for once.
    """

    __slots__ = ("_entries", "spread", "value")

    def __init__(self) -> None:
        self._entries: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self.value = 0.0
        self.spread = 0.0  # half of the distance over which the values kept lie

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[float]:
        return (value for _, value in self._entries)

    def add(self, report: int, value: float) -> None:
        self._entries.append((report, value))
        self._sum_up()

    def rescale(self, before: int, factor: float) -> None:
        """Multiply the values of reports earlier than `before`."""
        for at, (report, value) in enumerate(self._entries):
            if report < before:
                self._entries[at] = (report, value * factor)
        self._sum_up()

    def nearest(self, expected: float) -> float:
        """The value that is fewest times larger or smaller than `expected`."""
        return min(self, key=lambda value: abs(math.log(value / expected)))

    def _sum_up(self) -> None:
        values = sorted(self)
        if len(values) > 2 * TRIM:
            kept = values[TRIM:-TRIM]
            self.value, self.spread = fmean(kept), (values[-TRIM] - values[TRIM - 1]) / 2
        elif values:
            self.value, self.spread = median_low(values), (values[-1] - values[0]) / 2
