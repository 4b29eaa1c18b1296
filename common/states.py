"""A worker's states: read for the next task, and freed, on a thread beside the running task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

from common.handles import Handle, HandleError
from common.inbox import Pending
from common.job import JobSpec
from common.keys import Keys
from common.messages import unpack_handles
from common.scripts import text
from common.stage import Row, Stage, Task

log = logging.getLogger("slackwater.worker")


class States:
    def __init__(
        self, stage: Stage, stager: Executor, connect: Callable[[], Any], keys: Keys
    ) -> None:
        self._stage, self._stager, self._connect, self._keys = stage, stager, connect, keys

    def submit(self, work: Callable[[], None]) -> None:
        self._stager.submit(work)

    def close(self) -> None:
        """Wait for what was asked for."""
        self._stager.shutdown(wait=True)

    def stage_in(self, pending: Pending) -> Future[Any]:
        """The task with its parameters complete, and what the stage read for it, in time."""
        return self._stager.submit(self._read, pending)

    def _read(self, pending: Pending) -> tuple[Task, Any]:
        task = pending.task
        if any(not raw.params for raw in pending.raw):
            rows = []
            for row in task.rows:
                spec = None if row.params else self._spec(row.job)
                rows.append(replace(row, params=spec.params) if spec else row)
            task = replace(task, rows=tuple(rows))
            pending.task = task
        return task, self._stage.stage_in(task)

    def _spec(self, job: str) -> JobSpec | None:
        packed = self._connect().hget(self._keys.trajectory(job), "spec")
        return JobSpec.from_wire(packed) if packed else None

    def salvage(self, entry: str, seq: int, error: Exception) -> Pending | None:
        """A task whose message cannot be read, as its record has it, to be reported as failed."""
        record = self._connect().hmget(self._keys.task(seq), "stage", "model", "jobs", "members")
        if record[0] is None:
            return None
        stage, model, jobs, members = map(text, record)
        rows = tuple(Row(job, {}) for job in jobs.split())
        pending = Pending(entry, Task(seq, stage, model, rows, tuple(members.split())), [])
        pending.staged = Future()
        pending.staged.set_exception(error)
        return pending

    def free_packed(self, packed: bytes) -> None:
        try:
            handles = list(unpack_handles(packed).values())
        except (ValueError, HandleError) as error:
            log.error("was told to free what is no handle: %s", error)
            return
        self.free(handles)

    def free(self, handles: Sequence[Handle]) -> None:
        self._stager.submit(self._free_quietly, list(handles))

    def _free_quietly(self, handles: list[Handle]) -> None:
        try:
            self._stage.free(handles)
        except Exception:
            log.exception("could not free %s", ", ".join(map(str, handles)))
