"""Bad input: each kind is refused with the field and the remedy, and touches nothing else."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.arena import Arena
from common.checks import InvalidRequest
from common.job import JobSpec
from common.keys import Keys
from common.params import PoolDefaults, accept, merge_manifests
from common.push import MAX_PUSH_BYTES, content_of, id_of, read_push
from common.stage import DECODE, DENOISE, ENCODE
from services.coordinator.admission import Admission, Queue
from services.coordinator.effects import call_of
from services.coordinator.events import Pushed, Refuse, Submit
from services.coordinator.spread import Spread
from services.costs.model import CostModel
from services.policies import make_policy
from services.policies.base import View
from services.policies.contained import Contained
from tests.fakes import MANIFEST, MANIFESTS, raw_push
from tests.simulated import Pool

GUIDED: dict[str, Any] = {
    **MANIFEST,
    "parameters": {
        **MANIFEST["parameters"],
        "guidance_scale": {"type": "float", "default": 4.0, "min": 0.0, "max": 50.0},
        "negative_prompt": {"type": "str", "default": None, "max_length": 1000},
        "sigmas": {"type": "list[float]", "nullable": True, "max_length": 100},
    },
    "cfg": {"scale": "guidance_scale", "needs": "negative_prompt"},
}
EMPTY = Queue(
    policy=Contained(make_policy("slack")),
    view=View(ranks=[]),
    costs=CostModel(),
    spread=Spread(),
    active=0,
    is_active=lambda job: False,
    late=(),
    now=1.0,
)


def accepted(raw: dict[bytes, bytes], manifests: dict[str, Any] | None = None) -> JobSpec:
    return accept(read_push("1000-0", raw), manifests or {"noop": GUIDED}, PoolDefaults())


def payload(**fields: Any) -> dict[bytes, bytes]:
    return {b"payload": msgpack.packb(fields)}


BAD: list[tuple[str, dict[bytes, bytes], str, str]] = [
    ("unknown field", raw_push(prompt="x", widht=64), "widht", "did you mean width?"),
    ("far-off field", raw_push(prompt="x", colour="red"), "colour", "not a parameter of noop"),
    ("text for a number", raw_push(prompt="x", width="wide"), "width", "whole number"),
    ("text in a payload", payload(prompt="x", width="64"), "width", "whole number"),
    ("number for text", payload(prompt=7), "prompt", "must be text"),
    ("list for a number", payload(prompt="x", width=[64]), "width", "not list"),
    ("fraction", raw_push(prompt="x", width="64.5"), "width", "whole number"),
    ("not a multiple", raw_push(prompt="x", width=33), "width", "32 and 48 are"),
    ("zero", raw_push(prompt="x", width=0), "width", "must be from 16 to 4096"),
    ("negative", raw_push(prompt="x", width=-1), "width", "must be from 16 to 4096"),
    ("enormous", raw_push(prompt="x", width=10**9), "width", "must be from 16 to 4096"),
    ("beyond 64 bits", {b"payload": b'{"prompt":"x","seed":%d}' % 10**30}, "seed", "too large"),
    ("no steps", raw_push(prompt="x", num_inference_steps=0), "num_inference_steps", "from 1 to"),
    ("a million steps", raw_push(prompt="x", steps=10**6), "num_inference_steps", "from 1 to"),
    ("no prompt", raw_push(width=64), "prompt", "is required"),
    ("empty prompt", raw_push(prompt=""), "prompt", "must not be empty"),
    ("blank prompt", raw_push(prompt="  "), "prompt", "must not be empty"),
    ("long prompt", raw_push(prompt="x" * 100_000), "prompt", "10000 are allowed"),
    ("NUL", raw_push(prompt="a\0b"), "prompt", "NUL character at 1; remove it"),
    ("null", payload(prompt=None), "prompt", "must not be null"),
    ("broken UTF-8", {b"prompt": b"caf\xe9"}, "prompt", "not UTF-8 (byte 3)"),
    ("broken name", {b"prompt": b"x", b"\xff": b"1"}, "field name", "not UTF-8"),
    ("half a surrogate", {b"payload": b'{"prompt":"\\ud800"}'}, "prompt", "whole characters"),
    ("half as a name", {b"payload": b'{"prompt":"x","\\ud800":1}'}, "?", "not a parameter"),
    ("truncated msgpack", {b"payload": msgpack.packb({"prompt": "x"})[:-1]}, "payload", "neither"),
    ("truncated JSON", {b"payload": b'{"prompt":"x"'}, "payload", "neither JSON nor msgpack"),
    ("bottomless JSON", {b"payload": b'{"a":' * 40_000}, "payload", "neither JSON nor msgpack"),
    ("a list", {b"payload": msgpack.packb([1])}, "payload", "must be a map"),
    ("an empty payload", {b"payload": b""}, "payload", "neither msgpack nor JSON"),
    ("payload and fields", {**payload(prompt="x"), b"width": b"64"}, "width", "put it inside"),
    ("id twice", {**payload(prompt="x", id="a"), b"id": b"b"}, "id", "give it once"),
    ("huge", raw_push(prompt="x" * (MAX_PUSH_BYTES + 1)), "payload", f"{MAX_PUSH_BYTES} bytes"),
    ("unknown model", raw_push(prompt="x", model="other"), "model", "served: noop"),
    ("NaN", raw_push(prompt="x", guidance_scale="nan"), "guidance_scale", "finite number"),
    ("NaN in JSON", {b"payload": b'{"prompt":"x","guidance_scale":NaN}'}, "guidance_scale", "fin"),
    ("infinity", raw_push(prompt="x", guidance_scale="inf"), "guidance_scale", "finite number"),
    ("negative seed", raw_push(prompt="x", seed=-1), "seed", "must be from 0"),
    ("seed of 64 bits", raw_push(prompt="x", seed=2**63), "seed", "must be from 0"),
    ("bad size", raw_push(prompt="x", size="big"), "size", '"128x96"'),
    ("size twice", raw_push(prompt="x", size="64x64", width=64), "size", "one of the two"),
    ("odd size", raw_push(prompt="x", size="64x33"), "height", "32 and 48 are"),
    ("a name twice", raw_push(prompt="x", steps=1, num_inference_steps=1), "?steps", "keep one"),
    ("bad id", raw_push(prompt="x", id="a b"), "id", "letters, digits"),
    ("empty id", raw_push(prompt="x", id=""), "id", "letters, digits"),
    ("a coming entry's id", raw_push(prompt="x", id="1001-0"), "id", "add a letter"),
    ("number as id", payload(prompt="x", id=7), "id", "letters, digits"),
    ("too many pictures", raw_push(prompt="x", n=5), "n", "must be from 1 to 4"),
    ("bad choice", raw_push(prompt="x", output_format="bmp"), "output_format", "png, webp, jpeg"),
    ("bad on_late", raw_push(prompt="x", on_late="cry"), "on_late", "run, drop, degrade"),
    (
        "degrade without a floor",
        raw_push(prompt="x", on_late="degrade"),
        "min_inference_steps",
        "is required with on_late degrade",
    ),
    (
        "a floor above the steps",
        raw_push(prompt="x", on_late="degrade", min_inference_steps=9, num_inference_steps=8),
        "min_inference_steps",
        "9 is more than num_inference_steps, 8",
    ),
    (
        "a floor for nothing",
        raw_push(prompt="x", min_inference_steps=9),
        "min_inference_steps",
        "only goes with on_late degrade",
    ),
    ("bad truth", raw_push(prompt="x", exact="perhaps"), "exact", "true or false"),
    ("no time", raw_push(prompt="x", slo_ms=0), "slo_ms", "above 0"),
    ("two deadlines", raw_push(prompt="x", slo_ms=9, deadline_ms=9), "slo_ms", "give one"),
    (
        "a scale beside a deadline",
        raw_push(prompt="x", slo_scale=2, deadline_ms=9),
        "slo_scale",
        "and deadline_ms both fix the deadline",
    ),
    ("a scale beside a time", raw_push(prompt="x", slo_scale=2, slo_ms=9), "slo_ms", "slo_scale"),
    ("sigmas of another length", raw_push(prompt="x", sigmas="1,0.5"), "sigmas", "give as many"),
    ("NaN among sigmas", raw_push(prompt="x", sigmas="nan"), "sigmas", "finite"),
]


@pytest.mark.parametrize(("raw", "field", "remedy"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_refused_by_field_and_remedy(
    raw: dict[bytes, bytes], field: str, remedy: str
) -> None:
    """Both stand in the error; a field that came over the wire is shown as far as it can be."""
    with pytest.raises(InvalidRequest) as caught:
        accepted(raw)
    if not field.startswith("?"):
        assert caught.value.field == field
    assert str(caught.value).startswith(caught.value.field + ": ")
    assert remedy in str(caught.value)
    assert len(str(caught.value)) < 500
    str(caught.value).encode()


def test_what_was_said_is_what_is_used() -> None:
    """Zero guidance stays zero, unset stays unset, and the defaults are filled in."""
    spec = accepted(raw_push(prompt=" x ", guidance_scale=0, seed=0))
    assert spec.params["guidance_scale"] == 0.0
    assert spec.params["seed"] == 0
    assert spec.params["prompt"] == " x "
    assert spec.params["negative_prompt"] is None
    assert spec.params["width"] == 128


def test_other_peoples_names_and_size_are_understood() -> None:
    spec = accepted(raw_push(prompt="x", steps=3, size="64x32", num_images_per_prompt=2))
    assert spec.params["num_inference_steps"] == 3
    assert (spec.params["width"], spec.params["height"]) == (64, 32)
    assert spec.params["n"] == 2


def test_guidance_without_effect_is_said() -> None:
    spec = accepted(raw_push(prompt="x", guidance_scale=5))
    assert any("has no effect without negative_prompt" in note for note in spec.notes)


def noted(manifest: dict[str, Any], **fields: Any) -> str:
    return " ".join(accepted(raw_push(prompt="x", **fields), {"noop": manifest}).notes)


def test_a_negative_prompt_without_guidance_is_said() -> None:
    """As the classic pipelines warn; where guidance begins is the model's own."""
    plain = {**GUIDED, "cfg": {"scale": "guidance_scale", "needs": None, "above": 1.0}}
    early = {**GUIDED, "cfg": {"scale": "guidance_scale", "needs": None, "above": 0.0}}
    asked = {"negative_prompt": "y", "guidance_scale": 1}
    assert "negative_prompt has no effect with guidance_scale 1.0" in noted(plain, **asked)
    assert noted(early, **asked) == noted(plain, guidance_scale=1) == ""
    assert noted(plain, negative_prompt="y") == ""


def test_what_a_step_cache_does_not_read_is_said() -> None:
    """And that exactness ends where a job's cache is lost."""
    cached = {
        **GUIDED,
        "parameters": {
            **GUIDED["parameters"],
            "cache": {"type": "str", "default": "none",
                      "choices": ["none", "first_block", "taylor_seer"]},
            "cache_threshold": {"type": "float", "default": None, "nullable": True},
        },
    }  # fmt: skip
    for cache in ("none", "taylor_seer"):
        said = noted(cached, cache=cache, cache_threshold=0.3, exact="false")
        assert said == f"cache_threshold has no effect with cache {cache}; first_block reads it"
    assert noted(cached, cache="first_block", cache_threshold=0.3, exact="false") == ""
    assert "goes on with a fresh one and other pixels" in noted(cached, cache="first_block")


def test_a_scheduler_may_want_one_sigma_more_than_steps() -> None:
    """Euler's last one is where its last step ends."""
    sigmas = {"type": "list[float]", "nullable": True, "beyond_steps": 1}
    euler = {"noop": {**GUIDED, "parameters": {**GUIDED["parameters"], "sigmas": sigmas}}}
    assert accepted(raw_push(prompt="x", steps=2, sigmas="9,3,0"), euler).params["sigmas"]
    with pytest.raises(InvalidRequest, match="has 2 values for 2 steps; give 3, the last being"):
        accepted(raw_push(prompt="x", steps=2, sigmas="9,3"), euler)


def test_a_video_is_refused_before_it_is_made() -> None:
    """A number of frames that its autoencoder cannot make, or a file that cannot move."""
    frames = {"type": "int", "default": 81, "min": 1, "max": 257, "step": 4}
    fps = {"type": "float", "default": 16}
    video = {
        **MANIFEST,
        "task": "text-to-video",
        "parameters": {**MANIFEST["parameters"], "num_frames": frames, "fps": fps},
    }
    served = {"noop": video}
    for fields, right in (
        ({"num_frames": 80}, "num_frames: 80 is not 1 and a multiple of 4; 77 and 81 are"),
        ({"num_frames": 0}, "num_frames: 0 is too small"),
        ({"output_format": "jpeg"}, "output_format: 'jpeg' is not one of png, webp"),
    ):
        with pytest.raises(InvalidRequest, match=right):
            accepted(raw_push(prompt="x", **fields), served)
    spec = accepted(raw_push(prompt="x", num_frames=1, frame_rate=24), served)
    assert (spec.params["num_frames"], spec.params["fps"]) == (1, 24)


def test_payload_and_fields_mean_the_same() -> None:
    """Typed values and text lead to the same parameters, in JSON as in msgpack."""
    wanted = accepted(raw_push(prompt="x", width=64, exact="true", seed=3))
    for packed in (
        msgpack.packb({"prompt": "x", "width": 64, "exact": True, "seed": 3}),
        json.dumps({"prompt": "x", "width": 64, "exact": True, "seed": 3}).encode(),
    ):
        spec = accepted({b"payload": packed})
        assert (spec.params, spec.exact) == (wanted.params, wanted.exact)


def test_content_is_what_was_said_before_any_default() -> None:
    """The order of fields and the id do not matter, every value does; a drawn seed does not."""
    a, b = raw_push(prompt="x", width=64, id="a"), raw_push(id="b", width=64, prompt="x")
    assert content_of(a) == content_of(b)
    assert content_of(a) != content_of(raw_push(prompt="x", width=80))
    assert accepted(raw_push(prompt="x")).content == accepted(raw_push(prompt="x")).content


def test_the_arrival_is_the_entrys_own_time() -> None:
    spec = accepted(raw_push(prompt="x", slo_ms=500))
    assert spec.arrival_s == 1.0
    assert spec.deadline_s == 1.5
    assert spec.id == "1000-0"


def test_a_model_is_served_once_all_its_stages_are_there() -> None:
    """And its parameters are those of all three."""
    parts = {f"m/{stage}": {"parameters": {stage: {"type": "int"}}} for stage in (ENCODE, DENOISE)}
    assert merge_manifests(parts) == {}
    parts[f"m/{DECODE}"] = {"parameters": {DECODE: {"type": "int"}}}
    assert set(merge_manifests(parts)["m"]["parameters"]) == {ENCODE, DENOISE, DECODE}


def test_a_model_must_be_named_where_several_are_served() -> None:
    several = {"one": MANIFEST, "two": MANIFEST}
    with pytest.raises(InvalidRequest, match=r"must be given.*one, two"):
        accepted(raw_push(prompt="x"), several)
    assert accepted(raw_push(prompt="x", model="two"), several).model == "two"


def test_a_scheduler_that_cannot_be_paused_is_refused_by_name() -> None:
    broken = {**MANIFEST, "scheduler": {"class": "OddOne", "verdict": "refused", "reason": "why"}}
    with pytest.raises(InvalidRequest, match="OddOne, which cannot be paused: why"):
        accepted(raw_push(prompt="x"), {"noop": broken})


# -- whatever is pushed ------------------------------------------------------------------

names = st.sampled_from(
    ["prompt", "width", "seed", "steps", "id", "size", "n", "model", "slo_ms", "sigmas", "exact"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
typed = st.dictionaries(names | st.text(), values, max_size=5)


def _json(fields: Any) -> bytes:
    return json.dumps(fields, default=str).encode()


def _msgpack(fields: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(fields)
    except (ValueError, OverflowError):  # it packs neither 65 bits nor half a surrogate
        return b"\xc1"
    return packed


blobs = st.binary() | typed.map(_json) | typed.map(_msgpack)
pushes = st.one_of(
    st.dictionaries(st.binary(max_size=20) | names.map(str.encode), st.binary(), max_size=6),
    st.dictionaries(names.map(str.encode), st.text(max_size=30).map(str.encode), max_size=6),
    st.fixed_dictionaries({b"payload": blobs}, optional={b"id": st.binary(max_size=9)}),
    typed.map(lambda f: {b"payload": _json({"prompt": "x", **f})}),
    blobs.flatmap(lambda b: st.integers(0, len(b)).map(lambda n: {b"payload": b[:n]})),
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(pushes)
def test_no_bytes_raise_anything_but_invalid_request(raw: dict[bytes, bytes]) -> None:
    """And what is accepted or refused can be written to Redis."""
    id_of("1000-0", raw).encode()
    content_of(raw)
    try:
        accepted(raw)
    except InvalidRequest as error:
        str(error).encode()
    admission = Admission(PoolDefaults())
    logging.disable(logging.CRITICAL)
    verdict = admission.decide(Pushed("1000-0", raw), MANIFESTS, EMPTY)
    logging.disable(logging.NOTSET)
    assert isinstance(verdict, Submit | Refuse)
    if isinstance(verdict, Refuse):
        assert "please report" not in verdict.error
    from common.scripts import Transitions, Ttls

    for value in (call := call_of(verdict, Transitions(Keys(), Ttls(), "n:1"), 1.0)).args:
        assert isinstance(value, bytes | str | int)
        value.encode() if isinstance(value, str) else None
    assert call.script in ("submit", "refuse")


# -- through Redis -----------------------------------------------------------------------


def test_bad_pushes_get_an_answer_and_the_stream_goes_on(
    redis_client: Any, keys: Keys, arena: Arena
) -> None:
    """Every kind is failed under its entry id with its field; no worker sees any; the good push
    behind them is served."""
    pool = Pool(redis_client, keys, arena)
    for kind in (ENCODE, DENOISE, DECODE):
        pool.add_worker(kind)
    pool.add_coordinator()
    pool.let_run(10)
    seen_by_noop = [b for b in BAD if "guidance" not in b[2] and "sigmas" not in b[2]]
    entries = [redis_client.xadd(keys.jobs, raw) for _, raw, _, _ in seen_by_noop]
    good = redis_client.xadd(keys.jobs, raw_push(prompt="x", id="good"))
    assert good
    pool.settle()
    pool.close()
    for entry, (name, _, field, remedy) in zip(entries, seen_by_noop, strict=True):
        packed = redis_client.get(keys.result(entry.decode()))
        assert packed, f"{name} got no answer"
        result = msgpack.unpackb(packed)
        assert (result["status"], result["error_code"]) == ("failed", "invalid_request"), name
        assert remedy in result["error"], name
        assert field.startswith("?") or result["field"] == field, name
        assert redis_client.hget(keys.job(entry.decode()), "is_terminal") == b"1"
    assert msgpack.unpackb(redis_client.get(keys.result("good")))["status"] == "succeeded"
    assert len(pool.ran_by) == 3  # encode, denoise, decode of the good one
    assert math.isclose(float(redis_client.hget(keys.job("good"), "progress")), 1.0)
