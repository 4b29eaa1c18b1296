"""Each atomic transition of common/lua: what it does, what a repeat gets, what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from common.connect import writing
from common.job import JobSpec
from common.keys import Keys
from common.scripts import SOURCES, Scripts, Transitions, Ttls
from common.stage import DECODE, DENOISE
from services.coordinator.effects import answer_of
from services.coordinator.events import Submit, SubmitFailed
from services.coordinator.state import Job
from services.costs.model import CostModel
from tests.fakes import MANIFEST, NONCE, Table, a_spec
from tests.servers import serving


@pytest.fixture
def table(redis_client: Any, keys: Keys) -> Iterator[Table]:
    """With nobody to read the streams: they go at the end, what has no TTL does not."""
    yield Table(redis_client, keys)
    redis_client.delete(keys.jobs, keys.cancel, keys.reports)
    redis_client.delete(*redis_client.scan_iter(keys.tasks("*")), "none")


def denoising(table: Table, *names: str) -> list[JobSpec]:
    """Jobs that have been encoded, and a denoise worker for them."""
    specs = [table.job(id=name, num_inference_steps=4) for name in names]
    table.register("e")
    seq, _ = table.dispatch(specs, ["e"])
    table.start(seq, "e", specs)
    table.report(seq, "e", specs)
    table.register("d", DENOISE)
    return specs


# -- lead --------------------------------------------------------------------------------


def test_one_leads_until_it_lets_go(table: Table, keys: Keys) -> None:
    """The lease goes to one nonce; another waits until it is released or has run out."""
    assert table.lead() == ["renewed"]
    assert table.lead("other:1") == ["standby"]
    assert table.run(table.t.lead(0)) == ["released"]
    assert table.lead("other:1") == ["leading"]
    assert 0 < table.redis.pttl(keys.leader) <= 1_000_000


def test_a_process_leads_on_under_its_next_nonce_only(table: Table) -> None:
    """A new term fences the old one of the same process: what was sent late changes nothing."""
    assert table.lead("leader:2") == ["leading"]
    assert table.lead("leader:1") == ["standby"]
    _, verdict = table.submit()
    assert verdict == "fenced"


def test_a_lapsed_lease_is_not_renewed_but_taken_anew(table: Table, keys: Keys) -> None:
    """Whoever let it lapse cannot know who led meanwhile, and is told so."""
    table.redis.delete(keys.leader)
    assert table.lead() == ["leading"]


# -- shorten -----------------------------------------------------------------------------


def test_shorten_changes_a_job_that_has_done_no_step(table: Table) -> None:
    """Once: the spec that workers get, the steps that clients see, and one event."""
    spec = table.job(num_inference_steps=20)
    shorter = dataclasses.replace(spec, params={**spec.params, "num_inference_steps": 12})
    for _ in range(2):
        assert table.run(table.t.shorten(shorter, 12, table.now)) == ["shortened"]
    kept = table.redis.hget(table.keys.trajectory(spec.id), "spec")
    assert JobSpec.from_wire(kept) == shorter
    assert table.record(spec)["steps"] == "12"
    assert table.events(spec) == ["queued", "degraded"]


def test_shorten_comes_too_late_once_a_step_is_done_or_a_task_is_out(table: Table) -> None:
    (begun,) = denoising(table, "begun")
    seq, _ = table.dispatch([begun], ["d"], DENOISE, 0, 2)
    assert table.run(table.t.shorten(begun, 3, table.now)) == ["late"]
    table.start(seq, "d", [begun], DENOISE)
    table.report(seq, "d", [begun], DENOISE, step=2)
    assert table.run(table.t.shorten(begun, 3, table.now)) == ["late"]
    assert table.record(begun)["steps"] == "4"


# -- submit and refuse -------------------------------------------------------------------


def test_submit_makes_a_push_a_job(table: Table, keys: Keys) -> None:
    """The entry goes, and a record, a trajectory, an event and an active id come, all at once."""
    spec = table.job(prompt="three cats")
    assert table.record(spec)["status"] == "queued"
    assert table.record(spec)["content"] == spec.content
    assert table.trajectory(spec)["stage"] == "encode"
    assert table.events(spec) == ["queued"]
    assert table.redis.smembers(keys.active) == {spec.id.encode()}
    assert table.redis.xlen(keys.jobs) == 0
    assert table.redis.ttl(keys.job(spec.id)) == -1


def test_the_same_id_with_the_same_content_is_the_same_job(table: Table, keys: Keys) -> None:
    table.job(id="a", prompt="one")
    _, verdict = table.submit(id="a", prompt="one")
    assert verdict == "same"
    assert table.redis.xlen(keys.jobs) == 0


def test_the_same_id_with_other_content_is_a_conflict(table: Table, keys: Keys) -> None:
    """The job that has the id stays as it is; the entry stays until it is refused."""
    spec = table.job(id="a", prompt="one")
    before = table.record(spec)
    _, verdict = table.submit(id="a", prompt="two")
    assert verdict == "conflict"
    assert table.record(spec) == before
    assert table.redis.xlen(keys.jobs) == 1


def test_somebody_elses_key_in_the_way_is_a_conflict(table: Table, keys: Keys) -> None:
    """Types are checked before the first write: half a job is never written."""
    table.redis.set(keys.events("a"), "not a stream", ex=60)
    spec, verdict = table.submit(id="a")
    assert verdict == "conflict"
    assert not table.record(spec)
    assert not table.trajectory(spec)


def test_refuse_answers_under_each_unused_id(table: Table, keys: Keys) -> None:
    """A refused push has a result and a record that go; an id in use is not touched."""
    spec = table.job(id="a")
    before = table.record(spec)
    entry = table.push(id="a", prompt="two")
    call = table.t.refuse(entry, [(entry, b"no"), ("a", b"no")], "hash", "conflict", "why", 1.0)
    assert table.run(call) == ["refused"]
    assert table.run(call) == ["refused"]
    assert table.redis.get(keys.result(entry)) == b"no"
    refused = a_spec(entry)
    assert table.record(refused)["error_code"] == "conflict"
    assert table.events(refused) == ["failed"]
    assert table.redis.ttl(keys.job(entry)) >= table.redis.ttl(keys.result(entry)) > 0
    assert table.record(spec) == before
    assert table.redis.get(keys.result("a")) is None
    assert table.redis.xlen(keys.jobs) == 0


# -- dispatch and start ------------------------------------------------------------------


def test_dispatch_hands_a_task_to_every_member_at_once(table: Table, keys: Keys) -> None:
    """One record, one entry in each member's stream, and its rows wait for it."""
    specs = [table.job(id=name) for name in "ab"]
    for name in ("w1", "w2"):
        table.register(name)
    seq, reply = table.dispatch(specs, ["w1", "w2"])
    assert reply == ["dispatched"]
    assert [table.redis.xlen(keys.tasks(name)) for name in ("w1", "w2")] == [1, 1]
    assert all(table.redis.ttl(keys.tasks(name)) > 0 for name in ("w1", "w2"))
    assert table.task(seq)["members"] == "w1 w2"
    assert [table.trajectory(spec)["seq"] for spec in specs] == [str(seq)] * 2


def test_a_repeated_dispatch_changes_nothing(table: Table, keys: Keys) -> None:
    spec = table.job()
    table.register("w1")
    table.dispatch([spec], ["w1"], seq=7)
    assert table.dispatch([spec], ["w1"], seq=7)[1] == ["dispatched"]
    assert table.redis.xlen(keys.tasks("w1")) == 1


def test_dispatch_is_all_or_nothing(table: Table, keys: Keys) -> None:
    """A member that is gone, a row that is busy, canceled, elsewhere or gone: nothing is handed
    out, and the answer says which."""
    a, b = denoising(table, "a", "b")
    _, reply = table.dispatch([a], ["d", "nobody"], DENOISE, 0, 2, seq=10)
    assert reply == ["worker", 2]
    _, reply = table.dispatch([a, b], ["d"], DENOISE, 1, 2, seq=10)
    assert reply == ["row", "a", "step"]
    _, reply = table.dispatch([a], ["d"], DECODE, seq=10)
    assert reply == ["row", "a", "stage"]
    table.run(table.t.cancel("0-1", "b"))
    _, reply = table.dispatch([a, b], ["d"], DENOISE, 0, 2, seq=10)
    assert reply == ["row", "b", "canceled"]
    _, reply = table.dispatch([a, a_spec(id="gone")], ["d"], DENOISE, 0, 2, seq=10)
    assert reply == ["row", "gone", "gone"]
    assert table.redis.xlen(keys.tasks("d")) == 0
    assert table.trajectory(a)["seq"] == "0"
    table.dispatch([a], ["d"], DENOISE, 0, 2, seq=10)
    _, reply = table.dispatch([a], ["d"], DENOISE, 0, 2, seq=11)
    assert reply == ["row", "a", "busy"]


def test_a_dispatch_number_is_used_once(table: Table) -> None:
    """A leader that counts behind is told the last number."""
    a, b = table.job(id="a"), table.job(id="b")
    table.register("w1")
    table.dispatch([a], ["w1"], seq=7)
    table.redis.hdel(table.keys.task(7), "nonce")  # as if another leader had dispatched it
    assert table.dispatch([b], ["w1"], seq=7)[1] == ["seq", 7]


def test_start_makes_a_queued_task_a_running_one(table: Table, keys: Keys) -> None:
    """The entry leaves the member's stream, the record says who runs what; a repeat is the same."""
    spec = table.job()
    table.register("w1")
    seq, _ = table.dispatch([spec], ["w1"])
    assert table.start(seq, "w1", [spec]) == ["running", "0", "1"]
    assert table.start(seq, "w1", [spec]) == ["running", "0", "1"]
    assert table.redis.xlen(keys.tasks("w1")) == 0
    assert table.record(spec)["status"] == "running"
    assert table.record(spec)["worker"] == "w1"
    assert table.events(spec) == ["queued", "running"]


def test_a_row_that_ended_before_the_start_is_not_alive(table: Table) -> None:
    a, b = table.job(id="a"), table.job(id="b")
    table.register("w1")
    seq, _ = table.dispatch([a, b], ["w1"])
    table.run(table.t.finish("a", "canceled", b"r", [], 1.0))
    assert table.start(seq, "w1", [a, b]) == ["running", "0", "0", "1"]


# -- void and yield ----------------------------------------------------------------------


def test_void_takes_a_queued_task_back_from_all_members(table: Table, keys: Keys) -> None:
    """Its entries go, its rows are free, and whoever starts it after all is told."""
    spec = table.job()
    for name in ("w1", "w2"):
        table.register(name)
    seq, _ = table.dispatch([spec], ["w1", "w2"])
    assert table.void(seq, ["w1", "w2"], [spec]) == ["void", "0"]
    assert table.void(seq, ["w1", "w2"], [spec]) == ["void", "0"]
    assert [table.redis.xlen(keys.tasks(name)) for name in ("w1", "w2")] == [0, 0]
    assert table.trajectory(spec)["seq"] == "0"
    assert table.redis.ttl(keys.task(seq)) > 0
    assert table.start(seq, "w1", [spec]) == ["void"]
    assert table.report(seq, "w1", [spec]) == ["void"]


def test_void_comes_too_late_for_a_running_task(table: Table) -> None:
    spec = table.job()
    table.register("w1")
    seq, _ = table.dispatch([spec], ["w1"])
    table.start(seq, "w1", [spec])
    assert table.void(seq, ["w1"], [spec]) == ["late"]
    table.report(seq, "w1", [spec])
    assert table.void(seq, ["w1"], [spec], "2") == ["late"]


def test_only_a_task_that_had_started_can_be_blamed_for_a_death(table: Table) -> None:
    """A running task counts as an attempt; one that only lay in a dead worker's stream does not."""
    a, b = table.job(id="a"), table.job(id="b")
    table.register("w1")
    running, _ = table.dispatch([a], ["w1"])
    queued, _ = table.dispatch([b], ["w1"])
    table.start(running, "w1", [a])
    assert table.void(running, ["w1"], [a], "2") == ["void", "1"]
    assert table.void(queued, ["w1"], [b], "2") == ["void", "0"]
    assert table.void(running, ["w1"], [a], "2") == ["void", "1"]
    assert table.record(a)["attempts"] == "1"
    assert table.events(a)[-1] == "worker_lost"
    assert table.record(b)["attempts"] == "0"


def test_yield_is_sticky_and_told_once(table: Table, keys: Keys) -> None:
    """Asked before the start, it is answered at the start; asked twice, it is one message."""
    spec = table.job()
    table.register("w1")
    seq, _ = table.dispatch([spec], ["w1"])
    assert table.run(table.t.yield_(seq, ["w1"])) == ["asked"]
    assert table.run(table.t.yield_(seq, ["w1"])) == ["asked"]
    kinds = [fields[b"kind"] for _, fields in table.redis.xrange(keys.tasks("w1"))]
    assert kinds == [b"task", b"yield"]
    assert table.start(seq, "w1", [spec])[:2] == ["running", "1"]
    table.report(seq, "w1", [spec])
    assert table.run(table.t.yield_(seq, ["w1"])) == ["late"]


def test_a_worker_that_left_gets_no_stream_again(table: Table, keys: Keys) -> None:
    """Neither a yield nor the freeing of state makes a stream that nobody will ever read."""
    spec = table.job()
    table.register("w1")
    seq, _ = table.dispatch([spec], ["w1"])
    table.start(seq, "w1", [spec])
    table.report(seq, "w1", [spec])
    seq, _ = table.dispatch([spec], ["w1"], DENOISE)
    table.run(table.worker_t.leave("w1", tell=True))
    table.run(table.t.yield_(seq, ["w1"]))
    table.run(table.t.finish(spec.id, "canceled", b"r", [], 1.0, free_by=["w1"]))
    table.void(seq, ["w1"], [spec], "1")
    assert not table.redis.exists(keys.tasks("w1"))


# -- progress and report -----------------------------------------------------------------


def test_progress_counts_steps_of_the_running_task_only(table: Table) -> None:
    (a,) = denoising(table, "a")
    seq, _ = table.dispatch([a], ["d"], DENOISE, 0, 2)
    call = table.worker_t.progress(seq, [("a", 1, 4)], 1.0)
    assert table.run(call) == ["void"]  # it has not started
    table.start(seq, "d", [a], DENOISE)
    assert table.run(call) == ["ok", "1"]
    assert table.record(a)["progress"] == "0.250"
    assert table.record(a)["step"] == "1"
    assert table.events(a)[-1] == "step"


def test_report_moves_each_row_on(table: Table, keys: Keys) -> None:
    """The new state is in the trajectory, the coordinator is told, a repeat gets the same answer
    and tells nobody again."""
    a, b = denoising(table, "a", "b")
    table.redis.delete(keys.reports)
    seq, _ = table.dispatch([a, b], ["d"], DENOISE, 0, 2)
    table.start(seq, "d", [a, b], DENOISE)
    for _ in range(2):
        assert table.report(seq, "d", [a, b], DENOISE, step=2, handles=b"new") == ["done", "1", "1"]
    for spec in (a, b):
        found = table.trajectory(spec)
        assert (found["step"], found["handles"], found["seq"]) == ("2", "new", "0")
        assert table.record(spec)["progress"] == "0.500"
    assert table.redis.xlen(keys.reports) == 1
    assert table.redis.ttl(keys.task(seq)) > 0


def test_a_canceled_row_refuses_only_itself(table: Table) -> None:
    """Of a batch, the row that ended is refused, and its neighbour counts."""
    a, b = denoising(table, "a", "b")
    seq, _ = table.dispatch([a, b], ["d"], DENOISE, 0, 2)
    table.start(seq, "d", [a, b], DENOISE)
    table.run(table.t.finish("a", "canceled", b"r", [], 1.0))
    assert table.report(seq, "d", [a, b], DENOISE, step=2) == ["done", "0", "1"]
    assert table.report(seq, "d", [a, b], DENOISE, step=2) == ["done", "0", "1"]
    assert not table.trajectory(a)
    assert table.trajectory(b)["step"] == "2"


def test_a_failed_row_keeps_its_old_state(table: Table) -> None:
    """It can be tried again from there, and the attempt is counted."""
    (a,) = denoising(table, "a")
    seq, _ = table.dispatch([a], ["d"], DENOISE, 0, 2)
    table.start(seq, "d", [a], DENOISE)
    assert table.report(seq, "d", [a], DENOISE, step=2, handles=b"bad", code="stage_error") == [
        "done",
        "1",
    ]
    found = table.trajectory(a)
    assert (found["step"], found["handles"], found["attempts"]) == ("0", "state", "1")
    assert table.record(a)["attempts"] == "1"


def test_attempts_are_of_the_place_that_a_job_has_come_to(table: Table) -> None:
    """Further on they begin anew, in the record that clients read as in what the leader goes by."""
    (a,) = denoising(table, "a")
    for start, code in ((0, "stage_error"), (0, ""), (2, "stage_error"), (2, "stage_error")):
        seq, _ = table.dispatch([a], ["d"], DENOISE, start, start + 2)
        table.start(seq, "d", [a], DENOISE)
        at_start = table.record(a)["attempts"]
        table.report(seq, "d", [a], DENOISE, step=start + 2, handles=b"state", code=code)
    assert (at_start, table.record(a)["attempts"], table.trajectory(a)["attempts"]) == (
        "1",
        "2",
        "2",
    )
    seq, _ = table.dispatch([a], ["d"], DENOISE, 2, 4)
    table.start(seq, "d", [a], DENOISE)
    table.report(seq, "d", [a], DECODE, step=4, handles=b"state")
    table.register("c", DECODE)
    seq, _ = table.dispatch([a], ["c"], DECODE)
    table.start(seq, "c", [a], DECODE)
    assert table.record(a)["attempts"] == "0"


@pytest.mark.parametrize("script", ["rewind", "finish"])
def test_what_a_worker_is_told_to_free_goes_with_it(table: Table, keys: Keys, script: str) -> None:
    """Also if it has just come, so that its stream is made by this."""
    denoising(table, "a")
    table.register("new", DENOISE)
    if script == "rewind":
        table.run(table.t.rewind("a", 1.0, free_by=["new"]))
    else:
        table.run(table.t.finish("a", "canceled", b"r", [], 1.0, free_by=["new"]))
    assert table.redis.xlen(keys.tasks("new")) == 1
    assert table.redis.ttl(keys.tasks("new")) > 0


def test_a_row_handed_back_stays_as_it_was(table: Table) -> None:
    (a,) = denoising(table, "a")
    before = table.trajectory(a)
    seq, _ = table.dispatch([a], ["d"], DENOISE, 0, 2)
    table.start(seq, "d", [a], DENOISE)
    assert table.report(seq, "d", [a], DENOISE, step=9, steps=0, handles=b"") == ["done", "1"]
    assert table.trajectory(a) == {**before, "reached": "1"}  # it began


def test_members_report_in_any_order_and_the_lead_counts(table: Table, keys: Keys) -> None:
    """Each member's report frees its rank; only the lead's moves the job."""
    (a,) = denoising(table, "a")
    table.register("d2", DENOISE)
    table.redis.delete(keys.reports)
    seq, _ = table.dispatch([a], ["d", "d2"], DENOISE, 0, 2)
    for name in ("d", "d2"):
        table.start(seq, name, [a], DENOISE)
    assert table.report(seq, "d", [a], DENOISE, step=2) == ["done", "1"]
    assert table.report(seq, "d2", [a], DENOISE, lead=False, step=2) == ["done"]
    assert table.redis.xlen(keys.reports) == 2


def test_a_report_whose_record_has_expired_is_in_doubt(table: Table) -> None:
    """Nobody can tell whether it counted, so the worker must not free anything."""
    spec = table.job()
    assert table.report(99, "d", [spec]) == ["unknown"]


# -- cancel and finish -------------------------------------------------------------------


def test_a_cancel_before_during_and_after(table: Table, keys: Keys) -> None:
    """Before: the job is canceled when it comes. During: it is marked. After: it is history."""
    assert table.run(table.t.cancel("0-1", "a")) == ["early"]
    assert table.redis.ttl(keys.canceled("a")) > 0
    _, verdict = table.submit(id="a")
    assert verdict == "created_canceled"
    assert not table.redis.exists(keys.canceled("a"))
    table.job(id="b")
    for _ in range(2):
        assert table.run(table.t.cancel("0-1", "b")) == ["canceling"]
    for job in "ab":
        table.run(table.t.finish(job, "canceled", b"r", [], 1.0))
        assert table.run(table.t.cancel("0-1", job)) == ["terminal"]


def test_finish_is_the_one_end(table: Table, keys: Keys) -> None:
    """Files into place, result, last event, TTLs, outbox, freed state; a second one is late."""
    (a,) = denoising(table, "a")
    for n in range(2):
        table.run(table.worker_t.upload("a", 5, n, b"file %d" % n))
    call = table.t.finish(
        "a", "succeeded", b"result", [(5, 0), (5, 1)], 9.0, outbox=b"tell", free_by=["gone", "d"]
    )
    assert table.run(call) == ["finished"]
    assert [table.redis.get(keys.output("a", n)) for n in range(2)] == [b"file 0", b"file 1"]
    assert not table.redis.exists(keys.staged("a", 5, 0))
    assert table.redis.get(keys.result("a")) == b"result"
    assert (table.record(a)["status"], table.record(a)["is_terminal"]) == ("succeeded", "1")
    assert table.record(a)["progress"] == "1.000"
    assert table.events(a)[-1] == "succeeded"
    ttls = [table.redis.ttl(k) for k in (keys.job("a"), keys.output("a", 0), keys.result("a"))]
    assert ttls == sorted(ttls, reverse=True)
    assert ttls[-1] > 0
    assert table.redis.ttl(keys.events("a")) > 0
    ((_, told),) = table.redis.xrange(keys.outbox)
    assert told == {b"job": b"a", b"body": b"tell"}
    ((_, freed),) = table.redis.xrange(keys.tasks("d"))
    assert freed == {b"kind": b"free", b"body": b"state"}
    table.redis.delete(keys.tasks("d"), keys.reports)
    assert table.run(call) == ["gone"]
    assert table.redis.xlen(keys.outbox) == 1
    table.redis.delete(keys.outbox)


def test_finish_without_a_body_tells_nobody(table: Table, keys: Keys) -> None:
    table.job(id="a")
    table.run(table.t.finish("a", "canceled", b"r", [], 1.0))
    assert not table.redis.exists(keys.outbox)


def test_finish_does_nothing_when_a_file_has_expired(table: Table, keys: Keys) -> None:
    spec = table.job(id="a")
    table.run(table.worker_t.upload("a", 5, 0, b"file"))
    call = table.t.finish("a", "succeeded", b"r", [(5, 0), (5, 1)], 1.0)
    assert table.run(call) == ["lost", 1]
    assert table.trajectory(spec)
    assert table.redis.exists(keys.staged("a", 5, 0))


# -- the rest ----------------------------------------------------------------------------


def test_refresh_passes_over_what_has_ended(table: Table) -> None:
    a, b = table.job(id="a"), table.job(id="b")
    table.run(table.t.finish("b", "canceled", b"r", [], 1.0))
    assert table.run(table.t.refresh([("a", "0", "1.5", "9"), ("b", "1", "1.5", "9")], 3.0)) == [
        "ok"
    ]
    assert table.record(a)["queue_position"] == "0"
    assert table.record(a)["as_of"] == "3000"
    assert "queue_position" not in table.record(b)


def test_a_worker_is_announced_once_and_forgotten_wholly(table: Table, keys: Keys) -> None:
    """It registers, renews, and on leaving gets the frees that it has not read."""
    assert table.register("w1") == ["new"]
    assert table.register("w1") == ["renewed"]
    kinds = [fields[b"kind"] for _, fields in table.redis.xrange(keys.reports)]
    assert kinds == [b"hello"]
    assert table.redis.pttl(keys.worker("w1")) > 0
    table.redis.xadd(keys.tasks("w1"), {"kind": "task", "body": b"x"})
    table.redis.xadd(keys.tasks("w1"), {"kind": "free", "body": b"handles"})
    assert table.run(table.worker_t.leave("w1", tell=True)) == ["left", "handles"]
    assert not table.redis.exists(keys.worker("w1"), keys.tasks("w1"), keys.workers)
    kinds = [fields[b"kind"] for _, fields in table.redis.xrange(keys.reports)]
    assert kinds == [b"hello", b"bye"]
    table.redis.delete(keys.reports)


def test_only_a_silent_worker_is_forgotten_by_the_leader(table: Table, keys: Keys) -> None:
    """One that has registered again meanwhile keeps its stream and what is in it."""
    table.register("w1")
    table.redis.xadd(keys.tasks("w1"), {"kind": "task", "body": b"x"})
    assert table.run(table.worker_t.leave("w1", tell=False)) == ["alive"]
    assert table.redis.xlen(keys.tasks("w1")) == 1
    table.redis.delete(keys.worker("w1"))
    assert table.run(table.worker_t.leave("w1", tell=False)) == ["left"]
    assert not table.redis.exists(keys.tasks("w1"), keys.workers)


def test_reports_are_deleted_once_read(table: Table, keys: Keys) -> None:
    entries = [table.redis.xadd(keys.reports, {"kind": "bye", "worker": "w"}) for _ in range(3)]
    assert table.run(table.t.ack([entry.decode() for entry in entries[:2]])) == ["acked"]
    assert [entry for entry, _ in table.redis.xrange(keys.reports)] == entries[2:]


def test_a_former_leader_can_change_nothing(table: Table, keys: Keys) -> None:
    """Every script of the leader looks at the lease first."""
    (a,) = denoising(table, "a")
    seq, _ = table.dispatch([a], ["d"], DENOISE, 0, 2)
    table.redis.delete(keys.leader)
    table.lead("other:1")
    before = {key: table.redis.dump(key) for key in table.redis.scan_iter()}
    t = table.t
    for call in (
        t.submit(a_spec(id="b"), 1, 1.0, {}),
        t.refuse("0-1", [("0-1", b"r")], "", "x", "x", 1.0),
        t.dispatch(99, DENOISE, "noop", ["d"], [], 0.1, 1.0),
        t.yield_(seq, ["d"]),
        t.void(seq, ["d"], ["a"], "2", 1.0),
        t.cancel("0-1", "a"),
        t.ack(["0-1"]),
        t.finish("a", "canceled", b"r", [], 1.0),
        t.refresh([("a", "0", "1", "1")], 1.0),
    ):
        assert table.run(call) == ["fenced"], call.script
    assert {key: table.redis.dump(key) for key in table.redis.scan_iter()} == before


def test_every_script_says_what_it_takes_and_answers() -> None:
    """A header: a sentence, KEYS with their types, ARGV, the replies."""
    for name, source in SOURCES.items():
        header = [line for line in source.splitlines() if line.startswith("--")]
        assert header[0].startswith("-- "), name
        for word in ("KEYS", "ARGV", "Reply"):
            assert any(word in line for line in header), f"{name}.lua says nothing of {word}"


def test_scripts_that_redis_forgot_are_loaded_again(table: Table) -> None:
    """Several calls in one round trip run in their order, though none was loaded."""
    a, b = table.job(id="a"), table.job(id="b")
    table.register("w1")
    table.redis.script_flush()
    table.dispatch([a, b], ["w1"], seq=1)
    table.redis.script_flush()
    calls = [table.t.void(1, ["w1"], ["a", "b"], "0", 1.0), table.t.lead(1000)]
    replies = Scripts(table.redis).run(calls)
    assert [reply[0] for reply in replies] == [b"void", b"renewed"]


# -- at maxmemory ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full_server() -> Iterator[str]:
    with serving() as server:
        yield server.url


@pytest.fixture
def full(full_server: str, keys: Keys) -> Iterator[tuple[Table, Any]]:
    """A table, and what fills its Redis to the brim."""
    client = writing(full_server)
    client.config_set("maxmemory", 0)
    client.flushall()

    def fill() -> None:
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("more", "x")

    yield Table(client, keys), fill
    client.close()


def test_a_full_redis_says_so_at_the_door(full: tuple[Table, Any], keys: Keys) -> None:
    """No new job gets in; it is refused as queue_full, in words and on its result key."""
    table, fill = full
    entry = table.push(prompt="x")
    fill()
    spec = a_spec(entry)
    reply = Scripts(table.redis).run([table.t.submit(spec, 1, 1.0, {})])[0]
    # Before Redis 7 it came as a plain error of the script.
    assert isinstance(reply, redis.OutOfMemoryError) or "OOM" in str(reply)
    assert not table.redis.exists(keys.job(spec.id), keys.trajectory(spec.id))
    candidate = Job.of(spec, MANIFEST).candidate(CostModel())
    assert isinstance(answer_of(Submit(spec, candidate, 0.0), reply), SubmitFailed)
    call = table.t.refuse(entry, [(entry, b"full")], "", "queue_full", "full", 1.0)
    assert table.run(call) == ["refused"]
    assert table.redis.get(keys.result(entry)) == b"full"


def test_a_full_redis_lets_running_jobs_end(full: tuple[Table, Any], keys: Keys) -> None:
    """Leases, dispatch, start, progress, yield, void, report, upload, cancel and finish pass."""
    table, fill = full
    a, b = denoising(table, "a", "b")
    fill()
    assert table.lead() == ["renewed"]
    assert table.register("d", DENOISE) == ["renewed"]
    assert table.register("new", DENOISE) == ["new"]
    seq, reply = table.dispatch([a], ["d"], DENOISE, 0, 4)
    assert reply == ["dispatched"]
    assert table.start(seq, "d", [a], DENOISE)[0] == "running"
    assert table.run(table.worker_t.progress(seq, [("a", 1, 4)], 1.0)) == ["ok", "1"]
    assert table.run(table.t.yield_(seq, ["d"])) == ["asked"]
    assert table.report(seq, "d", [a], DECODE, step=4)[0] == "done"
    other, _ = table.dispatch([b], ["d"], DENOISE, 0, 4)
    assert table.void(other, ["d"], [b])[0] == "void"
    assert table.run(table.t.refresh([("b", "0", "1", "1")], 1.0)) == ["ok"]
    assert table.run(table.worker_t.upload("a", 9, 0, b"file")) == ["staged"]
    assert table.run(table.t.finish("a", "succeeded", b"r", [(9, 0)], 1.0)) == ["finished"]
    assert table.run(table.t.cancel("0-1", "b")) == ["canceling"]
    assert table.run(table.t.cancel("0-1", "later")) == ["early"]
    table.redis.delete(keys.leader)
    assert table.lead("next:1") == ["leading"]


def test_ttls_keep_expired_apart_from_unknown() -> None:
    """The record stays longest."""
    ttls = Ttls()
    assert ttls.job_s >= max(ttls.output_s, ttls.result_s)
    assert NONCE.startswith("leader:")
    assert Transitions(Keys(), ttls).nonce == ""
