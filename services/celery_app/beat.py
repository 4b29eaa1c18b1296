"""Celery's beat, in the process that reads the outbox: so it ticks once, however many there are."""

from __future__ import annotations

from typing import Any

from celery.beat import EmbeddedService, Scheduler

JANITOR_S = 600.0


def schedule(janitor: str) -> dict[str, Any]:
    """What beat sends, and how often. Nothing is owed for the time in which nobody took it."""
    return {
        janitor: {"task": janitor, "schedule": JANITOR_S, "options": {"expires": JANITOR_S}},
    }


class Beat:
    """Starts and stops; its schedule lives in memory, since nothing here is due once a day."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._service: Any = None

    def start(self) -> None:
        if self._service is None:
            self._service = EmbeddedService(self._app, thread=True, scheduler_cls=Scheduler)
            self._service.start()

    def stop(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            service.stop()
