"""Logs: a line a transition, its job in each, for people or as JSON."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from common.logs import JsonFormatter
from common.settings import Settings
from services.pool.local import LocalPool

NOOP = "encode_ms=1,step_ms=5,decode_ms=1"
LONG = 1000


def record(message: str, *args: Any, **extra: Any) -> logging.LogRecord:
    logger = logging.getLogger("slackwater.test")
    return logger.makeRecord("slackwater.test", 20, "", 0, message, args, None, extra=extra)


def test_a_line_of_json_has_its_words_and_its_fields() -> None:
    """Whatever a value is, and however many lines its text has, it stays one line."""
    said = record(
        "job %s denoise\nends", "ä", job="ä", seq=7, slack_s=1.5, worker=None, at=Path("x")
    )
    line = JsonFormatter().format(said)
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "level": "INFO", "logger": "slackwater.test", "message": "job ä denoise\nends", "job": "ä",
        "seq": 7, "slack_s": 1.5, "at": "x",
    }  # fmt: skip


def test_an_exception_is_in_its_line() -> None:
    try:
        raise ValueError("why")
    except ValueError as error:
        said = record("it failed")
        said.exc_info = (type(error), error, error.__traceback__)
    found = json.loads(JsonFormatter().format(said))
    assert found["exception"].endswith("ValueError: why")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a coordinator said of a job that succeeded, one canceled as it ran, a refused push."""
    folder = tmp_path_factory.mktemp("pool")
    settings = Settings(noop=NOOP, chunk_ms=30, log_format="json", log_level="INFO")
    with LocalPool(settings=settings, state_dir=folder) as pool, pool.client() as client:
        client.submit("x", id="good", num_inference_steps=24).wait().raise_for_status()
        long = client.submit("x", id="long", num_inference_steps=LONG)
        next(event for event in long.events() if event.type == "step")
        long.cancel()
        assert long.wait().status == "canceled"
        client.submit("x", id="bad", width=33).wait()
    [log] = (folder / "logs").glob("coordinator*.log")
    return [json.loads(line) for line in log.read_text().splitlines()]


def of(lines: list[dict[str, Any]], job: str) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("job") == job]


def kind(line: dict[str, Any]) -> str:
    words = (
        "accepted",
        "→",
        "done in",
        "succeeded",
        "cancel asked",
        "canceled",
        "yield",
        "refused",
    )
    [found] = [word for word in words if word in line["message"]] or ["?"]
    return found


def test_every_transition_of_a_job_is_one_line(lines: list[dict[str, Any]]) -> None:
    """It is accepted, each task is handed out once and done once, it ends: as many lines."""
    good = of(lines, "good")
    handed_out = [line for line in good if kind(line) == "→"]
    done = [line for line in good if kind(line) == "done in"]
    assert Counter(map(kind, good)) == {
        "accepted": 1, "→": len(handed_out), "done in": len(handed_out), "succeeded": 1,
    }  # fmt: skip
    assert [line["seq"] for line in handed_out] == [line["seq"] for line in done]
    assert (kind(good[0]), kind(good[-1])) == ("accepted", "succeeded")
    stages = [line["stage"] for line in handed_out]
    assert (stages[0], stages[-1]) == ("encode", "decode")
    chunks = [line for line in handed_out if line["stage"] == "denoise"]
    assert len(chunks) > 1
    assert [line["step"] for line in chunks[1:]] == [
        line["step"] for line in done if line["stage"] == "denoise"
    ][:-1]
    assert good[-1]["status"] == "succeeded"
    assert good[-1]["total_s"] > 0


def test_a_line_has_the_job_in_its_words_and_where_and_when_as_fields(
    lines: list[dict[str, Any]],
) -> None:
    for line in lines:
        if "job" in line:
            assert line["job"] in line["message"]
    for line in of(lines, "good"):
        if kind(line) == "→":
            assert {"seq", "stage", "worker", "step", "slack_s"} <= set(line)
            assert line["worker"].startswith(line["stage"])


def test_a_cancel_and_a_refusal_are_lines_too(lines: list[dict[str, Any]]) -> None:
    long = Counter(map(kind, of(lines, "long")))
    assert (long["cancel asked"], long["canceled"], long["accepted"]) == (1, 1, 1)
    [bad] = of(lines, "bad")
    assert (kind(bad), bad["error_code"]) == ("refused", "invalid_request")
    assert "width" in bad["message"]
