"""Several jobs in one forward pass, for rows that need not be exact.

Each job keeps its own step, scheduler, guider, guidance scale and number of pictures: the
family's own step blocks run once over all rows (joint.py). Against the same job alone this
differs by rounding only (fp32: up to 1e-5, see docs/models.md); padding is masked and a
neighbour's values never enter. In families that can, jobs of several sizes go together (ragged.py).

Between any two steps jobs may leave: at their own stop, when told to, or because their own
scheduler raised. A forward that runs out of memory is halved and tried again at the same step.

Only families with an entry `batching` in quirks.py.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import BlockState

from common.models import chunk, joint, ragged
from common.models.chunk import Chunk
from common.models.joint import JointGuider, JointScheduler, Member
from common.models.live import Denoiser, LiveJob
from common.models.quirks import Batching
from common.models.rows import give_back_memory, is_out_of_memory

log = logging.getLogger(__name__)

HIGH, LOW = "guider", "guider_2"  # guiders of the two experts of a model that has two


def never(place: int) -> bool:
    return False


@dataclass
class Batched:
    """What became of each job, in order.

    A Chunk stops short of the job's stop where the run was stopped, the job left, or it did not
    even fit alone with its branches merged. An exception is the job's own, and its state is no
    longer good.
    """

    jobs: list[Chunk | Exception]
    refused_rows: int = 0  # the smallest forward that did not fit; 0 if all did


def key(model: Denoiser, job: LiveJob, mixed: ragged.Form | None = None) -> tuple[Any, ...] | None:
    """Jobs of equal keys may share a forward; None where this job may not.

    Geometry must agree unless sizes are mixed. So must the length of prompts, where the denoiser
    takes no mask for them, and what the family wants alike.
    """
    how = model.quirks.batching
    if how is None or any(job.state.get(name) is not None for name in how.alone_with):
        return None
    latents = job.carried.get("latents", job.state.get("latents"))
    lengths = () if how.pads else _prompt_lengths(job)
    if len(lengths) > 1:
        return None
    if mixed:
        return ("mixed", tuple(latents.shape[2:]), str(latents.dtype), lengths)
    alike = (repr(job.state.get(name)) for name in ("img_shapes", *how.alike))
    return (tuple(latents.shape[1:]), str(latents.dtype), *alike, lengths)


def _prompt_lengths(job: LiveJob) -> tuple[int, ...]:
    """Token counts of the job's prompt and, where it reads one, its negative prompt."""
    names = ["prompt_embeds", "negative_prompt_embeds"][: branches(job)]
    found = [job.state.get(name) for name in names]
    return tuple(sorted({int(e.shape[1]) for e in found if isinstance(e, torch.Tensor)}))


def branches(job: LiveJob) -> int:
    """Forward rows a picture: two where guidance is on."""
    guider = getattr(job.pipe, "guider", None)
    return 1 if guider is None else int(guider.num_conditions)


def largest_forward(rows: Iterable[int], max_rows: int | None) -> int:
    """Rows of the largest forward that `run` makes of jobs of so many rows each, in this order."""
    largest = current = 0
    for own in rows:
        fits = max_rows is None or current + own <= max_rows
        current = current + own if fits else own
        largest = max(largest, current)
    return largest


def run(
    model: Denoiser,
    jobs: list[LiveJob],
    stops: list[int],
    should_stop: Callable[[], bool] = chunk.never,
    progress: Callable[[int, int], None] = lambda job, iteration: None,
    device: torch.device | None = None,
    leaves: Callable[[int], bool] = never,
    max_rows: int | None = None,
    mixed: ragged.Form | None = None,
) -> Batched:
    """Run each job to its own stop (an iteration), all that are left in one forward a step.

    `progress` is told the job's place in `jobs` and its iteration; `leaves` is asked by place
    whether a job need not go on. `max_rows` bounds one forward; one job is always let in. `mixed`
    says how jobs of several sizes share one; without it all must be of one size. An exception
    leaves the jobs half way: throw them away and start again from their handles.
    """
    how = model.quirks.batching
    assert how is not None
    members = []
    for job, stop in zip(jobs, stops, strict=True):
        job.state.values.update(job.carried)
        block = chunk.preamble(job.pipe, model.split, job.state)
        members.append(Member(job, min(stop, job.iterations), block))
    run = _Run(model, how, max_rows, mixed)
    pacer = chunk.Pacer(device or torch.device("cpu"))
    left = list(members)
    last = perf_counter()
    try:
        with torch.no_grad():
            while left:
                done = run.step(left)
                pacer.step_issued()
                now = perf_counter()
                for m in done:
                    m.job.iteration += 1
                    m.step_s.append(now - last)
                    progress(members.index(m), m.job.iteration)
                last = now
                if should_stop():
                    break
                left = [
                    m for m in done if m.job.iteration < m.stop and not leaves(members.index(m))
                ]
    finally:
        run.part()
    pacer.drain()
    return Batched([m.error or _chunk(m) for m in members], run.refused_rows)


def _chunk(m: Member) -> Chunk:
    carried = {**m.job.carried, "latents": m.block.latents}
    return Chunk(m.job.iteration, carried, m.step_s, m.rows_seen)


class _Forward:
    """Jobs that share a forward, step after step, while nothing about them changes."""

    def __init__(
        self,
        model: Denoiser,
        how: Batching,
        members: list[Member],
        guider: str,
        mixed: ragged.Form | None,
    ) -> None:
        self.members, self._model = members, model
        self._experts = hasattr(model.pipe, LOW)
        self._rows = [m.rows for m in members]
        self.rows = sum(self._rows)
        self.scheduler = JointScheduler(members)
        self._state: BlockState = joint.join(members, how)
        self._pipe = copy.copy(model.pipe)
        self._pipe.scheduler = self.scheduler
        if members[0].guider is not None:
            setattr(self._pipe, guider, JointGuider(members, how))
        if mixed:
            shapes = [m.block.img_shapes[0] for m in members for _ in range(m.rows)]
            if any(row != shapes[0] for row in shapes):
                self._pipe.transformer = ragged.MixedSizes(model.pipe.transformer, shapes, mixed)

    def step(self) -> None:
        self.scheduler.stepped = False
        t: Any = joint.timesteps(self.members)
        if self._experts:
            t = joint.RowTimesteps(t)
        self._model.split.loop.loop_step(self._pipe, self._state, i=0, t=t)
        for m in self.members:
            m.rows_seen = max(m.rows_seen, self.rows)

    def part(self) -> None:
        joint.part(self._state, self.members, self._rows)


class _Run:
    """The forwards of one chunk: laid out anew whenever the jobs, experts or branches change."""

    def __init__(
        self, model: Denoiser, how: Batching, max_rows: int | None, mixed: ragged.Form | None
    ) -> None:
        self._model, self._how, self._max_rows, self._mixed = model, how, max_rows, mixed
        self._layout: list[tuple[Any, ...]] = []
        self._forwards: list[_Forward] = []
        self.refused_rows = 0
        config = getattr(model.pipe, "config", {})
        self._boundary = None
        if hasattr(model.pipe, LOW):
            self._boundary = config["boundary_ratio"] * model.pipe.num_train_timesteps

    def step(self, left: list[Member]) -> list[Member]:
        """One step of every job; those that made it, which is all but few."""
        layout = []
        for m in left:
            guider = self._guider(m)
            m.settle(guider)
            layout.append((id(m), guider, m.branches))
        if layout != self._layout:
            self.part()
            self._forwards = [
                self._forward(group, guider)
                for guider in dict.fromkeys(guider for _, guider, _ in layout)
                for group in self._fit([m for m in left if self._guider(m) == guider])
            ]
            self._layout = layout
        waiting = self._forwards
        self._forwards = ran = []
        while waiting:
            forward = waiting.pop(0)
            try:
                forward.step()
            except Exception as error:
                if not is_out_of_memory(error) or forward.scheduler.stepped:
                    raise
                waiting[:0] = self._smaller(forward)
            else:
                ran.append(forward)
        return [m for f in ran for m in f.members if m.error is None]

    def part(self) -> None:
        """Every job's latents back to its own block state."""
        for forward in self._forwards:
            forward.part()
        self._forwards, self._layout = [], []

    def _guider(self, m: Member) -> str:
        return HIGH if self._boundary is None or m.timestep >= self._boundary else LOW

    def _forward(self, members: list[Member], guider: str) -> _Forward:
        return _Forward(self._model, self._how, members, guider, self._mixed)

    def _fit(self, members: list[Member]) -> list[list[Member]]:
        """Members in order, as many a forward as the bound allows."""
        groups: list[list[Member]] = []
        for m in members:
            rows = sum(other.rows for other in groups[-1]) if groups else 0
            if groups and (self._max_rows is None or rows + m.rows <= self._max_rows):
                groups[-1].append(m)
            else:
                groups.append([m])
        return groups

    def _smaller(self, forward: _Forward) -> list[_Forward]:
        """The same jobs in halves; a job by itself is left where it stands."""
        give_back_memory()
        self.refused_rows = min(self.refused_rows or forward.rows, forward.rows)
        log.warning("a forward of %d rows did not fit and is halved", forward.rows)
        forward.part()
        members = forward.members
        self._max_rows = max(1, forward.rows // 2)
        self._layout = []
        guider = self._guider(members[0])
        return [self._forward(g, guider) for g in self._fit(members)] if len(members) > 1 else []
