"""The `slackwater` command: what it prints, and the exit codes that scripts go by."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.connect import writing
from common.settings import Settings
from services.cli.submit import prepare
from services.cli.terminal import Exit, seconds
from services.pool.local import LocalPool
from tests.commands import Run, commands

LONG = "1000"


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with LocalPool(
        denoisers=2, settings=Settings(noop="encode_ms=1,step_ms=5,decode_ms=1")
    ) as running:
        yield running


@pytest.fixture
def sw(pool: LocalPool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return commands(pool.redis_url, capsys, monkeypatch)


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from services.cli.main import main; main(['--help']);"
        "heavy = {'torch', 'redis', 'pydantic', 'rich', 'diffusers'} & set(sys.modules);"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("submit", "watch", "result", "cancel", "ps", "up", "scale", "down"):
        assert f"  {name}" in done.stdout


@pytest.mark.parametrize("name", ["submit", "watch", "result", "cancel", "ps", "up", "scale"])
def test_each_command_explains_itself(sw: Run, name: str) -> None:
    said = sw(name, "--help")
    assert said.code == Exit.OK
    assert f"usage: slackwater {name}" in said.out


def test_a_mistyped_command_gets_a_hint(sw: Run) -> None:
    said = sw("sumbit", "x")
    assert said.code == Exit.USAGE
    assert "did you mean submit?" in said.err
    assert sw().code == Exit.USAGE


def test_submit_prints_the_id_and_result_the_end(sw: Run, tmp_path: Path) -> None:
    said = sw("submit", "a red circle", "--num-inference-steps", "3", "--width=64", "-p", "seed=9",
              "--slo-ms", "60000")  # fmt: skip
    assert said.code == Exit.OK
    job = said.out.strip()
    said = sw("watch", job, "--timeout", "30")
    assert (said.code, f"{job} succeeded" in said.out) == (Exit.OK, True)
    said = sw("result", job, "--save", str(tmp_path))
    assert said.code == Exit.OK
    for text in (f"{job} succeeded", "seed 9", "width=64", "on time", f"{job}.json"):
        assert text in said.out
    assert (tmp_path / f"{job}.json").exists()


def test_submit_can_wait_save_and_speak_json(sw: Run, tmp_path: Path) -> None:
    said = sw("submit", "x", "--save", str(tmp_path), "--json", "--id", "cli-json")
    assert said.code == Exit.OK
    assert said.json["status"] == "succeeded"
    assert said.json["saved"] == [str(tmp_path / "cli-json.json")]
    said = sw("result", "cli-json", "--json")
    assert said.json["id"] == "cli-json"
    pushed = sw("submit", "x", "--json").json
    assert set(pushed) == {"id", "entry"}


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("--width", "33"), "width: 33 is not a multiple of 16; 32 and 48 are"),
        (("--wdth", "32"), "did you mean width?"),
        (("--seed", "-1"), "seed: -1 is too small"),
        (("--id", "cli-taken"), "use another id"),
    ],
)
def test_a_refused_job_exits_with_3_and_says_the_remedy(
    sw: Run, words: tuple[str, ...], remedy: str
) -> None:
    sw("submit", "the first of this id", "--id", "cli-taken", "--wait")
    said = sw("submit", "x", *words, "--wait")
    assert said.code == Exit.REFUSED
    assert remedy in said.out


def test_wrong_usage_exits_with_2(sw: Run) -> None:
    assert sw("submit").code == Exit.USAGE
    assert "--width needs a value" in sw("submit", "x", "--width", "--wait").err
    assert "NAME=VALUE" in sw("submit", "x", "-p", "width").err
    assert "given twice" in sw("submit", "x", "--width", "16", "-p", "width=32").err
    assert sw("scale", "paint", "2").code == Exit.USAGE
    assert sw("scale", "denoise", "-2").code == Exit.USAGE


def test_a_job_that_goes_on_exits_with_4_until_it_is_canceled(sw: Run) -> None:
    said = sw("submit", "long", "--steps", LONG, "--timeout", "0.2")
    assert (said.code, "goes on" in said.err) == (Exit.NOT_YET, True)
    job = sw("submit", "long", "--steps", LONG).out.strip()
    said = sw("result", job)
    assert (said.code, f"job {job} has not ended" in said.err) == (Exit.NOT_YET, True)
    active = {record["id"]: record for record in sw("ps", "--json").json}
    assert not active[job]["is_terminal"]
    assert job in sw("ps").out
    said = sw("cancel", *active)
    assert said.code == Exit.OK
    assert f"{job} canceled" in said.out
    assert sw("watch", job).code == Exit.FAILED
    assert job in sw("ps", "--all").out
    assert "no active jobs" in sw("ps").out


def test_watch_json_is_one_record_a_line(sw: Run) -> None:
    jobs = [sw("submit", f"w{i}", "--steps", "60").out.strip() for i in range(2)]
    said = sw("watch", *jobs, "--json")
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert {line["id"] for line in lines} == set(jobs)
    assert [line["status"] for line in lines[-2:]] == ["succeeded", "succeeded"]


def test_unknown_jobs_exit_with_6(sw: Run) -> None:
    for words in (("result", "nobody"), ("watch", "nobody"), ("cancel", "nobody")):
        said = sw(*words)
        assert (said.code, "no job 'nobody' is known" in said.err) == (Exit.UNKNOWN, True)


def test_each_of_several_cancels_is_told_by_itself(sw: Run, pool: LocalPool) -> None:
    """A job that is not known, one whose result has expired, and the rest."""
    ended = sw("submit", "x", "--wait", "--json").json["id"]
    pool_redis = writing(pool.redis_url)
    pool_redis.delete(pool.keys.result(ended))
    pool_redis.close()
    running = sw("submit", "long", "--steps", LONG).out.strip()
    said = sw("cancel", "nobody", ended, running)
    assert said.code == Exit.UNKNOWN
    assert "no job 'nobody' is known" in said.err
    assert said.out.splitlines() == [
        f"{ended} succeeded before the cancel came",
        f"{running} canceled",
    ]


def test_cancels_that_nobody_acts_on_are_told_one_by_one(sw: Run) -> None:
    """No coordinator reads this prefix."""
    lonely = ("--prefix", "lonely:")
    jobs = [sw("submit", name, *lonely).out.strip() for name in "ab"]
    said = sw("cancel", *jobs, "--wait", "0.05", *lonely)
    assert said.code == Exit.NOT_YET
    for job in jobs:
        assert f"{job} was asked to end and has not" in said.err
        assert f"{job} canceling" in said.out
    assert "it goes on" not in said.err


def test_ps_says_that_there_is_more_than_it_shows(sw: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.asks.PUSHES", 3)
    for i in range(4):
        assert sw("submit", "x", "--id", f"p{i}", "--prefix", "unread:").code == Exit.OK
        said = sw("ps", "--prefix", "unread:", "--json")
        assert len(said.json) == min(i + 1, 3)
        assert ("only the first 3 are shown" in said.err) == (i >= 2)


def test_a_place_that_cannot_be_written_is_said_in_a_line(sw: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    blocked = str(tmp_path / "file" / "out")
    said = sw("submit", "x", "--id", "unsaved", "--save", blocked)
    assert (said.code, "slackwater: --save: " in said.err) == (Exit.USAGE, True)
    assert "`slackwater result unsaved --save DIR`" in said.err
    assert sw("result", "unsaved", "--save", blocked).code == Exit.USAGE
    assert sw("result", "unsaved", "--save", str(tmp_path)).code == Exit.OK


def test_a_redis_that_refuses_is_not_called_absent(sw: Run, redis_client: Any) -> None:
    """A user without the right, and one at maxmemory."""
    where = redis_client.connection_pool.connection_kwargs
    address = f"{where['host']}:{where['port']}/0"
    redis_client.execute_command("ACL", "SETUSER", "guest", "on", ">x", "~*", "+@all", "-xadd")
    try:
        said = sw("submit", "x", "--redis", f"redis://guest:x@{address}")
        assert said.code == Exit.REDIS_REFUSES
        assert "the user of Redis may not do this" in said.err
        redis_client.config_set("maxmemory", 1)
        said = sw("cancel", "x", "--redis", f"redis://{address}")
        assert said.code == Exit.REDIS_REFUSES
        assert "Redis refused it" in said.err
    finally:
        redis_client.config_set("maxmemory", 0)
        redis_client.execute_command("ACL", "DELUSER", "guest")


def test_no_redis_exits_with_5(sw: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.terminal.PATIENCE_S", 0.1)
    said = sw("ps", "--redis", "redis://127.0.0.1:1/0")
    assert said.code == Exit.NO_REDIS
    assert "Redis is away" in said.err
    assert sw("ps", "--redis", "nonsense://x").code == Exit.USAGE


def test_workers_are_listed_and_scaled_while_the_pool_runs(sw: Run, pool: LocalPool) -> None:
    assert len(sw("ps", "--workers", "--json").json) == 4
    assert "denoise" in sw("ps", "--workers").out
    said = sw("scale", "denoise", "3")
    assert (said.code, "2 → 3" in said.out) == (Exit.OK, True)
    assert len(pool.workers("denoise")) == 3
    assert sw("scale", "denoise", "2", "--json").json["workers"] == 2
    said = sw("scale", "denoise", "2", "--host", "elsewhere")
    assert (said.code, "no `slackwater up` runs on elsewhere" in said.err) == (Exit.UNKNOWN, True)
    said = sw("scale", "denoise", "2", "--prefix", "other:")
    assert (said.code, "with the prefix other:" in said.err) == (Exit.UNKNOWN, True)


def test_parameters_may_stand_anywhere_and_begin_with_a_minus() -> None:
    assert prepare(["--width", "64", "a b", "--n=2", "--wait"]) == [
        "-p", "width=64", "a b", "-p", "n=2", "--wait",
    ]  # fmt: skip
    assert prepare(["--id", "x", "--seed", "-1"]) == ["--id", "x", "-p", "seed=-1"]
    assert prepare(["--", "--a-prompt"]) == ["--", "--a-prompt"]
    assert prepare(["--num-inference-steps", "2"]) == ["-p", "num_inference_steps=2"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (1.84, "1.8 s"),
        (-3.2, "−3.2 s"),
        (-0.01, "0.0 s"),
        (125.0, "2 min 5 s"),
        (7200.0, "2.0 h"),
    ],
)
def test_times_are_written_for_people(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_submit_says_at_once_when_it_should_be_done(sw: Run) -> None:
    """In time, as best effort, or not at all."""
    said = sw("submit", "x", "--num-inference-steps", "20", "--eta")
    assert said.code == Exit.OK
    assert re.fullmatch(r"\w+ accepted; expected in [\d.]+ s\n", said.out)
    said = sw("submit", "x", "--num-inference-steps", "20", "--slo-ms", "1", "--eta", "--json")
    assert said.json["admission"] == "best_effort"
    assert said.json["eta_s"] > said.json["deadline_s"]
    said = sw("submit", "x", "--slo-ms", "1", "--on-late", "drop", "--eta")
    assert said.code == Exit.REFUSED
    assert "give it more time" in said.err


def test_eta_keeps_to_the_time_that_is_given(sw: Run) -> None:
    """Where no coordinator is: the push waits, and so does nobody else."""
    said = sw("submit", "x", "--id", "early", "--eta", "--timeout", "0.05", "--prefix", "lonely:")
    assert said.code == Exit.NOT_YET
    assert "early was pushed, and no coordinator has read it" in said.err


def test_eta_goes_together_with_waiting_and_saving(sw: Run, tmp_path: Path) -> None:
    """The second time the job has ended already: its file is written all the same."""
    words = ("submit", "x", "--id", "twice", "--eta", "--wait", "--json", "--save")
    for folder in ("first", "second"):
        said = sw(*words, str(tmp_path / folder))
        assert said.code == Exit.OK
        assert said.json["status"] == "succeeded"
        assert said.json["admitted"]["id"] == "twice"
        assert (tmp_path / folder / "twice.json").exists()
    said = sw("submit", "x", "--id", "twice", "--eta")
    assert (said.code, said.out, said.err) == (Exit.OK, "twice has ended: succeeded\n", "")
    said = sw("submit", "x", "--width", "33", "--eta", "--wait", "--json")
    assert (said.code, said.json["error_code"]) == (Exit.REFUSED, "invalid_request")


def test_degrade_is_shown(sw: Run) -> None:
    """A job that says how few steps it would bear, on a pool that has no time for all of them."""
    busy = [sw("submit", "x", "--num-inference-steps", LONG, "--slo-ms", "100000").out.strip()
            for _ in range(2)]  # fmt: skip
    said = sw(
        "submit", "x", "--num-inference-steps", "400", "--on-late", "degrade",
        "--min-inference-steps", "1", "--slo-ms", "1000", "--wait", "--json",
    )  # fmt: skip
    sw("cancel", *busy)
    assert said.json["status"] == "succeeded"
    assert said.json["params"]["num_inference_steps"] < 400
    assert "instead of 400" in said.json["notes"][0]
