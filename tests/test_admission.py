"""Who may enter, what is said at the door, and what becomes of a job that would be late."""

from __future__ import annotations

from typing import Any

import pytest

from common.job import ErrorCode, JobStatus
from common.stage import DECODE, DENOISE, ENCODE
from services.coordinator import events as ev
from services.coordinator.deciding import degrade
from services.costs.shape import shape_of
from tests.fakes import MANIFEST, a_spec, raw_push
from tests.mind import Mind

# A job of 10 steps takes 0.05 + 1.0 + 0.05 s by the manifest of tests/fakes.py.
ALONE_S = 1.1
SHAPE = shape_of(a_spec().params, MANIFEST)


def crowded(jobs: int, policy: str = "slack", **rules: Any) -> Mind:
    """A pool of one rank a stage with so many jobs of ten steps, each due in ten times the sum."""
    mind = Mind(policy, **rules)
    mind.join(ENCODE, DENOISE, DECODE)
    for stage, seconds in ((ENCODE, 0.05), (DENOISE, 0.1), (DECODE, 0.05)):
        for _ in range(3):  # so that costs are known and not only claimed
            mind.core.costs.observe("noop", stage, SHAPE, seconds)
    for i in range(jobs):
        mind.push(f"before{i}", slo_ms=round(10_000 * jobs * ALONE_S))
    mind.tick()
    return mind


def verdict(mind: Mind, job: str, **fields: Any) -> ev.Submit | ev.Refuse:
    effect = mind.push(job, **fields)[0]
    assert isinstance(effect, ev.Submit | ev.Refuse)
    return effect


def burst(mind: Mind, count: int, prefix: str = "j", **fields: Any) -> list[ev.Submit]:
    """So many pushes of one read: judged before Redis has answered for any. Those accepted."""
    submits = []
    for i in range(count):
        push = raw_push(prompt="x", num_inference_steps=10, id=f"{prefix}{i}", **fields)
        entry = f"{round(1000 * mind.now)}-{i}"
        submits += mind.core.handle(ev.Pushed(entry, push), mind.now)
    return [effect for effect in submits if isinstance(effect, ev.Submit)]


@pytest.mark.parametrize("policy", ["edf", "slack"])
def test_the_eta_counts_what_goes_before(policy: str) -> None:
    """An idle pool takes what the job takes; behind ten others by deadline, ten times that too;
    due before them, next to nothing of it."""
    mind = crowded(0, policy)
    alone = verdict(mind, "first")
    assert isinstance(alone, ev.Submit)
    assert alone.eta_s - mind.now == pytest.approx(ALONE_S)
    mind = crowded(10, policy)
    last = verdict(mind, "last", slo_ms=10_000_000)
    assert isinstance(last, ev.Submit)
    assert last.eta_s - mind.now == pytest.approx(10 * 1.0 + ALONE_S, abs=0.5)
    soon = verdict(mind, "soon", slo_ms=2_000)
    assert isinstance(soon, ev.Submit)
    assert soon.eta_s - mind.now < 2.0
    assert not soon.best_effort


def test_two_ranks_halve_the_wait() -> None:
    mind = Mind()
    mind.join(ENCODE, DENOISE, DENOISE, DECODE)
    for i in range(10):
        mind.push(f"before{i}", slo_ms=100_000)
    mind.tick()
    last = verdict(mind, "last", slo_ms=1_000_000)
    assert isinstance(last, ev.Submit)
    assert last.eta_s - mind.now == pytest.approx(5.0 + ALONE_S, abs=0.6)


@pytest.mark.parametrize("policy", ["slack", "edf", "fcfs", "srtf-doomed-last"])
def test_what_would_be_late_is_best_effort(policy: str) -> None:
    """Accepted, and told so: even alone it would take longer than it has."""
    mind = crowded(3, policy)
    late = verdict(mind, "late", slo_ms=500)
    assert isinstance(late, ev.Submit)
    assert late.best_effort


def test_a_burst_sees_itself() -> None:
    """Pushes of one read are not blind to each other: the later, the later its eta."""
    etas = [submit.eta_s - 1000.0 for submit in burst(crowded(0), 4, slo_ms=60_000)]
    assert etas == pytest.approx([1.1, 2.1, 3.1, 4.1], abs=0.01)


@pytest.mark.parametrize("policy", ["slack", "edf"])
def test_a_burst_gets_no_more_promises_than_there_is_room_for(policy: str) -> None:
    """As many as if they had come one by one: the others are told so, or refused where the pool
    admits only what is feasible."""
    told = burst(crowded(0, policy), 20, slo_ms=3_300)
    assert [submit.best_effort for submit in told] == [False] * 3 + [True] * 17
    assert all(s.best_effort or s.eta_s <= s.spec.deadline_s for s in told)
    assert len(burst(crowded(0, policy, admit="feasible"), 20, slo_ms=3_300)) == 3


def test_a_push_that_redis_refuses_leaves_its_room_to_others() -> None:
    mind = crowded(0, admit="feasible")
    first, *_ = burst(mind, 5, slo_ms=1_300)
    assert not burst(mind, 1, slo_ms=1_300, prefix="beside")
    mind.tell(ev.Submitted(first.spec, "conflict"))
    assert burst(mind, 1, slo_ms=1_300, prefix="later")


def test_nothing_of_a_burst_is_run_before_redis_has_it() -> None:
    mind = crowded(0)
    submits = burst(mind, 2, slo_ms=60_000)
    assert mind.tick() == []
    for submit in submits:
        mind.tell(ev.Submitted(submit.spec, "created"))
    assert mind.finish_all()


@pytest.mark.parametrize("rules", [{"max_jobs": 1}, {"admit": "feasible"}])
def test_the_same_push_again_is_the_same_job_however_full_it_is(rules: dict[str, Any]) -> None:
    """The script answers that it is there already; another push is refused."""
    mind = crowded(0, **rules)
    fields = {"prompt": "x", "num_inference_steps": 10, "slo_ms": 1_300}
    for number in range(3):  # the first two of one read
        push = raw_push(id="a", **fields)
        (effect,) = mind.core.handle(ev.Pushed(f"{1_000_000}-{number}", push), mind.now)
        assert isinstance(effect, ev.Submit)
        if number:
            mind.tell(ev.Submitted(effect.spec, "same" if number == 2 else "created"))
    assert list(mind.core.jobs) == ["a"]
    assert isinstance(verdict(mind, "b", slo_ms=1_300), ev.Refuse)
    mind.finish_all()


def two_models(policy: str, **rules: Any) -> Mind:
    """Four ranks a stage have model a and 40 jobs of 1 s for it; one has model b and is idle."""
    mind = Mind(policy, **rules)
    mind.tell(ev.ManifestsRead({"a": MANIFEST, "b": MANIFEST}))
    for name in ("a-0", "a-1", "a-2", "a-3", "b-0"):
        for stage in (ENCODE, DENOISE, DECODE):
            mind.tell(ev.Joined(ev.WorkerInfo(f"{stage}-{name}", stage, (name[0],), "here")))
    for model in ("a", "b"):
        for stage, seconds in ((ENCODE, 0.05), (DENOISE, 0.1), (DECODE, 0.05)):
            for _ in range(3):
                mind.core.costs.observe(model, stage, SHAPE, seconds)
    for i in range(40):
        mind.push(f"a{i}", model="a", slo_ms=20_000)
    return mind


@pytest.mark.parametrize("policy", ["edf", "slack"])
def test_work_of_another_model_is_not_charged_to_ranks_that_never_do_it(policy: str) -> None:
    mind = two_models(policy)
    own = verdict(mind, "b", model="b", slo_ms=25_000, on_late="drop")
    assert isinstance(own, ev.Submit)
    assert own.eta_s - mind.now == pytest.approx(ALONE_S)
    assert not own.best_effort
    other = verdict(mind, "a", model="a", slo_ms=25_000)
    assert isinstance(other, ev.Submit)
    assert other.eta_s - mind.now == pytest.approx(10.0 + ALONE_S, abs=0.1)
    (told,) = [e for e in mind.tick(1.0) if isinstance(e, ev.Refresh)]
    etas = {s.job: s.eta_s - mind.now for s in told.standings}
    assert etas["b"] < 2.0
    assert max(etas.values()) > 9.0


def test_a_backlog_is_one_of_the_ranks_that_have_it() -> None:
    mind = two_models("slack", max_backlog_s=9.0)
    assert len(mind.core.jobs) == 37  # 9.0 s of it on each of four ranks, and one more
    assert isinstance(verdict(mind, "a", model="a"), ev.Refuse)
    assert isinstance(verdict(mind, "b", model="b"), ev.Submit)


def test_models_that_share_ranks_share_their_time() -> None:
    """Also where one of them has ranks besides."""
    mind = crowded(0)
    mind.tell(ev.ManifestsRead({"noop": MANIFEST, "other": MANIFEST}))
    mind.tell(ev.Joined(ev.WorkerInfo("both", DENOISE, ("noop", "other"), "here")))
    for i in range(10):
        mind.push(f"j{i}", model="noop", slo_ms=100_000)
    last = verdict(mind, "last", model="other", slo_ms=1_000_000)
    assert isinstance(last, ev.Submit)
    assert last.eta_s - mind.now == pytest.approx(5.0 + ALONE_S, abs=0.1)


@pytest.mark.parametrize("policy", ["slack", "edf"])
def test_the_eta_counts_all_jobs_of_a_task_that_runs(policy: str) -> None:
    """Three that were handed over as one are three jobs' work, not one's."""
    mind = crowded(0, policy)
    mind.core.view.pack_s = 1.0
    for i in range(3):
        mind.push(f"j{i}", slo_ms=60_000)
    mind.tick()
    assert len(mind.last(ev.Dispatch).rows) == 3
    last = verdict(mind, "last", slo_ms=600_000)
    assert isinstance(last, ev.Submit)
    assert last.eta_s - mind.now == pytest.approx(3 * 1.0 + ALONE_S, abs=0.1)


def test_where_the_kept_leave_no_room_it_is_not_told_of_a_lateness_of_nothing() -> None:
    """Its eta, which knows of no switches, would be in time; with them there is no room."""
    mind = crowded(0, admit="feasible")
    mind.core.view.switch_s = 0.2
    mind.push("kept", slo_ms=1_500)
    refused = verdict(mind, "beside", slo_ms=2_200)
    assert isinstance(refused, ev.Refuse)
    assert "0.0 s late" not in refused.error
    assert "promised" in refused.error
    assert refused.retry_after_s == pytest.approx(1.0, abs=0.1)  # when the kept one is done


@pytest.mark.parametrize("rule", [{"admit": "feasible"}, {"on_late": "drop"}])
def test_who_wants_it_in_time_or_not_at_all_is_told_at_the_door(rule: dict[str, str]) -> None:
    """The pool that admits only what is feasible, and the job that would be dropped when late."""
    fields = dict(rule)
    rules = {"admit": fields.pop("admit")} if "admit" in fields else {}
    mind = crowded(8, "edf", **rules)
    never = verdict(mind, "never", slo_ms=500, **fields)
    assert isinstance(never, ev.Refuse)
    assert never.error_code == ErrorCode.DEADLINE_UNREACHABLE
    assert never.retry_after_s is None  # waiting would not help
    assert "takes 1100 ms alone" in never.error
    # Eight jobs are due before it.
    now_not = verdict(mind, "not-now", slo_ms=round(88_000 * ALONE_S), **fields)
    assert isinstance(now_not, ev.Submit)
    mind = crowded(8, "fcfs", **rules)
    later = verdict(mind, "later", slo_ms=4_000, **fields)
    assert isinstance(later, ev.Refuse)
    assert later.retry_after_s == pytest.approx(8 * 1.0 + ALONE_S - 4.0, abs=0.7)
    assert later.ids == (later.entry,)  # the same push may succeed later


def test_a_backlog_can_be_bounded_in_time() -> None:
    mind = Mind(max_backlog_s=3.0)
    mind.join(ENCODE, DENOISE, DECODE)
    for i in range(4):
        assert isinstance(verdict(mind, f"j{i}", slo_ms=60_000), ev.Submit)
    full = verdict(mind, "one-more", slo_ms=60_000)
    assert isinstance(full, ev.Refuse)
    assert full.error_code == ErrorCode.QUEUE_FULL
    assert full.retry_after_s
    mind.join(DENOISE)  # twice as fast
    assert isinstance(verdict(mind, "now", slo_ms=60_000), ev.Submit)


def test_nobody_is_turned_away_for_a_guess() -> None:
    """Where the costs are a manifest's claim, the eta carries a margin and the door stays open."""
    mind = Mind("edf", admit="feasible")
    mind.join(ENCODE, DENOISE, DECODE)
    late = verdict(mind, "late", slo_ms=500)
    assert isinstance(late, ev.Submit)
    assert late.best_effort
    assert late.eta_margin_s > 0.5
    known = verdict(crowded(0, "edf"), "known")
    assert isinstance(known, ev.Submit)
    assert known.eta_margin_s == 0


# -- degrade -----------------------------------------------------------------------------------


def degrading(job: str, mind: Mind, slo_ms: int, fewest: int) -> None:
    mind.push(job, slo_ms=slo_ms, on_late="degrade", min_inference_steps=fewest)


@pytest.mark.parametrize("policy", ["slack", "edf-doomed-last"])
def test_a_job_that_cannot_make_it_does_fewer_steps(policy: str) -> None:
    """As many as it has the time for, decided before step 0, and the result says so."""
    mind = Mind(policy)
    degrading("a", mind, slo_ms=1_500, fewest=4)
    mind.now += 0.8  # 0.7 s are left; encode and decode take 0.1
    mind.join(ENCODE, DENOISE, DECODE)
    mind.tick()
    (short,) = [e for e in mind.log if isinstance(e, ev.Shorten)]
    assert short.steps == 6
    job = mind.core.jobs["a"]
    assert (job.steps, job.spec.params["num_inference_steps"]) == (6, 6)
    assert not job.doomed
    assert any("6 instead of 10" in note for note in job.spec.notes)
    mind.finish_all()
    stops = [row.stop for e in mind.log if isinstance(e, ev.Dispatch) for row in e.rows]
    assert max(stops) == 6


def test_not_below_its_floor_and_not_after_step_0() -> None:
    mind = Mind("edf-doomed-last")
    degrading("floor", mind, slo_ms=1_500, fewest=8)
    mind.now += 0.8
    mind.join(ENCODE, DENOISE, DECODE)
    mind.tick()
    assert mind.last(ev.Shorten) is None
    assert mind.core.jobs["floor"].doomed
    assert mind.core.jobs["floor"].steps == 10

    mind = Mind("edf-doomed-last")
    mind.join(ENCODE, DENOISE, DECODE)
    mind.run_to_denoise("begun", slo_ms=1_200, on_late="degrade", min_inference_steps=1)
    mind.tick()
    mind.report(mind.last(ev.Dispatch))  # three steps
    mind.tick(0.9)
    assert mind.last(ev.Shorten) is None
    assert mind.core.jobs["begun"].steps == 10


def test_one_that_is_cut_twice_has_one_note_of_what_was_asked_for() -> None:
    mind = crowded(0, "edf-doomed-last")
    mind.push("a", slo_ms=1_500, on_late="degrade", min_inference_steps=2)
    job = mind.core.jobs["a"]
    for steps in (8, 6):
        degrade(mind.core, job, steps)
    assert [note for note in job.spec.notes if "instead of" in note] == [
        "num_inference_steps: 6 instead of 10, since on_late is degrade"
    ]
    assert job.steps == 6


def test_expired_is_for_those_that_were_accepted() -> None:
    """A job that fitted when it came, and does not any more, ends as expired."""
    mind = crowded(0)
    mind.push("a", slo_ms=1_500, on_late="drop")
    mind.tick(1.0)
    (end,) = [e for e in mind.log if isinstance(e, ev.Finish)]
    assert end.status is JobStatus.EXPIRED


def test_one_is_run_where_nobody_knows_what_it_takes() -> None:
    """The claim says that it would be late, and may be wrong by more than that. If none such ever
    ran, nobody would learn."""
    mind = Mind()
    mind.join(ENCODE, DENOISE, DECODE)
    mind.push("a", slo_ms=1_000, on_late="drop")
    for _ in range(6):  # it turns out to take less
        for effect in mind.tick(0.05):
            if isinstance(effect, ev.Dispatch):
                mind.report(effect)
    assert mind.last(ev.Finish).status is JobStatus.SUCCEEDED


def test_one_that_is_late_by_more_than_a_claim_may_be_wrong_is_dropped_while_it_waits() -> None:
    mind = Mind()
    mind.push("a", slo_ms=1_000, on_late="drop")
    mind.tick(0.5)  # nobody is there to run it
    assert mind.last(ev.Finish) is None
    mind.tick(5.0)
    assert mind.last(ev.Finish).status is JobStatus.EXPIRED


def test_slack_degrades_to_what_fits_beside_the_others() -> None:
    """Jointly, not alone: one job is due right after another, and gives up what overlaps."""
    mind = crowded(0)
    mind.push("first", slo_ms=1_300)
    degrading("second", mind, slo_ms=1_900, fewest=2)
    mind.tick()
    (short,) = [e for e in mind.log if isinstance(e, ev.Shorten)]
    assert 6 <= short.steps <= 8
    mind.finish_all()
    assert mind.core.policy.failures == 0
    ends = [e for e in mind.log if isinstance(e, ev.Finish)]
    assert [e.status for e in ends] == [JobStatus.SUCCEEDED] * 2
