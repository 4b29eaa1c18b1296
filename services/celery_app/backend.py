"""Celery's result backend on Redis, made fit for readers that are set up differently.

A reader of Celery decodes every result with its own `result_serializer`, whatever the writer
used. So each task's states are written as its sender is taken to read them (as it serialised the
task), and what stands there already is read by its first byte.
"""

from __future__ import annotations

from typing import Any

from celery import current_task, states
from celery.backends.base import Backend
from celery.backends.redis import RedisBackend
from kombu import serialization

JSON, MSGPACK = "json", "msgpack"
_kombu: Any = serialization  # untyped
SERIALIZER = "slackwater_serializer"  # in a task's request: how its sender serialised it
_TYPES = {JSON: ("application/json", "utf-8"), MSGPACK: ("application/x-msgpack", "binary")}


class JobBackend(RedisBackend):  # type: ignore[misc]
    """As Celery's own, for both serialisers, and an end stays an end."""

    def decode(self, payload: bytes | None) -> Any:
        if payload is None:
            return None
        written_as = JSON if payload[:1] in (b"{", b"[") else MSGPACK
        kind, encoding = _TYPES[written_as]
        return _kombu.loads(payload, content_type=kind, content_encoding=encoding, accept={kind})

    def _encode(self, data: Any) -> Any:
        asked = getattr(current_task.request, SERIALIZER, None) if current_task else None
        return _kombu.dumps(data, serializer=asked or self.serializer)

    def _store_result(self, task_id: str, result: Any, state: str, *args: Any, **more: Any) -> Any:
        """Celery keeps a SUCCESS only; a progress that comes late must hide no other end either."""
        if state not in states.READY_STATES and self.get_state(task_id) in states.READY_STATES:
            return result
        return super()._store_result(task_id, result, state, *args, **more)

    def get_state(self, task_id: str) -> str:
        self._cache.pop(task_id, None)  # other processes write as well
        return str(super().get_state(task_id))


class ImpatientBackend(JobBackend):
    """Raises at once what went wrong: its callers try again themselves, and have others to serve
    meanwhile. Celery's own would stand still for 20 s."""

    retry_policy = {**Backend.retry_policy, "max_retries": 0}


class Backends:
    """The two ways to write to the one backend."""

    def __init__(self, app: Any, url: str) -> None:
        self._of = {
            serializer: ImpatientBackend(app=app, url=url, serializer=serializer)
            for serializer in (JSON, MSGPACK)
        }

    def __getitem__(self, serializer: str) -> JobBackend:
        return self._of[serializer]


def serializer_of(content_type: str | None) -> str:
    """How a program reads results, by how it wrote its task."""
    return MSGPACK if content_type == _TYPES[MSGPACK][0] else JSON
