"""Several jobs in one forward pass, for rows that need not be exact.

A row is one (picture, CFG branch) of one job. Each job keeps its own step, scheduler, guider,
guidance scale and prompt length: the family's own step blocks run once over all rows, with a
guider and a scheduler put in that split the rows by job and ask each job's own. Against the
same job alone this differs by rounding only (fp32: up to 1e-5, see docs/models.md); padding
is masked and a neighbour's values never enter.

Only families marked in quirks.py: the blocks must take their embeddings through the guider,
and their prompts must have masks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import BlockState

from common.models import chunk
from common.models.chunk import Chunk
from common.models.live import Denoiser, LiveJob

FIELDS = "denoiser_input_fields"


class PerJob(list[Any]):
    """One value a job, passed through the blocks untouched to the joint guider."""


@dataclass
class Member:
    """One job in the batch, while it is in it."""

    job: LiveJob
    stop: int  # iteration at which it leaves
    block: BlockState
    step_s: list[float]

    @property
    def pictures(self) -> int:
        return int(self.block.latents.shape[0])

    @property
    def branches(self) -> int:
        return branches(self.job)

    @property
    def timestep(self) -> torch.Tensor:
        timesteps: torch.Tensor = self.block.timesteps
        return timesteps[self.job.iteration]


def key(model: Denoiser, job: LiveJob) -> tuple[Any, ...] | None:
    """Jobs of equal keys may share a forward; None where this family's may not.

    Geometry must agree: padding pictures costs more than it gains on CPUs.
    """
    if not model.quirks.batches:
        return None
    latents = job.carried.get("latents", job.state.get("latents"))
    shapes = repr(job.state.get("img_shapes"))
    return (tuple(latents.shape[1:]), str(latents.dtype), shapes)


def branches(job: LiveJob) -> int:
    """Forward rows a picture: two where guidance is on."""
    return int(job.pipe.guider.num_conditions)


def run(
    model: Denoiser,
    jobs: list[LiveJob],
    stops: list[int],
    should_stop: Callable[[], bool] = chunk.never,
    progress: Callable[[int, int], None] = lambda job, iteration: None,
    device: torch.device | None = None,
) -> list[Chunk]:
    """Run each job to its own stop (an iteration), all that are left in one forward a step.

    `progress` is told the job's place in `jobs` and its iteration. An exception leaves the
    jobs half way: throw them away and start again from their handles.
    """
    members = []
    for job, stop in zip(jobs, stops, strict=True):
        job.state.values.update(job.carried)
        block = chunk.preamble(job.pipe, model.split, job.state)
        members.append(Member(job, min(stop, job.iterations), block, []))
    pacer = chunk.Pacer(device or torch.device("cpu"))
    left = list(members)
    last = perf_counter()
    with torch.no_grad():
        while left:
            joint, pipe = _join(model, left), copy.copy(model.pipe)
            pipe.guider, pipe.scheduler = JointGuider(left), JointScheduler(left)
            # The same members until the first of them leaves.
            for _ in range(min(m.stop - m.job.iteration for m in left)):
                if any(m.step_s for m in members) and should_stop():
                    _part(joint, left)
                    left = []
                    break
                model.split.loop.loop_step(pipe, joint, i=0, t=_timesteps(left))
                pacer.step_issued()
                now = perf_counter()
                for member in left:
                    member.job.iteration += 1
                    member.step_s.append(now - last)
                    progress(members.index(member), member.job.iteration)
                last = now
            else:
                _part(joint, left)
                left = [m for m in left if m.job.iteration < m.stop]
    pacer.drain()
    return [
        Chunk(
            iteration=m.job.iteration,
            carried={**m.job.carried, "latents": m.block.latents},
            step_s=m.step_s,
        )
        for m in members
    ]


def _join(model: Denoiser, members: list[Member]) -> BlockState:
    """One block state for all rows; what only the guider reads stays apart by job."""
    joint = BlockState(**members[0].block.as_dict())
    shared = {}
    for name, value in members[0].block[FIELDS].items():
        if isinstance(value, torch.Tensor):
            continue
        shared[name] = value  # geometry, equal by `key`
    names = {n for m in members for n in m.block[FIELDS]} - set(shared)
    for name in names:
        setattr(joint, name, PerJob(getattr(m.block, name, None) for m in members))
    joint[FIELDS] = shared
    joint.additional_cond_kwargs = {}
    joint.latents = _rows(members, [m.block.latents for m in members])
    return joint


def _rows(members: list[Member], by_job: list[torch.Tensor]) -> torch.Tensor:
    """Pictures to rows: each job's pictures once a branch, branch after branch."""
    return torch.cat([t for m, t in zip(members, by_job, strict=True) for _ in range(m.branches)])


def _timesteps(members: list[Member]) -> torch.Tensor:
    return torch.cat([m.timestep.reshape(1).expand(m.pictures * m.branches) for m in members])


def _part(joint: BlockState, members: list[Member]) -> None:
    """Give each job its latents back, out of the batch's storage."""
    at = 0
    for member in members:
        member.block.latents = joint.latents[at : at + member.pictures].clone()
        at += member.pictures * member.branches


class JointGuider:
    """Stands in for the guider of one job; asks the guider of each."""

    def __init__(self, members: list[Member]) -> None:
        self._members = members
        self._batches: list[list[BlockState]] = []

    def set_state(self, step: int, num_inference_steps: int, timestep: Any) -> None:
        for m in self._members:
            m.job.pipe.guider.set_state(
                step=m.job.iteration,
                num_inference_steps=m.block.num_inference_steps,
                timestep=m.timestep,
            )

    def prepare_inputs(self, data: dict[str, Any]) -> list[BlockState]:
        """One batch of all rows, prompts padded to the longest."""
        self._batches = []
        for i, m in enumerate(self._members):
            own = {
                name: tuple(v[i] if isinstance(v, PerJob) else None for v in pair)
                for name, pair in data.items()
            }
            self._batches.append(m.job.pipe.guider.prepare_inputs(own))
        flat = [batch for batches in self._batches for batch in batches]
        values: dict[str, Any] = {}
        for name in data:
            if not name.endswith("_mask"):
                mask = f"{name}_mask"
                values[name], values[mask] = _pad(
                    [batch[name] for batch in flat], [batch[mask] for batch in flat]
                )
        return [BlockState(**values)]

    def prepare_models(self, denoiser: Any) -> None:
        return None

    def cleanup_models(self, denoiser: Any) -> None:
        return None

    def __call__(self, states: list[BlockState]) -> BlockState:
        """Each job's guider over its own rows; predictions of all pictures, job after job."""
        noise, at, out = states[0].noise_pred, 0, []
        for m, batches in zip(self._members, self._batches, strict=True):
            for batch in batches:
                batch.noise_pred = noise[at : at + m.pictures]
                at += m.pictures
            out.append(m.job.pipe.guider(batches))
        return BlockState(
            pred=torch.cat([o.pred for o in out]),
            pred_cond=torch.cat([o.pred_cond for o in out]),
        )


def _pad(
    embeds: list[torch.Tensor], masks: list[torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of several prompt lengths as one tensor and its mask; no mask where none is needed."""
    longest = max(e.shape[1] for e in embeds)
    if all(e.shape[1] == longest for e in embeds) and all(m is None for m in masks):
        return torch.cat(embeds), None
    padded, known = [], []
    for e, m in zip(embeds, masks, strict=True):
        extra = longest - e.shape[1]
        ones = torch.ones(e.shape[:2], dtype=torch.long, device=e.device) if m is None else m
        padded.append(torch.nn.functional.pad(e, (0, 0, 0, extra)))
        known.append(torch.nn.functional.pad(ones, (0, extra)))
    return torch.cat(padded), torch.cat(known)


class JointScheduler:
    """Stands in for the scheduler of one job; steps each job's rows with its own."""

    def __init__(self, members: list[Member]) -> None:
        self._members = members

    def __getattr__(self, name: str) -> Any:
        return getattr(self._members[0].job.pipe.scheduler, name)

    def step(
        self, noise: torch.Tensor, t: Any, latents: torch.Tensor, return_dict: bool = False
    ) -> tuple[torch.Tensor]:
        """`noise` has one row a picture, `latents` one a picture and branch."""
        pictures = rows = 0
        out = []
        for m in self._members:
            out.append(
                m.job.pipe.scheduler.step(
                    noise[pictures : pictures + m.pictures],
                    m.timestep,
                    latents[rows : rows + m.pictures],
                    return_dict=False,
                )[0]
            )
            pictures += m.pictures
            rows += m.pictures * m.branches
        return (_rows(self._members, out),)
