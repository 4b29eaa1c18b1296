"""The little world that the bundled model knows: captioned scenes of one or two flat shapes.

A scene is drawn from a seed, put into words and rendered, all with PIL and numpy alone, so that
demos and load generators can ask for prompts without importing torch.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

# Any two are at least 110 apart in RGB: the judge may then call a pixel by its nearest colour even
# after the VAE has blurred it.
PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (215, 25, 35),
    "orange": (255, 140, 0),
    "yellow": (255, 225, 40),
    "green": (25, 150, 60),
    "blue": (30, 70, 220),
    "purple": (125, 30, 165),
    "pink": (255, 140, 200),
    "white": (255, 255, 255),
    "black": (15, 15, 15),
}
SHAPES = ("circle", "square", "triangle", "diamond", "star", "ring", "cross", "heart")

# Diameters as shares of the picture's short side. Two objects have to fit side by side, so a pair
# has its own, smaller scale.
DIAMETERS: dict[int, dict[str, float]] = {
    1: {"small": 0.26, "medium": 0.41, "large": 0.58},
    2: {"small": 0.23, "medium": 0.33, "large": 0.44},
}

# (column, row): -1 is left or top, 1 is right or bottom.
PLACES: dict[str, tuple[int, int]] = {
    "center": (0, 0),
    "left": (-1, 0),
    "right": (1, 0),
    "top": (0, -1),
    "bottom": (0, 1),
    "top left": (-1, -1),
    "top right": (1, -1),
    "bottom left": (-1, 1),
    "bottom right": (1, 1),
}
# Where the second object of a pair lies, seen from the first.
RELATIONS: dict[str, tuple[int, int]] = {
    "above": (0, 1),
    "below": (0, -1),
    "left of": (1, 0),
    "right of": (-1, 0),
}

# The sizes the model is trained on. Every other size with multiples of 16 between them works too.
SIZES: tuple[tuple[int, int], ...] = (
    (64, 64),
    (128, 128),
    (96, 160),
    (160, 96),
    (192, 128),
    (128, 192),
    (256, 256),
)  # (height, width) in pixels

_SIZE_WORDS = {
    "small": ("small", "little", "tiny"),
    "medium": ("", "medium"),
    "large": ("large", "big"),
}
_PLACE_WORDS = {
    "center": ("", "in the center", "in the middle"),
    "left": ("on the left", "on the left side"),
    "right": ("on the right", "on the right side"),
    "top": ("at the top",),
    "bottom": ("at the bottom",),
    "top left": ("in the top left corner", "at the top left"),
    "top right": ("in the top right corner", "at the top right"),
    "bottom left": ("in the bottom left corner", "at the bottom left"),
    "bottom right": ("in the bottom right corner", "at the bottom right"),
}
_RELATION_WORDS = {
    "above": ("above", "over"),
    "below": ("below", "under"),
    "left of": ("to the left of", "left of"),
    "right of": ("to the right of", "right of"),
}
_OPENINGS = ("", "", "", "", "a picture of ", "an image of ")

HOLD_OUT_SHARE = 10  # one scene in ten is never shown in training


@dataclass(frozen=True)
class Thing:
    """One flat shape: words only, no coordinates."""

    shape: str
    colour: str
    size: str


@dataclass(frozen=True)
class Scene:
    """What a caption says. `place` holds for one thing; for two, `place` is the relation."""

    things: tuple[Thing, ...]
    place: str
    background: str

    def key(self) -> str:
        """The scene's identity: "A above B" and "B below A" have the same key."""
        things, place = self.things, self.place
        if place in ("below", "right of"):
            things, place = things[::-1], {"below": "above", "right of": "left of"}[place]
        words = [f"{t.size} {t.colour} {t.shape}" for t in things]
        return "|".join([*words, place, self.background])

    def held_out(self) -> bool:
        """Whether this scene is kept from training, whatever words or size it would have."""
        digest = hashlib.sha256(self.key().encode()).digest()
        return int.from_bytes(digest[:4], "big") % HOLD_OUT_SHARE == 0


def random_scene(rng: random.Random, held_out: bool = False) -> Scene:
    """Draw a scene from the training part of the world, or from the held-out part."""
    while True:
        count = 1 if rng.random() < 0.5 else 2
        background = rng.choice(list(PALETTE))
        colours = [c for c in PALETTE if c != background]
        things = tuple(
            Thing(rng.choice(SHAPES), rng.choice(colours), rng.choice(list(DIAMETERS[1])))
            for _ in range(count)
        )
        place = rng.choice(list(PLACES if count == 1 else RELATIONS))
        scene = Scene(things, place, background)
        if scene.held_out() == held_out:
            return scene


def caption(scene: Scene, rng: random.Random | None = None) -> str:
    """Put a scene into words.

    Without `rng` the words are the plainest ones, the same each time; with it they vary
    (synonyms, word order, a capital, a full stop), as people's do.
    """

    def pick(options: tuple[str, ...]) -> str:
        return options[0] if rng is None else rng.choice(options)

    def noun(thing: Thing) -> str:
        words = " ".join(w for w in (pick(_SIZE_WORDS[thing.size]), thing.colour, thing.shape) if w)
        return ("an " if words[0] in "aeiou" else "a ") + words

    if len(scene.things) == 1:
        body = f"{noun(scene.things[0])} {pick(_PLACE_WORDS[scene.place])}".strip()
    else:
        body = (
            f"{noun(scene.things[0])} {pick(_RELATION_WORDS[scene.place])} {noun(scene.things[1])}"
        )
    article = "an" if scene.background[0] in "aeiou" else "a"
    ground = f"{article} {scene.background} background"
    if rng is None:
        return f"{body} on {ground}"
    style = rng.random()
    if style < 0.75:
        text = rng.choice(_OPENINGS) + f"{body} on {ground}"
    elif style < 0.85:
        text = f"{ground} with {body}"
    elif style < 0.92:  # as people type: "red circle on a blue background"
        text = body.split(" ", 1)[1] + f" on {ground}"
    else:
        text = f"{body} on {scene.background}"
    if rng.random() < 0.15:
        text = text[0].upper() + text[1:]
    return text + ("." if rng.random() < 0.15 else "")


@lru_cache(maxsize=256)
def outline(shape: str) -> tuple[tuple[float, float], ...]:
    """The shape's polygon in a box from -1 to 1, y pointing down. A ring's is its outer circle."""
    if shape in ("circle", "ring"):
        return tuple((math.cos(a * math.pi / 36), math.sin(a * math.pi / 36)) for a in range(72))
    if shape == "square":
        return ((-1, -1), (1, -1), (1, 1), (-1, 1))
    if shape == "triangle":
        return ((0, -1), (1, 1), (-1, 1))
    if shape == "diamond":
        return ((0, -1), (0.75, 0), (0, 1), (-0.75, 0))
    if shape == "cross":
        corner = [(0.36, -1), (0.36, -0.36), (1, -0.36)]
        points: list[tuple[float, float]] = []
        for turn in range(4):
            c, s = (1, 0, -1, 0)[turn], (0, 1, 0, -1)[turn]
            points += [(c * x - s * y, s * x + c * y) for x, y in corner]
        return tuple(points)
    if shape == "star":
        spikes = [(1.0 if i % 2 == 0 else 0.42, (i / 5 - 0.5) * math.pi) for i in range(10)]
        return _fill_box([(r * math.cos(a), r * math.sin(a)) for r, a in spikes])
    if shape == "heart":
        curve = []
        for i in range(72):
            a = i * math.pi / 36
            y = 13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)
            curve.append((16 * math.sin(a) ** 3, -y))
        return _fill_box(curve)
    raise ValueError(f"shape {shape!r} is not one of {', '.join(SHAPES)}")


RING_HOLE = 0.55  # radius of a ring's hole, as a share of its radius


def _fill_box(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Scale the points so that they fill the box from -1 to 1 on both axes."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    half_x, half_y = (max(xs) - min(xs)) / 2, (max(ys) - min(ys)) / 2
    mid_x, mid_y = (max(xs) + min(xs)) / 2, (max(ys) + min(ys)) / 2
    return tuple(((x - mid_x) / half_x, (y - mid_y) / half_y) for x, y in points)


def centres(scene: Scene, height: int, width: int, rng: random.Random) -> list[tuple[float, float]]:
    """Where each thing's middle lies, in pixels (x, y), with a little play so that seeds differ."""
    short = min(height, width)
    if len(scene.things) == 1:
        reach = DIAMETERS[1][scene.things[0].size] / 2 * short
        column, row = PLACES[scene.place]
        play = 0.03 * short

        def along(side: int, length: int) -> float:
            offset = min(0.28 * length, length / 2 - reach - 0.05 * short)
            return length / 2 + side * offset + rng.uniform(-play, play)

        return [(along(column, width), along(row, height))]
    dx, dy = RELATIONS[scene.place]
    found = []
    for side in (-1, 1):
        # Little play along the line between the two, or large ones would touch.
        play_x, play_y = (0.01, 0.05) if dx else (0.05, 0.01)
        x = width / 2 + side * dx * width / 4 + rng.uniform(-play_x, play_x) * short
        y = height / 2 + side * dy * height / 4 + rng.uniform(-play_y, play_y) * short
        found.append((x, y))
    return found


def render(scene: Scene, height: int, width: int, rng: random.Random) -> Image.Image:
    """Draw the scene, with smooth edges, as an RGB picture of height x width pixels."""
    over = 4  # draw larger and shrink: PIL's polygons have hard edges
    picture = Image.new("RGB", (width * over, height * over), PALETTE[scene.background])
    draw = ImageDraw.Draw(picture)
    diameters = DIAMETERS[len(scene.things)]
    for thing, (x, y) in zip(scene.things, centres(scene, height, width, rng), strict=True):
        radius = diameters[thing.size] / 2 * min(height, width) * over
        points = outline(thing.shape)
        fills = [(radius, PALETTE[thing.colour])]
        if thing.shape == "ring":
            fills.append((radius * RING_HOLE, PALETTE[scene.background]))
        for r, fill in fills:
            draw.polygon([(x * over + px * r, y * over + py * r) for px, py in points], fill=fill)
    return picture.reduce(over)


def random_captions(count: int, seed: int = 0, held_out: bool = False) -> list[str]:
    """Prompts for demos and load: plain captions of random scenes, the same for the same seed."""
    rng = random.Random(seed)
    return [caption(random_scene(rng, held_out)) for _ in range(count)]


def pixels(picture: Image.Image) -> np.ndarray:
    """The picture as float32, height x width x 3, from -1 to 1."""
    return np.asarray(picture, dtype=np.float32) / 127.5 - 1.0


def caption_words() -> set[str]:
    """Every word that a caption may hold, for the tokenizer."""
    words = (
        set(PALETTE)
        | set(SHAPES)
        | {"a", "an", "on", "with", "background", "picture", "image", "of"}
    )
    for table in (_SIZE_WORDS, _PLACE_WORDS, _RELATION_WORDS):
        for options in table.values():
            words |= {word for option in options for word in option.split()}
    return words


def opening_words() -> set[str]:
    """The words that a caption may begin with, in small letters."""
    return (
        {"a", "an"}
        | set(PALETTE)
        | set(SHAPES)
        | {w for ws in _SIZE_WORDS.values() for w in ws if w}
    )
