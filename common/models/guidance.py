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
    original: bool = False  # cond + scale·(cond − uncond), where others have uncond + scale·(…)

    @property
    def off(self) -> float:
        """The scale at which the formula is the conditional prediction alone."""
        return 0.0 if self.original else 1.0


# Families whose classic pipeline differs from Rule(), by the blocks' model_name.
RULES = {
    # QwenImagePipeline.__call__: do_true_cfg = true_cfg_scale > 1 and has_neg_prompt.
    # guidance_scale is ignored there with a warning unless the transformer embeds it;
    # here it stands for true_cfg_scale, and the result says so.
    "qwenimage": Rule(scale="true_cfg_scale", needs="negative_prompt", alias="guidance_scale"),
    # WanPipeline: do_classifier_free_guidance = guidance_scale > 1, scale 2 defaults to it.
    "wan": Rule(second="guidance_scale_2"),
    # ZImagePipeline: do_classifier_free_guidance = guidance_scale > 0, and
    # pred = pos + guidance_scale * (pos - neg).
    "z-image": Rule(above=0.0, original=True),
}


class Guider(ClassifierFreeGuidance):  # type: ignore[misc]
    """Guides whenever it is enabled.

    diffusers' own leaves the second forward pass out at scale 1, where the classic pipelines,
    once guidance is on, compute uncond + 1·(cond − uncond), which rounds otherwise. Wan's second
    expert may have that scale.
    """

    def _is_cfg_enabled(self) -> bool:
        if not self._enabled or self._num_inference_steps is None:
            return bool(self._enabled)
        first, last = (int(at * self._num_inference_steps) for at in (self._start, self._stop))
        return bool(first <= self._step < last)


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

    Off is diffusers' own guider, disabled, at the scale that says the same: some blocks ask the
    one, some the other, and SDXL's loop enables its guider by itself.
    """
    if how is None:
        return {}
    scale = scale_of(how, params) if is_on(how, params) else None
    made = {"guider": _new(pipe.guider, how, scale)}
    if getattr(pipe, "guider_2", None) is not None:
        second = params.get(how.second) if how.second and scale is not None else None
        made["guider_2"] = _new(pipe.guider_2, how, scale if second is None else float(second))
    return made


def _new(guider: Any, how: Rule, scale: float | None) -> Any:
    """One like `guider` at `scale`; None is off."""
    kind = ClassifierFreeGuidance if scale is None else Guider
    return kind.from_config(
        guider.config,
        guidance_scale=how.off if scale is None else scale,
        use_original_formulation=how.original,
        enabled=scale is not None,
    )
