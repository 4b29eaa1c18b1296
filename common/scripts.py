"""The atomic transitions of `common/lua`, as typed calls, and the one place that runs them.

A call is built without I/O (`Transitions.dispatch(...)`) and run alone or many in one round
trip (`Scripts.run`). Every script is safe to repeat: a second run gets the first one's answer
or changes nothing, so a lost reply is answered by sending the same call again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from redis.exceptions import NoScriptError, ResponseError

from common.job import JobSpec
from common.keys import Keys
from common.messages import TaskRow, pack_task
from common.outage import cannot_now, connect_anew

LUA = Path(__file__).parent / "lua"
SOURCES = {path.stem: path.read_text() for path in sorted(LUA.glob("*.lua"))}
SHA = {name: hashlib.sha1(source.encode()).hexdigest() for name, source in SOURCES.items()}


@dataclass(frozen=True, slots=True)
class Call:
    """One script with its keys and arguments."""

    script: str
    keys: tuple[str, ...]
    args: tuple[Any, ...]


class RedisLike(Protocol):
    """The part of redis.Redis that scripts need; tests put a faulty one in its place."""

    def execute_command(self, *args: Any, **options: Any) -> Any: ...
    def pipeline(self, transaction: bool = ..., shard_hint: Any = ...) -> Any: ...


class Scripts:
    """Runs calls by EVALSHA; loads the sources again when Redis has forgotten them."""

    def __init__(self, redis: RedisLike) -> None:
        self._redis = redis

    def load(self) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for source in SOURCES.values():
            pipe.execute_command("SCRIPT LOAD", source)
        pipe.execute()

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """Run `calls` in order, in one round trip.

        Returns their replies; a ResponseError stands in its call's place (the others
        were still run). Connection errors are raised, and so is what a node says that is not
        or no longer the one to ask (a failover) or takes no writes for now (`cannot_now`): the
        caller repeats the whole.
        """
        if not calls:
            return []
        replies = self._send(calls)
        missing = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if missing:  # restarted or flushed: all of them failed, none ran
            self.load()
            again = self._send([calls[i] for i in missing])
            for i, reply in zip(missing, again, strict=True):
                replies[i] = reply
        return replies

    def one(self, call: Call) -> list[Any]:
        """Run one call and return its reply; raises ResponseError."""
        reply = self.run([call])[0]
        if isinstance(reply, ResponseError):
            raise reply
        return list(reply)

    def _send(self, calls: Sequence[Call]) -> list[Any]:
        pipe = self._redis.pipeline(transaction=False)
        for call in calls:
            pipe.execute_command(
                "EVALSHA", SHA[call.script], len(call.keys), *call.keys, *call.args
            )
        replies: list[Any] = pipe.execute(raise_on_error=False)
        for reply in replies:
            if cannot_now(reply):
                connect_anew(pipe.connection_pool)
                raise reply
        return replies


def text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def ms(seconds: float) -> str:
    return str(round(seconds * 1000))


@dataclass(frozen=True, slots=True)
class Ttls:
    """How long ended things stay, in seconds. The record stays longest, so that “expired” can be
    told from “unknown”."""

    result_s: float = 24 * 3600
    output_s: float = 24 * 3600
    job_s: float = 48 * 3600
    flight_s: float = 7 * 24 * 3600  # the record of a dispatch: longer than any task could take
    task_s: float = 600  # the record of a done dispatch: for repeats of a lost reply
    staged_s: float = 3600
    early_cancel_s: float = 3600
    timeline_entries: int = 20_000  # it stays as long as the records of its jobs
    dead_letters: int = 1000


@dataclass(frozen=True, slots=True)
class Transitions:
    """Builds calls. `nonce` is the leader's; workers leave it empty."""

    keys: Keys
    ttls: Ttls
    nonce: str = ""

    # -- the leader's --------------------------------------------------------------------

    def submit(self, spec: JobSpec, steps: int, now: float, public: dict[str, Any]) -> Call:
        k, job = self.keys, spec.id
        fields = {
            "status": "queued", "is_terminal": "0", "stage": "encode", "step": "0",
            "steps": str(steps), "progress": "0.000", "attempts": "0",
            "created": ms(spec.arrival_s), "deadline": ms(spec.deadline_s or 0.0),
            "model": spec.model, "entry": spec.entry, "error_code": "", "error": "", **public,
        }  # fmt: skip
        trajectory = {
            "spec": spec.to_wire(), "stage": "encode", "step": "0", "seq": "0",
            "handles": b"", "outputs": b"", "attempts": "0",
        }  # fmt: skip
        return Call(
            "submit",
            (k.leader, k.jobs, k.job(job), k.trajectory(job), k.events(job), k.active,
             k.canceled(job), k.result(job)),
            (self.nonce, spec.entry, job, spec.content, ms(now), str(len(fields)),
             *_flat(fields), *_flat(trajectory)),
        )  # fmt: skip

    def refuse(
        self, entry: str, results: Sequence[tuple[str, bytes]], content: str, code: str,
        error: str, now: float,
    ) -> Call:  # fmt: skip
        k = self.keys
        keys = [k.leader, k.jobs]
        args: list[Any] = [
            self.nonce, entry, ms(now), ms(self.ttls.job_s), ms(self.ttls.result_s), content,
            code, error,
        ]  # fmt: skip
        for job, result in results:
            keys += [k.job(job), k.result(job), k.events(job)]
            args += [job, result]
        return Call("refuse", tuple(keys), tuple(args))

    def dispatch(
        self, seq: int, stage: str, model: str, members: Sequence[str], rows: Sequence[TaskRow],
        expected_s: float, now: float, slacks_s: Sequence[float] = (),
    ) -> Call:  # fmt: skip
        """`slacks_s`: each row's slack as it is handed out, for the timeline."""
        k = self.keys
        message = pack_task(seq, stage, model, tuple(members), list(rows))
        return Call(
            "dispatch",
            (k.leader, k.seq, k.task(seq), *(k.tasks(m) for m in members),
             *(k.worker(m) for m in members), *(k.trajectory(r.job) for r in rows)),
            (self.nonce, str(seq), ms(now), str(len(members)), str(len(rows)), message, stage,
             ms(expected_s), " ".join(members),
             *(value for r in rows for value in (r.job, str(r.start))), model,
             plan_of(rows, slacks_s), ms(self.ttls.flight_s)),
        )  # fmt: skip

    def yield_(self, seq: int, members: Sequence[str]) -> Call:
        k = self.keys
        return Call(
            "yield", (k.leader, k.task(seq), *(k.tasks(m) for m in members)), (self.nonce, str(seq))
        )

    def void(
        self, seq: int, members: Sequence[str], jobs: Sequence[str], force: str, now: float
    ) -> Call:
        """`force`: "0" only while queued, "1" also running, "2" and count an attempt."""
        k = self.keys
        return Call(
            "void",
            (k.leader, k.task(seq), *(k.tasks(m) for m in members), *self._rows(jobs)),
            (self.nonce, str(seq), force, ms(self.ttls.task_s),
             str(len(members)), ms(now)),
        )  # fmt: skip

    def cancel(self, entry: str, job: str) -> Call:
        k = self.keys
        return Call(
            "cancel",
            (k.leader, k.cancel, k.job(job), k.trajectory(job), k.canceled(job)),
            (self.nonce, entry, ms(self.ttls.early_cancel_s)),
        )

    def finish(
        self, job: str, status: str, result: bytes, staged: Sequence[tuple[int, int]], now: float,
        code: str = "", error: str = "", outbox: bytes = b"", free_by: Sequence[str] = (),
        dead: bool = False, late: bool = False,
    ) -> Call:  # fmt: skip
        """`staged` names the files by (seq, n) in the order they become outputs 0, 1, …; the
        first live worker of `free_by` is told to free the job's state. `dead`: it leaves a dead
        letter. `late`: it ends for being late, which a job that is done meanwhile does not."""
        k, t = self.keys, self.ttls
        moves = [
            key
            for i, (seq, n) in enumerate(staged)
            for key in (k.staged(job, seq, n), k.output(job, i))
        ]
        return Call(
            "finish",
            (k.leader, k.active, k.outbox, k.trajectory(job), k.job(job), k.result(job),
             k.events(job), k.dead, k.celery, *moves,
             *(key for w in free_by for key in (k.worker(w), k.tasks(w)))),
            (self.nonce, job, status, result, ms(now), ms(t.job_s), ms(t.output_s),
             ms(t.result_s), code, error, outbox, str(len(staged)),
             str(t.dead_letters) if dead else "0", "1" if late else "0"),
        )  # fmt: skip

    def rewind(self, job: str, now: float, free_by: Sequence[str] = ()) -> Call:
        k = self.keys
        freers = [key for name in free_by for key in (k.worker(name), k.tasks(name))]
        keys = (k.leader, k.trajectory(job), k.job(job), k.events(job), *freers)
        return Call("rewind", keys, (self.nonce, ms(now)))

    def shorten(self, spec: JobSpec, steps: int, now: float) -> Call:
        k, job = self.keys, spec.id
        keys = (k.leader, k.trajectory(job), k.job(job), k.events(job))
        return Call("shorten", keys, (self.nonce, spec.to_wire(), str(steps), ms(now)))

    def refresh(self, standings: Sequence[tuple[str, str, str, str]], now: float) -> Call:
        """`standings`: (job, queue position or "", slack in s, eta in ms)."""
        flat = [value for standing in standings for value in standing[1:]]
        return Call(
            "refresh",
            (self.keys.leader, *(self.keys.job(s[0]) for s in standings)),
            (self.nonce, ms(now), *flat),
        )

    def mark(self, worker: str, hung: str) -> Call:
        """`hung`: the seq of the task a worker hangs on, or "deaf"; "" for none."""
        return Call("mark", (self.keys.leader, self.keys.worker(worker)), (self.nonce, hung))

    def ack(self, reports: Sequence[str]) -> Call:
        k = self.keys
        return Call("ack", (k.leader, k.reports), (self.nonce, *reports))

    def lead(self, lease_s: float) -> Call:
        return Call("lead", (self.keys.leader,), (self.nonce, ms(lease_s)))

    def drain(self, worker: str) -> Call:
        """Anybody may ask; no nonce."""
        return Call("drain", (self.keys.worker(worker), self.keys.tasks(worker)), ())

    # -- the janitor's: safe at any moment, so no nonce ----------------------------------

    def sweep(self, key: str, job: str, act: bool) -> Call:
        return Call("sweep", (key, self.keys.trajectory(job)), (str(int(act)),))

    def lapse(
        self, key: str, ttl_s: float, act: bool, jobs: Sequence[str] = (),
        workers: Sequence[str] = (),
    ) -> Call:  # fmt: skip
        """`jobs` and `workers` need the key while they are there."""
        needed_by = [*map(self.keys.trajectory, jobs), *map(self.keys.worker, workers)]
        return Call("lapse", (key, *needed_by), (ms(ttl_s), str(int(act))))

    def bury(self, job: str, result: bytes, code: str, error: str, now: float, act: bool) -> Call:
        k, t = self.keys, self.ttls
        return Call(
            "bury",
            (k.active, k.trajectory(job), k.job(job), k.result(job), k.events(job)),
            (job, str(int(act)), result, ms(now), ms(t.job_s), ms(t.result_s), code, error),
        )

    # -- the workers' --------------------------------------------------------------------

    def upload(self, job: str, seq: int, n: int, content: bytes) -> Call:
        return Call("upload", (self.keys.staged(job, seq, n),), (content, ms(self.ttls.staged_s)))

    def register(
        self, worker: str, lease_s: float, manifest_field: str, manifest: str,
        fields: dict[str, Any],
    ) -> Call:  # fmt: skip
        k = self.keys
        return Call(
            "register",
            (k.worker(worker), k.workers, k.manifests, k.reports, k.tasks(worker)),
            (worker, ms(lease_s), manifest_field, manifest, *_flat(fields)),
        )

    def trace(self, job: str, seq: int, trace: str) -> Call:
        """`trace`: why the job's task `seq` failed, for a dead letter."""
        return Call("trace", (self.keys.trajectory(job),), (str(seq), trace))

    def preview(self, job: str, step: int, content: bytes, stay_s: float) -> Call:
        """`content`: a small picture of a job that has not ended."""
        k = self.keys
        return Call(
            "preview", (k.trajectory(job), k.preview(job)), (str(step), content, ms(stay_s))
        )

    def leave(self, worker: str, tell: bool, why: str = "") -> Call:
        """`why`: what made a worker take itself out."""
        k = self.keys
        return Call(
            "leave",
            (k.worker(worker), k.workers, k.tasks(worker), k.reports),
            (worker, "1" if tell else "0", why),
        )

    def start(
        self, seq: int, worker: str, entry: str, stage: str, jobs: Sequence[str], now: float
    ) -> Call:
        k = self.keys
        return Call(
            "start",
            (k.task(seq), k.tasks(worker), *self._rows(jobs)),
            (str(seq), worker, entry, ms(now), stage),
        )

    def progress(self, seq: int, rows: Sequence[tuple[str, int, int]], now: float) -> Call:
        """`rows`: (job, step, steps)."""
        keys = (self.keys.task(seq), *self._rows([r[0] for r in rows]))
        return Call("progress", keys, (str(seq), ms(now), *(str(v) for r in rows for v in r[1:])))

    def report(
        self, seq: int, worker: str, lead: bool, body: bytes,
        rows: Sequence[tuple[str, int, int, str, bytes, bytes, float, str, str]], now: float,
    ) -> Call:  # fmt: skip
        """`rows`: (job, step, steps, next stage, handles, outputs, seconds, error code, error);
        `steps` 0 hands the row back as it was."""
        k = self.keys
        flat: list[Any] = []
        for row in rows:
            flat += [row[1], row[2], row[3], row[4], row[5], f"{row[6]:.6f}", row[7], row[8]]
        return Call(
            "report",
            (k.task(seq), k.reports, k.timeline, *self._rows([r[0] for r in rows])),
            (str(seq), worker, ms(now), ms(self.ttls.task_s), body, "1" if lead else "0",
             str(self.ttls.timeline_entries), ms(self.ttls.job_s), *flat),
        )  # fmt: skip

    def _rows(self, jobs: Sequence[str]) -> tuple[str, ...]:
        k = self.keys
        return tuple(key for j in jobs for key in (k.trajectory(j), k.job(j), k.events(j)))


def plan_of(rows: Sequence[TaskRow], slacks_s: Sequence[float]) -> str:
    """What a task is to do, for the timeline: start, stop and slack (s, "-" if not known) a row."""
    slacks = [f"{slack:.3f}" for slack in slacks_s] or ["-"] * len(rows)
    return " ".join(f"{r.start} {r.stop} {s}" for r, s in zip(rows, slacks, strict=True))


def _flat(fields: dict[str, Any]) -> list[Any]:
    return [item for pair in fields.items() for item in pair]
