"""From an effect to the script call that carries it out, and from Redis' reply to an event."""

from __future__ import annotations

from typing import Any

from redis.exceptions import OutOfMemoryError, ResponseError

from common.job import ErrorCode, JobSpec, JobStatus, OutputFile, Result
from common.keys import Keys
from common.messages import pack
from common.scripts import Call, Transitions, ms, text
from services.coordinator import events as ev
from services.coordinator.leader import Fenced

# Ends that are nobody's wish and no fault of the request: somebody should look into them.
DEAD_LETTERS = frozenset(
    {
        ErrorCode.WORKER_LOST,
        ErrorCode.STAGE_ERROR,
        ErrorCode.STATE_LOST,
        ErrorCode.OUT_OF_MEMORY,
        ErrorCode.STORAGE_FULL,
    }
)


class OutOfStep(RuntimeError):
    """The records say otherwise than the core believed: rebuild it from them."""


def call_of(effect: ev.Effect, t: Transitions, now: float) -> Call:
    """The one script that carries out `effect`."""
    match effect:
        case ev.Submit(spec=spec, candidate=candidate):
            public = {
                "prompt": str(spec.params.get("prompt", ""))[:200],
                "width": spec.params.get("width") or 0,
                "height": spec.params.get("height") or 0,
                "seed": spec.params.get("seed") or 0,
                "priority": spec.priority,
                "admission": "best_effort" if effect.best_effort else "accepted",
                "eta": ms(effect.eta_s),
                "eta_margin": ms(effect.eta_margin_s),
                "batch_key": effect.batch,
                "as_of": ms(now),
            }
            return t.submit(spec, candidate.steps, now, public)
        case ev.Refuse():
            results = [(job, _refusal(effect, job).to_wire()) for job in effect.ids]
            return t.refuse(
                effect.entry, results, effect.content, effect.error_code, effect.error, now
            )
        case ev.NoteCancel(entry=entry, job=job):
            return t.cancel(entry, job)
        case ev.Dispatch():
            return t.dispatch(
                effect.seq, effect.stage, effect.model, effect.members, effect.rows,
                effect.expected_s, now, effect.slacks_s,
            )  # fmt: skip
        case ev.Yield(seq=seq, members=members):
            return t.yield_(seq, members)
        case ev.Void(seq=seq, members=members, jobs=jobs, forced=forced, blame=blame):
            force = "0" if not forced else "2" if blame else "1"
            return t.void(seq, members, jobs, force, now)
        case ev.Finish():
            staged = [(int(o["seq"]), int(o["n"])) for o in effect.outputs]
            return t.finish(
                effect.spec.id, str(effect.status), result_of(effect, t.keys, now).to_wire(),
                staged, now, effect.error_code, effect.error, outbox=_outbox(effect),
                free_by=effect.free_by, dead=effect.error_code in DEAD_LETTERS,
                late=effect.status is JobStatus.EXPIRED
                or effect.error_code == ErrorCode.RUN_TIMEOUT,
            )  # fmt: skip
        case ev.Shorten(spec=spec, steps=steps):
            return t.shorten(spec, steps, now)
        case ev.Rewind(job=job, free_by=free_by):
            return t.rewind(job, now, free_by)
        case ev.Refresh(standings=standings):
            rows = [
                (
                    s.job,
                    "" if s.queue_position is None else str(s.queue_position),
                    f"{s.slack_s:.3f}",
                    str(round(s.eta_s * 1000)),
                )
                for s in standings
            ]
            return t.refresh(rows, now)
        case ev.Mark(worker=worker, hung=hung):
            return t.mark(worker, hung)
        case ev.Forget(worker=worker):
            return t.leave(worker, tell=False)


def result_of(effect: ev.Finish, keys: Keys, now: float) -> Result:
    spec = effect.spec
    outputs = tuple(
        OutputFile(
            key=keys.output(spec.id, i),
            mime=o["mime"],
            width=o["width"],
            height=o["height"],
            bytes=o["bytes"],
            sha256=o["sha256"],
        )
        for i, o in enumerate(effect.outputs)
    )
    params = {
        **spec.params,
        "model": spec.model,
        "priority": spec.priority,
        "deadline_ms": round(1000 * (spec.deadline_s or 0.0)),
        "on_late": spec.on_late,
        **({"min_inference_steps": spec.min_steps} if spec.min_steps else {}),
        **_timeouts(spec),
        **({"callback_url": spec.callback_url} if spec.callback_url else {}),
        **({"upload_url": spec.upload_url} if spec.upload_url else {}),
        "exact": spec.exact,
        "user": spec.user,
    }
    made_it = effect.status is JobStatus.SUCCEEDED and now <= (spec.deadline_s or now)
    return Result(
        id=spec.id,
        status=effect.status,
        outputs=outputs,
        params=params,
        seed=spec.params.get("seed"),
        timings=dict(effect.timings),
        on_time=None if effect.status is JobStatus.CANCELED else made_it,
        notes=spec.notes,
        error_code=effect.error_code,
        error=effect.error,
    )


def _timeouts(spec: JobSpec) -> dict[str, float]:
    """Those that were given, as they were."""
    given = {"queue_timeout_ms": spec.queue_timeout_s, "run_timeout_ms": spec.run_timeout_s}
    return {name: 1000 * limit_s for name, limit_s in given.items() if limit_s is not None}


def _outbox(effect: ev.Finish) -> bytes:
    """Who wants to be told of this end, for those who tell (docs/protocol.md); b"" for nobody."""
    spec, succeeded = effect.spec, effect.status is JobStatus.SUCCEEDED
    wanted = {"callback_url": spec.callback_url, "upload_url": spec.upload_url if succeeded else ""}
    given = {name: url for name, url in wanted.items() if url}
    return pack({"type": f"job.{effect.status}", **given}) if given else b""


def _refusal(effect: ev.Refuse, job: str) -> Result:
    return Result(
        id=job,
        status=JobStatus.FAILED,
        error_code=effect.error_code,
        error=effect.error,
        field=effect.field,
        retry_after_s=effect.retry_after_s,
    )


def check_fence(reply: Any) -> None:
    """Raises Fenced if a script found another leader's nonce, or the error that it ended with."""
    if isinstance(reply, ResponseError):
        raise reply
    if text(reply[0]) == "fenced":
        raise Fenced("a script found another leader's nonce")


def answer_of(effect: ev.Effect, reply: Any) -> ev.Event | None:
    """What the core hears of it. Raises Fenced, OutOfStep, or the ResponseError as it is."""
    full = isinstance(reply, OutOfMemoryError) or (
        isinstance(reply, ResponseError) and "OOM" in str(reply)
    )
    if full and isinstance(effect, ev.Submit):
        return ev.SubmitFailed(effect.spec, "it is at maxmemory")
    check_fence(reply)
    verdict = text(reply[0])
    match effect:
        case ev.Submit(spec=spec):
            return ev.Submitted(spec, verdict)
        case ev.NoteCancel(job=job):
            return ev.CancelNoted(job, verdict)
        case ev.Dispatch(seq=seq):
            detail = tuple(text(part) for part in reply[1:])
            if verdict == "row" and detail[1] in ("busy", "stage", "step"):
                raise OutOfStep(f"job {detail[0]}: {detail[1]} differs from its record")
            return ev.Dispatched(seq, verdict, detail)
        case ev.Void(seq=seq):
            return ev.Voided(seq, verdict, blamed=reply[1:] == [b"1"])
        case ev.Finish(spec=spec):
            return ev.Finished(spec.id, verdict)
        case ev.Rewind(job=job):
            return ev.Rewound(job, verdict)
        case _:
            return None
