"""Seconds a task takes: what the coordinator and its policies ask. Pure: no clock, no I/O.

Per model and stage (services/costs/learned.py): a fitted table, corrected by what workers
report. A denoise cost is seconds per step, the others are seconds a task.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from common.stage import DENOISE, STAGES
from services.costs.learned import ENOUGH, Learned, Quote
from services.costs.shape import Shape, shape_of
from services.costs.table import Fit, fits_of
from services.costs.window import Window

log = logging.getLogger("slackwater.coordinator")

__all__ = ["CostModel", "Quote", "Shape", "shape_of"]


class CostModel:
    """Estimates by (model, stage)."""

    def __init__(self) -> None:
        self._stages: dict[tuple[str, str], Learned] = {}
        self._mixed: dict[str, Window] = {}  # by model: step times of mixed sizes over expected

    def set_prior(self, model: str, costs: Mapping[str, Any]) -> None:
        """What a manifest publishes: by stage, coefficients (services/costs/table.py).

        With a range they are a table, shipped with the model and measured elsewhere; without,
        a claim. One that cannot be read is logged and left alone: a worker of another version
        must not stop the pool.
        """
        try:
            fits = fits_of(costs, "costs")
        except ValueError as error:
            log.warning("the manifest of %s: %s", model, error)
            return
        for stage, fit in fits.items():
            learned = self._stage(model, stage)
            if not fit.range:
                learned.set_claim(fit)
            elif not learned.measured_here:
                learned.set_fit(fit, measured_here=False)

    def set_table(self, model: str, fits: Mapping[str, Fit]) -> None:
        """A table measured on this pool's machines; it stands over a shipped one."""
        for stage, fit in fits.items():
            self._stage(model, stage).set_fit(fit, measured_here=True)

    def observe(self, model: str, stage: str, shape: Shape, seconds: float) -> None:
        """A worker's report of one task, or of one denoising step."""
        if seconds > 0:
            self._stage(model, stage).observe(shape, seconds)

    def estimate(self, model: str, stage: str, shape: Shape) -> float:
        """Seconds for one task of `stage`, or for one denoising step."""
        try:
            return self._stages[model, stage].estimates[shape]
        except KeyError:
            return self._stage(model, stage).estimate(shape)

    def shared(
        self, model: str, stage: str, shape: Shape, mixed: bool = False
    ) -> tuple[float, bool]:
        """Seconds of a pass of `shape.n` rows of several jobs, and whether they are known. `mixed`:
        the rows differ in size, and `shape` has as many of the largest as are as much work.

        How mixed passes differ counts from enough reports on: were one slow first pass believed,
        none might be mixed again, and nothing would ever correct it."""
        seconds, known = self._stage(model, stage).shared(shape)
        factor = self._mixed.get(model) if mixed else None
        if factor is not None and len(factor) >= ENOUGH:
            seconds *= factor.value
        return seconds, known

    def observe_mixed(self, model: str, shape: Shape, seconds: float) -> None:
        """A denoising step of rows of several sizes: how far off `shared` was without a factor.
        Passes of one size are not estimated by it."""
        expected, _ = self._stage(model, DENOISE).shared(shape)
        if seconds > 0:
            self._mixed.setdefault(model, Window()).add(0, seconds / expected)

    def quote(self, model: str, stage: str, shape: Shape) -> Quote:
        """An estimate that says how far it may be off, and whether it was ever measured."""
        return self._stage(model, stage).quote(shape)

    def dump(self) -> dict[str, float]:
        """What was learned, as "{model}/{stage}/{shape}" -> seconds."""
        return {
            f"{model}/{stage}/{shape.key()}": learned.estimate(shape)
            for (model, stage), learned in self._stages.items()
            for shape in learned.shapes()
        }

    def load(self, learned: Mapping[str, str | float]) -> None:
        """What an earlier coordinator learned. Entries that cannot be read are passed over, and
        logged in one line: they are a convenience, and must not stop a pool."""
        wrong = []
        for name, text in learned.items():
            try:
                model, stage, key = name.rsplit("/", 2)
                shape, seconds = Shape.from_key(key), float(text)
            except (TypeError, ValueError):
                wrong.append(name)
                continue
            if stage in STAGES and shape.is_sound and 0 < seconds < math.inf:
                self._stage(model, stage).remember(shape, seconds)
            else:
                wrong.append(name)
        if wrong:
            log.warning("%d learned costs cannot be read, %.80r first", len(wrong), wrong[0])

    def _stage(self, model: str, stage: str) -> Learned:
        learned = self._stages.get((model, stage))
        if learned is None:
            learned = self._stages[model, stage] = Learned(stage)
        return learned
