"""What workers really did, written outside the system: the harness counts work from here.

Every worker process appends a line to a file of its own before a task runs, after each step, and
after the task; a line is one `write` to the page cache, so that it survives kill -9. Redis, which
is among the victims, has no part in it. Times are CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.stage import Control, Outcome, Stage, Task


class Journal:
    """One process' file in `folder`, named after its member and pid."""

    def __init__(self, folder: Path, member: str) -> None:
        path = folder / f"{member}.{os.getpid()}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, *words: object) -> None:
        line = " ".join(map(str, (*words, f"{time.monotonic():.6f}")))
        os.write(self._file, line.encode() + b"\n")


class JournaledStage:
    """A stage that notes each task, step and end of what it does, and does it."""

    def __init__(self, stage: Stage, journal: Journal) -> None:
        self._stage, self._journal = stage, journal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def run(self, task: Task, staged: Any, control: Control) -> list[Outcome]:
        for row in task.rows:
            self._journal.write("begin", task.seq, row.job, task.stage, row.start, row.stop)
        outcomes = self._stage.run(task, staged, JournaledControl(control, self._journal, task.seq))
        for outcome in outcomes:
            self._journal.write("end", task.seq, outcome.job, outcome.step)
        return outcomes


class JournaledControl:
    def __init__(self, control: Control, journal: Journal, seq: int) -> None:
        self._control, self._journal, self._seq = control, journal, seq

    def should_stop(self) -> bool:
        return self._control.should_stop()

    def has_left(self, job: str) -> bool:
        return self._control.has_left(job)

    def progress(self, job: str, step: int) -> None:
        self._journal.write("step", self._seq, job, step)
        self._control.progress(job, step)


# -- reading -----------------------------------------------------------------------------------


@dataclass(slots=True)
class TaskRun:
    """One job's share of one task, as its worker began it."""

    member: str
    pid: int
    seq: int
    job: str
    stage: str
    start: int
    begun_s: float
    steps: dict[int, float] = field(default_factory=dict)  # step done -> when
    ended_s: float | None = None
    reached: int = 0

    @property
    def touched(self) -> range:
        """Steps that were run or at least begun; one piece of work outside the denoise stage."""
        if self.stage != "denoise":
            return range(1)
        done = max(self.steps, default=self.start)
        if self.ended_s is not None:
            return range(self.start, max(done, self.reached))
        return range(self.start, done + 1)


def read(folder: Path) -> list[TaskRun]:
    """All task runs so far, in the order in which they began."""
    runs: list[TaskRun] = []
    for path in folder.iterdir():
        member, _, pid = path.name.rpartition(".")
        text = path.read_text()
        lines = text[: text.rfind("\n") + 1].splitlines()
        runs += _runs_of(member, int(pid), (line.split() for line in lines))
    return sorted(runs, key=lambda run: run.begun_s)


def is_in_task(path: Path) -> bool:
    """Whether the last line says that a task runs."""
    if not path.exists():
        return False
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 256))
        return file.read().rpartition(b"\n")[0].rpartition(b"\n")[2][:5] in (b"begin", b"step ")


def _runs_of(member: str, pid: int, lines: Iterable[list[str]]) -> list[TaskRun]:
    runs: dict[tuple[int, str], TaskRun] = {}
    for kind, *words in lines:
        if kind not in ("begin", "step", "end"):
            continue
        seq, job, at = int(words[0]), words[1], float(words[-1])
        if kind == "begin":
            runs[seq, job] = TaskRun(member, pid, seq, job, words[2], int(words[3]), at)
        elif kind == "step":
            runs[seq, job].steps[int(words[2])] = at
        else:
            runs[seq, job].ended_s, runs[seq, job].reached = at, int(words[2])
    return list(runs.values())


def repeats(runs: Iterable[TaskRun]) -> list[tuple[TaskRun, TaskRun]]:
    """Runs that did again what an earlier one had done or begun, each with that earlier one."""
    found = []
    before: dict[tuple[str, str], list[TaskRun]] = {}
    for run in runs:
        earlier = before.setdefault((run.job, run.stage), [])
        again = [old for old in earlier if set(old.touched) & set(run.touched)]
        if again:
            found.append((run, again[-1]))
        earlier.append(run)
    return found
