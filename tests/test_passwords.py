"""Passwords of Redis: where they can stand, and that nobody sees them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from common.connect import writing
from common.redis_url import RedisUrl, shown
from common.settings import Settings
from services.cli.main import main
from services.pool.state_dir import Address, StateDir
from tests.servers import serving

ROOT = Path(__file__).resolve().parent.parent
SECRET = "Tr0ub4dor-and-3"
WAIT_S = 30.0


def test_a_password_in_a_file_can_be_changed_while_clients_run(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    with serving() as server:
        owner: Any = writing(server.url)
        owner.execute_command("ACL", "SETUSER", "u", "on", f">{SECRET}", "~*", "+@all")
        client: Any = writing(f"redis://u@127.0.0.1:{server.port}/0?password_file={file}")
        assert client.execute_command("ACL", "WHOAMI") == b"u"
        file.write_text("another")
        owner.execute_command("ACL", "SETUSER", "u", "resetpass", ">another")
        client.connection_pool.disconnect()
        assert client.execute_command("ACL", "WHOAMI") == b"u"
        client.close()
        owner.close()


@pytest.mark.parametrize(
    "url",
    [
        f"redis://u:{SECRET}@host:6379/0",
        f"redis://:{SECRET}@host/0?ssl_ca_certs=/x",
        f"redis://:{SECRET}/x@host:6379/0",
        f"redis://:{SECRET}?x@host:6379/0",
        f"redis://:{SECRET}#x@host:port/0",
        f"redis://u:{SECRET}@host:port/0",
        f"sentinel://u:{SECRET}@a,b/mymaster?sentinel_password={SECRET}",
        f"redis://host/0?sentinel_password={SECRET}@y",
        f"redis://u:x?a={SECRET}@host/0",
        f"redis://u:{SECRET}?a=b@host/0",
        f"http://u:{SECRET}@host",
        f"u:{SECRET}@host",
    ],
)
def test_no_url_is_shown_with_its_password(url: str) -> None:
    said = [shown(url)]
    try:
        said.append(repr(RedisUrl.parse(url)))
    except ValueError:
        said.append(traceback.format_exc())
    assert not [text for text in said if SECRET in text]


def test_settings_are_printed_without_secrets() -> None:
    url = f"redis://:{SECRET}@h/0"
    settings = Settings(
        redis_url=url, celery_url=url, http_keys=f"alice {SECRET}", webhook_secret=SECRET
    )
    assert SECRET not in repr(settings)
    assert SECRET not in str(settings)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("redis://u@h?password_file=/nowhere", "password_file /nowhere cannot be read: No such"),
        ("redis://u:p@h?password_file=/nowhere", "has a password and a password_file"),
        ("redis://h?ssl_ca_certs=/x", "ssl_ options, which want rediss://"),
        ("sentinel://a,b", "sentinel://host:26379,other:26379/mymaster/0"),
        ("https://h", "must begin with redis://"),
        ("redis://h?decode_responses=true", "the option 'decode_responses', which cannot be used"),
        (
            "redis://h?protocol=3",
            "the option 'protocol', which cannot be used here; there are .*db",
        ),
        ("sentinel://h/m?retry_on_error=x", "the option 'retry_on_error'"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused_with_what_would_be_right(
    url: str, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        writing(url)


@pytest.mark.parametrize(
    "url", ["redis://h?protocol=2&db=3", "rediss://h?ssl_cert_reqs=none&client_name=me"]
)
def test_options_that_change_no_reply_may_stand_in_a_url(url: str) -> None:
    assert RedisUrl.parse(url).url.startswith(url.partition("?")[0])


def test_up_shows_the_password_of_its_redis_nowhere(tmp_path: Path) -> None:
    """Neither on the screen, nor in logs, nor in the command lines of its children."""
    with serving() as server:
        owner: Any = writing(server.url)
        owner.execute_command("ACL", "SETUSER", "u", "on", f">{SECRET}", "~*", "+@all")
        url = f"redis://u:{SECRET}@127.0.0.1:{server.port}/0"
        state = tmp_path / "state"
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli.main", "up", "--noop", "step_ms=1", "--json",
             "--state-dir", str(state), "--log-level", "DEBUG"],
            cwd=ROOT, env={**os.environ, "SLACKWATER_REDIS_URL": url}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            said = json.loads(line)
            for child in said["processes"]:
                command = Path(f"/proc/{child['pid']}/cmdline").read_bytes()
                assert SECRET.encode() not in command
            # For its owner only: from it the other commands know where the pool is.
            address = state / "pool.json"
            assert stat.S_IMODE(address.stat().st_mode) == 0o600
            assert json.loads(address.read_text())["redis_url"] == url
            taken = subprocess.run(
                [sys.executable, "-m", "services.cli.main", "up", "--noop", "step_ms=1",
                 "--state-dir", str(state)],
                cwd=ROOT, env={**os.environ, "SLACKWATER_REDIS_URL": url}, text=True,
                capture_output=True, check=False,
            )  # fmt: skip
            assert "another `slackwater up`" in taken.stderr
        finally:
            process.terminate()
            out, err = process.communicate(timeout=WAIT_S)
        logs = "".join(log.read_text() for log in (state / "logs").glob("*.log"))
        assert logs
        for text in (line, out, err, logs, taken.stdout, taken.stderr):
            assert SECRET not in text
        owner.close()


def test_a_wrong_password_is_said_at_once_and_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as server:
        owner = writing(server.url)
        owner.config_set("requirepass", "right")
        owner.close()
        url = f"redis://:{SECRET}@127.0.0.1:{server.port}/0"
        words = ["up", "--noop", "step_ms=1", "--redis", url, "--state-dir", str(tmp_path)]
        assert main(words) == 1
        said = capsys.readouterr()
        assert "does not answer: " in said.err
        assert "password" in said.err
        assert SECRET not in said.out + said.err


def test_an_old_address_file_that_others_can_read_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "pool.json.part").write_text("x")
    (tmp_path / "pool.json").write_text("x")
    (tmp_path / "pool.json").chmod(0o644)
    StateDir(tmp_path).write(Address(1, f"redis://:{SECRET}@h/0", "sw:", "here", "/log"))
    assert stat.S_IMODE((tmp_path / "pool.json").stat().st_mode) == 0o600
