"""Messages build nothing, files are served as what they are, containers have no rights."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import msgpack
import pytest
import yaml
from redis.exceptions import AuthenticationError

from common.connect import writing
from common.job import JobStatus, OutputFile, Result
from common.keys import Keys
from common.messages import unpack
from common.settings import Settings
from tests.gateway_server import Http, serving_http
from tests.servers import binaries, free_port

ROOT = Path(__file__).resolve().parent.parent
SECRET = "Tr0ub4dor-and-3"
WAIT_S = 30.0


def test_a_message_never_becomes_an_object_of_its_senders_choosing() -> None:
    """Types of msgpack's own come out as inert values; maps that name classes stay maps."""
    hostile = [
        {"__class__": "os.system", "args": ["true"]},
        {"py/object": "subprocess.Popen"},
        msgpack.ExtType(42, b"cos\nsystem\n(S'true'\ntR."),
        msgpack.Timestamp(1),
    ]
    found = unpack(msgpack.packb(hostile))
    assert found == hostile
    assert {type(value) for value in found} <= {dict, msgpack.ExtType, msgpack.Timestamp}


@pytest.mark.parametrize(
    ("mime", "served", "how"),
    [
        ("image/png", "image/png", "inline"),
        ("video/mp4", "video/mp4", "inline"),
        ("text/html", "application/octet-stream", "attachment"),
        ("image/svg+xml", "application/octet-stream", "attachment"),
    ],
)
def test_a_file_is_never_served_as_something_that_a_browser_would_run(
    redis_server: str, redis_client: Any, mime: str, served: str, how: str
) -> None:
    """Whatever a worker says that it made."""
    file = OutputFile(Keys().output("x", 0), mime, 8, 8, 8, "0" * 64)
    made = Result("x", JobStatus.SUCCEEDED, outputs=(file,))
    redis_client.set(file.key, b"<script>", ex=60)
    redis_client.set(Keys().result("x"), made.to_wire(), ex=60)
    record = {"status": "succeeded", "is_terminal": "1", "id": "x"}
    redis_client.hset(Keys().job("x"), mapping=record)
    redis_client.expire(Keys().job("x"), 60)
    with serving_http(Settings(redis_url=redis_server)) as server, Http(server) as http:
        answer = http.get("/v1/jobs/x/output/0")
    assert answer.status_code == 200
    assert answer.headers["content-type"].partition(";")[0] == served
    assert answer.headers["content-disposition"].startswith(how)
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_image_does_not_run_as_root() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("FROM "))
    users = [line.split()[1] for line in lines[last:] if line.startswith("USER ")]
    assert users == ["slackwater"]
    made = next(line for line in lines[last:] if "useradd" in line)
    uid = re.search(r"--uid (\d+)", made)
    assert uid
    assert int(uid[1]) > 0
    assert "nologin" in made


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return found


def test_containers_of_ours_can_neither_write_their_image_nor_gain_rights() -> None:
    ours = {n: s for n, s in compose()["services"].items() if "slackwater" in s.get("image", "")}
    assert set(ours) >= {"coordinator", "encode", "denoise", "decode", "gateway"}
    for name, service in ours.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        assert not service.get("privileged"), name


@pytest.mark.parametrize("password", ["", SECRET])
def test_composes_redis_asks_for_the_password_that_is_set(tmp_path: Path, password: str) -> None:
    """The command and the health check of the file, run by a real server."""
    service = compose()["services"]["redis"]
    assert service["environment"] == {"REDISCLI_AUTH": "${SLACKWATER_REDIS_PASSWORD:-}"}
    shell, flag, script = service["command"]
    assert (shell, flag) == ("sh", "-c")
    assert SECRET not in script
    # What stands in the image: it gives up root, then runs what it is told.
    entry = tmp_path / "docker-entrypoint.sh"
    entry.write_text(
        f'#!/bin/sh\nshift\nexec {binaries()[0]} "$@" --port {(port := free_port())}\n'
    )
    entry.chmod(0o755)
    path = f"{tmp_path}:{Path(binaries()[0]).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "REDISCLI_AUTH": password}
    script = script.replace("$$", "$").replace("/data", str(tmp_path))
    script = re.sub(r"\$\{SLACKWATER_REDIS_MAXMEMORY:-(\w+)\}", r"\1", script)
    process = subprocess.Popen(
        ["sh", "-c", script], env=environment, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    try:
        kind, check = service["healthcheck"]["test"]
        assert kind == "CMD-SHELL"
        check = check.replace("$$", "$").replace("redis-cli", f"redis-cli -p {port}")
        patience = 200
        while subprocess.run(["sh", "-c", check], env=environment, check=False).returncode:
            patience -= 1
            assert patience, "it never became healthy"
            assert process.poll() is None, "it ended"
        line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert b"redis-server" in line  # the shell is gone: it gets the signals
        assert not password or password.encode() not in line
        client = writing(f"redis://:{password}@127.0.0.1:{port}/0")
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("requirepass") == {"requirepass": password}
        client.close()
        if password:
            with pytest.raises(AuthenticationError):
                writing(f"redis://127.0.0.1:{port}/0").ping()
    finally:
        process.terminate()
        process.wait(WAIT_S)
