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
    def new_nonce() -> str:
        return secrets.token_hex(8)

    def take(self, now: float) -> bool:
        """Try to lead; True if this process does now."""
        leading: bool = self.scripts.one(self.transitions.lead(self.lease_s))[0] == b"leading"
        if leading:
            self.renewed_s = now
        return leading

    def keep(self, now: float) -> None:
        """Renew the lease when a third of it has gone. Raises Fenced if it is somebody else's."""
        if now - self.renewed_s >= self.lease_s / 3 and not self.take(now):
            raise Fenced("the lease went to another coordinator")

    def release(self) -> None:
        self.scripts.one(self.transitions.lead(0))
