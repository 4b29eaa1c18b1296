"""What a report teaches the cost model: what its passes took. Pure.

A pass is told once, however many jobs shared it, and by the rows that it had: what a lone job
takes and what several take together are different shapes, so that neither spoils the other. Of
denoising a row says how long a step took and how many rows were in it. Of an encode or a decode a
row's `seconds` are what was done for it alone and its share of what was done together: those of
all jobs of one key, added up, are what a pass of so many takes. An encode whose embeddings were at
hand says nothing of what an encode takes: it is no member of a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from common.messages import Report, ReportRow
from common.stage import DENOISE, ENCODE
from services.coordinator.sharing import rows_of
from services.coordinator.state import Job
from services.costs.model import CostModel, Shape
from services.policies.batches import rows_of_largest

Ran = tuple[Job, ReportRow]


def learn(
    costs: CostModel, report: Report, accepted: Sequence[bool], jobs: Mapping[str, Job]
) -> None:
    """`accepted` says of each row whether it counted; one that did not, or failed, tells nothing
    of itself, and as a part of an encode or decode nothing of those beside it either."""
    good: list[Ran] = []
    whole = True
    for row, counts in zip(report.rows, accepted, strict=False):
        job = jobs.get(row.job)
        if job is None or not counts or job.seq != report.seq or job.ending or row.error_code:
            whole = False
        else:
            good.append((job, row))
    if report.stage == DENOISE:
        _steps(costs, good)
    else:
        _tasks(costs, report.stage, good, whole)


def is_hit(stage: str, row: ReportRow) -> bool:
    """Whether the row's worker had its embeddings at hand and encoded nothing."""
    return stage == ENCODE and row.skipped > 0


def _steps(costs: CostModel, ran: Sequence[Ran]) -> None:
    passes: dict[tuple[str, int], list[Ran]] = {}
    for job, row in ran:
        if row.rows:
            passes.setdefault((job.spec.model, row.rows), []).append((job, row))
        else:
            costs.observe(job.spec.model, DENOISE, job.shape, _step_s(row))
    for (model, rows), members in passes.items():
        _shared_steps(costs, model, rows, members)


def _shared_steps(costs: CostModel, model: str, rows: int, members: Sequence[Ran]) -> None:
    """Of members that were each in passes of so many rows: in one of mixed sizes if they have so
    many all together, else each size by itself."""
    sizes = [(rows_of(job.shape), job.shape.tokens) for job, _ in members]
    if len({tokens for _, tokens in sizes}) > 1 and sum(own for own, _ in sizes) == rows:
        shape = Shape(max(tokens for _, tokens in sizes), rows_of_largest(sizes), 1)
        costs.observe_mixed(model, shape, median(_step_s(row) for _, row in members))
        return
    by_size: dict[int, list[float]] = {}
    for job, row in members:
        by_size.setdefault(job.shape.tokens, []).append(_step_s(row))
    for tokens, seconds in by_size.items():
        costs.observe(model, DENOISE, Shape(tokens, rows, 1), median(seconds))


def _tasks(costs: CostModel, stage: str, ran: Sequence[Ran], whole: bool) -> None:
    for members in _by_key(stage, [each for each in ran if not is_hit(stage, each[1])]):
        job, row = members[0]
        if len(members) == 1 and (whole or not job.keys[stage]):
            costs.observe(job.spec.model, stage, job.shapes[stage], row.seconds)
        elif whole and len(members) > 1:
            rows = sum(rows_of(each.shapes[stage]) for each, _ in members)
            seconds = sum(each.seconds for _, each in members)
            shape = Shape(0 if stage == ENCODE else job.shape.tokens, rows, 1)
            costs.observe(job.spec.model, stage, shape, seconds)


def _by_key(stage: str, ran: Iterable[Ran]) -> list[list[Ran]]:
    """Those that the stage does together, whatever the task was meant for."""
    alone: list[list[Ran]] = []
    together: dict[str, list[Ran]] = {}
    for job, row in ran:
        if job.keys[stage]:
            together.setdefault(job.keys[stage], []).append((job, row))
        else:
            alone.append([(job, row)])
    return [*alone, *together.values()]


def _step_s(row: ReportRow) -> float:
    return row.step_s or row.seconds
