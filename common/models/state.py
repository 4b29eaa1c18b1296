"""A job's state in three parts: embeds, prepared (both written once) and latents (changing).

    embeds    what the encode blocks put out: embeddings and masks, one prompt's worth
    prepared  what the prepare blocks put out and the loop or the decoder reads: timesteps,
              shapes, position ids; the scheduler's sigma and timestep arrays
    latents   what the loop carries from step to step: latents, the scheduler's index and
              history, the random generator, the number of steps done

A checkpoint in the middle of a job costs the third part only. An embedding that prepare
merely repeated for n pictures is written as a reference to the first part.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from common.models.errors import StateLost
from common.models.schedulers import Marks
from common.models.split import Split

EMBEDS, PREPARED, LATENTS = "embeds", "prepared", "latents"


def capture_embeds(split: Split, state: PipelineState) -> dict[str, Any]:
    """The outputs of the encode blocks, with the kwargs groups they belong to."""
    names = {out.name for _, block in split.encode for out in block.intermediate_outputs}
    values = {name: state.values[name] for name in sorted(names) if name in state.values}
    return {"values": values, "kwargs": _kwargs(state, values)}


def restore_embeds(state: PipelineState, embeds: dict[str, Any]) -> None:
    """Put captured embeddings into a fresh state."""
    state.values.update(embeds["values"])
    _add_kwargs(state, embeds["kwargs"])


def capture_prepared(
    split: Split, state: PipelineState, marks: Marks, embeds: dict[str, Any]
) -> dict[str, Any]:
    """What the loop and the decoder will read; call once the prepare blocks have run."""
    groups = {p.kwargs_type for p in split.loop_inputs if p.kwargs_type}
    for _, block in split.decode:
        groups |= {p.kwargs_type for p in block.inputs if p.kwargs_type}
    names = {p.name for p in split.loop_inputs if p.name}
    for _, block in split.decode:
        names |= {p.name for p in block.inputs if p.name}
    for group in groups:
        names |= set(state.kwargs_mapping.get(group, ()))
    names -= {LATENTS, "generator"}
    values, references = {}, {}
    for name in sorted(names & set(state.values)):
        reference = _reference(name, state.values[name], embeds["values"])
        if reference is None:
            values[name] = state.values[name]
        else:
            references[name] = reference
    return {
        "values": values,
        "embeds": references,
        "kwargs": _kwargs(state, {**values, **references}),
        "scheduler": marks.once(),
    }


def _reference(name: str, value: Any, embeds: dict[str, Any]) -> int | None:
    """How often the embedding of this name was repeated to make `value`; None if it was not."""
    original = embeds.get(name)
    if not isinstance(value, torch.Tensor) or not isinstance(original, torch.Tensor):
        return None
    if value.dim() == 0 or original.dim() == 0 or not original.shape[0]:
        return None
    times, rest = divmod(value.shape[0], original.shape[0])
    if rest or value.shape[1:] != original.shape[1:] or value.dtype != original.dtype:
        return None
    return times if torch.equal(value, _repeat(original, times)) else None


def _repeat(tensor: torch.Tensor, times: int) -> torch.Tensor:
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=0)


def restore_prepared(
    state: PipelineState, prepared: dict[str, Any], embeds: dict[str, Any] | None
) -> None:
    """Put the prepared part into a state; without `embeds` (decoder) references stay out."""
    state.values.update(prepared["values"])
    if embeds is not None:
        for name, times in prepared["embeds"].items():
            if name not in embeds["values"]:
                raise StateLost(f"the embeddings lack {name!r}, which this job was prepared with")
            state.values[name] = _repeat(embeds["values"][name], times)
    _add_kwargs(state, prepared["kwargs"])


def _kwargs(state: PipelineState, values: dict[str, Any]) -> dict[str, list[str]]:
    """The kwargs groups of `values`, without repetitions, in their order."""
    return {
        group: list(dict.fromkeys(name for name in names if name in values))
        for group, names in state.kwargs_mapping.items()
    }


def _add_kwargs(state: PipelineState, groups: dict[str, list[str]]) -> None:
    for group, names in groups.items():
        have = state.kwargs_mapping.setdefault(group, [])
        have.extend(name for name in names if name not in have)
