"""queue_timeout_ms and run_timeout_ms, and how often a job may fail."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from common.job import JobStatus
from common.keys import Keys
from common.stage import DECODE, DENOISE, ENCODE
from services.coordinator import events as ev
from services.coordinator.limits import AGAIN_S, Limits
from tests.fakes import a_spec
from tests.mind import NOW, Mind, kinds
from tests.processes import Processes, processes


@pytest.fixture
def mind() -> Mind:
    made = Mind()
    made.now = NOW
    return made


def ends(mind: Mind) -> list[tuple[str, str, str]]:
    return [(e.spec.id, str(e.status), e.error_code) for e in mind.log if isinstance(e, ev.Finish)]


# -- waiting -----------------------------------------------------------------------------------


def test_a_job_not_begun_in_time_expires_at_its_moment(mind: Mind) -> None:
    """The core asks to be woken for it, so nobody has to look."""
    mind.push("a", queue_timeout_ms=700)
    mind.tick()
    arrival_s = mind.core.jobs["a"].spec.arrival_s
    mind.core.refresh_s = 100.0
    mind.tick()
    assert mind.core.wake_at == pytest.approx(arrival_s + 0.7)
    mind.now = arrival_s + 0.69
    assert mind.tick() == []
    mind.now = arrival_s + 0.71
    mind.tick()
    assert ends(mind) == [("a", "expired", "queue_timeout")]
    assert "queue_timeout_ms" in mind.last(ev.Finish).error


def test_a_job_that_has_begun_does_not_expire(mind: Mind) -> None:
    mind.join(ENCODE, DENOISE, DECODE)
    mind.push("a", queue_timeout_ms=700)
    mind.tick()
    mind.report(mind.last(ev.Dispatch))
    mind.tick(10.0)
    mind.finish_all()
    assert ends(mind) == [("a", "succeeded", "")]


def test_a_task_on_its_way_is_asked_back_and_tells_whether_it_began(mind: Mind) -> None:
    """Handed over and not begun is not begun; Redis alone knows, and the late ask is answered."""
    mind.join(ENCODE)
    mind.push("a", queue_timeout_ms=700)
    mind.tick()
    mind.now += 1.0
    done = mind.tick()
    assert kinds(done)[:1] == ["Void"]
    assert not done[0].forced
    assert ends(mind) == [("a", "expired", "queue_timeout")]


def test_a_task_that_came_back_too_late_is_not_handed_over_again(mind: Mind) -> None:
    """Whoever decides next must not find it, however often that is before its next alarm."""
    mind.join(ENCODE)
    mind.push("a", queue_timeout_ms=700)
    mind.tick()
    flight = mind.last(ev.Dispatch)
    mind.now = mind.core.jobs["a"].spec.arrival_s + 0.71
    agree = mind.answer
    mind.answer = lambda e: None if isinstance(e, ev.Void) else agree(e)  # type: ignore[method-assign]
    mind.tick()
    mind.tell(ev.Voided(flight.seq, "void", blamed=False))
    mind.tick()
    assert ends(mind) == [("a", "expired", "queue_timeout")]
    assert mind.last(ev.Dispatch) == flight


def test_a_task_that_began_unheard_is_left_alone(mind: Mind) -> None:
    mind.join(ENCODE, DENOISE, DECODE)
    mind.push("a", queue_timeout_ms=700)
    mind.tick()
    agree = mind.answer
    mind.answer = lambda e: (  # type: ignore[method-assign]
        ev.Voided(e.seq, "late", blamed=False) if isinstance(e, ev.Void) else agree(e)
    )
    mind.now += 1.0
    assert kinds(mind.tick()) == ["Void"]
    for _ in range(5):
        assert "Void" not in kinds(mind.tick(AGAIN_S))
    mind.finish_all()
    assert ends(mind) == [("a", "succeeded", "")]


# -- running -----------------------------------------------------------------------------------


def test_a_job_that_runs_too_long_is_stopped_at_its_next_step(mind: Mind) -> None:
    """While its chunk runs: the rank is asked to yield, the job ends as failed."""
    mind.join(ENCODE, DENOISE, DECODE)
    mind.push("a", num_inference_steps=50, run_timeout_ms=300)
    mind.tick()
    mind.now += 0.1
    mind.report(mind.last(ev.Dispatch))
    mind.tick()
    assert mind.core.jobs["a"].seconds == {"encode": 0.1}
    mind.tick(0.19)
    assert ends(mind) == []
    done = mind.tick(0.02)
    assert [kind for kind in kinds(done) if kind in ("Yield", "Finish")] == ["Yield", "Finish"]
    assert ends(mind) == [("a", "failed", "run_timeout")]


def test_waiting_between_chunks_is_not_running(mind: Mind) -> None:
    mind.join(ENCODE)
    mind.run_to_denoise("a", run_timeout_ms=5000)
    for _ in range(10):
        mind.tick(10.0)
    assert ends(mind) == []
    mind.join(DENOISE, DECODE)
    mind.tick()
    mind.finish_all()
    assert ends(mind) == [("a", "succeeded", "")]


def test_a_finished_job_is_not_thrown_away_for_being_late(mind: Mind) -> None:
    """Its last report took it over its limit, and it counts."""
    mind.join(ENCODE, DENOISE, DECODE)
    mind.push("a", num_inference_steps=3, run_timeout_ms=250)
    mind.tick()
    mind.finish_all()  # three tasks of 0.1 s by their workers' own clocks
    assert ends(mind) == [("a", "succeeded", "")]


def test_a_report_that_comes_while_the_job_is_being_stopped_counts(mind: Mind) -> None:
    """The script finds the job done and keeps it; the report is on its way to the core."""
    mind.join(ENCODE, DENOISE, DECODE)
    mind.push("a", num_inference_steps=3, run_timeout_ms=10_000)
    mind.tick()
    for _ in range(2):
        mind.report(mind.last(ev.Dispatch))
        mind.tick()
    decode = mind.last(ev.Dispatch)
    assert decode.stage == DECODE
    agree = mind.answer
    mind.answer = lambda e: (  # type: ignore[method-assign]
        ev.Finished("a", "done")
        if isinstance(e, ev.Finish) and e.status is JobStatus.FAILED
        else agree(e)
    )
    mind.tick(11.0)
    assert ends(mind) == [("a", "failed", "run_timeout")]
    mind.report(decode)
    assert ends(mind)[-1] == ("a", "succeeded", "")
    assert not mind.core.jobs


def test_alarms_of_ended_jobs_do_not_pile_up(mind: Mind) -> None:
    """A month's timeout, and jobs that end in a second."""
    mind.join(ENCODE, DENOISE, DECODE)
    for i in range(300):
        mind.push(f"j{i}", num_inference_steps=1, queue_timeout_ms=2e9, run_timeout_ms=1000)
        mind.tick()
        mind.finish_all()
        mind.tick(1.1)
    assert len(mind.core.limits._alarms) <= 80


def test_alarms_come_in_order() -> None:
    """Whatever the order in which jobs came: the earliest is next."""
    mind = Mind()
    limits = Limits()
    moments = [random.Random(3).uniform(1, 100) for _ in range(50)]
    for i, moment in enumerate(moments):
        spec = a_spec(f"{i + 1}-0", id=f"j{i}", queue_timeout_ms=1000 * moment)
        limits.watch(mind.core._job_of(spec))
    assert limits.next_s() == pytest.approx(
        min((i + 1) / 1000 + moment for i, moment in enumerate(moments))
    )


# -- attempts ----------------------------------------------------------------------------------


def test_progress_beyond_a_failure_counts_attempts_anew(mind: Mind) -> None:
    """A long job whose workers die of their own causes, one every few chunks, is no poison."""
    mind.join(ENCODE, DECODE)
    mind.run_to_denoise("a", num_inference_steps=60)
    for deaths in range(6):
        (name,) = mind.join(DENOISE)
        mind.tick()
        mind.report(mind.last(ev.Dispatch))
        mind.tick()
        assert mind.core.jobs["a"].attempts == 0, deaths
        mind.tell(ev.Left(name, lost=True))
        assert mind.core.jobs["a"].attempts == 1
    assert ends(mind) == []


def test_a_job_that_always_fails_at_one_place_is_poison(mind: Mind) -> None:
    """Also one that is rewound in between and comes as far as that again."""
    mind.join(ENCODE, DENOISE, DECODE)
    agree = mind.answer
    mind.answer = lambda e: (  # type: ignore[method-assign]
        ev.Rewound(e.job, "rewound") if isinstance(e, ev.Rewind) else agree(e)
    )
    mind.push("a", num_inference_steps=10)
    for _ in range(60):
        mind.tick(0.4)
        for seq in list(mind.core.board.flights):
            flight = next(e for e in mind.log if isinstance(e, ev.Dispatch) and e.seq == seq)
            lost = flight.stage == DENOISE and flight.rows[0].start == 3
            mind.report(flight, code="state_lost" if lost else "")
        if not mind.core.jobs:
            break
    assert ends(mind) == [("a", "failed", "state_lost")]
    starts = [
        e.rows[0].start for e in mind.log if isinstance(e, ev.Dispatch) and e.stage == DENOISE
    ]
    assert starts == [0, 3, 0, 3, 0, 3]


def test_the_most_attempts_are_a_setting(mind: Mind) -> None:
    mind.core.max_attempts = 1
    (name,) = mind.join(ENCODE)
    mind.push("a")
    mind.tick()
    mind.tell(ev.Left(name, lost=True))
    assert ends(mind) == [("a", "failed", "worker_lost")]


# -- the whole pool ----------------------------------------------------------------------------


@pytest.fixture
def pool(redis_server: str, redis_client: Any, keys: Keys, arena_path: str) -> Iterator[Processes]:
    with processes(redis_server, redis_client, keys, arena_path) as made:
        yield made


def test_both_limits_on_a_real_pool(pool: Processes) -> None:
    """One job runs too long and is stopped in its chunk, one waits too long behind it, one is as
    quick as it said."""
    pool.settings.update(noop="step_ms=20", chunk_ms=10**6)
    pool.pool()
    pool.push("good", steps=5, queue_timeout_ms=20_000, run_timeout_ms=20_000)
    pool.check("good", steps=5)
    pool.push("long", steps=1000, run_timeout_ms=2000, slo_ms=3000)
    pool.wait_for_event("long", "step")
    stopped = pool.result("long")
    assert (stopped.status, stopped.error_code) == ("failed", "run_timeout")
    assert stopped.params["run_timeout_ms"] == 2000
    pool.push("next", steps=2)
    pool.check("next", steps=2)  # the rank is free: a thousand steps would have taken 20 s
    pool.client.xadd(pool.keys.jobs, {"id": "x", "prompt": "x", "queue_timeout_ms": "-1"})
    assert pool.result("x").field == "queue_timeout_ms"
    pool.drained()


def test_a_job_that_finds_no_worker_expires(pool: Processes) -> None:
    pool.coordinator()
    stages = [pool.worker(kind) for kind in (ENCODE, DENOISE, DECODE)]
    pool.wait_for_workers(3)
    for stage in stages:
        pool.stop(stage)
    pool.push("a", queue_timeout_ms=300)
    ended = pool.result("a")
    assert (ended.status, ended.error_code) == ("expired", "queue_timeout")
