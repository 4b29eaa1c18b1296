"""The little world and its judge: what is drawn reads back as it was said, and only that."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from PIL import Image

from models.training import world
from models.training.judge import Verdict, judge, read


def verdicts(size: tuple[int, int], count: int, shuffled: bool = False) -> list[Verdict]:
    """Judge true drawings of random scenes against their own scene, or against another one's."""
    rng = random.Random(f"{size}")
    scenes = [world.random_scene(rng, held_out=True) for _ in range(count)]
    pictures = [world.render(scene, *size, rng) for scene in scenes]
    if shuffled:
        scenes = scenes[1:] + scenes[:1]
    return [judge(picture, scene) for picture, scene in zip(pictures, scenes, strict=True)]


def share(checks: list[bool]) -> float:
    return sum(checks) / len(checks)


@pytest.mark.parametrize("size", [(64, 64), (96, 160), (128, 128), (256, 256)])
def test_a_true_drawing_scores_one(size: tuple[int, int]) -> None:
    """At every size the judge accepts nearly all that the renderer draws."""
    found = verdicts(size, 60)
    assert share([v.colours for v in found]) == 1.0
    assert share([v.places for v in found]) == 1.0
    assert share([s for v in found for s in v.shapes]) >= 0.98
    assert share([s for v in found for s in v.sizes]) >= 0.98


def test_another_scenes_drawing_scores_low() -> None:
    """The judge does not accept pictures of something else."""
    found = verdicts((128, 128), 150, shuffled=True)
    assert share([v.colours for v in found]) < 0.05
    assert share([s for v in found for s in v.shapes]) < 0.25


def test_a_thing_too_many_is_wrong() -> None:
    """Right colours do not help a picture that shows two things where one was asked for."""
    rng = random.Random(1)
    thing = world.Thing("circle", "red", "small")
    one = world.Scene((thing,), "left", "blue")
    two = world.Scene((thing, thing), "left of", "blue")
    assert judge(world.render(one, 128, 128, rng), one).colours
    assert judge(world.render(two, 128, 128, rng), one) == Verdict(False, (False,), (False,), False)


def test_the_other_side_is_wrong() -> None:
    """Relations are directed: a circle above a ring is not a ring above a circle."""
    circle, ring = world.Thing("circle", "red", "medium"), world.Thing("ring", "green", "medium")
    said = world.Scene((circle, ring), "above", "black")
    drawn = world.Scene((ring, circle), "above", "black")
    same = world.Scene((ring, circle), "below", "black")
    rng = random.Random(2)
    assert not judge(world.render(drawn, 128, 128, rng), said).colours
    assert judge(world.render(same, 128, 128, rng), said).colours


def test_an_empty_picture_reads_as_its_background() -> None:
    """Nothing is found where nothing is drawn."""
    reading = read(Image.new("RGB", (64, 64), world.PALETTE["pink"]))
    assert reading.background == "pink"
    assert reading.things == ()


def test_training_never_draws_a_held_out_scene() -> None:
    """One scene in ten is held out, in both directions of saying it."""
    rng = random.Random(3)
    assert not any(world.random_scene(rng).held_out() for _ in range(300))
    scene = next(
        s for s in (world.random_scene(rng, held_out=True) for _ in range(99)) if s.place == "above"
    )
    assert world.Scene(scene.things[::-1], "below", scene.background).held_out()


def test_the_same_seed_gives_the_same_captions() -> None:
    """Captions are plain, repeatable sentences of known words."""
    captions = world.random_captions(50, seed=4)
    assert captions == world.random_captions(50, seed=4)
    assert len(set(captions)) == 50
    words = {word for text in captions for word in text.split()}
    assert words <= world.caption_words()


def test_the_world_needs_no_torch() -> None:
    """Load generators import it; they must not pay seconds for torch."""
    code = "import sys, models.training.judge; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
