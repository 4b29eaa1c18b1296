"""Which policy leads a live pool: reads what the operator wants, tells how the policy fares.

`slackwater policies use NAME` writes `wanted` into `{prefix}policy`; the leader takes it up within
a second, and writes `current`, `failures` and `last_failure` there, or `error` where there is no
such policy (the present one goes on then).
"""

from __future__ import annotations

import logging
from typing import Any

from redis.exceptions import OutOfMemoryError

from common.keys import Keys
from common.scripts import text
from services.coordinator.events import PolicyChosen
from services.policies import make_policy
from services.policies.contained import Contained

log = logging.getLogger("slackwater.coordinator")


class Steering:
    """`usual` is the policy of the settings, which leads unless another is wanted."""

    def __init__(self, redis: Any, keys: Keys, usual: str) -> None:
        self._redis, self._keys, self._usual = redis, keys, usual
        self._wanted = usual  # what was last tried
        self._told: dict[str, str] = {}

    def begin(self) -> None:
        """A new lead: its core runs the usual policy, and nothing has been told."""
        self._wanted, self._told = self._usual, {}

    def look(self) -> PolicyChosen | None:
        """Another policy, if the operator wants one since the last look."""
        said = self._redis.hget(self._keys.policy, "wanted")
        wanted = text(said) if said else self._usual
        if wanted == self._wanted:
            return None
        self._wanted = wanted
        try:
            policy = make_policy(wanted)
        except ValueError as error:
            log.error("the policy stays as it is: %s", error)
            self._write({"error": str(error), "asked": wanted})
            return None
        log.info("policy %s leads from now on", wanted)
        return PolicyChosen(policy)

    def tell(self, policy: Contained) -> None:
        """Write down how `policy` fares, if that has changed."""
        said = {
            "current": policy.name,
            "failures": str(policy.failures),
            "last_failure": policy.last_failure,
        }
        if said == self._told:
            return
        if policy.failures and said["failures"] != self._told.get("failures"):
            log.error("policy %s: failure %d, fcfs decided: %s", policy.name, policy.failures,
                      policy.last_failure)  # fmt: skip
        fresh = said["current"] != self._told.get("current")
        self._told = said
        self._write({**said, "asked": self._wanted, **({"error": ""} if fresh else {})})

    def _write(self, fields: dict[str, str]) -> None:
        try:
            self._redis.hset(self._keys.policy, mapping=fields)
        except OutOfMemoryError:  # it is told for people's sake
            self._told = {}
