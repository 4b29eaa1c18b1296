"""Deliveries that cannot go well: slow receivers, and entries that nobody can deliver."""

from __future__ import annotations

import base64
import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from common.client import Client
from common.clock import redis_clock
from common.keys import Keys
from common.metrics.registry import Registry
from common.scripts import Scripts
from common.settings import Settings
from services.celery_app import deliveries, webhooks
from services.celery_app.attempts import Failed, GiveUp
from services.celery_app.deliveries import Deliveries
from services.celery_app.lease import Lease
from services.celery_app.metrics import CeleryMetrics
from services.celery_app.transitions import Owed
from services.celery_app.webhooks import Webhooks
from tests.processes import until

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()


@contextlib.contextmanager
def trickling(beginning: bytes, drop: bytes, patience_s: float = 20.0) -> Iterator[str]:
    """A receiver that answers `beginning` and then a drop now and again, until nobody listens; or
    gives in after a while, so that a test that waits for it fails."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(beginning)
                    for _ in range(round(patience_s / 0.05)):
                        if done.wait(0.05):
                            return
                        connection.sendall(drop)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            done.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_receiver_that_trickles_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time and the whole does not: that is a failure like any other."""
    monkeypatch.setattr(webhooks, "TIMEOUT_S", 0.4)
    with trickling(b"HTTP/1.1 204 No Content\r\nX: ", b"x") as url:
        sender = Webhooks(Settings(outgoing_hosts=url, webhook_secret=SECRET))
        with pytest.raises(Failed, match=r"no answer within 0\.4 s"):
            sender.send("msg_1", url, b"{}")
        sender.close()


def test_what_a_status_says_counts_though_its_body_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhooks, "TIMEOUT_S", 5.0)
    with trickling(b"HTTP/1.1 410 Gone\r\nContent-Length: 100000\r\n\r\ngo", b".") as url:
        sender = Webhooks(Settings(outgoing_hosts=url, webhook_secret=SECRET))
        with pytest.raises(GiveUp, match="answered 410: go"):
            sender.send("msg_1", url, b"{}")
        sender.close()


@pytest.fixture
def lease(redis_client: Any, keys: Keys) -> Iterator[Lease]:
    held = Lease(Scripts(redis_client), keys, 60.0)
    assert held.take()
    yield held
    held.release()


def test_what_nobody_can_deliver_is_said_and_waits_its_turn(
    redis_server: str, redis_client: Any, keys: Keys, lease: Lease,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A note that cannot be read is given up; a kind of a later version and an error that nobody
    thought of are failures, tried later; each is in the log."""
    caplog.set_level(logging.WARNING)
    clock = redis_clock(redis_client)
    settings = Settings(redis_url=redis_server, prefix=keys.prefix, webhook_retry_s=600)
    metrics = CeleryMetrics(Registry(), settings)
    client = Client(redis_server, keys.prefix)
    made = Deliveries(client, redis_client, lease, settings, clock, metrics)

    def broken(*_: Any) -> None:
        raise LookupError("unheard of")

    monkeypatch.setattr(made._webhooks, "send", broken)
    for name, kind in (("msg_1", "webhook"), ("new_2", "pigeon"), ("msg_3", "webhook")):
        owed = Owed(name, kind, "a", "http://127.0.0.1:1", b"")
        entry = redis_client.xadd(keys.outbox, {"job": "a"}).decode()
        assert lease.run(lease.transitions.post(entry, [owed], clock()))
    redis_client.hdel(keys.delivery("msg_3"), "body")
    made.begin_due()
    now_ms = 1000 * clock()
    until(lambda: not redis_client.zcount(keys.deliveries, "-inf", now_ms + 60_000), "all tried")
    made.close()
    assert {n.decode() for n in redis_client.zrange(keys.deliveries, 0, -1)} == {"msg_1", "new_2"}
    errors = {name: redis_client.hget(keys.delivery(name), "error") for name in
              ("msg_1", "new_2", "msg_3")}  # fmt: skip
    assert b"LookupError: unheard of" in errors["msg_1"]
    assert b"'pigeon'" in errors["new_2"]
    assert b"cannot be read" in errors["msg_3"]
    assert redis_client.hget(keys.delivery("msg_3"), "given_up") == b"1"
    for name in ("msg_1", "pigeon", "msg_3"):
        assert name in caplog.text
    client.close()
    metrics.close()


def test_one_that_cannot_be_settled_is_not_begun_again_at_once(
    redis_server: str, redis_client: Any, keys: Keys, lease: Lease,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Its key is something else: it is said, it keeps its thread for a while, and stopping does
    not wait for that."""
    monkeypatch.setattr(deliveries, "PAUSE_S", 3600.0)
    settings = Settings(redis_url=redis_server, prefix=keys.prefix)
    metrics = CeleryMetrics(Registry(), settings)
    client = Client(redis_server, keys.prefix)
    made = Deliveries(client, redis_client, lease, settings, redis_clock(redis_client), metrics)
    redis_client.set(keys.delivery("odd"), "x", ex=60)
    redis_client.zadd(keys.deliveries, {"odd": 1})
    made.begin_due()
    until(lambda: "delivery odd cannot be settled" in caplog.text, "a line in the log")
    made.begin_due()
    made.close()
    assert caplog.text.count("delivery odd cannot be settled") == 1
    redis_client.delete(keys.deliveries)
    client.close()
    metrics.close()
