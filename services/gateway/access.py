"""API keys: who may use the gateway, and how much.

One key a line: `name key [per_minute=N] [max_jobs=N]`, where `key` is the key itself or
`sha256:` and its hash in hex. Only hashes are kept, and no key is ever logged. Without any key
the gateway is open, and everyone together is one caller.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request

from common.settings import Settings
from services.gateway.errors import ApiError, retry_after

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
LEAST_KEY_CHARS = 16  # a plain hash protects no short one
LIMITS = ("per_minute", "max_jobs")
ANYONE = "anyone"


class KeysError(ValueError):
    """The list of keys cannot be read; names the line, never a key."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request. `per_minute` pushes, `max_jobs` active jobs at a time; 0: no limit."""

    name: str
    per_minute: float = 0.0
    max_jobs: int = 0


class Keyring:
    """The callers by the SHA-256 of their keys; empty: everyone is `anyone`."""

    def __init__(self, callers: dict[str, Caller], anyone: Caller) -> None:
        self._callers, self._anyone = callers, anyone

    @classmethod
    def of(cls, settings: Settings) -> Keyring:
        """Raises KeysError."""
        text = settings.http_keys
        if text.startswith("@"):
            try:
                text = Path(text[1:]).read_text()
            except OSError as error:
                raise KeysError(f"http_keys: {error}") from error
        callers: dict[str, Caller] = {}
        for number, line in enumerate(re.split(r"[\n;]", text), start=1):
            words = line.split("#")[0].split()
            if words:
                digest, caller = _read_line(words, number, settings)
                if digest in callers or caller.name in {c.name for c in callers.values()}:
                    raise KeysError(f"http_keys: line {number} repeats a name or key")
                callers[digest] = caller
        return cls(callers, Caller(ANYONE, settings.http_per_minute, settings.http_max_jobs))

    @property
    def locked(self) -> bool:
        return bool(self._callers)

    def caller(self, authorization: str | None) -> Caller:
        """Who sends this Authorization header. Raises a 401."""
        if not self._callers:
            return self._anyone
        scheme, _, key = (authorization or "").partition(" ")
        # A lookup by hash: how long it takes tells nothing of the keys.
        found = self._callers.get(hashlib.sha256(key.strip().encode()).hexdigest())
        if scheme.lower() == "bearer" and found is not None:
            return found
        what = "is not known here" if authorization else "is missing"
        raise ApiError(
            401,
            f"the API key {what}; send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            param="Authorization",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def secret(self) -> bytes:
        """Something that only those who run the gateways know, the same on all of them."""
        return hashlib.sha256("".join(sorted(self._callers)).encode()).digest()


def _read_line(words: list[str], number: int, settings: Settings) -> tuple[str, Caller]:
    limits: dict[str, float] = {
        "per_minute": settings.http_per_minute, "max_jobs": settings.http_max_jobs,
    }  # fmt: skip
    for word in words[2:]:
        name, _, value = word.partition("=")
        if name not in LIMITS or not value.isdigit():
            raise KeysError(
                f"http_keys: line {number}: {name} is not per_minute=N or max_jobs=N; it should "
                "read: name key [per_minute=N] [max_jobs=N]"
            )
        limits[name] = int(value)
    if len(words) < 2 or not NAME.fullmatch(words[0]):
        raise KeysError(f"http_keys: line {number} should read: name key")
    key = words[1]
    digest = key.removeprefix("sha256:").lower()
    if key == digest or not key.startswith("sha256:"):
        if len(key) < LEAST_KEY_CHARS:
            raise KeysError(
                f"http_keys: line {number}: the key of {words[0]} has {len(key)} characters; "
                f"{LEAST_KEY_CHARS} or more are needed"
            )
        digest = hashlib.sha256(key.encode()).hexdigest()
    elif not re.fullmatch("[0-9a-f]{64}", digest):
        raise KeysError(f"http_keys: line {number}: sha256: wants 64 hex digits behind it")
    return digest, Caller(words[0], limits["per_minute"], int(limits["max_jobs"]))


class Rates:
    """A token bucket a caller: `per_minute` pushes, a tenth of them (at least one) at once.

    In this process' memory: several gateways allow several times as much.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens, as of

    def take(self, caller: Caller) -> None:
        """Count one push. Raises a 429 that says when the next one may come."""
        if not caller.per_minute:
            return
        most, now = max(1.0, caller.per_minute / 10), self._clock()
        tokens, as_of = self._buckets.get(caller.name, (most, now))
        tokens = min(most, tokens + (now - as_of) * caller.per_minute / 60)
        if tokens < 1:
            wait_s = (1 - tokens) * 60 / caller.per_minute
            raise ApiError(
                429,
                f"{caller.name} may push {caller.per_minute:g} jobs a minute; the next one in "
                f"{wait_s:.1f} s",
                code="rate_limit_exceeded",
                headers=retry_after(wait_s),
            )
        self._buckets[caller.name] = (tokens - 1, now)


def caller_of(request: Request) -> Caller:
    """The dependency of every route that needs a key."""
    keyring: Keyring = request.app.state.gateway.keyring
    return keyring.caller(request.headers.get("authorization"))
