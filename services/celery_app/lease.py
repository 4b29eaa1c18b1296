"""One process reads the outbox: a lease with a nonce, which its scripts check, as the leader's."""

from __future__ import annotations

import dataclasses
import secrets
import time

from common.keys import Keys
from common.scripts import Call, Scripts
from services.celery_app.transitions import SenderTransitions

LEASE_S = 5.0


class Deposed(RuntimeError):
    """Another process reads the outbox now."""


class Lease:
    def __init__(self, scripts: Scripts, keys: Keys, lease_s: float = LEASE_S) -> None:
        self._scripts, self.lease_s = scripts, lease_s
        self._process, self._term = secrets.token_hex(8), 0
        self.transitions = SenderTransitions(keys)
        self._renewed = float("-inf")

    def take(self) -> bool:
        """Try to get it; each time under a new nonce, so that what was sent before is fenced."""
        self._term += 1
        nonce = f"{self._process}:{self._term}"
        self.transitions = dataclasses.replace(self.transitions, nonce=nonce)
        return self._ask() in (b"leading", b"renewed")

    def keep(self) -> None:
        """Renew it when a third of it has gone. Raises Deposed if it had run out."""
        if time.monotonic() - self._renewed >= self.lease_s / 3 and self._ask() != b"renewed":
            raise Deposed("the lease ran out")

    def release(self) -> None:
        self._scripts.one(self.transitions.lead(0))

    def run(self, call: Call) -> list[bytes]:
        """One of its scripts. Raises Deposed."""
        reply = self._scripts.one(call)
        if reply[0] == b"fenced":
            raise Deposed("another process reads the outbox")
        return reply

    def _ask(self) -> bytes:
        began = time.monotonic()
        verdict: bytes = self._scripts.one(self.transitions.lead(self.lease_s))[0]
        if verdict != b"standby":
            self._renewed = began
        return verdict
