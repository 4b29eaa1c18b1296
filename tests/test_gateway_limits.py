"""Who may use the gateway and how much, clients that go away, and health that is true."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from common import health
from common.settings import Settings
from services.gateway.access import Caller, Keyring, KeysError, Rates
from services.gateway.errors import ApiError
from services.pool.local import LocalPool, PoolError
from tests.gateway_server import (
    LONG,
    NOOP,
    WAIT_S,
    Http,
    end_of,
    error_of,
    events,
    gateway,
    push,
    serving_http,
    until_step,
)
from tests.servers import free_port
from tests.test_up import eventually, up

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"
MOST = 3  # active jobs of the pool


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with LocalPool(settings=Settings(noop=NOOP, max_jobs=MOST)) as running:
        yield running


@pytest.fixture(scope="module")
def http(pool: LocalPool) -> Iterator[Http]:
    with gateway(pool) as client:
        yield client


@contextlib.contextmanager
def running(http: httpx.Client, count: int) -> Iterator[list[str]]:
    """So many jobs that do not end by themselves, canceled afterwards."""
    jobs = [push(http, num_inference_steps=LONG) for _ in range(count)]
    try:
        yield jobs
    finally:
        for job in jobs:
            http.delete(f"/v1/jobs/{job}", headers={"Prefer": "wait=20"})


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# -- the queue -----------------------------------------------------------------------------


def test_a_full_queue_says_when_to_come_back(http: httpx.Client) -> None:
    with running(http, MOST):
        for path in ("/v1/jobs", "/v1/images/generations"):
            answer = http.post(path, json={"prompt": "x"})
            error = error_of(answer, 429)
            assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
            assert int(answer.headers["retry-after"]) >= 1
        once = {"Idempotency-Key": "later"}
        error_of(http.post("/v1/jobs", json={"prompt": "x"}, headers=once), 429)
    # The same push succeeds when there is room.
    answer = http.post("/v1/jobs", json={"prompt": "x"}, headers=once | {"Prefer": "wait=20"})
    assert answer.json()["status"] == "succeeded"


# -- API keys ------------------------------------------------------------------------------


def test_keys_are_asked_for_and_never_logged(
    pool: LocalPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hashed = hashlib.sha256(BOB.encode()).hexdigest()
    listed = tmp_path / "keys"
    listed.write_text(f"# who may\nalice {ALICE}\nbob sha256:{hashed}\n")
    caplog.set_level(logging.DEBUG)
    with gateway(pool, http_keys=f"@{listed}") as http:
        for headers in ({}, bearer("sk-nobody-0123456789"), bearer(hashed), {"Authorization": BOB}):
            for path in ("/v1/jobs", "/v1/models", "/v1/videos", "/v1/jobs/x/output/0"):
                answer = http.get(path, headers=headers)
                assert error_of(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        for key in (ALICE, BOB):
            http.headers.update(bearer(key))
            done = end_of(http, push(http))
        [output] = done["outputs"]
        assert done["status"] == "succeeded"

        # Its link opens without a key, and only as it was made.
        del http.headers["authorization"]
        assert http.get(output["url"]).status_code == 200
        for url in (
            output["url"].split("?")[0],
            output["url"][:-1] + ("0" if output["url"][-1] != "0" else "1"),
            output["url"].replace("expires=1", "expires=2"),
            output["url"].replace("/output/0", "/output/1"),
        ):
            error_of(http.get(url), 401)
        assert http.get("/livez").status_code == http.get("/readyz").status_code == 200
        assert http.get("/openapi.json").status_code == 200
    assert "pushed by bob" in caplog.text
    assert not [secret for secret in (ALICE, BOB, hashed) if secret in caplog.text]


def test_a_list_of_keys_that_cannot_be_read_is_named_by_line() -> None:
    for text, said in (
        (f"alice {ALICE}\nbob", "line 2 should read: name key"),
        (f"alice {ALICE} fast", "line 1: fast is not per_minute=N or max_jobs=N"),
        ("alice short", "line 1: the key of alice has 5 characters; 16 or more are needed"),
        ("alice sha256:12", "line 1: sha256: wants 64 hex digits"),
        (f"alice {ALICE};bob {ALICE}", "line 2 repeats"),
        ("@/nowhere", "No such file"),
    ):
        with pytest.raises(KeysError, match=said) as caught:
            Keyring.of(Settings(http_keys=text))
        assert ALICE not in str(caught.value)
    assert ALICE not in repr(Settings(http_keys=f"alice {ALICE}"))


def test_each_key_has_its_share_of_the_queue(pool: LocalPool) -> None:
    keys = f"alice {ALICE} max_jobs=1;bob {BOB}"
    with gateway(pool, http_keys=keys) as alice, gateway(pool, http_keys=keys) as bob:
        alice.headers.update(bearer(ALICE))
        bob.headers.update(bearer(ALICE))  # another gateway counts the same jobs
        with running(alice, 1) as [job]:
            for client in (alice, bob):
                answer = client.post("/v1/jobs", json={"prompt": "x"})
                assert error_of(answer, 429)["code"] == "too_many_jobs"
                assert "alice has 1 active jobs" in answer.json()["error"]["message"]
                assert answer.headers["retry-after"]
            again = {"prompt": "x", "num_inference_steps": LONG, "id": job}
            assert alice.post("/v1/jobs", json=again).status_code == 202  # the same job
            # A push that is refused as another job's does not make room either.
            error_of(alice.post("/v1/jobs", json={"prompt": "other", "id": job}), 409)
            error_of(alice.post("/v1/jobs", json={"prompt": "x"}), 429)
            bob.headers.update(bearer(BOB))
            bobs = push(bob)
        assert end_of(bob, bobs)["status"] == "succeeded"
        # Refused pushes do not count, and ended jobs count no more.
        for _ in range(3):
            error_of(alice.post("/v1/jobs", json={"prompt": "x", "width": 1}), 400)
            error_of(alice.post("/v1/images/generations", json={"prompt": ""}), 400)
            assert end_of(alice, push(alice))["status"] == "succeeded"


def test_each_key_has_its_rate(pool: LocalPool) -> None:
    with gateway(pool, http_keys=f"alice {ALICE} per_minute=10;bob {BOB}") as http:
        http.headers.update(bearer(ALICE))
        push(http)  # a tenth of a minute's at once
        answer = http.post("/v1/jobs", json={"prompt": "x"})
        assert error_of(answer, 429)["code"] == "rate_limit_exceeded"
        assert 1 <= int(answer.headers["retry-after"]) <= 6
        assert http.get("/v1/jobs").status_code == 200  # only pushes count
        http.headers.update(bearer(BOB))
        end_of(http, push(http))


def test_a_rate_fills_up_again_with_time() -> None:
    now = [100.0]
    rates, caller = Rates(clock=lambda: now[0]), Caller("a", per_minute=60)
    for _ in range(6):  # a tenth of a minute's at once
        rates.take(caller)
    with pytest.raises(ApiError, match=r"the next one in 1\.0 s"):
        rates.take(caller)
    now[0] += 1
    rates.take(caller)
    with pytest.raises(ApiError):
        rates.take(caller)
    rates.take(Caller("b", per_minute=60))


# -- sizes ---------------------------------------------------------------------------------


def test_bodies_are_bounded_whether_their_length_is_told_or_not(pool: LocalPool) -> None:
    def dripping(size: int) -> Iterator[bytes]:
        for _ in range(0, size, 1000):
            yield b" " * 1000

    as_json = {"Content-Type": "application/json"}
    with gateway(pool, http_max_body_bytes=20_000, http_max_upload_bytes=40_000) as http:
        for body in (b" " * 20_001, dripping(21_000)):
            answer = http.post("/v1/jobs", content=body, headers=as_json)
            assert "20000 bytes" in error_of(answer, 413)["message"]
        picture = {"image": ("x.png", b"x" * 30_000, "image/png")}
        answer = http.post("/v1/images/edits", data={"prompt": "x"}, files=picture)
        assert error_of(answer, 400)["param"] == "image"
        picture = {"image": ("x.png", b"x" * 50_000, "image/png")}
        answer = http.post("/v1/images/edits", data={"prompt": "x"}, files=picture)
        error_of(answer, 413)
        # What a push may carry is bounded too, and by the pool.
        assert push(http, "x" * 9_000)
    with gateway(pool) as http:
        answer = http.post("/v1/jobs", json={"prompt": "x", "user": "x" * 300_000})
        assert error_of(answer, 400)["param"] == "payload"


# -- clients that go away ------------------------------------------------------------------


def hang_up(
    http: httpx.Client, prompt: str, steps: int = LONG, headers: dict[str, str] | None = None
) -> str:
    """Ask for a picture, go away as soon as its job runs; the job's id."""
    url = http.base_url
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    body = f'{{"prompt": "{prompt}", "num_inference_steps": {steps}}}'
    with socket.create_connection((url.host, url.port or 80), timeout=WAIT_S) as connection:
        connection.sendall(
            f"POST /v1/images/generations HTTP/1.1\r\nHost: {url.host}\r\n{lines}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        job = ""
        while not job:
            listed: list[dict[str, Any]] = http.get("/v1/jobs").json()["data"]
            job = next((job["id"] for job in listed if job["prompt"] == prompt), "")
        until_step(http, job)
    return job


def test_a_client_that_goes_away_takes_its_job_along(http: httpx.Client) -> None:
    assert end_of(http, hang_up(http, "gone"))["status"] == "canceled"


def test_a_job_that_may_be_asked_for_again_goes_on(pool: LocalPool, http: httpx.Client) -> None:
    kept = [hang_up(http, "kept by its key", 200, {"Idempotency-Key": "kept"})]
    with gateway(pool, http_cancel_on_disconnect=False) as patient:
        kept.append(hang_up(patient, "kept by the setting", 200))
        for job in kept:
            assert end_of(http, job)["status"] == "succeeded"


def test_a_request_that_waits_too_long_says_where_its_job_is(pool: LocalPool) -> None:
    body = {"prompt": "slow", "num_inference_steps": LONG}
    with gateway(pool, http_wait_s=0.2) as http:
        answer = http.post("/v1/images/generations", json=body)
        assert error_of(answer, 504)["code"] == "not_yet"
        assert answer.headers["x-should-retry"] == "false"
        job = http.get(answer.headers["location"]).json()
        assert not job["is_terminal"]
        soon = http.post("/v1/images/generations", json=body, headers={"Prefer": "wait=0"})
        assert (soon.status_code, soon.json()["object"]) == (202, "job")
        for one in (job, soon.json()):
            http.delete(f"/v1/jobs/{one['id']}", headers={"Prefer": "wait=20"})


def test_a_canceled_or_dropped_job_ends_its_request(http: httpx.Client) -> None:
    found: list[httpx.Response] = []
    body = {"prompt": "dropped", "num_inference_steps": LONG}

    def ask() -> None:
        found.append(http.post("/v1/images/generations", json=body))

    asking = threading.Thread(target=ask)
    asking.start()
    job = ""
    while not job:
        job = next((j["id"] for j in http.get("/v1/jobs").json()["data"]), "")
    http.delete(f"/v1/jobs/{job}")
    asking.join(WAIT_S)
    assert error_of(found[0], 409)["code"] == "canceled"
    assert found[0].headers["x-should-retry"] == "false"


# -- stopping and health -------------------------------------------------------------------


def test_a_gateway_that_stops_sends_its_waiters_home_and_jobs_go_on(
    pool: LocalPool, http: httpx.Client
) -> None:
    job = push(http, num_inference_steps=LONG)
    body = {"prompt": "x", "num_inference_steps": LONG, "id": job}
    both_wait = threading.Barrier(2)

    def ask(url: str) -> httpx.Response:
        both_wait.wait(WAIT_S)
        return httpx.post(f"{url}/v1/images/generations", json=body, timeout=WAIT_S)

    def follow(url: str) -> list[str]:
        with httpx.stream("GET", f"{url}/v1/jobs/{job}/events", timeout=WAIT_S) as stream:
            found = events(stream.iter_lines())
            first = next(found)
            both_wait.wait(WAIT_S)
            return [first["event"], *(event["event"] for event in found)]

    with ThreadPoolExecutor(2) as threads:
        with gateway(pool) as stopping:
            url = str(stopping.base_url)
            asking, following = threads.submit(ask, url), threads.submit(follow, url)
            until_step(http, job)
            stopping.until_waiting(2)
        error = error_of(asking.result(WAIT_S), 503)
        assert (error["code"], job in error["message"]) == ("stopping", True)
        assert "step" in following.result(WAIT_S)
        assert "succeeded" not in following.result()
    assert not http.get(f"/v1/jobs/{job}").json()["is_terminal"]
    http.delete(f"/v1/jobs/{job}", headers={"Prefer": "wait=20"})


def test_ready_means_that_a_job_would_be_made() -> None:
    settings = Settings(noop=NOOP, http_port=free_port())
    with LocalPool(settings=settings, http=True) as own:
        gateways = [p for p in own.processes() if p.role == "gateway"]
        with httpx.Client(base_url=own.http_url, timeout=WAIT_S) as http:
            ready = http.get("/readyz")
            assert (ready.status_code, set(ready.json()["checks"].values())) == (200, {"ok"})
            assert [ready.json()["pid"]] == [p.pid for p in gateways]
            own.scale("decode", 0)
            answer = http.get("/readyz")
            assert (answer.status_code, answer.json()["checks"]["decode"]) == (503, "has no worker")
            assert http.get("/v1/models").json()["data"][0]["ready"] is False
            assert http.get("/livez").status_code == 200
            # What comes now is kept until there is a worker.
            job = push(http)
            own.scale("decode", 1)
            assert http.get("/readyz").status_code == 200
            assert end_of(http, job)["status"] == "succeeded"


def serving(url: str) -> int:
    """The process that answers, 0 while none does."""
    try:
        return int(httpx.get(f"{url}/livez", timeout=WAIT_S).json()["pid"])
    except httpx.TransportError:
        return 0


def test_up_starts_it_when_asked_watches_it_and_stops_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(free_port())
    with up(tmp_path, "--http", port, "--http-keys", f"alice {ALICE}") as (process, said):
        assert said["http_url"] == f"http://127.0.0.1:{port}"
        told = [
            p["role"]
            for p in said["processes"]
            if ALICE.encode() in Path(f"/proc/{p['pid']}/environ").read_bytes()
        ]
        assert told == ["gateway"], "nobody else need know the keys"
        with httpx.Client(base_url=said["http_url"], timeout=WAIT_S) as nobody:
            assert nobody.get("/v1/models").status_code == 401
            assert nobody.get("/readyz").status_code == 200
        assert health.main(["gateway", "--http-port", port]) == 0
        assert f"healthy: answers on port {port}" in capsys.readouterr().out
        [killed] = [p["pid"] for p in said["processes"] if p["role"] == "gateway"]
        os.kill(killed, signal.SIGKILL)
        assert eventually(lambda: serving(said["http_url"])) != killed
        process.terminate()
        assert process.wait(WAIT_S) == 0
    assert health.main(["gateway", "--http-port", port]) == 1
    assert f"unhealthy: no answer on port {port}" in capsys.readouterr().out


def test_a_port_that_is_taken_is_said_at_the_start(http: httpx.Client) -> None:
    settings = Settings(noop=NOOP, http_port=http.base_url.port)
    with pytest.raises(PoolError, match=r"port \d+ of 127\.0\.0\.1: address already in use"):
        LocalPool(0, 0, 0, settings=settings, coordinators=0, http=True).start()


def test_without_redis_it_lives_is_not_ready_and_says_so() -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    with (
        serving_http(Settings(redis_url=nowhere)) as server,
        Http(server) as http,
        ThreadPoolExecutor() as threads,
    ):
        answers = [
            threads.submit(http.get, "/v1/jobs"),
            threads.submit(http.post, "/v1/jobs", json={"prompt": "x"}),
            threads.submit(http.post, "/v1/images/generations", json={"prompt": "x"}),
            threads.submit(http.get, "/v1/videos"),
        ]
        assert http.get("/livez").status_code == 200
        ready = http.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]) == (503, {"redis": "does not answer"})
        for answer in answers:
            assert error_of(answer.result(), 503)["code"] == "unavailable"
            assert answer.result().headers["retry-after"]
