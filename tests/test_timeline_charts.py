"""Charts of simulated runs: the page, the picture, Chrome trace events, the terminal."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from common.stage import DENOISE
from services.cli.main import main
from services.simulator.calibrations import calibration
from services.simulator.generate import generate
from services.simulator.outcome import Outcome
from services.simulator.pool import Overheads
from services.simulator.simulation import Setting, simulate
from services.simulator.traces import TraceJob
from services.timeline import png
from services.timeline.page import page
from services.timeline.runs import Run, simulated
from services.timeline.terminal import Gantt
from services.timeline.trace_events import trace_events
from tests.pages import Page, data_of

COSTS = calibration("toy")


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    trace = generate(40, 1.1, COSTS, seed=2)
    return [
        simulate(trace, Setting(policy=name, costs=COSTS, timeline=True))
        for name in ("monolithic", "slack")
    ]


@pytest.fixture(scope="module")
def runs(outcomes: list[Outcome]) -> list[Run]:
    return [simulated(outcome) for outcome in outcomes]


def test_the_page_is_whole_and_loads_nothing(runs: list[Run]) -> None:
    """Every job and every chunk of every policy, and the table, in one file."""
    text = page(runs, "a <title>", "40 jobs & more", window=(30.0, 70.0))
    found = Page(text)
    assert found.loads == []
    assert not [word for word in ("import(", "fetch(", "@import", "url(") if word in text]
    said = json.loads(found.data)
    zero = runs[0].begin_s
    assert said["window"] == [30.0 - zero, 70.0 - zero]
    for run, shown in zip(runs, said["runs"], strict=True):
        assert shown["name"] == run.name
        assert [job[0] for job in shown["jobs"]] == list(run.jobs)
        assert len(shown["bars"]) == len(run.bars)
        assert shown["name"] in found.cells
        steps = sum(row[2] - row[1] for bar in shown["bars"] for row in bar[5])
        assert steps == sum(job.job.steps for job in run.jobs.values())


def test_a_page_cannot_be_broken_out_of(runs: list[Run]) -> None:
    evil = "</script><script>alert(1)</script>"
    run = Run(evil, runs[0].bars, runs[0].jobs, runs[0].begin_s, runs[0].end_s)
    text = page([run], evil, evil)
    assert evil not in text
    assert data_of(text)["runs"][0]["name"] == evil


@pytest.mark.skipif(not shutil.which("node"), reason="there is no node here")
def test_the_pages_script_is_valid_javascript(runs: list[Run], tmp_path: Path) -> None:
    script = page(runs, "t", "s").rpartition("<script>")[2].partition("</script>")[0]
    path = tmp_path / "page.js"
    path.write_text(script)
    done = subprocess.run(["node", "--check", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_picture_has_the_size_it_says_and_a_panel_a_policy(
    runs: list[Run], tmp_path: Path
) -> None:
    one = png.draw(runs[:1], tmp_path / "one.png")
    two = png.draw(runs, tmp_path / "two.png", (10.0, 70.0))
    for size, name in ((one, "one.png"), (two, "two.png")):
        with Image.open(tmp_path / name) as picture:
            assert picture.size == size
            drawn = {color for _, color in picture.convert("RGB").getcolors(1 << 24) or ()}
        assert {(0xEB, 0x68, 0x34), (0x2A, 0x78, 0xD6), (0xD0, 0x3B, 0x3B)} <= drawn
    assert two[1] > one[1]


def test_without_matplotlib_the_picture_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["simulate", "poisson", "--count", "5", "--png", str(tmp_path / "p.png")]) == 2
    assert "pip install 'slackwater[report]'" in capsys.readouterr().err


def test_chrome_reads_a_process_a_stage_and_a_thread_a_rank(runs: list[Run]) -> None:
    said = json.loads(json.dumps(trace_events(runs)))
    events = said["traceEvents"]
    assert all({"ph", "pid", "tid", "name"} <= event.keys() for event in events)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(names.values()) == {
        f"{run.name} · {stage}" for run in runs for stage in ("encode", "denoise", "decode")
    }
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == sum(len(run.bars) for run in runs)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in complete)
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in complete} == threads
    for thread in threads:
        mine = sorted(e["ts"] for e in complete if (e["pid"], e["tid"]) == thread)
        ends = sorted(e["ts"] + e["dur"] for e in complete if (e["pid"], e["tid"]) == thread)
        assert all(end <= start + 0.01 for end, start in zip(ends, mine[1:], strict=False))
    assert all(row["slack_s"] is not None for e in complete for row in e["args"]["rows"])


def test_a_terminal_chart_keeps_to_its_width(runs: list[Run]) -> None:
    """A line a rank; where there is no color, letters say the class."""
    for width in (40, 100):
        console = Console(width=width, color_system=None, record=True)
        with console.capture() as shown:
            console.print(Gantt(runs[1].within(100.0, 160.0), clock=False))
        lines = shown.get().splitlines()
        assert max(map(len, lines)) <= width
        assert lines[0].startswith("denoise 1")
        assert set("abc") & set(lines[0][len("denoise 1") :])
    colored = Console(width=100, color_system="truecolor", force_terminal=True)
    with colored.capture() as shown:
        colored.print(Gantt(runs[1], "job", clock=False))
    assert "\x1b[" in shown.get()


def test_a_chunk_that_yielded_is_told_from_one_that_was_planned_short() -> None:
    def job(name: str, at: float, steps: int, due: float) -> TraceJob:
        return TraceJob(name, name, at, due, steps * COSTS.step(1024), 1024, steps)

    trace = [job("long", 0.0, 60, 1e6), job("urgent", 1.0, 2, 1.9)]
    setting = Setting(
        policy="slack", costs=COSTS, chunk_s=60.0, overheads=Overheads(jitter=0.0), timeline=True
    )
    run = simulated(simulate(trace, setting))
    chunks = [bar for bar in run.bars if bar.stage == DENOISE]
    assert [bar.rows[0].job for bar in chunks] == ["long", "urgent", "long"]
    assert [bar.yielded for bar in chunks] == [True, False, False]
    assert chunks[0].rows[0].planned == 60 > chunks[0].rows[0].stop


def test_simulate_writes_all_of_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("p.html", "p.png", "p.json")]
    words = ["simulate", "poisson", "--count", "20", "--policy", "monolithic,slack",
             "--window", "0:60", "--timeline"]  # fmt: skip
    flags = ["--html", names[0], "--png", names[1], "--trace", names[2]]
    assert main([*words, *flags]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in names)
    assert "denoise 1" in out
    assert len(data_of(Path(names[0]).read_text())["runs"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("simulate", "poisson", "--window", "60"), "FROM:TO"),
        (("simulate", "poisson", "--window", "60:10"), "such as 200:260"),
        (("timeline", "--last", "0"), "give seconds"),
        (("timeline", "--follow", "--html", "x"), "--follow shows"),
    ],
)
def test_wrong_words_are_answered_with_right_ones(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(words)) == 2
    assert said in capsys.readouterr().err
