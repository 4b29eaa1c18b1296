"""A model's manifest: its parameters, limits and facts, as JSON for the coordinator.

Parameters are those that users of the classic pipeline know, with its defaults, as far as
the blocks of this model read them: what only the blocks name was never tried. Ranges come from
the model (multiples from the VAE and patch size), from limits, which are settings, and from an
optional `slackwater.json` in the model directory:

    {"name": "…", "limits": {"max_pixels": …}, "parameters": {"width": {"default": 128}}}
"""

from __future__ import annotations

import inspect
import math
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from common.models import mixing, schedulers, step_cache
from common.models.errors import RefusedModel
from common.models.request import FRAME_RATE
from common.stage import DENOISE

if TYPE_CHECKING:
    from common.models.model import Model

# Generous for the largest models of today; a pool sets its own in settings or slackwater.json.
DEFAULT_LIMITS = {
    "max_pixels": 4 * 1024 * 1024,
    "max_side": 4096,
    "min_side": 16,
    "max_steps": 200,
    "max_n": 10,
    "max_prompt_chars": 10_000,
    "max_frames": 257,
}

# What is known of a parameter beside its default, in the order people read them.
KNOWN: dict[str, dict[str, Any]] = {
    "prompt": {"type": "str", "required": True, "description": "What to make."},
    "negative_prompt": {
        "type": "str",
        "nullable": True,
        "description": "What to steer away from; has an effect with guidance only.",
    },
    "width": {"type": "int", "description": "Pixels."},
    "height": {"type": "int", "description": "Pixels."},
    "num_frames": {"type": "int", "min": 1, "description": "Frames of the video."},
    "num_inference_steps": {"type": "int", "description": "Denoising steps."},
    "true_cfg_scale": {
        "type": "float",
        "min": 0.0,
        "max": 100.0,
        "description": "Classifier-free guidance scale.",
    },
    "guidance_scale": {
        "type": "float",
        "min": 0.0,
        "max": 100.0,
        "description": "Guidance scale.",
    },
    "guidance_scale_2": {
        "type": "float",
        "min": 0.0,
        "max": 100.0,
        "nullable": True,
        "description": "Guidance scale of the low-noise expert; guidance_scale where not given.",
    },
    "sigmas": {
        "type": "list[float]",
        "nullable": True,
        "min": 0.0,
        "max": 1000.0,
        "description": "Own noise levels instead of the scheduler's, one a step and beyond_steps "
        "more.",
    },
    "max_sequence_length": {
        "type": "int",
        "min": 1,
        "description": "Prompt tokens read at most; more are cut off.",
    },
}
# For models whose family's step caches were tried (common/models/step_cache.py).
CACHES: dict[str, dict[str, Any]] = {
    "cache": {
        "type": "str",
        "default": step_cache.NONE,
        "description": "Leaves out most of a step where little has changed; faster, and other "
        "pixels. Such a job shares no forward pass with others.",
    },
    "cache_threshold": {
        "type": "float",
        "default": None,
        "nullable": True,
        "min": 0.0,
        "max": 10.0,
        "description": "Relative change below which first_block skips; 0.05 where not given.",
    },
}
# What a video is played at where neither job nor classic pipeline says; Wan's own rate.
DEFAULT_FPS = 16
FPS = {"type": "float", "default": DEFAULT_FPS, "min": 1, "max": 120}
# Families whose latents are packed p×p outside of the transformer, which then says patch 1.
PACKED = {"flux": 2, "flux-kontext": 2, "flux2": 2, "flux2-klein": 2}


def build(model: Model, limits: dict[str, int] | None = None) -> dict[str, Any]:
    """The manifest of a loaded model; every stage of one model builds the same parameters.

    `limits` (settings) stand over the model directory's, those over DEFAULT_LIMITS.
    Raises RefusedModel where slackwater.json names something that is not there.
    """
    directory = model.directory
    overrides = directory.overrides
    bounds = {**DEFAULT_LIMITS, **overrides.get("limits", {})}
    bounds |= {name: value for name, value in (limits or {}).items() if value is not None}
    token_px = _token_px(model)
    parameters = _parameters(model, bounds, token_px)
    for name, fields in overrides.get("parameters", {}).items():
        if name not in parameters:
            raise RefusedModel(
                f"{directory.path}/slackwater.json: {name!r} is not a parameter of this model; "
                f"it has {', '.join(parameters)}"
            )
        parameters[name] |= fields
    rule = model.rule
    return {
        "model": directory.name,
        "family": model.family,
        "pipeline": directory.pipeline_class,
        "task": _task(model),
        "stage": model.stage,
        "components": model.split.components(model.stage),
        "fingerprint": directory.fingerprint,
        "dtype": model.dtype_name,
        "device": str(model.device),
        "attention": model.attention,
        "threads": model.threads,
        "diffusers": version("diffusers"),
        "torch": version("torch"),
        "parameters": parameters,
        "limits": bounds,
        "scheduler": model.verdict.to_manifest(),
        "token_px": token_px,
        "token_frames": _token_frames(model),
        # The denoiser's alone: what it does with sizes, the other stages need not know.
        **({"batch": _batch(model, parameters)} if model.stage == DENOISE else {}),
        "costs": _costs(model),
        "cfg": None
        if rule is None
        else {"scale": rule.scale, "needs": rule.needs, "above": rule.above},
    }


def _batch(model: Model, parameters: dict[str, Any]) -> dict[str, Any] | None:
    """What jobs must agree in to share a forward when not exact (common/batching.py).

    `mixed` says whether sizes are among it; models that cannot mix them do not have it.
    """
    how = model.quirks.batching
    if how is None:
        return None
    same = ["num_frames"] if model.mixed else ["width", "height", "num_frames"]
    if FRAME_RATE in how.alike:
        same.append("fps")
    if not how.pads:
        same.append("max_sequence_length")  # what every prompt is padded to
    out: dict[str, Any] = {"same": [name for name in same if name in parameters]}
    return {**out, "mixed": model.mixed is not None} if mixing.possible(model) else out


def _costs(model: Model) -> dict[str, Any]:
    """This stage's part of the cost table that the model came with, if it is of such a device."""
    profile = model.directory.profile
    stages = profile.get("stages", {})
    if profile.get("device") != model.device.type or model.stage not in stages:
        return {}
    return {model.stage: stages[model.stage]}


def _task(model: Model) -> str:
    names = {out.name for _, block in model.split.decode for out in block.intermediate_outputs}
    return "text-to-video" if "videos" in names else "text-to-image"


def _patch(model: Model) -> int:
    """Latent pixels along one side of a token."""
    if model.family in PACKED:
        return PACKED[model.family]
    pachifier = getattr(model.pipe, "pachifier", None)
    denoiser = getattr(model.pipe, "transformer", None) or getattr(model.pipe, "unet", None)
    for config in (getattr(pachifier, "config", None), getattr(denoiser, "config", None)):
        patch: Any = (config or {}).get("patch_size") or (config or {}).get("all_patch_size")
        if patch:
            return int(patch[-1] if isinstance(patch, list | tuple) else patch)
    return 1


def _token_px(model: Model) -> int:
    pipe = model.pipe
    scale: Any = getattr(pipe, "vae_scale_factor", None) or getattr(
        pipe, "vae_scale_factor_spatial", 8
    )
    return int(scale) * _patch(model)


def _token_frames(model: Model) -> int:
    """Frames that the VAE makes one of, after the first, which stands alone; 1 for pictures."""
    if _task(model) != "text-to-video":
        return 1
    names = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
    found = (getattr(model.pipe, name, None) for name in names)
    return int(next((frames for frames in found if frames), 1))


def _parameters(model: Model, limits: dict[str, int], token_px: int) -> dict[str, Any]:
    inputs = {param.name: param for param in model.split.inputs}
    classic = _classic_defaults(model.directory.pipeline_class)
    names = set(inputs)
    rule = model.rule
    if rule is not None:
        names |= {name for name in (rule.scale, rule.alias, rule.second) if name}
    out: dict[str, Any] = {}
    for name, known in KNOWN.items():
        if name not in names or not _is_offered(name, model, classic):
            continue
        default = classic.get(name)
        if default is None and name in inputs:
            default = inputs[name].default
        out[name] = {**known, **_bounds(name, model, limits, token_px, inputs)}
        if not out[name].get("required"):
            out[name]["default"] = _side(name, model, token_px) if default is None else default
        if rule is not None and name == rule.alias:
            out[name] |= {
                "default": None,
                "nullable": True,
                "alias_of": rule.scale,
                "description": f"Stands for {rule.scale} where that is not given: this model "
                "has no embedded guidance.",
            }
    if model.quirks.caches:
        out |= CACHES
        out["cache"] = {**CACHES["cache"], "choices": [step_cache.NONE, *model.quirks.caches]}
    if _task(model) == "text-to-video":
        out["fps"] = _fps(inputs, classic)
    return out


def _is_offered(name: str, model: Model, classic: dict[str, Any]) -> bool:
    if name == "guidance_scale_2":
        return _has_two_experts(model)
    if name == "sigmas" and schedulers.sigmas_beyond_steps(model.pipe.scheduler) is None:
        return False
    return not classic or name in classic


def _fps(inputs: dict[str, Any], classic: dict[str, Any]) -> dict[str, Any]:
    if FRAME_RATE not in inputs:
        what = "Frames a second the video is played at; its content does not change."
        return {**FPS, "description": what}
    rate = classic.get(FRAME_RATE) or inputs[FRAME_RATE].default or DEFAULT_FPS
    what = f"Frames a second the video is made for and played at; {FRAME_RATE} of the pipeline."
    return {**FPS, "default": rate, "description": what}


def _bounds(
    name: str, model: Model, limits: dict[str, int], token_px: int, inputs: dict[str, Any]
) -> dict[str, Any]:
    if name in ("width", "height"):
        low = math.ceil(limits["min_side"] / token_px) * token_px
        high = limits["max_side"] // token_px * token_px
        return {"min": max(low, token_px), "max": high, "multiple_of": token_px}
    if name in ("prompt", "negative_prompt"):
        return {"max_length": limits["max_prompt_chars"]}
    if name == "num_inference_steps":
        least = schedulers.least_steps(model.pipe.scheduler)
        return {"min": least, "max": limits["max_steps"]}
    if name == "sigmas":
        beyond = schedulers.sigmas_beyond_steps(model.pipe.scheduler) or 0
        return {"max_length": limits["max_steps"] + beyond, "beyond_steps": beyond}
    if name == "num_frames":
        return {"max": limits["max_frames"], "step": _token_frames(model)}
    if name == "max_sequence_length":
        # The blocks refuse more than their own default (Qwen 1024, Flux 512).
        return {"max": int(inputs[name].default or 512)}
    return {}


def _side(name: str, model: Model, token_px: int) -> int | None:
    """The pipeline's own default size, where the parameter is a side."""
    if name not in ("width", "height"):
        return None
    side = getattr(model.pipe, f"default_{name}", None)
    return 1024 // token_px * token_px if side is None else int(side)


def _has_two_experts(model: Model) -> bool:
    return getattr(model.pipe, "guider_2", None) is not None


def _classic_defaults(class_name: str) -> dict[str, Any]:
    """Parameters of the classic pipeline's __call__ and their defaults, None where there is none;
    empty for a modular-only model."""
    import diffusers

    cls = getattr(diffusers, class_name, None)
    if cls is None or issubclass(cls, diffusers.ModularPipeline):
        return {}
    return {
        name: None if parameter.default is inspect.Parameter.empty else parameter.default
        for name, parameter in inspect.signature(cls.__call__).parameters.items()
    }
