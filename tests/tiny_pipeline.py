"""The three stages of a model in one process, driven by hand, without Redis.

What the worker loop and the coordinator do, in twenty lines: keep the handles, cut the steps,
run one task after another.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import tests.tiny_models  # noqa: F401 - sets threads before torch is imported
from common.arena import Arena
from common.handles import Handle, HandleStore
from common.models import parcels
from common.models.stages import build_stage
from common.stage import Outcome, Row, Task

DEFAULTS: dict[str, Any] = {
    "prompt": "a red circle",
    "negative_prompt": None,
    "width": 64,
    "height": 64,
    "num_inference_steps": 4,
    "true_cfg_scale": 4.0,
    "guidance_scale": None,
    "sigmas": None,
    "max_sequence_length": 512,
    "seed": 7,
    "n": 1,
    "output_format": "png",
    "output_compression": 100,
}


class Control:
    """Stops after `stop_after` questions; remembers what it was told."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.asked = 0
        self.told: list[tuple[str, int]] = []

    def should_stop(self) -> bool:
        self.asked += 1
        return self.stop_after is not None and self.asked >= self.stop_after

    def has_left(self, job: str) -> bool:
        return False

    def progress(self, job: str, step: int) -> None:
        self.told.append((job, step))


class Stages:
    """encode, denoise and decode of one model over one arena."""

    def __init__(self, model: Path, arena: Path, **settings: Any) -> None:
        self.store = HandleStore("test", Arena.open(str(arena), 32 * 2**20))
        self.by_kind: dict[str, Any] = {
            kind: build_stage(kind, model, self.store, **settings)
            for kind in ("encode", "denoise", "decode")
        }
        self.seq = itertools.count(1)

    def job(self, job: str = "job", **params: Any) -> Job:
        return Job(self, job, {**DEFAULTS, **params})

    def task(self, kind: str, *rows: Row) -> Task:
        return Task(next(self.seq), kind, "tiny", rows)

    def run(self, task: Task, control: Control | None = None) -> list[Outcome]:
        stage = self.by_kind[task.stage]
        outcomes: list[Outcome] = stage.run(task, stage.stage_in(task), control or Control())
        return outcomes

    def together(
        self, jobs: list[Job], steps: int, control: Control | None = None
    ) -> list[Outcome]:
        """One denoise task of all jobs that are not done, not exact, `steps` further each."""
        rows = [
            dataclasses.replace(job.row(job.step, job.step + steps), exact=False)
            for job in jobs
            if job.step < job.params["num_inference_steps"]
        ]
        outcomes = self.run(self.task("denoise", *rows), control)
        by_id = {job.id: job for job in jobs}
        for outcome in outcomes:
            if not outcome.error_code:
                by_id[outcome.job].accept(outcome)
        return outcomes

    def forget(self) -> None:
        """Drop what the denoiser holds live, as if the next chunk ran elsewhere."""
        self.by_kind["denoise"].close()


class Job:
    """A job's trajectory by hand."""

    def __init__(self, stages: Stages, job: str, params: dict[str, Any]) -> None:
        self.stages, self.id, self.params = stages, job, params
        self.handles: dict[str, Handle] = {}
        self.step = 0

    def row(self, start: int = 0, stop: int = 0) -> Row:
        return Row(self.id, self.params, dict(self.handles), start, stop)

    def run(self, kind: str, stop: int = 0, control: Control | None = None) -> Outcome:
        start = self.step if kind == "denoise" else 0
        task = self.stages.task(kind, self.row(start, stop))
        outcome = self.stages.run(task, control)[0]
        assert not outcome.error_code, f"{outcome.error_code}: {outcome.error}"
        self.accept(outcome)
        return outcome

    def accept(self, outcome: Outcome) -> None:
        """Take over the outcome's handles and give back those they replace."""
        old = [self.handles[part] for part in outcome.handles if part in self.handles]
        self.handles.update(outcome.handles)
        self.step = max(self.step, outcome.step)
        self.stages.by_kind["denoise"].free(old)

    def denoise(self, cuts: list[int], forget: bool = False) -> Outcome:
        """Chunks that end at each of `cuts`; with `forget` every chunk resumes from handles."""
        for stop in cuts:
            if forget:
                self.stages.forget()
            outcome = self.run("denoise", stop)
        return outcome

    def latents(self) -> torch.Tensor:
        with self.stages.store.borrow(self.handles["latents"]) as parcel:
            values = parcels.read("latents", parcel, torch.device("cpu"))
        latents: torch.Tensor = values["carried"]["latents"]
        return latents

    def pictures(self) -> list[np.ndarray]:
        return [open_picture(output.content) for output in self.run("decode").outputs]

    def free(self) -> None:
        self.stages.by_kind["denoise"].free(list(self.handles.values()))


def open_picture(content: bytes) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(content)))
