"""States in Redis, in pieces: where a handle goes when the arena is full or the reader elsewhere.

One hash per state, `Keys.latents`: fields "0", "1", … are its pieces, and
"c:{token}" the claim on them, its value their job. The hash goes with its claim, or with its TTL,
so nothing leaks even if everybody dies.

A Redis that is away, or takes no writes for now, is waited for, as a worker's reports wait: a
failed put would lose the chunk that was computed.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import OutOfMemoryError, RedisError
from redis.exceptions import TimeoutError as NoReply

from common.keys import Keys
from common.outage import Outage, cannot_now, connect_anew

T = TypeVar("T")

# Measured for 8 MB: 7–12 ms in pieces of 1 MiB, 22–40 ms in 4 MiB, 18–23 ms in 256 KiB; and
# one piece holds up everybody's dispatches for less than 1 ms.
PIECE_BYTES = 1 << 20
# Longer than any job may wait; only what nobody freed lives until then.
TTL_S = 86_400.0
# Away for now: restarting, or loading its file.
AWAY = (Disconnected, NoReply, OSError)

# Give a claim back, and its state with it.
# KEYS  1 state hash   ARGV  1 the claim field
# Reply 1, or 0 if the claim was gone already. The first write is a delete.
FREE = """
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('UNLINK', KEYS[1])
return 1
"""


class SpillFull(Exception):
    """Redis is at its maxmemory."""


class Spill:
    """The pieces of this pool. `location` is the part of a handle that this class reads."""

    def __init__(self, redis: Any, prefix: str, piece_bytes: int, ttl_s: float | None) -> None:
        if redis.get_encoder().decode_responses:
            raise ValueError(
                "the store needs a Redis client without decode_responses: it reads bytes"
            )
        if piece_bytes < 1:
            raise ValueError(f"piece_bytes must be positive, got {piece_bytes}")
        self._redis, self._keys, self._piece = redis, Keys(prefix), piece_bytes
        self._ttl_ms = round(ttl_s * 1000) if ttl_s else 0
        self._free = redis.register_script(FREE)
        self._leaving = threading.Event()

    def stop_waiting(self) -> None:
        """From now on, and for who waits now, an error of Redis is raised."""
        self._leaving.set()

    def put(self, job: str, seq: int, part: str, payload: memoryview) -> dict[str, Any]:
        """Write `payload`; its location. A death on the way leaves pieces with a TTL."""
        key, claim = self._keys.latents(job, seq, part), "c:" + secrets.token_hex(4)
        starts = range(0, len(payload), self._piece)

        def write() -> None:
            try:
                self._redis.unlink(key)  # what a half-done try with this seq left
                for i, at in enumerate(starts):
                    # piece and TTL at once; a transaction a piece, so that Redis never stalls long
                    self._set(key, {str(i): payload[at : at + self._piece]})
                self._set(key, {claim: job})
            except OutOfMemoryError as err:
                self._redis.unlink(key)
                raise SpillFull(f"Redis is full ({err})") from err

        self._patiently(write)
        return {"key": key, "pieces": len(starts), "claim": claim}

    def get(self, location: dict[str, Any], into: memoryview) -> int | None:
        """Read the payload; its size in bytes, or None if this claim or a piece is gone.

        A size other than `into` has means that it is not what was put.
        """
        return self._patiently(lambda: self._read(location, into))

    def _read(self, location: dict[str, Any], into: memoryview) -> int | None:
        key, at = location["key"], 0
        for i in range(location["pieces"]):
            piece = self._redis.hget(key, str(i))
            if piece is None:
                return None
            if at + len(piece) <= len(into):
                into[at : at + len(piece)] = piece
            at += len(piece)
        return at if self._redis.hexists(key, location["claim"]) else None

    def free(self, location: dict[str, Any]) -> bool:
        """Give the claim back; False if it was gone."""
        return bool(self._patiently(lambda: self._free([location["key"]], [location["claim"]])))

    def _patiently(self, work: Callable[[], T]) -> T:
        """What `work`, which may be repeated, returns once Redis has answered."""
        outage = Outage("states")
        while True:
            try:
                answer = work()
                outage.over()
                return answer
            except (RedisError, OSError) as error:
                refused = cannot_now(error)
                if self._leaving.is_set() or not (refused or isinstance(error, AWAY)):
                    raise
                if refused:
                    connect_anew(self._redis.connection_pool)
                outage.failed(error, self._leaving)

    def _set(self, key: str, fields: dict[str, Any]) -> None:
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(key, mapping=fields)
            if self._ttl_ms:
                pipe.pexpire(key, self._ttl_ms)
            pipe.execute()
