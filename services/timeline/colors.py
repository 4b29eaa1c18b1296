"""One palette for terminal, page and picture: from warm for short jobs to cool for long ones.

Each color is a pair, for light and for dark ground. Red is kept for what is late.
"""

from __future__ import annotations

from collections.abc import Sequence

ORANGE, YELLOW, GREEN, AQUA, BLUE, VIOLET, PINK = (
    ("#eb6834", "#e0703f"),
    ("#eda100", "#d29a1c"),
    ("#008300", "#2c9a3c"),
    ("#1baf7a", "#24a878"),
    ("#2a78d6", "#4a90e2"),
    ("#4a3aa7", "#8f84e6"),
    ("#d5689a", "#d0699b"),
)
LATE = ("#d03b3b", "#ff5c5c")
REFUSED = ("#a3a29c", "#6d6c68")  # work that counted for nobody

# As many as there are classes, so that neighbors differ as far as they can.
BY_COUNT = (
    (BLUE,),
    (ORANGE, BLUE),
    (ORANGE, AQUA, BLUE),
    (ORANGE, YELLOW, AQUA, BLUE),
    (ORANGE, YELLOW, AQUA, BLUE, VIOLET),
    (ORANGE, YELLOW, GREEN, AQUA, BLUE, VIOLET),
    (ORANGE, YELLOW, GREEN, AQUA, BLUE, VIOLET, PINK),
)
JOBS = (BLUE, ORANGE, AQUA, VIOLET, YELLOW, PINK, GREEN)
# Those first that four classes do not use: a curve beside a chart is not one of its classes.
POLICIES = (VIOLET, PINK, ("#55534d", "#bdbab1"), GREEN, BLUE, ORANGE, AQUA)

Pair = tuple[str, str]


def of_classes(classes: Sequence[str]) -> dict[str, Pair]:
    """A color for each class, given the shortest jobs' first; past seven, neighbors share one."""
    palette = BY_COUNT[min(len(classes), len(BY_COUNT)) - 1] if classes else ()
    share = max(1.0, len(classes) / len(BY_COUNT))
    return {name: palette[int(place / share)] for place, name in enumerate(classes)}


def in_turn(names: Sequence[str], palette: Sequence[Pair]) -> dict[str, Pair]:
    return {name: palette[place % len(palette)] for place, name in enumerate(names)}
