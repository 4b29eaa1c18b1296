"""What the core remembers of jobs and of tasks in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from common.job import ErrorCode, JobSpec
from common.messages import ReportRow, TaskRow, pack
from common.stage import DECODE, DENOISE, ENCODE
from services.coordinator.sharing import keys_of, rows_of, shapes_of
from services.costs.model import CostModel, Quote, Shape, shape_of
from services.policies.base import Candidate

FINISH = "finish"  # the stage after decode: nothing left to run
# A job whose task failed or whose worker died this often ends as failed.
MAX_ATTEMPTS = 3
# Errors that another try cannot mend.
FINAL_ERRORS = frozenset(
    {ErrorCode.INVALID_REQUEST, ErrorCode.NON_FINITE, ErrorCode.NOT_CAPTURABLE}
)


LAST_PLACE = 1_000_000_000


def died(times: int) -> str:
    return f"the worker died {times} times while it ran this job, or hung"


def position(stage: str, step: int) -> int:
    """How far on a task begins, as the start script counts it."""
    return 0 if stage == ENCODE else 1 + step if stage == DENOISE else LAST_PLACE


@dataclass(slots=True)
class Job:
    """One active job. Times in seconds since the epoch by Redis' clock."""

    spec: JobSpec
    shapes: Mapping[str, Shape]  # by stage, of it alone
    keys: Mapping[str, str]  # by stage: jobs of one key may share passes; "": it runs alone
    steps: int
    deadline_s: float
    packed_params: bytes
    stage: str = ENCODE
    step: int = 0
    seq: int = 0  # the dispatch it waits for, 0 when it is ready
    handles: bytes = b""
    outputs: tuple[dict[str, Any], ...] = ()
    attempts: int = 0
    reached: int = -1  # the furthest position it has come to: beyond it, attempts count anew
    begun: bool = False  # a task of it has started, though none was reported
    started_s: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    chunks: int = 0
    skipped: int = 0  # forward passes that its step cache left out
    rows: int = 0  # of the largest forward pass it shared
    row_steps: int = 0  # rows of the passes of all its steps, added up
    steps_run: int = 0  # of which those are
    doomed: bool = False
    canceled: bool = False
    ending: bool = False  # a Finish is on its way

    @classmethod
    def of(cls, spec: JobSpec, manifest: Mapping[str, Any]) -> Job:
        keys = keys_of(spec, manifest)
        return cls(
            spec=spec,
            # Its branches share one forward pass, whoever else is in it.
            shapes=shapes_of(shape_of(spec.params, manifest), merges=bool(keys[DENOISE])),
            keys=keys,
            steps=int(spec.params.get("num_inference_steps") or 1),
            deadline_s=spec.deadline_s or spec.arrival_s,
            packed_params=pack(spec.params),
        )

    @property
    def shape(self) -> Shape:
        """Of its denoising steps."""
        return self.shapes[DENOISE]

    @property
    def batch(self) -> str:
        """Its batch key (common/batching.py)."""
        return self.keys[DENOISE]

    def respecify(self, spec: JobSpec) -> None:
        """The same job with other parameters."""
        self.spec = spec
        self.steps = int(spec.params.get("num_inference_steps") or 1)
        self.packed_params = pack(spec.params)

    def moved_on(self, place: int) -> None:
        """A task of it ended well, and the next begins at `place`: further on than ever, failures
        before it count no more."""
        if place > self.reached:
            self.reached, self.attempts = place, 0

    def note_rows(self, row: ReportRow) -> None:
        """How many rows there were in its passes of the chunk that `row` reports, at most; alone
        and exact, its own pictures."""
        self.rows = max(self.rows, row.rows)
        steps = row.step - self.step
        if self.stage == DENOISE and steps > 0:
            self.steps_run += steps
            self.row_steps += steps * (row.rows or self.shapes[DECODE].n)

    def row(self, stop: int, latest_s: float = inf) -> TaskRow:
        start, end = (self.step, stop) if self.stage == DENOISE else (0, 0)
        spec = self.spec
        return TaskRow(
            spec.id, start, end, spec.exact, self.packed_params, self.handles, latest_s,
            spec.traceparent,
        )  # fmt: skip

    def left(self, costs: CostModel) -> Quote:
        """What is left of it, as `remaining_s`, and how far that may be off."""
        parts = [(DECODE, 1)]
        if self.stage != DECODE:
            parts.append((DENOISE, self.steps - self.step))
        if self.stage == ENCODE:
            parts.append((ENCODE, 1))
        return self._quote(costs, parts)

    def remaining_s(self, costs: CostModel) -> float:
        """Work left by the cost model, decode included; queueing is the policy's to judge."""
        model, shapes = self.spec.model, self.shapes
        left = costs.estimate(model, DECODE, shapes[DECODE])
        if self.stage == DECODE:
            return left
        left += (self.steps - self.step) * costs.estimate(model, DENOISE, shapes[DENOISE])
        if self.stage == ENCODE:
            left += costs.estimate(model, ENCODE, shapes[ENCODE])
        return left

    def alone(self, costs: CostModel) -> Quote:
        """What the whole job takes by itself, and how far that may be off."""
        return self._quote(costs, [(ENCODE, 1), (DECODE, 1), (DENOISE, self.steps)])

    def _quote(self, costs: CostModel, parts: list[tuple[str, int]]) -> Quote:
        """Of so many tasks, or steps, of these stages."""
        quotes = [
            (costs.quote(self.spec.model, stage, self.shapes[stage]), times)
            for stage, times in parts
        ]
        return Quote(
            seconds=sum(times * quote.seconds for quote, times in quotes),
            margin_s=sum(times * quote.margin_s for quote, times in quotes),
            known=all(quote.known for quote, _ in quotes),
        )

    def candidate(self, costs: CostModel) -> Candidate:
        model, stage, shape = self.spec.model, self.stage, self.shapes[self.stage]
        return Candidate(
            job=self.spec.id,
            stage=stage,
            model=model,
            arrival_s=self.spec.arrival_s,
            deadline_s=self.deadline_s,
            priority=self.spec.priority,
            remaining_s=self.remaining_s(costs),
            task_s=0.0 if stage == DENOISE else costs.estimate(model, stage, shape),
            step_s=costs.estimate(model, DENOISE, self.shapes[DENOISE]),
            step=self.step,
            steps=self.steps,
            fewest=self.spec.min_steps if self.step == 0 else 0,
            batch=self.keys[stage],
            rows=rows_of(shape),
            tokens=shape.tokens,
            doomed=self.doomed,
            suspect=self.attempts > 0,
        )


@dataclass(slots=True)
class Flight:
    """A dispatch that has not been reported: queued or running on its members."""

    seq: int
    stage: str
    members: tuple[str, ...]
    jobs: tuple[str, ...]
    candidate: Candidate
    expected_s: float  # how long it should run
    begins_s: float = 0.0  # when it began, or should
    ends_s: float = 0.0
    stop: int = 0  # the step before which its first row's chunk ends
    goes_on: bool = False  # one of its jobs has steps left after it
    company_s: float = 0.0  # denoising left of all its jobs but the first
    step_s: float = 0.0  # of a pass that its jobs share; 0: they run one after another
    yielding: bool = False
    voiding: bool = False
    started: bool = False  # Redis said so: it cannot be taken back
    silent: set[str] = field(default_factory=set)  # members that have yet to report


def timings(job: Job, now: float) -> Mapping[str, float]:
    """What a result says of where the time went, in seconds."""
    run = sum(job.seconds.values())
    total = now - job.spec.arrival_s
    out = {f"{stage}_s": round(seconds, 6) for stage, seconds in job.seconds.items()}
    out |= {
        "run_s": round(run, 6),
        "total_s": round(total, 6),
        "wait_s": round(max(0.0, total - run), 6),
    }
    if job.started_s is not None:
        out["queued_s"] = round(max(0.0, job.started_s - job.spec.arrival_s), 6)
    out["chunks"] = job.chunks
    if job.rows:
        out["batch_rows"] = job.rows
    if job.steps_run:
        out["rows_per_step"] = round(job.row_steps / job.steps_run, 2)
    if job.skipped:
        out["forwards_skipped"] = job.skipped
    return out
