"""From what a client pushed to the parameters a job runs with, or to an error that helps.

Pure and without torch: a model's own parameters come from the manifest its workers
published, the rest from COMMON below. Nothing is replaced silently: a value is taken as it
is, or refused with the field and the remedy.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.job import JobSpec
from common.messages import MessageError, pack, unpack

# What XADD may carry in all: enough for the longest prompt a model takes, twice.
MAX_PUSH_BYTES = 256 * 1024
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
# An id of this form is given by Redis only: somebody's push will have it one day.
ENTRY = re.compile(r"\d+-\d+")
MAX_SEED = 2**63 - 1
MAX_INT = 2**63 - 1  # what msgpack and Redis carry
FIELD_CHARS = 100

Schema = dict[str, Any]

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
    "cfg_scale": "true_cfg_scale",
    "steps": "num_inference_steps",
}


class InvalidRequest(ValueError):
    """A push that cannot become a job: names the field, what is wrong, what would be right."""

    def __init__(self, field: str, message: str) -> None:
        # A field's name came over the wire too: long, or not even text that can be encoded.
        field = field.encode("utf-8", "replace").decode()
        self.field = field if len(field) <= FIELD_CHARS else field[:FIELD_CHARS] + "…"
        super().__init__(f"{self.field}: {message}")


@dataclass(frozen=True, slots=True)
class Push:
    """The typed content of one entry in `sw:jobs`, before any default."""

    entry: str
    id: str
    fields: dict[str, Any]
    content: str  # hash over what the client said, so that a retry is recognised


def read_push(entry: str, raw: Mapping[bytes, bytes]) -> Push:
    """Decode one stream entry. Raises InvalidRequest; `id_of` and `content_of` never raise."""
    if sum(len(k) + len(v) for k, v in raw.items()) > MAX_PUSH_BYTES:
        raise InvalidRequest("payload", f"a job may be up to {MAX_PUSH_BYTES} bytes in all")
    fields: dict[str, Any] = {}
    if b"payload" in raw:
        fields = _read_payload(raw[b"payload"])
        if "id" in fields and b"id" in raw:
            raise InvalidRequest("id", "given beside the payload and inside it; give it once")
        extra = sorted(k.decode("utf-8", "replace") for k in raw if k not in (b"payload", b"id"))
        if extra:
            raise InvalidRequest(
                extra[0], "stands beside a payload; put it inside, or drop the payload"
            )
    for key, value in raw.items():
        if key != b"payload":
            name = _text(key, "field name")
            fields[name] = Text(_text(value, name))
    job = fields.pop("id", entry)
    if not isinstance(job, str) or not ID.fullmatch(job):
        raise InvalidRequest(
            "id",
            "must be 1–128 letters, digits, '.', '_', ':' or '-', beginning with a letter or digit",
        )
    if ENTRY.fullmatch(job) and job != entry:
        raise InvalidRequest("id", "has the form of a stream entry's id; add a letter to it")
    return Push(entry=entry, id=str(job), fields=fields, content=content_of(raw))


class Text(str):
    """A value that came as text (redis-cli): '20' may become an int, unlike a payload's '20'."""


def id_of(entry: str, raw: Mapping[bytes, bytes]) -> str:
    """The id a push asked for, or its entry id if that cannot be told."""
    try:
        return read_push(entry, raw).id
    except InvalidRequest:
        pass
    try:
        value: Any = raw.get(b"id") or _read_payload(raw.get(b"payload", b"{}")).get("id", entry)
        text = value.decode() if isinstance(value, bytes) else value
        usable = isinstance(text, str) and ID.fullmatch(text) and not ENTRY.fullmatch(text)
        return text if usable else entry
    except (InvalidRequest, UnicodeDecodeError):
        return entry


def content_of(raw: Mapping[bytes, bytes]) -> str:
    """Hash of what was pushed, whatever the order of its fields, without the id."""
    items = sorted((k, v) for k, v in raw.items() if k != b"id")
    return hashlib.sha256(pack([[k, v] for k, v in items])).hexdigest()


def _read_payload(data: bytes) -> dict[str, Any]:
    value: Any
    if data[:1] in (b"{", b" ", b"\n", b"\t", b"\r"):
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("payload", f"is neither JSON nor msgpack: {error}") from error
    else:
        try:
            value = unpack(data)
        except MessageError as error:
            raise InvalidRequest("payload", f"is neither msgpack nor JSON: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
        raise InvalidRequest("payload", "must be a map from parameter names to values")
    return value


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, f"is not UTF-8 (byte {error.start})") from error


@dataclass(frozen=True, slots=True)
class PoolDefaults:
    """Settings of the pool that a job may override."""

    exact: bool = True
    model: str = ""


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
    _expand_size(given)
    for name in given:
        if name not in schema and name not in COMMON:
            raise InvalidRequest(
                name, f"is not a parameter of {model}{_did_you_mean(name, schema)}"
            )

    common = _fill(given, COMMON)
    params = _fill(given, schema)
    notes = _resolve_aliases(params, given, schema)
    if common["deadline_ms"] is not None and common["slo_ms"] is not None:
        raise InvalidRequest("slo_ms", "and deadline_ms both fix the deadline; give one")
    _check_limits(params, limits, schema)
    notes += _cfg_notes(params, given, manifest)
    _check_degrade(common, params, given)
    if params["seed"] is None:
        params["seed"] = secrets.randbelow(2**32)

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
        exact=pool.exact if common["exact"] is None else common["exact"],
        user=common["user"],
        notes=tuple(notes),
        min_steps=common["min_inference_steps"] or 0,
        queue_timeout_s=_seconds(common["queue_timeout_ms"]),
        run_timeout_s=_seconds(common["run_timeout_ms"]),
    )


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


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


def arrival_of(entry: str) -> float:
    """A stream entry's id begins with Redis' own clock, in ms: that is the job's arrival."""
    return int(entry.split("-", 1)[0]) / 1000


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


def check(name: str, value: Any, rule: Schema) -> Any:
    """`value` as the type `rule` asks for; raises InvalidRequest that names the remedy."""
    if value is None:
        if rule.get("nullable") or ("default" in rule and rule["default"] is None):
            return None
        raise InvalidRequest(name, "must not be null")
    kind = rule.get("type", "str")
    if kind == "str":
        return _check_str(name, value, rule)
    if kind == "bool":
        return _check_bool(name, value)
    if kind == "int":
        return _check_int(name, value, rule)
    if kind == "float":
        return _check_float(name, value, rule)
    if kind == "list[float]":
        if isinstance(value, Text):
            value = [Text(part) for part in value.replace(",", " ").split()]
        if not isinstance(value, list) or len(value) > rule.get("max_length", 1000):
            raise InvalidRequest(
                name, f"must be a list of up to {rule.get('max_length', 1000)} numbers"
            )
        return [_check_float(name, item, rule) for item in value]
    raise InvalidRequest(name, f"has a type this version does not know: {kind}")


def _check_str(name: str, value: Any, rule: Schema) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(name, f"must be text, not {type(value).__name__}")
    if "\x00" in value:
        raise InvalidRequest(name, f"contains a NUL character at {value.index(chr(0))}; remove it")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            name, "contains half a surrogate pair; send whole characters"
        ) from error
    if "choices" in rule and value not in rule["choices"]:
        raise InvalidRequest(name, f"{value[:64]!r} is not one of {', '.join(rule['choices'])}")
    if len(value) > rule.get("max_length", 10_000):
        raise InvalidRequest(
            name, f"has {len(value)} characters; up to {rule.get('max_length', 10_000)} are allowed"
        )
    if rule.get("required") and not value.strip():
        raise InvalidRequest(name, "must not be empty")
    return str(value)


def _check_bool(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, Text) and value.lower() in ("true", "1", "yes", "on"):
        return True
    if isinstance(value, Text) and value.lower() in ("false", "0", "no", "off"):
        return False
    raise InvalidRequest(name, "must be true or false")


def _check_int(name: str, value: Any, rule: Schema) -> int:
    if isinstance(value, Text) and re.fullmatch(r"[+-]?\d{1,20}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(name, f"must be a whole number, not {_shown(value)}")
    _check_range(name, value, rule)
    if abs(value) > MAX_INT:
        raise InvalidRequest(name, f"{value!r:.40} is too large; the most is {MAX_INT}")
    multiple = rule.get("multiple_of")
    if multiple and value % multiple:
        low, high = value - value % multiple, value - value % multiple + multiple
        near = [v for v in (low, high) if rule.get("min", 1) <= v <= rule.get("max", math.inf)]
        right = (
            f"; {' and '.join(map(str, near))} {'are' if len(near) > 1 else 'is'}" if near else ""
        )
        raise InvalidRequest(name, f"{value} is not a multiple of {multiple}{right}")
    return value


def _check_float(name: str, value: Any, rule: Schema) -> float:
    if isinstance(value, Text):
        try:
            value = float(value)
        except ValueError:
            raise InvalidRequest(name, f"must be a number, not {value[:64]!r}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(name, f"must be a number, not {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(name, f"must be a finite number, not {number}")
    _check_range(name, number, rule)
    return number


def _shown(value: Any) -> str:
    """A refused value in an error message, whatever it is."""
    if isinstance(value, str | bytes | int | float | bool | None):
        return f"{value!r:.64}"
    return type(value).__name__


def _check_range(name: str, value: float, rule: Schema) -> None:
    low, high, above = rule.get("min"), rule.get("max"), rule.get("above")
    if above is not None and value <= above:
        raise InvalidRequest(name, f"{value} is too small; it must be above {above}")
    if low is not None and value < low:
        raise InvalidRequest(name, f"{value} is too small; {_span(low, high)}")
    if high is not None and value > high:
        raise InvalidRequest(name, f"{value} is too large; {_span(low, high)}")


def _span(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"it must be from {low} to {high}"
    return f"the least is {low}" if low is not None else f"the most is {high}"


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
    sigmas = params.get("sigmas")
    if sigmas is not None and len(sigmas) != params.get("num_inference_steps"):
        raise InvalidRequest(
            "sigmas",
            f"has {len(sigmas)} values for {params.get('num_inference_steps')} steps; give as many",
        )


def _cfg_notes(
    params: Mapping[str, Any], given: Mapping[str, Any], manifest: Mapping[str, Any]
) -> list[str]:
    """Say when guidance was asked for and the model will not use it."""
    rule = manifest.get("cfg") or {}
    scale, needs = rule.get("scale"), rule.get("needs")
    if not scale or not needs or params.get(needs) is not None:
        return []
    schemas = manifest.get("parameters", {})
    asked = any(name == scale or schemas.get(name, {}).get("alias_of") == scale for name in given)
    if asked and (params.get(scale) or 0) > 1:
        return [f"{scale} {params[scale]} has no effect without {needs}"]
    return []


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
