"""The denoise stage: chunks of steps.

The first chunk of a job prepares it (timesteps, initial latents from the seed) and leaves
the parts "prepared", written once, and "latents"; later chunks read what they need and
write "latents" anew. A job that stays on this worker keeps its tensors in the device's blocks
(residents.py) and resumes without reading; these are never the truth: state is written
through before `run` returns.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from common.batching import row_tokens
from common.handles import Handle, HandleStore
from common.models import batch, chunk, live, manifest, parcels, preview, state, step_cache
from common.models.chunk import Chunk
from common.models.errors import BadInput, NonFinite, NotCapturable, StateLost
from common.models.live import LiveJob
from common.models.model import Model
from common.models.preview import Projection
from common.models.rows import guarded, is_fatal
from common.models.step_cache import CacheState, Twins
from common.models.values import is_finite
from common.stage import DENOISE, Control, Outcome, Row, Task
from denoise_svc.blocks import BlockPool
from denoise_svc.checkpoints import Checkpoints
from denoise_svc.footprint import Footprint, prompt_tokens
from denoise_svc.residents import Residents

# Blocks for the states of jobs between their chunks. Image latents and embeddings are up to 15 MB
# a job, so this holds a hundred; video jobs with UniPC history take 80 MB.
CACHE_BYTES = 2 * 2**30

log = logging.getLogger(__name__)

# A live job, and its prepared part where that is still to be written.
Opened = tuple[LiveJob, dict[str, Any] | None]


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
        budget_bytes: int = 0,
        mixed_sizes: str = "auto",
        host_risk_s: float = 0.0,
    ) -> None:
        """`cache_bytes` is the size of the block pool, `budget_bytes` all that this process may use
        of its device (footprint.py); 0 is no limit on CPUs, and nearly all of a CUDA device.
        `host_risk_s` is the work on a job that may be lost with this host (checkpoints.py)."""
        self.model = Model(model, DENOISE, device, dtype, threads, attention, name, mixed_sizes)
        self.store = store
        self.checkpoints = Checkpoints(store, self.model.device, host_risk_s)
        pool = BlockPool(self.model.device, cache_bytes)
        self.residents = Residents(pool)
        self.footprint = Footprint(self.model.device, budget_bytes, pool.nbytes)
        self._twins = Twins(self.model.pipe)
        self._projection = Projection.open(self.model.directory.path, self.model.device)
        self._manifest = manifest.build(self.model, limits)
        self._counts = {"resumed_device": 0, "resumed_read": 0, "batch_rows": 0, "refused_rows": 0}

    def manifest(self) -> dict[str, Any]:
        return self._manifest

    def stage_in(self, task: Task) -> dict[str, Any]:
        """By job, its row opened (read back, or prepared from its embeddings), or the exception
        that this raised.

        Rows whose job is live on this worker need nothing. All of it happens beside the running
        chunk: a new job's timesteps and noise take as long as a small step.
        """
        self.model.make_current()  # on the thread that stages
        staged: dict[str, Any] = {}
        for row in task.rows:
            if self._is_live(row):
                continue
            try:
                staged[row.job] = self._open_from(row, self._read(row))
            except Exception as error:
                staged[row.job] = error  # belongs to the row, not to its neighbours
        return staged

    def run(self, task: Task, staged: Any, control: Control) -> list[Outcome]:
        """Exact rows one after another; of the others, those that fit in one forward together.

        Asked to stop, a task that got somewhere hands back the rows that it has not begun; those
        of jobs that have ended are not begun at all.
        """
        staged = staged or {}
        opened: dict[str, Opened] = {}
        outcomes: dict[str, Outcome] = {}
        together = [r for r in task.rows if not r.exact and not step_cache.wanted(r.params)]
        if self.model.quirks.batching and together:
            opened = self._open_all(together, staged)
            outcomes = self._together(task, together, opened, control)
        begun = bool(outcomes)
        for row in task.rows:
            if row.job in outcomes:
                continue
            if control.has_left(row.job) or (begun and control.should_stop()):
                outcomes[row.job] = Outcome(row.job, step=row.start, done=False)
                continue
            begun = True
            parts = staged.get(row.job)
            work = partial(self._alone, task, row, parts, opened.get(row.job), control)
            outcomes[row.job] = guarded(row, work)
        return [outcomes[row.job] for row in task.rows]

    def free(self, handles: list[Handle]) -> None:
        for handle in handles:
            if handle.part == state.LATENTS:
                self.residents.drop(handle.job, handle.seq)
            self.store.free(handle)

    def counts(self) -> dict[str, int]:
        """Chunks that went on from the device, and those whose state was read back first; rows
        of the largest forward that ran, and of the last one that did not fit its memory; the
        blocks, and the units that surely fit in a forward."""
        units = self.footprint.most_units()
        counts = {
            **self._counts,
            **self.residents.counts(),
            "far_checkpoints": self.checkpoints.far,
        }
        return {**counts, "most_units": units}

    def close(self) -> None:
        self.residents.clear()

    # -- several rows in one forward -----------------------------------------------------------

    def _open_all(self, rows: list[Row], staged: dict[str, Any]) -> dict[str, Opened]:
        """What could be opened; a row that could not runs alone and says why.

        It is no longer staged: what a batch leaves half way must be read again.
        """
        opened = {}
        for row in rows:
            with contextlib.suppress(Exception):
                opened[row.job] = self._open(row, staged.get(row.job))
                staged.pop(row.job, None)
        return opened

    def _together(
        self, task: Task, rows: list[Row], opened: dict[str, Opened], control: Control
    ) -> dict[str, Outcome]:
        """Outcomes of the rows that shared a forward; a guided job shares it with itself."""
        groups: dict[Any, list[Row]] = {}
        for row in rows:
            if row.job not in opened:
                continue
            key = batch.key(self.model, opened[row.job][0], self.model.mixed)
            if key is not None:
                groups.setdefault(key, []).append(row)
        outcomes: dict[str, Outcome] = {}
        for group in groups.values():
            if outcomes and control.should_stop():
                break
            if sum(batch.branches(opened[row.job][0]) for row in group) > 1:
                outcomes |= self._shared(task, group, opened, control)
        return outcomes

    def _shared(
        self, task: Task, group: list[Row], opened: dict[str, Opened], control: Control
    ) -> dict[str, Outcome]:
        """One batch; a row it has no outcome for runs alone, from where it stands."""
        began = perf_counter()
        pairs = [opened.pop(row.job) for row in group]
        jobs = [job for job, _ in pairs]
        tokens = max(map(self._tokens, group)) + max(map(prompt_tokens, jobs))
        most = self.footprint.most_rows(tokens)
        own = [batch.branches(job) * int(row.params.get("n") or 1)
               for job, row in zip(jobs, group, strict=True)]  # fmt: skip
        try:
            with self.footprint.watch(batch.largest_forward(own, most), tokens):
                ran = batch.run(
                    self.model,
                    jobs,
                    [job.iteration_at(row.stop) for job, row in zip(jobs, group, strict=True)],
                    control.should_stop,
                    partial(_tell, control, group, jobs),
                    self.model.device,
                    _leaves(control, group),
                    most,
                    self.model.mixed,
                )
        except Exception as error:
            if is_fatal(error):
                raise
            # One of them spoils it for all; alone, from their handles, each gets its due.
            log.exception("a batch of %d failed; its rows run alone", len(group))
            return {}
        if ran.refused_rows:
            self._counts["refused_rows"] = ran.refused_rows
            self.footprint.refused(ran.refused_rows, tokens)
        outcomes = {}
        for row, (job, prepared), done in zip(group, pairs, ran.jobs, strict=True):
            if isinstance(done, Chunk) and not done.step_s:
                opened[row.job] = job, prepared  # not even by itself with its branches merged
                continue
            preview.show(self._projection, control, row, job, done)
            work = partial(self._finish, task, row, job, prepared, done)
            outcomes[row.job] = guarded(row, work)
            self._counts["batch_rows"] = max(self._counts["batch_rows"], outcomes[row.job].rows)
        for outcome in outcomes.values():
            outcome.seconds = perf_counter() - began
        return outcomes

    # -- one row -----------------------------------------------------------------------------

    def _alone(
        self, task: Task, row: Row, staged: Any, opened: Opened | None, control: Control
    ) -> Outcome:
        job, prepared = opened or self._open(row, staged)
        run = partial(
            chunk.run,
            job.pipe,
            self.model.split,
            job.state,
            job.iteration,
            job.iteration_at(row.stop),
            job.carried,
            lambda: control.should_stop() or control.has_left(row.job),
            lambda iteration: control.progress(row.job, job.step_at(iteration)),
            self.model.device,
            self.model.quirks.timestep_per_picture,
            preview.onlooker(self._projection, control, row, job),
        )
        size = int(row.params.get("n") or 1), self._tokens(row) + prompt_tokens(job)
        self.footprint.check(*size)
        if not step_cache.wanted(row.params):
            with self.footprint.watch(*size):
                done = run()
            return self._finish(task, row, job, prepared, done)
        twin, kept = self._twins.of(row.params), self._take_cache_state(row)
        with twin.running(job.pipe, kept) as cached, self.footprint.watch(*size):
            done = run()
        job.skipped += cached.skipped
        outcome = self._finish(task, row, job, prepared, done)
        if outcome.step < job.steps:
            self.residents.put_cache(row.job, task.seq, cached.state, row.latest_s)
        return outcome

    def _open(self, row: Row, staged: Any) -> Opened:
        """The job, live, and its prepared part if this is its first chunk."""
        if isinstance(staged, Exception):
            raise staged
        job, prepared = self._take_live(row), None
        if job is not None:
            self._counts["resumed_device"] += 1
        else:
            job, prepared = staged or self._open_from(row, self._read(row))
        at = job.step_at(job.iteration)
        if at != row.start:
            raise StateLost(f"the task starts at step {row.start}, the state stands at {at}")
        if job.iteration >= job.iterations:
            raise BadInput(f"all {job.steps} steps of this job are done")
        return job, prepared

    def _open_from(self, row: Row, parts: dict[str, Any]) -> Opened:
        if not self.model.verdict.ok:
            raise NotCapturable(f"{self.model.verdict.scheduler}: {self.model.verdict.reason}")
        if state.LATENTS in row.handles:
            job = live.resume(self.model, row.params, parts)
            self._counts["resumed_read"] += 1
            return job, None
        embeds = parts[state.EMBEDS]
        job = live.prepare(self.model, row.params, embeds)
        return job, state.capture_prepared(self.model.split, job.state, job.marks, embeds)

    def _finish(
        self,
        task: Task,
        row: Row,
        job: LiveJob,
        prepared: dict[str, Any] | None,
        done: Chunk | Exception,
    ) -> Outcome:
        """Write the state through, keep the job live, say how far it came."""
        if isinstance(done, Exception):
            raise done
        job.iteration, job.carried = done.iteration, done.carried
        step = job.step_at(job.iteration)
        _check_finite(job.carried, step)
        parts = {} if prepared is None else {state.PREPARED: prepared}
        parts[state.LATENTS] = live.capture_latents(self.model.split, job)
        spent_s = job.iteration * statistics.fmean(done.step_s) if done.step_s else 0.0
        written = self.checkpoints.write(task.seq, row, parts, spent_s)
        try:
            if job.iteration < job.iterations:  # not to be used from here on
                self.residents.put(row.job, task.seq, job, row.latest_s)
        except BaseException:
            self.free(list(written.values()))
            raise
        # Steps under a cache are short or long: their mean is what a step costs.
        middle = statistics.fmean if step_cache.wanted(row.params) else statistics.median
        # One step may be several iterations (Heun: two).
        step_s = middle(done.step_s) * job.iterations / job.steps if done.step_s else 0.0
        return Outcome(
            job=row.job,
            step=step,
            handles=written,
            step_s=step_s,
            rows=done.rows,
            skipped=job.skipped,
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
        return latents is not None and self.residents.has(row.job, latents.seq)

    def _take_live(self, row: Row) -> LiveJob | None:
        """The live job as it stood when these latents were written; it leaves the device's blocks.

        A chunk moves the job on, so if its report is refused and the same latents come
        again, they must be read from the handle.
        """
        latents = row.handles.get(state.LATENTS)
        if latents is None:
            return None
        job = self.residents.take(row.job, latents.seq)
        return job if job is not None and job.step_at(job.iteration) == row.start else None

    def _take_cache_state(self, row: Row) -> CacheState | None:
        """Its step cache as it stood when these latents were written, if it is still here."""
        latents = row.handles.get(state.LATENTS)
        return None if latents is None else self.residents.take_cache(row.job, latents.seq)

    def _tokens(self, row: Row) -> int:
        """Of its pictures or videos; those of its prompt come on top."""
        return row_tokens(row.params, self._manifest)


def _tell(
    control: Control, rows: list[Row], jobs: list[LiveJob], place: int, iteration: int
) -> None:
    control.progress(rows[place].job, jobs[place].step_at(iteration))


def _leaves(control: Control, rows: list[Row]) -> Callable[[int], bool]:
    """Whether the row at a place need not go on: its job has ended."""
    return lambda place: control.has_left(rows[place].job)


def _check_finite(carried: dict[str, Any], step: int) -> None:
    for name, value in carried.items():
        if not is_finite(value):
            raise NonFinite(f"{name} is not finite after step {step}")
