"""The coordinator's mind: `handle(event, now) -> effects`. No I/O, no clock, no randomness
but the seed drawn at admission.

A job is a trajectory encode -> denoise chunks -> decode -> finish. The core keeps the ready
ones in the policy's index and the dispatched ones as flights; a rank holds one running task
and at most one queued behind it. Whatever Redis refuses comes back as an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.handles import HandleError
from common.job import ErrorCode, JobSpec, JobStatus
from common.messages import MessageError, unpack_handles
from common.stage import DENOISE, ENCODE
from services.coordinator import events as ev
from services.coordinator.admission import Admission
from services.coordinator.recovery import recover
from services.coordinator.standing import standings
from services.coordinator.state import (
    FINAL_ERRORS,
    FINISH,
    MAX_ATTEMPTS,
    Flight,
    Job,
    died,
    timings,
)
from services.costs.model import CostModel, Shape, shape_of
from services.policies.base import (
    Doomed,
    Policy,
    Preempt,
    Rank,
    Recall,
    Run,
    Running,
    View,
    cost_s,
)

Effects = list[ev.Effect]
REFRESH_S = 1.0
# A policy that names ended jobs again and again must not keep the core for ever.
MOST_PLANS = 8
# Workers asked in turn to free an ended job's state; more than one may have died unnoticed.
MOST_FREERS = 3


class Core:
    def __init__(self, policy: Policy, costs: CostModel, admission: Admission, view: View) -> None:
        self.policy = policy
        self.costs = costs
        self.admission = admission
        self.view = view
        self.manifests: Mapping[str, Mapping[str, Any]] = {}
        self.jobs: dict[str, Job] = {}
        self.flights: dict[int, Flight] = {}
        self.workers: dict[str, ev.WorkerInfo] = {}
        self.ranks: dict[str, Rank] = {}
        self.seq = 0
        self.wake_at: float | None = None
        self._refreshed = 0.0
        self._entering = 0  # submits whose answer is still to come

    def handle(self, event: ev.Event, now: float) -> Effects:
        """What to do about `event` at `now` (seconds since the epoch, Redis' clock)."""
        match event:
            case ev.Tick():
                return self._decide(now)
            case ev.Pushed():
                return self._push(event, now)
            case ev.Submitted():
                return self._submitted(event, now)
            case ev.SubmitFailed():
                return self._submit_failed(event)
            case ev.Reported():
                return self._reported(event, now)
            case ev.Dispatched():
                return self._dispatched(event, now)
            case ev.Voided():
                return self._voided(event, now)
            case ev.CancelAsked():
                return [ev.NoteCancel(event.entry, event.job)]
            case ev.CancelNoted():
                return self._cancel(event, now)
            case ev.Finished():
                return self._finished(event, now)
            case ev.Rewound():
                return self._rewound(event)
            case ev.Joined():
                return self._joined(event)
            case ev.Left():
                return self._left(event, now)
            case ev.ManifestsRead():
                return self._manifests(event)
            case ev.Recovered():
                return recover(self, event, now)

    # -- arrivals ------------------------------------------------------------------------

    def _push(self, event: ev.Pushed, now: float) -> Effects:
        active = len(self.jobs) + self._entering
        backlog = active * 1.0
        verdict = self.admission.decide(event, self.manifests, self.costs, active, backlog)
        if isinstance(verdict, ev.Submit):
            self._entering += 1
        return [verdict]

    def _submitted(self, event: ev.Submitted, now: float) -> Effects:
        spec = event.spec
        self._entering -= 1
        if event.verdict == "conflict":
            return [
                ev.Refuse(
                    entry=spec.entry,
                    ids=(spec.entry,),
                    content=spec.content,
                    error_code=ErrorCode.CONFLICT,
                    error=f"id: {spec.id!r} is taken by a job with other content; use another id",
                    field="id",
                )
            ]
        if event.verdict == "same" or spec.id in self.jobs:
            return []
        job = self.remember(spec)
        if event.verdict == "created_canceled":
            return self.end(job, JobStatus.CANCELED, now)
        self.ready(job)
        return []

    def _submit_failed(self, event: ev.SubmitFailed) -> Effects:
        spec = event.spec
        self._entering -= 1
        return [
            ev.Refuse(
                entry=spec.entry,
                ids=(spec.entry,),
                content=spec.content,
                error_code=ErrorCode.QUEUE_FULL,
                error=f"Redis takes no new jobs ({event.reason}); try again in 10 s",
                retry_after_s=10.0,
            )
        ]

    def remember(self, spec: JobSpec) -> Job:
        manifest = self.manifests.get(spec.model, {})
        job = Job.of(spec, shape_of(spec.params, manifest), spec.deadline_s or spec.arrival_s)
        self.jobs[spec.id] = job
        return job

    def ready(self, job: Job) -> None:
        job.seq = 0
        if not job.ending:
            self.policy.add(job.candidate(self.costs))

    def _manifests(self, event: ev.ManifestsRead) -> Effects:
        self.manifests = event.manifests
        for model, manifest in event.manifests.items():
            self.costs.set_prior(model, manifest.get("costs", {}))
        return []

    # -- workers -------------------------------------------------------------------------

    def _joined(self, event: ev.Joined) -> Effects:
        worker = event.worker
        self.workers[worker.name] = worker
        if worker.draining:
            self.ranks.pop(worker.name, None)
        elif worker.name not in self.ranks and worker.stage:
            self.ranks[worker.name] = Rank(worker.name, worker.stage, worker.models)
            for flight in self.flights.values():  # it may have been away only for us
                if worker.name in flight.silent:
                    self.show(flight, worker.name)
        self._arrange()
        return []

    def _left(self, event: ev.Left, now: float) -> Effects:
        self.workers.pop(event.worker, None)
        self.ranks.pop(event.worker, None)
        self._arrange()
        effects: Effects = []
        for flight in list(self.flights.values()):
            if event.worker in flight.members:
                flight.voiding = True
                effects.append(
                    ev.Void(flight.seq, flight.members, flight.jobs, forced=True, blame=event.lost)
                )
        if event.lost:
            effects.append(ev.Forget(event.worker))
        return effects

    def _arrange(self) -> None:
        """Bring the policy's view up to date with ranks and flights."""
        self.view.ranks = list(self.ranks.values())
        by_stage: dict[str, list[Rank]] = {}
        for rank in self.view.ranks:
            by_stage.setdefault(rank.stage, []).append(rank)
        self.view.by_stage = by_stage

    # -- deciding ------------------------------------------------------------------------

    def _decide(self, now: float) -> Effects:
        effects: Effects = []
        for _ in range(MOST_PLANS):
            if not self._plan(effects, now):
                break
        if now - self._refreshed >= REFRESH_S and self.jobs:
            self._refreshed = now
            effects.append(ev.Refresh(standings(self, now)))
        self._set_alarm(now)
        return effects

    def _plan(self, effects: Effects, now: float) -> bool:
        """Carry out one plan; True if another may find more to do: a rank got nothing because its
        job was dropped in this very plan, or a denoiser took jobs that kept others from being
        encoded ahead."""
        again = False
        for decision in self.policy.plan(self.view, now):
            match decision:
                case Run():
                    dispatched = self._run(decision, now)
                    again = again or not dispatched or self._stage_of(decision) == DENOISE
                    effects += dispatched
                case Preempt(seq=seq):
                    flight = self.flights[seq]
                    flight.yielding = True
                    step_end = now + flight.candidate.step_s
                    flight.ends_s = min(flight.ends_s, step_end)
                    self.show(flight)
                    effects.append(ev.Yield(seq, flight.members))
                case Recall(seq=seq):
                    flight = self.flights[seq]
                    if not flight.voiding:
                        flight.voiding = True
                        effects.append(ev.Void(seq, flight.members, flight.jobs, forced=False))
                case Doomed(job=name):
                    effects += self._doomed(self.jobs[name], now)
        return again

    def _stage_of(self, decision: Run) -> str:
        return self.ranks[decision.rank].stage

    def _run(self, decision: Run, now: float) -> Effects:
        rank = self.ranks[decision.rank]
        # A job found doomed in this very plan may have been dropped a line before.
        rows = [(name, stop) for name, stop in decision.rows if not self.jobs[name].ending]
        if not rows:
            return []
        jobs = [self.jobs[name] for name, _ in rows]
        stops = [stop for _, stop in rows]
        candidates = [job.candidate(self.costs) for job in jobs]
        expected_s = sum(cost_s(c, stop) for c, stop in zip(candidates, stops, strict=True))
        self.seq += 1
        for job in jobs:
            self.policy.remove(job.spec.id)
            job.seq = self.seq
        flight = Flight(
            seq=self.seq,
            stage=rank.stage,
            members=(rank.name,),
            jobs=tuple(job.spec.id for job in jobs),
            candidate=candidates[0],
            stop=stops[0],
            expected_s=expected_s,
            ends_s=rank.free_at(now) + expected_s,
            silent={rank.name},
        )
        self.flights[self.seq] = flight
        self.show(flight)
        return [
            ev.Dispatch(
                seq=flight.seq,
                stage=flight.stage,
                model=jobs[0].spec.model,
                members=flight.members,
                rows=tuple(job.row(stop) for job, stop in zip(jobs, stops, strict=True)),
                expected_s=expected_s,
            )
        ]

    def show(self, flight: Flight, *members: str) -> None:
        """Put a flight where the policy sees it: running if its rank is idle, else queued."""
        for member in members or flight.members:
            rank = self.ranks.get(member)
            if rank is None:
                continue
            shown = Running(
                flight.seq, flight.candidate, flight.ends_s, flight.yielding, flight.stop
            )
            if rank.running is None or rank.running.seq == flight.seq:
                rank.running = shown
            else:
                rank.queued = shown

    def _land(self, flight: Flight, now: float, member: str | None = None) -> None:
        """A flight has left a rank (every one of its members if none is named)."""
        members = flight.members if member is None else (member,)
        for name in members:
            flight.silent.discard(name)
            rank = self.ranks.get(name)
            if rank is None:
                continue
            if rank.queued and rank.queued.seq == flight.seq:
                rank.queued = None
            if rank.running and rank.running.seq == flight.seq:
                rank.running, rank.queued = rank.queued, None
                if rank.running:
                    follower = self.flights[rank.running.seq]
                    follower.ends_s = now + follower.expected_s
                    rank.running.ends_s = follower.ends_s
        if not flight.silent:
            self.flights.pop(flight.seq, None)

    def _doomed(self, job: Job, now: float) -> Effects:
        job.doomed = True
        if job.spec.on_late == "drop" and not job.ending:
            return self.end(
                job,
                JobStatus.EXPIRED,
                now,
                ErrorCode.DEADLINE_MISSED,
                "it could no longer make its deadline, and on_late is drop",
            )
        return []

    def _set_alarm(self, now: float) -> None:
        """The next moment at which a decision could differ: a rank about to be free."""
        alarms = [
            rank.running.ends_s - self.view.lead_s
            for rank in self.view.ranks
            if rank.running and not rank.queued
        ]
        due = [at for at in alarms if at > now]
        if self.jobs:
            due.append(self._refreshed + REFRESH_S)
        self.wake_at = min(due, default=None)

    # -- answers -------------------------------------------------------------------------

    def _dispatched(self, event: ev.Dispatched, now: float) -> Effects:
        if event.verdict == "dispatched":
            return []
        flight = self.flights.get(event.seq)
        if flight is None:
            return []
        flight.silent.clear()
        self._land(flight, now)
        if event.verdict == "seq":
            self.seq = max(self.seq, int(event.detail[0]))
        if event.verdict == "worker":
            for name in flight.members:
                self.ranks.pop(name, None)
            self._arrange()
        refused = event.detail[0] if event.verdict == "row" else ""
        effects: Effects = []
        for name in flight.jobs:
            job = self.jobs.get(name)
            if job is None or job.seq != flight.seq:
                continue
            if name == refused and event.detail[1] == "gone":
                self.jobs.pop(name)  # ended behind our back; its record says how
            elif name == refused and event.detail[1] == "canceled":
                effects += self.end(job, JobStatus.CANCELED, now)
            else:
                self.ready(job)
        return effects

    def _reported(self, event: ev.Reported, now: float) -> Effects:
        report = event.report
        flight = self.flights.get(report.seq)
        if flight is not None:
            self._land(flight, now, report.worker)
        if report.draining and report.worker in self.ranks:
            del self.ranks[report.worker]
            self._arrange()
        effects: Effects = []
        for row, accepted in zip(report.rows, event.accepted, strict=False):
            job = self.jobs.get(row.job)
            if not accepted or job is None or job.seq != report.seq or job.ending:
                continue
            if report.returned:
                self.ready(job)
                continue
            job.seconds[report.stage] = job.seconds.get(report.stage, 0.0) + row.seconds
            job.chunks += 1
            if row.error_code:
                effects += self._row_failed(job, row.error_code, row.error, now)
                continue
            self._learn(job, report.stage, row.step_s or row.seconds)
            job.step, job.stage, job.handles = row.step, row.next_stage, row.handles
            job.outputs = row.outputs
            if job.started_s is None:
                job.started_s = now - report.seconds
            if job.stage == FINISH:
                effects += self.end(job, JobStatus.SUCCEEDED, now)
            else:
                self.ready(job)
        return effects

    def _learn(self, job: Job, stage: str, seconds: float) -> None:
        shape = Shape(0, 1, job.shape.forwards) if stage == ENCODE else job.shape
        self.costs.observe(job.spec.model, stage, shape, seconds)

    def _row_failed(self, job: Job, code: str, error: str, now: float) -> Effects:
        job.attempts += 1
        return self.try_again(job, code, error, now)

    def try_again(self, job: Job, code: str, error: str, now: float) -> Effects:
        """What becomes of a job whose last task failed with `code`."""
        if code in FINAL_ERRORS or job.attempts >= MAX_ATTEMPTS:
            return self.end(job, JobStatus.FAILED, now, code or ErrorCode.WORKER_LOST, error)
        if code == ErrorCode.STATE_LOST:
            return [ev.Rewind(job.spec.id, self._who_frees(job.handles, ()))]
        self.ready(job)
        return []

    def _rewound(self, event: ev.Rewound) -> Effects:
        job = self.jobs.get(event.job)
        if job is not None and event.verdict == "rewound":
            job.stage, job.step, job.handles, job.outputs = ENCODE, 0, b"", ()
            self.ready(job)
        return []

    def _voided(self, event: ev.Voided, now: float) -> Effects:
        flight = self.flights.get(event.seq)
        if flight is None:
            return []
        if event.verdict == "late":
            flight.voiding = False
            return []  # it started, or its report is on the way
        flight.silent.clear()
        self._land(flight, now)
        effects: Effects = []
        for name in flight.jobs:
            job = self.jobs.get(name)
            if job is None or job.seq != flight.seq or job.ending:
                continue
            if event.blamed:
                job.attempts += 1
                if job.attempts >= MAX_ATTEMPTS:
                    what = died(job.attempts)
                    effects += self.end(job, JobStatus.FAILED, now, ErrorCode.WORKER_LOST, what)
                    continue
            self.ready(job)
        return effects

    def _cancel(self, event: ev.CancelNoted, now: float) -> Effects:
        job = self.jobs.get(event.job)
        if event.verdict != "canceling" or job is None or job.ending:
            return []
        return self.end(job, JobStatus.CANCELED, now)

    # -- ends ----------------------------------------------------------------------------

    def end(
        self, job: Job, status: JobStatus, now: float, code: str = "", error: str = ""
    ) -> Effects:
        self.policy.remove(job.spec.id)
        job.ending = True
        effects: Effects = []
        flight = self.flights.get(job.seq)
        members = flight.members if flight is not None else ()
        if flight is not None and len(flight.jobs) == 1:
            # Its report will be refused, but the rank should not finish the chunk first.
            flight.yielding = True
            self.show(flight)
            effects.append(ev.Yield(flight.seq, flight.members))
        effects.append(
            ev.Finish(
                spec=job.spec,
                status=status,
                outputs=job.outputs if status is JobStatus.SUCCEEDED else (),
                timings=timings(job, now),
                error_code=code,
                error=error,
                free_by=self._who_frees(job.handles, members),
            )
        )
        return effects

    def _who_frees(self, packed: bytes, members: tuple[str, ...]) -> tuple[str, ...]:
        """Workers of the hosts where the job's state lies, `members` ran or run it; else any.

        The first that is alive when the job ends will be told. A report under way may have left
        handles that the core has not heard of: those lie with `members`.
        """
        try:
            hosts = {handle.host for handle in unpack_handles(packed).values()}
        except (HandleError, MessageError):
            hosts = set()
        hosts |= {self.workers[name].host for name in members if name in self.workers}
        near = [w.name for w in self.workers.values() if w.host in hosts]
        return tuple((near or list(self.workers))[:MOST_FREERS])

    def _finished(self, event: ev.Finished, now: float) -> Effects:
        job = self.jobs.get(event.job)
        if job is None:
            return []
        if event.verdict == "lost":
            job.ending, job.outputs = False, ()
            return self.end(
                job,
                JobStatus.FAILED,
                now,
                ErrorCode.OUTPUT_LOST,
                "its files expired before they were delivered",
            )
        self.jobs.pop(event.job)
        return []
