"""One coordinator leads: a lease with a nonce, checked again inside every leader's script.

So a former leader that was paused and wakes up can read, but change nothing.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from common.scripts import Scripts, Transitions


class Fenced(RuntimeError):
    """Somebody else leads now; whatever this process believed is void."""


@dataclass(slots=True)
class Leadership:
    scripts: Scripts
    transitions: Transitions
    lease_s: float
    renewed_s: float = field(default=float("-inf"))

    @staticmethod
    def new_nonce(after: str = "") -> str:
        """A process' next nonce: what was sent under `after` and arrives late will be fenced."""
        process, _, term = after.partition(":")
        return f"{process or secrets.token_hex(8)}:{int(term or 0) + 1}"

    def take(self, now: float) -> bool:
        """Try to lead; True if this process does now."""
        return self._ask(now) in (b"leading", b"renewed")

    def keep(self, now: float) -> None:
        """Renew the lease when a third of it has gone. Raises Fenced if it had run out: somebody
        else may have led meanwhile, even if nobody does now."""
        if now - self.renewed_s >= self.lease_s / 3 and self._ask(now) != b"renewed":
            raise Fenced("the lease ran out")

    def _ask(self, now: float) -> bytes:
        verdict: bytes = self.scripts.one(self.transitions.lead(self.lease_s))[0]
        if verdict != b"standby":
            self.renewed_s = now
        return verdict

    def release(self) -> None:
        self.scripts.one(self.transitions.lead(0))
