"""Keeps Celery's states in step with the jobs that came by its door.

Ends come by the outbox, at once. Everything else is looked at a few times a second, all tasks in
one round trip: progress, refusals, and ends that were missed while no sender ran.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from common import asks
from common.asks import Ask, Ticket
from common.client import Client, JobHandle
from common.errors import ResultExpired, UnknownJob
from common.job import ErrorCode, JobStatus, Result
from common.record import JobRecord
from services.celery_app.context import Waiting, from_wire
from services.celery_app.telling import Telling, state_of

log = logging.getLogger("slackwater.celery")

LOOK_S = 0.25
# With thousands of tasks the looks are farther apart, so that they stay a small load.
LOOK_EACH_S = 0.0005
# States written in one look; the others have their turn at the next ones. Ends do not count.
MOST_STATES = 300


class Following:
    def __init__(self, client: Client, telling: Telling) -> None:
        self._client, self._telling = client, telling
        self._waiting: dict[str, Waiting] = {}
        self._told: dict[str, tuple[Any, ...]] = {}  # what each task was last told
        self._next_s = 0.0

    def forget(self) -> None:
        """Read everything anew: another process may have gone on."""
        self._waiting, self._told, self._next_s = {}, {}, 0.0

    @property
    def count(self) -> int:
        """Tasks whose job goes on."""
        return len(self._waiting)

    def due_s(self) -> float:
        """In how many seconds it should look again."""
        return max(0.0, self._next_s - time.monotonic())

    def look(self, alive: Callable[[], None]) -> None:
        """Bring the tasks' states up to date; `alive` is called again and again meanwhile."""
        self._read_waiting()
        written = 0
        tasks = list(self._waiting.values())
        pause_s = max(LOOK_S, LOOK_EACH_S * len(tasks))
        self._next_s = time.monotonic() + pause_s
        unread: list[Waiting] = []
        for waiting, record in zip(tasks, self._records(tasks), strict=True):
            alive()
            if record is None:
                unread.append(waiting)
                continue
            if record.is_terminal:
                self.end(waiting.id)
                continue
            state, info = state_of(record)
            said = (state, info["stage"], info["step"], info["queue_position"])
            if self._told.get(waiting.id) != said and written < MOST_STATES:
                written += 1
                self._telling.progress(waiting, record)
                self._told[waiting.id] = said
                self._waiting[waiting.id] = self._waiting.pop(waiting.id)  # others are next
        for waiting in self._not_pushes_any_more(unread):
            alive()
            self.end(waiting.id)

    def end(self, job: str) -> None:
        """Tell the end of a job, if it is a task's and has ended; a refusal too."""
        waiting = self._waiting.get(job) or self._read([job]).get(job)
        if waiting is None:
            return
        result = self._result_of(waiting)
        if result is None:
            return
        self._telling.end(waiting, result)
        self._client.ask(Ask((("HDEL", self._client.keys.celery, job),)))
        self._waiting.pop(job, None)
        self._told.pop(job, None)
        log.info("job %s %s: told Celery", job, result.status)

    def _result_of(self, waiting: Waiting) -> Result | None:
        """None while it goes on."""
        ticket = Ticket(waiting.id, waiting.entry, waiting.content)
        try:
            return JobHandle(self._client, ticket).result()
        except UnknownJob:
            what = "nothing is known of it any more: its record has expired or was lost"
        except ResultExpired as error:
            what = str(error)
        return Result(waiting.id, JobStatus.FAILED, error_code=ErrorCode.OUTPUT_LOST, error=what)

    def _read_waiting(self) -> None:
        [names] = self._client.ask(Ask((("HKEYS", self._client.keys.celery),)))
        there = {name.decode() for name in names}
        for gone in self._waiting.keys() - there:
            del self._waiting[gone]
            self._told.pop(gone, None)
        self._waiting |= self._read(sorted(there - self._waiting.keys()))

    def _read(self, jobs: list[str]) -> dict[str, Waiting]:
        found: dict[str, Waiting] = {}
        for at in range(0, len(jobs), asks.PAGE):
            page = jobs[at : at + asks.PAGE]
            [values] = self._client.ask(Ask((("HMGET", self._client.keys.celery, *page),)))
            for job, value in zip(page, values, strict=True):
                if value is None:
                    continue
                try:
                    found[job] = from_wire(job, value)
                except ValueError as error:
                    log.error("%s", error)
                    self._client.ask(Ask((("HDEL", self._client.keys.celery, job),)))
        return found

    def _not_pushes_any_more(self, tasks: list[Waiting]) -> list[Waiting]:
        """Those of `tasks` that no coordinator has still to read."""
        stream = self._client.keys.jobs
        commands = tuple(("XRANGE", stream, one.entry, one.entry) for one in tasks)
        return [
            one
            for one, found in zip(tasks, self._client.ask(Ask(commands)), strict=True)
            if not found
        ]

    def _records(self, tasks: Iterable[Waiting]) -> list[JobRecord | None]:
        """Each task's record; None where there is none, or that of a job of other content."""
        tasks = list(tasks)
        found = self._client.statuses([waiting.id for waiting in tasks])
        return [
            record if record is not None and record.content == waiting.content else None
            for waiting, record in zip(tasks, found, strict=True)
        ]
