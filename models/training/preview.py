"""`python -m models.training.preview MODEL`: fits the map behind a model's previews.

Runs jobs of the model's own, sets the latents they end with against what the decoder makes of them,
and writes preview.json beside the weights: least squares, a token's latents to SIDE × SIDE pixels.
For the bundled model the prompts are captions of its world; --prompts FILE (one a line) for others.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from common.settings import BUNDLED_MODEL, single_threaded
from models.training import world

single_threaded()

import torch  # noqa: E402
from PIL import Image  # noqa: E402

from common.arena import Arena  # noqa: E402
from common.handles import Handle, HandleStore  # noqa: E402
from common.models import parcels, preview, state  # noqa: E402
from common.models.directory import PREVIEW  # noqa: E402
from common.models.stages import build_stage  # noqa: E402
from common.params import PoolDefaults, accept, merge_manifests  # noqa: E402
from common.push import read_push  # noqa: E402
from common.stage import DECODE, DENOISE, ENCODE, STAGES, Row, Task  # noqa: E402
from services.costs.bench import Stopwatch  # noqa: E402

# Pixels a token becomes, squared. More of them follow an edge no better: one token knows little of
# its neighbours.
SIDE = 4
ARENA_BYTES = 256 << 20
# Least squares with a trace of ridge, so that channels a model never uses stay at 0.
RIDGE = 1e-4


class Model:
    """The three stages of a model in this process."""

    def __init__(self, path: Path, arena: Arena) -> None:
        self._store = HandleStore("preview", arena=arena)
        self._stages: dict[str, Any] = {
            kind: build_stage(kind, path, self._store) for kind in STAGES
        }
        self.name = self._stages[DENOISE].model.directory.name
        published = {f"{self.name}/{k}": s.manifest() for k, s in self._stages.items()}
        self._manifests = merge_manifests(published)

    def make(self, **given: Any) -> tuple[torch.Tensor, np.ndarray, dict[str, Any]]:
        """The latents that a job ends with, h×w×3 uint8 of its first picture, its parameters."""
        push = read_push("1-0", {b"payload": json.dumps(given).encode()})
        params = accept(push, self._manifests, PoolDefaults()).params
        handles = self._run(ENCODE, params, {})
        steps = int(params["num_inference_steps"])
        handles |= self._run(DENOISE, params, handles, steps)
        parts: dict[str, Any] = {}
        for part in (state.PREPARED, state.LATENTS):
            with self._store.borrow(handles[part]) as parcel:
                parts[part] = parcels.read(part, parcel, torch.device("cpu"))
        picture = self._stages[DECODE].pixels(params, parts)[0]
        self._stages[DENOISE].free(list(handles.values()))
        return parts[state.LATENTS]["carried"]["latents"], picture, params

    def _run(
        self, kind: str, params: dict[str, Any], handles: dict[str, Handle], stop: int = 0
    ) -> dict[str, Handle]:
        task = Task(1, kind, self.name, (Row("preview", params, handles, 0, stop),))
        stage = self._stages[kind]
        [outcome] = stage.run(task, stage.stage_in(task), Stopwatch(lambda: 0.0))
        if outcome.error_code:
            raise SystemExit(f"{kind}: {outcome.error}")
        left: dict[str, Handle] = outcome.handles
        return left


def samples(model: Model, prompts: list[str], size: tuple[int, int], steps: int) -> Iterator[Any]:
    """By prompt: tokens × (features + 1) and tokens × 3·SIDE², values 0 to 1."""
    for seed, prompt in enumerate(prompts):
        latents, picture, params = model.make(
            prompt=prompt, width=size[0], height=size[1], num_inference_steps=steps, seed=seed
        )
        tokens = preview.grid(latents, params["height"], params["width"]).float()
        rows, columns, features = tokens.shape
        small = Image.fromarray(picture).resize((columns * SIDE, rows * SIDE), Image.Resampling.BOX)
        pixels = torch.from_numpy(np.array(small)).float() / 255
        blocks = pixels.view(rows, SIDE, columns, SIDE, 3).permute(0, 2, 1, 3, 4)
        flat = tokens.reshape(-1, features)
        yield torch.cat([flat, torch.ones(len(flat), 1)], 1), blocks.reshape(len(flat), -1)


def fit(inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """(3·SIDE², features + 1): what makes `wanted` of `inputs` with the least squared error."""
    x, y = inputs.double(), wanted.double()
    square = x.T @ x
    square += RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=torch.float64)
    weights: torch.Tensor = torch.linalg.solve(square, x.T @ y).T
    return weights


def explained(weights: torch.Tensor, inputs: torch.Tensor, wanted: torch.Tensor) -> float:
    """Share of the pixels' variance that the map gets right, 1 at best."""
    error = (inputs.double() @ weights.T - wanted.double()).square().mean()
    return float(1 - error / wanted.double().var())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m models.training.preview", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--prompts", type=Path, help="a file of prompts, one a line")
    parser.add_argument("--count", type=int, default=64, help="jobs; a quarter of them only tests")
    parser.add_argument("--size", default="128x128", help="WIDTHxHEIGHT")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, help="default: preview.json in the model's directory")
    args = parser.parse_args()
    prompts = (
        args.prompts.read_text().split("\n")
        if args.prompts
        else [world.caption(world.random_scene(random.Random(i))) for i in range(args.count)]
    )
    prompts = [prompt for prompt in prompts if prompt.strip()][: args.count]
    width, height = (int(side) for side in args.size.split("x"))
    with (
        tempfile.TemporaryDirectory(prefix="slackwater-preview-") as folder,
        Arena.open(str(Path(folder) / "arena"), ARENA_BYTES) as arena,
    ):
        found = list(samples(Model(args.model, arena), prompts, (width, height), args.steps))
    held_out = max(1, len(found) // 4)
    test, train = found[:held_out], found[held_out:]
    inputs, wanted = (torch.cat(columns) for columns in zip(*train, strict=True))
    weights = fit(inputs, wanted)
    right = explained(weights, *(torch.cat(columns) for columns in zip(*test, strict=True)))
    rows = [[float(f"{value:.4g}") for value in row] for row in weights.tolist()]
    content = {
        "version": preview.VERSION,
        "side": SIDE,
        "explained": round(right, 3),
        "weights": rows,
    }
    out = args.out or args.model / PREVIEW
    out.write_text(json.dumps(content) + "\n")
    print(
        f"{out}: {len(train)} pictures, {100 * right:.1f} % of the variance of {len(test)} others"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
