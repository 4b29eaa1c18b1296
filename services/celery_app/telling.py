"""What Celery's programs are told of a job: states and their info, and the end."""

from __future__ import annotations

from typing import Any

from celery import group, signature, states
from celery.exceptions import TaskRevokedError

from common.job import ErrorCode, JobStatus, Result
from common.record import JobRecord
from services.celery_app.backend import Backends
from services.celery_app.context import Waiting
from services.celery_app.door import QUEUED

PROGRESS = "PROGRESS"
# Built in, so that they are the same in every program that reads them.
INVALID = frozenset({ErrorCode.INVALID_REQUEST, ErrorCode.CONFLICT})


class Telling:
    """Writes states to the backend; each method may be called again after a crash."""

    def __init__(self, app: Any, backends: Backends) -> None:
        self._app, self._backends = app, backends

    def progress(self, waiting: Waiting, record: JobRecord) -> None:
        """`record` is of a job that goes on."""
        if not waiting.request.ignore_result:
            state, info = state_of(record)
            self._backends[waiting.serializer].store_result(waiting.id, info, state)

    def end(self, waiting: Waiting, result: Result) -> None:
        """Callbacks, chains and chords first, then the state that `get()` waits for: as Celery's
        workers do it. One that was told before is not told again."""
        backend, request = self._backends[waiting.serializer], waiting.request
        if backend.get_state(waiting.id) in states.READY_STATES:
            return
        if result.status == JobStatus.SUCCEEDED:
            told = result_map(result)
            self._follow(waiting, told)
            backend.mark_as_done(waiting.id, told, request=request)
        elif result.status == JobStatus.CANCELED:
            backend.mark_as_revoked(waiting.id, "canceled", request=request)
            self._errbacks(backend, request, TaskRevokedError("canceled"))
        else:
            keep = not request.ignore_result
            error = error_of(result)
            backend.mark_as_failure(waiting.id, error, request=request, store_result=keep)

    def give_up(self, waiting: Waiting, error: Exception) -> None:
        """Its end cannot be told: a failure that says why, so that `get()` does not wait for ever.
        Nothing follows but what a chord needs."""
        backend = self._backends[waiting.serializer]
        said = RuntimeError(f"its end cannot be told: {type(error).__name__}: {error}")
        try:
            keep = not waiting.request.ignore_result
            backend.mark_as_failure(
                waiting.id, said, request=waiting.request, store_result=keep, call_errbacks=False
            )
        except Exception:  # perhaps of what was asked for, so without it
            backend.store_result(waiting.id, said, states.FAILURE)

    def _errbacks(self, backend: Any, request: Any, error: Exception) -> None:
        if request.errbacks:
            backend._call_task_errbacks(request, error, None)

    def _follow(self, waiting: Waiting, told: dict[str, Any]) -> None:
        request = waiting.request
        where = {
            "parent_id": waiting.id,
            "root_id": request.root_id or waiting.id,
            "priority": waiting.priority,
            "serializer": waiting.serializer,
        }
        callbacks = [signature(one, app=self._app) for one in request.callbacks or ()]
        if len(callbacks) > 1:
            group(callbacks, app=self._app).apply_async((told,), **where)
        elif callbacks:
            callbacks[0].apply_async((told,), **where)
        if request.chain:
            *rest, first = request.chain
            signature(first, app=self._app).apply_async((told,), chain=rest, **where)


def state_of(record: JobRecord) -> tuple[str, dict[str, Any]]:
    """Celery's state of a job that goes on, and the info beside it."""
    info = {
        "status": str(record.status),
        "stage": record.stage,
        "step": record.step,
        "steps": record.steps,
        "progress": round(record.progress, 3),
        "queue_position": record.queue_position,
        "slack_s": record.slack_s,
        "eta_at": record.eta_s,
    }
    if record.step:
        return PROGRESS, info
    return (QUEUED if record.status == JobStatus.QUEUED else states.STARTED), info


def result_map(result: Result) -> dict[str, Any]:
    """What `get()` returns: plain values only."""
    return {
        "id": result.id,
        "status": str(result.status),
        "outputs": [
            {
                "key": o.key, "mime": o.mime, "width": o.width, "height": o.height,
                "bytes": o.bytes, "sha256": o.sha256,
            }
            for o in result.outputs
        ],
        "params": result.params,
        "seed": result.seed,
        "timings": result.timings,
        "on_time": result.on_time,
        "notes": list(result.notes),
    }  # fmt: skip


def error_of(result: Result) -> Exception:
    """What `get()` raises for a job that did not succeed."""
    said = f"{result.error_code or result.status}: {result.error or 'no more is known'}"
    if result.error_code in INVALID:
        return ValueError(said)
    if result.status == JobStatus.EXPIRED or result.error_code == ErrorCode.RUN_TIMEOUT:
        return TimeoutError(said)
    return RuntimeError(said)
