"""What the dashboard reads of Redis in one look, and the JSON that viewers get of it."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.asks import Ask, Plan
from common.handles import HandleError
from common.job import Result
from common.keys import Keys
from common.messages import unpack_handles
from common.record import JobRecord, WorkerRecord
from common.stage import DENOISE, STAGES
from services.gateway.links import Links
from services.timeline.runs import Bar
from services.timeline.stream import bar_of

# Active jobs that are looked at twice a second. With more in the pool these stand for all, and the
# page says so.
MOST_JOBS = 200
# Tasks in one look; what a pool ends in half a second is far below.
MOST_BARS = 500
# Previews on the page; each is up to 4 kB.
MOST_PREVIEWS = 24
FIELDS = (
    "id", "status", "is_terminal", "stage", "step", "steps", "model", "prompt", "width", "height",
    "priority", "worker", "created", "started", "finished", "deadline", "admission",
    "queue_position", "slack", "eta", "error_code", "error",
)  # fmt: skip

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sight:
    """One look. Times are seconds by Redis' clock."""

    now: float
    active: int  # jobs in the pool; `jobs` may be fewer
    leads: bool
    policy: str
    bars: list[Bar]
    last: str  # the timeline's entry to go on behind
    workers: list[Json]
    jobs: dict[str, Json]
    ended: list[Json]
    running: dict[str, Json]  # by rank: its jobs, since when
    previews: dict[str, Json]
    memory: Json


@dataclass(slots=True)
class _Looked:
    """What a job's hashes say."""

    record: JobRecord
    seq: int
    stage: str  # the one it is in or waits for
    where: dict[str, int] = field(default_factory=dict)  # bytes of its state, by where they lie


def look(
    keys: Keys, links: Links, last: str, known: Sequence[str], seen: Mapping[str, Any]
) -> Plan[Sight]:
    """`known`: jobs that were active at the last look; `seen`: those whose end is known already.

    Behind the timeline's entry `last`; with "" the latest entries there are.
    """
    after = ("XRANGE", keys.timeline, f"({last}", "+", "COUNT", MOST_BARS)
    latest = ("XREVRANGE", keys.timeline, "+", "-", "COUNT", 3 * MOST_BARS)
    clock, names, active, sample, entries, leader, policy = yield Ask((
        ("TIME",),
        ("SMEMBERS", keys.workers),
        ("SCARD", keys.active),
        ("SRANDMEMBER", keys.active, MOST_JOBS),
        after if last else latest,
        ("GET", keys.leader),
        ("HGET", keys.policy, "current"),
    ))  # fmt: skip
    bars = [bar for bar in map(_bar, entries if last else entries[::-1]) if bar is not None]
    newest = entries[-1 if last else 0][0].decode() if entries else last or "0-0"
    ran = [row.job for bar in reversed(bars) for row in bar.rows]
    ids = list(dict.fromkeys([*ran, *known, *(job.decode() for job in sample)]))
    ids = [job for job in ids if job not in seen][: 2 * MOST_JOBS]
    workers = sorted(name.decode() for name in names)
    replies = yield Ask((
        *(("HGETALL", keys.worker(name)) for name in workers),
        *(("HMGET", keys.job(job), *FIELDS) for job in ids),
        *(("HMGET", keys.trajectory(job), "seq", "handles", "stage") for job in ids),
    ))  # fmt: skip
    found, (records, states) = replies[: len(workers)], _halves(replies[len(workers) :])
    looked = [
        one
        for job, values, state in zip(ids, records, states, strict=True)
        if (one := _looked(job, values, state)) is not None
    ]
    over = [one.record for one in looked if one.record.is_terminal]
    going = [one for one in looked if not one.record.is_terminal][:MOST_JOBS]
    at_work = [one for one in going if is_running(one.record) and one.seq]
    growing = [one.record.id for one in going if one.record.step > 0][:MOST_PREVIEWS]
    replies = yield Ask((
        *(("GET", keys.result(record.id)) for record in over),
        *(("HGET", keys.task(one.seq), f"started:{one.record.worker}") for one in at_work),
        *(("HMGET", keys.preview(job), "step", "image") for job in growing),
    ))  # fmt: skip
    results, starts = replies[: len(over)], replies[len(over) : len(over) + len(at_work)]
    pictures = replies[len(over) + len(at_work) :]
    raw = {
        name: dict(zip(f[::2], f[1::2], strict=True))
        for name, f in zip(workers, found, strict=True)
        if f
    }
    return Sight(
        now=int(clock[0]) + int(clock[1]) / 1e6,
        active=active,
        leads=leader is not None,
        policy=(policy or b"").decode(),
        bars=bars,
        last=newest,
        workers=[worker_json(WorkerRecord.of(name, fields)) for name, fields in raw.items()],
        jobs={one.record.id: job_json(one) for one in going},
        ended=[
            ended_json(record, None if result is None else Result.from_wire(result), links)
            for record, result in zip(over, results, strict=True)
            if record.stage  # a push that was refused was never a job
        ],
        running=_running(at_work, starts),
        previews={
            job: {"step": int(step), "image": base64.b64encode(image).decode()}
            for job, (step, image) in zip(growing, pictures, strict=True)
            if step is not None and image is not None
        },
        memory=memory_json(raw, going),
    )


def is_running(record: JobRecord) -> bool:
    """Whether a task of it runs this moment."""
    return record.status == "running" and record.queue_position is None and bool(record.worker)


# -- the JSON ------------------------------------------------------------------------------


def job_json(one: _Looked) -> Json:
    record = one.record
    return {
        "id": record.id,
        "prompt": record.prompt,
        "model": record.model,
        "stage": one.stage,
        "step": record.step,
        "steps": record.steps,
        "width": record.width,
        "height": record.height,
        "priority": record.priority,
        "running": is_running(record),
        "begun": record.status == "running",
        "place": record.queue_position,
        "created": record.created_s,
        "deadline": record.deadline_s,
        "slack": _finite(record.slack_s),
        "eta": _finite(record.eta_s),
        "best_effort": record.admission == "best_effort",
    }


def ended_json(record: JobRecord, result: Result | None, links: Links) -> Json:
    """A job that has ended; without pictures once its result has expired."""
    outputs = () if result is None else result.outputs
    timings = {} if result is None else result.timings
    return {
        "id": record.id,
        "prompt": record.prompt,
        "model": record.model,
        "status": record.status,
        "error": record.error or record.error_code,
        "width": record.width,
        "height": record.height,
        "steps": record.steps,
        "created": record.created_s,
        "finished": record.finished_s,
        "deadline": record.deadline_s,
        "on_time": None if result is None else result.on_time,
        "wait_s": timings.get("wait_s"),
        "run_s": timings.get("run_s"),
        "pictures": [
            links.output(record.id, n)
            for n, file in enumerate(outputs)
            if file.mime.startswith("image/")
        ],
    }


def worker_json(worker: WorkerRecord) -> Json:
    return {
        "name": worker.name,
        "stage": worker.stage,
        "models": list(worker.models),
        "host": worker.host,
        "device": worker.device,
        "draining": worker.draining,
        "hung": bool(worker.hung),
    }


def bar_json(bar: Bar) -> list[Any]:
    """[rank, stage, start, end, yielded, [[job, from step, to step, slack, end], …]]"""
    rows = [[row.job, row.start, row.stop, row.slack_s, row.end] for row in bar.rows]
    return [bar.rank, bar.stage, bar.start_s, bar.end_s, bar.yielded, rows]


def memory_json(workers: Mapping[str, Mapping[bytes, bytes]], jobs: Iterable[_Looked]) -> Json:
    """Bytes of the jobs' states by where they lie; each host's arena, each denoiser's own blocks,
    as its worker last counted them; how many states went elsewhere so far."""
    states: dict[str, int] = {}
    for job in jobs:
        for where, size in job.where.items():
            states[where] = states.get(where, 0) + size
    arenas: dict[str, Json] = {}
    devices: dict[str, Json] = {}
    so_far = {"spilled": 0, "resumed_device": 0, "resumed_read": 0, "evictions": 0}
    for name, fields in workers.items():
        counts: dict[str, int] = json.loads(fields.get(b"counts", b"{}"))
        host = fields.get(b"host", b"").decode()
        if counts.get("arena_bytes"):  # one arena a host, whoever counted it
            arenas[host] = {"used": counts["arena_used_bytes"], "size": counts["arena_bytes"]}
        if fields.get(b"stage") == DENOISE.encode() and counts.get("pool_bytes"):
            devices[name] = {"used": counts.get("pool_used_bytes", 0), "size": counts["pool_bytes"]}
        so_far = {key: count + counts.get(key, 0) for key, count in so_far.items()}
    return {"states": states, "arenas": arenas, "devices": devices, "so_far": so_far}


# -- small things --------------------------------------------------------------------------


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None


def _running(at_work: Sequence[_Looked], starts: Sequence[bytes | None]) -> dict[str, Json]:
    running: dict[str, Json] = {}
    for one, start in zip(at_work, starts, strict=True):
        if start is None:  # its worker has just reported
            continue
        rank = running.setdefault(
            one.record.worker, {"since": int(start) / 1000, "stage": one.record.stage, "jobs": []}
        )
        rank["jobs"].append(one.record.id)
    return running


def _looked(
    job: str, values: Sequence[bytes | None], state: Sequence[bytes | None]
) -> _Looked | None:
    there = {n.encode(): v for n, v in zip(FIELDS, values, strict=True) if v is not None}
    record = JobRecord.of(job, there)
    if not record.status:
        return None
    where: dict[str, int] = {}
    try:
        for handle in unpack_handles(state[1] or b"").values():
            where[handle.where] = where.get(handle.where, 0) + handle.nbytes
    except HandleError:  # the worker that reads it says so
        pass
    stage = (state[2] or b"").decode()
    return _Looked(record, int(state[0] or 0), stage if stage in STAGES else record.stage, where)


def _bar(entry: tuple[bytes, Sequence[bytes]]) -> Bar | None:
    texts = [text.decode("utf-8", "replace") for text in entry[1]]
    try:
        bar = bar_of(dict(zip(texts[::2], texts[1::2], strict=True)))
    except (KeyError, ValueError):  # none of ours
        return None
    return bar if bar.stage in STAGES else None


def _halves(replies: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    middle = len(replies) // 2
    return replies[:middle], replies[middle:]
