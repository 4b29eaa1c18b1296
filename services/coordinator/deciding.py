"""From what the policy decides to what is to be done about it. Pure."""

from __future__ import annotations

import dataclasses
import logging
import re
from math import inf
from typing import TYPE_CHECKING

from common.job import ErrorCode, JobStatus
from common.stage import DENOISE
from services.coordinator import events as ev
from services.coordinator.standing import standings
from services.coordinator.state import Flight, Job
from services.policies.base import (
    Candidate,
    Decision,
    Degrade,
    Doomed,
    Preempt,
    Recall,
    Run,
    cost_s,
)

if TYPE_CHECKING:
    from services.coordinator.core import Core, Effects

log = logging.getLogger("slackwater.coordinator")

# A policy that names ended jobs again and again must not keep the core for ever.
MOST_PLANS = 8
# What `degrade` notes of a job, and reads again where it cuts the job once more.
CUT = re.compile(r"num_inference_steps: \d+ instead of (\d+), since on_late is degrade")


def decide(core: Core, now: float) -> Effects:
    """Everything that can be done now."""
    effects: Effects = []
    for _ in range(MOST_PLANS):
        if not _plan(core, effects, now):
            break
    if now - core.refreshed_s >= core.refresh_s and core.jobs:
        core.refreshed_s = now
        effects += _judge_again(core, now)
        effects.append(ev.Refresh(standings(core, now)))
    return effects


def _plan(core: Core, effects: Effects, now: float) -> bool:
    """Carry out one plan; True if another may find more to do: a rank got nothing because its
    job was dropped in this very plan, or a denoiser took jobs that kept others from being
    encoded ahead."""
    try:
        return _carry_out(core, core.policy.plan(core.view, now), effects, now)
    except Exception as error:
        # It was checked, and yet: no answer of a policy may take the coordinator along.
        log.exception("a decision of policy %s could not be carried out", core.policy.name)
        wrong = f"a decision could not be carried out: {error!r}"
        return _carry_out(core, core.policy.instead(core.view, now, wrong), effects, now)


def _carry_out(core: Core, decisions: list[Decision], effects: Effects, now: float) -> bool:
    again = False
    flights = core.board.flights
    for decision in decisions:
        match decision:
            case Run(rank=name):
                dispatched = _run(core, decision, now)
                frees = core.policy.to_encode and core.board.ranks[name].stage == DENOISE
                again = again or not dispatched or bool(frees)
                effects += dispatched
            case Preempt(seq=seq):
                flight = flights[seq]
                core.board.ask_yield(flight, now)
                effects.append(ev.Yield(seq, flight.members))
            case Recall(seq=seq):
                flight = flights[seq]
                if not flight.voiding and not flight.started:
                    flight.voiding = True
                    effects.append(ev.Void(seq, flight.members, flight.jobs, forced=False))
            case Degrade(job=name, steps=steps):
                effects += degrade(core, core.jobs[name], steps)
            case Doomed(job=name):
                effects += _doomed(core, core.jobs[name], now)
                again = again or not core.jobs[name].doomed
    return again


def _run(core: Core, decision: Run, now: float) -> Effects:
    rank = core.board.ranks[decision.rank]
    # A job found doomed in this very plan may have been dropped a line before.
    rows = [(name, stop) for name, stop in decision.rows if not core.jobs[name].ending]
    if not rows:
        return []
    jobs = [core.jobs[name] for name, _ in rows]
    # One that was degraded a line before has fewer steps than the policy may have thought.
    stops = [min(stop, job.steps) for (_, stop), job in zip(rows, jobs, strict=True)]
    candidates = [core.policy.waiting(name) for name, _ in rows]
    pairs = list(zip(candidates, stops, strict=True))
    if decision.step_s and rank.stage != DENOISE:
        expected_s = decision.step_s
    elif decision.step_s:
        expected_s = decision.step_s * max(stop - c.step for c, stop in pairs)
    else:
        expected_s = sum(cost_s(c, stop) for c, stop in pairs)
    given = tuple(
        job.row(stop, _latest_s(c, stop, now)) for job, (c, stop) in zip(jobs, pairs, strict=True)
    )
    # Nothing of the policy's is reckoned with below: a task is handed over whole or not at all.
    core.seq += 1
    for job in jobs:
        core.policy.remove(job.spec.id)
        job.seq = core.seq
    flight = Flight(
        seq=core.seq,
        stage=rank.stage,
        members=(rank.name,),
        jobs=tuple(job.spec.id for job in jobs),
        candidate=candidates[0],
        stop=stops[0],
        goes_on=rank.stage == DENOISE and any(stop < c.steps for c, stop in pairs),
        expected_s=expected_s,
        begins_s=rank.free_at(now),
        ends_s=rank.free_at(now) + expected_s,
        company_s=sum((c.steps - c.step) * c.step_s for c in candidates[1:]),
        step_s=decision.step_s,
        silent={rank.name},
    )
    core.board.launch(flight)
    return [
        ev.Dispatch(
            seq=flight.seq,
            stage=flight.stage,
            model=jobs[0].spec.model,
            members=flight.members,
            rows=given,
            expected_s=expected_s,
            together=bool(decision.step_s),
            slacks_s=tuple(candidate.slack_s(now) for candidate in candidates),
        )
    ]


def _latest_s(candidate: Candidate, stop: int, now: float) -> float:
    """When what is left after this task must begin, to be in time; never for one that is late."""
    if candidate.slack_s(now) < 0:
        return inf
    return now + candidate.slack_s(now) + cost_s(candidate, stop)


def _doomed(core: Core, job: Job, now: float) -> Effects:
    """It can no longer make its deadline as it is: `on_late` says what becomes of it."""
    if job.ending:
        return []
    steps = steps_in_time(core, job, now)
    if steps is not None:
        return degrade(core, job, steps)
    if job.spec.on_late == "drop" and _may_be_wrong(core, job, now):
        core.doubted.add(job.spec.id)
        return []
    job.doomed = True
    if job.spec.on_late != "drop":
        return []
    what = "it could no longer make its deadline, and on_late is drop"
    return core.end(job, JobStatus.EXPIRED, now, ErrorCode.DEADLINE_MISSED, what)


def _is_late(core: Core, job: Job, now: float) -> bool:
    candidate = job.candidate(core.costs)
    return candidate.slack_s(now) < -core.view.error * candidate.remaining_s


def _may_be_wrong(core: Core, job: Job, now: float) -> bool:
    """Whether it is late only by an estimate of what was never measured, and by no more than that
    may be off. If no such job ever ran, nobody would learn what one takes."""
    left = job.left(core.costs)
    return not left.known and now + left.seconds - job.deadline_s <= left.margin_s


def _judge_again(core: Core, now: float) -> Effects:
    """Of those that were found late by an estimate that may be wrong: it is better by now, or they
    are later than it can be wrong by. The policy said so once and does not repeat it."""
    effects: Effects = []
    for name in sorted(core.doubted):
        job = core.jobs.get(name)
        if job is None or job.ending:
            core.doubted.discard(name)
        elif not job.seq and _is_late(core, job, now) and not _may_be_wrong(core, job, now):
            core.doubted.discard(name)
            effects += _doomed(core, job, now)
    return effects


def steps_in_time(core: Core, job: Job, now: float) -> int | None:
    """How many steps a job that may be degraded could still do in time, if it ran at once;
    None where it may not be, or not by so much."""
    candidate = job.candidate(core.costs)
    if not candidate.fewest or candidate.step_s <= 0:
        return None
    rest_s = candidate.remaining_s - candidate.steps * candidate.step_s
    steps = int((candidate.deadline_s - now - rest_s) / candidate.step_s)
    return steps if candidate.fewest <= steps < candidate.steps else None


def degrade(core: Core, job: Job, steps: int) -> Effects:
    """Have a job that has done no step yet do `steps` in all. One that has been cut before keeps
    one note, of what was asked for."""
    asked, notes = job.steps, []
    for note in job.spec.notes:
        cut = CUT.fullmatch(note)
        if cut is None:
            notes.append(note)
        else:
            asked = int(cut[1])
    notes.append(f"num_inference_steps: {steps} instead of {asked}, since on_late is degrade")
    params = {**job.spec.params, "num_inference_steps": steps}
    job.respecify(dataclasses.replace(job.spec, params=params, notes=tuple(notes)))
    core.policy.remove(job.spec.id)
    core.ready(job)
    return [ev.Shorten(job.spec, steps)]
