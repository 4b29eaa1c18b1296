"""Side jobs as Celery tasks: a video as MP4, the janitor."""

from __future__ import annotations

import logging
from typing import Any

from celery import Task

from common.client import Client
from common.settings import Settings
from services.celery_app.door import DoorRequest

log = logging.getLogger("slackwater.celery")

MUX, JANITOR = "slackwater.mux", "slackwater.janitor"


class SideTask(Task):  # type: ignore[misc]
    Request = DoorRequest  # its result is written as its sender reads it
    acks_late = False  # longer than the visibility timeout, perhaps: once begun, it is not repeated


def register(app: Any, client: Client, redis: Any, settings: Settings) -> None:
    def mux(job: str, n: int = 0) -> dict[str, Any]:
        """The n-th file of a job, a video as animated PNG or WebP, as MP4."""
        from services.celery_app.movie import make_movie  # video libraries that few need

        return make_movie(client, redis, job, n, settings.output_ttl_s)

    def janitor() -> dict[str, int]:
        """Sweep up what deaths have left in Redis; counts by kind."""
        from services import janitor as sweeper

        counts: dict[str, int] = sweeper.sweep(redis, settings)
        return counts

    app.task(base=SideTask, name=MUX)(mux)
    app.task(base=SideTask, name=JANITOR, ignore_result=True)(janitor)
