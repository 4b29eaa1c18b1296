"""The timeline of a live pool: what the stream says, what the commands show, a recorded trace."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from common.keys import Keys
from common.record import JobRecord
from common.scripts import Ttls
from common.settings import Settings
from common.stage import DENOISE
from services.cli.record import line_of
from services.costs.model import CostModel
from services.pool.local import LocalPool
from services.simulator.calibrations import calibration
from services.simulator.traces import parse_trace, read_trace
from services.timeline import png, stream
from services.timeline.live import Known, Pool, read_run
from services.timeline.runs import Bar, Row, Run
from slackwater import Client
from tests.commands import commands
from tests.fakes import Table
from tests.pages import data_of
from tests.processes import PATIENCE_S, processes, until

COSTS = calibration("toy")
JOBS = 6
STEPS = 12


# -- the stream ----------------------------------------------------------------------------


@pytest.fixture
def table(redis_client: Any, keys: Keys) -> Iterator[Table]:
    yield Table(redis_client, keys)
    redis_client.delete(keys.jobs, keys.cancel, keys.reports)
    redis_client.delete(*redis_client.scan_iter(keys.tasks("*")), "none")


def entries(table: Table) -> list[dict[str, str]]:
    found = table.redis.xrange(table.keys.timeline)
    return [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in found]


def ran(table: Table, stage: str = "encode", **report: Any) -> int:
    """A job's task, dispatched, started two seconds later and reported after two more."""
    spec = table.job()
    table.register("w", stage)
    seq, _ = table.dispatch([spec], ["w"], stage)
    table.now += 2
    table.start(seq, "w", [spec], stage)
    table.now += 2
    for _ in range(2):
        table.report(seq, "w", [spec], **report)
    return seq


def test_a_report_leaves_one_entry_however_often_it_is_sent(table: Table, keys: Keys) -> None:
    """It says who ran what from when to when, and stays as long as the jobs' records do."""
    seq = ran(table)
    (entry,) = entries(table)
    assert (entry["seq"], entry["worker"], entry["stage"]) == (str(seq), "w", "encode")
    assert (entry["start"], entry["end"]) == ("5002000", "5004000")
    assert (entry["plan"], entry["reached"], entry["ends"]) == ("0 0 -", "0", "done")
    assert 0 < table.redis.pttl(keys.timeline) <= 1000 * Ttls().job_s


@pytest.mark.parametrize(
    ("report", "end"),
    [({"code": "stage_error"}, "error"), ({"steps": 0}, None), ({"lead": False}, "member")],
)
def test_an_entry_says_how_each_row_ended(
    table: Table, report: dict[str, Any], end: str | None
) -> None:
    """A task that was handed back before it began took no time and leaves nothing."""
    ran(table, **report)
    assert [entry["ends"] for entry in entries(table)] == ([end] if end else [])


def test_work_for_a_job_that_had_ended_is_told_apart(table: Table) -> None:
    spec = table.job()
    table.register("w")
    seq, _ = table.dispatch([spec], ["w"])
    table.start(seq, "w", [spec])
    table.run(table.t.finish(spec.id, "canceled", b"r", [], 1.0))
    table.report(seq, "w", [spec])
    assert [entry["ends"] for entry in entries(table)] == ["refused"]


def test_the_timeline_is_as_long_as_it_is_told_to_be(redis_client: Any, keys: Keys) -> None:
    """0 keeps none; else old entries go, a node of the stream at a time."""
    none = Table(redis_client, keys, Ttls(timeline_entries=0))
    ran(none)
    assert entries(none) == []
    short = Table(redis_client, keys, Ttls(timeline_entries=10))
    node = int(redis_client.config_get("stream-node-max-entries")["stream-node-max-entries"])
    spec = short.job()
    short.register("w")
    for seq in range(1000, 1010 + 2 * node):
        short.redis.hset(short.keys.trajectory(spec.id), "stage", "encode")
        short.dispatch([spec], ["w"], seq=seq)
        short.start(seq, "w", [spec])
        short.report(seq, "w", [spec], "encode")
    assert 10 <= len(entries(short)) <= 10 + node
    redis_client.delete(keys.jobs, keys.reports, keys.tasks("w"))


# -- a live pool ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    settings = Settings(noop="encode_ms=1,step_ms=3,decode_ms=1,token_ms=0.02", chunk_ms=15)
    with LocalPool(denoisers=2, settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(pool: LocalPool) -> Iterator[Client]:
    with pool.client() as made:
        yield made


@pytest.fixture(scope="module")
def ended(client: Client) -> list[str]:
    """Ids of jobs that ran side by side; the last one had no chance to be in time."""
    handles = client.submit_many(
        {
            "id": f"job-{n}",
            "prompt": "x",
            "width": 64 * (1 + n % 2),
            "num_inference_steps": STEPS,
            "slo_ms": 1 if n == JOBS - 1 else 60_000,
        }
        for n in range(JOBS)
    )
    assert {handle.wait(30).status for handle in handles} == {"succeeded"}
    return [handle.id for handle in handles]


@pytest.fixture(scope="module")
def live(client: Client, ended: list[str]) -> Run:
    """The run of those jobs alone, from before the first came."""
    run, _ = read_run(client, 600)
    first = min(run.jobs[name].job.arrival_s for name in ended)
    return Run(run.name, run.bars, run.jobs, first, run.end_s)


@pytest.fixture
def sw(
    pool: LocalPool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    return commands(pool.redis_url, capsys, monkeypatch)


def rows_of(run: Run, job: str, stage: str) -> list[tuple[Bar, Row]]:
    return [
        (bar, row)
        for bar in run.bars
        for row in bar.rows
        if row.job == job and bar.stage == stage and row.end == "done"
    ]


def test_each_step_of_each_job_is_there_once_and_in_order(live: Run, ended: list[str]) -> None:
    for job in ended:
        chunks = rows_of(live, job, DENOISE)
        steps = [step for _, row in chunks for step in range(row.start, row.stop)]
        assert steps == list(range(STEPS))
        assert len(chunks) > 1
        assert len(rows_of(live, job, "encode")) == len(rows_of(live, job, "decode")) == 1
        assert all(row.slack_s is not None for _, row in chunks)


def test_no_rank_does_two_things_at_once(live: Run) -> None:
    assert {live.stage_of[rank] for rank in live.ranks} == {"encode", "denoise", "decode"}
    for rank in live.ranks:
        bars = [bar for bar in live.bars if bar.rank == rank]
        assert all(bar.start_s <= bar.end_s for bar in bars)
        assert all(first.end_s <= second.start_s for first, second in pairwise(bars))


def test_slack_runs_out_while_a_job_waits(live: Run, ended: list[str]) -> None:
    """At dispatch it is what is left of the deadline after the work that is left."""
    for job in ended:
        record = live.jobs[job].job
        for bar, row in rows_of(live, job, DENOISE):
            assert row.slack_s is not None
            assert row.slack_s <= record.deadline_s - bar.start_s + 1.0
    assert {row.job for _, row in rows_of(live, ended[-1], DENOISE) if (row.slack_s or 0) < 0}


def test_jobs_come_with_their_class_deadline_and_end(live: Run, ended: list[str]) -> None:
    assert live.classes == ("64x128", "128x128")
    assert [job for job in ended if live.missed(job)] == ended[-1:]
    for job in ended:
        found = live.jobs[job]
        assert found.finished_s is not None
        assert found.job.arrival_s <= (found.started_s or 0) <= found.finished_s
        assert found.steps_run == STEPS


def test_a_canceled_jobs_last_chunk_counts_for_nobody(
    redis_server: str, redis_client: Any, keys: Keys, arena_path: str
) -> None:
    """All its steps are one chunk, so that the cancel finds it running."""
    with (
        processes(redis_server, redis_client, keys, arena_path, chunk_ms=10**6) as pool,
        Client(redis_server, prefix=keys.prefix) as client,
    ):
        pool.pool()
        job = client.submit("long", id="canceled", num_inference_steps=1000, slo_ms=1)
        next(event for event in job.events(PATIENCE_S) if event.type == "step")
        job.cancel()
        assert job.wait(PATIENCE_S).status == "canceled"

        def ends() -> list[str]:
            bars, _ = stream.read(client, 0.0)
            return [row.end for bar in bars for row in bar.rows if bar.stage == DENOISE]

        assert until(ends, "the chunk that was not wanted any more") == ["refused"]
        run, _ = read_run(client, 600)
        assert not run.missed("canceled")
        pool.drained()


def test_the_command_draws_a_line_a_rank(sw: Any, ended: list[str]) -> None:
    code, out, _ = sw("timeline", "--last", "600")
    assert code == 0
    for text in ("denoise 1", "denoise 2", "encode 1", "decode 1", "64x128", "missed its deadline"):
        assert text in out
    code, out, _ = sw("timeline", "--last", "600", "--json")
    said = json.loads(out)
    assert {row["job"] for task in said["tasks"] for row in task["rows"]} >= set(ended)
    assert {job["id"] for job in said["jobs"]} >= set(ended)


def test_nothing_ran_is_said(sw: Any, redis_server: str) -> None:
    code, out, _ = sw("timeline", "--redis", redis_server, "--prefix", "nobody:")
    assert (code, "no task ended in the last 60.0 s" in out) == (0, True)


@contextmanager
def following(pool: LocalPool, *words: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """`slackwater timeline --follow`, which Ctrl-C reaches: whoever runs the tests may ignore it,
    and a child would too."""
    command = [sys.executable, "-m", "services.cli.main", "timeline", "--follow", *words,
               "--redis", pool.redis_url, "--last", "600"]  # fmt: skip
    process = subprocess.Popen(
        command, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_follow_shows_tasks_as_they_end(pool: LocalPool, client: Client) -> None:
    """It waits on the stream, and ends with Ctrl-C."""
    with following(pool, "--json", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        client.submit("x", id="followed", num_inference_steps=3)
        for line in process.stdout:
            task = json.loads(line)
            if task["stage"] == "decode" and task["rows"][0]["job"] == "followed":
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_follow_draws_on_a_terminal_until_it_is_interrupted(
    pool: LocalPool, client: Client, ended: list[str]
) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    with following(pool, "--by", "job", stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        drawn = ""

        def shows(text: str) -> bool:
            nonlocal drawn
            while select.select([ours], [], [], 0)[0]:
                drawn += os.read(ours, 65536).decode("utf-8", "replace")
            return text in drawn

        until(lambda: shows("denoise 1"), "the chart")
        client.submit("x", id="newcomer", num_inference_steps=3)
        until(lambda: shows("newcomer"), "the new job in the legend")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    os.close(ours)


def test_files_of_a_live_pool(sw: Any, ended: list[str], tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("page.html", "gantt.png", "trace.json")]
    code, out, _ = sw("timeline", "--last", "600", "--html", names[0], "--png", names[1],
                      "--trace", names[2])  # fmt: skip
    assert code == 0
    assert set(out.split()) == set(names)
    assert set(ended) <= {job[0] for job in data_of(Path(names[0]).read_text())["runs"][0]["jobs"]}
    with Image.open(names[1]) as picture:
        assert picture.width == png.WIDTH_PX
    assert json.loads(Path(names[2]).read_text())["traceEvents"]


# -- recording -----------------------------------------------------------------------------


def test_a_recorded_pool_can_be_simulated(sw: Any, ended: list[str], tmp_path: Path) -> None:
    """What was asked comes back as it was; what became of it is beside it."""
    path = tmp_path / "trace.jsonl"
    code, out, _ = sw("record", "--out", str(path), "--last", "600")
    assert code == 0
    lines = {line["id"]: line for line in map(json.loads, path.read_text().splitlines())}
    assert f"{len(lines)} jobs written" in out
    trace = {job.id: job for job in read_trace(path, COSTS)}
    assert set(ended) <= set(trace)
    for job in ended:
        assert (trace[job].steps, trace[job].height) == (STEPS, 128)
        given_ms = lines[job]["deadline_ms"] - lines[job]["arrival_ms"]
        assert given_ms == pytest.approx(1 if job == ended[-1] else 60_000, abs=0.01)
        assert lines[job]["finished_ms"] > lines[job]["started_ms"] >= lines[job]["arrival_ms"]
        assert lines[job]["on_time"] is (job != ended[-1])
        assert lines[job]["status"] == "succeeded"
    code, out, _ = sw("simulate", str(path), "--policy", "slack,fcfs", "--json", "--jobs")
    assert code == 0
    for run in json.loads(out)["runs"]:
        assert {job["id"] for job in run["jobs"]} == set(trace)


def test_a_recorded_job_is_as_much_work_and_may_be_cut_as_far() -> None:
    """Pictures, guidance and the floor of `degrade` come back; where the parameters are gone, the
    job is not cut."""
    fields = {
        b"status": b"succeeded", b"stage": b"finish", b"created": b"1000", b"width": b"64",
        b"height": b"64", b"steps": b"20", b"deadline": b"5000", b"model": b"m",
    }  # fmt: skip
    record = JobRecord.of("a", fields)
    params = {"n": 2, "scale": 4.0, "on_late": "degrade", "min_inference_steps": 5}
    pool: Any = Pool.__new__(Pool)
    pool.manifests = {"m": {"token_px": 16, "cfg": {"scale": "scale"}}}
    pool._costs = CostModel()
    lines = [
        json.dumps(line_of(Known(record, *more), pool, 0.0))
        for more in ((params, "degrade", 5), ({}, "degrade"))
    ]
    ((whole,), (bare,)) = (parse_trace([line], COSTS) for line in lines)
    assert (whole.n, whole.forwards, whole.tokens, whole.steps) == (2, 2, 16, 20)
    assert (whole.on_late, whole.min_steps) == ("degrade", 5)
    assert (bare.on_late, bare.min_steps) == ("run", 0)


def test_recording_for_a_while_has_only_what_arrived_then(
    sw: Any, ended: list[str], tmp_path: Path
) -> None:
    code, out, _ = sw("record", "--out", str(tmp_path / "t"), "--for", "0", "--json")
    assert (code, json.loads(out)["jobs"]) == (0, 0)
    code, _, err = sw("record", "--out", str(tmp_path))
    assert (code, err.startswith("slackwater: --out")) == (2, True)
