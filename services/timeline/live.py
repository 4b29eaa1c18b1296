"""A live pool's run: its timeline joined with the records of the jobs in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.asks import Ask
from common.job import JobSpec, Result
from common.record import JobRecord
from common.stage import DECODE, DENOISE, ENCODE
from services.costs.model import CostModel, Shape, shape_of
from services.costs.table import parse_profile
from services.simulator.outcome import JobOutcome
from services.simulator.traces import TraceJob
from services.timeline import stream
from services.timeline.runs import Bar, Run

if TYPE_CHECKING:
    from common.client import Client

PAGE = 200


@dataclass(frozen=True)
class Known:
    """What Redis knows of a job. `params` are the effective ones, empty if they have expired."""

    record: JobRecord
    params: Mapping[str, Any]
    on_late: str = "run"
    min_steps: int = 0
    user: str = ""
    timings: Mapping[str, float] | None = None  # of an ended job
    on_time: bool | None = None


class Pool:
    """What a pool says of itself: its policy, its manifests, and what tasks cost by these, by its
    profiles and by what its coordinator has learned."""

    def __init__(self, client: Client) -> None:
        self.manifests = client.models()
        k = client.keys
        learned, profiles, policy = client.ask(
            Ask((("HGETALL", k.costs), ("HGETALL", k.profile), ("HGET", k.policy, "current")))
        )
        self.policy = policy.decode() if policy else ""
        self._costs = CostModel()
        for model, manifest in self.manifests.items():
            self._costs.set_prior(model, manifest.get("costs", {}))
        for model, content in _pairs(profiles):
            with contextlib.suppress(ValueError):  # the coordinator says so
                self._costs.set_table(model, parse_profile(content).fits)
        self._costs.load({name: value.decode() for name, value in _pairs(learned)})

    def shape(self, known: Known) -> Shape:
        record = known.record
        params = {"width": record.width, "height": record.height, **known.params}
        return shape_of(params, self.manifests.get(record.model, {}))

    def standalone_s(self, known: Known) -> float:
        """What the job would take alone: encode, all its steps, decode."""
        model, shape = known.record.model, self.shape(known)
        encode, step, decode = (
            self._costs.estimate(model, stage, shape) for stage in (ENCODE, DENOISE, DECODE)
        )
        return encode + known.record.steps * step + decode


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[str, bytes]]:
    return ((name.decode(), value) for name, value in zip(flat[::2], flat[1::2], strict=True))


def look_up(client: Client, ids: Sequence[str]) -> list[Known]:
    """The accepted ones of `ids` whose records have not expired."""
    found = []
    k = client.keys
    for at in range(0, len(ids), PAGE):
        page = ids[at : at + PAGE]
        commands: list[tuple[str, ...]] = []
        for job in page:
            commands += [
                ("HGETALL", k.job(job)),
                ("GET", k.result(job)),
                ("HGET", k.trajectory(job), "spec"),
            ]
        replies = client.ask(Ask(tuple(commands)))
        for job, *three in zip(page, replies[::3], replies[1::3], replies[2::3], strict=True):
            known = _known(job, *three)
            if known is not None:
                found.append(known)
    return found


def _known(job: str, flat: list[bytes], result: bytes | None, spec: bytes | None) -> Known | None:
    record = JobRecord.of(job, dict(zip(flat[::2], flat[1::2], strict=True)))
    if not record.stage:  # refused, or gone
        return None
    if result is not None:
        ended = Result.from_wire(result)
        params = ended.params
        return Known(
            record, params, params.get("on_late", "run"), params.get("min_inference_steps", 0),
            params.get("user", ""), ended.timings, ended.on_time,
        )  # fmt: skip
    if spec is not None:
        asked = JobSpec.from_wire(spec)
        return Known(record, asked.params, asked.on_late, asked.min_steps, asked.user)
    return Known(record, {})


def trace_job(known: Known, pool: Pool, zero_s: float = 0.0) -> TraceJob:
    """A job as a trace has it, on a clock that begins at `zero_s`. Its class is its size."""
    record, shape = known.record, pool.shape(known)
    arrival_s = record.created_s or 0.0
    # A record that has lost its parameters has lost the floor, too.
    on_late = "run" if known.on_late == "degrade" and not known.min_steps else known.on_late
    return TraceJob(
        id=record.id,
        request_class=f"{record.width}x{record.height}",
        arrival_s=arrival_s - zero_s,
        deadline_s=(record.deadline_s or arrival_s) - zero_s,
        standalone_s=pool.standalone_s(known),
        tokens=shape.tokens,
        steps=record.steps,
        width=record.width,
        height=record.height,
        num_frames=int(known.params.get("num_frames") or 1),
        priority=record.priority,
        on_late=on_late,
        min_steps=known.min_steps,
        n=shape.n,
        forwards=shape.forwards,
    )


def read_run(client: Client, last_s: float) -> tuple[Run, str]:
    """What the pool did in the last seconds, and the stream's last entry."""
    now = stream.redis_now(client)
    bars, last = stream.read(client, now - last_s)
    return run_of(client, bars, now - last_s, now), last


def run_of(
    client: Client,
    bars: Iterable[Bar],
    begin_s: float,
    end_s: float,
    pool: Pool | None = None,
) -> Run:
    """Bars and the jobs in them."""
    found = sorted(bars, key=lambda bar: (bar.start_s, bar.seq))
    ids = dict.fromkeys(row.job for bar in found for row in bar.rows)
    pool = pool or Pool(client)
    jobs = [_outcome(known, pool) for known in look_up(client, list(ids))]
    by_id = {job.job.id: job for job in sorted(jobs, key=lambda job: job.job.arrival_s)}
    _count(found, by_id)
    name = f"{pool.policy}, live" if pool.policy else "live"
    return Run(name, tuple(found), by_id, begin_s, end_s)


def _outcome(known: Known, pool: Pool) -> JobOutcome:
    record = known.record
    return JobOutcome(
        job=trace_job(known, pool),
        status=record.status,
        started_s=record.started_s,
        finished_s=record.finished_s,
    )


def _count(bars: Sequence[Bar], jobs: Mapping[str, JobOutcome]) -> None:
    """Add up what each job got in these bars."""
    before: dict[str, str] = {}  # rank -> the job it ran last
    for bar in bars:
        for row in bar.rows:
            job = jobs.get(row.job)
            if job is None or row.end == "returned":
                continue
            job.chunks += 1
            job.work_s += (bar.end_s - bar.start_s) / len(bar.rows)
            if row.end == "done":
                job.steps_run += row.stop - row.start
            if bar.stage == DENOISE and before.get(bar.rank) != row.job:
                job.switches += 1
            before[bar.rank] = row.job
