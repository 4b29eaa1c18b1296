"""The pure core: events and time in, effects out; what Redis refuses comes back as an event."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from common.job import ErrorCode, JobSpec, JobStatus
from common.messages import Report, ReportRow, pack
from common.stage import DECODE, DENOISE, ENCODE
from services.coordinator import events as ev
from services.coordinator.core import MAX_ATTEMPTS
from services.coordinator.state import FINISH
from services.policies.base import Decision, Recall, Run, View
from tests.fakes import a_spec, raw_push
from tests.mind import NOW, Mind, Stranger, kinds


def test_a_jobs_way() -> None:
    """Encode, chunks of about chunk_s, decode, finish, one task at a time."""
    mind = Mind()
    mind.join(ENCODE, DENOISE, DECODE)
    mind.push("a")
    way = []
    while mind.core.jobs:
        for effect in mind.tick(1.0):
            if isinstance(effect, ev.Dispatch):
                way.append((effect.stage, effect.rows[0].start, effect.rows[0].stop))
                mind.report(effect)
    chunks = [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert way == [(ENCODE, 0, 0), *((DENOISE, *chunk) for chunk in chunks), (DECODE, 0, 0)]
    finish = mind.last(ev.Finish)
    assert finish.status is JobStatus.SUCCEEDED
    assert len(finish.outputs) == 1
    assert finish.timings["chunks"] == 6


def test_a_result_says_how_many_forwards_a_step_cache_left_out() -> None:
    """As the last of its chunks had it; neither its encode nor its decode says anything of it."""
    mind = Mind()
    mind.join(ENCODE, DENOISE, DECODE)
    mind.push("a", num_inference_steps=4)
    for stage, step, after, skipped in (
        (ENCODE, 0, DENOISE, 1), (DENOISE, 4, DECODE, 3), (DECODE, 4, FINISH, 0),
    ):  # fmt: skip
        mind.tick()
        flight = mind.last(ev.Dispatch)
        row = ReportRow("a", step, after, seconds=0.1, skipped=skipped)
        mind.tell(ev.Reported(Report(flight.seq, flight.members[0], stage, (row,), 0.1), (True,)))
    assert mind.last(ev.Finish).timings["forwards_skipped"] == 3


def test_the_same_events_lead_to_the_same_effects() -> None:
    """The core has no clock and no dice but the seed of a push without one."""

    def story() -> list[ev.Effect]:
        mind = Mind()
        mind.join(ENCODE, DENOISE, DENOISE, DECODE)
        for i in range(6):
            mind.push(f"j{i}", seed=1, slo_ms=2000 + 500 * (i % 3))
            for effect in mind.tick(0.1):
                if isinstance(effect, ev.Dispatch):
                    mind.report(effect)
        mind.tell(ev.Left("denoise-1", lost=True))
        mind.tick(0.3)
        return mind.log

    assert story() == story()


def test_a_task_is_handed_over_only_shortly_before_its_rank_is_free() -> None:
    """Late binding: one task runs and at most one waits, whatever the queue."""
    mind = Mind(ahead=9)
    mind.join(ENCODE, DENOISE)
    for i in range(4):
        mind.run_to_denoise(f"j{i}", num_inference_steps=3)  # one chunk
    denoising = [e for e in mind.log if isinstance(e, ev.Dispatch) and e.stage == DENOISE]
    assert len(denoising) == 1
    mind.tick()
    wake = mind.core.wake_at
    assert wake is not None
    assert wake == pytest.approx(NOW + 0.3 - 0.05)
    mind.now = wake
    assert "Dispatch" in kinds(mind.tick())
    assert "Dispatch" not in kinds(mind.tick(60.0))
    rank = mind.core.board.ranks["denoise-1"]
    assert rank.running
    assert rank.queued


def test_an_urgent_job_makes_a_running_chunk_yield() -> None:
    """Its own task is queued behind it at once."""
    mind = Mind()
    mind.core.view.chunk_s = 60.0
    mind.join(ENCODE, DENOISE)
    mind.run_to_denoise("long", slo_ms=10**6, num_inference_steps=500)
    mind.tick()
    long = mind.last(ev.Dispatch)
    mind.run_to_denoise("urgent", slo_ms=1500)
    effects = mind.tick()
    assert ev.Yield(long.seq, long.members) in mind.log
    assert effects or mind.last(ev.Dispatch).rows[0].job == "urgent"
    mind.report(long, steps=1)
    assert mind.core.board.ranks["denoise-1"].running.candidate.job == "urgent"  # type: ignore[union-attr]
    assert mind.core.jobs["long"].step == 1


def test_on_late_drop_ends_a_doomed_job_as_expired() -> None:
    """Of two jobs that can no longer make it, the one that wanted to be dropped is, and once."""
    mind = Mind()
    mind.push("drop", slo_ms=2000, on_late="drop")
    mind.push("run", slo_ms=2000)
    mind.join(ENCODE, DENOISE, DECODE)  # too late for both, however wrong the claimed costs are
    mind.tick(4.0)
    mind.tick(1.0)
    ends = [e for e in mind.log if isinstance(e, ev.Finish)]
    assert [(e.spec.id, e.status) for e in ends] == [("drop", JobStatus.EXPIRED)]
    assert ends[0].error_code == ErrorCode.DEADLINE_MISSED
    given = [row.job for e in mind.log if isinstance(e, ev.Dispatch) for row in e.rows]
    assert given == ["run"]


def test_full_is_said_at_the_door_to_the_job() -> None:
    """A burst in one read gets in up to max_jobs exactly; the rest is told when to come again."""
    mind = Mind(max_jobs=3)
    effects = []
    for i in range(5):
        mind.entry += 1
        event = ev.Pushed(f"{mind.entry}-0", raw_push(prompt="x", id=f"j{i}"))
        effects += mind.core.handle(event, mind.now)
    assert kinds(effects) == ["Submit"] * 3 + ["Refuse"] * 2
    refusal = effects[-1]
    assert isinstance(refusal, ev.Refuse)
    assert refusal.error_code == ErrorCode.QUEUE_FULL
    assert refusal.retry_after_s
    for effect in effects[:3]:
        assert isinstance(effect, ev.Submit)
        mind.core.handle(ev.Submitted(effect.spec, "conflict"), mind.now)
    assert kinds(mind.push("later")) == ["Submit"]


def test_a_full_redis_is_queue_full() -> None:
    """Under the entry's id only: the job's own id stays free for another try."""
    mind = Mind()
    (refusal,) = mind.tell(ev.SubmitFailed(a_spec(id="a"), "it is at maxmemory"))
    assert isinstance(refusal, ev.Refuse)
    assert refusal.error_code == ErrorCode.QUEUE_FULL
    assert refusal.ids == ("1000-0",)


def test_a_conflict_is_refused_under_the_entry_id_only() -> None:
    mind = Mind()
    (refusal,) = mind.tell(ev.Submitted(a_spec(id="a"), "conflict"))
    assert isinstance(refusal, ev.Refuse)
    assert refusal.ids == ("1000-0",)
    assert refusal.error_code == ErrorCode.CONFLICT


def test_a_cancel_yields_the_chunk_and_ends_the_job() -> None:
    """The rank is not to finish a chunk that nobody wants; its report then changes nothing."""
    mind = Mind()
    mind.join(ENCODE, DENOISE)
    mind.run_to_denoise("a")
    mind.tick()
    running = mind.last(ev.Dispatch)
    effects = mind.tell(ev.CancelAsked("1-0", "a"))
    assert kinds(effects) == ["NoteCancel", "Yield", "Finish"]
    assert effects[-1].status is JobStatus.CANCELED  # type: ignore[union-attr]
    assert effects[-1].free_by  # type: ignore[union-attr]
    assert mind.core.board.ranks["denoise-1"].running is not None
    report = Report(running.seq, running.members[0], DENOISE, (ReportRow("a", 3, DENOISE),))
    assert mind.tell(ev.Reported(report, (False,))) == []
    assert mind.core.board.ranks["denoise-1"].running is None


def test_a_failed_task_is_tried_again_and_not_for_ever() -> None:
    mind = Mind()
    mind.join(ENCODE)
    mind.push("a")
    for _ in range(MAX_ATTEMPTS):
        mind.tick()
        mind.report(mind.last(ev.Dispatch), code="stage_error")
    finish = mind.last(ev.Finish)
    assert (finish.status, finish.error_code) == (JobStatus.FAILED, "stage_error")
    assert mind.last(ev.Dispatch).seq == MAX_ATTEMPTS


def test_an_invalid_request_found_by_a_stage_is_not_tried_again() -> None:
    mind = Mind()
    mind.join(ENCODE)
    mind.push("a")
    mind.tick()
    mind.report(mind.last(ev.Dispatch), code="invalid_request")
    assert mind.last(ev.Finish).error_code == "invalid_request"


def test_a_lost_workers_tasks_are_taken_back() -> None:
    """They count as attempts if they ran; a worker that said goodbye costs none."""
    for lost in (True, False):
        mind = Mind()
        (name,) = mind.join(ENCODE)
        mind.push("a")
        mind.tick()
        effects = mind.tell(ev.Left(name, lost=lost))
        assert kinds(effects) == (["Void", "Forget"] if lost else ["Void"])
        assert mind.core.jobs["a"].attempts == (1 if lost else 0)
        assert not mind.core.board.flights
        mind.join(ENCODE)
        assert kinds(mind.tick()) == ["Dispatch"]


def test_a_job_that_kills_its_workers_fails() -> None:
    mind = Mind()
    mind.push("poison")
    for _ in range(MAX_ATTEMPTS):
        (name,) = mind.join(ENCODE)
        mind.tick()
        mind.tell(ev.Left(name, lost=True))
    finish = mind.last(ev.Finish)
    assert finish.error_code == ErrorCode.WORKER_LOST
    assert f"died {MAX_ATTEMPTS} times" in finish.error


def test_a_draining_worker_gets_nothing_more() -> None:
    """What it hands back goes to another, without an attempt."""
    mind = Mind()
    first, second = mind.join(ENCODE, ENCODE)
    mind.push("a")
    mind.tick()
    flight = mind.last(ev.Dispatch)
    row = ReportRow("a", 0, ENCODE)
    report = Report(1, flight.members[0], ENCODE, (row,), returned=True, draining=True)
    mind.tell(ev.Reported(report, (True,)))
    mind.tick()
    again = mind.last(ev.Dispatch)
    assert again.seq != flight.seq
    assert {flight.members[0], again.members[0]} == {first, second}
    assert mind.core.jobs["a"].attempts == 0
    assert mind.core.jobs["a"].chunks == 0


@pytest.mark.parametrize(
    ("verdict", "detail"), [("worker", ("1",)), ("seq", ("40",)), ("row", ("a", "gone"))]
)
def test_a_refused_dispatch_leaves_nothing_behind(verdict: str, detail: tuple[str, ...]) -> None:
    """The job is ready again, or gone; the rank is free, or gone; the count is right."""
    mind = Mind()
    mind.join(ENCODE, ENCODE)
    mind.push("a")
    effects = [e for e in mind.core.handle(ev.Tick(), mind.now) if isinstance(e, ev.Dispatch)]
    (dispatch,) = effects
    mind.tell(ev.Dispatched(dispatch.seq, verdict, detail))
    assert not mind.core.board.flights
    if verdict == "row":
        assert not mind.core.jobs
        return
    mind.tick()
    again = mind.last(ev.Dispatch)
    assert again.rows[0].job == "a"
    if verdict == "worker":
        assert again.members != dispatch.members
    else:
        assert again.seq == 41


def test_a_recall_that_comes_too_late_changes_nothing() -> None:
    mind = Mind()
    mind.join(ENCODE)
    mind.push("a")
    mind.tick()
    flight = mind.last(ev.Dispatch)
    mind.tell(ev.Voided(flight.seq, "late", False))
    assert mind.core.board.flights[flight.seq].voiding is False
    mind.report(flight)
    assert mind.core.jobs["a"].stage == DENOISE


def test_a_task_that_has_started_is_not_recalled_again_and_again() -> None:
    """A worker begins its next task as it reports the last. Until that report is read the core
    believes that the next one is queued; told that it has started, it asks no more."""

    def answer(view: View) -> list[Decision]:
        (rank,) = view.ranks
        if rank.queued:
            return [Recall(rank.queued.seq)]
        return [Run(rank.name, ((c.job, 0),)) for c in policy.jobs[:1]]

    policy = Stranger(answer)
    mind = Mind(policy)
    mind.join(ENCODE)
    mind.push("a")
    mind.push("b")
    mind.tick()
    mind.tick()
    (recall,) = [e for e in mind.core.handle(ev.Tick(), mind.now) if isinstance(e, ev.Void)]
    mind.core.handle(ev.Voided(recall.seq, "late", False), mind.now)
    assert kinds(mind.core.handle(ev.Tick(), mind.now)) == []


def test_an_output_that_expired_fails_the_job_in_words() -> None:
    mind = Mind()
    mind.join(ENCODE, DENOISE, DECODE)
    mind.push("a")
    job = mind.core.jobs["a"]
    mind.core.policy.remove("a")
    job.ending = True
    effects = mind.tell(ev.Finished("a", "lost"))
    assert effects[0].error_code == ErrorCode.OUTPUT_LOST  # type: ignore[union-attr]


# -- recovery ----------------------------------------------------------------------------


def recovered(spec: JobSpec, **changes: Any) -> ev.Recovered:
    fields: dict[str, Any] = {
        "spec": spec, "stage": ENCODE, "step": 0, "seq": 0, "handles": b"", "outputs": (),
        "attempts": 0, "error_code": "", "error": "", "started_s": None, "seconds": {},
        "cancel": False, "flight": None,
    }  # fmt: skip
    return ev.Recovered(**{**fields, **changes})


def in_flight(seq: int, *members: str, state: str = "running") -> ev.RecoveredFlight:
    return ev.RecoveredFlight(seq, state, DENOISE, members, ("a",), 0.3)


def test_a_new_core_goes_on_where_the_records_stand() -> None:
    """A ready job is dispatched from its step; a running one is waited for."""
    mind = Mind()
    mind.join(ENCODE, DENOISE)
    a, b = a_spec(id="a", num_inference_steps=10), a_spec(id="b", num_inference_steps=10)
    mind.tell(recovered(a, stage=DENOISE, step=3, seq=7, flight=in_flight(7, "denoise-1")))
    mind.tell(recovered(b, stage=DENOISE, step=6))
    mind.core.seq = 7
    assert kinds(mind.tick()) == []
    report = Report(7, "denoise-1", DENOISE, (ReportRow("a", 6, DENOISE),))
    mind.tell(ev.Reported(report, (True,)))
    mind.tick()
    dispatch = mind.last(ev.Dispatch)
    assert dispatch.seq == 8
    assert dispatch.rows[0].start == 6


def test_a_flight_whose_worker_is_gone_is_taken_back() -> None:
    mind = Mind()
    mind.join(DENOISE)
    spec = a_spec(id="a", num_inference_steps=10)
    effects = mind.tell(recovered(spec, stage=DENOISE, seq=7, flight=in_flight(7, "gone")))
    assert kinds(effects) == ["Void"]
    assert kinds(mind.tick()) == ["Dispatch"]


@pytest.mark.parametrize("flight", [None, in_flight(7, "denoise-0", state="void")])
def test_a_flight_without_a_live_record_is_taken_back(flight: Any) -> None:
    mind = Mind()
    mind.join(DENOISE)
    effects = mind.tell(
        recovered(a_spec(id="a", num_inference_steps=10), stage=DENOISE, seq=7, flight=flight)
    )
    assert kinds(effects) == ["Void"]
    assert not mind.core.board.flights
    assert kinds(mind.tick()) == ["Dispatch"]


def test_what_was_about_to_end_is_ended() -> None:
    """A decoded job, a canceled one, one out of attempts: the lost finish is sent again."""
    mind = Mind()
    out = {"seq": 3, "n": 0, "mime": "x", "width": 1, "height": 1, "bytes": 1, "sha256": ""}
    mind.tell(recovered(a_spec(id="done"), stage=FINISH, outputs=(out,)))
    mind.tell(recovered(a_spec(id="stop"), stage=DENOISE, cancel=True))
    mind.tell(recovered(a_spec(id="bad"), attempts=3, error_code="stage_error", error="why"))
    mind.tell(recovered(a_spec(id="killer"), attempts=3))
    mind.tell(recovered(a_spec(id="wrong"), attempts=1, error_code="invalid_request"))
    ends = {e.spec.id: (e.status.value, e.error_code) for e in mind.log if isinstance(e, ev.Finish)}
    assert ends == {
        "done": ("succeeded", ""),
        "stop": ("canceled", ""),
        "bad": ("failed", "stage_error"),
        "killer": ("failed", "worker_lost"),
        "wrong": ("failed", "invalid_request"),
    }
    assert not mind.core.jobs


def test_a_worker_that_was_away_for_us_only_keeps_its_task() -> None:
    """Refused as gone, then back: its running task is not forgotten, so it gets one more only."""
    mind = Mind()
    (name,) = mind.join(ENCODE)
    mind.push("a")
    mind.tick()
    mind.core.board.ranks.pop(name)
    mind.core.board.arrange()
    mind.tell(ev.Joined(ev.WorkerInfo(name, ENCODE, ("noop",), "here")))
    running = mind.core.board.ranks[name].running
    assert running is not None
    assert running.candidate.job == "a"


def test_standings_say_who_is_next_and_as_of_when() -> None:
    """Positions from 0 in the order of the policy; none for what runs; at most once a second."""
    mind = Mind()
    mind.join(ENCODE)
    for i in range(4):
        mind.push(f"j{i}", slo_ms=10_000 - 1000 * i)
    first = [e for e in mind.tick(1.0) if isinstance(e, ev.Refresh)]
    again = [e for e in mind.tick(0.2) if isinstance(e, ev.Refresh)]
    assert len(first) == 1
    assert not again
    places = {s.job: s.queue_position for s in first[0].standings}
    assert places == {"j3": None, "j2": 0, "j1": 1, "j0": 2}
    etas = [s.eta_s for s in first[0].standings if s.queue_position is not None]
    assert etas == sorted(etas)


def test_costs_are_learned_from_reports() -> None:
    """The next job's default deadline is three times what was seen, not what was guessed."""
    mind = Mind()
    mind.join(ENCODE, DENOISE)
    mind.run_to_denoise("a")
    for _ in range(9):
        mind.core.costs.observe("noop", DENOISE, mind.core.jobs["a"].shape, 2.0)
    (submit,) = [e for e in mind.push("b") if isinstance(e, ev.Submit)]
    standalone = submit.spec.deadline_s - submit.spec.arrival_s  # type: ignore[operator]
    assert standalone == pytest.approx(3 * (0.1 + 10 * 2.0 + 0.05), rel=0.1)


def test_every_row_of_a_shared_task_is_its_own() -> None:
    """One row fails, the other moves on; the failed one then runs alone."""
    mind = Mind()
    mind.core.view.pack_s = 1.0
    mind.join(ENCODE)
    mind.push("a")
    mind.push("b")
    mind.tick()
    flight = mind.last(ev.Dispatch)
    assert [row.job for row in flight.rows] == ["a", "b"]
    rows = (
        ReportRow("a", 0, ENCODE, error_code="stage_error", error="why"),
        ReportRow("b", 0, DENOISE),
    )
    mind.tell(ev.Reported(Report(flight.seq, "encode-0", ENCODE, rows), (True, True)))
    mind.push("c")
    mind.tick()
    assert mind.core.jobs["b"].stage == DENOISE
    assert [row.job for row in mind.last(ev.Dispatch).rows] == ["a"]


def test_specs_survive_their_way_through_redis() -> None:
    spec = dataclasses.replace(a_spec(id="a", user="u", priority=3), notes=("n",))
    assert JobSpec.from_wire(spec.to_wire()) == spec
    assert pack(spec.params)


def test_a_job_whose_state_is_lost_begins_again() -> None:
    """Its embeddings went with the arena: it is encoded anew, a few times at most."""
    mind = Mind()
    mind.join(ENCODE, DENOISE, DECODE)
    mind.run_to_denoise("a")
    effects = mind.core.try_again(mind.core.jobs["a"], "state_lost", "gone", mind.now)
    assert kinds(effects) == ["Rewind"]
    mind.tell(ev.Rewound("a", "rewound"))
    assert (mind.core.jobs["a"].stage, mind.core.jobs["a"].step) == ("encode", 0)
