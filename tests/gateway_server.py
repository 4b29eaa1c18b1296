"""An HTTP gateway for tests, in a thread of this process, and ways to talk to it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import uvicorn

from common.settings import Settings
from services.gateway.__main__ import Server
from services.gateway.app import make_app
from services.pool.local import LocalPool
from tests.servers import free_port

NOOP = "encode_ms=1,step_ms=15,decode_ms=1"
LONG = 1000  # steps of 15 ms: a job that is still running when a test looks
WAIT_S = 30.0


class Http(httpx.Client):
    """A client of one gateway."""

    def __init__(self, server: Server) -> None:
        url = f"http://127.0.0.1:{server.config.port}"
        super().__init__(base_url=url, timeout=WAIT_S)
        self.server = server

    def until_waiting(self, count: int) -> None:
        """Until so many of the gateway's requests wait for events."""
        patience = time.monotonic() + WAIT_S
        while self.server.gateway.client.reads.waiting != count:
            assert time.monotonic() < patience
            time.sleep(0.002)  # a count in another thread, which tells nobody


@contextlib.contextmanager
def gateway(pool: LocalPool, **settings: Any) -> Iterator[Http]:
    """A client of a gateway of `pool` with settings of its own."""
    with (
        serving_http(pool.settings.model_copy(update=settings)) as server,
        Http(server) as client,
    ):
        yield client


@contextlib.contextmanager
def serving_http(settings: Settings) -> Iterator[Server]:
    """A gateway that serves for one block, on a free port."""
    settings = settings.model_copy(update={"http_port": free_port()})
    app = make_app(settings)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=settings.http_port, log_config=None, access_log=False,
        timeout_graceful_shutdown=5,
    )  # fmt: skip
    server = Server(app, config)
    started = threading.Event()
    startup = server.startup

    async def announced(sockets: Any = None) -> None:
        await startup(sockets)
        started.set()

    server.startup = announced  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run)
    thread.start()
    assert started.wait(WAIT_S), "the gateway did not start"
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the gateway did not stop"


def push(http: httpx.Client, prompt: str = "x", **params: Any) -> str:
    """The id of a job that was taken."""
    answer = http.post("/v1/jobs", json={"prompt": prompt, **params})
    assert answer.status_code in (200, 202), answer.text
    return str(answer.json()["id"])


def events(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """Server-sent events, field by field, as a browser reads them."""
    event: dict[str, str] = {}
    for line in lines:
        if not line:
            if event:
                yield event
            event = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            event[name] = value.removeprefix(" ")


def until_step(http: httpx.Client, job: str) -> None:
    """Wait until a job runs."""
    with http.stream("GET", f"/v1/jobs/{job}/events") as stream:
        for event in events(stream.iter_lines()):
            if event["event"] == "step":
                return
    raise AssertionError(f"{job} ended without a step")


def end_of(http: httpx.Client, job: str) -> dict[str, Any]:
    """How a job stands once it has ended."""
    with http.stream("GET", f"/v1/jobs/{job}/events") as stream:
        for _ in events(stream.iter_lines()):
            pass
    ended: dict[str, Any] = http.get(f"/v1/jobs/{job}").json()
    assert ended["is_terminal"]
    return ended


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error in an answer, which must have the one shape."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
