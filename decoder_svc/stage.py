"""The decode stage: latents to pixels, pixels to files.

A job's n pictures are decoded as one batch, as the classic pipeline does, and an exact job's
never with another's: two latents decoded together differ from each alone (2e-6). Jobs that
need not be exact and have one size are decoded together.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from common.handles import Handle, HandleStore
from common.models import images, manifest, parcels, request, single_frame, state
from common.models.errors import BadInput, StateLost
from common.models.model import Model
from common.models.rows import give_back_memory, guarded, is_fatal, is_out_of_memory
from common.stage import DECODE, Control, Outcome, Row, Task

log = logging.getLogger(__name__)

Parts = dict[str, Any]


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
        fast_decode: bool = False,
        tiled_decode: bool = False,
    ) -> None:
        """`fast_decode`: jobs that need not be exact in 2-D, where the autoencoder has that form
        (single_frame.py). `tiled_decode`: diffusers' tiles, for every job larger than a tile."""
        self.model = Model(model, DECODE, device, dtype, threads, attention, name)
        self.store = store
        self._limits = limits
        vae = self.model.pipe.vae
        self._fast = fast_decode and single_frame.applies(vae)
        if tiled_decode:
            vae.enable_tiling()

    def manifest(self) -> dict[str, Any]:
        return manifest.build(self.model, self._limits)

    def stage_in(self, task: Task) -> dict[str, Any]:
        """By job, the parts it decodes from, or the exception that reading them raised."""
        self.model.make_current()  # on the thread that stages
        staged: dict[str, Any] = {}
        for row in task.rows:
            try:
                staged[row.job] = self._read(row)
            except Exception as error:
                staged[row.job] = error  # belongs to the row, not to its neighbours
        return staged

    def run(self, task: Task, staged: Any, control: Control) -> list[Outcome]:
        staged = staged or {}
        together, shares = self._together(task.rows, staged)
        outcomes = [
            guarded(row, partial(self._row, row, staged.get(row.job), together.get(row.job)))
            for row in task.rows
        ]
        for outcome in outcomes:
            outcome.seconds += shares.get(outcome.job, 0.0)
        return outcomes

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

    def _together(
        self, rows: tuple[Row, ...], staged: dict[str, Any]
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """By job, the pixels of those that were decoded with others, and its share of the seconds
        this took; the rest is decoded alone."""
        groups: dict[Any, list[Row]] = {}
        for row in rows:
            parts = staged.get(row.job)
            if not row.exact and isinstance(parts, dict) and self.model.quirks.batching:
                groups.setdefault(self._key(row, parts), []).append(row)
        pixels: dict[str, np.ndarray] = {}
        shares: dict[str, float] = {}
        for group in groups.values():
            if len(group) < 2:
                continue
            began = perf_counter()
            try:
                pixels |= self._decode_all(group, [staged[row.job] for row in group])
            except Exception as error:
                if is_fatal(error):
                    raise
                if is_out_of_memory(error):
                    give_back_memory()
                log.warning("%d jobs could not be decoded together: %s", len(group), error)
            share = (perf_counter() - began) / len(group)
            shares |= {row.job: share for row in group}
        return pixels, shares

    def _key(self, row: Row, parts: Parts) -> tuple[Any, ...]:
        """Jobs of equal keys have latents of one size and kind."""
        latents = parts[state.LATENTS]["carried"]["latents"]
        sides = [row.params.get(name) for name in ("width", "height", "num_frames")]
        return (*sides, tuple(latents.shape[1:]), latents.dtype)

    def _decode_all(self, rows: list[Row], parts: list[Parts]) -> dict[str, np.ndarray]:
        latents = [part[state.LATENTS]["carried"]["latents"] for part in parts]
        carried = {**parts[0][state.LATENTS]["carried"], "latents": torch.cat(latents)}
        joint = {**parts[0], state.LATENTS: {"carried": carried}}
        pixels = self.pixels(rows[0].params, joint, exact=False)
        ends = np.cumsum([len(own) for own in latents])
        split = np.split(pixels, ends[:-1])
        return {row.job: own for row, own in zip(rows, split, strict=True)}

    def _row(self, row: Row, parts: Any, pixels: np.ndarray | None) -> Outcome:
        if isinstance(parts, Exception):
            raise parts
        if pixels is None:
            pixels = self.pixels(row.params, parts or self._read(row), row.exact)
        kind = row.params.get("output_format") or "png"
        quality = row.params.get("output_compression")
        quality = 100 if quality is None else quality
        if pixels.ndim == 5:
            fps = row.params.get("fps") or manifest.DEFAULT_FPS
            outputs = [images.encode_video(video, fps, kind, quality) for video in pixels]
        else:
            outputs = [images.encode(picture, kind, quality) for picture in pixels]
        return Outcome(job=row.job, step=row.start, outputs=outputs)

    def pixels(self, params: dict[str, Any], parts: Parts, exact: bool = True) -> np.ndarray:
        """n×h×w×3 uint8 of the latents in `parts`; n×f×h×w×3 where the model makes videos."""
        model = self.model
        values = model.initial_state(params)
        state.restore_prepared(values, parts[state.PREPARED], embeds=None)
        values.values.update(parts[state.LATENTS]["carried"])
        values.values["output_type"] = "pt"  # floats in [0, 1], still on the device
        fast = self._fast and not exact
        with single_frame.single_frame(model.pipe.vae) if fast else contextlib.nullcontext():
            request.run_blocks(model.split.decode, model.pipe, values)
        made = values.get("images")
        if made is None:
            made = values.get("videos")
        if isinstance(made, list):  # some processors return a list of videos
            made = torch.stack(made)
        if not isinstance(made, torch.Tensor):
            raise BadInput(f"{model.directory.name} makes neither pictures nor videos")
        return images.to_uint8(made)
