"""The simulator: a trace goes in, what the real core does with it comes out."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from services.cli.main import main
from services.cli.terminal import Exit
from services.policies import make_policy
from services.simulator.calibrations import CALIBRATIONS, Calibration, calibration, flat
from services.simulator.generate import ARRIVALS, MIXES, generate
from services.simulator.outcome import Outcome
from services.simulator.pool import Overheads
from services.simulator.report import percentile, report, table
from services.simulator.simulation import Setting, Stalled, simulate
from services.simulator.traces import TraceError, TraceJob, parse_trace, read_trace, write_trace

SECOND = Calibration("second", "a second a step", flat(1.0), flat(0.5), flat(0.25))
PLAIN = Overheads(jitter=0.0)


def job(name: str, at: float = 0.0, steps: int = 4, due: float = 1e6, **more: Any) -> TraceJob:
    return TraceJob(name, "c", at, due, SECOND.standalone_s(1, steps), 1, steps, **more)


def run(*jobs: TraceJob, **setting: Any) -> Outcome:
    wanted = {"costs": SECOND, "overheads": PLAIN, "timeline": True, **setting}
    return simulate(list(jobs), Setting(**wanted))


# -- time --------------------------------------------------------------------------------


def test_a_job_alone_takes_what_its_tasks_take() -> None:
    outcome = run(job("a", at=10.0))
    record = outcome.jobs["a"]
    assert record.finished_s == pytest.approx(10 + 0.5 + 4 + 0.25)
    assert record.started_s == pytest.approx(10.0)
    assert record.steps_run == 4
    assert record.work_s == pytest.approx(4.75)
    assert [(c.stage, c.start, c.stop) for c in outcome.chunks] == [
        ("encode", 0, 0), ("denoise", 0, 1), ("denoise", 1, 2), ("denoise", 2, 3),
        ("denoise", 3, 4), ("decode", 0, 0),
    ]  # fmt: skip


def test_overheads_are_paid_where_they_arise() -> None:
    """A hand-over before every task, a switch before the first chunk of another job."""
    slow = Overheads(dispatch_s=0.1, switch_s=1.0, report_s=0.01, jitter=0.0)
    record = run(job("a"), overheads=slow, chunk_s=100.0).jobs["a"]
    assert record.finished_s == pytest.approx(4.75 + 3 * 0.1 + 1.0 + 3 * 0.01)
    assert record.switches == 1


def test_an_urgent_job_slips_between_the_steps_of_a_long_one() -> None:
    """`slack` asks a running chunk to yield; the simulated worker stops at its next step."""
    outcome = run(job("long", steps=100), job("urgent", at=7.3, steps=2, due=12.5), chunk_s=1000.0)
    assert outcome.jobs["urgent"].on_time
    first = next(c for c in outcome.chunks if c.job == "long" and c.stage == "denoise")
    assert first.stop == 8  # 7.8 s: encoded; the eighth step ends at 8.5 s
    assert outcome.jobs["long"].steps_run == 100


def test_two_ranks_run_two_jobs_at_once() -> None:
    both = run(job("a"), job("b"), denoise=2, encode=2, decode=2)
    assert both.ended_s == pytest.approx(4.75)


def test_a_job_that_asked_for_it_is_dropped_once_it_is_late() -> None:
    outcome = run(job("a", steps=50), job("b", due=3.0, on_late="drop"))
    assert outcome.jobs["b"].status == "expired"
    assert outcome.jobs["b"].work_s <= 0.5


def test_the_core_may_be_told_other_costs_than_the_true_ones() -> None:
    """Told nothing, it learns from the reports."""
    from services.costs.model import CostModel

    learned = CostModel()
    outcome = run(*(job(f"j{i}", at=i) for i in range(5)), told=learned)
    assert all(record.succeeded for record in outcome.jobs.values())
    assert learned.dump()["simulated/denoise/1x1x1"] == pytest.approx(1.0)


def test_the_same_seed_gives_the_same_run() -> None:
    toy = calibration("toy")
    trace = generate(60, 1.0, toy, seed=3)
    setting = Setting(costs=toy, seed=4, timeline=True)
    first = simulate(trace, setting)
    assert simulate(trace, setting).chunks == first.chunks
    other = simulate(trace, Setting(costs=toy, seed=5, timeline=True))
    assert other.chunks != first.chunks


def test_a_policy_that_holds_work_back_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy("fcfs")
    monkeypatch.setattr(policy, "plan", lambda view, now: [])
    monkeypatch.setattr("services.simulator.simulation.make_policy", lambda name: policy)
    with pytest.raises(Stalled, match="1 jobs wait for ever, a first"):
        run(job("a"))


# -- traces ------------------------------------------------------------------------------


def test_our_json_lines_are_read_and_written(tmp_path: Path) -> None:
    trace = generate(20, 0.9, calibration("toy"), seed=1)
    write_trace(tmp_path / "t.jsonl", trace)
    again = read_trace(tmp_path / "t.jsonl", calibration("toy"))
    assert [j.id for j in again] == [j.id for j in trace]
    assert again[7].deadline_s == pytest.approx(trace[7].deadline_s, abs=1e-3)


def test_request_lines_are_read_as_literals_only() -> None:
    line = "Request(request_id='r1', timestamp=2.5, height=512, width=512, num_inference_steps=20)"
    (found,) = parse_trace([line, "", "# a remark"], calibration("toy"))
    assert (found.id, found.arrival_s, found.tokens, found.steps) == ("r1", 2.5, 1024, 20)
    assert found.deadline_s == pytest.approx(2.5 + 3 * 20 * 0.155)
    with pytest.raises(TraceError, match="line 1"):
        parse_trace(["Request(timestamp=__import__('os').getpid())"], SECOND)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1"),
        ("hello", "neither JSON nor Request"),
        ('{"id": "a"}', "arrival_ms"),
        ('{"arrival_ms": 0, "num_inference_steps": -1}', "at least 1"),
        ('{"arrival_ms": "NaN"}', "finite"),
        ('{"arrival_ms": 0, "on_late": "cry"}', "run, drop"),
        ('{"arrival_ms": 0, "num_inference_steps": 0}', "num_inference_steps is 0; .* at least 1"),
        ('{"arrival_ms": 0, "num_inference_steps": 2.9}', "is 2.9; it is a whole number"),
        ('{"arrival_ms": 0, "width": 0}', "width is 0"),
        ('{"arrival_ms": 0, "tokens": -5}', "tokens is -5"),
        ('{"arrival_ms": 0, "n": 0}', "n is 0"),
        ('{"arrival_ms": 0, "forwards": 3}', "forwards is 3"),
        ('{"arrival_ms": 0, "slo_scale": 0}', "slo_scale is 0; it must be above 0"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        parse_trace([line], SECOND)


@pytest.mark.parametrize("arrivals", sorted(ARRIVALS))
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_made_up_traces_keep_their_load_and_mix(arrivals: str, mix: str) -> None:
    costs = calibration("h20-qwen-image")
    trace = generate(2000, 0.8, costs, mix=mix, arrivals=arrivals, ranks=4, seed=2)
    work = sum(j.steps * costs.seconds("denoise", j.tokens) for j in trace)
    assert work / (4 * trace[-1].arrival_s) == pytest.approx(0.8, rel=0.15)
    for kind in MIXES[mix]:
        share = sum(j.request_class == kind.name for j in trace) / len(trace)
        assert share == pytest.approx(kind.share, abs=0.005)
    assert generate(50, 0.8, costs, mix=mix, arrivals=arrivals, seed=2) == generate(
        50, 0.8, costs, mix=mix, arrivals=arrivals, seed=2
    )


def test_calibrations_say_what_was_published() -> None:
    h20 = calibration("h20-qwen-image")
    assert [round(h20.seconds("denoise", n), 3) for n in (1024, 4096, 9216)] == [
        0.155,
        0.605,
        1.557,
    ]
    assert calibration("a100-qwen-image").seconds("denoise", 4096) == pytest.approx(0.904)
    assert all(c.source and c.seconds("denoise", 2304) > 0 for c in CALIBRATIONS.values())
    with pytest.raises(ValueError, match="wan-gfdit"):
        calibration("a-toaster")


# -- reports -----------------------------------------------------------------------------


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert percentile([1, 2, 3, 4], 0.5) == 2
    assert percentile([1, 2, 3, 4], 0.99) == 4
    assert percentile([], 0.5) == 0.0


def test_a_report_counts_misses_and_what_they_wasted() -> None:
    outcome = run(job("a", due=4.75), job("b", due=1.0), policy="fcfs")
    figures = report(outcome)["all"]
    assert figures["on_time"] == 0.5
    assert figures["wasted_share"] == pytest.approx(0.5)
    assert figures["wasted_s"] == pytest.approx(4.75)
    assert "50.0 %" in table([report(outcome)])


def test_simulate_prints_a_table_and_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_trace(tmp_path / "t.jsonl", generate(30, 0.9, calibration("toy"), seed=1))
    words = ["simulate", str(tmp_path / "t.jsonl"), "--policy", "slack,fcfs", "--costs", "toy"]
    assert main(words) == 0
    assert "30 jobs, 1 ranks" in capsys.readouterr().out
    assert main([*words, "--json", "--jobs", "--timeline"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [r["policy"] for r in out["runs"]] == ["slack", "fcfs"]
    assert len(out["runs"][0]["jobs"]) == 30
    assert out["runs"][0]["timeline"]


@pytest.mark.parametrize(
    "words",
    [["no-such-file"], ["poisson", "--policy", "best"], ["poisson", "--costs", "x"],
     ["poisson", "--mix", "x"], ["poisson", "--ranks", "0"]],
)  # fmt: skip
def test_simulate_says_what_it_cannot_do(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 2
    assert capsys.readouterr().err.startswith("slackwater: ")


def test_the_bound_counts_what_any_schedule_could_finish() -> None:
    """Three jobs of 4 s due at 8.75 s: two fit; on two ranks all three."""
    from benchmarks.bound import bound

    trace = [job(name, due=8.75) for name in "abc"]
    found = bound(trace, SECOND)
    assert found["exact"]
    assert found["bound"] == 2
    assert bound(trace, SECOND, ranks=2)["bound"] == 3


def test_degraded_jobs_do_fewer_steps_and_make_it() -> None:
    """Two jobs that fit one after the other only if the second gives up some of its steps."""
    outcome = run(
        job("a", steps=20, due=21.0),
        job("b", steps=20, due=36.0, on_late="degrade", min_steps=8),
        policy="edf-doomed-last",
    )
    assert [record.on_time for record in outcome.jobs.values()] == [True, True]
    assert outcome.jobs["a"].steps_run == 20
    assert 8 <= outcome.jobs["b"].steps_run < 20


def test_pictures_and_guidance_are_work() -> None:
    """A step of four guided pictures is eight forwards, alone and in a batch."""
    line = '{"id": "a", "arrival_ms": 0, "num_inference_steps": 3, "n": 4, "forwards": 2}'
    (found,) = parse_trace([line], SECOND)
    assert found.standalone_s == pytest.approx(2 * 0.5 + 3 * 8 + 4 * 0.25)
    assert run(found).jobs["a"].finished_s == pytest.approx(found.standalone_s)
    assert run(found, batch=True).jobs["a"].finished_s == pytest.approx(found.standalone_s)
    (again,) = parse_trace([json.dumps(found.to_json())], SECOND)
    assert again == found


def test_a_policy_that_fails_is_said_to_and_one_that_stalls_ends_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures are not its own: fcfs decided. One that decides nothing has no figures."""
    policy = make_policy("edf")
    monkeypatch.setattr("services.simulator.simulation.make_policy", lambda name: policy)
    words = ["simulate", "poisson", "--count", "3", "--policy", "odd"]
    monkeypatch.setattr(policy, "plan", lambda view, now: [None])
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    (ran,) = json.loads(out)["runs"]
    assert ran["failures"] > 0
    assert "slackwater: odd failed" in err
    assert "None is not a decision" in err
    monkeypatch.setattr(policy, "plan", lambda view, now: [])
    assert main(words) == Exit.FAILED
    assert "odd: 3 jobs wait for ever" in capsys.readouterr().err


def test_the_example_policy_leads_a_simulated_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """By priority, with the hand-over of a live pool and with that of the simulator's default."""
    example = Path(__file__).parent.parent / "examples" / "policy_plugin" / "by_priority.py"
    made = runpy.run_path(str(example))["ByPriority"]
    monkeypatch.setattr("services.simulator.simulation.make_policy", lambda name: made())
    for setting in ({}, {"lead_s": 0.02}):
        outcome = run(job("first", steps=50), job("low"), job("high", priority=5), **setting)
        assert outcome.failures == 0
        ended = sorted(outcome.jobs, key=lambda name: outcome.jobs[name].finished_s or 0.0)
        assert ended[0] == "high"


def test_a_floor_belongs_to_degrade() -> None:
    line = '{"arrival_ms": 0, "num_inference_steps": 20, "on_late": "degrade"}'
    with pytest.raises(TraceError, match="min_inference_steps is 0"):
        parse_trace([line], calibration("toy"))
