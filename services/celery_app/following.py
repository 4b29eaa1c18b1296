"""Keeps Celery's states in step with the jobs that came by its door.

Ends come by the outbox, at once. Everything else is looked at a few times a second, all tasks in
one round trip: progress, refusals, and ends that were missed while no sender ran.

What cannot be told to Celery holds up nobody else: a callback that cannot be sent is its task's
trouble, and while Celery's own Redis is away all tasks wait and everything else goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common import asks
from common.asks import Ask, Ticket
from common.client import Client, JobHandle
from common.errors import ResultExpired, UnknownJob
from common.job import ErrorCode, JobStatus, Result
from common.record import JobRecord
from services.celery_app.attempts import pause_s
from services.celery_app.context import Waiting, from_wire
from services.celery_app.telling import Telling, state_of

log = logging.getLogger("slackwater.celery")

LOOK_S = 0.25
# With thousands of tasks the looks are farther apart, so that they stay a small load.
LOOK_EACH_S = 0.0005
# States written in one look; the others have their turn at the next ones. Ends do not count.
MOST_STATES = 300
# An end that cannot be told, for a reason of its task's, is tried so often, first again after so
# long. Then the task has failed.
TRIES = 5
AGAIN_S = 0.5
# Celery's own Redis being away is nobody's fault, and tried for ever.
AWAY = (
    RedisConnectionError, RedisTimeoutError, OutOfMemoryError, ReadOnlyError, ConnectionError,
    TimeoutError,
)  # fmt: skip
AWAY_S = 1.0
LONGEST_AWAY_S = 30.0


@dataclass(slots=True)
class Trouble:
    """With telling Celery of a task: ends tried, and when (monotonic) another try is due."""

    tries: int = 0
    again_s: float = 0.0


class Following:
    def __init__(self, client: Client, telling: Telling) -> None:
        self._client, self._telling = client, telling
        self._waiting: dict[str, Waiting] = {}
        self._told: dict[str, tuple[Any, ...]] = {}  # what each task was last told
        self._next_s = 0.0
        self._troubles: dict[str, Trouble] = {}
        self._away, self._away_until = 0, 0.0  # looks that found Celery's Redis away, one by one

    def forget(self) -> None:
        """Read everything anew: another process may have gone on. What could not be told is still
        not tried before its time, or one slow try could cost the lease again and again."""
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
        if self._celery_is_away():
            return
        for waiting, record in zip(tasks, self._records(tasks), strict=True):
            alive()
            trouble = self._troubles.get(waiting.id)
            if trouble is not None and time.monotonic() < trouble.again_s:
                continue
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
                error = self._tell(waiting, partial(self._telling.progress, waiting, record))
                if error is not None and _is_away(error):
                    continue
                self._told[waiting.id] = said  # or left out: there will be others
                self._waiting[waiting.id] = self._waiting.pop(waiting.id)  # others are next
        for waiting in self._not_pushes_any_more(unread):
            alive()
            self.end(waiting.id)

    def end(self, job: str) -> None:
        """Tell the end of a job, if it is a task's and has ended; a refusal too. What cannot be
        told now, `look` tries again."""
        waiting = self._waiting.get(job) or self._read([job]).get(job)
        if waiting is None or self._celery_is_away():
            return
        result = self._result_of(waiting)
        if result is None:
            return
        error = self._tell(waiting, partial(self._telling.end, waiting, result))
        if error is not None and not self._given_up(waiting, error):
            return
        self._client.ask(Ask((("HDEL", self._client.keys.celery, job),)))
        self._drop(job)
        if error is None:
            log.info("job %s %s: told Celery", job, result.status)

    def _drop(self, job: str) -> None:
        for those in (self._waiting, self._told, self._troubles):
            those.pop(job, None)

    def _tell(self, waiting: Waiting, tell: Callable[[], None]) -> Exception | None:
        """Why Celery could not be told; None if it was."""
        if self._celery_is_away():
            return RedisConnectionError("Celery's Redis is away")
        try:
            tell()
        except Exception as error:
            if _is_away(error):
                self._wait_for_celery(error)
            elif waiting.id not in self._troubles:  # said once
                self._troubles[waiting.id] = Trouble()
                log.warning("job %s: Celery cannot be told", waiting.id, exc_info=True)
            return error
        if self._away:
            log.warning("Celery's Redis is back")
            self._away = 0
        return None

    def _given_up(self, waiting: Waiting, error: Exception) -> bool:
        """Whether an end that could not be told is not to be tried again."""
        trouble = self._troubles.get(waiting.id)
        if trouble is None or _is_away(error):
            return False
        trouble.tries += 1
        if trouble.tries < TRIES:
            trouble.again_s = time.monotonic() + pause_s(trouble.tries, AGAIN_S)
            return False
        error_of_that = self._tell(waiting, partial(self._telling.give_up, waiting, error))
        if error_of_that is not None and _is_away(error_of_that):
            return False
        log.error("job %s: given up telling Celery how it ended: %s", waiting.id, error)
        return True

    def _celery_is_away(self) -> bool:
        return time.monotonic() < self._away_until

    def _wait_for_celery(self, error: Exception) -> None:
        self._away += 1
        if self._away == 1:
            log.warning("Celery's Redis is away (%s); its programs are told later", error)
        self._away_until = time.monotonic() + min(LONGEST_AWAY_S, pause_s(self._away, AWAY_S))

    def _result_of(self, waiting: Waiting) -> Result | None:
        """None while it goes on."""
        ticket = Ticket(waiting.id, waiting.entry, waiting.content)
        try:
            return JobHandle(self._client, ticket).result()
        except UnknownJob:
            what = "nothing is known of it any more: its record has expired or was lost"
        except ResultExpired as error:
            what = str(error)
        except (KeyError, TypeError, ValueError) as error:
            what = f"its result cannot be read: {type(error).__name__}: {error}"
        return Result(waiting.id, JobStatus.FAILED, error_code=ErrorCode.OUTPUT_LOST, error=what)

    def _read_waiting(self) -> None:
        [names] = self._client.ask(Ask((("HKEYS", self._client.keys.celery),)))
        there = {name.decode() for name in names}
        for gone in (self._waiting.keys() | self._troubles.keys()) - there:
            self._drop(gone)
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


def _is_away(error: Exception) -> bool:
    """Whether Celery's broker or backend is; kombu wraps what its connections raise."""
    return isinstance(error, AWAY) or isinstance(error.__cause__, AWAY)
