"""Where a modular pipeline is cut: encode / prepare / loop / decode.

`get_execution_blocks(**inputs)` flattens a pipeline to the named blocks that would run for
these inputs. The one `LoopSequentialPipelineBlocks` among them is the denoising loop; what
stands before the first `denoise.*` block encodes, what stands between prepares (timesteps,
initial latents, position ids), what follows the loop decodes. This holds for all pipelines
of diffusers 0.42 with a plain loop; others are refused by name, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from diffusers import ModularPipeline
from diffusers.modular_pipelines.modular_pipeline import (
    LoopSequentialPipelineBlocks,
    ModularPipelineBlocks,
)
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam

from common.models.errors import RefusedModel

# Families whose loop does not hand its whole state from step to step through the block state;
# found by reading diffusers 0.42.1. Keyed by the blocks' model_name.
NOT_CUT = {
    "helios": "its loop is nested (chunks of frames, then steps)",
    "helios-pyramid": "its loop is nested (pyramid levels, then steps)",
    "wan-animate-2": "its loop is nested (video segments, then steps)",
    "minimax-music3": "its loop is nested (audio chunks, then steps)",
    "ltx2": "it keeps a second scheduler inside the block state",
    "ltx2.5": "it keeps a second scheduler inside the block state",
    "cosmos3-omni": "it keeps schedulers inside the block state",
    "echo": "it denoises without a scheduler",
}

Named = tuple[str, ModularPipelineBlocks]


@dataclass(frozen=True)
class Split:
    """The blocks of one kind of request, by stage, in order."""

    encode: tuple[Named, ...]
    prepare: tuple[Named, ...]
    loop: LoopSequentialPipelineBlocks
    decode: tuple[Named, ...]

    def components(self, stage: str) -> list[str]:
        """Names of the components that a stage's blocks say they need.

        `prepare` and the loop run in the same process and count as `denoise`.
        """
        blocks: list[ModularPipelineBlocks] = {
            "encode": [block for _, block in self.encode],
            "denoise": [block for _, block in self.prepare] + [self.loop],
            "decode": [block for _, block in self.decode],
        }[stage]
        names: dict[str, None] = {}
        for block in blocks:
            for spec in block.expected_components:
                names[spec.name] = None
        return list(names)

    # diffusers derives these lists anew at every access, which costs a millisecond a chunk.

    @cached_property
    def inputs(self) -> tuple[InputParam, ...]:
        """Every named input that some block of the request reads, first declaration first."""
        blocks = [*self.encode, *self.prepare, ("loop", self.loop), *self.decode]
        seen: dict[str, InputParam] = {}
        for _, block in blocks:
            for param in block.inputs:
                if param.name is not None:
                    seen.setdefault(param.name, param)
        return tuple(seen.values())

    @cached_property
    def loop_inputs(self) -> tuple[InputParam, ...]:
        """Inputs of the loop and its steps; those without a name stand for a kwargs group."""
        return tuple(self.loop.inputs)

    @cached_property
    def loop_outputs(self) -> tuple[str, ...]:
        return tuple(out.name for out in self.loop.intermediate_outputs)

    @cached_property
    def draws(self) -> bool:
        """Whether steps draw random numbers, so that the generator's state must be carried."""
        return any(param.name == "generator" for param in self.loop_inputs)


def split(pipe: ModularPipeline, **inputs: Any) -> Split:
    """Cut the pipeline that would run for `inputs` (presence counts, not values).

    Raises RefusedModel where there is no loop, more than one, or one that cannot be cut.
    """
    family = str(pipe.blocks.model_name or "")
    name = type(pipe).__name__
    if family in NOT_CUT:
        raise RefusedModel(f"{name} cannot be cut into chunks: {NOT_CUT[family]}")
    flat = list(pipe.blocks.get_execution_blocks(**inputs).sub_blocks.items())
    loops = [i for i, (_, b) in enumerate(flat) if isinstance(b, LoopSequentialPipelineBlocks)]
    if len(loops) != 1:
        raise RefusedModel(f"{name} has {len(loops)} denoising loops where one is needed")
    at = loops[0]
    loop = flat[at][1]
    first = next((i for i, (n, _) in enumerate(flat) if n.startswith("denoise.")), at)
    return Split(
        encode=tuple(flat[:first]),
        prepare=tuple(flat[first:at]),
        loop=loop,
        decode=tuple(flat[at + 1 :]),
    )
