"""What a push says, as a client packs it and as it is read: ids, texts, traces, long numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.asks import text_push, typed_push
from common.checks import InvalidRequest, check
from common.push import content_of, read_push

TRACE, OTHER = (f"00-{c * 32}-{c * 16}-01" for c in "ab")


@pytest.mark.parametrize(
    ("job", "fields", "match"),
    [
        (5, {"prompt": "x"}, "id: must be text, not int"),
        ("a", {"prompt": b"a\xff".decode("utf-8", "surrogateescape")}, "prompt: cannot be sent"),
        ("a", {"prompt": "x", "traceparent": 5}, "traceparent: must be text, not int"),
        ("a", {"prompt": "x", "traceparent": "\udc80"}, "traceparent: cannot be sent"),
    ],
)
@pytest.mark.parametrize("push", [text_push, typed_push])
def test_what_cannot_be_pushed_names_its_field(
    push: Any, job: Any, fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidRequest, match=match):
        push(job, fields)


def test_numbers_are_no_text() -> None:
    with pytest.raises(InvalidRequest, match="width: must be text, not int"):
        text_push("a", {"prompt": "x", "width": 64})  # type: ignore[dict-item]


def _json(**fields: Any) -> dict[bytes, bytes]:
    return {b"payload": json.dumps(fields).encode()}


def test_a_trace_is_no_part_of_the_content_wherever_it_stands() -> None:
    """So a retry, which is another span, is the same job."""
    first, again = (_json(prompt="x", seed=5, traceparent=trace) for trace in (TRACE, OTHER))
    assert content_of(first) == content_of(again)
    assert content_of(first) != content_of(_json(prompt="y", seed=5, traceparent=TRACE))
    assert content_of(first) == typed_push("a", {"prompt": "x", "seed": 5}).content
    assert read_push("1-0", first).fields["traceparent"] == TRACE
    for broken in (b"{traceparent", b"\xc1traceparent", b'["traceparent"]'):
        assert content_of({b"payload": broken}) != content_of({b"payload": broken + b" "})


def test_a_trace_is_given_once() -> None:
    twice = {**_json(prompt="x", traceparent=TRACE), b"traceparent": OTHER.encode()}
    with pytest.raises(InvalidRequest, match="traceparent: given beside the payload and inside"):
        read_push("1-0", twice)


def test_a_number_of_thousands_of_digits_is_not_repeated() -> None:
    for rule in ({"type": "int", "max": 100}, {"type": "int", "min": -100}):
        value = int("9" * 4000) * (1 if "max" in rule else -1)
        with pytest.raises(InvalidRequest, match=r"9{20}… is too (large|small)") as caught:
            check("seed", value, rule)
        assert len(str(caught.value)) < 120
