"""Side jobs as Celery tasks: a video as MP4, the janitor."""

from __future__ import annotations

import logging
from typing import Any

from celery import Task
from redis.exceptions import NoPermissionError

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
        """The n-th file of a job, a video as animated PNG or WebP, as MP4, kept beside the file.

        Raises JobError, IndexError or ResultExpired for a file that is not there, ValueError for
        one that is no video. A repeat makes the same.
        """
        from common import movie  # video libraries that few need

        file, result = client.output(job, n), client.result(job)
        asked = movie.asked(result.params) if result else {}
        content, frames, fps = movie.to_mp4(file, **asked)
        key = client.keys.movie(job, n)
        redis.set(key, content, px=round(1000 * settings.output_ttl_s))
        return {
            "key": key, "mime": movie.MIME, "bytes": len(content), "frames": frames,
            "fps": float(fps),
        }  # fmt: skip

    def janitor() -> dict[str, int]:
        """Sweep up what deaths have left in Redis; counts by kind. Nothing where this user of Redis
        may not: the leading coordinator sweeps too."""
        from services import janitor as sweeper

        try:
            counts: dict[str, int] = sweeper.sweep(redis, settings)
        except NoPermissionError as error:
            log.info("the coordinator sweeps, this user of Redis may not (%s)", error)
            return {}
        return counts

    app.task(base=SideTask, name=MUX)(mux)
    app.task(base=SideTask, name=JANITOR, ignore_result=True)(janitor)
