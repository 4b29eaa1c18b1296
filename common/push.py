"""One entry of `sw:jobs` as it came over the wire: its fields, its id, the hash of what it says."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.checks import InvalidRequest, Text
from common.messages import MessageError, pack, unpack

# What XADD may carry in all: enough for the longest prompt a model takes, twice.
MAX_PUSH_BYTES = 256 * 1024
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
TRACEPARENT = b"traceparent"
BESIDE = (b"payload", b"id", TRACEPARENT)  # what may stand beside a payload
# An id of this form is given by Redis only: somebody's push will have it one day.
ENTRY = re.compile(r"\d+-\d+")


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
        for name in ("id", TRACEPARENT.decode()):
            if name in fields and name.encode() in raw:
                raise InvalidRequest(name, "given beside the payload and inside it; give it once")
        extra = sorted(k.decode("utf-8", "replace") for k in raw if k not in BESIDE)
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
    """Hash of what was pushed, whatever the order of its fields, without the id and the trace:
    a push that is sent again is another span."""
    said = {k: v for k, v in raw.items() if k not in (b"id", TRACEPARENT)}
    if TRACEPARENT in said.get(b"payload", b""):
        said[b"payload"] = _untraced(said[b"payload"])
    return hashlib.sha256(pack([[k, v] for k, v in sorted(said.items())])).hexdigest()


def _untraced(payload: bytes) -> bytes:
    """A payload without the trace in it, as the Python client would have packed it."""
    try:
        fields = _read_payload(payload)
        fields.pop(TRACEPARENT.decode(), None)
        return pack(dict(sorted(fields.items())))
    except (InvalidRequest, ValueError, TypeError, OverflowError):
        return payload  # it is refused, or has a number that no other push would repeat


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


def arrival_of(entry: str) -> float:
    """A stream entry's id begins with Redis' own clock, in ms: that is the job's arrival."""
    return int(entry.split("-", 1)[0]) / 1000
