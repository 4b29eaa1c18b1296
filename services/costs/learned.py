"""What is known of one stage of one model: its table, and what workers reported since.

In the order in which they are believed: reports of the very shape; the fitted table times a
speed learned from all reports, since a table comes from another machine or another day; the
nearest shape reported; what the manifest claims; a guess.

Reports are not believed blindly. One that is many times longer than any of late (a paused
process) is set aside until such ones are frequent; the first report of a shape that is far from
what was expected (a slow first step) waits for a second. When report after report is slower, or
faster, whatever the shape, the machine has changed, and every shape follows at once.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from statistics import median, median_low

from common.stage import DECODE, DENOISE, ENCODE
from services.costs.shape import Shape, at_stage
from services.costs.table import Fit
from services.costs.window import WINDOW, Window

# So many reports of a shape speak for themselves.
ENOUGH = 3
# Until then one that is further off than this waits for another to agree.
AGREE = 3.0
# Longer by this factor than any of late is a pause and not a cost, unless one report in four is.
PAUSED = 8.0
FREQUENT = 4 * WINDOW
# The machine has changed when of so many reports all but one are off by DRIFT to one side.
DRIFT_REPORTS = 7
DRIFT = 1.25
# Shapes remembered a stage, the latest reported: users may ask for any size.
SHAPES = 1000
# Relative margins of what was not measured: scaled from another shape (each doubling adds as
# much again), and merely claimed or guessed.
SCALED, CLAIMED = 0.5, 1.0
GUESSES = {
    ENCODE: Fit({1: (0.0, 0.0, 0.0)}, fixed_s=0.05),
    DENOISE: Fit({1: (0.0, 2e-4, 0.0)}, fixed_s=0.02),
    DECODE: Fit({1: (0.0, 1e-3, 0.0)}, fixed_s=0.1),
}


@dataclass(frozen=True, slots=True)
class Quote:
    """An estimate, how far it may be off, and whether anything like it was ever measured."""

    seconds: float
    margin_s: float
    known: bool


class Learned:
    """The costs of one stage of one model."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.fit: Fit | None = None
        self.measured_here = False  # the fit, on this pool's machines
        self.claim: Fit | None = None
        self.estimates: dict[Shape, float] = {}  # worked out since the last report
        self._passes: dict[Shape, tuple[float, bool]] = {}  # as well
        self._windows: OrderedDict[Shape, Window] = OrderedDict()
        self._speed = Window()  # reported over fitted, of shapes in the table's range
        self._beyond = Window()  # the same of those outside of it
        # Reports set aside, over what was expected.
        self._late: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        # Of late: number, shape, and seconds over what was expected.
        self._drift: deque[tuple[int, Shape, float]] = deque(maxlen=DRIFT_REPORTS)
        self._reports = 0

    # -- what is told ----------------------------------------------------------------------

    def set_fit(self, fit: Fit, measured_here: bool) -> None:
        """A new table; its speed is learned anew from the shapes that reports are known of."""
        if fit == self.fit and measured_here == self.measured_here:
            return
        self.fit, self.measured_here = fit, measured_here
        self._speed, self._beyond = Window(), Window()
        for shape, window in self._windows.items():
            if len(window) >= ENOUGH:
                self._note_speed(fit, shape, window.value)
        self._forget_answers()

    def set_claim(self, claim: Fit) -> None:
        self.claim = claim
        self._forget_answers()

    def remember(self, shape: Shape, seconds: float) -> None:
        """An estimate of an earlier life, worth as much as enough reports."""
        window = self._window(self._of(shape))
        for _ in range(ENOUGH):
            window.add(self._reports, seconds)
        self._forget_answers()

    def observe(self, shape: Shape, seconds: float) -> None:
        shape = self._of(shape)
        self._reports += 1
        expected = self._founded(shape)
        if expected is not None:
            longest = max(self._windows.get(shape, ()), default=0.0)
            if seconds > PAUSED * max(expected, longest) and not self._is_real(seconds / expected):
                return
            if not shape.cached:  # how much it skips may change by itself
                self._drift.append((self._reports, shape, seconds / expected))
                self._follow()
        self._window(shape).add(self._reports, seconds)
        if self.fit is not None:
            self._note_speed(self.fit, shape, seconds)
        self._forget_answers()

    def _note_speed(self, fit: Fit, shape: Shape, seconds: float) -> None:
        """What a report says of the table's speed. Not under a step cache, nor with more rows than
        were measured, where it goes on in proportion, as shared passes do not; and outside of its
        range, where the curve may be wrong, only of the speed out there."""
        if shape.cached or shape.n > fit.range.get("n", (1, shape.n))[1]:
            return
        told = self._beyond if fit.doublings_outside(shape) else self._speed
        told.add(self._reports, seconds / fit.seconds(shape))

    def _is_real(self, times: float) -> bool:
        """Whether a report that is `times` too long is one of many such."""
        self._late.append((self._reports, times))
        first = self._late[0][0]
        if len(self._late) < WINDOW or self._reports - first >= FREQUENT:
            return False
        if self._reports - first < WINDOW:  # all of late: another machine
            self._rescale(self._reports, median_low(times for _, times in self._late))
            self._late.clear()
            self._drift.clear()
        return True

    def _follow(self) -> None:
        """Notice a change of machine, and bring what was reported before it up to date.

        One shape's reports alone may only say that its cache hits: they move no other.
        """
        slower = [off for off in self._drift if off[2] > DRIFT]
        faster = [off for off in self._drift if off[2] < 1 / DRIFT]
        most = max(slower, faster, key=len)
        alone = len({shape for _, shape, _ in most}) == 1 < len(self._windows)
        if len(most) >= DRIFT_REPORTS - 1 and not alone:
            self._rescale(most[0][0], median(ratio for _, _, ratio in most))
            self._drift.clear()

    def _rescale(self, before: int, factor: float) -> None:
        self._speed.rescale(before, factor)
        self._beyond.rescale(before, factor)
        for window in self._windows.values():
            window.rescale(before, factor)

    # -- what is asked -----------------------------------------------------------------------

    def estimate(self, shape: Shape) -> float:
        """Seconds, kept in `estimates` until the next report."""
        seconds = self.estimates.get(shape)
        if seconds is None:
            seconds = self.estimates[shape] = self.quote(shape).seconds
        return seconds

    def quote(self, shape: Shape) -> Quote:
        shape = self._of(shape)
        window = self._windows.get(shape)
        if window is not None and len(window) >= ENOUGH:
            return Quote(window.value, window.spread, True)
        if window is not None:
            return self._of_few(window, self._elsewhere(shape, reports=ENOUGH))
        other = self._elsewhere(shape)
        if other is None:
            seconds = GUESSES[self.stage].seconds(shape)
            return Quote(seconds, CLAIMED * seconds, False)
        return other

    def shared(self, shape: Shape) -> tuple[float, bool]:
        """Seconds of a pass that several jobs share, and whether that is known: reported often
        enough, or with fewer and with more rows, or in the range of a table whose speed is known.
        Kept until the next report."""
        found = self._passes.get(shape)
        if found is None:
            tokens = 0 if self.stage == ENCODE else shape.tokens
            asked = Shape(tokens, shape.n, shape.forwards)
            found = self._passes[shape] = self._shared(asked)
        return found

    def _shared(self, shape: Shape) -> tuple[float, bool]:
        quote = self.quote(shape)
        reported = len(self._windows.get(shape, ())) >= ENOUGH
        if reported or (self.fit is not None and self._fitted(self.fit, shape).known):
            return quote.seconds, True
        between = self._between(shape)
        return (quote.seconds, False) if between is None else (between, True)

    def _between(self, shape: Shape) -> float | None:
        """On the straight line between passes of fewer and of more rows that were reported."""
        alike = {
            s.n: window.value
            for s, window in self._windows.items()
            if len(window) >= ENOUGH
            and (s.tokens, s.forwards, s.cached) == (shape.tokens, shape.forwards, "")
        }
        fewer = max((n for n in alike if n < shape.n), default=None)
        more = min((n for n in alike if n > shape.n), default=None)
        if fewer is None or more is None:
            return None
        rise_s = (alike[more] - alike[fewer]) / (more - fewer)
        return alike[fewer] + (shape.n - fewer) * rise_s

    def shapes(self) -> list[Shape]:
        """Those that reports are known of."""
        return list(self._windows)

    def _of_few(self, window: Window, other: Quote | None) -> Quote:
        """One or two reports, weighed against what else is known of the shape."""
        if other is None:
            return Quote(window.value, SCALED * window.value, True)
        seconds = _believed(window, other.seconds)
        return Quote(seconds, max(other.margin_s, abs(window.value - other.seconds)), True)

    def _elsewhere(self, shape: Shape, reports: int = 1) -> Quote | None:
        """What all but the shape's own reports say; other shapes count from `reports` on."""
        if self.fit is not None:
            return self._fitted(self.fit, shape)
        near = self._nearest(shape, reports)
        if near is not None:
            units = shape.units / near.units
            seconds = self._windows[near].value * units
            return Quote(seconds, SCALED * (1 + abs(math.log2(units))) * seconds, False)
        if self.claim is not None:
            seconds = self.claim.seconds(shape)
            return Quote(seconds, CLAIMED * seconds, False)
        return None

    def _fitted(self, fit: Fit, shape: Shape) -> Quote:
        outside = fit.doublings_outside(shape)
        window = self._beyond if outside and self._beyond else self._speed
        speed = _believed(window, 1.0) if window else 1.0
        seconds = fit.seconds(shape) * speed
        margin = fit.error + fit.beyond * outside
        told = len(self._speed) >= ENOUGH
        if told:
            margin += self._speed.spread / self._speed.value
        elif not self.measured_here:
            margin += CLAIMED
        return Quote(seconds, margin * seconds, (told or self.measured_here) and not outside)

    def _nearest(self, shape: Shape, reports: int) -> Shape | None:
        """The shape of most like work that at least so many reports are known of."""
        known = (
            s for s, w in self._windows.items() if s != shape and len(w) >= reports and not s.cached
        )
        return min(known, key=lambda s: abs(math.log(s.units / shape.units)), default=None)

    def _founded(self, shape: Shape) -> float | None:
        """What a report of this shape should say, where enough reports tell; else None."""
        window = self._windows.get(shape)
        if window is not None and len(window) >= ENOUGH:
            return window.value
        if self.fit is None or len(self._speed) < ENOUGH or shape.cached:
            return None
        if self.fit.doublings_outside(shape):
            return None
        return self.fit.seconds(shape) * self._speed.value

    def _of(self, shape: Shape) -> Shape:
        return at_stage(shape, self.stage)

    def _forget_answers(self) -> None:
        self.estimates.clear()
        self._passes.clear()

    def _window(self, shape: Shape) -> Window:
        window = self._windows.get(shape)
        if window is None:
            window = self._windows[shape] = Window()
            if len(self._windows) > SHAPES:
                self._windows.popitem(last=False)
        self._windows.move_to_end(shape)
        return window


def _believed(window: Window, expected: float) -> float:
    """What its reports say, beside what was expected while they are few."""
    if len(window) >= ENOUGH:
        return window.value
    nearest = window.nearest(expected)
    agrees = len(window) > 1 or 1 / AGREE <= nearest / expected <= AGREE
    return nearest if agrees else expected
