"""What a stage is to the worker loop: three of these make a pipeline.

A worker process owns one `Stage`. The loop in `common/worker.py` takes tasks from Redis,
has the stage read the state a task needs (`stage_in`, on a background thread while the
previous task still computes), runs it (`run`, on the main thread) and reports what came
out. A stage never talks to Redis about tasks, and the loop never touches a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol, runtime_checkable

from common.handles import Handle

ENCODE, DENOISE, DECODE = "encode", "denoise", "decode"
STAGES = (ENCODE, DENOISE, DECODE)


@dataclass(frozen=True, slots=True)
class Row:
    """One job's share of a task.

    `params` are the effective parameters (manifest names, every default filled in),
    `handles` what earlier tasks left behind by part name ("embeds", "prepared", "latents").
    `start`/`stop` are denoising steps, stop exclusive; 0/0 outside the denoise stage.
    `latest_s` (since the epoch) is when what is left after this task must begin, to be in time;
    infinite for a job that cannot be: what is kept for it may go first.
    """

    job: str
    params: dict[str, Any]
    handles: dict[str, Handle] = field(default_factory=dict)
    start: int = 0
    stop: int = 0
    exact: bool = True
    latest_s: float = inf
    traceparent: str = ""  # its client's span, for the worker's traces


@dataclass(frozen=True, slots=True)
class Task:
    """One dispatch as its worker sees it; `seq` is the dispatch number, its only token."""

    seq: int
    stage: str
    model: str
    rows: tuple[Row, ...]
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """One finished file."""

    content: bytes
    mime: str
    width: int
    height: int


@dataclass(slots=True)
class Outcome:
    """What became of one row.

    `step` is the number of denoising steps done so far, of the whole job. `handles` holds
    only what this task wrote anew; parts not named stay as they are. `error_code` set means
    that this row failed and its batch neighbours did not.
    """

    job: str
    step: int = 0
    handles: dict[str, Handle] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    error_code: str = ""
    error: str = ""
    seconds: float = 0.0
    done: bool = True  # False: handed back untouched, to be dispatched again
    step_s: float = 0.0  # median time of one step in this chunk; 0 where there was none
    rows: int = 0  # of the largest forward pass it shared; 0 where it ran alone
    # Forward passes that a step cache has left out so far, of the whole job; of an encode, 1 where
    # the embeddings were at hand.
    skipped: int = 0
    trace: str = ""  # with an error: the end of its traceback, for the operator


class Control(Protocol):
    """What a running stage may ask and tell, cheap enough for every step."""

    def should_stop(self) -> bool:
        """True once the coordinator wants the chunk to end at the next step boundary."""
        ...

    def progress(self, job: str, step: int) -> None:
        """Say that `job` has completed `step` denoising steps; never blocks."""
        ...

    def has_left(self, job: str) -> bool:
        """True once `job` has ended, though the task goes on with those beside it."""
        ...


@runtime_checkable
class Showing(Control, Protocol):
    """A Control that also takes previews: small pictures of what a job has come to."""

    def wants_preview(self, job: str) -> bool:
        """False while the job's last one is fresh, so that none need be made."""
        ...

    def preview(self, job: str, step: int, encode: Callable[[], bytes]) -> None:
        """Take one of `job` after `step` steps; `encode` makes the file, on another thread. Never
        blocks."""
        ...


class Stage(Protocol):
    """One of encode, denoise, decode."""

    kind: str

    def manifest(self) -> dict[str, Any]:
        """This stage's part of the model's manifest, JSON-serialisable (docs/protocol.md)."""
        ...

    def stage_in(self, task: Task) -> Any:
        """Read the state `task` needs; called on a background thread, may raise.

        What it returns is handed to `run`; it is dropped when the task was voided.
        """
        ...

    def run(self, task: Task, staged: Any, control: Control) -> list[Outcome]:
        """Execute `task`; one Outcome a row, in order.

        State is written through to fresh handles before returning. An exception fails every
        row; a row that fails alone says so in its Outcome.
        """
        ...

    def free(self, handles: list[Handle]) -> None:
        """Give back memory; only ever called when the coordinator or a script said so."""
        ...

    def counts(self) -> dict[str, int]:
        """What it has done so far, for the worker's record (resumes from the device, …)."""
        ...

    def close(self) -> None:
        """Release devices, mappings and caches."""
        ...
