"""From what a client pushed to the parameters a job runs with, or to an error that helps.

Pure and without torch: a model's own parameters come from the manifest its workers
published, the rest from COMMON below. Nothing is replaced silently: a value is taken as it
is, or refused with the field and the remedy.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.checks import InvalidRequest, Schema, check
from common.job import JobSpec
from common.outgoing import Allowed
from common.push import Push, arrival_of
from common.traceparent import MOST_CHARS, Parent
from common.uploads import Prefixes

MAX_SEED = 2**63 - 1

# Parameters every job has, whatever the model. Times in milliseconds, as clients count them.
COMMON: dict[str, Schema] = {
    "model": {"type": "str", "max_length": 256},
    "priority": {"type": "int", "default": 0, "min": -100, "max": 100},
    "slo_ms": {"type": "float", "nullable": True, "above": 0, "max": 30 * 86_400_000},
    "deadline_ms": {"type": "float", "nullable": True, "above": 0, "max": 1e14},
    "slo_scale": {"type": "float", "nullable": True, "above": 0, "max": 1e6},
    "on_late": {"type": "str", "default": "run", "choices": ["run", "drop", "degrade"]},
    "min_inference_steps": {"type": "int", "nullable": True, "min": 1},
    "queue_timeout_ms": {"type": "float", "nullable": True, "above": 0, "max": 30 * 86_400_000},
    "run_timeout_ms": {"type": "float", "nullable": True, "above": 0, "max": 30 * 86_400_000},
    "exact": {"type": "bool", "nullable": True},
    "user": {"type": "str", "default": "", "max_length": 256},
    "callback_url": {"type": "str", "nullable": True, "max_length": 2048},
    "upload_url": {"type": "str", "nullable": True, "max_length": 1024},
    "traceparent": {"type": "str", "default": "", "max_length": MOST_CHARS},
}
OUTPUT: dict[str, Schema] = {
    "n": {"type": "int", "default": 1, "min": 1, "max": 10},
    "seed": {"type": "int", "nullable": True, "min": 0, "max": MAX_SEED},
    "output_format": {"type": "str", "default": "png", "choices": ["png", "webp", "jpeg"]},
    "output_compression": {"type": "int", "default": 100, "min": 0, "max": 100},
}
# Other people's names for the same thing.
ALIASES = {
    "num_images_per_prompt": "n",
    "frame_rate": "fps",
    "cfg_scale": "true_cfg_scale",
    "steps": "num_inference_steps",
}
# Formats that hold a moving picture.
VIDEO_FORMATS = ["png", "webp"]

NO_HOSTS, NO_PREFIXES = Allowed((), ()), Prefixes()


@dataclass(frozen=True, slots=True)
class PoolDefaults:
    """Settings of the pool that a job may override, and what bounds it."""

    exact: bool = True
    model: str = ""
    outgoing: Allowed = NO_HOSTS  # where webhooks may go
    uploads: Prefixes = NO_PREFIXES  # where files may go


def accept(push: Push, manifests: Mapping[str, Mapping[str, Any]], pool: PoolDefaults) -> JobSpec:
    """The job that `push` asks for, every default filled in, the seed drawn.

    `manifests` are the merged manifests by model name (docs/protocol.md). Raises InvalidRequest.
    """
    given: dict[str, Any] = {}
    for name, value in push.fields.items():
        canonical = ALIASES.get(name, name)
        if canonical in given:
            raise InvalidRequest(
                name, f"says the same as {canonical}, which is given too; keep one"
            )
        given[canonical] = value

    model, manifest = _choose_model(given, manifests, pool)
    schema: dict[str, Schema] = {**OUTPUT, **manifest.get("parameters", {})}
    limits = manifest.get("limits", {})
    if "max_n" in limits:
        schema["n"] = {**schema["n"], "max": limits["max_n"]}
    if manifest.get("task") == "text-to-video":
        schema["output_format"] = {**schema["output_format"], "choices": VIDEO_FORMATS}
    _expand_size(given)
    for name in given:
        if name not in schema and name not in COMMON:
            raise InvalidRequest(
                name, f"is not a parameter of {model}{_did_you_mean(name, schema)}"
            )

    common = _fill(given, COMMON)
    params = _fill(given, schema)
    notes = _resolve_aliases(params, given, schema)
    _check_deadline(common)
    _check_limits(params, limits, schema)
    notes += _cfg_notes(params, given, manifest)
    _check_degrade(common, params, given)
    if common["callback_url"] is not None:
        pool.outgoing.listed(common["callback_url"])
    if common["upload_url"] is not None:
        pool.uploads.check(common["upload_url"])
    if common["traceparent"] and Parent.of(common["traceparent"]) is None:
        raise InvalidRequest(
            "traceparent", "is none of W3C Trace Context; 00-{32 hex}-{16 hex}-01 is one"
        )
    if params["seed"] is None:
        params["seed"] = secrets.randbelow(2**32)

    exact = pool.exact if common["exact"] is None else common["exact"]
    notes += _cache_notes(params, exact)
    arrival_s = arrival_of(push.entry)
    deadline_s = None
    if common["deadline_ms"] is not None:
        deadline_s = common["deadline_ms"] / 1000
    elif common["slo_ms"] is not None:
        deadline_s = arrival_s + common["slo_ms"] / 1000
    return JobSpec(
        id=push.id,
        entry=push.entry,
        content=push.content,
        model=model,
        params=params,
        arrival_s=arrival_s,
        priority=common["priority"],
        deadline_s=deadline_s,
        slo_scale=common["slo_scale"],
        on_late=common["on_late"],
        exact=exact,
        user=common["user"],
        notes=tuple(notes),
        min_steps=common["min_inference_steps"] or 0,
        queue_timeout_s=_seconds(common["queue_timeout_ms"]),
        run_timeout_s=_seconds(common["run_timeout_ms"]),
        callback_url=common["callback_url"] or "",
        upload_url=common["upload_url"] or "",
        traceparent=common["traceparent"],
    )


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def _check_deadline(common: Mapping[str, Any]) -> None:
    given = [name for name in ("slo_ms", "slo_scale", "deadline_ms") if common[name] is not None]
    if len(given) > 1:
        raise InvalidRequest(given[0], f"and {given[1]} both fix the deadline; give one")


def _check_degrade(
    common: Mapping[str, Any], params: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """A job that may be cut to fewer steps names its floor; no other does."""
    fewest, degrades = common["min_inference_steps"], common["on_late"] == "degrade"
    if fewest is not None and not degrades:
        raise InvalidRequest("min_inference_steps", "only goes with on_late degrade; add it")
    if not degrades:
        return
    if given.get("sigmas") is not None:
        raise InvalidRequest("on_late", "degrade cannot shorten a job that brings its own sigmas")
    steps = params.get("num_inference_steps")
    if steps is None:
        raise InvalidRequest("on_late", "degrade needs a model with num_inference_steps")
    if fewest is None:
        raise InvalidRequest(
            "min_inference_steps",
            f"is required with on_late degrade: the fewest steps, of {steps}, that are worth it",
        )
    if fewest > steps:
        raise InvalidRequest(
            "min_inference_steps", f"{fewest} is more than num_inference_steps, {steps}"
        )


def _choose_model(
    given: dict[str, Any], manifests: Mapping[str, Mapping[str, Any]], pool: PoolDefaults
) -> tuple[str, Mapping[str, Any]]:
    name = given.get("model", pool.model or (next(iter(manifests)) if len(manifests) == 1 else ""))
    if not isinstance(name, str):
        raise InvalidRequest("model", "must be text")
    if name not in manifests:
        known = ", ".join(sorted(manifests)) or "none yet"
        what = "must be given, since several are served"
        if name:
            what = f"{name[:64]!r} is not served here"
        raise InvalidRequest("model", f"{what}; served: {known}")
    manifest = manifests[name]
    verdict = manifest.get("scheduler", {})
    if verdict.get("verdict", "ok") != "ok":
        raise InvalidRequest(
            "model",
            f"{name} uses {verdict.get('class')}, which cannot be paused: {verdict.get('reason')}",
        )
    given["model"] = name
    return name, manifest


def _expand_size(given: dict[str, Any]) -> None:
    size = given.pop("size", None)
    if size is None:
        return
    match = re.fullmatch(r"(\d{1,9})[xX×](\d{1,9})", size) if isinstance(size, str) else None
    if not match:
        raise InvalidRequest("size", 'must be "WIDTHxHEIGHT", such as "128x96"')
    if "width" in given or "height" in given:
        raise InvalidRequest("size", "says the same as width and height; give one of the two")
    given["width"], given["height"] = int(match[1]), int(match[2])


def _fill(given: Mapping[str, Any], schema: Mapping[str, Schema]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, rule in schema.items():
        if name in given:
            out[name] = check(name, given[name], rule)
        elif rule.get("required"):
            raise InvalidRequest(name, "is required")
        else:
            out[name] = rule.get("default")
    return out


def _resolve_aliases(
    params: dict[str, Any], given: Mapping[str, Any], schema: Mapping[str, Schema]
) -> list[str]:
    """Fill the target of an `alias_of` parameter where only the alias was given, and say so."""
    notes = []
    for name, rule in schema.items():
        target = rule.get("alias_of")
        if not target or params.get(name) is None:
            continue
        if target in given:
            notes.append(f"{name} has no effect beside {target}")
        else:
            params[target] = check(target, params[name], schema[target])
            notes.append(f"{name} {params[name]} was taken as {target}")
    return notes


def _check_limits(
    params: Mapping[str, Any], limits: Mapping[str, Any], schema: Mapping[str, Schema]
) -> None:
    width, height = params.get("width"), params.get("height")
    most = limits.get("max_pixels")
    if width and height and most and width * height > most:
        raise InvalidRequest(
            "width", f"{width}x{height} is {width * height} pixels; up to {most} are allowed"
        )
    sigmas, steps = params.get("sigmas"), params.get("num_inference_steps") or 0
    beyond = schema.get("sigmas", {}).get("beyond_steps", 0)
    if sigmas is not None and len(sigmas) != steps + beyond:
        right = (
            f"{steps + beyond}, the last being where the last step ends" if beyond else "as many"
        )
        raise InvalidRequest("sigmas", f"has {len(sigmas)} values for {steps} steps; give {right}")


def _cfg_notes(
    params: Mapping[str, Any], given: Mapping[str, Any], manifest: Mapping[str, Any]
) -> list[str]:
    """Say when guidance, or what to steer away from, was asked for and will not be used."""
    rule = manifest.get("cfg") or {}
    scale, needs, above = rule.get("scale"), rule.get("needs"), rule.get("above", 1.0)
    if not scale:
        return []
    if params.get("negative_prompt") is not None and not (params.get(scale) or 0) > above:
        return [
            f"negative_prompt has no effect with {scale} {params.get(scale)}: guidance is on above "
            f"{above:g}"
        ]
    if not needs or params.get(needs) is not None:
        return []
    schemas = manifest.get("parameters", {})
    asked = any(name == scale or schemas.get(name, {}).get("alias_of") == scale for name in given)
    if asked and (params.get(scale) or 0) > above:
        return [f"{scale} {params[scale]} has no effect without {needs}"]
    return []


def _cache_notes(params: Mapping[str, Any], exact: bool) -> list[str]:
    """Say what a step cache does not read, and what it takes from exactness."""
    cache = params.get("cache") or "none"
    notes = []
    if params.get("cache_threshold") is not None and cache != "first_block":
        notes.append(f"cache_threshold has no effect with cache {cache}; first_block reads it")
    if exact and cache != "none":
        notes.append(
            f"cache {cache}: exact while the job stays on one worker; one that moves, or whose "
            "cache makes room for others, goes on with a fresh one and other pixels"
        )
    return notes


def _did_you_mean(name: str, schema: Mapping[str, Schema]) -> str:
    import difflib

    near = difflib.get_close_matches(name, [*schema, *COMMON, *ALIASES, "size", "id"], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def merge_manifests(published: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """One manifest a model from the parts its stages published ("{model}/{stage}" -> manifest).

    A model is served once all three of its stages have been seen.
    """
    parts: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, manifest in published.items():
        model, _, stage = name.rpartition("/")
        parts.setdefault(model, {})[stage] = manifest
    merged = {}
    for model, stages in parts.items():
        if not {"encode", "denoise", "decode"} <= set(stages):
            continue
        whole: dict[str, Any] = {"parameters": {}, "limits": {}, "costs": {}}
        for stage in ("encode", "decode", "denoise"):  # the denoiser has the last word
            part = stages[stage]
            whole.update({k: v for k, v in part.items() if k not in whole})
            whole["parameters"].update(part.get("parameters", {}))
            whole["limits"].update(part.get("limits", {}))
            whole["costs"].update(part.get("costs", {}))
            if "scheduler" in part:
                whole["scheduler"] = part["scheduler"]
        merged[model] = whole
    return merged
