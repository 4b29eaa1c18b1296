"""The benchmarks of the real system: what load and deadlines mean, and how runs are scored."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.bound import bound
from benchmarks.openloop import Run, count_switches, run_all, run_trace, running_pool
from benchmarks.sim_fidelity import Piece, Story, costs, overheads, spread, story_of
from benchmarks.slo import save
from benchmarks.slo_score import (
    Measured,
    ahead,
    describe,
    note,
    score,
    slowdown,
    table,
    verdict,
)
from benchmarks.traffic import (
    MIXES,
    bottleneck,
    costs_of,
    make_trace,
    medians,
    params_of,
    params_of_trace,
    sample,
)
from common.record import JobEvent
from common.settings import Settings
from common.stage import DECODE, DENOISE, ENCODE
from services.simulator.generate import BLOCK
from services.simulator.outcome import JobOutcome, Outcome
from services.simulator.pool import Overheads
from services.simulator.simulation import Setting, simulate
from services.simulator.traces import TraceJob

KINDS = MIXES["mixed"]
ALONE = {"S": 0.3, "M": 1.25, "L": 6.8}
STAGES_OF = {
    "S": {ENCODE: 0.005, DENOISE: 0.27, DECODE: 0.025},
    "M": {ENCODE: 0.005, DENOISE: 1.15, DECODE: 0.09},
    "L": {ENCODE: 0.005, DENOISE: 6.5, DECODE: 0.26},
}


def trace_of(load: float = 0.9, jobs: int = 160, seed: int = 0) -> list[TraceJob]:
    return make_trace(KINDS, STAGES_OF, ALONE, load, jobs, seed)


# -- the trace ---------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.7, 0.9, 1.1, 1.4])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_load_is_what_the_trace_asks_of_the_bottleneck(load: float, seed: int) -> None:
    """Exactly, not on average: all its work over the time in which it comes."""
    trace = trace_of(load, 150, seed)
    work = sum(STAGES_OF[job.request_class][DENOISE] for job in trace)
    assert work / trace[-1].arrival_s == pytest.approx(load)


def test_the_bottleneck_is_the_stage_with_most_to_do() -> None:
    assert bottleneck(KINDS, STAGES_OF)[0] == DENOISE
    slow_decode = {name: {**stages, DECODE: 10.0} for name, stages in STAGES_OF.items()}
    busiest, seconds = bottleneck(KINDS, slow_decode)
    assert (busiest, seconds) == (DECODE, pytest.approx(10.0))
    trace = make_trace(KINDS, slow_decode, ALONE, 0.5, 40, 0)
    assert 40 * 10.0 / trace[-1].arrival_s == pytest.approx(0.5)


def test_every_block_has_each_class_by_its_share() -> None:
    trace = trace_of()
    for at in range(0, len(trace), BLOCK):
        block = [job.request_class for job in trace[at : at + BLOCK]]
        assert {kind.name: block.count(kind.name) for kind in KINDS} == {
            kind.name: round(BLOCK * kind.share) for kind in KINDS
        }


def test_arrivals_are_poisson_and_seeded() -> None:
    """Exponential gaps: their mean is their standard deviation."""
    trace = trace_of(jobs=2000)
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(trace)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)
    assert trace_of(seed=3) == trace_of(seed=3)
    assert trace_of(seed=3) != trace_of(seed=4)


def test_a_job_is_due_three_times_its_standalone_time_after_it_came() -> None:
    for job in trace_of():
        assert job.deadline_s - job.arrival_s == pytest.approx(3 * ALONE[job.request_class])
        assert job.standalone_s == ALONE[job.request_class]


def test_no_two_jobs_share_a_prompt() -> None:
    trace = trace_of()
    params = params_of_trace(KINDS, trace, seed=0)
    assert len({one["prompt"] for one in params}) == len(trace)
    sides = {kind.name: kind.side for kind in KINDS}
    assert [one["width"] for one in params] == [sides[job.request_class] for job in trace]
    assert params == params_of_trace(KINDS, trace, seed=0)


def test_a_sample_has_one_of_the_longest_class_a_round() -> None:
    found = [kind.name for kind in sample(KINDS, rounds=2, seed=0)]
    assert {name: found.count(name) for name in "SML"} == {"S": 6, "M": 6, "L": 2}


def test_costs_are_the_measured_ones_by_size() -> None:
    measured = costs_of(KINDS, STAGES_OF)
    for job in trace_of(jobs=40):
        assert measured.standalone_s(job.tokens, job.steps) == pytest.approx(
            sum(STAGES_OF[job.request_class].values())
        )


def test_the_bound_of_a_trace_grows_as_its_load_falls() -> None:
    measured = costs_of(KINDS, STAGES_OF)
    most = [bound(trace_of(load, 60), measured)["bound"] for load in (0.5, 1.4)]
    assert most[0] > most[1]


def test_medians_are_by_class_and_stage() -> None:
    rows = [
        ("S", {DENOISE: 1.0}),
        ("S", {DENOISE: 9.0}),
        ("S", {DENOISE: 2.0}),
        ("L", {DENOISE: 4.0}),
    ]
    assert medians(rows) == {"S": {DENOISE: 2.0}, "L": {DENOISE: 4.0}}


# -- a real run --------------------------------------------------------------------------


def test_a_trace_through_a_real_pool_comes_back_job_by_job() -> None:
    """Work as the stages reported it, switches as the dispatches tell them."""
    with running_pool(Settings(noop="encode_ms=1,step_ms=1,decode_ms=2", policy="fcfs")) as pool:
        warm = run_all(pool, params_of(KINDS, 1), "warm")
        assert [ran.status for ran in warm.values()] == ["succeeded"] * 3
        times = {k.name: {ENCODE: 0.001, DENOISE: 0.001 * k.steps, DECODE: 0.002} for k in KINDS}
        trace = make_trace(KINDS, times, dict.fromkeys(ALONE, 100.0), 1.0, 20, seed=0)
        run = run_trace(pool, trace, params_of_trace(KINDS, trace, 0))
        first = trace[0]
        arrived_s = pool.ran([first.id])[first.id].arrived_s
        story = story_of(first.id, first.request_class, arrived_s, pool.events(first.id))
    assert list(run.outcome.jobs) == [job.id for job in trace]
    for job in run.outcome.jobs.values():
        assert job.on_time
        assert job.started_s is not None
        assert job.finished_s is not None
        assert job.job.arrival_s - 0.01 < job.started_s <= job.finished_s
        assert job.work_s == pytest.approx(sum(times[job.job.request_class].values()), abs=1e-5)
        assert job.switches == 1  # fcfs never goes back to another job
    assert run.stage_s["S"][DENOISE] == pytest.approx(times["S"][DENOISE])
    assert sum(run.busy_s.values()) == pytest.approx(
        sum(job.work_s for job in run.outcome.jobs.values())
    )
    assert [piece.stage for piece in story.pieces] == [ENCODE, DENOISE, DECODE]
    assert story.pieces[1].steps == first.steps
    # Stamps are cut or rounded to whole milliseconds.
    assert arrived_s - 0.001 <= story.pieces[0].begun_s <= story.ended_s


def test_a_switch_is_a_task_of_another_job_than_its_worker_ran_last() -> None:
    tasks = [("a", ["x"]), ("a", ["x"]), ("b", ["y"]), ("a", ["y", "z"]), ("a", ["x"])]
    assert count_switches(tasks) == {"x": 2, "y": 2, "z": 1}


# -- scoring -----------------------------------------------------------------------------


def run_of(policy: str, on_time: str, work_s: float = 1.0) -> Run:
    """A run of four jobs, S S M L; "1" for each that was on time, "x" for one that failed."""
    outcome = Outcome(policy, 1)
    for number, (kind, how) in enumerate(zip("SSML", on_time, strict=True)):
        job = TraceJob(f"{kind}{number}", kind, 0.0, 10.0, ALONE[kind], 16, 4)
        outcome.jobs[job.id] = JobOutcome(
            job,
            status="failed" if how == "x" else "succeeded",
            finished_s=9.0 if how in "1x" else 11.0,
            work_s=work_s,
            switches=2,
        )
    outcome.ended_s = 11.0
    return Run(outcome, {}, {DENOISE: 5.5}, 0.001)


def test_a_score_is_the_mean_of_a_systems_runs() -> None:
    found = score([run_of("slack", "1110"), run_of("slack", "1100")], most=3.0)
    assert found["on_time"] == pytest.approx(5 / 8)
    assert found["on_time_runs"] == [0.75, 0.5]
    assert found["on_time_by_class"] == {"S": 1.0, "M": 0.5, "L": 0.0}
    assert found["vs_bound"] == pytest.approx(2.5 / 3)
    assert found["wasted_s"] == pytest.approx(1.5)
    assert found["switches_per_job"] == 2.0
    assert found["busy"] == {DENOISE: pytest.approx(0.5)}
    work = sum(ALONE[name] for name in "SSML")
    assert found["on_time_by_work"] == pytest.approx((0.6 + 0.5 * ALONE["M"]) / work)


def test_a_job_that_failed_is_a_miss_and_its_work_wasted() -> None:
    found = score([run_of("slack", "111x", work_s=2.0)], most=4.0)
    assert found["failed"] == 1
    assert found["on_time"] == 0.75
    assert found["wasted_s"] == pytest.approx(2.0)


def test_a_slowdown_is_of_the_whole_work_and_fifos_own_is_its_standalone_time() -> None:
    measured = Measured({name: [s] for name, s in ALONE.items()}, STAGES_OF)
    ours = sum(sum(STAGES_OF[name].values()) for name in "SSML")
    assert slowdown([run_of("slack", "1111", 3.0)], measured) == pytest.approx(12.0 / ours)
    alone = sum(ALONE[name] for name in "SSML")
    assert slowdown([run_of("fifo", "1111", 3.0)], measured) == pytest.approx(12.0 / alone)


def test_how_far_one_is_ahead_is_paired_by_job() -> None:
    """The same jobs late in both: no difference and no doubt; one job apart: its own error."""
    assert ahead([run_of("a", "1010")], [run_of("b", "1010")]) == (0.0, 0.0)
    points, error = ahead([run_of("a", "1110")], [run_of("b", "1010")])
    assert points == pytest.approx(25.0)
    assert error == pytest.approx(25.0)


def test_the_verdict_compares_slack_with_the_best_policy_and_not_with_fifo() -> None:
    runs = {
        "fifo": [run_of("fifo", "1111")],
        "edf": [run_of("edf", "1110")],
        "slack": [run_of("slack", "0110")],
    }
    found = verdict(runs, most=4.0, shortest="S")
    assert found["best_policy"] == "edf"
    assert found["slack_behind_best_points"] == pytest.approx(25.0)
    assert found["slack_vs_bound"] == pytest.approx(0.5)
    assert found["short_class_on_time"] == 0.5
    assert found["systems"]["fifo"]["slack_ahead_points"] == pytest.approx(-50.0)


def test_slack_is_the_best_policy_where_another_is_as_good() -> None:
    runs = {"edf": [run_of("edf", "1100")], "slack": [run_of("slack", "1010")]}
    found = verdict(runs, most=4.0, shortest="S")
    assert found["best_policy"] == "slack"
    assert found["slack_behind_best_points"] == 0.0


def test_the_table_has_a_row_for_each_system_and_the_bound_below() -> None:
    runs = {"fifo": [run_of("fifo", "1100")], "slack": [run_of("slack", "1110")]}
    found = verdict(runs, most=3.0, shortest="S")
    for figures in found["systems"].values():
        figures["slowdown"] = 1.0
    lines = table(
        {
            "load": 0.9, "jobs": 4, "arrivals_s": 10.0, "bottleneck": DENOISE, "bottleneck_s": 0.7,
            "classes": describe(KINDS, Measured({n: [s] for n, s in ALONE.items()}, STAGES_OF)),
            "bound": {"share": 0.75, "exact": True}, "note": note(0.95), **found,
        }
    ).splitlines()  # fmt: skip
    rows = {line.split()[0]: line.split() for line in lines[:-1] if line}
    assert rows["fifo"][1:6] == ["50.0", "0.667", "100.0", "0.0", "0.0"]
    assert rows["slack"][1:6] == ["75.0", "1.000", "100.0", "100.0", "0.0"]
    assert rows["bound"][1] == "75.0"
    assert "0.95" in lines[-1]


def test_every_job_of_every_run_is_saved(tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text("of an earlier benchmark\n")
    save(file, 0, 0.9, run_of("fifo", "1111"), fresh=True)
    save(file, 1, 0.9, run_of("slack", "1110"), fresh=False)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["system"], line["run"], line["on_time"]) for line in lines] == [
        *[("fifo", 0, True)] * 4, *[("slack", 1, True)] * 3, ("slack", 1, False),
    ]  # fmt: skip


# -- a profile ---------------------------------------------------------------------------


def event(kind: str, at_s: float, **more: object) -> JobEvent:
    return JobEvent(kind, at_s, **more)  # type: ignore[arg-type]


def test_a_jobs_events_tell_its_tasks() -> None:
    found = story_of("j", "M", 0.05, [
        event("queued", 0.0), event("running", 0.1, stage=ENCODE, worker="e"),
        event("chunk", 0.2, step=0), event("running", 0.3, stage=DENOISE, worker="d"),
        event("step", 0.5, step=1), event("chunk", 0.9, step=3),
        event("running", 1.0, stage=DENOISE, worker="d"), event("chunk", 1.4, step=5),
        event("running", 1.5, stage=DECODE, worker="v"), event("chunk", 1.7, step=5),
        event("succeeded", 1.8),
    ])  # fmt: skip
    assert (found.arrived_s, found.ended_s) == (0.05, 1.8)
    assert [(p.stage, p.steps) for p in found.pieces] == [
        (ENCODE, 0), (DENOISE, 3), (DENOISE, 2), (DECODE, 0),
    ]  # fmt: skip
    assert [p.each_s for p in found.pieces] == pytest.approx([0.1, 0.2, 0.2, 0.2])


def chunk(job: str, begun_s: float, ended_s: float, steps: int = 2) -> Piece:
    return Piece(job, "M", DENOISE, "d", steps, begun_s, ended_s)


def test_costs_are_medians_of_busy_tasks() -> None:
    busy = [chunk("a", 0.0, 2.0), chunk("b", 2.0, 4.2), chunk("c", 5.0, 9.0)]
    assert costs(busy, {"M": 10}) == {"M": {DENOISE: pytest.approx(11.0)}}


def test_overheads_come_from_the_gaps_between_tasks() -> None:
    """Report 1, hand-over 3 less the report, switch 5 less the hand-over, and 6 until it begins."""
    pieces = (chunk("a", 0.0, 2.0), chunk("a", 5.0, 7.0))
    alone = [Story("M", -6.0, 8.0, pieces)]
    busy = [chunk("x", 0.0, 2.0), chunk("y", 7.0, 9.0), chunk("y", 9.5, 11.5)]
    found = overheads(alone, busy)
    assert (found.report_s, found.dispatch_s, found.switch_s) == pytest.approx((1.0, 2.0, 3.0))
    assert found.submit_s == pytest.approx(4.0)
    assert found.jitter == 0.0


def test_the_spread_is_relative_and_not_led_astray_by_one_slow_task() -> None:
    lengths = [0.98, 0.99, 1.0, 1.01, 1.02, 50.0, 1.0]
    found = spread([chunk(str(i), 0.0, 2 * each) for i, each in enumerate(lengths)])
    assert 0.0 < found < 0.03


def test_a_simulated_pool_hears_of_a_job_some_time_after_it_came() -> None:
    trace = trace_of(jobs=1)
    latencies = []
    for submit_s in (0.0, 0.25):
        late = Overheads(jitter=0.0, submit_s=submit_s)
        outcome = simulate(trace, Setting(costs=costs_of(KINDS, STAGES_OF), overheads=late))
        latencies.append(outcome.jobs[trace[0].id].latency_s)
    alone = sum(STAGES_OF[trace[0].request_class].values())
    assert latencies == pytest.approx([alone, alone + 0.25])
