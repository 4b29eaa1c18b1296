"""The event loop: the real core under a virtual clock, with simulated workers and a Redis that
agrees to everything.

Everything that happens at one moment is told to the core before it decides, as the service does
with what it reads in one go. The same trace, seed and settings give the same run.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.job import JobSpec
from common.messages import Report, ReportRow
from common.params import PoolDefaults
from common.stage import DECODE, DENOISE, ENCODE
from services.coordinator import events as ev
from services.coordinator.admission import Admission
from services.coordinator.core import Core
from services.coordinator.sharing import rows_of, shapes_of
from services.costs.model import CostModel, Shape
from services.policies import make_policy
from services.policies.base import View
from services.simulator.calibrations import Calibration, KnownCosts
from services.simulator.outcome import Chunk, JobOutcome, Outcome
from services.simulator.pool import AFTER, Held, Overheads, Part, Simulated, Workers
from services.simulator.traces import TraceJob

MODEL = "simulated"
# One token a pixel and one row of them: a job's shape is then its trace's `tokens`.
MANIFEST = {"token_px": 1, "cfg": {"scale": "guidance_scale"}}
TICK = ev.Tick()


class Stalled(RuntimeError):
    """Jobs wait and nothing will ever happen: a policy holds work back."""


@dataclass(slots=True)
class Setting:
    """The pool that is simulated. `costs` is the truth, `told` what the core believes."""

    policy: str = "slack"
    costs: Calibration = field(kw_only=True)
    told: CostModel | None = None
    denoise: int = 1
    encode: int = 1
    decode: int = 1
    overheads: Overheads = field(default_factory=Overheads)
    chunk_s: float = 0.6
    lead_s: float = -math.inf  # never queue a task behind a running one
    pack_s: float = 0.0
    switch_s: float = 0.005
    error: float = 0.05
    seed: int = 0
    timeline: bool = False
    batch: bool = False  # jobs are not exact: those of a size may share forward passes


class Simulation:
    def __init__(self, trace: Sequence[TraceJob], setting: Setting) -> None:
        self.setting = setting
        self.core = core_of(setting)
        self.outcome = Outcome(setting.policy, setting.denoise)
        self.outcome.jobs = {job.id: JobOutcome(job) for job in trace}
        self._trace = sorted(trace, key=lambda job: (job.arrival_s, job.id))
        self._cost: dict[tuple[str, int, int, int], float] = {}
        self._shapes = {
            job.id: shapes_of(Shape(job.tokens, job.n, job.forwards), merges=setting.batch)
            for job in trace
        }
        names = {
            f"{stage}-{i}": stage
            for stage, count in (
                (ENCODE, setting.encode),
                (DENOISE, setting.denoise),
                (DECODE, setting.decode),
            )
            for i in range(count)
        }
        self.workers = Workers(
            names,
            self._cost_s,
            lambda job: self.outcome.jobs[job].steps,
            setting.overheads,
            random.Random(setting.seed),
            self._started,
        )
        self._due: list[tuple[float, int, Held, int]] = []  # ends of tasks
        self._heard: list[tuple[float, int, ev.Reported]] = []  # reports on their way
        self._count = 0
        shares: dict[str, Any] = {"model": MODEL, "batch": {"same": ["width"]}}
        manifest = {**MANIFEST, **(shares if setting.batch else {})}
        self.core.handle(ev.ManifestsRead({MODEL: manifest}), 0.0)
        for name, stage in names.items():
            self.core.handle(ev.Joined(ev.WorkerInfo(name, stage, (MODEL,), "simulated")), 0.0)

    # -- the loop ------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Until every job has ended. Raises Stalled if one never would."""
        begun = time.perf_counter()
        coming = iter(self._trace)
        arrival = next(coming, None)
        submit_s = self.setting.overheads.submit_s
        core, due, heard = self.core, self._due, self._heard
        while True:
            now = math.inf if arrival is None else arrival.arrival_s + submit_s
            if due and due[0][0] < now:
                now = due[0][0]
            if heard and heard[0][0] < now:
                now = heard[0][0]
            if now == math.inf and not core.jobs:
                break
            if core.wake_at is not None and core.wake_at < now:
                now = core.wake_at
            if now == math.inf:
                raise Stalled(f"{len(core.jobs)} jobs wait for ever, {next(iter(core.jobs))} first")
            effects: list[ev.Effect] = []
            while due and due[0][0] <= now:
                _, _, held, version = heapq.heappop(due)
                if held.version == version:
                    self._ended(held, now)
            while heard and heard[0][0] <= now:
                effects += core.handle(heapq.heappop(heard)[2], now)
            while arrival is not None and arrival.arrival_s + submit_s <= now:
                spec = spec_of(arrival, exact=not self.setting.batch)
                effects += core.handle(ev.Submitted(spec, "created"), now)
                self.outcome.jobs[arrival.id].last_seen_s = now
                arrival = next(coming, None)
            effects += core.handle(TICK, now)
            self.outcome.decisions += 1
            self._carry_out(effects, now)
            self.outcome.ended_s = now
        self.outcome.wall_s = time.perf_counter() - begun
        self.outcome.failures = core.policy.failures
        self.outcome.last_failure = core.policy.last_failure
        return self.outcome

    def _carry_out(self, effects: list[ev.Effect], now: float) -> None:
        """What Redis and the workers make of `effects`, and of those that follow."""
        core = self.core
        while effects:
            following: list[ev.Effect] = []
            again = False
            for effect in effects:
                if isinstance(effect, ev.Dispatch):
                    held = self.workers.accept(effect, now)
                    if held is not None:
                        self._alarm(held)
                    following += core.handle(ev.Dispatched(effect.seq, "dispatched"), now)
                elif isinstance(effect, ev.Finish):
                    self._finished(effect, now)
                    following += core.handle(ev.Finished(effect.spec.id, "finished"), now)
                elif isinstance(effect, ev.Shorten):
                    self.outcome.jobs[effect.spec.id].steps = effect.steps
                elif isinstance(effect, ev.Yield):
                    held = self.workers.ask_yield(effect.seq, now)
                    if held is not None:
                        self._alarm(held)
                elif isinstance(effect, ev.Void):
                    verdict = "void" if self.workers.take_back(effect.seq) else "late"
                    following += core.handle(ev.Voided(effect.seq, verdict, False), now)
                    again = True
            if again:
                following += core.handle(TICK, now)
            effects = following

    # -- what workers do -----------------------------------------------------------------

    def _alarm(self, held: Held) -> None:
        self._count += 1
        heapq.heappush(self._due, (held.ends_s, self._count, held, held.version))

    def _ended(self, held: Held, now: float) -> None:
        name, following = self.workers.release(held, now)
        if following is not None:
            self._alarm(following)
        rows, accepted = [], []
        together = [part.job for part in held.parts] if held.dispatch.together else []
        shared_rows = self._rows(held.stage, together)
        for part, row in zip(held.parts, held.dispatch.rows, strict=True):
            record = self.outcome.jobs[part.job]
            steps = part.stop - part.start
            seconds = part.end_s - part.begin_s
            if held.stage == DENOISE:
                seconds = steps * part.step_s
                record.work_s += seconds / max(1, len(together))
                record.steps_run += steps
                done = part.stop >= part.steps
                step, after = part.stop, DECODE if done else DENOISE
            else:
                seconds /= max(1, len(together))  # its share, as the stages report it
                record.work_s += seconds
                step, after = part.stop, AFTER[held.stage]
            record.chunks += 1
            record.last_seen_s = now
            rows.append(
                ReportRow(
                    part.job,
                    step,
                    after,
                    seconds=seconds,
                    step_s=part.step_s if steps else 0.0,
                    rows=shared_rows if held.stage == DENOISE else 0,
                )
            )
            accepted.append(record.status == "waiting")
            if self.setting.timeline and (steps or held.stage != DENOISE):
                self._note(name, held, part, row.stop)
        if held.stage == DENOISE:
            self.outcome.busy_s += now - held.begun_s
        report = Report(held.seq, name, held.stage, tuple(rows), now - held.begun_s)
        self._count += 1
        at = now + self.setting.overheads.report_s
        heapq.heappush(self._heard, (at, self._count, ev.Reported(report, tuple(accepted))))

    def _started(self, worker: Simulated, held: Held, switch: bool) -> None:
        for part in held.parts:
            record = self.outcome.jobs[part.job]
            if record.started_s is None:
                record.started_s = held.begun_s
            waited = part.begin_s - record.last_seen_s
            record.longest_wait_s = max(record.longest_wait_s, waited)
        if switch:
            self.outcome.jobs[held.parts[0].job].switches += 1

    def _finished(self, effect: ev.Finish, now: float) -> None:
        record = self.outcome.jobs[effect.spec.id]
        record.status = str(effect.status)
        record.finished_s = now

    def _note(self, rank: str, held: Held, part: Part, planned: int) -> None:
        spec = self.outcome.jobs[part.job].job
        left = self._cost_s(DECODE, part.job)
        if held.stage != DECODE:
            steps = self.outcome.jobs[part.job].steps - part.start
            left += steps * self._cost_s(DENOISE, part.job)
        if held.stage == ENCODE:
            left += self._cost_s(ENCODE, part.job)
        self.outcome.chunks.append(
            Chunk(
                rank, held.stage, part.job, part.start, part.stop, part.begin_s, part.end_s,
                spec.deadline_s - part.begin_s - left, planned, held.yielding,
            )
        )  # fmt: skip

    def _rows(self, stage: str, together: Sequence[str]) -> int:
        """Of a pass that these jobs share."""
        return sum(rows_of(self._shapes[job][stage]) for job in together)

    def _cost_s(self, stage: str, job: str, together: Sequence[str] = ()) -> float:
        """Of its task or step by itself, or of one that it shares with the others `together`."""
        shape = self._shapes[job][stage]
        n, forwards = shape.n, shape.forwards
        if together:
            n, forwards = self._rows(stage, together), 1
        key = (stage, shape.tokens, n, forwards)
        found = self._cost.get(key)
        if found is None:
            found = self._cost[key] = self.setting.costs.seconds(*key)
        return found


def core_of(setting: Setting) -> Core:
    """The coordinator's core as a pool with this setting would have it."""
    view = View(
        ranks=[],
        lead_s=setting.lead_s,
        chunk_s=setting.chunk_s,
        pack_s=setting.pack_s,
        switch_s=setting.switch_s,
        error=setting.error,
    )
    costs = KnownCosts(setting.costs) if setting.told is None else setting.told
    admission = Admission(PoolDefaults(), max_jobs=10**9)
    core = Core(make_policy(setting.policy), costs, admission, view)
    core.refresh_s = math.inf  # nobody reads standings here
    if setting.lead_s == -math.inf:
        # Nothing is handed over ahead of time, so that there is nothing to wake up for.
        core.board.next_free = lambda now: None  # type: ignore[method-assign]
    return core


def spec_of(job: TraceJob, exact: bool = True) -> JobSpec:
    return JobSpec(
        id=job.id,
        entry=job.id,
        content="",
        model=MODEL,
        params={
            "num_inference_steps": job.steps,
            "width": job.tokens,
            "height": 1,
            "n": job.n,
            "guidance_scale": float(job.forwards),  # above 1: guided
        },
        arrival_s=job.arrival_s,
        priority=job.priority,
        deadline_s=job.deadline_s,
        on_late=job.on_late,
        min_steps=job.min_steps,
        exact=exact,
    )


def simulate(trace: Sequence[TraceJob], setting: Setting) -> Outcome:
    """Run `trace` through a pool as `setting` describes it."""
    return Simulation(trace, setting).run()
