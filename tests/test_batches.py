"""Jobs in one forward pass: who is taken along, what it is worth, and that nobody pays for it."""

from __future__ import annotations

from typing import Any

import pytest

from common.settings import Settings
from common.stage import DECODE, DENOISE, ENCODE
from services.coordinator import events as ev
from services.policies.base import Candidate, View
from services.policies.batches import Pace, share
from services.pool.local import LocalPool
from services.simulator.calibrations import Calibration, flat
from services.simulator.outcome import Outcome
from services.simulator.pool import Overheads
from services.simulator.simulation import Setting, simulate
from services.simulator.traces import TraceJob
from tests.fakes import MANIFEST
from tests.mind import Mind

BATCHING: dict[str, Any] = {**MANIFEST, "model": "noop", "batch": {"same": ["width", "height"]}}


def waiting(job: str, due: float = 1000.0, steps: int = 10, rows: int = 1) -> Candidate:
    return Candidate(
        job, DENOISE, "m", 0.0, due, 0, 0.1 * rows * steps, 0.0, 0.1 * rows, 0, steps,
        batch="m 64", rows=rows, tokens=16,
    )  # fmt: skip


def a_view(row_s: float, fixed_s: float) -> View:
    """A forward of n rows takes fixed + n rows; one alone takes 0.1 s."""
    return View(ranks=[], shared_step_s=lambda candidate, rows: fixed_s + rows * row_s)


CHEAP = a_view(row_s=0.02, fixed_s=0.08)  # rows cost a fifth of a pass
LINEAR = a_view(row_s=0.1, fixed_s=0.0)  # and here as much as alone


def test_company_is_taken_where_it_pays() -> None:
    first, *others = [waiting(f"j{i}") for i in range(4)]
    members, step_s = share(first, others, CHEAP, 0.0)
    assert [m.job for m in members] == ["j0", "j1", "j2", "j3"]
    assert step_s == pytest.approx(0.16)
    members, step_s = share(first, others, LINEAR, 0.0)
    assert [m.job for m in members] == ["j0"]


def test_nobody_is_made_late_by_company() -> None:
    """Ten steps of 0.1 s in 1.1 s: there is room for no second row, though it would pay."""
    tight, easy = waiting("tight", due=1.1), waiting("easy")
    assert [m.job for m in share(tight, [easy], CHEAP, 0.0)[0]] == ["tight"]
    assert [m.job for m in share(easy, [tight], CHEAP, 0.0)[0]] == ["easy"]
    late = waiting("late", due=0.5)  # it has nothing to lose
    assert [m.job for m in share(easy, [late], CHEAP, 0.0)[0]] == ["easy", "late"]


def test_rows_count_and_not_jobs() -> None:
    """A guided job with two pictures is four rows."""
    first, big = waiting("first"), waiting("big", rows=4)
    _, step_s = share(first, [big], CHEAP, 0.0)
    assert step_s == pytest.approx(0.08 + 5 * 0.02)


def test_the_pace_follows_what_was_gained() -> None:
    pace = Pace()
    for _ in range(50):
        pace.ran(3.0, 1.0)
    assert pace.now == 3.0
    for _ in range(100):
        pace.ran(1.0, 1.0)
    assert pace.now == 1.0


# -- through the core ----------------------------------------------------------------------------


def batching(**fields: Any) -> Mind:
    """A pool whose forward passes hardly get longer by another row."""
    mind = Mind()
    mind.tell(ev.ManifestsRead({"noop": BATCHING}))
    mind.join(ENCODE, DENOISE, DECODE)
    for rows in range(1, 9):
        for _ in range(3):
            shape = mind.core._job_of(_spec(mind)).shape
            costs = mind.core.costs
            costs.observe("noop", DENOISE, type(shape)(shape.tokens, rows), 0.08 + 0.02 * rows)
    return mind


def _spec(mind: Mind) -> Any:
    from common.params import PoolDefaults, accept
    from common.push import read_push
    from tests.fakes import raw_push

    push = read_push("1-0", raw_push(prompt="x", exact="false"))
    return accept(push, mind.core.manifests, PoolDefaults())


def test_jobs_that_are_not_exact_share_a_task_and_exact_ones_do_not() -> None:
    for exact, most in (("false", 3), ("true", 1)):
        mind = batching()
        for i in range(3):
            mind.push(f"j{i}", exact=exact, slo_ms=60_000, num_inference_steps=10)
        mind.finish_all()
        denoise = [e for e in mind.log if isinstance(e, ev.Dispatch) and e.stage == DENOISE]
        assert max(len(e.rows) for e in denoise) == most
        assert all(e.together == (len(e.rows) > 1 or exact == "false") for e in denoise)


def test_jobs_of_another_size_are_not_taken_along() -> None:
    mind = batching()
    for i, width in enumerate((64, 64, 128)):
        mind.push(f"j{i}", exact="false", slo_ms=60_000, width=width, height=64)
    mind.finish_all()
    for effect in mind.log:
        if isinstance(effect, ev.Dispatch) and effect.stage == DENOISE:
            jobs = {row.job for row in effect.rows}
            assert jobs <= {"j0", "j1"} or jobs == {"j2"}


def test_the_record_has_the_key() -> None:
    mind = batching()
    (submit, *_) = mind.push("a", exact="false", width=64, height=64)
    assert isinstance(submit, ev.Submit)
    assert submit.candidate.batch == "noop width=64 height=64"


# -- what it is worth ----------------------------------------------------------------------------


def overloaded(batch: bool) -> Outcome:
    """Two and a half times what one rank can do alone, where a second row costs a fifth."""

    def seconds(tokens: int) -> float:
        return 0.1

    class Shared(Calibration):
        def seconds(self, stage: str, tokens: int, n: int = 1, forwards: int = 1) -> float:
            return 0.08 + 0.02 * n if stage == DENOISE else 0.0

    costs = Shared("shared", "made up", seconds, flat(0.0), flat(0.0))
    trace = [
        TraceJob(f"j{i:03}", "c", 0.4 * i, 0.4 * i + 3.0, 1.0, 1, 10) for i in range(300)
    ]  # fmt: skip
    plain = Overheads(jitter=0.0)
    return simulate(trace, Setting(costs=costs, overheads=plain, batch=batch, chunk_s=0.3))


def test_under_overload_batches_keep_more_deadlines() -> None:
    alone, together = (
        sum(job.on_time for job in overloaded(batch).jobs.values()) for batch in (False, True)
    )
    assert alone < 150
    assert together > 290


def test_a_real_pool_batches_and_says_so() -> None:
    """Four jobs at once on the bundled model: pictures come, and the results name the rows."""
    settings = Settings(exact=False)
    with LocalPool(settings=settings) as pool, pool.client() as client:
        for _ in range(2):  # the first round teaches what rows cost
            jobs = [
                client.submit(
                    "a red circle",
                    width=64,
                    height=64,
                    num_inference_steps=12,
                    seed=i,
                    slo_ms=60_000,
                )
                for i in range(6)
            ]
            results = [job.wait(60).raise_for_status() for job in jobs]
        assert max(result.timings.get("batch_rows", 0) for result in results) >= 2
        assert jobs[0].output()[:4] == b"\x89PNG"
