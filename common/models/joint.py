"""What a family's step blocks see when rows of several jobs share a forward pass.

A row is one (picture, CFG branch) of one job; rows lie job after job, branch after branch.
The blocks stay diffusers' own: they read a joint block state, and a guider and a scheduler
are put in that split the rows by job and ask each job's own. Jobs of several sizes are padded
for the blocks (ragged.py has the transformer's part); guiders and schedulers see no padding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.guiders.guider_utils import GuiderOutput
from diffusers.modular_pipelines.modular_pipeline import BlockState

from common.models.live import LiveJob
from common.models.quirks import Batching
from common.models.rows import is_out_of_memory

FIELDS = "denoiser_input_fields"


class PerJob(list[Any]):
    """One value a job, passed through the blocks untouched to the joint guider or scheduler."""


class RowTimesteps:
    """Timesteps of all rows for blocks that choose an expert by comparing the timestep.

    The rows agree in their expert, so the comparison has one answer.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def expand(self, *shape: int) -> torch.Tensor:
        return self._rows.expand(*shape)

    def __ge__(self, boundary: float) -> bool:
        return bool(self._rows[0] >= boundary)


@dataclass(eq=False)
class Member:
    """One job in the batch, while it is in it."""

    job: LiveJob
    stop: int  # iteration at which it leaves
    block: BlockState
    step_s: list[float] = field(default_factory=list)
    guider: Any = None  # of the expert that takes the next step; None for families without
    branches: int = 1
    rows_seen: int = 0  # of the largest forward it was in
    error: Exception | None = None  # what its own scheduler or guider raised

    @property
    def pictures(self) -> int:
        return int(self.block.latents.shape[0])

    @property
    def rows(self) -> int:
        return self.pictures * self.branches

    @property
    def length(self) -> int:
        """Of its latents along axis 1: tokens, in the families whose jobs may differ in it."""
        return int(self.block.latents.shape[1])

    @property
    def timestep(self) -> torch.Tensor:
        timesteps: torch.Tensor = self.block.timesteps
        return timesteps[self.job.iteration]

    def settle(self, guider: str) -> None:
        """Ready its guider for its next step; `guider` names the component."""
        self.guider = getattr(self.job.pipe, guider, None)
        if self.guider is None:
            return
        self.guider.set_state(
            step=self.job.iteration,
            num_inference_steps=self.block.num_inference_steps,
            timestep=self.timestep,
        )
        self.branches = int(self.guider.num_conditions)


def rows_of(members: list[Member], by_job: list[torch.Tensor]) -> torch.Tensor:
    """Pictures to rows: each job's pictures once a branch, branch after branch."""
    by_job = padded(by_job)
    return torch.cat([t for m, t in zip(members, by_job, strict=True) for _ in range(m.branches)])


def padded(by_job: list[torch.Tensor], value: float = 0.0) -> list[torch.Tensor]:
    """Pictures of several sizes to the length of the longest; nothing to do for those of one."""
    lengths = [t.shape[1] for t in by_job]
    if len(set(lengths)) == 1:
        return by_job
    return [
        torch.nn.functional.pad(t, (0, 0, 0, max(lengths) - n), value=value)
        for t, n in zip(by_job, lengths, strict=True)
    ]


def timesteps(members: list[Member]) -> torch.Tensor:
    """One timestep a row."""
    return torch.cat([m.timestep.reshape(1).expand(m.rows) for m in members])


def join(members: list[Member], how: Batching) -> BlockState:
    """One block state for all rows; what differs from job to job stays apart."""
    joint = BlockState(**members[0].block.as_dict())
    for name in {name for m in members for name in vars(m.block)}:
        values = [getattr(m.block, name, None) for m in members]
        if name in how.rows:
            setattr(joint, name, _stacked(members, values))
        elif name not in how.geometry and not _alike(values):
            setattr(joint, name, PerJob(values))
    if FIELDS in vars(joint):
        # Tensors among these reach the denoiser through the guider; the rest is geometry.
        fields = members[0].block[FIELDS].items()
        joint[FIELDS] = {k: v for k, v in fields if not isinstance(v, torch.Tensor)}
        joint.additional_cond_kwargs = {}
    joint.latents = rows_of(members, [m.block.latents for m in members])
    return joint


def part(joint: BlockState, members: list[Member], rows: list[int]) -> None:
    """Give each job its latents back, out of the batch's storage.

    `rows` are those that each had when it was joined: its next step may take another number.
    """
    at = 0
    for m, n in zip(members, rows, strict=True):
        m.block.latents = joint.latents[at : at + m.pictures, : m.length].clone()
        at += n


def _stacked(members: list[Member], values: list[Any]) -> torch.Tensor | None:
    """One row a picture; None where the model has no such input."""
    if values[0] is None:
        return None
    return torch.cat(
        [v.expand(m.pictures, *v.shape[1:]) for m, v in zip(members, values, strict=True)]
    )


def _alike(values: list[Any]) -> bool:
    """Whether the blocks may read the first job's value for all."""
    first = values[0]
    if all(value is first for value in values):
        return not isinstance(first, torch.Tensor)
    plain = (bool, int, float, str, tuple, torch.dtype)
    if not isinstance(first, plain) or not all(isinstance(v, plain) for v in values):
        return isinstance(first, dict | list) and all(_is_geometry(v) for v in values)
    return all(value == first for value in values)


def _is_geometry(value: Any) -> bool:
    """A group of inputs, or shapes: equal by the batch key, and never a list of tensors."""
    if isinstance(value, dict):
        return True
    return isinstance(value, list) and not any(isinstance(v, torch.Tensor) for v in value)


class JointGuider:
    """Stands in for the guider of one job; asks the guider of each."""

    def __init__(self, members: list[Member], how: Batching) -> None:
        self._members, self._mask = members, how.mask
        # By job its branches, and all of them as one; inputs do not change from step to step.
        self._own: list[list[BlockState]] = []
        self._prepared: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._members[0].guider, name)

    def set_state(self, step: Any, num_inference_steps: Any, timestep: Any) -> None:
        """Nothing to do: each member was settled, at its own step."""

    def prepare_inputs(self, data: dict[str, Any]) -> list[BlockState]:
        """One batch of all rows, prompts padded to the longest."""
        of_rows = {name: _row_tensor(value) for name, value in data.items()}
        if not self._own:
            for i, m in enumerate(self._members):
                own = {
                    name: _share(value, i) for name, value in data.items() if of_rows[name] is None
                }
                self._own.append(m.guider.prepare_inputs(own))
        given = {name: rows for name, rows in of_rows.items() if rows is not None}
        return self._all(list(data), given)

    def prepare_inputs_from_block_state(
        self, data: BlockState, input_fields: dict[str, Any]
    ) -> list[BlockState]:
        if not self._own:
            self._own = [
                m.guider.prepare_inputs_from_block_state(m.block, input_fields)
                for m in self._members
            ]
        return self._all(list(input_fields), {})

    def prepare_models(self, denoiser: Any) -> None:
        """Plain guidance prepares nothing."""

    def cleanup_models(self, denoiser: Any) -> None:
        """See `prepare_models`."""

    def __call__(self, states: list[BlockState]) -> GuiderOutput:
        """Each job's guider over its own rows; predictions of all pictures, job after job."""
        noise, at, out = states[0].noise_pred, 0, []
        for m, batches in zip(self._members, self._own, strict=True):
            for batch in batches:
                batch.noise_pred = noise[at : at + m.pictures, : m.length]
                at += m.pictures
            out.append(m.guider(batches))
        # Not with zeros: Qwen's block divides by the norms of these.
        return GuiderOutput(
            pred=torch.cat(padded([o.pred for o in out], 1.0)),
            pred_cond=torch.cat(padded([o.pred_cond for o in out], 1.0)),
            pred_uncond=None,
        )

    def _all(self, names: list[str], given: dict[str, Any]) -> list[BlockState]:
        if not self._prepared:
            flat = [batch for batches in self._own for batch in batches]
            columns = {name: [batch[name] for batch in flat] for name in names if name not in given}
            self._prepared = _merged(columns, self._mask)
        return [BlockState(**self._prepared, **given, __guidance_identifier__="pred_cond")]


def _row_tensor(value: Any) -> torch.Tensor | None:
    """A tensor that has all rows already, such as the latents SD3 passes through its guider."""
    first = value[0] if type(value) is tuple else value
    return first if isinstance(first, torch.Tensor) else None


def _share(value: Any, i: int) -> Any:
    """What job `i` would have given its guider: a (conditional, unconditional) pair, or one."""
    if type(value) is tuple:
        return tuple(v[i] if isinstance(v, PerJob) else v for v in value)
    shared = value[i] if isinstance(value, PerJob) else value
    return (shared, shared)


def _merged(columns: dict[str, list[Any]], mask: str | None) -> dict[str, Any]:
    """Rows of each input as one: tensors concatenated, prompts padded and masked, lists joined."""
    if mask in columns:
        _pad(columns, mask)
    out: dict[str, Any] = {}
    for name, values in columns.items():
        if values[0] is None:
            out[name] = None
        elif isinstance(values[0], list):
            out[name] = [item for value in values for item in value]
        else:
            out[name] = torch.cat(values)
    return out


def _pad(columns: dict[str, list[Any]], mask: str) -> None:
    """Prompts of several lengths to the longest, their masks with them, in place.

    No mask where none is needed: flash attention takes none.
    """
    prompts = [name for name, v in columns.items() if name != mask and v[0].dim() == 3]
    lengths = [e.shape[1] for e in columns[prompts[0]]]
    masks = columns[mask]
    if len(set(lengths)) == 1 and all(m is None for m in masks):
        return
    like = next((m.dtype for m in masks if m is not None), torch.long)
    for i, length in enumerate(lengths):
        extra = max(lengths) - length
        for name in prompts:
            columns[name][i] = torch.nn.functional.pad(columns[name][i], (0, 0, 0, extra))
        rows = columns[prompts[0]][i]
        m = masks[i]
        if m is None:
            m = torch.ones(rows.shape[0], length, dtype=like, device=rows.device)
        masks[i] = torch.nn.functional.pad(m, (0, extra))


class JointScheduler:
    """Stands in for the scheduler of one job; steps each job's rows with its own.

    `stepped` says whether any job was moved on: until then a step may be tried again. What a
    job's own scheduler raises is that job's error, and its latents stay as they were.
    """

    def __init__(self, members: list[Member]) -> None:
        self._members = members
        self.stepped = False

        # With the signature of the job's own, which some blocks ask for what they may pass.
        @functools.wraps(self._first.step)
        def step(
            noise: torch.Tensor,
            t: Any,
            latents: torch.Tensor,
            return_dict: bool = False,
            **more: Any,
        ) -> tuple[torch.Tensor]:
            return (self._step(noise, latents, more),)

        self.step = step

    @property
    def _first(self) -> Any:
        return self._members[0].job.pipe.scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)

    def scale_model_input(self, latents: torch.Tensor, t: Any) -> torch.Tensor:
        out, at = [], 0
        for m in self._members:
            rows = latents[at : at + m.rows]
            out.append(m.job.pipe.scheduler.scale_model_input(rows, m.timestep))
            at += m.rows
        return torch.cat(out)

    def _step(
        self, noise: torch.Tensor, latents: torch.Tensor, more: dict[str, Any]
    ) -> torch.Tensor:
        """`noise` has one row a picture, `latents` one a picture and branch."""
        pictures = rows = 0
        out = []
        for i, m in enumerate(self._members):
            own = {k: v[i] if isinstance(v, PerJob) else v for k, v in more.items()}
            now = latents[rows : rows + m.pictures, : m.length]
            self.stepped = True
            try:
                now = m.job.pipe.scheduler.step(
                    noise[pictures : pictures + m.pictures, : m.length],
                    m.timestep,
                    now,
                    return_dict=False,
                    **own,
                )[0]
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                m.error = error
            out.append(now)
            pictures += m.pictures
            rows += m.rows
        return rows_of(self._members, out)
