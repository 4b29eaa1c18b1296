"""The loop every stage worker runs: register, take, start, run, report, drain on SIGTERM.

The main thread computes. The inbox thread reads this worker's stream and has the next task's
state read meanwhile; the pulse thread renews the lease and tells progress. A task's report and
the next one's start go out in one round trip, so a rank is idle for that round trip only.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from redis.exceptions import RedisError

from common.clock import Clock, keep_right, patient_clock
from common.control import Chunk
from common.fitness import Fitness
from common.handles import Handle
from common.inbox import Inbox, Outage, Pending, Pulse
from common.keys import Keys
from common.messages import Report, pack_report
from common.previews import STAY_S, Previews
from common.ran import Ran, Watcher, tell
from common.reporting import args_of, before_report, deliverable, failed, rows_of, steps_of
from common.scripts import Call, Scripts, Transitions, Ttls, ms, text
from common.stage import Outcome, Stage, Task
from common.states import States

log = logging.getLogger("slackwater.worker")

BLOCK_MS = 1000
SWEEP_S = 60.0
# With growing pauses, under a second in all.
FAREWELL_TRIES = 5


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a worker is. A restart is a new worker: its name is never used again."""

    name: str
    stage: str
    model: str
    host: str
    device: str = "cpu"

    @classmethod
    def new(cls, stage: str, model: str, host: str, device: str = "cpu") -> Identity:
        name = f"{stage}-{host}-{os.getpid()}-{secrets.token_hex(4)}"
        return cls(name, stage, model, host, device)


class Worker:
    def __init__(
        self,
        connect_blocking: Callable[[], Any],
        connect: Callable[[], Any],
        keys: Keys,
        ttls: Ttls,
        stage: Stage,
        who: Identity,
        lease_s: float = 5.0,
        clock: Clock | None = None,
        stager: Executor | None = None,
        counts: Callable[[], Mapping[str, int]] = dict,
        sweep: Callable[[], int] = int,
        connect_pulse: Callable[[], Any] | None = None,
        previews: bool = False,
        watchers: Sequence[Watcher] = (),
        metrics: str = "",
    ) -> None:
        """`connect_pulse` makes the heartbeats' own connection: one that gives up in time to renew
        the lease by another. `stager` reads states and frees handles beside the running task: one
        thread if None. `counts` are published with every heartbeat; `sweep` frees what dead
        processes left in the host's arena and is called once a minute. `previews`: the stage may
        leave small pictures of running jobs. `watchers` are told of each task; `metrics` is where
        this process' figures are, for its record.
        """
        self.who, self.stage, self.keys, self.lease_s = who, stage, keys, lease_s
        self._connect_pulse = connect_pulse or connect
        self._redis = connect()
        self._scripts = Scripts(self._redis)
        self._pulse_redis: Any = None
        self._clock = clock or patient_clock(self._redis)
        self._transitions = Transitions(keys, ttls)
        self._ttls = ttls
        self._manifest = json.dumps(stage.manifest())
        self._counts, self._sweep = counts, sweep
        self._swept = time.monotonic()
        self._draining = threading.Event()
        self._states = States(
            stage, stager or ThreadPoolExecutor(1, thread_name_prefix="stager"), connect, keys
        )
        self._inbox = Inbox(
            connect_blocking, keys.tasks(who.name), BLOCK_MS, self._states.stage_in,
            self._states.free_packed, self.drain, self._states.salvage,
        )  # fmt: skip
        self._previews = Previews(self._put_preview, lambda: self._pulse.wake(), previews)
        self._pulse = Pulse(self._beat, self._tell, lease_s / 3, self._previews.send)
        self._steps_of: dict[str, int] = {}
        self._fitness = Fitness()
        self._late_reports = 0
        self._watchers, self._metrics = watchers, metrics

    # -- life ----------------------------------------------------------------------------

    def run(self) -> None:
        """Work until `drain` was called; returns once everything is handed back."""
        self._send([self._registration()])
        self._inbox.start()
        self._pulse.start()
        log.info("%s is ready", self.who.name)
        started: Pending | None = None
        try:
            while True:
                pending = started or self._next()
                if pending is None:
                    break
                started = self._work(pending)
        except BaseException:
            # Without a farewell its lease runs out, as that of a killed one: what it was running
            # may be why, and has to count as an attempt.
            self._leave(farewell=False)
            raise
        self._leave()

    def drain(self) -> None:
        """End the running chunk at its next step, hand back what is queued, and leave."""
        self._draining.set()
        self._inbox.nudge()

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    @property
    def outage(self) -> Outage:
        """How the heartbeats get on with Redis."""
        return self._pulse.outage

    @property
    def unfit(self) -> str:
        """Why this process took itself out and must not be used again; "" if it did not."""
        return self._fitness.unfit

    def drain_on_sigterm(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.drain())

    def _next(self) -> Pending | None:
        while True:
            pending = self._inbox.take(1.0)
            if pending is not None:
                return pending
            if self._draining.is_set():
                return None

    def _leave(self, farewell: bool = True) -> None:
        self._pulse.stop()
        self._inbox.stop()
        self._pulse.join(5)  # a beat after the farewell would bring back a worker that is gone
        if farewell:
            self._say_goodbye()
        self._inbox.join(5)
        self._states.close()
        self.stage.close()
        log.info("%s has left", self.who.name)

    def _say_goodbye(self) -> None:
        """Unregister, and free what nobody has been told to yet. Not worth waiting long for."""
        outage = Outage(self.who.name)
        for _ in range(FAREWELL_TRIES):
            try:
                left = self._scripts.one(
                    self._transitions.leave(self.who.name, tell=True, why=self.unfit)
                )
                for packed in left[1:]:
                    self._states.free_packed(packed)
                return
            except (RedisError, OSError) as error:
                outage.failed(error, threading.Event())
        log.warning("left without a word; its lease will run out")

    # -- one task ------------------------------------------------------------------------

    def _work(self, pending: Pending) -> Pending | None:
        """Start (unless that was done), run and report one task; the next one, if started."""
        if not pending.live and not self._note_start(
            pending, self._send([self._start(pending)])[0]
        ):
            return None
        task = pending.task
        self._pulse.begin(task.seq)
        ran = self._execute(pending)
        self._pulse.hold()
        task, outcomes = pending.task, ran.outcomes
        self._judge(outcomes)
        rows, calls = rows_of(task, outcomes), before_report(self._transitions, task, outcomes)
        draining = self._draining.is_set()
        report = Report(
            task.seq, self.who.name, task.stage, tuple(rows), ran.seconds, ran.returned, draining
        )
        at = len(calls)  # of the report, behind what must be there before it
        calls.append(
            self._transitions.report(
                task.seq,
                self.who.name,
                self._leads(task),
                pack_report(report),
                [args_of(r, o, self._steps_of) for r, o in zip(rows, outcomes, strict=True)],
                self._clock(),
            )
        )
        following = self._inbox.poll()
        if following is not None:
            calls.append(self._start(following))
        replies = self._send(calls)
        self._pulse.end()
        self._settle(task, outcomes, replies[at])
        ran.task, ran.verdict, ran.reported_s = task, text(replies[at][0]), self._clock()
        tell(self._watchers, ran)
        self._inbox.yields.discard(task.seq)
        self._inbox.gone.clear()
        if following is not None and self._note_start(following, replies[at + 1]):
            return following
        return None

    def _judge(self, outcomes: Sequence[Outcome]) -> None:
        """Take itself out where no task could succeed here any more."""
        if self.unfit:
            return
        self._fitness.note((o.job, o.error_code, o.error) for o in outcomes if o.done)
        if self.unfit:
            log.error("%s takes itself out: %s", self.who.name, self.unfit)
            self.drain()

    def _leads(self, task: Task) -> bool:
        return not task.members or task.members[0] == self.who.name

    def _start(self, pending: Pending) -> Call:
        task = pending.task
        jobs = [row.job for row in task.rows]
        return self._transitions.start(
            task.seq, self.who.name, pending.entry, task.stage, jobs, self._clock()
        )

    def _note_start(self, pending: Pending, reply: Any) -> bool:
        if isinstance(reply, Exception):
            raise reply
        if text(reply[0]) != "running":
            log.info("seq %d was taken back before it started", pending.task.seq)
            if pending.staged is not None:
                pending.staged.cancel()
            self._inbox.yields.discard(pending.task.seq)
            return False
        if reply[1] == b"1":
            self._inbox.yields.add(pending.task.seq)
        pending.live = [flag == b"1" for flag in reply[2:]]
        return True

    def _execute(self, pending: Pending) -> Ran:
        """Outcomes for every row (dead ones blank), seconds, and whether it was handed back."""
        task = pending.task
        untouched = [Outcome(row.job, step=row.start, done=False) for row in task.rows]
        control = Chunk(task.seq, self._inbox, self._pulse, self._draining, self._previews)
        if not any(pending.live) or control.should_stop():
            if pending.staged is not None:
                pending.staged.cancel()
            return Ran(task, untouched, self._clock(), returned=True)
        live = replace(
            task, rows=tuple(r for r, alive in zip(task.rows, pending.live, strict=True) if alive)
        )
        begun = self._clock()
        waited_s = 0.0
        try:
            assert pending.staged is not None
            full, staged = pending.staged.result()
            waited_s = self._clock() - begun
            self._steps_of = {row.job: steps_of(row.params) for row in full.rows}
            if len(live.rows) == len(full.rows):
                live = full
            else:
                kept = {row.job for row in live.rows}
                live = replace(full, rows=tuple(r for r in full.rows if r.job in kept))
            outcomes = self.stage.run(live, staged, control)
        except Exception as error:
            jobs = " ".join(r.job for r in task.rows)
            said = {"job": jobs, "seq": task.seq, "stage": task.stage, "worker": self.who.name}
            log.exception("seq %d (%s) failed", task.seq, jobs, extra=said)
            outcomes = [failed(row, error) for row in live.rows]
        by_job = {outcome.job: deliverable(outcome) for outcome in outcomes}
        whole = [by_job.get(blank.job, blank) for blank in untouched]
        return Ran(task, whole, begun, self._clock() - begun, waited_s)

    def _settle(self, task: Task, outcomes: Sequence[Outcome], reply: Any) -> None:
        """Free what the report made superfluous: the old state if it counted, else the new."""
        if isinstance(reply, Exception):
            raise reply
        verdict = text(reply[0])
        if verdict == "unknown" or not self._leads(task):
            return
        if verdict == "void":
            self._late_reports += 1
            log.warning("seq %d was taken away before its report, which did not count", task.seq)
        flags = reply[1:] if verdict == "done" else [b"0"] * len(outcomes)
        waste: list[Handle] = []
        for row, outcome, flag in zip(task.rows, outcomes, flags, strict=True):
            if flag == b"1" and not outcome.error_code:
                waste += [row.handles[part] for part in outcome.handles if part in row.handles]
            else:
                waste += list(outcome.handles.values())
        if waste:
            self._states.free(waste)

    # -- redis ---------------------------------------------------------------------------

    def _send(self, calls: list[Call]) -> list[Any]:
        """Run until Redis has answered: every script is safe to repeat."""
        outage = Outage(self.who.name)
        forever = threading.Event()
        while True:
            try:
                replies = self._scripts.run(calls)
                outage.over()
                return replies
            except (RedisError, OSError) as error:
                outage.failed(error, forever)

    def _beat(self) -> None:
        self._pulse_redis = self._pulse_redis or self._connect_pulse()
        keep_right(self._clock, self._pulse_redis)
        Scripts(self._pulse_redis).one(self._registration())
        if time.monotonic() - self._swept >= SWEEP_S:
            self._swept = time.monotonic()
            self._states.submit(self._sweep_quietly)

    def _registration(self) -> Call:
        who = self.who
        fields = {
            "stage": who.stage,
            "models": who.model,
            "host": who.host,
            "device": who.device,
            "pid": str(os.getpid()),
            "beat": ms(self._clock()),
            "draining": "1" if self._draining.is_set() else "0",
            "motion": self._pulse.motion(),
            **({"metrics": self._metrics} if self._metrics else {}),
            "counts": json.dumps({**self._counted(), "late_reports": self._late_reports}),
        }
        return self._transitions.register(
            who.name, self.lease_s, f"{who.model}/{who.stage}", self._manifest, fields
        )

    def _counted(self) -> Mapping[str, int]:
        """Nothing where they cannot be told: a lease must not end over a figure."""
        try:
            return self._counts()
        except Exception:
            log.exception("the counts of %s cannot be told", self.who.name)
            return {}

    def _sweep_quietly(self) -> None:
        try:
            freed = self._sweep()
        except Exception:
            log.exception("could not sweep the arena")
            return
        if freed:
            log.warning("swept %d blocks that dead processes had left in the arena", freed)

    def _put_preview(self, job: str, step: int, content: bytes) -> None:
        Scripts(self._pulse_redis).one(self._transitions.preview(job, step, content, STAY_S))

    def _tell(self, seq: int, steps: dict[str, int]) -> None:
        rows = [(job, step, self._steps_of.get(job, max(1, step))) for job, step in steps.items()]
        call = self._transitions.progress(seq, rows, self._clock())
        verdict, *flags = Scripts(self._pulse_redis).one(call)
        if not self._pulse.runs(seq):
            return
        if text(verdict) == "void":
            self._inbox.yields.add(seq)  # it was taken away: no use in going on
        gone = [job for (job, *_), counts in zip(rows, flags, strict=False) if counts == b"0"]
        self._inbox.gone.update((seq, job) for job in gone)
