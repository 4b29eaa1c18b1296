"""Webhooks as the Standard Webhooks specification has them: what is sent, signed, and how."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from standardwebhooks import Webhook

from common import outgoing_http
from common.outgoing import Allowed, NotAllowed
from common.settings import Settings
from services.celery_app.attempts import Failed, GiveUp
from services.celery_app.hurry import Hurry, Late

# Receivers should answer at once and work afterwards. A try takes no longer in all, but for a
# connection that is being made then.
TIMEOUT_S = 15.0
# More of an answer than an error message needs is not read.
ANSWER_BYTES = 500
LEAST_SECRET_BYTES = 24


class SecretError(ValueError):
    """The secret is missing or cannot be used; never shows it."""


def secrets_of(settings: Settings) -> tuple[Webhook, ...]:
    """The signers, newest first. Raises SecretError."""
    text = settings.webhook_secret
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except OSError as error:
            raise SecretError(f"webhook_secret: {error}") from error
    found = []
    for number, word in enumerate(text.split(), start=1):
        try:
            signer = Webhook(word)
        except Exception:
            raise SecretError(f"webhook_secret: number {number} is not base64") from None
        if len(signer._whsecret) < LEAST_SECRET_BYTES:
            raise SecretError(
                f"webhook_secret: number {number} is shorter than {LEAST_SECRET_BYTES} bytes"
            )
        found.append(signer)
    if settings.outgoing_hosts and not found:
        raise SecretError(
            "webhook_secret: is needed where outgoing_hosts lists hosts; make one with "
            "python -c \"import base64, os; print('whsec_' + base64.b64encode(os.urandom(32))"
            '.decode())"'
        )
    return tuple(found)


def payload(event: str, at: datetime, job: dict[str, Any]) -> bytes:
    """The body, the same for every try."""
    body = {"type": event, "timestamp": at.isoformat(timespec="milliseconds"), "data": job}
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def headers(name: str, body: bytes, signers: Sequence[Webhook], now: datetime) -> dict[str, str]:
    """`name` stays the same over all tries, so that a receiver can tell a repeat."""
    signed = [signer.sign(name, now, body.decode()) for signer in signers]
    return {
        "content-type": "application/json",
        "user-agent": "slackwater",
        "webhook-id": name,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": " ".join(signed),
    }


class Webhooks:
    """Sends to allowed hosts only. Used by many threads."""

    def __init__(self, settings: Settings) -> None:
        """Raises SecretError, ValueError for a list of hosts that cannot be read."""
        self._signers = secrets_of(settings)
        self._http = outgoing_http.client(
            Allowed.parse(settings.outgoing_hosts), timeout_s=TIMEOUT_S
        )

    def send(self, name: str, url: str, body: bytes) -> None:
        """One try. Raises Failed, which may be tried again, or GiveUp."""
        if not self._signers:
            raise Failed("no webhook_secret is set")
        signed = headers(name, body, self._signers, datetime.now(UTC))
        with Hurry(TIMEOUT_S) as hurry:
            try:
                with self._http.stream(
                    "POST", url, content=body, headers=signed, extensions={"trace": hurry.trace}
                ) as answer:
                    if answer.is_success:
                        return
                    said = _beginning(answer)
            except NotAllowed as error:
                raise Failed(str(error)) from error  # a name may point elsewhere for a while
            except (httpx.HTTPError, Late) as error:
                if hurry.late:
                    raise Failed(f"no answer within {TIMEOUT_S:g} s") from error
                raise Failed(f"{type(error).__name__}: {error}") from error
        what = f"answered {answer.status_code}: {said}"
        if answer.status_code == httpx.codes.GONE:
            raise GiveUp(what)
        raise Failed(what)

    def close(self) -> None:
        self._http.close()


def _beginning(answer: httpx.Response) -> str:
    """Of its body, as much as an error message needs and as came in time."""
    read = bytearray()
    with contextlib.suppress(httpx.HTTPError):  # the status has been said
        for part in answer.iter_bytes():
            read += part
            if len(read) >= ANSWER_BYTES:
                break
    return read[:ANSWER_BYTES].decode("utf-8", "replace")
