"""How many jobs of one API key may be active at a time, counted in Redis for all gateways.

A hash holds the jobs that count for a key. It is looked through for ended ones only when it is
full, so that a push costs one round trip.
"""

from __future__ import annotations

import logging
import time

from redis.exceptions import RedisError

from common.asks import Ask, Push, Ticket
from common.errors import RedisAway
from common.keys import Keys
from services.gateway.access import Caller
from services.gateway.client import GatewayClient
from services.gateway.errors import ApiError, retry_after

log = logging.getLogger("slackwater.gateway")

# Until one of them ends nobody can say when there is room.
RETRY_S = 5.0
# A claim older than this without a push was made by a gateway that died.
PUSH_S = 60.0


class Quota:
    """`claim` before a push, `pushed` behind it, `release` if it was claimed and then refused."""

    def __init__(self, client: GatewayClient, ttl_s: float) -> None:
        self._client, self._ttl_ms = client, round(1000 * ttl_s)

    @property
    def _keys(self) -> Keys:
        return self._client.keys

    async def claim(self, caller: Caller, push: Push) -> bool:
        """Count a job that is about to be pushed; False if it counts already, or nothing does.

        Raises a 429 where too many are active.
        """
        if not caller.max_jobs:
            return False
        added = await self._add(caller, push.id)
        if added is None:
            await self._forget_ended(caller)
            added = await self._add(caller, push.id)
        if added is None:
            raise ApiError(
                429,
                f"{caller.name} has {caller.max_jobs} active jobs and may have no more; wait "
                "until one has ended",
                code="too_many_jobs",
                headers=retry_after(RETRY_S),
            )
        return added

    async def pushed(self, caller: Caller, ticket: Ticket) -> None:
        if caller.max_jobs:
            await self._note("HSET", self._keys.pushed_by(caller.name), ticket.id, ticket.entry)

    async def release(self, caller: Caller, job: str) -> None:
        await self._note("HDEL", self._keys.pushed_by(caller.name), job)

    async def _note(self, *command: str) -> None:
        """As well as can be: what becomes of the push is known already, and a claim that nobody
        takes back is forgotten with its job."""
        try:
            await self._client.ask(Ask((command,)))
        except (RedisAway, RedisError) as error:
            log.warning("%s %s was not written: %s", command[0], command[1], error)

    async def _add(self, caller: Caller, job: str) -> bool | None:
        """Whether it is a new one; None where there is no room.

        Added first and counted then: of two at once both may be refused, never let in. Until the
        push has an entry, its time stands in the hash.
        """
        key = self._keys.pushed_by(caller.name)
        [*_, (new, count, _)] = await self._client.ask(
            Ask((
                ("MULTI",), ("HSETNX", key, job, round(1000 * time.time())), ("HLEN", key),
                ("PEXPIRE", key, self._ttl_ms), ("EXEC",),
            ))
        )  # fmt: skip
        if count <= caller.max_jobs or not new:  # a job pushed again counts once
            return bool(new)
        await self.release(caller, job)
        return None

    async def _forget_ended(self, caller: Caller) -> None:
        keys, mine = self._keys, self._keys.pushed_by(caller.name)
        [flat] = await self._client.ask(Ask((("HGETALL", mine),)))
        held = [(job.decode(), at.decode()) for job, at in zip(flat[::2], flat[1::2], strict=True)]
        crashed_ms = 1000 * (time.time() - PUSH_S)
        looks: list[tuple[str, ...]] = []
        pushed = [(job, at) for job, at in held if "-" in at or int(at) < crashed_ms]
        for job, at in pushed:
            # In this order: a push that becomes a job in between is one or the other.
            looks += [("XRANGE", keys.jobs, at, at), ("SISMEMBER", keys.active, job)]
        replies = await self._client.ask(Ask(tuple(looks))) if looks else []
        gone = [
            job
            for (job, _), unread, active in zip(pushed, replies[::2], replies[1::2], strict=True)
            if not active and not unread
        ]
        if gone:
            await self._client.ask(Ask((("HDEL", mine, *gone),)))
