"""The scripts of the front door and the sender, as typed calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.keys import Keys
from common.scripts import Call, ms

# One that was given up can be looked at for this long.
GIVEN_UP_TTL_S = 7 * 86_400
# Longer than any delivery is tried (webhook_give_up_s is checked against it).
OWED_TTL_S = 30 * 86_400


@dataclass(frozen=True, slots=True)
class Owed:
    """Something to be delivered. `kind` is webhook or upload; `body` what goes with it."""

    name: str
    kind: str
    job: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class SenderTransitions:
    """Builds calls. `nonce` is that of the process that reads the outbox."""

    keys: Keys
    nonce: str = ""

    def enter(self, job: str, context: bytes, fields: Mapping[bytes, bytes]) -> Call:
        """The door's: anybody may, and no nonce."""
        flat = [item for pair in fields.items() for item in pair]
        return Call("enter", (self.keys.jobs, self.keys.celery), (job, context, *flat))

    def lead(self, lease_s: float) -> Call:
        """0 gives it up."""
        return Call("lead", (self.keys.sender,), (self.nonce, ms(lease_s)))

    def post(self, entry: str, owed: Sequence[Owed], now: float) -> Call:
        k = self.keys
        args: list[Any] = [self.nonce, entry, ms(now), ms(OWED_TTL_S)]
        for one in owed:
            args += [one.name, one.kind, one.job, one.url, one.body]
        hashes = (k.delivery(one.name) for one in owed)
        return Call("post", (k.sender, k.outbox, k.deliveries, *hashes), tuple(args))

    def settle(
        self, name: str, verdict: str, again_s: float = 0.0, error: str = "", job: str = "",
        follows: bytes = b"",
    ) -> Call:  # fmt: skip
        """`verdict`: done, again (at `again_s`) or given_up; `follows`: an outbox body."""
        k = self.keys
        return Call(
            "settle",
            (k.sender, k.deliveries, k.delivery(name), k.outbox),
            (self.nonce, name, verdict, ms(again_s), error, ms(GIVEN_UP_TTL_S), job, follows),
        )
