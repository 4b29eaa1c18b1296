"""Settings that a pool could not live with end a process at its start, by name."""

from __future__ import annotations

import math

import pytest

from common.keys import Keys
from common.scripts import Transitions
from common.settings import Settings, from_command_line, ttls_of


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--result-ttl-s", "inf", "finite number"),
        ("--result-ttl-s", "0.0001", "greater than or equal to 1"),
        ("--output-ttl-s", "1e300", "less than or equal to 315360000"),
        ("--job-ttl-s", "10", "must be at least result_ttl_s, which is 86400"),
        ("--leader-lease-s", "0.0001", "greater than or equal to 0.5"),
        ("--chunk-ms", "nan", "finite number"),
        ("--prefix", "", "must not be empty"),
        ("--prefix", "a b", "spaces"),
        ("--host", "my host", "spaces"),
        ("--dtype", "float99", "'float32', 'bfloat16' or 'float16'"),
        ("--log-level", "LOUD", "'DEBUG', 'INFO'"),
        ("--redis-url", "http://u:secret@host", "must begin with redis://"),
    ],
)
def test_a_setting_that_is_wrong_is_named_with_what_would_be_right(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, said: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        from_command_line("python -m service", [flag, value])
    assert stop.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m service: {flag}: ")
    assert said in line
    assert "secret" not in line


def test_a_result_that_stays_longer_than_the_record_is_refused_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its default is measured by what the others are."""
    with pytest.raises(SystemExit):
        from_command_line("x", ["--output-ttl-s", "200000"])
    assert "--job-ttl-s: must be at least output_ttl_s" in capsys.readouterr().err


def test_what_a_pool_can_live_with_makes_calls_that_redis_takes() -> None:
    short = Settings(result_ttl_s=1, output_ttl_s=2, job_ttl_s=2, log_level="debug")
    call = Transitions(Keys(), ttls_of(short)).refuse("1-1", [("a", b"r")], "c", "x", "y", 1.0)
    assert call.args[3:5] == ("2000", "1000")
    assert short.log_level == "DEBUG"
    assert Settings(max_backlog_s="inf").max_backlog_s == math.inf
