"""What the core remembers of jobs and of tasks in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.batching import batch_key
from common.job import ErrorCode, JobSpec
from common.messages import TaskRow, pack
from common.stage import DECODE, DENOISE, ENCODE
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
    shape: Shape
    steps: int
    deadline_s: float
    packed_params: bytes
    batch: str = ""  # jobs of one key may share forward passes; "": it runs alone
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
    doomed: bool = False
    canceled: bool = False
    ending: bool = False  # a Finish is on its way

    @classmethod
    def of(cls, spec: JobSpec, manifest: Mapping[str, Any]) -> Job:
        shape, batch = shape_of(spec.params, manifest), ""
        if manifest.get("batch"):
            batch = batch_key(spec.params, manifest, spec.exact)
        if batch:  # its branches share one forward pass, whoever else is in it
            shape = Shape(shape.tokens, shape.n * shape.forwards, 1)
        return cls(
            spec=spec,
            shape=shape,
            batch=batch,
            steps=int(spec.params.get("num_inference_steps") or 1),
            deadline_s=spec.deadline_s or spec.arrival_s,
            packed_params=pack(spec.params),
        )

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

    def row(self, stop: int) -> TaskRow:
        start, end = (self.step, stop) if self.stage == DENOISE else (0, 0)
        return TaskRow(self.spec.id, start, end, self.spec.exact, self.packed_params, self.handles)

    def remaining_s(self, costs: CostModel) -> float:
        """Work left by the cost model, decode included; queueing is the policy's to judge."""
        model, shape = self.spec.model, self.shape
        left = costs.estimate(model, DECODE, shape)
        if self.stage == DECODE:
            return left
        left += (self.steps - self.step) * costs.estimate(model, DENOISE, shape)
        if self.stage == ENCODE:
            left += costs.estimate(model, ENCODE, shape)
        return left

    def alone(self, costs: CostModel) -> Quote:
        """What the whole job takes by itself, and how far that may be off."""
        model, shape = self.spec.model, self.shape
        parts = [(costs.quote(model, stage, shape), 1) for stage in (ENCODE, DECODE)]
        parts.append((costs.quote(model, DENOISE, shape), self.steps))
        return Quote(
            seconds=sum(times * quote.seconds for quote, times in parts),
            margin_s=sum(times * quote.margin_s for quote, times in parts),
            known=all(quote.known for quote, _ in parts),
        )

    def candidate(self, costs: CostModel) -> Candidate:
        model, shape = self.spec.model, self.shape
        return Candidate(
            job=self.spec.id,
            stage=self.stage,
            model=model,
            arrival_s=self.spec.arrival_s,
            deadline_s=self.deadline_s,
            priority=self.spec.priority,
            remaining_s=self.remaining_s(costs),
            task_s=0.0 if self.stage == DENOISE else costs.estimate(model, self.stage, shape),
            step_s=costs.estimate(model, DENOISE, shape),
            step=self.step,
            steps=self.steps,
            fewest=self.spec.min_steps if self.step == 0 else 0,
            batch=self.batch,
            rows=shape.n,
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
    if job.skipped:
        out["forwards_skipped"] = job.skipped
    return out
