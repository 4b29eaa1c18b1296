"""Do the bundled model's pictures show what their prompts say?

    python -m benchmarks.prompt_accuracy --n 200 --json

Draws captions of scenes that training never saw, makes the pictures with diffusers' own
`QwenImagePipeline`, and has each read back into words by a judge that sees its pixels alone
(`models/training/judge.py`). A caption's colours count as right when the background and every thing
have the colour said, with each thing where it was said to be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch is imported: one thread, not spinning, is the fastest beside other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from models.training import world
from models.training.judge import Verdict, judge

if TYPE_CHECKING:
    from PIL import Image

MODEL = Path(__file__).resolve().parents[1] / "models" / "tiny-qwen-image"


def held_out_scenes(count: int, seed: int) -> list[world.Scene]:
    """Scenes that training never saw, no two of them the same."""
    rng = random.Random(f"prompt accuracy {seed}")
    scenes: dict[str, world.Scene] = {}
    while len(scenes) < count:
        scene = world.random_scene(rng, held_out=True)
        scenes.setdefault(scene.key(), scene)
    return list(scenes.values())


def make_pictures(args: argparse.Namespace, captions: list[str]) -> list[Image.Image]:
    """One picture a caption, each from its own seed whatever the batch."""
    import torch
    from diffusers import QwenImagePipeline

    pipe = QwenImagePipeline.from_pretrained(args.model, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    guided = args.cfg > 1
    pictures: list[Image.Image] = []
    for first in range(0, len(captions), args.batch):
        batch = captions[first : first + args.batch]
        seeds = range(args.seed * 1_000_000 + first, args.seed * 1_000_000 + first + len(batch))
        with torch.inference_mode():
            made = pipe(
                prompt=batch,
                negative_prompt=[" "] * len(batch) if guided else None,
                true_cfg_scale=args.cfg,
                height=args.height,
                width=args.width,
                num_inference_steps=args.steps,
                generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            )
        pictures += made.images
        print(f"\r{len(pictures)}/{len(captions)} pictures", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return pictures


def summarise(verdicts: list[Verdict]) -> dict[str, float]:
    """The shares of captions, and of the things in them, that came out right."""
    shapes = [right for v in verdicts for right in v.shapes]
    sizes = [right for v in verdicts for right in v.sizes]
    whole = [v.colours and all(v.shapes) and all(v.sizes) for v in verdicts]

    def share(checks: list[bool]) -> float:
        return round(sum(checks) / len(checks), 4) if checks else float("nan")

    return {
        "colour_accuracy": share([v.colours for v in verdicts]),
        "colour_accuracy_one_thing": share([v.colours for v in verdicts if len(v.shapes) == 1]),
        "colour_accuracy_two_things": share([v.colours for v in verdicts if len(v.shapes) == 2]),
        "place_accuracy": share([v.places for v in verdicts]),
        "shape_accuracy": share(shapes),
        "size_accuracy": share(sizes),
        "all_right": share(whole),
    }


def by_shape(scenes: list[world.Scene], verdicts: list[Verdict]) -> dict[str, float]:
    """Shape accuracy, shape by shape."""
    tally: dict[str, list[bool]] = {shape: [] for shape in world.SHAPES}
    for scene, verdict in zip(scenes, verdicts, strict=True):
        for thing, right in zip(scene.things, verdict.shapes, strict=True):
            tally[thing.shape].append(right)
    return {shape: round(sum(found) / len(found), 3) for shape, found in tally.items() if found}


def contact_sheet(pictures: list[Image.Image], path: Path) -> None:
    """The first pictures side by side, ten in a row, for a look by eye."""
    from PIL import Image

    shown, (width, height) = pictures[:60], pictures[0].size
    sheet = Image.new("RGB", (10 * (width + 4), -(-len(shown) // 10) * (height + 4)), (90, 90, 90))
    for index, picture in enumerate(shown):
        sheet.paste(picture, (index % 10 * (width + 4), index // 10 * (height + 4)))
    sheet.save(path)


def main() -> None:
    """Make and judge the pictures, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prompt_accuracy", description=__doc__
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--n", type=int, default=200, help="captions (default 200)")
    parser.add_argument("--height", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--cfg", type=float, default=2.0, help="true_cfg_scale; 1 means no guidance"
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sheet", type=Path, help="write the first 60 pictures to this PNG")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()

    scenes = held_out_scenes(args.n, args.seed)
    began = time.monotonic()
    pictures = make_pictures(args, [world.caption(scene) for scene in scenes])
    took_s = time.monotonic() - began
    verdicts = [judge(picture, scene) for picture, scene in zip(pictures, scenes, strict=True)]
    shares, shapes = summarise(verdicts), by_shape(scenes, verdicts)
    if args.sheet:
        contact_sheet(pictures, args.sheet)

    print(f"{args.n} captions unseen in training, {args.width}x{args.height} px,")
    print(f"{args.steps} steps, true_cfg_scale {args.cfg}, {took_s:.0f} s")
    for name, value in shares.items():
        print(f"  {name:<28}{value:7.1%}")
    print("  " + ", ".join(f"{shape} {value:.0%}" for shape, value in shapes.items()))
    if args.json:
        settings = {
            key: getattr(args, key) for key in ("n", "height", "width", "steps", "cfg", "seed")
        }
        report = {
            **settings,
            **shares,
            "shape_accuracy_by_shape": shapes,
            "seconds": round(took_s, 1),
        }
        print(json.dumps(report))


if __name__ == "__main__":
    main()
