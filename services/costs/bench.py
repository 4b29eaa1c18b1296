"""The three stages of a model in this process, over an arena of its own, to be timed.

They are the very stages that workers run (common/stage_main.py), fed as workers feed them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from common.arena import Arena
from common.handles import Handle, HandleStore
from common.params import PoolDefaults, accept, merge_manifests
from common.push import read_push
from common.settings import Settings
from common.stage import DECODE, DENOISE, ENCODE, STAGES, Row, Stage, Task
from common.stage_main import make_stage

Handles = dict[str, Handle]


class StageFailed(RuntimeError):
    """A stage could not do what is to be measured; says which, at what size, and why."""


class Stopwatch:
    """A Control that never stops anything and notes when each step ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: dict[str, list[float]] = {}
        self._began = clock()

    def should_stop(self) -> bool:
        return False

    def has_left(self, job: str) -> bool:
        return False

    def progress(self, job: str, step: int) -> None:
        self._ends.setdefault(job, []).append(self._clock())

    def seconds(self) -> float:
        """Since it was made."""
        return self._clock() - self._began

    def step_s(self) -> float:
        """Median of one job's steps but for the first, in whose time the loop was set up."""
        ends = next(iter(self._ends.values()), [])
        return median([b - a for a, b in pairwise(ends)] or [self.seconds()])


@dataclass(frozen=True, slots=True)
class Run:
    """One task: its seconds, those of a step in it, and what each row left."""

    seconds: float
    step_s: float
    handles: list[Handles]


class Bench:
    """Runs single tasks and says what a worker would report of them."""

    def __init__(self, settings: Settings, store: HandleStore) -> None:
        # A prompt is to be encoded every time.
        settings = settings.model_copy(update={"embed_cache_bytes": 0})
        self._model, self._store = settings.served_name(), store
        self._stages: dict[str, Stage] = {
            kind: make_stage(kind, settings, store) for kind in STAGES
        }
        published = {f"{self._model}/{kind}": s.manifest() for kind, s in self._stages.items()}
        self.manifest: dict[str, Any] = merge_manifests(published)[self._model]
        self._seq = 0
        # A thread that only computes takes its CPU time wherever nobody else wants the core;
        # on a shared machine the clock on the wall was measured to say up to twice as much.
        alone = settings.device == "cpu" and settings.threads == 1 and not settings.noop
        self._clock = time.thread_time if alone else time.perf_counter

    def forwards(self) -> tuple[int, ...]:
        """Forwards a step may take: one, and two where the model has guidance."""
        return (1, 2) if self.manifest.get("cfg") else (1,)

    def params(self, forwards: int, **given: Any) -> dict[str, Any]:
        """A job's effective parameters; InvalidRequest where the model does not take them."""
        cfg = self.manifest.get("cfg")
        given = {"prompt": "a red circle on a blue background", "seed": 1, **given}
        if cfg:
            given[cfg["scale"]] = 1.0 if forwards == 1 else 4.0
        if cfg and forwards == 2 and cfg.get("needs"):
            given.setdefault(cfg["needs"], given["prompt"])
        push = read_push("1-0", {b"payload": json.dumps(given).encode()})
        return accept(push, {self._model: self.manifest}, PoolDefaults()).params

    def encode(self, params: dict[str, Any]) -> Run:
        return self._run(ENCODE, [Row("profile", params)])

    def prompt_tokens(self, params: dict[str, Any], embeds: Handles) -> int:
        """Length of the prompt's embeddings, or its words where a model leaves none."""
        lengths = [
            spec.shape[1]
            for handle in embeds.values()
            for spec in handle.tensors
            if len(spec.shape) == 3  # rows × tokens × features
        ]
        return max(lengths, default=len(str(params["prompt"]).split()))

    def denoise(self, params: dict[str, Any], embeds: Handles, rows: int = 1) -> Run:
        """All steps of a job in one chunk; of several jobs, in one forward a step."""
        steps = int(params["num_inference_steps"])
        return self._run(
            DENOISE,
            [Row(f"profile-{i}", params, embeds, 0, steps, exact=rows == 1) for i in range(rows)],
        )

    def denoise_mix(self, jobs: Sequence[dict[str, Any]], embeds: Handles, packed: bool) -> Run:
        """All steps of jobs of several sizes in one chunk: one forward a step, or one a size."""
        denoiser: Any = self._stages[DENOISE]
        chosen, denoiser.model.mixed = denoiser.model.mixed, "packed" if packed else None
        rows = [
            Row(f"profile-{i}", params, embeds, 0, int(params["num_inference_steps"]), exact=False)
            for i, params in enumerate(jobs)
        ]
        try:
            return self._run(DENOISE, rows)
        finally:
            denoiser.model.mixed = chosen

    def decode(self, params: dict[str, Any], handles: Handles) -> Run:
        return self._run(DECODE, [Row("profile-0", params, handles)])

    def free(self, handles: Handles) -> None:
        for handle in handles.values():
            self._stages[DENOISE].free([handle])

    def close(self) -> None:
        for stage in self._stages.values():
            stage.close()

    def _run(self, kind: str, rows: list[Row]) -> Run:
        self._seq += 1
        task = Task(self._seq, kind, self._model, tuple(rows))
        stage = self._stages[kind]
        staged = stage.stage_in(task)  # workers do this beside another task
        watch = Stopwatch(self._clock)
        outcomes = stage.run(task, staged, watch)
        run = Run(watch.seconds(), watch.step_s(), [o.handles for o in outcomes])
        for outcome in outcomes:
            if outcome.error_code:
                params = rows[0].params
                raise StageFailed(
                    f"{kind} of {params.get('width')}x{params.get('height')}: {outcome.error}"
                )
        return run


@contextlib.contextmanager
def open_bench(settings: Settings) -> Iterator[Bench]:
    """A Bench over an arena that is gone afterwards.

    Raises RefusedModel (common/models/errors.py) for a model that cannot be served.
    """
    tmpfs = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="slackwater-profile-", dir=tmpfs))
    try:
        with Arena.open(str(folder / "arena"), settings.arena_bytes) as arena:
            bench = Bench(settings, HandleStore(settings.host, arena=arena))
            try:
                yield bench
            finally:
                bench.close()
    finally:
        shutil.rmtree(folder)
