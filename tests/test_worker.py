"""The worker loop by itself: a real worker in a thread, and the test in the coordinator's place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from common.arena import Arena
from common.connect import blocking, writing
from common.handles import Handle, HandleStore, Parcel
from common.inbox import Pulse
from common.job import JobSpec
from common.keys import Keys
from common.messages import (
    MessageError,
    Report,
    ReportRow,
    TaskRow,
    pack,
    pack_handles,
    pack_report,
    pack_task,
    unpack_handles,
    unpack_report,
    unpack_task,
)
from common.noop import NoopCosts, NoopStage, chain
from common.scripts import Ttls
from common.stage import DECODE, DENOISE, Control, Outcome, Task
from common.worker import Identity, Worker
from tests.fakes import Table
from tests.processes import until

STEP_S = 0.03
START = b"\x07" * 32
PATIENCE_MS = 20_000


class OddStage(NoopStage):
    """Fails where a prompt says so."""

    def run(self, task: Task, staged: dict[str, bytes], control: Control) -> list[Outcome]:
        if any(row.params["prompt"] == "raise" for row in task.rows):
            raise RuntimeError("as asked")
        return super().run(task, staged, control)


class Bench:
    """A worker at work, its store, and the coordinator's side of the table."""

    def __init__(self, url: str, table: Table, arena: Arena, kind: str = DENOISE) -> None:
        self.table, self.redis, self.keys = table, table.redis, table.keys
        self.store = HandleStore("here", arena)
        stage = OddStage(kind, self.store, NoopCosts(step_s=STEP_S))
        self.worker = Worker(
            lambda: blocking(url),
            lambda: writing(url),
            self.keys,
            Ttls(),
            stage,
            Identity("w", kind, "noop", "here"),
            lease_s=10.0,
        )
        self.heard = "0"
        self.thread = threading.Thread(target=self.worker.run)
        self.thread.start()
        assert self.next_report()[b"kind"] == b"hello"

    def next_report(self) -> dict[bytes, bytes]:
        """The next entry of the reports stream."""
        reply: Any = self.redis.xread({self.keys.reports: self.heard}, count=1, block=PATIENCE_MS)
        assert reply, "no report came"
        ((entry, fields),) = reply[0][1]
        self.heard = entry
        return dict(fields)

    def report(self) -> tuple[Report, bytes]:
        """The next report and its flags."""
        fields = self.next_report()
        assert fields[b"kind"] == b"report", fields
        return unpack_report(fields[b"body"]), fields[b"flags"]

    def encoded(self, job: str, steps: int = 5, **fields: Any) -> tuple[JobSpec, Handle]:
        """A job that waits to be denoised, its state in the store."""
        spec = self.table.job(id=job, num_inference_steps=steps, **fields)
        parcel = Parcel({"chain": ("uint8", (32,), START)}, b"")
        handle = self.store.put(job, 0, "latents", parcel)
        packed = pack_handles({"latents": handle})
        self.redis.hset(self.keys.trajectory(job), mapping={"stage": "denoise", "handles": packed})
        return spec, handle

    def dispatch(
        self, *jobs: tuple[JobSpec, Handle], stop: int, seq: int, params: bool = True
    ) -> None:
        rows = [
            TaskRow(spec.id, 0, stop, True, pack(spec.params) if params else b"",
                    pack_handles({"latents": handle}))
            for spec, handle in jobs
        ]  # fmt: skip
        t, now = self.table.t, self.worker._clock()
        reply = self.table.run(t.dispatch(seq, DENOISE, "noop", ["w"], rows, 1.0, now))
        assert reply == ["dispatched"]

    def state(self, report: Report) -> bytes:
        """What the first row's new handle holds."""
        handles = unpack_handles(report.rows[0].handles)
        return bytes(self.store.get(handles["latents"]).tensors["chain"][2])

    def finish(self, job: str, free: bool = True) -> None:
        call = self.table.t.finish(job, "canceled", b"r", [], 1.0, free_by=["w"] if free else [])
        assert self.table.run(call) == ["finished"]

    def leave(self) -> None:
        self.worker.drain()
        self.thread.join(20)
        assert not self.thread.is_alive()


def after(steps: int) -> bytes:
    digest = START
    for step in range(steps):
        digest = chain(digest, step)
    return digest


@pytest.fixture
def bench(redis_server: str, redis_client: Any, keys: Keys, arena: Arena) -> Iterator[Bench]:
    made = Bench(redis_server, Table(redis_client, keys), arena)
    yield made
    for job in redis_client.smembers(keys.active):
        made.finish(job.decode())
    made.leave()
    redis_client.delete(keys.reports, keys.jobs)


def empty(arena: Arena) -> Callable[[], bool]:
    return lambda: arena.stats().claims == 0


def test_a_worker_says_hello_and_goodbye(bench: Bench) -> None:
    """Its record has a lease, its manifest stands in the pool's, and at the end both are told."""
    record = bench.redis.hgetall(bench.keys.worker("w"))
    assert record[b"stage"] == b"denoise"
    assert record[b"host"] == b"here"
    assert 0 < bench.redis.pttl(bench.keys.worker("w")) <= 10_000
    assert b"noop/denoise" in bench.redis.hgetall(bench.keys.manifests)
    bench.leave()
    assert bench.next_report() == {b"kind": b"bye", b"worker": b"w"}
    assert not bench.redis.exists(bench.keys.worker("w"), bench.keys.tasks("w"))


def test_a_chunk_leaves_a_new_state_and_frees_the_old(bench: Bench, arena: Arena) -> None:
    """Nothing is written in place; the old state goes once the report has counted."""
    spec, old = bench.encoded("a")
    bench.dispatch((spec, old), stop=3, seq=1)
    report, flags = bench.report()
    assert flags == b"1"
    assert (report.rows[0].step, report.rows[0].next_stage) == (3, DENOISE)
    assert bench.state(report) == after(3)
    assert report.rows[0].step_s == pytest.approx(STEP_S)
    until(lambda: arena.stats().claims == 1, "one claim, the new state's")


def test_the_next_task_starts_with_the_last_ones_report(bench: Bench) -> None:
    """One round trip ends one and begins the other."""
    jobs = [bench.encoded(name) for name in "ab"]
    bench.dispatch(jobs[0], stop=5, seq=1)
    bench.dispatch(jobs[1], stop=5, seq=2)
    for name in "ab":
        report, _ = bench.report()
        assert report.rows[0].job == name
        assert report.rows[0].next_stage == DECODE
        assert bench.state(report) == after(5)


def test_a_running_chunk_yields_at_its_next_step(bench: Bench) -> None:
    """Its state is that of the steps it did."""
    spec, old = bench.encoded("a", steps=1000)
    bench.dispatch((spec, old), stop=1000, seq=1)
    until(lambda: bench.redis.hget(bench.keys.job("a"), "step") not in (None, b"0"), "a step")
    bench.table.run(bench.table.t.yield_(1, ["w"]))
    report, flags = bench.report()
    assert flags == b"1"
    assert 0 < report.rows[0].step < 1000
    assert bench.state(report) == after(report.rows[0].step)
    assert not report.returned


def test_a_task_told_to_yield_before_its_start_is_handed_back(bench: Bench) -> None:
    first, second = bench.encoded("a", steps=1000), bench.encoded("b")
    bench.dispatch(first, stop=1000, seq=1)
    bench.dispatch(second, stop=5, seq=2)
    for seq in (2, 1):
        bench.table.run(bench.table.t.yield_(seq, ["w"]))
    bench.report()
    report, flags = bench.report()
    assert (report.seq, report.returned, flags) == (2, True, b"1")
    record = bench.table.trajectory(second[0])
    assert (record["seq"], record["step"], record["stage"]) == ("0", "0", DENOISE)


def test_a_task_taken_back_before_its_start_is_never_run(bench: Bench) -> None:
    first, second, third = (bench.encoded(name, steps=1000) for name in "abc")
    bench.dispatch(first, stop=1000, seq=1)
    bench.dispatch(second, stop=20, seq=2)
    assert bench.table.void(2, ["w"], [second[0]])[0] == "void"
    bench.dispatch(third, stop=1, seq=3)
    bench.table.run(bench.table.t.yield_(1, ["w"]))
    assert [bench.report()[0].seq for _ in range(2)] == [1, 3]


def test_a_job_that_ended_meanwhile_takes_its_new_state_with_it(bench: Bench, arena: Arena) -> None:
    """The report is refused, the worker frees what it wrote, and the free message the rest."""
    spec, old = bench.encoded("a", steps=1000)
    bench.dispatch((spec, old), stop=1000, seq=1)
    until(lambda: bench.table.record(spec).get("status") == "running", "the start")
    bench.finish("a")
    bench.table.run(bench.table.t.yield_(1, ["w"]))
    report, flags = bench.report()
    assert (report.seq, flags) == (1, b"0")
    until(empty(arena), "an empty arena")


def test_a_failing_stage_fails_its_task_not_the_worker(bench: Bench) -> None:
    """What it raised is in the report; the next task runs."""
    bad, good = bench.encoded("a", prompt="raise"), bench.encoded("b")
    bench.dispatch(bad, stop=5, seq=1)
    bench.dispatch(good, stop=5, seq=2)
    report, flags = bench.report()
    assert flags == b"1"
    assert report.rows[0].error_code == "stage_error"
    assert report.rows[0].error == "RuntimeError: as asked"
    assert bench.table.trajectory(bad[0])["step"] == "0"
    assert bench.report()[0].rows[0].error_code == ""


def test_a_state_that_is_gone_is_said_to_be_lost(bench: Bench) -> None:
    spec, old = bench.encoded("a")
    bench.store.free(old)
    bench.dispatch((spec, old), stop=5, seq=1)
    report, _ = bench.report()
    assert report.rows[0].error_code == "state_lost"
    assert "no longer there" in report.rows[0].error


def test_entries_that_cannot_be_read_are_dropped(bench: Bench) -> None:
    """Whatever somebody puts into the stream, the worker goes on and the stream is emptied."""
    stream = bench.keys.tasks("w")
    bad_params = [["a", 0, 0, True, b"\xc1", b""]]
    for fields in (
        {"kind": "task", "body": b"\xc1"},
        {"kind": "task", "body": pack([99, 1, 2])},
        {
            "kind": "task",
            "body": pack([1, 1, "denoise", "m", [], bad_params]),
        },
        {"kind": "task"},
        {"kind": "free", "body": b"\x93"},
        {"kind": "free", "body": pack({"latents": {"where": "nowhere"}})},
        {"kind": "yield", "seq": "soon"},
        {"colour": "red"},
    ):
        bench.redis.xadd(stream, fields)
    spec, old = bench.encoded("a")
    bench.dispatch((spec, old), stop=5, seq=1)
    assert bench.report()[1] == b"1"
    until(lambda: bench.redis.xlen(stream) == 0, "an empty stream")


def test_parameters_too_long_for_a_message_are_read_from_the_trajectory(bench: Bench) -> None:
    """Steps are counted right too, in progress and at the end."""
    spec, old = bench.encoded("a", steps=4, prompt="long " * 1000)
    bench.dispatch((spec, old), stop=2, seq=1, params=False)
    report, _ = bench.report()
    assert (report.rows[0].step, report.rows[0].next_stage) == (2, DENOISE)
    assert bench.table.record(spec)["progress"] == "0.500"


def test_a_row_that_ended_is_left_out_of_a_shared_task(bench: Bench, arena: Arena) -> None:
    """Its neighbour runs and counts."""
    filler, a, b = bench.encoded("f", steps=1000), bench.encoded("a"), bench.encoded("b")
    bench.dispatch(filler, stop=1000, seq=1)
    bench.dispatch(a, b, stop=5, seq=2)
    bench.finish("a")
    bench.table.run(bench.table.t.yield_(1, ["w"]))
    bench.report()
    report, flags = bench.report()
    assert flags == b"01"
    assert [row.step for row in report.rows] == [0, 5]
    until(lambda: arena.stats().claims == 2, "the states of f and b only")


def test_draining_ends_the_chunk_at_its_next_step_and_hands_the_rest_back(bench: Bench) -> None:
    """Nothing is lost, nothing is counted as an attempt."""
    running, queued = bench.encoded("a", steps=1000), bench.encoded("b")
    bench.dispatch(running, stop=1000, seq=1)
    until(lambda: bench.redis.hget(bench.keys.job("a"), "step") not in (None, b"0"), "a step")
    bench.dispatch(queued, stop=5, seq=2)
    until(lambda: bench.worker._inbox._tasks, "the second task in the inbox")
    bench.leave()
    first, _ = bench.report()
    second, flags = bench.report()
    assert 0 < first.rows[0].step < 1000
    assert first.draining
    assert (second.seq, second.returned, second.draining, flags) == (2, True, True, b"1")
    assert bench.next_report()[b"kind"] == b"bye"
    for spec, _ in (running, queued):
        assert bench.table.trajectory(spec)["attempts"] == "0"
        assert bench.table.trajectory(spec)["seq"] == "0"
    for job in "ab":  # nobody is there to be told
        packed = bench.redis.hget(bench.keys.trajectory(job), "handles")
        for handle in unpack_handles(packed).values():
            bench.store.free(handle)


def test_a_bug_in_a_figure_does_not_end_the_heartbeat(caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, and the next beat comes."""
    beats = iter([ValueError("dictionary changed size"), KeyError("x"), None, None])
    beaten = threading.Event()

    def beat() -> None:
        if (error := next(beats)) is not None:
            raise error
        beaten.set()

    pulse = Pulse(beat, lambda seq, steps: None, 60.0)
    pulse.start()
    assert beaten.wait(30.0)
    pulse.stop()
    pulse.join(30.0)
    assert [r.levelname for r in caplog.records if "heartbeat" in r.message] == ["ERROR"]


def test_waiting_for_redis_is_not_hanging() -> None:
    """A worker that wrote its state into a Redis that was away is not taken for one that hangs."""
    told: list[str] = []
    away = threading.Event()
    away.set()
    tried, back = threading.Event(), threading.Event()

    def beat() -> None:
        if not told or not away.is_set():
            told.append(pulse.motion())
            if len(told) == 2:
                back.set()
            return
        tried.set()
        raise ConnectionError("away")

    pulse = Pulse(beat, lambda seq, steps: None, 0.01)
    pulse.begin(7)
    pulse._motion = replace(pulse._motion, moved=pulse._motion.moved - 3600.0)  # type: ignore[operator]
    pulse.start()
    assert tried.wait(30.0)
    away.clear()
    assert back.wait(30.0)
    pulse.stop()
    pulse.join(30.0)
    first, second = (told[0].split(), told[1].split())
    assert (first[0], second[0]) == ("7", "7")
    assert int(first[2]) >= 3_600_000
    assert int(second[2]) < 600_000


def test_a_lapsed_lease_is_taken_up_again(bench: Bench) -> None:
    """A worker that was cut off says hello once more and works on."""
    bench.redis.delete(bench.keys.worker("w"))
    assert bench.next_report()[b"kind"] == b"hello"
    bench.dispatch(bench.encoded("a"), stop=5, seq=1)
    assert bench.report()[1] == b"1"


# -- messages ----------------------------------------------------------------------------


def test_messages_come_back_as_they_were_sent(arena: Arena) -> None:
    handle = HandleStore("here", arena).put("a", 1, "latents", Parcel({}, b"x"))
    row = TaskRow("a", 1, 2, False, pack({"prompt": "x"}), pack_handles({"latents": handle}))
    task, raw = unpack_task(pack_task(7, DENOISE, "m", ("w",), [row]))
    assert raw == [row]
    assert (task.seq, task.rows[0].handles, task.rows[0].params) == (
        7, {"latents": handle}, {"prompt": "x"},
    )  # fmt: skip
    report = Report(7, "w", DENOISE, (ReportRow("a", 2, DECODE, b"h"),), 1.5, True, True)
    assert unpack_report(pack_report(report)) == report
    HandleStore("here", arena).free(handle)


def test_a_task_message_stays_under_its_limit() -> None:
    """Long parameters are left out, and the row says so by having none."""
    row = TaskRow("a", 0, 1, True, pack({"prompt": "x" * 10_000}), b"")
    message = pack_task(1, DENOISE, "m", ("w",), [row])
    assert len(message) < 8000
    assert unpack_task(message)[1][0].params == b""


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", pack(7), pack([]), pack([1]), pack([2, 1, 2, 3, 4, 5, 6, 7]),
     pack([1, 1, "w", "s", 5, 0.0, False, False]),
     pack([1, 1, "w", "s", [[1]], 0.0, False, False])],
)  # fmt: skip
def test_what_is_no_message_is_refused_as_such(data: bytes) -> None:
    """By one kind of error, whatever is wrong."""
    with pytest.raises(MessageError):
        unpack_report(data)
    with pytest.raises(MessageError):
        unpack_task(data)
