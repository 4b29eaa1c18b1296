"""Small pictures of unfinished latents: a linear map from each token's latents to a few pixels.

The map is fitted once for a model, by least squares on what its own decoder makes
(models/training/preview.py), and lies in the model's directory. A model without one has no
previews. What is shown is where the trajectory is heading: between two step boundaries the latents
moved along a line, and where noise falls evenly that line ends at sigma 0.

Latents are only read, and a preview that fails costs its job nothing.
"""

from __future__ import annotations

import io
import json
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as fn

from common.models.chunk import Chunk
from common.models.directory import PREVIEW
from common.models.live import LiveJob
from common.stage import Control, Row, Showing

log = logging.getLogger(__name__)

VERSION = 1
# Of the longer side, and of the file: a job's previews must cost Redis next to nothing.
MOST_PX = 96
MOST_BYTES = 4096
QUALITIES = (80, 60, 40, 20, 1)


class BadProjection(ValueError):
    """A preview.json that cannot be used; says why."""


@dataclass(frozen=True, slots=True)
class Projection:
    """`weights`: (3 · side², features + 1), the last column a constant. A token with `features`
    numbers becomes side × side pixels in 0 … 1, channels last."""

    weights: torch.Tensor
    side: int

    @classmethod
    def open(cls, directory: Path, device: torch.device) -> Projection | None:
        """A model's own; None where it has none that can be used."""
        try:
            return cls.parse((directory / PREVIEW).read_text(), device)
        except FileNotFoundError:
            return None
        except (OSError, BadProjection) as error:
            log.warning("no previews: %s: %s", directory / PREVIEW, error)
            return None

    @classmethod
    def parse(cls, content: str, device: torch.device) -> Projection:
        """Raises BadProjection."""
        try:
            read = json.loads(content)
            side, rows = int(read["side"]), read["weights"]
            weights = torch.tensor(rows, dtype=torch.float32, device=device)
        except (KeyError, TypeError, ValueError) as error:
            raise BadProjection(f"cannot be read: {error!r}") from error
        if read.get("version") != VERSION or weights.ndim != 2 or len(weights) != 3 * side**2:
            raise BadProjection(f"is not of version {VERSION}, with 3 rows a pixel")
        return cls(weights, side)

    def pixels(self, latents: torch.Tensor, height: int, width: int) -> np.ndarray:
        """The first picture in `latents`, h×w×3 uint8, at most MOST_PX long and on the host.

        Raises BadProjection for latents of another make.
        """
        tokens = grid(latents, height, width)
        rows, columns, features = tokens.shape
        if features + 1 != self.weights.shape[1]:
            raise BadProjection(f"was fitted to {self.weights.shape[1] - 1} numbers a token")
        side = self.side
        flat = tokens.reshape(-1, features).to(self.weights.device, torch.float32)
        values = flat @ self.weights[:, :-1].T + self.weights[:, -1]
        blocks = values.view(rows, columns, side, side, 3).permute(4, 0, 2, 1, 3)
        picture = blocks.reshape(1, 3, rows * side, columns * side)
        longest = max(picture.shape[-2:])
        if longest > MOST_PX:
            sides = [max(1, round(n * MOST_PX / longest)) for n in picture.shape[-2:]]
            picture = fn.interpolate(picture, size=sides, mode="area")
        small = (picture[0].clamp(0, 1) * 255).round().to(torch.uint8)
        return np.ascontiguousarray(small.permute(1, 2, 0).cpu().numpy())


def grid(latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The first picture's latents as rows × columns × features.

    Packed ones (pictures × tokens × features) lie in the picture's proportions; others are
    pictures × features × rows × columns. Raises BadProjection for any other shape.
    """
    if latents.ndim == 4:
        return latents[0].permute(1, 2, 0)
    if latents.ndim != 3:
        raise BadProjection(f"has no rule for latents of {latents.ndim} axes")
    tokens = latents.shape[1]
    rows = max(1, round((tokens * height / width) ** 0.5))
    if tokens % rows:
        raise BadProjection(f"{tokens} tokens are not a picture of {width}x{height}")
    return latents[0].view(rows, tokens // rows, -1)


class Onlooker:
    """Sees one job's latents go by in a chunk, and hands a preview over now and then."""

    def __init__(self, projection: Projection, control: Showing, row: Row, job: LiveJob) -> None:
        self._projection, self._control, self._row, self._job = projection, control, row, job
        latents = job.carried.get("latents")
        self._before: Any = job.state.get("latents") if latents is None else latents
        self._since = job.iteration

    def __call__(self, iteration: int, latents: torch.Tensor) -> None:
        """`latents` as they are after `iteration` runs of the loop.

        Nothing for a job that only has to be decoded, or whose last preview is fresh.
        """
        job, row = self._job, self._row
        if iteration >= job.iterations or not self._control.wants_preview(row.job):
            return
        try:
            clean = self._outlook(iteration, latents)
            height, width = int(row.params["height"]), int(row.params["width"])
            pixels = self._projection.pixels(clean, height, width)
        except Exception:
            log.exception("job %s: no preview", row.job)
            return
        self._before, self._since = latents, iteration
        self._control.preview(row.job, job.step_at(iteration), partial(encode, pixels))

    def _outlook(self, iteration: int, latents: torch.Tensor) -> torch.Tensor:
        """The latents at sigma 0, if they moved on as they did lately; where the scheduler is not
        one whose latents move along lines, the latents as they are."""
        before, scheduler = self._before, self._job.pipe.scheduler
        if not _moves_along_lines(scheduler) or len(scheduler.sigmas) != self._job.iterations + 1:
            return latents
        first, last = float(scheduler.sigmas[self._since]), float(scheduler.sigmas[iteration])
        if first == last or not isinstance(before, torch.Tensor) or before.shape != latents.shape:
            return latents
        return latents + (latents - before) * (last / (first - last))


def onlooker(
    projection: Projection | None, control: Control, row: Row, job: LiveJob
) -> Onlooker | None:
    """None where nobody wants previews, or the model has no map. Made before the chunk runs."""
    if projection is None or not isinstance(control, Showing):
        return None
    return Onlooker(projection, control, row, job)


def show(
    projection: Projection | None, control: Control, row: Row, job: LiveJob, done: Chunk | Exception
) -> None:
    """What `job` has come to at the end of a chunk, before it takes the chunk over."""
    seen = onlooker(projection, control, row, job)
    if seen is not None and isinstance(done, Chunk):
        seen(done.iteration, done.carried["latents"])


def _moves_along_lines(scheduler: Any) -> bool:
    if getattr(scheduler, "sigmas", None) is None:
        return False
    by_name = type(scheduler).__name__.startswith("FlowMatch")
    return by_name or bool(scheduler.config.get("use_flow_sigmas"))


def encode(pixels: np.ndarray) -> bytes:
    """A WebP of at most MOST_BYTES, of as good a quality as fits; called on another thread."""
    content = b""
    for quality in QUALITIES:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, format="WEBP", quality=quality, method=2)
        content = file.getvalue()
        if len(content) <= MOST_BYTES:
            break
    return content
