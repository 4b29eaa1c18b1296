"""What goes wrong between the Celery side and Celery, and that it holds up nothing else."""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery
from standardwebhooks import Webhook

from common.client import Client
from common.connect import writing
from common.job import JobStatus, Result
from common.keys import Keys
from common.settings import Settings
from services.celery_app import following
from services.celery_app.app import make_app
from services.celery_app.backend import JSON, Backends
from services.celery_app.build import build
from services.celery_app.context import to_wire
from services.celery_app.following import Following
from services.celery_app.telling import Telling
from services.pool.local import LocalPool
from tests.processes import until
from tests.receiver import receiving
from tests.servers import serving

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
PATIENCE_S = 60.0
CALLBACK: dict[str, Any] = {"task": "other.add", "args": [], "kwargs": {}, "options": {}}


class Request:
    """A task's request as the door sees it."""

    def __init__(self, job: str, **more: Any) -> None:
        self.__dict__.update({"id": job, "task": "slackwater.generate", **more})


class Side:
    """What follows tasks, and tasks whose jobs have ended."""

    def __init__(self, url: str, redis: Any, keys: Keys, celery_url: str = "") -> None:
        self.redis, self.keys = redis, keys
        app = make_app(Settings(redis_url=url, prefix=keys.prefix, celery_url=celery_url))
        backends = Backends(app, celery_url or url)
        self.backend = backends[JSON]
        self.client = Client(url, keys.prefix)
        self.following = Following(self.client, Telling(app, backends))

    def ended(self, job: str, **request: Any) -> None:
        context = to_wire(Request(job, **request), "", JSON)
        self.redis.hset(self.keys.celery, job, b"1-1 " + context)
        self.redis.set(self.keys.result(job), Result(job, JobStatus.SUCCEEDED).to_wire(), ex=60)
        self.record(job, status="succeeded", is_terminal="1")

    def record(self, job: str, **fields: str) -> None:
        self.redis.hset(self.keys.job(job), mapping={"id": job, **fields})
        self.redis.expire(self.keys.job(job), 60)

    def look(self) -> None:
        self.following.look(lambda: None)


@pytest.fixture
def side(redis_server: str, redis_client: Any, keys: Keys) -> Iterator[Side]:
    made = Side(redis_server, redis_client, keys)
    yield made
    made.client.close()


# -- one task ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"countdown": "3s"}, {"expires": "soon"}, {"compression": "no-such"}, {"queue": 7}],
    ids=lambda options: next(iter(options)),
)
def test_a_callback_that_cannot_be_sent_is_its_tasks_trouble_alone(
    side: Side, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The next task is told at once; this one fails after some tries, with the reason."""
    monkeypatch.setattr(following, "AGAIN_S", 0.001)
    monkeypatch.setattr(following, "TRIES", 3)
    side.ended("a-bad", callbacks=[{**CALLBACK, "options": options}])
    side.ended("b-good")
    side.look()
    assert side.backend.get_state("b-good") == "SUCCESS"

    def told() -> bool:
        side.look()
        return not side.redis.hlen(side.keys.celery)

    until(told, "the end of the bad one")
    assert side.backend.get_state("a-bad") == "FAILURE"
    assert "its end cannot be told" in str(side.backend.get_result("a-bad"))
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said == ["job a-bad: Celery cannot be told"], "once, not at each try"


def test_progress_that_cannot_be_told_stops_no_other(side: Side) -> None:
    """Celery's key of a task is something else: its states are left out, the others' are not."""
    for job in ("a-bad", "b-good"):
        side.record(job, status="running", step="1")
        context = to_wire(Request(job), "", JSON)
        side.redis.hset(side.keys.celery, job, b"1-1 " + context)
    side.redis.rpush("celery-task-meta-a-bad", "x")
    side.look()
    assert side.backend.get_state("b-good") == "PROGRESS"
    side.redis.delete("celery-task-meta-a-bad", "celery-task-meta-b-good")


# -- Celery's own Redis --------------------------------------------------------------------


def test_a_celery_that_is_away_stops_no_webhook_and_is_told_later() -> None:
    """Its Redis is another one and down: webhooks of tasks' jobs arrive, and when it is back
    programs get their results."""
    with receiving() as receiver, serving() as server, serving(persist=True) as theirs:
        settings = Settings(
            noop="step_ms=5", outgoing_hosts=receiver.url, webhook_secret=SECRET,
            celery_url=theirs.url,
        )  # fmt: skip
        with (
            LocalPool(settings=settings, redis_url=server.url, celery=True) as pool,
            writing(pool.redis_url) as redis,
            pool.client() as client,
        ):
            app = Celery("owner", broker=theirs.url, backend=theirs.url)
            asked = {"num_inference_steps": 200, "callback_url": receiver.url}
            task = app.send_task("slackwater.generate", ["x"], asked, queue="slackwater")
            until(lambda: redis.hlen(pool.keys.celery), "the door to take it", PATIENCE_S)
            theirs.kill()
            client.submit("y", id="b", callback_url=receiver.url)
            calls = receiver.until(2)
            ids = {Webhook(SECRET).verify(c.body, c.headers)["data"]["id"] for c in calls}
            assert ids == {"b", task.id}
            assert redis.hlen(pool.keys.celery) == 1, "its end is still owed"
            theirs.start()
            until(lambda: not redis.hlen(pool.keys.celery), "it to be told", PATIENCE_S)
            assert app.AsyncResult(task.id).get(timeout=PATIENCE_S)["status"] == "succeeded"
            app.close()


def test_a_celery_that_is_full_is_told_when_there_is_room(
    redis_server: str, redis_client: Any, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """maxmemory is nobody's failure: no task is given up for it."""
    monkeypatch.setattr(following, "AWAY_S", 0.001)
    monkeypatch.setattr(following, "TRIES", 1)
    with serving() as theirs, writing(theirs.url) as full:
        side = Side(redis_server, redis_client, keys, theirs.url)

        def looked() -> bool:
            side.look()
            return not side.redis.hlen(keys.celery)

        side.ended("a")
        full.config_set("maxmemory", 1)
        for _ in range(3):
            until(lambda: not side.following._celery_is_away(), "another try")
            assert not looked()
        full.config_set("maxmemory", 0)
        until(looked, "its end")
        assert side.backend.get_state("a") == "SUCCESS"
        side.client.close()


# -- beat ----------------------------------------------------------------------------------


@contextmanager
def reading(settings: Settings, **options: Any) -> Iterator[set[str]]:
    """The classes of threads that there are while a sender reads the outbox."""
    built = build(settings, **options)
    stopping = threading.Event()
    thread = threading.Thread(target=built.sender.run, args=(stopping,))
    thread.start()
    try:
        until(lambda: built.sender.leads, "the lease")
        yield {type(each).__module__ for each in threading.enumerate()}
    finally:
        stopping.set()
        thread.join()


def test_a_sender_alone_sends_nobody_to_sweep(redis_server: str, keys: Keys) -> None:
    """Nobody takes tasks from its queue: what beat sends there would stay for ever."""
    settings = Settings(redis_url=redis_server, prefix=keys.prefix)
    with reading(settings, sender_only=True) as threads:
        assert "celery.beat" not in threads
    with reading(settings) as threads:
        assert "celery.beat" in threads
