"""Redis users for each role, over TLS where the server has it: what each can do, and what not."""

from __future__ import annotations

import base64
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from redis.exceptions import AuthenticationError, NoPermissionError
from standardwebhooks import Webhook

from common import acl, health, spill
from common.connect import writing
from common.keys import Keys
from common.scripts import SOURCES
from common.settings import Settings
from services.cli.main import main
from slackwater import Client
from tests.certificates import self_signed
from tests.gateway_server import Http, end_of, push, serving_http
from tests.processes import processes, until
from tests.receiver import Receiver, receiving
from tests.servers import RedisServer, binaries, free_port, has_tls, serving, version_of

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "{guarded}:"
KEYS = Keys(PREFIX)
WAIT_S = 30.0
SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()


@dataclass(frozen=True)
class Guarded:
    """A server whose users are those that `slackwater acl` prints."""

    server: RedisServer
    passwords: Path
    tls: str  # "HOST:PORT?options" or "" where the server has none
    version: tuple[int, ...]

    def url(self, role: str) -> str:
        file = self.passwords / role
        if self.tls:
            where, _, options = self.tls.partition("?")
            return f"rediss://guarded-{role}@{where}/0?{options}&password_file={file}"
        where = f"127.0.0.1:{self.server.port}"
        return f"redis://guarded-{role}@{where}/0?password_file={file}"

    def connect(self, role: str) -> Any:
        return writing(self.url(role))


@contextmanager
def guarded(program: str, folder: Path) -> Iterator[Guarded]:
    version = version_of(program)
    words = ["acl", "--prefix", PREFIX, "--name", "guarded", "--passwords", str(folder / "pw"),
             "--server", ".".join(map(str, version))]  # fmt: skip
    said = subprocess.run(
        [sys.executable, "-m", "services.cli.main", *words], cwd=ROOT, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    (folder / "users.acl").write_text(said.stdout)
    options, tls = ["--aclfile", str(folder / "users.acl")], ""
    if has_tls(program):
        certificate, key = self_signed(folder, "localhost", "IP:127.0.0.1")
        port = free_port()
        options += ["--tls-port", str(port), "--tls-cert-file", str(certificate),
                    "--tls-key-file", str(key), "--tls-auth-clients", "no"]  # fmt: skip
        tls = f"127.0.0.1:{port}?ssl_ca_certs={certificate}"
    with serving(*options, program=program) as server:
        yield Guarded(server, folder / "pw", tls, version)


@pytest.fixture(scope="module", params=binaries(), ids=lambda p: "-".join(Path(p).parts[-4:]))
def guard(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guarded]:
    with guarded(request.param, tmp_path_factory.mktemp("guarded")) as made:
        yield made


@pytest.fixture
def witness(guard: Guarded) -> Iterator[Any]:
    """The server's own owner, on an empty database and with an empty ACL log."""
    client: Any = writing(guard.server.url)
    client.flushall()
    client.execute_command("ACL", "LOG", "RESET")
    yield client
    client.flushall()
    client.close()


def celery_settings(guard: Guarded, receiver: Receiver) -> Settings:
    return Settings(
        redis_url=guard.url("celery"), prefix=PREFIX, outgoing_hosts=receiver.url,
        webhook_secret=SECRET, celery_url=guard.server.url.removesuffix("/0") + "/1",
    )  # fmt: skip


@contextmanager
def celery_side(guard: Guarded, receiver: Receiver) -> Iterator[Celery]:
    """The whole of it, as its own user; and a program of Celery's."""
    settings = celery_settings(guard, receiver)
    given = settings.model_dump(include=settings.model_fields_set)
    variables = {f"SLACKWATER_{name.upper()}": str(value) for name, value in given.items()}
    program = [sys.executable, "-m", "services.celery_app"]
    side = subprocess.Popen(program, cwd=ROOT, env={**os.environ, **variables})
    app = Celery("program", broker=settings.celery_url, backend=settings.celery_url)
    try:
        yield app
    finally:
        side.terminate()
        side.wait(WAIT_S)
        app.close()


def denied(witness: Any) -> list[str]:
    """What was refused to whom; redis-py's introduction of itself may be."""
    log: Any = witness.acl_log()
    return [
        f"{entry['username']}: {entry['object']}"
        for entry in log
        if not entry["object"].startswith("client")
    ]


def test_a_pool_in_which_each_service_has_its_own_user_does_everything(
    guard: Guarded, witness: Any, arena_path: str, tmp_path: Path
) -> None:
    """With TLS where the server has it; nothing that anybody tries is refused. Celery's own keys
    are in another database here, and under another user."""
    with (
        receiving() as receiver,
        processes(
            guard.url("coordinator"), witness, KEYS, arena_path, states="redis", max_attempts=1,
            outgoing_hosts=receiver.url,
        ) as pool,
        celery_side(guard, receiver) as app,
    ):  # fmt: skip
        pool.coordinator()
        for kind in ("encode", "denoise", "decode"):
            pool.worker(kind, redis_url=guard.url("worker"))
        pool.wait_for_workers(3)
        with Client(guard.url("client"), prefix=PREFIX) as client:
            done = client.submit("a", id="a", num_inference_steps=3, seed=7).wait(WAIT_S)
            assert done.status == "succeeded"
            assert client.output("a")
            assert client.submit("b", width=33).wait(WAIT_S).error_code == "invalid_request"
            long = client.submit("c", num_inference_steps=1000)
            next(e for e in long.events(WAIT_S) if e.type == "step")
            long.cancel()
            assert long.wait(WAIT_S).status == "canceled"
            assert len(client.workers()) == 3
            assert client.ps() == []
            assert client.ps(ended=True)
            client.submit("told", id="told", callback_url=receiver.url).wait(WAIT_S)
            [call] = receiver.until(1)
            assert Webhook(SECRET).verify(call.body, call.headers)["data"]["id"] == "told"
            task = app.send_task("slackwater.generate", ["x"], queue="slackwater")
            assert task.get(timeout=WAIT_S)["status"] == "succeeded"
            own = celery_settings(guard, receiver)
            nothing = "0 deliveries owed, 0 tasks followed"
            until(lambda: nothing in health.check(health.CELERY, own), nothing)
            assert client.models()
        settings = Settings(redis_url=guard.url("gateway"), prefix=PREFIX)
        with serving_http(settings) as server, Http(server) as http:
            job = push(http, num_inference_steps=2)
            assert end_of(http, job)["status"] == "succeeded"
            assert http.get(f"/v1/jobs/{job}/output/0").content
            assert http.get("/v1/jobs").status_code == 200
            assert http.get("/v1/jobs", params={"status": "all"}).json()["data"]
            assert http.get("/readyz").status_code == 200
        witness.set(KEYS.staged("x", 1, 0), b"x", ex=60)  # for the janitor
        workers = [name.decode() for name in pool.client.smembers(KEYS.workers)]
        trace = str(tmp_path / "trace.jsonl")
        for words in (
            ["submit", "d", "--id", "d", "--eta", "--save", str(tmp_path)],
            ["watch", "d"], ["result", "d"], ["cancel", "d"],
            ["ps"], ["ps", "--all"], ["ps", "--workers"], ["dead", "list"],
            ["policies"], ["policies", "use", "edf"], ["timeline", "--json"],
            ["record", "--out", trace], ["janitor", "--dry-run"], ["janitor"],
            ["drain", *workers],
        ):  # fmt: skip
            assert main([*words, "--redis", guard.url("admin"), "--prefix", PREFIX]) == 0, words
        assert witness.hget(KEYS.janitor, "staged") == b"1"
    assert denied(witness) == []


# By role: what it has no business with. Redis 6.2 cannot tell reading from writing.
FORBIDDEN: dict[str, list[tuple[Any, ...]]] = {
    "client": [
        ("SET", KEYS.result("a"), "x"),
        ("HSET", KEYS.job("a"), "status", "succeeded"),
        ("DEL", KEYS.job("a")),
        ("XDEL", KEYS.jobs, "0-1"),
        ("XADD", KEYS.reports, "*", "kind", "report"),
        ("XADD", KEYS.tasks("w"), "*", "kind", "drain"),
        ("HGETALL", KEYS.trajectory("a")),
        ("SET", KEYS.leader, "me"),
        ("HSET", KEYS.policy, "wanted", "fcfs"),
        ("EVALSHA", "0" * 40, 1, KEYS.job("a")),
    ],
    "worker": [
        ("XADD", KEYS.jobs, "*", "prompt", "x"),
        ("XREAD", "STREAMS", KEYS.jobs, "0"),
        ("XADD", KEYS.cancel, "*", "id", "a"),
        ("SET", KEYS.result("a"), "x"),
        ("GET", KEYS.result("a")),
        ("GET", KEYS.output("a", 0)),
        ("SET", KEYS.leader, "me"),
        ("HSET", KEYS.policy, "wanted", "fcfs"),
        ("XADD", KEYS.outbox, "*", "body", "x"),
        ("DEL", KEYS.active),
    ],
    "gateway": [
        ("SET", KEYS.leader, "me"),
        ("SET", KEYS.result("a"), "x"),
        ("HSET", KEYS.pool, "here/denoise", "100"),
        ("EVALSHA", "0" * 40, 1, KEYS.job("a")),
    ],
    "celery": [
        ("XADD", KEYS.reports, "*", "kind", "report"),
        ("GET", KEYS.seq),
        ("HDEL", KEYS.pool, "here/denoise"),
        ("SCAN", "0"),
    ],
    "coordinator": [
        ("HSET", "other:job:a", "status", "x"),
        ("GET", "secret"),
    ],
    "admin": [
        ("HSET", "other:job:a", "status", "x"),
        ("GET", "secret"),
    ],
}
EVERYBODY: list[tuple[Any, ...]] = [
    ("FLUSHALL",), ("FLUSHDB",), ("KEYS", "*"), ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "dir", "/"), ("SCRIPT", "FLUSH"), ("EVAL", "return 1", 0), ("ACL", "LIST"),
    ("CLIENT", "LIST"), ("MONITOR",), ("SHUTDOWN",), ("REPLICAOF", "NO", "ONE"), ("SAVE",),
    ("GET", "other:result:a"),
]  # fmt: skip
TOLD_APART = [
    ("client", ("XADD", KEYS.events("a"), "*", "type", "succeeded")),
    ("client", ("XRANGE", KEYS.cancel, "-", "+")),
    ("celery", ("HSET", KEYS.job("a"), "status", "succeeded")),
    ("celery", ("DEL", KEYS.trajectory("a"))),
    ("gateway", ("HDEL", KEYS.manifests, "m")),
    ("gateway", ("HSET", KEYS.trajectory("a"), "seq", "0")),
    ("gateway", ("XADD", KEYS.reports, "*", "kind", "report")),
    ("worker", ("DEL", KEYS.active)),
]


@pytest.mark.parametrize("role", sorted(FORBIDDEN))
def test_each_role_is_refused_what_it_has_no_business_with(
    guard: Guarded, witness: Any, role: str
) -> None:
    client = guard.connect(role)
    commands = [*FORBIDDEN[role], *EVERYBODY]
    if guard.version >= acl.TELLS_READS:
        commands += [command for name, command in TOLD_APART if name == role]
    else:
        commands = [c for c in commands if (role, c) not in TOLD_APART]
    for command in commands:
        with pytest.raises(NoPermissionError):
            client.execute_command(*command)
    assert witness.dbsize() == 0
    client.close()


def test_without_a_password_nobody_gets_in(guard: Guarded) -> None:
    for login in ("guarded-client:wrong", "guarded-client:x", "nobody:x"):
        with pytest.raises(AuthenticationError):
            writing(f"redis://{login}@127.0.0.1:{guard.server.port}/0").ping()


def test_a_server_whose_certificate_is_not_trusted_is_not_talked_to(guard: Guarded) -> None:
    if not guard.tls:
        pytest.skip("this server was built without TLS")
    where = guard.tls.partition("?")[0]
    password = (guard.passwords / "client").read_text().strip()
    with pytest.raises(redis.ConnectionError, match="certificate verify failed"):
        writing(f"rediss://guarded-client:{password}@{where}/0").ping()


def test_every_script_and_every_key_is_somebodys() -> None:
    """A new one that no role was given would stop a guarded pool."""
    scripts = {name for role in acl.ROLES for name in role.scripts}
    assert scripts == set(SOURCES), "common/acl.py and common/lua differ"
    assert {spill.FREE} == {s for role in acl.ROLES for s in role.sources}


def test_acl_prints_no_password_and_makes_one_only_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["acl", "--passwords", str(tmp_path / "pw"), "--role", "client"]
    assert main(words) == 0
    first = capsys.readouterr().out
    password = (tmp_path / "pw" / "client").read_text().strip()
    assert len(password) > 30
    assert password not in first
    assert acl.hashed(password) in first
    assert stat.S_IMODE((tmp_path / "pw" / "client").stat().st_mode) == 0o600
    assert main(words) == 0
    assert capsys.readouterr().out == first
    assert main(["acl", "--setuser", "--role", "worker"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("ACL SETUSER slackwater-worker reset on resetchannels ~sw:")
    assert "have no password yet" in said.err


def test_a_prefix_with_wildcards_in_it_stands_for_itself() -> None:
    words = acl.rules(acl.BY_NAME["client"], "a*[b]:")
    assert r"~a\*\[b\]:jobs" in words
    with pytest.raises(ValueError, match="must not be empty or have spaces"):
        acl.rules(acl.BY_NAME["client"], "a b")
