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
from services.coordinator import entering
from services.coordinator import events as ev
from services.coordinator.admission import Admission
from services.coordinator.board import Board
from services.coordinator.deciding import decide
from services.coordinator.hung import Watch
from services.coordinator.learning import is_hit, learn
from services.coordinator.limits import Limits, expire, has_waited_out, is_out_of_time, out_of_time
from services.coordinator.recovery import recover
from services.coordinator.spread import Spread
from services.coordinator.state import (
    FINAL_ERRORS,
    FINISH,
    MAX_ATTEMPTS,
    Job,
    died,
    position,
    timings,
)
from services.costs.model import CostModel, Shape
from services.policies.base import Pass, Policy, View
from services.policies.contained import Contained

Effects = list[ev.Effect]
# Workers asked in turn to free an ended job's state; more than one may have died unnoticed.
MOST_FREERS = 3


class Core:
    def __init__(self, policy: Policy, costs: CostModel, admission: Admission, view: View) -> None:
        self.policy = Contained(policy)
        self.costs = costs
        self.admission = admission
        self.view = view
        view.shared_s = self._shared_s
        self.board = Board(view)
        self.manifests: Mapping[str, Mapping[str, Any]] = {}
        self.jobs: dict[str, Job] = {}
        self.seq = 0
        self.wake_at: float | None = None
        self.refresh_s = 1.0  # standings are said this often
        self.refreshed_s = 0.0
        self.spread = Spread()
        self.entering: dict[str, ev.Submit] = {}  # whose answer is still to come
        self.doubted: set[str] = set()  # late by an estimate that may be wrong by as much
        self.max_attempts = MAX_ATTEMPTS
        self.watch = Watch()
        self.limits = Limits()

    def handle(self, event: ev.Event, now: float) -> Effects:
        """What to do about `event` at `now` (seconds since the epoch, Redis' clock)."""
        match event:
            case ev.Tick():
                entering.hold_back(self)
                effects = self.limits.due(self, now) + decide(self, now)
                self.wake_at = self._next_alarm(now)
                return effects
            case ev.Pushed():
                return entering.push(self, event, now)
            case ev.Submitted():
                return entering.submitted(self, event, now)
            case ev.SubmitFailed():
                return entering.submit_failed(self, event)
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
                self.board.join(event.worker)
                return []
            case ev.Beats():
                self.board.beat(event.workers)
                return self.watch.look(self, event.workers)
            case ev.Left():
                return self._left(event)
            case ev.ManifestsRead():
                return self._manifests(event)
            case ev.PolicyChosen():
                return self._policy_chosen(event)
            case ev.Recovered():
                return recover(self, event, now)

    def _next_alarm(self, now: float) -> float | None:
        """The next moment at which a decision could differ, or a standing is to be said."""
        free = self.board.next_free(now)
        if not self.jobs:
            return free
        refresh = self.refreshed_s + self.refresh_s
        return min(at for at in (free, refresh, self.limits.next_s()) if at is not None)

    # -- jobs ----------------------------------------------------------------------------

    def remember(self, spec: JobSpec) -> Job:
        job = self.jobs[spec.id] = self._job_of(spec)
        self.limits.watch(job)
        return job

    def _job_of(self, spec: JobSpec) -> Job:
        return Job.of(spec, self.manifests.get(spec.model, {}))

    def ready(self, job: Job) -> None:
        job.seq = 0
        if not job.ending:
            self.policy.add(job.candidate(self.costs))

    def _manifests(self, event: ev.ManifestsRead) -> Effects:
        self.manifests = event.manifests
        for model, manifest in event.manifests.items():
            self.costs.set_prior(model, manifest.get("costs", {}))
        return []

    def _shared_s(self, shared: Pass) -> tuple[float, bool]:
        shape = Shape(shared.tokens, shared.rows, 1)
        return self.costs.shared(shared.model, shared.stage, shape, shared.mixed)

    def _policy_chosen(self, event: ev.PolicyChosen) -> Effects:
        """Another policy leads from the next decision on; what runs goes on."""
        self.policy = Contained(event.policy)
        for job in self.jobs.values():
            if not job.seq and not job.ending:
                self.policy.add(job.candidate(self.costs))
        return []

    # -- workers -------------------------------------------------------------------------

    def _left(self, event: ev.Left) -> Effects:
        effects: Effects = []
        self.watch.forget(event.worker)
        for flight in self.board.leave(event.worker):
            flight.voiding = True
            effects.append(
                ev.Void(flight.seq, flight.members, flight.jobs, forced=True, blame=event.lost)
            )
        if event.lost:
            effects.append(ev.Forget(event.worker))
        return effects

    # -- answers -------------------------------------------------------------------------

    def _dispatched(self, event: ev.Dispatched, now: float) -> Effects:
        if event.verdict == "dispatched":
            return []
        flight = self.board.flights.get(event.seq)
        if flight is None:
            return []
        self.board.land(flight, now)
        if event.verdict == "seq":
            self.seq = max(self.seq, int(event.detail[0]))
        if event.verdict == "worker":
            for name in flight.members:
                self.board.retire(name)
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
        flight = self.board.flights.get(report.seq)
        if flight is not None:
            self.board.land(flight, now, report.worker)
        if report.draining:
            self.board.retire(report.worker)
        worked = [row.job for row in report.rows if not is_hit(report.stage, row)]
        ran = [self.jobs[name] for name in worked if name in self.jobs]
        if not report.returned:
            self.watch.worked(report.worker, report.stage, ran)
            learn(self.costs, report, event.accepted, self.jobs)
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
            job.note_rows(row)
            if report.stage == DENOISE:
                job.skipped = row.skipped
            job.step, job.stage, job.handles = row.step, row.next_stage, row.handles
            job.outputs = row.outputs
            if job.started_s is None:
                job.started_s = now - report.seconds
            job.moved_on(position(job.stage, job.step))
            if job.stage == FINISH:
                effects += self.end(job, JobStatus.SUCCEEDED, now)
            elif is_out_of_time(job):
                effects += out_of_time(self, job, now)
            else:
                self.ready(job)
        return effects

    def _row_failed(self, job: Job, code: str, error: str, now: float) -> Effects:
        job.attempts += 1
        return self.try_again(job, code, error, now)

    def try_again(self, job: Job, code: str, error: str, now: float) -> Effects:
        """What becomes of a job whose last task failed with `code`."""
        if code in FINAL_ERRORS or job.attempts >= self.max_attempts:
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
        flight = self.board.flights.get(event.seq)
        if flight is None:
            return []
        if event.verdict == "late":
            # Its rank has more to report: asked again it would say the same until that is read.
            flight.voiding, flight.started = False, True
            for name in flight.jobs:  # it started, or its report is on the way
                if name in self.jobs:
                    self.jobs[name].begun = True
            return []
        self.board.land(flight, now)
        effects: Effects = []
        for name in flight.jobs:
            job = self.jobs.get(name)
            if job is None or job.seq != flight.seq or job.ending:
                continue
            if event.blamed:
                job.attempts += 1
                if job.attempts >= self.max_attempts:
                    what = died(job.attempts)
                    effects += self.end(job, JobStatus.FAILED, now, ErrorCode.WORKER_LOST, what)
                    continue
            job.seq = 0
            if has_waited_out(job, now):  # else it would be handed over before its next alarm
                effects += expire(self, job, now)
            else:
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
        flight = self.board.flights.get(job.seq)
        members = flight.members if flight is not None else ()
        if flight is not None and len(flight.jobs) == 1:
            # Its report will be refused, but the rank should not finish the chunk first.
            self.board.ask_yield(flight, now)
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
        hosts |= {self.board.workers[name].host for name in members if name in self.board.workers}
        near = [w.name for w in self.board.workers.values() if w.host in hosts]
        return tuple((near or list(self.board.workers))[:MOST_FREERS])

    def _finished(self, event: ev.Finished, now: float) -> Effects:
        job = self.jobs.get(event.job)
        if job is None:
            return []
        if event.verdict == "done":
            job.ending = False  # it was late, and is done: its report is on the way
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
