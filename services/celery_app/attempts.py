"""What a try to deliver something may come to, and when the next one is."""

from __future__ import annotations

import random

FACTOR = 3.0
LONGEST_PAUSE_S = 7200.0
# Those that failed together should not come back together.
JITTER = 0.1


class Failed(Exception):
    """It did not get through; a later try may."""


class GiveUp(Exception):
    """No later try would get through."""


def pause_s(attempts: int, first_s: float) -> float:
    """How long to wait after the `attempts`-th failure, the first one being 1."""
    exact = min(LONGEST_PAUSE_S, first_s * FACTOR ** min(attempts - 1, 20))
    return exact * random.uniform(1 - JITTER, 1 + JITTER)
