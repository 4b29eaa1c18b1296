"""What the benchmarks count and leave out, and how they end."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import batching, gantt, memory, overhead, preemption, servers
from benchmarks.diffusers_loop import run_side_by_side
from services.timeline.runs import Run


def stamps() -> list[str]:
    """A background job of 100 ms steps; `urgent-0` begins 3 ms after one, `urgent-1` misses its
    step by one, `urgent-2` begins between two background jobs."""
    steps = [f"step_end background {0.1 * i:.3f}" for i in range(1, 11)]
    steps += [f"step_end background {5 + 0.1 * i:.3f}" for i in range(1, 11)]
    firsts = ["first_forward urgent-0 0.303", "first_forward urgent-1 0.602",
              "first_forward urgent-2 2.0"]  # fmt: skip
    return steps + firsts


def test_preemption_says_whom_it_left_out_and_why() -> None:
    ready = {"urgent-0": 0.25, "urgent-1": 0.499, "urgent-2": 1.99, "urgent-3": 0.7,
             "urgent-4": 99.0}  # fmt: skip
    lines = [*stamps(), "first_forward urgent-4 99.5"]
    found = preemption.evaluate(lines, ready, pushed=6)
    assert (found["pushed"], found["n"]) == (6, 2)
    assert found["left_out"] == {
        "never_ready": 1, "rank_free": 1, "no_step_after": 1, "never_began": 1,
    }  # fmt: skip
    assert found["overhead_ms_p50"] == pytest.approx(102.0)
    assert (found["missed_step"], found["missed_share"]) == (1, 0.5)


def test_preemption_without_a_measured_job_says_so() -> None:
    with pytest.raises(ValueError, match="none of 2 jobs"):
        preemption.evaluate(stamps(), {}, pushed=2)


def test_overhead_compares_with_the_best_plain_way_of_each_round() -> None:
    rounds = [
        {"one_loop": 40.0, "two_threads": 30.0, "two_loops": 20.0, "system": 20.0},
        {"one_loop": 44.0, "two_threads": 18.0, "two_loops": 22.0, "system": 20.0},
    ]
    found = overhead.ratios(rounds)
    assert found["ratios"] == {"one_loop": 2.1, "two_threads": 1.2, "two_loops": 1.05}
    assert found["throughput_ratio"] == pytest.approx(0.95)
    assert found["throughput_ratio_range"] == [0.9, 1.0]


class Loop:
    def __init__(self) -> None:
        self.running = threading.Event()

    def begin(self, jobs: list[int]) -> None:
        self.running.set()

    def end(self, jobs: list[int]) -> tuple[float, list[str]]:
        return 1.0, [f"line {job}" for job in jobs]


def test_loops_side_by_side_begin_together_and_give_lines_in_the_order_of_jobs() -> None:
    loops: Any = [Loop(), Loop()]
    ends = [loop.end for loop in loops]

    def both_run(jobs: list[int]) -> tuple[float, list[str]]:
        assert all(loop.running.is_set() for loop in loops)
        return ends[0](jobs)

    loops[0].end = both_run
    jobs: Any = [0, 1, 2, 3, 4]
    assert run_side_by_side(loops, jobs)[1] == [f"line {job}" for job in jobs]


def test_memory_runs_every_second_pair_the_other_way_round() -> None:
    order: list[str] = []

    def ran(name: str, jobs_per_s: float) -> Any:
        order.append(name)
        return SimpleNamespace(jobs_per_s=jobs_per_s)

    speeds = iter((2.0, 3.0, 4.0))
    pairs = memory.run_pairs(lambda: ran("small", next(speeds)), lambda: ran("large", 2.0), 3)
    assert order == ["small", "large", "large", "small", "small", "large"]
    found = memory.throughput(pairs)
    assert (found["throughput_ratio"], found["throughput_ratio_range"]) == (1.5, [1.0, 2.0])


def test_batching_says_at_which_sizes_it_loses_to_the_static_batch() -> None:
    lines = [
        {"size": 64, "jobs": 2, "of_static": 1.4}, {"size": 64, "jobs": 4, "of_static": 1.2},
        {"size": 256, "jobs": 1, "of_static": 1.5}, {"size": 256, "jobs": 4, "of_static": 0.7},
        {"size": 256, "jobs": 8},
    ]  # fmt: skip
    found = batching.beside_static(lines)
    assert found["64"] == {"least": 1.2, "median": 1.3, "most": 1.4, "loses": False}
    assert found["256"] == {"least": 0.7, "median": 0.7, "most": 0.7, "loses": True}


def test_gantt_sums_up_a_run() -> None:
    jobs: Any = {"a": SimpleNamespace(on_time=True), "b": SimpleNamespace(on_time=False)}
    found = gantt.summary_of(Run("slack", (), jobs, 0.0, 2.5))
    assert found == {"jobs": 2, "on_time": 1, "bars": 0, "span_s": 2.5}


def test_a_redis_that_does_not_start_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="ended at once"), servers.redis_server("--no-such", "x"):
        pytest.fail("yielded without a Redis")


def test_a_redis_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "START_S", 0.0)
    silent = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    with silent, pytest.raises(RuntimeError, match="did not answer"):
        servers._wait_for_answer(silent, servers.choose_port())
