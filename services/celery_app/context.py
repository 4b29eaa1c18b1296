"""What Celery must know of a task until its job has ended: who waits and what follows.

It stands in `sw:celery` beside the id of the push's entry. Signatures of callbacks may hold dates
and the like, so it is written as kombu writes JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery.app.task import Context
from kombu.utils import json

from services.celery_app.backend import JSON

_json: Any = json  # untyped
# Of a task's request: what its result, its callbacks and its place in a group or chain need.
FIELDS = (
    "id", "task", "root_id", "parent_id", "group", "group_index", "chain", "chord", "callbacks",
    "errbacks", "ignore_result", "delivery_info", "stamps", "stamped_headers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Waiting:
    """A task whose job goes on. `content` is the hash of what was pushed, `entry` where."""

    id: str
    entry: str
    content: str
    serializer: str
    fields: dict[str, Any]

    @property
    def request(self) -> Any:
        """As Celery's backend takes it."""
        given = {"delivery_info": {}, **self.fields}
        return Context(given, called_directly=False, args=(), kwargs={})

    @property
    def priority(self) -> int | None:
        found = (self.fields.get("delivery_info") or {}).get("priority")
        return None if found is None else int(found)


def to_wire(request: Any, content: str, serializer: str) -> bytes:
    """What `enter` keeps of a task's request."""
    fields = {name: getattr(request, name, None) for name in FIELDS}
    given = {name: value for name, value in fields.items() if value is not None}
    return str(
        _json.dumps({"content": content, "serializer": serializer, "request": given})
    ).encode()


def from_wire(job: str, data: bytes) -> Waiting:
    """Raises ValueError for what this version cannot read."""
    entry, _, context = data.partition(b" ")
    try:
        wire = _json.loads(context)
        return Waiting(
            id=job,
            entry=entry.decode(),
            content=wire["content"],
            serializer=wire.get("serializer", JSON),
            fields=wire["request"],
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"the note of task {job} cannot be read: {error}") from error
