"""A host's launcher record: two launchers under one host name would fight over its numbers."""

from __future__ import annotations

import os
import secrets
import socket

import redis

LEASE_MS = 5000


class Claim:
    """One launcher's hold on the hash `sw:launcher:{host}`, which lapses when it is not renewed."""

    def __init__(self, client: redis.Redis, key: str) -> None:
        self._redis, self._key = client, key
        self._token = secrets.token_hex(8)

    def held_by_another(self) -> str | None:
        """The pid of a launcher that lives and has this host, or None."""
        raw: dict[bytes, bytes] = self._redis.hgetall(self._key)  # type: ignore[assignment]
        other = {k.decode(): v.decode() for k, v in raw.items()}
        if other and other.get("token") != self._token and _lives(other):
            return other.get("pid", "unknown")
        return None

    def renew(self, counts: dict[str, int]) -> None:
        """Hold it for a lease; `counts` are its workers by stage."""
        record = {
            "pid": os.getpid(),
            "token": self._token,
            "node": socket.gethostname(),
            **counts,
        }
        pipe = self._redis.pipeline(transaction=True)
        pipe.hset(self._key, mapping=record)  # type: ignore[arg-type]
        pipe.pexpire(self._key, LEASE_MS)
        pipe.execute()

    def give_up(self) -> None:
        """Let go of it, unless another has it by now."""
        if self._redis.hget(self._key, "token") == self._token.encode():
            self._redis.delete(self._key)


def _lives(record: dict[str, str]) -> bool:
    """Whether the process of a launcher's record is there, as far as that can be told here."""
    if record.get("node") != socket.gethostname():
        return True
    try:
        os.kill(int(record.get("pid", "0")), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True
