"""An HTTP server that is told things, in a thread of this process, and answers as a test says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.processes import until


@dataclass(frozen=True, slots=True)
class Call:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class Receiver:
    """`answer` gives the status of the n-th call, from 0."""

    url: str
    answer: Callable[[int], int]
    calls: list[Call] = field(default_factory=list)

    def until(self, count: int) -> list[Call]:
        """The calls, once there are `count`."""
        until(lambda: len(self.calls) >= count, f"call {count}", 60.0)
        return self.calls


@contextlib.contextmanager
def receiving(answer: Callable[[int], int] = lambda _: 204) -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            number = len(receiver.calls)
            receiver.calls.append(Call(self.path, dict(self.headers.items()), body))
            self.send_response(receiver.answer(number))
            self.send_header("location", "/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

        def do_GET(self) -> None:  # as a client that followed a redirect would
            self.do_POST()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}", answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
