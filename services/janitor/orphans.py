"""What among the keys of a pool may be left over, and which script is to judge it. Pure.

A look from outside can only suspect: a job may be submitted, or end, between two reads. So each
suspect comes with a script that looks again and acts in one moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.job import ErrorCode, JobStatus, Result
from common.scripts import Call, Transitions

# Verdicts of the scripts that mean that something was left over -> what it is counted as; "" for
# the suspect's own kind.
FOUND = {"swept": "", "lapsed": "", "left": "", "ended": "jobs", "dropped": "names",
         "listed": "unlisted"}  # fmt: skip
# kind -> what is said of it
KINDS = {
    "staged": "finished files of jobs that had ended",
    "latents": "spilled states of jobs that had ended",
    "tasks": "records of tasks that nobody waits for any more",
    "jobs": "jobs ended, since what was needed to go on with them is gone",
    "names": "names of active jobs of which nothing else was left",
    "unlisted": "active jobs that were not in the set of active ones",
    "workers": "names of workers that are long dead",
    "ttls": "keys that had no TTL and should",
    "unknown": "keys without a TTL that nobody here knows (left alone)",
    "arena": "blocks of the arena of jobs that had ended",
}
# For a lease that was to be renewed and had no end.
LEASE_S = 60.0
# As long as a worker's stream outlives its lease.
STREAM_S = 60.0
LIST_S = 7 * 24 * 3600.0
LOST = "Redis has lost what was needed to go on with it; push it again"


@dataclass(frozen=True, slots=True)
class Seen:
    """A key as a scan saw it: `ttl_ms` -1 for none; `fields` as `to_read` asked for them."""

    name: str
    ttl_ms: int
    fields: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Suspect:
    """What may be left over, as which kind it would count, and the script that judges it; None
    for what is only counted."""

    name: str
    kind: str
    call: Call | None


class Orphans:
    """Suspects of one pool. `act`: the scripts are to do what they find, not only say it."""

    def __init__(self, t: Transitions, act: bool) -> None:
        self._t, self._act = t, act
        k, ttls = t.keys, t.ttls
        self._staged = k.staged("", 0, 0).removesuffix(":0:0")
        self._latents = k.latents("", 0, "0").removesuffix(":0:0")
        self._task, self._job = k.task(0).removesuffix("0"), k.job("")
        self._trajectory, self._events, self._tasks = k.trajectory(""), k.events(""), k.tasks("")
        # Keys that no job waits for: prefix -> the TTL that they have by their makers.
        self._plain = {
            k.result(""): ttls.result_s,
            k.output("", 0).removesuffix(":0"): ttls.output_s,
            k.canceled(""): ttls.early_cancel_s,
            k.pushed_by(""): LIST_S,
            k.worker(""): LEASE_S,
            k.launcher(""): LEASE_S,
        }
        self._single = {
            k.leader: LEASE_S, k.timeline: ttls.job_s, k.videos: LIST_S, k.janitor: LIST_S,
        }  # fmt: skip

    def to_read(self, name: str, ttl_ms: int) -> tuple[str, ...]:
        """Fields of a hash without which nothing can be said of it."""
        if name.startswith(self._task) and self._is_long(ttl_ms):
            return "state", "jobs", "members"
        if name.startswith(self._job) and ttl_ms == -1:
            return ("is_terminal",)
        return ()

    def _is_long(self, ttl_ms: int) -> bool:
        return ttl_ms == -1 or ttl_ms > 1000 * self._t.ttls.task_s

    def suspect(self, seen: Seen, now: float) -> Suspect | None:
        """`now`: seconds since the epoch, for an end that it may have to write."""
        name, t = seen.name, self._t
        if name in t.keys.permanent():
            return None
        for kind, start in (("staged", self._staged), ("latents", self._latents)):
            if name.startswith(start):
                job = name.removeprefix(start).rsplit(":", 2)[0]
                return Suspect(name, kind, t.sweep(name, job, self._act))
        if name.startswith(self._trajectory):
            return self.job(name.removeprefix(self._trajectory), now)
        if name.startswith(self._task):
            return self._dispatch(seen) if seen.fields else None
        if seen.ttl_ms != -1:
            return None
        if name.startswith(self._job):
            job = name.removeprefix(self._job)
            if seen.fields != ("1",):
                return self.job(job, now)
            return self._lapse(name, t.ttls.job_s, jobs=(job,))
        if name.startswith(self._events):
            return self._lapse(name, t.ttls.result_s, jobs=(name.removeprefix(self._events),))
        if name.startswith(self._tasks):
            return self._lapse(name, STREAM_S, workers=(name.removeprefix(self._tasks),))
        ttl_s = self._single.get(name) or self._ttl_of(name)
        return self._lapse(name, ttl_s) if ttl_s else Suspect(name, "unknown", None)

    def job(self, job: str, now: float) -> Suspect:
        """One that is said to be active, or of which a trajectory is there."""
        lost = Result(job, JobStatus.FAILED, error_code=ErrorCode.STATE_LOST, error=LOST)
        call = self._t.bury(job, lost.to_wire(), lost.error_code, lost.error, now, self._act)
        return Suspect(self._t.keys.job(job), "jobs", call)

    def worker(self, name: str, has_record: bool, has_stream: bool) -> Suspect | None:
        """The leader forgets a worker when its lease runs out, and blames it for what it ran. One
        whose stream has gone too, ten leases later, no leader has missed."""
        if has_record or has_stream:
            return None
        call = self._t.leave(name, tell=False) if self._act else None
        return Suspect(self._t.keys.worker(name), "workers", call)

    def _dispatch(self, seen: Seen) -> Suspect | None:
        """The record of a task that runs is kept long; once its jobs have ended and its workers
        are dead nobody ends it any more."""
        state, jobs, members = seen.fields
        if state is None:
            return None
        ttl_s = self._t.ttls.task_s
        if state in ("void", "done"):
            return self._lapse(seen.name, ttl_s, kind="tasks")
        needed_by = (jobs or "").split(), (members or "").split()
        return self._lapse(seen.name, ttl_s, *needed_by, kind="tasks")

    def _lapse(
        self, name: str, ttl_s: float, jobs: tuple[str, ...] | list[str] = (),
        workers: tuple[str, ...] | list[str] = (), kind: str = "ttls",
    ) -> Suspect:  # fmt: skip
        return Suspect(name, kind, self._t.lapse(name, ttl_s, self._act, jobs, workers))

    def _ttl_of(self, name: str) -> float:
        return next((ttl_s for start, ttl_s in self._plain.items() if name.startswith(start)), 0.0)
