"""A collector for tests: takes spans by OTLP over HTTP and keeps them."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Span:
    """Ids in hex, "" for no parent; times in seconds since the epoch."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    begin_s: float
    end_s: float
    failed: bool
    about: dict[str, Any] = field(hash=False)


class Collector:
    def __init__(self, url: str) -> None:
        self.url = url
        self._spans: list[Span] = []
        self._news = threading.Condition()

    @property
    def spans(self) -> list[Span]:
        with self._news:
            return list(self._spans)

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._news:
            self._spans += _spans(request)
            self._news.notify_all()

    def wait_for(self, enough: Callable[[list[Span]], bool]) -> list[Span]:
        """All spans, once they are enough."""
        with self._news:
            came = self._news.wait_for(lambda: enough(self._spans), PATIENCE_S)
            assert came, f"only these came: {[(s.service, s.name) for s in self._spans]}"
            return list(self._spans)


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in request.resource_spans:
        [service] = [a.value for a in resource.resource.attributes if a.key == "service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    service=service.string_value,
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    begin_s=span.start_time_unix_nano / 1e9,
                    end_s=span.end_time_unix_nano / 1e9,
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                    about={a.key: _plain(a.value) for a in span.attributes},
                )


def _plain(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            collector.take(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
