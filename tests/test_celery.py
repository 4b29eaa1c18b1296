"""Another Celery program beside a real pool on no-op stages, on one Redis: what it can do with the
pool's door, and what it never notices of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import TaskRevokedError

from common.checks import InvalidRequest
from common.connect import writing
from common.job import JobStatus, Result
from common.keys import Keys
from common.messages import unpack
from common.settings import Settings
from services.celery_app.app import broker_url
from services.celery_app.context import from_wire
from services.celery_app.door import push_of
from services.celery_app.telling import error_of
from services.pool.local import LocalPool
from services.timeline.stream import read as read_timeline
from tests import celery_other
from tests.animations import animated
from tests.processes import until
from tests.servers import serving

ROOT = Path(__file__).parent.parent
GENERATE = "slackwater.generate"
LONG = 1000  # steps of 20 ms: a job that is still running when a test looks
LARGE = {"width": 1024, "height": 1024}  # steps of 0.4 s: longer than a message takes
PATIENCE_S = 60.0
# What Celery keeps without a TTL: its tables of queues (docs/celery.md).
TABLES = (b"_kombu.binding",)


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    settings = Settings(noop="step_ms=14,token_ms=0.1", refresh_ms=100, chunk_ms=10**6)
    with serving() as server, LocalPool(settings=settings, redis_url=server.url, celery=True) as up:
        yield up


@pytest.fixture(scope="module")
def redis(pool: LocalPool) -> Iterator[Any]:
    client = writing(pool.redis_url)
    yield client
    client.close()


@pytest.fixture(scope="module")
def other(pool: LocalPool) -> Iterator[Celery]:
    """The other program's app; a worker of its own runs."""
    app = celery_other.app
    app.conf.update(broker_url=pool.redis_url, result_backend=pool.redis_url)
    command = [
        sys.executable, "-m", "celery", "-A", "tests.celery_other", "worker", "-P", "solo",
        "-Q", "other", "-n", "other@here", "-l", "ERROR", "--without-gossip",
    ]  # fmt: skip
    environment = {**os.environ, "OTHER_REDIS_URL": pool.redis_url}
    worker = subprocess.Popen(command, cwd=ROOT, env=environment)
    assert app.send_task("other.add", (1, 2)).get(timeout=PATIENCE_S) == 3
    yield app
    worker.terminate()
    worker.wait(20)
    app.close()


def begin(app: Celery, **params: Any) -> Any:
    return app.send_task(GENERATE, kwargs={"prompt": "a red circle", **params})


def until_running(task: Any) -> None:
    def runs() -> bool:
        assert not task.ready(), task.info
        return bool(task.state == "PROGRESS")

    until(runs, f"{task.id} to run", PATIENCE_S)


def until_told(redis: Any, pool: LocalPool) -> None:
    """Until nothing is left to tell, and nothing in the streams."""
    keys = pool.keys
    until(lambda: not redis.hlen(keys.celery), "the last end to be told", PATIENCE_S)
    for stream in (keys.outbox, keys.jobs, keys.cancel, keys.reports):
        until(lambda stream=stream: not redis.xlen(stream), f"an empty {stream}", PATIENCE_S)


# -- what it can do ------------------------------------------------------------------------


def test_the_example_runs(pool: LocalPool) -> None:
    """A program that knows Celery and the URL sees states, a result, a reason and a cancel."""
    command = [sys.executable, "-m", "examples.celery_client", pool.redis_url]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    for line in ("PROGRESS: {", "SUCCESS: sw:output:", "bytes of", "REVOKED: canceled"):
        assert line in ran.stdout
    assert "FAILURE: invalid_request: width: 33 is not a multiple of 16" in ran.stdout


def test_states_and_info_follow_the_job(other: Celery, pool: LocalPool, redis: Any) -> None:
    """QUEUED, then PROGRESS with stage and step, which only grow, then SUCCESS and the result."""
    task = begin(other, num_inference_steps=60, seed=5)
    seen: list[tuple[str, Any]] = []

    def ended() -> bool:
        seen.append((task.state, task.info))
        return bool(task.ready())

    until(ended, "its end", PATIENCE_S)
    steps = [info["step"] for state, info in seen if state == "PROGRESS"]
    assert steps == sorted(steps)
    assert len(set(steps)) > 1
    assert {info["steps"] for state, info in seen if state == "PROGRESS"} == {60}
    result = task.get(timeout=PATIENCE_S)
    assert (result["id"], result["status"], result["seed"]) == (task.id, "succeeded", 5)
    assert result["params"]["num_inference_steps"] == 60
    assert redis.get(result["outputs"][0]["key"])
    assert Result.from_wire(redis.get(pool.keys.result(task.id))).seed == 5


def test_revoking_stops_a_running_job_at_its_next_step(
    other: Celery, pool: LocalPool, redis: Any
) -> None:
    """get() raises, the rank does not go on with its thousand steps, and takes the next job."""
    task = begin(other, num_inference_steps=LONG, **LARGE)
    until_running(task)
    task.revoke()
    with pytest.raises(TaskRevokedError):
        task.get(timeout=PATIENCE_S)
    assert task.state == "REVOKED"
    told = int(redis.hget(pool.keys.job(task.id), "step"))  # no step is told after the end
    assert begin(other).get(timeout=PATIENCE_S)["status"] == "succeeded"
    with pool.client() as client:
        assert client.status(task.id).status == "canceled"
        bars, _ = read_timeline(client, 0.0)
    reached = max(row.stop for bar in bars for row in bar.rows if row.job == task.id)
    assert told <= reached <= told + 5  # some more if the message takes its time


def test_any_program_may_revoke_by_id_and_with_terminate(other: Celery) -> None:
    """`control.revoke(id, terminate=True)` cancels the job, and the door's worker lives on."""
    task = begin(other, num_inference_steps=LONG)
    until_running(task)
    other.control.revoke(task.id, terminate=True, signal="SIGKILL")
    with pytest.raises(TaskRevokedError):
        task.get(timeout=PATIENCE_S)
    assert begin(other).get(timeout=PATIENCE_S)["status"] == "succeeded"


def test_a_task_revoked_before_its_time_never_becomes_a_job(
    other: Celery, pool: LocalPool, redis: Any
) -> None:
    task = other.send_task(GENERATE, kwargs={"prompt": "x"}, countdown=5)
    task.revoke()
    with pytest.raises(TaskRevokedError):
        task.get(timeout=PATIENCE_S)
    late = other.send_task(GENERATE, kwargs={"prompt": "x"}, countdown=6)
    assert late.get(timeout=PATIENCE_S)["status"] == "succeeded"  # so the first one's time is over
    assert not redis.exists(pool.keys.job(task.id))


def test_a_job_canceled_elsewhere_is_revoked(other: Celery, pool: LocalPool) -> None:
    task = begin(other, num_inference_steps=LONG)
    until_running(task)
    with pool.client() as client:
        client.cancel(task.id)
    with pytest.raises(TaskRevokedError):
        task.get(timeout=PATIENCE_S)


def test_what_cannot_be_pushed_fails_with_the_reason(other: Celery) -> None:
    """The pool's own words, as an exception that every program has."""
    wrong = (
        {"width": 33},
        {"steps": 0},
        {"no_such": 1},
        {"id": "mine"},
        {"callback_url": "http://x"},
    )
    words = "width: 33", "num_inference_steps: 0", "no_such: is not", "id: is", "outgoing_hosts"
    for params, said in zip(wrong, words, strict=True):
        with pytest.raises(ValueError, match=said):
            begin(other, **params).get(timeout=PATIENCE_S)


def test_priorities_keep_their_order(other: Celery, pool: LocalPool, redis: Any) -> None:
    """Celery's 0 is served first, and is a job's highest of 0 to 9; one of its own counts more."""
    asked = {"none": {}, "0": {"priority": 0}, "9": {"priority": 9}}
    tasks = {
        name: other.send_task(GENERATE, kwargs={"prompt": "x"}, **options)
        for name, options in asked.items()
    }
    own = other.send_task(GENERATE, kwargs={"prompt": "x", "priority": 50}, priority=9)
    found = {
        name: task.get(timeout=PATIENCE_S)["params"]["priority"] for name, task in tasks.items()
    }
    assert found == {"none": 0, "0": 0, "9": -9}
    assert own.get(timeout=PATIENCE_S)["params"]["priority"] == 50


def test_chains_chords_and_callbacks_go_on_when_the_job_has_ended(
    other: Celery, redis: Any
) -> None:
    """What follows runs in the other program, with the job's result."""

    def theirs(name: str) -> Any:
        return other.signature(name, queue="other")

    job = other.signature(GENERATE, kwargs={"prompt": "a star", "num_inference_steps": 3})
    described = chain(job, theirs("other.describe")).apply_async()
    assert described.get(timeout=PATIENCE_S) == "a star: succeeded"
    many = chord(group(job.clone() for _ in range(3)), theirs("other.count"))
    assert many.apply_async().get(timeout=PATIENCE_S) == 3
    linked = other.signature(GENERATE, kwargs={"prompt": "x", "width": 1})
    linked.apply_async(link_error=theirs("other.note_failure"))
    said = until(lambda: redis.get("other:failed"), "the error callback", PATIENCE_S)
    assert b"width" in said


def test_a_program_that_speaks_msgpack_is_answered_in_it(other: Celery, pool: LocalPool) -> None:
    """The result is written as its sender wrote the task."""
    app = Celery("packed", broker=pool.redis_url, backend=pool.redis_url, set_as_current=False)
    app.conf.update(
        task_serializer="msgpack", result_serializer="msgpack", accept_content=["msgpack"]
    )
    task = app.send_task(GENERATE, kwargs={"prompt": "x"}, queue="slackwater")
    assert task.get(timeout=PATIENCE_S)["status"] == "succeeded"
    raw = app.backend.client.get(app.backend.get_key_for_task(task.id))
    assert unpack(raw)["status"] == "SUCCESS"
    app.close()


def test_a_video_is_made_into_mp4_by_a_side_job(other: Celery, pool: LocalPool, redis: Any) -> None:
    """`slackwater.mux` leaves it beside the file, as long as the file; a picture is refused."""
    result = begin(other).get(timeout=PATIENCE_S)
    with pytest.raises(ValueError, match="no picture"):
        other.send_task("slackwater.mux", (result["id"],)).get(timeout=PATIENCE_S)
    redis.set(result["outputs"][0]["key"], animated("PNG", frames=4, fps=16), ex=600)
    made = other.send_task("slackwater.mux", (result["id"],)).get(timeout=PATIENCE_S)
    assert (made["mime"], made["frames"], made["fps"]) == ("video/mp4", 4, 16.0)
    assert made["key"] == pool.keys.movie(result["id"], 0)
    assert len(redis.get(made["key"])) == made["bytes"]
    assert redis.ttl(made["key"]) > 0


# -- what it does not notice ---------------------------------------------------------------


def test_its_own_tasks_are_untouched(other: Celery, pool: LocalPool, redis: Any) -> None:
    """Its broadcasts cannot make the door take its tasks or stop, and its revokes cancel no job."""
    other.control.add_consumer("other")
    other.control.revoke("somebody-elses-task")
    replies = other.control.broadcast(
        "shutdown", destination=[door_of(other)], reply=True, timeout=PATIENCE_S, limit=1
    )
    assert "error" in next(iter(replies[0].values()))
    sums = [other.send_task("other.add", (i, i)) for i in range(20)]
    assert [task.get(timeout=PATIENCE_S) for task in sums] == [2 * i for i in range(20)]
    assert not redis.exists(pool.keys.canceled("somebody-elses-task"))
    assert begin(other).get(timeout=PATIENCE_S)["status"] == "succeeded"


def door_of(app: Celery) -> str:
    found = app.control.inspect(timeout=PATIENCE_S, limit=2).ping() or {}
    return next(name for name in found if name.startswith("slackwater-"))


def test_two_hundred_at_once(other: Celery, pool: LocalPool, redis: Any) -> None:
    """Each gets its own result, and nothing is left: no stream entry, no note, no key for ever
    but Celery's tables of queues."""
    tasks = {i: begin(other, seed=i, num_inference_steps=1) for i in range(200)}
    for i, task in tasks.items():
        assert task.get(timeout=PATIENCE_S)["seed"] == i
    until_told(redis, pool)
    names = [name for name in redis.scan_iter(count=1000) if redis.ttl(name) == -1]
    permanent = {name.encode() for name in pool.keys.permanent()}
    left = [n for n in names if n not in permanent and not n.startswith(TABLES)]
    assert left == []


def test_a_job_that_is_gone_is_told_as_lost(other: Celery, pool: LocalPool, redis: Any) -> None:
    """Neither push nor record: get() ends with a reason, and waits for nothing."""
    note = b"1-1 " + b'{"content": "c", "serializer": "json", "request": {"id": "lost-1"}}'
    redis.hset(pool.keys.celery, "lost-1", note)
    with pytest.raises(RuntimeError, match="nothing is known"):
        other.AsyncResult("lost-1").get(timeout=PATIENCE_S)


# -- small parts ---------------------------------------------------------------------------


def test_a_prompt_may_stand_alone() -> None:
    """As the one positional argument; an id is the task's own."""
    alone, named = push_of("a", ("x",), {}), push_of("a", (), {"prompt": "x"})
    assert alone.content == named.content
    for args, kwargs in ((("x", "y"), {}), (("x",), {"prompt": "x"}), ((), {"id": "b"})):
        with pytest.raises(InvalidRequest):
            push_of("a", args, kwargs)
    with pytest.raises(InvalidRequest):
        push_of("not an id", (), {"prompt": "x"})


def test_errors_are_built_in() -> None:
    """A late end is a TimeoutError, a bad request a ValueError, everything else a RuntimeError."""
    ends = {
        ("failed", "invalid_request"): ValueError,
        ("failed", "conflict"): ValueError,
        ("expired", "deadline_missed"): TimeoutError,
        ("failed", "run_timeout"): TimeoutError,
        ("failed", "queue_full"): RuntimeError,
    }
    for (status, code), kind in ends.items():
        assert type(error_of(Result("a", JobStatus(status), error_code=code))) is kind


def test_a_note_that_cannot_be_read_is_said_so() -> None:
    for note in (b"", b"1-1", b"1-1 {}", b"1-1 []"):
        with pytest.raises(ValueError, match="note of task a"):
            from_wire("a", note)


def test_the_broker_is_the_pools_redis_unless_another_is_given(tmp_path: Path) -> None:
    """A password file is read; what Celery cannot follow is refused with the remedy."""
    secret = tmp_path / "password"
    secret.write_text("a b\n")
    plain = Settings(redis_url=f"redis://me@here:1/2?password_file={secret}")
    assert broker_url(plain) == "redis://me:a%20b@here:1/2"
    assert broker_url(Settings(celery_url="redis://there:1/0")) == "redis://there:1/0"
    assert "ssl_cert_reqs=required" in broker_url(Settings(redis_url="rediss://here:1/0"))
    for other in ("sentinel://here:1/name/0", "unix:///socket"):
        with pytest.raises(ValueError, match="celery_url"):
            broker_url(Settings(redis_url=other))


def test_the_default_queue_belongs_to_the_prefix_of_nobody(keys: Keys) -> None:
    """What Celery keeps of ours stands outside the pool's own keys, which a janitor sweeps."""
    from services.celery_app.app import make_app

    options = make_app(Settings(prefix=keys.prefix)).conf.broker_transport_options
    names = [v for k, v in options.items() if k.startswith("unacked")]
    assert len(names) == 3
    assert not any(name.startswith(keys.prefix) for name in names)
    assert all(name.startswith("slackwater.") for name in names)
