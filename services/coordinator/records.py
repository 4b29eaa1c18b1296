"""Reading the records back: what a new leader rebuilds its core from."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

from common.job import JobSpec
from common.keys import Keys
from common.messages import unpack
from common.params import merge_manifests
from common.scripts import text
from common.stage import STAGES
from services.coordinator.events import Motion, Recovered, RecoveredFlight, WorkerInfo
from services.costs.table import Profile, parse_profile

log = logging.getLogger("slackwater.coordinator")

# Records read in one round trip.
PAGE = 500


def read_manifests(redis: Any, keys: Keys) -> dict[str, dict[str, Any]]:
    """Merged manifests by model name."""
    published = {text(k): json.loads(v) for k, v in redis.hgetall(keys.manifests).items()}
    return merge_manifests(published)


def read_profiles(redis: Any, keys: Keys) -> dict[str, Profile]:
    """The cost tables measured in this pool, by model; one that cannot be read is left out."""
    profiles = {}
    for model, content in redis.hgetall(keys.profile).items():
        try:
            profiles[text(model)] = parse_profile(content)
        except ValueError as error:
            log.warning("%s, field %s: %s", keys.profile, text(model), error)
    return profiles


def read_workers(redis: Any, keys: Keys, names: Sequence[str]) -> dict[str, WorkerInfo | None]:
    """Each named worker's record; None where its lease has run out."""
    pipe = redis.pipeline(transaction=False)
    for name in names:
        pipe.hgetall(keys.worker(name))
    found: dict[str, WorkerInfo | None] = {}
    for name, record in zip(names, pipe.execute(), strict=True):
        fields = {text(k): text(v) for k, v in record.items()}
        found[name] = (
            WorkerInfo(
                name=name,
                stage=fields["stage"],
                models=tuple(fields["models"].split()),
                host=fields["host"],
                draining=fields.get("draining") == "1",
                hung=fields.get("hung", ""),
                motion=_motion(fields),
                most_units=_most_units(fields),
            )
            if "stage" in fields
            else None
        )
    return found


def _motion(fields: dict[str, str]) -> Motion:
    """A worker of another version may say nothing that can be read, and is not found to hang."""
    try:
        seq, _, still_ms = map(int, fields["motion"].split())
        return Motion(seq, still_ms / 1000, int(fields["beat"]) / 1000)
    except (KeyError, ValueError):
        return Motion()


def _most_units(fields: dict[str, str]) -> float:
    """What a worker says that its memory holds; one that says nothing, or 0, has found no limit."""
    try:
        return float(json.loads(fields["counts"])["most_units"]) or inf
    except (KeyError, TypeError, ValueError):
        return inf


def read_active(redis: Any, keys: Keys) -> Iterator[Recovered]:
    """Every active job as its records stand."""
    ids = sorted(text(job) for job in redis.smembers(keys.active))
    for at in range(0, len(ids), PAGE):
        yield from _read_page(redis, keys, ids[at : at + PAGE])


def _read_page(redis: Any, keys: Keys, ids: Sequence[str]) -> Iterator[Recovered]:
    pipe = redis.pipeline(transaction=False)
    for job in ids:
        pipe.hgetall(keys.trajectory(job))
        pipe.hget(keys.job(job), "started")
    replies = pipe.execute()
    trajectories = [{text(k): v for k, v in reply.items()} for reply in replies[::2]]
    flights = _read_flights(redis, keys, [int(t.get("seq", 0)) for t in trajectories])
    for trajectory, started in zip(trajectories, replies[1::2], strict=True):
        if "spec" not in trajectory:
            continue  # ended between the two reads
        seq = int(trajectory["seq"])
        outputs = unpack(trajectory["outputs"]) if trajectory["outputs"] else []
        yield Recovered(
            spec=JobSpec.from_wire(trajectory["spec"]),
            stage=text(trajectory["stage"]),
            step=int(trajectory["step"]),
            seq=seq,
            handles=trajectory["handles"],
            outputs=tuple(outputs),
            attempts=int(trajectory["attempts"]),
            error_code=text(trajectory.get("error_code", b"")),
            error=text(trajectory.get("error", b"")),
            started_s=int(started) / 1000 if started else None,
            seconds={s: float(trajectory[f"{s}_s"]) for s in STAGES if f"{s}_s" in trajectory},
            cancel=trajectory.get("cancel") == b"1",
            flight=flights.get(seq),
            reached=int(trajectory["reached"]) if "reached" in trajectory else None,
        )


def _read_flights(redis: Any, keys: Keys, seqs: Sequence[int]) -> dict[int, RecoveredFlight]:
    wanted = sorted({seq for seq in seqs if seq})
    pipe = redis.pipeline(transaction=False)
    for seq in wanted:
        pipe.hmget(keys.task(seq), "state", "stage", "members", "jobs", "expected")
    flights = {}
    for seq, record in zip(wanted, pipe.execute(), strict=True):
        if record[0] is None:
            continue
        state, stage, members, jobs, expected = map(text, record)
        flights[seq] = RecoveredFlight(
            seq, state, stage, tuple(members.split()), tuple(jobs.split()), int(expected) / 1000
        )
    return flights
