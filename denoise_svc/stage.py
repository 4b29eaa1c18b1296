"""The denoise stage: chunks of steps.

The first chunk of a job prepares it (timesteps, initial latents from the seed) and leaves
the parts "prepared", written once, and "latents"; later chunks read what they need and
write "latents" anew. A job that stays on this worker is kept live in a DeviceCache and
resumes without reading; the cache is never the truth: state is written through before
`run` returns.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from common.handles import DeviceCache, Handle, HandleStore
from common.models import chunk, manifest, parcels, request, schedulers, state
from common.models.errors import BadInput, NonFinite, NotCapturable, StateLost
from common.models.model import Model
from common.models.rows import guarded
from common.models.state import LiveJob
from common.stage import DENOISE, Control, Outcome, Row, Task

# Live jobs kept on the device. Image latents and embeddings are up to 15 MB a job, so this
# holds a hundred; video jobs with UniPC history take 80 MB.
CACHE_BYTES = 2 * 2**30
LIVE = "live"


class DenoiseStage:
    """Implements common.stage.Stage for the transformer of one model."""

    kind = DENOISE

    def __init__(
        self,
        model: str | Path,
        store: HandleStore,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        attention: str = "auto",
        name: str | None = None,
        cache_bytes: int = CACHE_BYTES,
        limits: dict[str, int] | None = None,
    ) -> None:
        self.model = Model(model, DENOISE, device, dtype, threads, attention, name)
        self.store = store
        self.cache = DeviceCache(cache_bytes)
        self._limits = limits

    def manifest(self) -> dict[str, Any]:
        return manifest.build(self.model, self._limits)

    def stage_in(self, task: Task) -> dict[str, Any]:
        """By job, the parts its row needs, or the exception that reading them raised.

        Rows whose job is live on this worker need nothing.
        """
        staged: dict[str, Any] = {}
        for row in task.rows:
            if self._is_live(row):
                continue
            try:
                staged[row.job] = self._read(row)
            except Exception as error:
                staged[row.job] = error  # belongs to the row, not to its neighbours
        return staged

    def run(self, task: Task, staged: Any, control: Control) -> list[Outcome]:
        staged = staged or {}
        return [
            guarded(row, lambda row=row: self._row(task, row, staged.get(row.job), control))
            for row in task.rows
        ]

    def free(self, handles: list[Handle]) -> None:
        for handle in handles:
            if handle.part == state.LATENTS:
                self.cache.drop(handle.job, handle.seq, LIVE)
            self.store.free(handle)

    def close(self) -> None:
        self.cache.shrink(0)

    # -- one row -----------------------------------------------------------------------------

    def _row(self, task: Task, row: Row, parts: Any, control: Control) -> Outcome:
        if isinstance(parts, Exception):
            raise parts
        if not self.model.verdict.ok:
            raise NotCapturable(f"{self.model.verdict.scheduler}: {self.model.verdict.reason}")
        written: dict[str, Handle] = {}
        job = self._take_live(row)
        prepared = None
        if job is None:
            parts = parts if parts is not None else self._read(row)
            if state.LATENTS in row.handles:
                job = self._resume(row, parts)
            else:
                job = self._prepare(row, parts)
                prepared = state.capture_prepared(self.model.split, job, parts[state.EMBEDS])
        if job.step != row.start:
            raise StateLost(f"the task starts at step {row.start}, the state stands at {job.step}")
        done = chunk.run(
            job.pipe,
            self.model.split,
            job.state,
            row.start,
            row.stop,
            job.carried,
            control.should_stop,
            lambda step: control.progress(row.job, step),
            self.model.device,
        )
        job.step, job.carried = done.step, done.carried
        _check_finite(job.carried, job.step)
        try:
            if prepared is not None:
                written[state.PREPARED] = self._write(task, row, state.PREPARED, prepared)
            latents = state.capture_latents(self.model.split, job)
            written[state.LATENTS] = self._write(task, row, state.LATENTS, latents)
        except BaseException:
            self.free(list(written.values()))
            raise
        if done.step < chunk.total_steps(job.state):
            self.cache.put(row.job, task.seq, LIVE, job, job.nbytes())
        return Outcome(
            job=row.job,
            step=done.step,
            handles=written,
            step_s=statistics.median(done.step_s),
        )

    def _write(self, task: Task, row: Row, part: str, values: dict[str, Any]) -> Handle:
        return self.store.put(
            row.job, task.seq, part, parcels.write(part, values, self.model.device)
        )

    def _read(self, row: Row) -> dict[str, Any]:
        """The parts of a row; at step 0 only its embeddings."""
        parts = {}
        for part in (state.EMBEDS, state.PREPARED, state.LATENTS):
            handle = row.handles.get(part)
            if handle is None:
                if part == state.EMBEDS or row.start > 0:
                    raise StateLost(f"the task names no {part!r} handle")
                continue
            with self.store.borrow(handle) as parcel:
                parts[part] = parcels.read(part, parcel, self.model.device)
        return parts

    # -- live jobs ---------------------------------------------------------------------------

    def _is_live(self, row: Row) -> bool:
        latents = row.handles.get(state.LATENTS)
        return latents is not None and self.cache.get(row.job, latents.seq, LIVE) is not None

    def _take_live(self, row: Row) -> LiveJob | None:
        """The live job as it stood when these latents were written; it leaves the cache.

        A chunk moves the job on, so if its report is refused and the same latents come
        again, they must be read from the handle.
        """
        latents = row.handles.get(state.LATENTS)
        if latents is None:
            return None
        job = self.cache.get(row.job, latents.seq, LIVE)
        self.cache.drop_job(row.job)
        return job if job is not None and job.step == row.start else None

    def _prepare(self, row: Row, parts: dict[str, Any]) -> LiveJob:
        model = self.model
        pipe = model.own_pipeline(row.params)
        values = model.initial_state(row.params)
        generator = request.generator(row.params)
        values.set("generator", generator)
        state.restore_embeds(values, parts[state.EMBEDS])
        request.run_blocks(model.split.prepare, pipe, values)
        model.quirks.prepared(pipe, values)
        if not bool(torch.isfinite(values.get("timesteps")).all()):
            raise BadInput(
                "num_inference_steps: the scheduler makes no finite timesteps of these; use more"
            )
        return LiveJob(
            pipe=pipe,
            state=values,
            generator=generator,
            marks=schedulers.Marks.of(pipe.scheduler),
        )

    def _resume(self, row: Row, parts: dict[str, Any]) -> LiveJob:
        model = self.model
        pipe = model.own_pipeline(row.params)
        values = model.initial_state(row.params)
        generator = request.generator(row.params)
        values.set("generator", generator)
        prepared = parts[state.PREPARED]
        state.restore_prepared(values, prepared, parts[state.EMBEDS])
        job = LiveJob(pipe, values, generator, schedulers.Marks({}))
        state.restore_latents(job, prepared["scheduler"], parts[state.LATENTS])
        return job


def _check_finite(carried: dict[str, Any], step: int) -> None:
    for name, value in carried.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            if not bool(torch.isfinite(value).all()):
                raise NonFinite(f"{name} is not finite after step {step}")
