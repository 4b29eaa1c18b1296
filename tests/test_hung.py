"""Workers that heartbeat and get nothing done, and those that come back late."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common import health
from common.asks import Ask
from common.health import Sick, check_worker
from common.keys import Keys
from common.messages import Report, ReportRow
from common.record import WorkerRecord
from common.settings import Settings
from common.stage import DECODE, DENOISE, ENCODE
from services.cli.main import main
from services.coordinator import events as ev
from services.coordinator.hung import DEAF, HANG_FIRST_S, HANG_S, WARM_SHAPES, Watch
from services.costs.model import Shape
from services.pool.hung import HungChildren
from services.pool.local import LocalPool
from tests.mind import Mind, kinds
from tests.processes import Processes, processes, until

# -- what the core decides -------------------------------------------------------------------


def beats(mind: Mind, name: str, seq: int, still_s: float, hung: str = "") -> list[ev.Effect]:
    """The leader looks at one worker, whose last step was `still_s` ago."""
    stage = name.split("-")[0]
    motion = ev.Motion(seq, still_s, mind.now)
    worker = ev.WorkerInfo(name, stage, ("noop",), "here", hung=hung, motion=motion)
    return mind.tell(ev.Beats((worker,)))


def warm(mind: Mind) -> None:
    """Every worker has done a task of the shape that `push` asks for."""
    mind.push("warm", num_inference_steps=3)
    mind.tick()
    mind.finish_all()


@pytest.fixture
def mind() -> Mind:
    """One worker a stage, each past its first task, and job `a` at its first denoise task."""
    made = Mind()
    made.join(ENCODE, DENOISE, DECODE)
    warm(made)
    made.run_to_denoise("a")
    made.tick()
    return made


def test_a_worker_without_a_step_loses_its_task(mind: Mind) -> None:
    """The attempt counts, the worker is marked, and what waits goes to another."""
    flight = mind.last(ev.Dispatch)
    (name,) = flight.members
    assert beats(mind, name, flight.seq, HANG_S - 0.1) == []
    done = beats(mind, name, flight.seq, HANG_S + 0.1)
    assert kinds(done) == ["Mark", "Void"]
    mark, void = done
    assert (mark.worker, mark.hung) == (name, str(flight.seq))
    assert (void.seq, void.forced, void.blame) == (flight.seq, True, True)
    assert mind.core.jobs["a"].attempts == 1
    assert mind.tick() == []  # nobody else is there
    (other,) = mind.join(DENOISE)
    (again,) = [e for e in mind.tick() if isinstance(e, ev.Dispatch)]
    assert again.members == (other,)


def test_embeddings_at_hand_make_no_worker_warm_and_teach_no_cost() -> None:
    """A worker that only repeated prompts so far is given the time of a first task."""
    mind = Mind()
    (name,) = mind.join(ENCODE)
    mind.push("again")
    mind.tick()
    flight = mind.last(ev.Dispatch)
    row = ReportRow("again", 0, DENOISE, seconds=0.0005, skipped=1)
    before = mind.core.costs.estimate("noop", ENCODE, mind.core.jobs["again"].shapes[ENCODE])
    mind.tell(ev.Reported(Report(flight.seq, name, ENCODE, (row,), 0.0005), (True,)))
    mind.push("new")
    mind.tick()
    flight = mind.last(ev.Dispatch)
    assert mind.core.costs.estimate("noop", ENCODE, mind.core.jobs["new"].shapes[ENCODE]) == before
    assert beats(mind, name, flight.seq, HANG_S + 0.1) == []
    assert kinds(beats(mind, name, flight.seq, HANG_FIRST_S + 0.1)) == ["Mark", "Void"]


def test_a_worker_is_remembered_for_its_latest_shapes() -> None:
    """Users who ask for every size do not fill the leader's memory."""
    mind = Mind()
    watch = Watch()
    mind.push("a")
    job = mind.core.jobs["a"]
    for tokens in range(1, WARM_SHAPES + 50):
        job.shapes[DENOISE] = Shape(tokens)
        watch.worked("w", DENOISE, [job])
    assert len(watch._worked["w"]) == WARM_SHAPES
    assert (DENOISE, Shape(WARM_SHAPES + 49)) in watch._worked["w"]


def test_what_is_queued_behind_a_hung_task_goes_elsewhere_without_blame() -> None:
    """The script tells a task that ran from one that did not; the core takes back both."""
    mind = Mind()
    mind.join(ENCODE, DENOISE, DECODE)
    warm(mind)
    mind.run_to_denoise("a", num_inference_steps=3)  # one chunk, and b is next
    mind.run_to_denoise("b")
    mind.tick(0.28)  # about to be free
    first, second = mind.core.board.flights.values()
    assert mind.core.board.ranks["denoise-1"].queued is not None
    done = beats(mind, "denoise-1", first.seq, HANG_S + 1)
    assert [e.seq for e in done if isinstance(e, ev.Void)] == [first.seq, second.seq]


def test_slow_steps_are_given_ten_times_their_estimate() -> None:
    """A step that should take 2 s may take 20."""
    mind = Mind()
    mind.join(ENCODE, DENOISE, DECODE)
    warm(mind)
    mind.push("a")
    for _ in range(9):
        mind.core.costs.observe("noop", DENOISE, mind.core.jobs["a"].shape, 2.0)
    mind.tick()
    mind.report(mind.last(ev.Dispatch))
    mind.tick()
    flight = mind.last(ev.Dispatch)
    assert beats(mind, flight.members[0], flight.seq, 19.9) == []
    assert kinds(beats(mind, flight.members[0], flight.seq, 20.1)) == ["Mark", "Void"]


def test_a_shared_pass_may_take_what_all_its_jobs_would() -> None:
    """Also where its first job is the quickest of them."""
    mind = Mind()
    mind.join(ENCODE, DENOISE, DECODE)
    warm(mind)
    mind.run_to_denoise("quick")
    mind.tick()
    flight = mind.core.board.flights[mind.last(ev.Dispatch).seq]
    mind.push("slow", width=1024)
    slow = mind.core.jobs["slow"]
    for _ in range(9):
        mind.core.costs.observe("noop", DENOISE, slow.shape, 20.0)
    flight.jobs, flight.expected_s = ("quick", "slow"), 200.0
    (worker,) = flight.members
    limit_s = mind.core.watch.limit_s(mind.core, flight, worker)
    assert limit_s > 10 * 20.0
    assert limit_s < 10 * flight.expected_s


def test_a_first_task_of_a_shape_may_compile() -> None:
    mind = Mind()
    mind.join(ENCODE, DENOISE, DECODE)
    mind.run_to_denoise("a")
    mind.tick()
    flight = mind.last(ev.Dispatch)
    assert beats(mind, flight.members[0], flight.seq, HANG_FIRST_S - 1) == []
    assert kinds(beats(mind, flight.members[0], flight.seq, HANG_FIRST_S + 1)) == ["Mark", "Void"]


def test_a_worker_that_lets_go_of_its_task_works_again(mind: Mind) -> None:
    flight = mind.last(ev.Dispatch)
    (name,) = flight.members
    beats(mind, name, flight.seq, HANG_S + 1)
    hung = str(flight.seq)
    mind.tell(ev.Joined(ev.WorkerInfo(name, DENOISE, ("noop",), "here", hung=hung)))
    assert beats(mind, name, flight.seq, 100.0, hung) == []
    assert beats(mind, name, 0, 0.1, hung) == [ev.Mark(name, "")]
    mind.tell(ev.Joined(ev.WorkerInfo(name, DENOISE, ("noop",), "here")))
    (again,) = [e for e in mind.tick() if isinstance(e, ev.Dispatch)]
    assert again.members == (name,)


def test_a_new_leader_gives_nothing_to_a_worker_that_was_found_to_hang() -> None:
    mind = Mind()
    mind.join(ENCODE)
    mind.tell(ev.Joined(ev.WorkerInfo("d", DENOISE, ("noop",), "here", hung="7")))
    mind.run_to_denoise("a")
    assert not [e for e in mind.tick(0.5) if isinstance(e, ev.Dispatch)]


def test_a_worker_that_reads_no_tasks_is_found_too(mind: Mind) -> None:
    """Its task was given to it long ago, and it says that it is idle."""
    flight = mind.last(ev.Dispatch)
    (name,) = flight.members
    assert beats(mind, name, 0, 1000.0) == []  # idle before the task came
    mind.now += HANG_S + 1
    assert beats(mind, name, 0, HANG_S - 1) == []
    done = beats(mind, name, 0, 1000.0)
    assert done[0] == ev.Mark(name, DEAF)
    assert beats(mind, name, 0, 0.0, DEAF) == []  # for good: its process has to go


def test_a_heartbeat_from_before_a_task_says_nothing_of_it(mind: Mind) -> None:
    """The record may be as old as the lease."""
    flight = mind.last(ev.Dispatch)
    (name,) = flight.members
    before = ev.Motion(0, 1000.0, mind.now - 0.1)
    mind.now += HANG_S + 1
    worker = ev.WorkerInfo(name, DENOISE, ("noop",), "here", motion=before)
    assert mind.tell(ev.Beats((worker,))) == []


# -- real processes --------------------------------------------------------------------------

PATIENCE = {"hang_s": 1.5, "hang_first_s": 2.5, "worker_lease_s": 3.0, "leader_lease_s": 2.0}


@pytest.fixture
def pool(redis_server: str, redis_client: Any, keys: Keys, arena_path: str) -> Iterator[Processes]:
    with processes(redis_server, redis_client, keys, arena_path, **PATIENCE) as made:
        yield made


def worker(pool: Processes, pid: int | None) -> WorkerRecord | None:
    for name in pool.client.smembers(pool.keys.workers):
        record = WorkerRecord.of(
            name.decode(), pool.client.hgetall(pool.keys.worker(name.decode()))
        )
        if record.pid == pid:
            return record
    return None


def stuck_pool(pool: Processes) -> Any:
    """One of each; the denoiser's steps take an hour, and its manifest says that they are short."""
    stuck = pool.worker("denoise", noop="step_ms=3600000")
    pool.wait_for_workers(1)
    honest = pool.worker("denoise")
    pool.wait_for_workers(2)
    pool.stop(honest)
    pool.coordinator()
    for kind in ("encode", "decode"):
        pool.worker(kind)
    pool.wait_for_workers(3)
    return stuck


def test_a_job_goes_on_elsewhere_when_its_worker_hangs(
    pool: Processes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still heartbeats: without the watch its job would wait for ever."""
    stuck = stuck_pool(pool)
    pool.push("a", steps=6)
    pool.wait_for_event("a", "running")
    pool.worker("denoise")
    pool.wait_for_workers(4)
    pool.wait_for_event("a", "worker_lost")
    pool.check("a", steps=6)
    assert pool.events("a").count("worker_lost") == 1
    record = worker(pool, stuck.pid)
    assert record is not None
    assert record.hung
    url = pool.settings["redis_url"]
    assert main(["ps", "--workers", "--redis", url, "--prefix", pool.keys.prefix]) == 0
    assert f"hung (seq {record.hung})" in capsys.readouterr().out
    monkeypatch.setattr("common.health._announced", lambda _: [record.name])  # of this container
    with pytest.raises(Sick, match="found to hang"):
        check_worker(pool.client, pool.keys, DENOISE, "here")
    pool.push("b", steps=6)
    pool.check("b", steps=6)
    assert pool.record("b")["attempts"] == "0"
    pool.drained()


def test_a_frozen_worker_reports_late_and_changes_nothing(pool: Processes) -> None:
    """SIGSTOP for longer than its lease, SIGCONT: one result, the late report counted."""
    _, (frozen,) = pool.pool()
    pool.push("a", steps=60)
    pool.wait_for_event("a", "step")
    pool.signal(frozen, signal.SIGSTOP)
    pool.wait_for_event("a", "worker_lost")
    pool.worker("denoise")
    pool.check("a", steps=60)
    pool.signal(frozen, signal.SIGCONT)

    def counted() -> bool:
        record = worker(pool, frozen.pid)
        return record is not None and record.late_reports == 1

    until(counted, "the late report in the worker's record")
    assert [event for event in pool.events("a") if event == "succeeded"] == ["succeeded"]
    pool.push("b", steps=60)
    pool.check("b", steps=60)
    pool.drained()


def test_a_health_check_is_of_the_worker_that_lives_here(
    redis_client: Any, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of a dead one whose process number came again; what the dead left, the next one clears
    away."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    for stage, pid in ((DENOISE, os.getpid()), (DENOISE, dead.pid), (ENCODE, dead.pid)):
        (tmp_path / f"slackwater-{stage}-{pid}.worker").write_text(f"{stage}-old\n1")
    with pytest.raises(Sick, match="no denoise worker of this container"):
        check_worker(redis_client, keys, DENOISE, "here")
    health.announce(DENOISE, "denoise-new")
    assert [path.name for path in tmp_path.iterdir()] == [
        f"slackwater-denoise-{os.getpid()}.worker"
    ]
    with pytest.raises(Sick, match="denoise-new is not registered"):
        check_worker(redis_client, keys, DENOISE, "here")
    health.withdraw(DENOISE)
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_has_patience_with_a_child_that_hangs_and_then_none() -> None:
    """One that let go in between begins anew."""
    watched = HungChildren(after_s=30.0)
    assert watched.overdue([1, 2], 0.0) == []
    assert watched.overdue([1], 29.0) == []
    assert watched.overdue([1, 2], 31.0) == [1]
    assert watched.overdue([2], 60.0) == []
    assert watched.overdue([2], 61.0) == [2]


def test_a_launcher_kills_what_hangs_and_starts_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the pool works on."""
    monkeypatch.setattr("services.pool.supervisor.READ_S", 0.1)
    said: list[str] = []
    settings = Settings(noop="encode_ms=1,step_ms=1,decode_ms=1")
    with LocalPool(settings=settings, say=said.append) as pool, pool.client() as client:
        assert pool._supervisor is not None
        pool._supervisor._hung = HungChildren(after_s=0.3)
        (before,) = pool.workers("denoise")
        (name,) = [w.name for w in client.workers() if w.stage == DENOISE]
        client.ask(Ask((("HSET", client.keys.worker(name), "hung", DEAF),)))
        until(lambda: pool.workers("denoise") not in ([], [before]), "another denoiser")
        assert any("hangs and is killed" in line for line in said)
        assert client.submit("x", num_inference_steps=2).wait(30).status == "succeeded"
