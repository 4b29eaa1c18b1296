"""Jobs in one forward pass: who is taken along, what it is worth, and that nobody pays for it."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from common.connect import writing
from common.job import JobSpec
from common.keys import Keys
from common.messages import Report, ReportRow
from common.settings import Settings
from common.stage import DECODE, DENOISE, ENCODE
from services.coordinator import events as ev
from services.coordinator.learning import learn
from services.coordinator.records import read_workers
from services.coordinator.state import Job
from services.costs.model import CostModel, Shape
from services.policies import make_policy
from services.policies.base import Candidate, View
from services.policies.batches import Pace, pass_of, share
from services.pool.local import LocalPool
from services.simulator.calibrations import Calibration, flat
from services.simulator.outcome import Outcome
from services.simulator.pool import Overheads
from services.simulator.simulation import Setting, simulate
from services.simulator.traces import TraceJob
from tests.candidates import NOW, candidate, rank, runs, view
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
    return View(ranks=[], shared_s=lambda shared: (fixed_s + shared.rows * row_s, True))


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


def test_a_pass_grows_until_the_next_member_no_longer_pays() -> None:
    """The third still saves a fifth of what each of the first two costs there; the fourth, whom
    they would all have to wait for, does not."""
    flattening = a_view(row_s=0.06, fixed_s=0.04)
    first, *others = [waiting(f"j{i}") for i in range(9)]
    assert len(share(first, others, flattening, 0.0)[0]) == 3


def test_a_batch_keeps_to_what_the_ranks_memory_holds() -> None:
    """Of 16 tokens a row; one that is too large is passed over, and a job alone is not refused."""
    first, *others = waiting("first", rows=2), waiting("big", rows=4), waiting("small")
    assert [m.job for m in share(first, others, CHEAP, 0.0, most_units=60)[0]] == ["first", "small"]
    assert [m.job for m in share(first, others, CHEAP, 0.0, most_units=16)[0]] == ["first"]


def test_rows_of_other_sizes_count_as_parts_of_the_largest() -> None:
    """Two of 16 tokens beside one of 64 are half a row more; in memory they may be whole ones."""
    large = replace(waiting("large"), tokens=64)
    found = pass_of([large, waiting("a"), waiting("b")])
    assert (found.rows, found.tokens, found.mixed, found.units) == (2, 64, True, 3 * 64)
    assert not pass_of([waiting("a"), waiting("b")]).mixed


def test_beyond_the_measured_rows_one_more_is_tried_where_all_can_bear_that() -> None:
    """No gain is expected there: two such rows count as two passes."""
    known = View(ranks=[], shared_s=lambda shared: (0.08 + 0.02 * shared.rows, shared.rows <= 2))
    first, *others = [waiting(f"j{i}") for i in range(5)]
    members, step_s = share(first, others, known, 0.0)
    assert [m.job for m in members] == ["j0", "j1", "j2"]
    assert step_s == pytest.approx(0.12 + 0.1)
    tight = replace(first, deadline_s=1.5)  # ten steps of 0.12 s are fine, of 0.22 s are not
    assert [m.job for m in share(tight, others, known, 0.0)[0]] == ["j0", "j1"]


def test_prompts_and_pictures_share_passes_as_steps_do() -> None:
    for stage in (ENCODE, DECODE):
        first, *others = (
            replace(waiting(f"j{i}"), stage=stage, task_s=0.1, step=10 if stage == DECODE else 0)
            for i in range(3)
        )
        members, seconds = share(first, others, CHEAP, 0.0)
        assert [m.job for m in members] == ["j0", "j1", "j2"]
        assert seconds == pytest.approx(0.14)
        assert len(share(first, others, LINEAR, 0.0)[0]) == 1
        tight = replace(first, remaining_s=0.1, deadline_s=0.11)
        assert len(share(tight, others, CHEAP, 0.0)[0]) == 1


def test_a_late_job_takes_no_time_of_one_that_can_make_it() -> None:
    """It shares passes with other late ones; one that is merely out of the set may come along."""
    slack = make_policy("slack")
    for name, due_s in (("kept", 3.0), ("late", -1.0), ("later", -2.0)):
        slack.add(candidate(name, due_s=due_s, batch="m 64", tokens=16))
    pool = view(rank("r"), shared_s=lambda shared: (0.08 + 0.02 * shared.rows, True))
    assert runs(slack.plan(pool, NOW)) == {"r": ["kept"]}
    slack.remove("kept")
    assert sorted(runs(slack.plan(pool, NOW))["r"]) == ["late", "later"]


def test_without_the_setting_nobody_shares() -> None:
    slack = make_policy("slack")
    for name in ("a", "b"):
        slack.add(candidate(name, batch="m 64", tokens=16))
    pool = view(rank("r"), batch=False, shared_s=lambda shared: (0.1, True))
    assert runs(slack.plan(pool, NOW)) == {"r": ["a"]}


# -- what is learned -----------------------------------------------------------------------------


def test_a_curve_goes_on_as_passes_are_reported() -> None:
    """Between two numbers of rows that were reported it is a line; beyond, it is not known."""
    costs = CostModel()
    for rows in (1, 2, 6):
        for _ in range(3):
            costs.observe("m", DENOISE, Shape(16, rows), 0.08 + 0.02 * rows)
    seconds, known = costs.shared("m", DENOISE, Shape(16, 4))
    assert known
    assert seconds == pytest.approx(0.16)
    assert not costs.shared("m", DENOISE, Shape(16, 8))[1]
    assert not costs.shared("m", DENOISE, Shape(64, 2))[1]


def test_sizes_that_are_mixed_have_a_factor_of_their_own() -> None:
    costs = CostModel()
    for _ in range(3):
        costs.observe("m", DENOISE, Shape(64, 2), 0.2)
    for _ in range(3):
        costs.observe_mixed("m", Shape(64, 2), 0.3)
    assert costs.shared("m", DENOISE, Shape(64, 2), mixed=True)[0] == pytest.approx(0.3)
    assert costs.shared("m", DENOISE, Shape(64, 2))[0] == pytest.approx(0.2)


@pytest.mark.parametrize("stage", [ENCODE, DECODE])
def test_half_of_a_shared_pass_is_not_what_a_job_alone_takes(stage: str) -> None:
    """Where one of two that shared it was canceled meanwhile, nothing is learned of the other."""
    told: list[tuple[Shape, float]] = []
    costs: Any = SimpleNamespace(observe=lambda model, stage, shape, s: told.append((shape, s)))
    manifest = {**BATCHING, "batch": {"same": ["width"]}}
    jobs = {}
    for name in ("a", "b"):
        params = {"num_inference_steps": 4, "width": 64, "height": 64}
        spec = JobSpec(name, name, "", "noop", params, 0.0, 0, 9.0, "run", 0, exact=False)
        jobs[name] = Job.of(spec, manifest)
        jobs[name].stage, jobs[name].seq = stage, 1
    assert jobs["a"].keys[stage]
    rows = tuple(ReportRow(name, 4, "denoise", seconds=0.5) for name in jobs)
    learn(costs, Report(1, "w", stage, rows, 1.0), (True, False), jobs)
    assert told == []
    learn(costs, Report(1, "w", stage, rows, 1.0), (True, True), jobs)
    ((shape, seconds),) = told
    assert (shape.n, seconds) == (2, 1.0)


def test_the_pace_follows_what_was_gained() -> None:
    pace = Pace()
    for _ in range(50):
        pace.ran(3.0, 1.0)
    assert pace.now == 3.0
    for _ in range(100):
        pace.ran(1.0, 1.0)
    assert pace.now == 1.0


# -- through the core ----------------------------------------------------------------------------


def batching(ahead: int = 2) -> Mind:
    """A pool whose forward passes hardly get longer by another row."""
    mind = Mind(ahead=ahead)
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


def test_what_decodes_share_spoils_no_estimate_of_one_alone() -> None:
    """A row's seconds are its share: those of a task are added up, and told as a pass of so many
    pictures; with guidance or without, a picture is one."""
    mind = batching()
    for i in range(3):
        mind.push(f"j{i}", exact="false", slo_ms=60_000, width=64, height=64)
    jobs = list(mind.core.jobs.values())
    costs, shape = mind.core.costs, jobs[0].shapes[DECODE]
    for seq in range(1, 4):
        for job in jobs:
            job.stage, job.seq = DECODE, seq
        rows = tuple(ReportRow(job.spec.id, 10, DECODE, seconds=0.1) for job in jobs)
        mind.tell(ev.Reported(Report(seq, "decode-2", DECODE, rows, 0.3), (True,) * 3))
        jobs[0].seq = 10 + seq
        alone = (ReportRow("j0", 10, DECODE, seconds=0.2),)
        mind.tell(ev.Reported(Report(10 + seq, "decode-2", DECODE, alone, 0.2), (True,)))
    assert costs.estimate("noop", DECODE, shape) == pytest.approx(0.2)
    seconds, known = costs.shared("noop", DECODE, Shape(shape.tokens, 3))
    assert known
    assert seconds == pytest.approx(0.3)


def test_a_pass_is_told_once_however_many_shared_it() -> None:
    """Else one pass of eight would outweigh what was reported before."""
    mind = batching()
    for i in range(8):
        mind.push(f"j{i}", exact="false", slo_ms=60_000)
    jobs = list(mind.core.jobs.values())
    for job in jobs:
        job.stage, job.seq = DENOISE, 5
    before = mind.core.costs.estimate("noop", DENOISE, Shape(64, 8))
    rows = tuple(ReportRow(j.spec.id, 3, DENOISE, step_s=0.5, rows=8) for j in jobs)
    mind.tell(ev.Reported(Report(5, "denoise-1", DENOISE, rows, 1.5), (True,) * 8))
    assert mind.core.costs.estimate("noop", DENOISE, Shape(64, 8)) == pytest.approx(before)
    assert mind.core.jobs["j0"].rows == 8


def test_decodes_share_a_task_where_that_was_found_to_pay() -> None:
    for each_s, most in ((0.05, 3), (0.2, 1)):
        mind = batching()
        decode = Shape(16)
        for pictures in range(1, 4):
            for _ in range(3):
                seconds = 0.2 + each_s * (pictures - 1)
                mind.core.costs.observe("noop", DECODE, Shape(decode.tokens, pictures), seconds)
        for i in range(3):
            mind.push(f"j{i}", exact="false", slo_ms=60_000, width=64, height=64)
        for job in mind.core.jobs.values():
            job.stage, job.step = DECODE, 10
            mind.core.ready(job)
        mind.tick()
        tasks = [e for e in mind.log if isinstance(e, ev.Dispatch) and e.stage == DECODE]
        assert [len(task.rows) for task in tasks] == [most]
        assert tasks[0].expected_s == pytest.approx(0.2 + each_s * (most - 1))


def test_a_rank_is_given_no_more_than_its_worker_says_that_it_holds(
    redis_client: Any, keys: Keys
) -> None:
    counts = {"a": '{"most_units": 384}', "b": '{"most_units": 0}', "c": "no JSON"}
    for name, text in counts.items():
        fields = {"stage": DENOISE, "models": "noop", "host": "here", "counts": text}
        redis_client.hset(keys.worker(name), mapping=fields)
        redis_client.expire(keys.worker(name), 60)
    found = read_workers(redis_client, keys, list(counts))
    workers = [worker for worker in found.values() if worker is not None]
    assert [worker.most_units for worker in workers] == [384, inf, inf]
    mind = batching(ahead=9)
    (denoiser,) = (r for r in mind.core.view.ranks if r.stage == DENOISE)
    assert denoiser.most_units == inf
    mind.tell(ev.Beats((replace(workers[0], name=denoiser.name),)))
    assert denoiser.most_units == 384
    for i in range(8):
        mind.push(f"j{i}", exact="false", slo_ms=60_000)
    mind.finish_all()
    denoise = [e for e in mind.log if isinstance(e, ev.Dispatch) and e.stage == DENOISE]
    assert max(len(e.rows) for e in denoise) == 6


def test_the_record_has_the_key() -> None:
    mind = batching()
    (submit, *_) = mind.push("a", exact="false", width=64, height=64)
    assert isinstance(submit, ev.Submit)
    assert submit.batch == "noop width=64 height=64"


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
        assert max(result.timings["rows_per_step"] for result in results) > 1
        assert jobs[0].output()[:4] == b"\x89PNG"


def test_decodes_of_a_real_pool_share_a_pass() -> None:
    """Jobs whose steps ended together are decoded in one task, and every one has its picture."""
    with LocalPool(settings=Settings(exact=False)) as pool, pool.client() as client:
        together = 0
        for round_ in range(4):  # those before teach what a pass takes
            jobs = [
                client.submit(
                    "a red circle", width=64, height=64, num_inference_steps=12, seed=i,
                    slo_ms=60_000, id=f"j{round_}-{i}",
                )
                for i in range(6)
            ]  # fmt: skip
            for job in jobs:
                job.wait(60).raise_for_status()
                assert job.output()[:4] == b"\x89PNG"
            redis: Any = writing(pool.redis_url)
            for seq in range(1, int(redis.get(pool.keys.seq)) + 1):
                stage, names = redis.hmget(pool.keys.task(seq), "stage", "jobs")
                if stage == DECODE.encode():
                    together = max(together, len(names.split()))
            redis.close()
            if together > 1:
                break
        assert together > 1
