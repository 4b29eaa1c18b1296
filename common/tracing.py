"""Spans by OpenTelemetry: made when what they tell of is over, with times by Redis' clock.

They are sent from a thread of their own; a collector that is away costs spans and nothing else.
Which trace a job belongs to is common/traceparent.py.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from typing import Any

from common.settings import Settings
from common.traceparent import SAMPLED, Trace

log = logging.getLogger("slackwater.tracing")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
# A collector that does not answer must not hold up the end of a process for long.
EXPORT_S = 3


class NoTracing(RuntimeError):
    """Traces are wanted and cannot be made; says what to install."""


def new_span() -> int:
    return secrets.randbits(64) or 1


class Spans:
    """Makes spans and sends them. Safe to use from several threads."""

    def __init__(self, service: str, exporter: Any, ratio: float = 1.0, instance: str = "") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        names = {"service.name": f"slackwater-{service}", "service.instance.id": instance}
        self._resource = Resource.create({k: v for k, v in names.items() if v})
        self._processor = BatchSpanProcessor(exporter)
        self.ratio = ratio

    def trace(self, job: str, traceparent: str = "") -> Trace:
        return Trace.of(job, traceparent, self.ratio)

    def add(
        self, name: str, trace: int, parent: int, begin_s: float, end_s: float,
        attributes: Mapping[str, Any], *, span: int = 0, error: str = "", server: bool = False,
    ) -> int:  # fmt: skip
        """One span that is over, in seconds since the epoch; its id. Never blocks."""
        from opentelemetry import trace as api
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        def context(of: int) -> api.SpanContext:
            return api.SpanContext(trace, of, True, api.TraceFlags(SAMPLED))

        span = span or new_span()
        status = api.Status(api.StatusCode.ERROR, error) if error else api.Status()
        self._processor.on_end(
            ReadableSpan(
                name,
                context(span),
                context(parent) if parent else None,
                self._resource,
                {k: v for k, v in attributes.items() if v is not None},
                kind=api.SpanKind.SERVER if server else api.SpanKind.INTERNAL,
                status=status,
                start_time=round(1e9 * begin_s),
                end_time=round(1e9 * max(begin_s, end_s)),
                instrumentation_scope=InstrumentationScope("slackwater"),
            )
        )
        return span

    def close(self) -> None:
        """Send what is left."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def open_spans(settings: Settings, service: str, instance: str = "") -> Spans | None:
    """Spans as the settings want them; None where nothing takes traces. Raises NoTracing."""
    endpoint = settings.otel_endpoint.rstrip("/")
    if not endpoint and not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise NoTracing("traces need more: pip install 'slackwater[otel]'") from error
    if endpoint and not endpoint.endswith("/v1/traces"):
        endpoint += "/v1/traces"
    exporter = OTLPSpanExporter(endpoint=endpoint or None, timeout=EXPORT_S)
    log.info("traces go to %s", endpoint or "where OTEL_EXPORTER_OTLP_ENDPOINT says")
    return Spans(service, exporter, settings.otel_ratio, instance)
