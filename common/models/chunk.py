"""Run iterations i..j of a denoising loop, with diffusers' own loop block as the driver.

The loop block is copied and `loop_step` overridden on the copy: steps before `start` do
nothing, at `start` the carried values are put in, and where the chunk ends an exception
carries the block state out. The block's preamble and the order of things inside the loop
stay diffusers' code. A chunk that reaches the end lets the block finish by itself.

Carried from chunk to chunk: what the loop declares as its outputs, the latents, and every
declared input that a step has replaced (several loops update `latents` without declaring
it an output).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import BlockState, PipelineState

from common.models.errors import BadInput
from common.models.split import Split


def never() -> bool:
    return False


def nobody(iteration: int) -> None:
    return None


@dataclass(slots=True)
class Chunk:
    """What a chunk left behind. `iteration` counts runs of the loop, of the whole job."""

    iteration: int
    carried: dict[str, Any]
    step_s: list[float] = field(default_factory=list)
    rows: int = 0  # of the largest forward it shared; 0 where it ran alone


class _ChunkEnds(Exception):
    """Leaves the loop block; not an error and never seen outside this file."""

    def __init__(self, block_state: BlockState) -> None:
        self.block_state = block_state


class Pacer:
    """Keeps the host at most one step ahead of an accelerator.

    Kernels are queued asynchronously, so without this a chunk would be issued whole and
    `should_stop` asked before the first step has run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._last: Any = None

    def step_issued(self) -> None:
        if not self._cuda:
            return
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # Of the device that computes, whichever is current on this thread.
        event.record(torch.cuda.current_stream(self._device))
        if self._last is not None:
            self._last.synchronize()
        self._last = event

    def drain(self) -> None:
        if self._last is not None:
            self._last.synchronize()


def run(
    components: Any,
    split: Split,
    state: PipelineState,
    start: int,
    stop: int,
    carried: dict[str, Any] | None = None,
    should_stop: Callable[[], bool] = never,
    progress: Callable[[int], None] = nobody,
    device: torch.device | None = None,
    timestep_per_picture: bool = False,
    seen: Callable[[int, torch.Tensor], None] | None = None,
) -> Chunk:
    """Run iterations `start`..`stop` (exclusive) of a job's loop, one a timestep.

    `stop` past the end means the end.

    `components` is the job's own copy of the pipeline, `state` what the prepare blocks left,
    `carried` what the previous chunk left (None at step 0). `should_stop` is asked before
    every iteration but the first, so a chunk always gets somewhere; `progress` is told after
    each how many are done, and `seen` is shown the latents too. Raises BadInput where `start` lies
    outside of the loop.
    """
    total = len(state.get("timesteps"))
    stop = min(stop, total)
    if not 0 <= start < stop:
        raise BadInput(f"steps {start} to {stop} do not lie within the {total} steps of this job")
    for name, value in (carried or {}).items():
        # The preamble reads the state; what it derives from latents is their shape at most.
        state.values[name] = value
    pacer = Pacer(device or torch.device("cpu"))
    step_s: list[float] = []
    done = start
    last = perf_counter()

    def step(pipe: Any, block: BlockState, i: int, t: Any, **more: Any) -> tuple[Any, BlockState]:
        nonlocal done, last
        if i < start:
            return pipe, block
        if i == start:
            for name, value in (carried or {}).items():
                setattr(block, name, value)
            last = perf_counter()
        elif i >= stop or should_stop():
            raise _ChunkEnds(block)
        if timestep_per_picture:
            t = t.expand(block.latents.shape[0])
        pipe, block = split.loop.loop_step(pipe, block, i=i, t=t, **more)
        pacer.step_issued()
        now = perf_counter()
        step_s.append(now - last)
        last = now
        done = i + 1
        progress(done)
        if seen is not None:
            seen(done, block.latents)
        return pipe, block

    driver = copy.copy(split.loop)
    driver.loop_step = step
    driver.set_progress_bar_config(disable=True)
    before = dict(state.values)
    try:
        with torch.no_grad():
            driver(components, state)
    except _ChunkEnds as end:
        after: Any = end.block_state.as_dict()
    else:
        after = state.values
    pacer.drain()
    return Chunk(iteration=done, carried=_carried(split, before, after, carried), step_s=step_s)


def preamble(components: Any, split: Split, job_state: PipelineState) -> BlockState:
    """The block state as the loop's own preamble leaves it, before its first step."""

    def step(pipe: Any, block: BlockState, **_: Any) -> tuple[Any, BlockState]:
        raise _ChunkEnds(block)

    driver = copy.copy(split.loop)
    driver.loop_step = step
    driver.set_progress_bar_config(disable=True)
    try:
        driver(components, job_state)
    except _ChunkEnds as end:
        return end.block_state
    raise BadInput("this job has no steps")


def _carried(
    split: Split,
    before: dict[str, Any],
    after: dict[str, Any],
    earlier: dict[str, Any] | None,
) -> dict[str, Any]:
    names = {"latents", *(earlier or ())}
    names |= set(split.loop_outputs)
    for param in split.loop_inputs:
        name = param.name
        if not name or name not in after or after[name] is before.get(name):
            continue
        # A default that the preamble filled in is not news.
        if before.get(name) is not None or after[name] is not param.default:
            names.add(name)
    return {name: after[name] for name in sorted(names) if name in after}
