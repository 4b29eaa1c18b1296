"""The decode stage: latents to pixels, pixels to files.

A job's n pictures are decoded as one batch, as the classic pipeline does, and never with
another job's: two latents decoded together differ from each alone (2e-6).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.handles import Handle, HandleStore
from common.models import images, manifest, parcels, request, state
from common.models.errors import BadInput, StateLost
from common.models.model import Model
from common.models.rows import guarded
from common.stage import DECODE, Control, Outcome, Row, Task


class DecodeStage:
    """Implements common.stage.Stage for the VAE of one model."""

    kind = DECODE

    def __init__(
        self,
        model: str | Path,
        store: HandleStore,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        attention: str = "auto",
        name: str | None = None,
        limits: dict[str, int] | None = None,
    ) -> None:
        self.model = Model(model, DECODE, device, dtype, threads, attention, name)
        self.store = store
        self._limits = limits

    def manifest(self) -> dict[str, Any]:
        return manifest.build(self.model, self._limits)

    def stage_in(self, task: Task) -> dict[str, Any]:
        """By job, the parts it decodes from, or the exception that reading them raised."""
        staged: dict[str, Any] = {}
        for row in task.rows:
            try:
                staged[row.job] = self._read(row)
            except Exception as error:
                staged[row.job] = error  # belongs to the row, not to its neighbours
        return staged

    def run(self, task: Task, staged: Any, control: Control) -> list[Outcome]:
        staged = staged or {}
        return [guarded(row, partial(self._row, row, staged.get(row.job))) for row in task.rows]

    def free(self, handles: list[Handle]) -> None:
        for handle in handles:
            self.store.free(handle)

    def counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        return None

    def _read(self, row: Row) -> dict[str, Any]:
        parts = {}
        for part in (state.PREPARED, state.LATENTS):
            if part not in row.handles:
                raise StateLost(f"the task names no {part!r} handle")
            with self.store.borrow(row.handles[part]) as parcel:
                parts[part] = parcels.read(part, parcel, self.model.device)
        return parts

    def _row(self, row: Row, parts: Any) -> Outcome:
        if isinstance(parts, Exception):
            raise parts
        if parts is None:
            parts = self._read(row)
        pixels = self.pixels(row.params, parts)
        kind = row.params.get("output_format") or "png"
        quality = row.params.get("output_compression")
        quality = 100 if quality is None else quality
        if pixels.ndim == 5:
            fps = row.params.get("fps") or manifest.DEFAULT_FPS
            outputs = [images.encode_video(video, fps, kind, quality) for video in pixels]
        else:
            outputs = [images.encode(picture, kind, quality) for picture in pixels]
        return Outcome(job=row.job, step=row.start, outputs=outputs)

    def pixels(self, params: dict[str, Any], parts: dict[str, Any]) -> np.ndarray:
        """n×h×w×3 uint8 of one job's latents; n×f×h×w×3 where the model makes videos."""
        model = self.model
        values = model.initial_state(params)
        state.restore_prepared(values, parts[state.PREPARED], embeds=None)
        values.values.update(parts[state.LATENTS]["carried"])
        values.values["output_type"] = "pt"  # floats in [0, 1], still on the device
        request.run_blocks(model.split.decode, model.pipe, values)
        made = values.get("images")
        if made is None:
            made = values.get("videos")
        if isinstance(made, list):  # some processors return a list of videos
            made = torch.stack(made)
        if not isinstance(made, torch.Tensor):
            raise BadInput(f"{model.directory.name} makes neither pictures nor videos")
        return images.to_uint8(made)
