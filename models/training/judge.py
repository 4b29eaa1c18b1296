"""Reads a picture back into words, knowing nothing of its caption, and compares the two.

The order matters for honesty: `read` sees pixels only. It finds the background, the separate
things on it, each one's colour, size, place and shape; `judge` then asks whether that is what the
caption said. A picture with a thing too many or too few has no right colours and no right shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

from models.training.world import (
    DIAMETERS,
    PALETTE,
    PLACES,
    RELATIONS,
    RING_HOLE,
    SHAPES,
    Scene,
    outline,
)

# A pixel belongs to a thing when it is at least this far from the background: half the distance
# between the two most alike colours, so that the soft edge is cut in its middle.
_FAR = 55.0
_SPECK = 0.004  # of the picture's area: a small star covers 0.016 of it, a stray blob less
_NAMES = tuple(PALETTE)
_COLOURS = np.array([PALETTE[name] for name in _NAMES], dtype=np.float32)


@dataclass(frozen=True)
class Found:
    """One thing seen in a picture. `x` and `y` are its box's middle, as shares of the picture."""

    colour: str
    shape: str
    overlap: float
    extent: float  # longer side of its box, as a share of the picture's short side
    x: float
    y: float


@dataclass(frozen=True)
class Reading:
    """What a picture shows."""

    background: str
    things: tuple[Found, ...]


@dataclass(frozen=True)
class Verdict:
    """Which of a caption's claims hold in a picture."""

    colours: bool  # the background's and each thing's, each in its place
    shapes: tuple[bool, ...]  # thing by thing
    sizes: tuple[bool, ...]
    places: bool  # the things are where they should be, whatever their colour


def _colour(pixels: np.ndarray) -> str:
    """The palette's name for the median of (n, 3) pixels."""
    distances = np.linalg.norm(_COLOURS - np.median(pixels, axis=0), axis=1)
    return _NAMES[int(distances.argmin())]


def _components(mask: np.ndarray) -> list[np.ndarray]:
    """The connected parts of a boolean mask (sides touching, corners not), specks left out.

    Row by row: each run of pixels joins the runs that it overlaps in the row above.
    """
    joined: list[int] = []  # a run's number to the run that it joined, itself if none

    def root(run: int) -> int:
        while joined[run] != run:
            run = joined[run]
        return run

    runs: list[tuple[int, int, int]] = []  # (row, first column, end column)
    above: list[int] = []
    for y, row in enumerate(mask):
        steps = np.flatnonzero(np.diff(row.astype(np.int8), prepend=0, append=0))
        here = []
        for start, end in zip(steps[::2].tolist(), steps[1::2].tolist(), strict=True):
            run = len(runs)
            runs.append((y, start, end))
            joined.append(run)
            for other in above:
                if runs[other][1] < end and start < runs[other][2]:
                    joined[root(other)] = root(run)
            here.append(run)
        above = here
    parts: dict[int, np.ndarray] = {}
    for run, (y, start, end) in enumerate(runs):
        parts.setdefault(root(run), np.zeros_like(mask))[y, start:end] = True
    return [part for part in parts.values() if part.sum() >= _SPECK * mask.size]


@lru_cache(maxsize=4096)
def _template(shape: str, area: int, side: int, nudge: tuple[float, float]) -> np.ndarray:
    """The shape drawn with about `area` pixels, its centre of mass `nudge` from the middle."""
    unit = 256
    canvas = Image.new("L", (unit, unit), 0)
    draw = ImageDraw.Draw(canvas)
    for radius, fill in ((unit / 2 - 1, 255), (RING_HOLE * unit / 2, 0)):
        if fill or shape == "ring":
            draw.polygon(
                [(unit / 2 + x * radius, unit / 2 + y * radius) for x, y in outline(shape)],
                fill=fill,
            )
    drawn = np.asarray(canvas) > 0
    ys, xs = np.nonzero(drawn)
    scale = (drawn.sum() / area) ** 0.5  # unit pixels for one pixel of the picture
    half = (side - 1) / 2
    shift = (xs.mean() - scale * (half + nudge[0]), ys.mean() - scale * (half + nudge[1]))
    placed = canvas.transform(
        (side, side),
        Image.Transform.AFFINE,
        (scale, 0, shift[0], 0, scale, shift[1]),
        Image.Resampling.BILINEAR,
    )
    return np.asarray(placed) > 127


def nearest_shape(part: np.ndarray) -> tuple[str, float]:
    """The shape that overlaps best (intersection over union) at equal area and centre of mass."""
    area = int(part.sum())
    ys, xs = np.nonzero(part)
    reach = max(xs.max() - xs.min(), ys.max() - ys.min()) + 1
    side = int(2 * reach) | 1  # odd: the centre of mass falls on the middle pixel
    window = np.zeros((side, side), dtype=bool)
    rows, columns = ys - round(ys.mean()) + side // 2, xs - round(xs.mean()) + side // 2
    # A quarter pixel decides between a square and a circle 15 px wide.
    nudge = (round(4 * (columns.mean() - side // 2)) / 4, round(4 * (rows.mean() - side // 2)) / 4)
    inside = (rows >= 0) & (rows < side) & (columns >= 0) & (columns < side)
    window[rows[inside], columns[inside]] = True
    best = ("", -1.0)
    for shape in SHAPES:
        drawn = _template(shape, area, side, nudge)
        overlap = float((drawn & window).sum() / (drawn | window).sum())
        best = max(best, (shape, overlap), key=lambda pair: pair[1])
    return best


def read(picture: Image.Image) -> Reading:
    """Name what is in the picture, from its pixels alone."""
    image = np.asarray(picture.convert("RGB"), dtype=np.float32)
    height, width = image.shape[:2]
    rim = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    ground = np.median(rim, axis=0)
    found = []
    for part in _components(np.linalg.norm(image - ground, axis=2) > _FAR):
        ys, xs = np.nonzero(part)
        box = (xs.min(), xs.max() + 1, ys.min(), ys.max() + 1)
        shape, overlap = nearest_shape(part)
        extent = max(box[1] - box[0], box[3] - box[2]) / min(height, width)
        x, y = (box[0] + box[1]) / 2 / width, (box[2] + box[3]) / 2 / height
        found.append(Found(_colour(image[part]), shape, overlap, float(extent), float(x), float(y)))
    return Reading(_colour(rim), tuple(found))


def _size_word(extent: float, count: int) -> str:
    return min(DIAMETERS[count], key=lambda word: abs(DIAMETERS[count][word] - extent))


def _side(offset: float, reach: float) -> int:
    """-1, 0 or 1: on which side of the middle, where `reach` is a full step to the side."""
    return 0 if abs(offset) < reach / 2 else (1 if offset > 0 else -1)


def _place(thing: Found, size: str, height: int, width: int) -> str:
    """The nearest of the nine places. How far "left" is depends on the size, as when drawn."""
    short = min(height, width)

    def step(length: int) -> float:
        return min(0.28, 0.5 - (DIAMETERS[1][size] / 2 + 0.05) * short / length)

    sides = (_side(thing.x - 0.5, step(width)), _side(thing.y - 0.5, step(height)))
    return next(place for place, at in PLACES.items() if at == sides)


def judge(picture: Image.Image, scene: Scene) -> Verdict:
    """Compare what `read` sees in the picture with what the scene's caption says."""
    reading = read(picture)
    wanted = len(scene.things)
    if len(reading.things) != wanted:
        return Verdict(False, (False,) * wanted, (False,) * wanted, False)
    things = reading.things
    if wanted == 1:
        places = (
            _place(things[0], scene.things[0].size, picture.height, picture.width) == scene.place
        )
    else:
        dx, dy = RELATIONS[scene.place]
        things = tuple(sorted(things, key=lambda t: dx * t.x + dy * t.y))
        apart_x, apart_y = abs(things[0].x - things[1].x), abs(things[0].y - things[1].y)
        places = apart_x > apart_y if dx else apart_y > apart_x
    pairs = list(zip(things, scene.things, strict=True))
    colours = reading.background == scene.background and all(f.colour == t.colour for f, t in pairs)
    return Verdict(
        colours=colours and places,
        shapes=tuple(f.shape == t.shape for f, t in pairs),
        sizes=tuple(_size_word(f.extent, wanted) == t.size for f, t in pairs),
        places=places,
    )
