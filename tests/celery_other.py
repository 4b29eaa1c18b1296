"""Another Celery program on the pool's Redis: its own queue, its own tasks, Celery's defaults."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

URL = os.environ.get("OTHER_REDIS_URL", "redis://127.0.0.1:1/0")
app = Celery("other", broker=URL, backend=URL)
app.conf.update(
    task_default_queue="other",
    task_routes={"slackwater.*": {"queue": "slackwater"}},
    result_expires=600,
    broker_connection_retry_on_startup=True,
)


@app.task(name="other.add")
def add(x: int, y: int) -> int:
    return x + y


@app.task(name="other.describe")
def describe(result: dict[str, Any]) -> str:
    return f"{result['params']['prompt']}: {result['status']}"


@app.task(name="other.count")
def count(results: list[dict[str, Any]]) -> int:
    return len({result["id"] for result in results})


@app.task(name="other.note_failure")
def note_failure(task_id: str) -> None:
    app.backend.client.set("other:failed", str(app.AsyncResult(task_id).result), ex=600)
