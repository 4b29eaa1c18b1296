"""`/v1/jobs` over HTTP, against a pool of no-op stages: push, wait, follow, cancel, fetch."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import redis

from common.noop import expected
from common.settings import Settings
from services.pool.local import LocalPool
from tests.gateway_server import (
    LONG,
    WAIT_S,
    Http,
    end_of,
    error_of,
    events,
    gateway,
    push,
    until_step,
)


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    # LONG of them take longer than a crowd needs to come in.
    with LocalPool(denoisers=2, settings=Settings(noop="encode_ms=1,step_ms=50")) as running:
        yield running


@pytest.fixture(scope="module")
def http(pool: LocalPool) -> Iterator[Http]:
    with gateway(pool) as client:
        yield client


# -- pushing and waiting -------------------------------------------------------------------


def test_a_job_is_pushed_followed_and_fetched(http: httpx.Client) -> None:
    answer = http.post(
        "/v1/jobs", json={"prompt": "hi", "num_inference_steps": 3, "seed": 5, "priority": 7}
    )
    job = answer.json()
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert not job["is_terminal"]
    assert job["params"]["width"] == 128, "defaults are told as soon as it is accepted"
    assert job["deadline_at"] > job["created_at"]
    done = end_of(http, job["id"])
    assert (done["status"], done["progress"], done["step"], done["seed"], done["priority"]) == (
        "succeeded", 100.0, 3, 5, 7,
    )  # fmt: skip
    [output] = done["outputs"]
    file = http.get(output["url"])
    assert json.loads(file.content)["chain"] == expected("hi", 5, 3)
    assert file.headers["content-type"] == output["mime"] == "application/json"
    assert len(file.content) == output["bytes"]


def test_prefer_wait_answers_at_the_end_or_with_how_it_stands(http: httpx.Client) -> None:
    done = http.post("/v1/jobs", json={"prompt": "x"}, headers={"Prefer": "wait=20"})
    assert (done.status_code, done.json()["status"]) == (200, "succeeded")
    assert done.headers["preference-applied"] == "wait=20"
    body = {"prompt": "x", "num_inference_steps": LONG}
    late = http.post("/v1/jobs", json=body, headers={"Prefer": "wait=0"})
    assert (late.status_code, late.json()["is_terminal"]) == (202, False)
    http.delete(f"/v1/jobs/{late.json()['id']}")


def test_what_the_coordinator_refuses_is_an_error_that_names_the_field(http: httpx.Client) -> None:
    error = error_of(http.post("/v1/jobs", json={"prompt": "x", "width": 33}), 400)
    assert error == {
        "message": "width: 33 is not a multiple of 16; 32 and 48 are",
        "type": "invalid_request_error",
        "param": "width",
        "code": "invalid_request",
    }
    for body, param in (
        ({}, "prompt"),
        ({"prompt": "x", "num_inference_step": 3}, "num_inference_step"),
        ({"prompt": "x", "n": "2"}, "n"),
        ({"prompt": "x", "model": "flux"}, "model"),
        ({"prompt": "x", "seed": 2**80}, "seed"),
        ({"prompt": "x", "id": "no spaces"}, "id"),
        ({"prompt": "x", "id": 5}, "id"),
        ({"prompt": "x", "id": ""}, "id"),
        ({"prompt": "\ud800"}, "prompt"),
    ):
        content = json.dumps(body)
        answer = http.post(
            "/v1/jobs", content=content, headers={"Content-Type": "application/json"}
        )
        assert error_of(answer, 400)["param"] == param, body


def test_a_body_that_is_no_object_is_refused(http: httpx.Client) -> None:
    as_json = {"Content-Type": "application/json"}
    for content in ("", "{", "[]", '"x"', '{"prompt": "a", "prompt": "b"}', "[" * 100_000):
        answer = http.post("/v1/jobs", content=content, headers=as_json)
        assert error_of(answer, 400)["param"] == "body", content[:20]
    assert error_of(http.post("/v1/jobs", content="prompt=x"), 415)["param"] == "Content-Type"


def test_unknown_jobs_paths_and_methods_have_errors_of_the_same_shape(http: httpx.Client) -> None:
    for path in ("/v1/jobs/nobody", "/v1/jobs/nobody/events", "/v1/jobs/nobody/output/0"):
        assert "nobody" in error_of(http.get(path), 404)["message"]
    error_of(http.get("/v1/jobs/%00"), 404)
    error_of(http.get("/v1/nothing"), 404)
    error_of(http.delete("/v1/jobs/nobody"), 404)
    answer = http.put("/v1/jobs/nobody")
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert "GET" in answer.headers["allow"]


def test_an_id_is_taken_once(http: httpx.Client) -> None:
    first = push(http, "mine", id="taken", seed=1)
    assert first == push(http, "mine", id="taken", seed=1) == "taken"
    error = error_of(http.post("/v1/jobs", json={"prompt": "other", "id": "taken"}), 409)
    assert (error["code"], error["param"]) == ("conflict", "id")
    assert end_of(http, "taken")["prompt"] == "mine"


# -- Idempotency-Key -----------------------------------------------------------------------


def test_the_same_idempotency_key_and_body_is_one_job(http: httpx.Client) -> None:
    body, once = {"prompt": "once", "num_inference_steps": 30}, {"Idempotency-Key": "abc 1"}

    def post(_: int) -> str:
        return str(http.post("/v1/jobs", json=body, headers=once).json()["id"])

    with ThreadPoolExecutor(8) as crowd:
        [job] = set(crowd.map(post, range(8)))
    end_of(http, job)
    again = http.post("/v1/jobs", json=body, headers=once)
    assert (again.status_code, again.json()["id"]) == (200, job)
    # Asked for as pictures it is the same job too.
    pictures = http.post("/v1/images/generations", json=body, headers=once)
    assert pictures.json()["slackwater"]["id"] == job


def test_an_idempotency_key_with_another_body_is_refused(http: httpx.Client) -> None:
    once = {"Idempotency-Key": "def"}
    assert http.post("/v1/jobs", json={"prompt": "a"}, headers=once).status_code == 202
    for path in ("/v1/jobs", "/v1/images/generations"):
        error = error_of(http.post(path, json={"prompt": "b"}, headers=once), 422)
        assert error["param"] == "Idempotency-Key"
    error = error_of(http.post("/v1/jobs", json={"prompt": "a", "id": "i"}, headers=once), 400)
    assert error["param"] == "id"


# -- lists ---------------------------------------------------------------------------------


def test_the_list_has_active_jobs_and_pages(http: httpx.Client) -> None:
    jobs = [push(http, f"l{i}", num_inference_steps=LONG) for i in range(5)]
    try:
        whole = [job["id"] for job in http.get("/v1/jobs?limit=100").json()["data"]]
        assert set(jobs) <= set(whole)
        paged: list[str] = []
        more, after = True, ""
        while more:
            page = http.get(f"/v1/jobs?limit=2{after}").json()
            paged += [job["id"] for job in page["data"]]
            more, after = page["has_more"], f"&after={page['last_id']}"
        assert sorted(paged) == sorted(whole)
    finally:
        for job in jobs:
            http.delete(f"/v1/jobs/{job}", headers={"Prefer": "wait=20"})
    assert not set(jobs) & {job["id"] for job in http.get("/v1/jobs?limit=100").json()["data"]}
    everyone = http.get("/v1/jobs?limit=100&status=all").json()["data"]
    assert {"canceled"} == {job["status"] for job in everyone if job["id"] in jobs}
    assert error_of(http.get("/v1/jobs?limit=0"), 400)["param"] == "limit"
    assert error_of(http.get("/v1/jobs?after=nobody"), 404)["param"] == "after"
    error = error_of(http.get("/v1/jobs?limt=5"), 400)
    assert error["message"] == (
        "limt: is not a parameter of this path; there are after, limit, status"
    )


# -- events --------------------------------------------------------------------------------


def test_events_count_steps_and_end_with_the_whole_job(http: httpx.Client) -> None:
    job = push(http, num_inference_steps=60)
    with http.stream("GET", f"/v1/jobs/{job}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        seen = list(events(stream.iter_lines()))
    kinds = [event["event"] for event in seen]
    assert (kinds[0], kinds[-1]) == ("queued", "succeeded")
    steps = [json.loads(e["data"])["step"] for e in seen if e["event"] == "step"]
    assert steps == sorted(steps)
    assert len(steps) > 1
    last, now = json.loads(seen[-1]["data"])["job"], http.get(f"/v1/jobs/{job}").json()
    assert last | {"expires_at": 0} == now | {"expires_at": 0}
    assert now["expires_at"] > now["completed_at"]
    ids = [event["id"] for event in seen]
    assert ids == sorted(ids)

    half = {"Last-Event-ID": ids[2]}
    with http.stream("GET", f"/v1/jobs/{job}/events", headers=half) as stream:
        assert [e["id"] for e in events(stream.iter_lines())] == ids[3:]
    over = http.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": ids[-1]})
    assert (over.status_code, over.content) == (204, b"")
    answer = http.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": "yesterday"})
    assert error_of(answer, 400)["param"] == "last-event-id"


def test_a_stream_that_goes_away_leaves_its_job_and_nothing_waiting(http: Http) -> None:
    job = push(http, num_inference_steps=LONG)
    until_step(http, job)
    http.until_waiting(0)
    assert http.get(f"/v1/jobs/{job}").json()["status"] == "running"
    http.delete(f"/v1/jobs/{job}", headers={"Prefer": "wait=20"})


def test_a_stream_outlives_a_lost_connection_to_redis(pool: LocalPool, http: httpx.Client) -> None:
    job = push(http, num_inference_steps=200)
    with http.stream("GET", f"/v1/jobs/{job}/events") as stream:
        following = events(stream.iter_lines())
        seen = [next(following)]
        database = redis.Redis.from_url(pool.redis_url)
        for client in database.client_list():
            if client["cmd"] == "xread":
                database.client_kill_filter(_id=client["id"])
        seen += following
    assert seen[-1]["event"] == "succeeded"
    ids = [event["id"] for event in seen]
    assert len(set(ids)) == len(ids), "no event came twice"


def test_many_wait_on_few_connections(pool: LocalPool, http: httpx.Client) -> None:
    """200 open event streams and waiting requests, and all of them hear of their job's end."""
    crowd = 100
    jobs = [push(http, f"c{i}", num_inference_steps=LONG) for i in range(4)]
    waiting = threading.Barrier(2 * crowd + 1)

    def follow(i: int) -> str:
        with http.stream("GET", f"/v1/jobs/{jobs[i % 4]}/events") as stream:
            found = events(stream.iter_lines())
            next(found)
            waiting.wait(WAIT_S)
            return [event["event"] for event in found][-1]

    def wait(i: int) -> str:
        waiting.wait(WAIT_S)
        body = {"prompt": f"c{i % 4}", "num_inference_steps": LONG, "id": jobs[i % 4]}
        answer = http.post("/v1/jobs", json=body, headers={"Prefer": "wait=20"})
        return str(answer.json()["status"])

    limits = httpx.Limits(max_connections=None)
    with (
        httpx.Client(base_url=http.base_url, timeout=WAIT_S, limits=limits) as http,
        ThreadPoolExecutor(2 * crowd) as threads,
    ):
        followers = [threads.submit(follow, i) for i in range(crowd)]
        waiters = [threads.submit(wait, i) for i in range(crowd)]
        waiting.wait(WAIT_S)
        clients = redis.Redis.from_url(pool.redis_url).client_list()
        for job in jobs:
            http.delete(f"/v1/jobs/{job}")
        assert {f.result(WAIT_S) for f in followers} == {"canceled"}
        assert {w.result(WAIT_S) for w in waiters} == {"canceled"}
    assert len(clients) < 50


# -- canceling -----------------------------------------------------------------------------


def test_delete_cancels_a_running_job_and_leaves_an_ended_one(http: httpx.Client) -> None:
    job = push(http, num_inference_steps=LONG)
    until_step(http, job)
    answer = http.delete(f"/v1/jobs/{job}", headers={"Prefer": "wait=20"})
    assert (answer.status_code, answer.json()["status"]) == (200, "canceled")
    assert answer.json()["error"]["code"] == "canceled"
    done = push(http)
    end_of(http, done)
    answer = http.delete(f"/v1/jobs/{done}")
    assert (answer.status_code, answer.json()["status"]) == (200, "succeeded")


# -- files ---------------------------------------------------------------------------------


def test_a_file_that_is_not_there_says_why(pool: LocalPool, http: httpx.Client) -> None:
    job = push(http, num_inference_steps=LONG)
    assert error_of(http.get(f"/v1/jobs/{job}/output/0"), 409)["code"] == "not_ended"
    http.delete(f"/v1/jobs/{job}", headers={"Prefer": "wait=20"})
    assert error_of(http.get(f"/v1/jobs/{job}/output/0"), 409)["code"] == "canceled"
    done = push(http)
    end_of(http, done)
    assert "has 1 outputs" in error_of(http.get(f"/v1/jobs/{done}/output/1"), 404)["message"]
    assert error_of(http.get(f"/v1/jobs/{done}/output/x"), 400)["param"] == "n"
    database = redis.Redis.from_url(pool.redis_url)
    database.delete(pool.keys.output(done, 0))
    assert error_of(http.get(f"/v1/jobs/{done}/output/0"), 410)["code"] == "expired"
    database.delete(pool.keys.result(done))
    assert error_of(http.get(f"/v1/jobs/{done}/output/0"), 410)["code"] == "expired"
    assert http.get(f"/v1/jobs/{done}").json()["status"] == "succeeded"
