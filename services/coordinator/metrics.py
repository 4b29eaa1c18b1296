"""What the coordinator tells Prometheus.

What is now (who waits, who works) is read off the core when Prometheus asks, and only while this
process leads; what happens is counted as it passes, once Redis has agreed to it. A job's class is
its model and its priority: low below 0, high above, else normal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from common.job import ErrorCode, JobSpec, JobStatus
from common.metrics import process
from common.metrics.registry import SECONDS, Family, Labels, Registry, Spread
from common.stage import DECODE, DENOISE, ENCODE, STAGES
from services.coordinator import events as ev
from services.coordinator.effects import DEAD_LETTERS
from services.coordinator.state import Job
from services.policies.base import Candidate

if TYPE_CHECKING:
    from services.coordinator.core import Core
    from services.coordinator.service import Coordinator

WAITING, QUEUED, RUNNING = STATES = ("waiting", "queued", "running")
READY, DRAINING, HUNG = CONDITIONS = ("ready", "draining", "hung")
WORKER_LOST, TAKEN_BACK, HANDED_BACK, LATE_REPORT = WHYS = (
    "worker_lost", "taken_back", "handed_back", "late_report",
)  # fmt: skip
# Tasks in flight beyond which those that fly no more are looked for.
FEW = 1000
SLACKS = (-300, -60, -30, -10, -5, -2, -1, 0, 1, 2, 5, 10, 30, 60, 300)
CLASS = ("model", "priority")

LEADER = Family("slackwater_leader", "gauge", "1 while this coordinator leads")
JOBS = Family(
    "slackwater_jobs", "gauge",
    "jobs by the stage they are in: waiting for a rank, queued behind its task, or running",
    ("stage", "state"),
)  # fmt: skip
READY_WORK = Family(
    "slackwater_ready_work_seconds", "gauge",
    "work of the waiting jobs at the stage they wait for, in seconds of one worker", ("stage",),
)  # fmt: skip
WORK_LEFT = Family(
    "slackwater_work_left_seconds", "gauge",
    "work that all active jobs have left at each stage, in seconds of one worker: scale by this",
    ("stage",),
)  # fmt: skip
WAITING_SLACK = Family(
    "slackwater_waiting_slack_seconds", "gaugehistogram",
    "slack of the waiting jobs as of now; below 0: late", (), SLACKS,
)  # fmt: skip
WORKERS = Family(
    "slackwater_workers", "gauge", "workers by stage: ready, draining or hung", ("stage", "state")
)
POLICY = Family("slackwater_policy_info", "gauge", "1; the policy that leads", ("policy",))
POLICY_FAILURES = Family(
    "slackwater_policy_failures", "gauge",
    "decisions that the present policy got wrong, so that fcfs decided", ("policy",),
)  # fmt: skip

ACCEPTED = Family(
    "slackwater_jobs_accepted_total", "counter", "jobs taken, by what was promised them",
    (*CLASS, "admission"),
)  # fmt: skip
REFUSED = Family(
    "slackwater_pushes_refused_total", "counter", "pushes that became no job", ("error_code",)
)
ENDED = Family(
    "slackwater_jobs_ended_total", "counter",
    "jobs by how they ended and whether the deadline was met or missed (none: canceled)",
    (*CLASS, "status", "deadline"),
)  # fmt: skip
JOB_SECONDS = Family(
    "slackwater_job_seconds", "histogram", "from arrival to result, of jobs that succeeded", CLASS,
    SECONDS,
)  # fmt: skip
JOB_WAIT = Family(
    "slackwater_job_wait_seconds", "histogram",
    "of that, the time in which no worker worked on it", CLASS, SECONDS,
)  # fmt: skip
DEAD = Family(
    "slackwater_dead_letters_total", "counter", "jobs that failed through no fault of theirs",
    ("error_code",),
)  # fmt: skip
DISPATCHED = Family(
    "slackwater_tasks_dispatched_total", "counter", "tasks handed to workers", ("stage", "model")
)
DISPATCH_SLACK = Family(
    "slackwater_dispatch_slack_seconds", "histogram", "slack of jobs as they were handed out",
    ("stage",), SLACKS,
)  # fmt: skip
YIELDS = Family("slackwater_yields_total", "counter", "tasks asked to end at their next step")
DEGRADED = Family("slackwater_jobs_degraded_total", "counter", "jobs cut to fewer steps")
REDELIVERED = Family(
    "slackwater_redelivered_total", "counter",
    "rows handed out that came back undone: worker_lost (it had begun), taken_back (it had not), "
    "handed_back (by a worker that drains), late_report (done, but it counted no more)",
    ("why",),
)  # fmt: skip
ATTEMPTS = Family(
    "slackwater_failed_attempts_total", "counter", "tasks of jobs that failed",
    ("stage", "error_code"),
)  # fmt: skip
REWOUND = Family(
    "slackwater_jobs_rewound_total", "counter", "jobs that began again, since their state was lost"
)
LEASES = Family(
    "slackwater_leases_lost_total", "counter", "leases that ran out: of a worker, or of the leader",
    ("who",),
)  # fmt: skip

FAMILIES = (
    LEADER, JOBS, READY_WORK, WORK_LEFT, WAITING_SLACK, WORKERS, POLICY, POLICY_FAILURES, ACCEPTED,
    REFUSED, ENDED, JOB_SECONDS, JOB_WAIT, DEAD, DISPATCHED, DISPATCH_SLACK, YIELDS, DEGRADED,
    REDELIVERED, ATTEMPTS, REWOUND, LEASES,
)  # fmt: skip


class CoordinatorMetrics:
    """Implements services.coordinator.watching.Watcher."""

    def __init__(self, registry: Registry, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        process.describe(
            registry, "coordinator", lambda: not coordinator.away, lambda: coordinator.outages
        )
        registry.ask(LEADER, lambda: {(): float(coordinator.leads)})
        registry.ask(JOBS, self._jobs)
        registry.ask(READY_WORK, self._ready_work)
        registry.ask(WORK_LEFT, self._work_left)
        registry.ask_spread(WAITING_SLACK, self._waiting_slack)
        registry.ask(WORKERS, self._workers)
        registry.ask(POLICY, lambda: {(c.policy.name,): 1 for c in self._core()})
        registry.ask(
            POLICY_FAILURES, lambda: {(c.policy.name,): c.policy.failures for c in self._core()}
        )
        self._accepted, self._refused = registry.count(ACCEPTED), registry.count(REFUSED)
        self._ended = registry.count(ENDED)
        self._dead = registry.count(DEAD, *sorted(DEAD_LETTERS))
        self._job_s, self._wait_s = registry.spread(JOB_SECONDS), registry.spread(JOB_WAIT)
        self._dispatched = registry.count(DISPATCHED)
        self._dispatch_slack = registry.spread(DISPATCH_SLACK)
        self._yields, self._degraded = registry.count(YIELDS), registry.count(DEGRADED)
        self._redelivered = registry.count(REDELIVERED, *WHYS)
        self._attempts = registry.count(ATTEMPTS)
        self._rewound = registry.count(REWOUND)
        self._fallbacks = registry.count(process.FALLBACKS, "alone")
        self._together: set[int] = set()  # tasks in flight whose rows were to share passes
        self._worker_leases = 0
        registry.ask(LEASES, lambda: {
            ("worker",): self._worker_leases, ("leader",): coordinator.lost_leads,
        })  # fmt: skip

    # -- what happens --------------------------------------------------------------------

    def heard(self, event: ev.Event, core: Core, now: float) -> None:
        match event:
            case ev.Reported():
                self._reported(event)
            case ev.Voided(seq=seq, verdict="void", blamed=blamed):
                self._together.discard(seq)
                flight = core.board.flights.get(seq)
                rows = len(flight.jobs) if flight is not None else 1
                self._redelivered.add(WORKER_LOST if blamed else TAKEN_BACK, by=rows)
                if blamed and flight is not None:
                    self._attempts.add(flight.stage, ErrorCode.WORKER_LOST, by=rows)
            case ev.Left(lost=True):
                self._worker_leases += 1

    def _reported(self, event: ev.Reported) -> None:
        report = event.report
        together = report.seq in self._together
        self._together.discard(report.seq)
        for row, counts in zip(report.rows, event.accepted, strict=False):
            if report.returned:
                self._redelivered.add(HANDED_BACK)
            elif not counts:
                self._redelivered.add(LATE_REPORT)
            elif row.error_code:
                self._attempts.add(report.stage, row.error_code)
            elif together and not row.rows:
                self._fallbacks.add("alone")

    def did(self, effect: ev.Effect, verdict: str, core: Core, now: float) -> None:
        match effect:
            case ev.Dispatch() if verdict == "dispatched":
                self._dispatched.add(effect.stage, effect.model)
                if effect.together and len(effect.rows) > 1:
                    self._together.add(effect.seq)
                    if len(self._together) > 2 * len(core.board.flights) + FEW:
                        self._together &= core.board.flights.keys()  # of another's lead
                for slack_s in effect.slacks_s:
                    self._dispatch_slack.observe(slack_s, effect.stage)
            case ev.Finish() if verdict == "finished":
                self._finished(effect, now)
            case ev.Submit(spec=spec) if verdict.startswith("created"):
                admission = "best_effort" if effect.best_effort else "accepted"
                self._accepted.add(*class_of(spec), admission)
            case ev.Refuse(error_code=code):
                self._refused.add(code)
            case ev.Yield() if verdict == "asked":
                self._yields.add()
            case ev.Shorten():
                self._degraded.add()
            case ev.Rewind() if verdict == "rewound":
                self._rewound.add()

    def _finished(self, effect: ev.Finish, now: float) -> None:
        spec, status = effect.spec, effect.status
        kind = class_of(spec)
        deadline = "missed"
        if status is JobStatus.CANCELED:
            deadline = "none"
        elif status is JobStatus.SUCCEEDED:
            deadline = "met" if now <= (spec.deadline_s or now) else "missed"
            self._job_s.observe(effect.timings.get("total_s", 0.0), *kind)
            self._wait_s.observe(effect.timings.get("wait_s", 0.0), *kind)
        self._ended.add(*kind, str(status), deadline)
        if effect.error_code in DEAD_LETTERS:
            self._dead.add(effect.error_code)

    # -- what is now ---------------------------------------------------------------------
    # On the thread of the scrape: one call copies a dict whole, so nothing moves under it.

    def _core(self) -> list[Core]:
        """The core, if it is the pool's."""
        return [self._coordinator.core] if self._coordinator.leads else []

    def _active(self) -> Iterator[tuple[Job, str]]:
        for core in self._core():
            running = {rank.running.seq for rank in list(core.view.ranks) if rank.running}
            for job in list(core.jobs.values()):
                if not job.ending and job.stage in STAGES:
                    seq = job.seq
                    yield job, WAITING if not seq else RUNNING if seq in running else QUEUED

    def _waiting(self) -> Iterator[Candidate]:
        for core in self._core():
            for job, state in self._active():
                if state == WAITING:
                    try:
                        yield core.policy.waiting(job.spec.id)
                    except KeyError:  # handed out this moment
                        continue

    def _jobs(self) -> dict[Labels, float]:
        found = self._zeros(*((stage, state) for stage in STAGES for state in STATES))
        for job, state in self._active():
            found[job.stage, state] += 1
        return found

    def _ready_work(self) -> dict[Labels, float]:
        found = self._zeros(*((stage,) for stage in STAGES))
        for candidate in self._waiting():
            found[candidate.stage,] += work_of(candidate)[candidate.stage]
        return found

    def _work_left(self) -> dict[Labels, float]:
        found = self._zeros(*((stage,) for stage in STAGES))
        for core in self._core():
            for job, _ in self._active():
                for stage, seconds in work_of(job.candidate(core.costs)).items():
                    found[stage,] += seconds
        return found

    def _waiting_slack(self, spread: Spread) -> None:
        now = self._coordinator.clock()
        for candidate in self._waiting():
            spread.observe(candidate.slack_s(now))

    def _workers(self) -> dict[Labels, float]:
        found = self._zeros(*((stage, how) for stage in STAGES for how in CONDITIONS))
        for core in self._core():
            for worker in list(core.board.workers.values()):
                if worker.stage in STAGES:
                    how = HUNG if worker.hung else DRAINING if worker.draining else READY
                    found[worker.stage, how] += 1
        return found

    def _zeros(self, *labels: Labels) -> dict[Labels, float]:
        return dict.fromkeys(labels, 0.0) if self._coordinator.leads else {}


def class_of(spec: JobSpec) -> Labels:
    priority = "low" if spec.priority < 0 else "high" if spec.priority > 0 else "normal"
    return spec.model, priority


def work_of(candidate: Candidate) -> dict[str, float]:
    """What a job has left at each stage, in seconds; what is behind it is 0."""
    if candidate.stage == DECODE:
        return {ENCODE: 0.0, DENOISE: 0.0, DECODE: candidate.remaining_s}
    encode_s = candidate.task_s if candidate.stage == ENCODE else 0.0
    denoise_s = (candidate.steps - candidate.step) * candidate.step_s
    rest_s = max(0.0, candidate.remaining_s - encode_s - denoise_s)
    return {ENCODE: encode_s, DENOISE: denoise_s, DECODE: rest_s}
