"""A job's own guider, with the rules of the classic pipelines.

Modular pipelines turn guidance on for any scale but 1 and invent an empty negative prompt;
the classic ones, which users know, have a rule each. Qwen-Image: `true_cfg_scale > 1` and a
negative prompt was given. Most others: `guidance_scale > 1`. Pipelines without a guider
(Flux) take `guidance_scale` as an input of the transformer and have no rule here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffusers import ModularPipeline
from diffusers.guiders import ClassifierFreeGuidance

from common.models.errors import RefusedModel


@dataclass(frozen=True)
class Rule:
    """How a family decides that a step takes two forward passes."""

    scale: str = "guidance_scale"
    needs: str | None = None  # parameter that must be given as well
    above: float = 1.0  # guidance is on for scales greater than this
    alias: str | None = None  # parameter that stands for `scale` where only it is given
    second: str | None = None  # scale of the second expert; defaults to `scale`


# Families whose classic pipeline differs from Rule(), by the blocks' model_name.
RULES = {
    # QwenImagePipeline.__call__: do_true_cfg = true_cfg_scale > 1 and has_neg_prompt.
    # guidance_scale is ignored there with a warning unless the transformer embeds it;
    # here it stands for true_cfg_scale, and the result says so.
    "qwenimage": Rule(scale="true_cfg_scale", needs="negative_prompt", alias="guidance_scale"),
    # WanPipeline: do_classifier_free_guidance = guidance_scale > 1, scale 2 defaults to it.
    "wan": Rule(second="guidance_scale_2"),
    # ZImagePipeline: do_classifier_free_guidance = guidance_scale > 0.
    "z-image": Rule(above=0.0),
}


def rule(pipe: ModularPipeline) -> Rule | None:
    """The guidance rule of a pipeline; None where it has no guider.

    Raises RefusedModel for a guider that keeps state from step to step.
    """
    guider = getattr(pipe, "guider", None)
    if guider is None:
        return None
    if type(guider) is not ClassifierFreeGuidance:
        raise RefusedModel(
            f"{type(pipe).__name__} guides with {type(guider).__name__}; only plain "
            "classifier-free guidance can be cut into chunks"
        )
    return RULES.get(str(pipe.blocks.model_name), Rule())


def is_on(how: Rule | None, params: dict[str, Any]) -> bool:
    """Whether a step of this job takes two forward passes."""
    if how is None:
        return False
    scale = scale_of(how, params)
    if scale is None or not scale > how.above:
        return False
    return how.needs is None or params.get(how.needs) is not None


def scale_of(how: Rule, params: dict[str, Any]) -> float | None:
    scale = params.get(how.scale)
    if scale is None and how.alias is not None:
        scale = params.get(how.alias)
    return None if scale is None else float(scale)


def guiders(pipe: ModularPipeline, how: Rule | None, params: dict[str, Any]) -> dict[str, Any]:
    """New guiders for one job, by component name.

    Off means disabled and scale 1: some blocks ask the one, some the other, and SDXL's loop
    enables its guider by itself.
    """
    if how is None:
        return {}
    on = is_on(how, params)
    made = {"guider": _new(pipe.guider, scale_of(how, params) if on else 1.0, on)}
    second = getattr(pipe, "guider_2", None)
    if second is not None:
        scale = params.get(how.second) if how.second else None
        scale = scale_of(how, params) if scale is None else float(scale)
        made["guider_2"] = _new(second, scale if on else 1.0, on)
    return made


def _new(guider: Any, scale: float | None, enabled: bool) -> Any:
    return guider.new(guidance_scale=1.0 if scale is None else scale, enabled=enabled)
