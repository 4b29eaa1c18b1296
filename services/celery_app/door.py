"""The front door: the task `slackwater.generate`, which pushes a job and returns.

No Celery worker waits for a job. What becomes of it is written to Celery's result backend by the
sender (telling.py), under the task's id, which is the job's id too.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import Task, states
from celery.exceptions import Ignore
from celery.worker.request import Request
from celery.worker.state import revoked
from redis.exceptions import RedisError

from common import asks
from common.asks import Push
from common.checks import InvalidRequest
from common.client import Client
from common.scripts import Scripts
from common.traceparent import Parent
from services.celery_app.backend import JSON, SERIALIZER, Backends, serializer_of
from services.celery_app.context import to_wire
from services.celery_app.metrics import INVALID, CeleryMetrics
from services.celery_app.transitions import SenderTransitions

log = logging.getLogger("slackwater.celery")

GENERATE = "slackwater.generate"
QUEUED = "QUEUED"
LONGEST_PAUSE_S = 30


class DoorRequest(Request):  # type: ignore[misc]
    """Keeps how the message was serialised: its sender reads results in the same way."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._request_dict[SERIALIZER] = serializer_of(self.content_type)


class DoorTask(Task):  # type: ignore[misc]
    Request = DoorRequest
    name = GENERATE


class Door:
    """What the task does, for one pool."""

    def __init__(
        self, client: Client, redis: Any, backends: Backends, metrics: CeleryMetrics
    ) -> None:
        self.client, self.backends, self.metrics = client, backends, metrics
        self.scripts, self.transitions = Scripts(redis), SenderTransitions(client.keys)

    def register(self, app: Any) -> None:
        def generate(task: Any, *args: Any, **kwargs: Any) -> None:
            self.enter(task.request, args, kwargs)
            raise Ignore  # this task's own end is not the job's: no state, no callbacks, no chain

        app.task(
            base=DoorTask, bind=True, name=GENERATE, autoretry_for=(RedisError, OSError),
            retry_backoff=True, retry_backoff_max=LONGEST_PAUSE_S, max_retries=None,
        )(generate)  # fmt: skip

    def enter(self, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Push the job. What cannot be pushed is told as the task's failure."""
        job = request.id
        serializer = getattr(request, SERIALIZER, JSON)
        backend = self.backends[serializer]
        if backend.get_state(job) in states.READY_STATES:
            return  # revoked while no worker of ours was there, or a message that came twice
        try:
            priority = (request.delivery_info or {}).get("priority")
            push = push_of(job, args, kwargs, priority, getattr(request, "traceparent", None))
        except InvalidRequest as error:
            self.metrics.task(INVALID)
            backend.mark_as_failure(job, ValueError(f"invalid_request: {error}"), request=request)
            return
        if not request.ignore_result:
            backend.store_result(job, {"stage": "", "step": 0, "steps": 0}, QUEUED)
        context = to_wire(request, push.content, serializer)
        [verdict, *_] = self.scripts.one(self.transitions.enter(job, context, push.raw))
        self.metrics.task(verdict.decode())
        log.info("job %s came by Celery: %s", job, verdict.decode())
        if job in revoked:  # meanwhile: whoever revoked it found no job to cancel
            self.client.cancel(job)


def push_of(
    job: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    priority: int | None = None,
    traceparent: Any = None,
) -> Push:
    """The push that a task's arguments ask for. Raises InvalidRequest.

    Celery's Redis transport serves priority 0 first and 9 last; a job's priority is the higher
    the sooner. So the message's p is -p here, unless the job says its own.
    """
    params = dict(kwargs)
    if len(args) > 1 or (args and "prompt" in params):
        raise InvalidRequest("prompt", "is the one argument that may stand without its name")
    if args:
        params["prompt"] = args[0]
    if "id" in params:
        raise InvalidRequest("id", "is the task's id; give it as task_id")
    if priority and "priority" not in params:
        params["priority"] = -int(priority)
    if isinstance(traceparent, str) and Parent.of(traceparent) is not None:
        params.setdefault("traceparent", traceparent)  # a header of whoever traces the task
    return asks.typed_push(job, params)
