"""Traces: one for each job, made by every process that had to do with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from common.asks import typed_push
from common.checks import InvalidRequest
from common.messages import pack_task, unpack_task
from common.params import PoolDefaults, accept
from common.push import content_of, read_push
from common.settings import Settings
from common.traceparent import Parent, Trace
from common.tracing import NoTracing, open_spans
from services.pool.local import LocalPool
from tests.fakes import MANIFESTS, a_spec, raw_push
from tests.gateway_server import end_of
from tests.otlp import Collector, Span, collecting
from tests.servers import free_port

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENT = f"00-{TRACE}-{SPAN}-01"
NOT_SAMPLED = f"00-{TRACE}-{SPAN}-00"
STAGES = ("encode", "denoise", "decode")
NOOP = "encode_ms=2,step_ms=3,decode_ms=2"
CLOCKS_S = 0.5  # each process has looked at Redis' clock once, on a busy machine


# -- which trace ---------------------------------------------------------------------------


def test_every_service_comes_to_the_same_trace_by_itself() -> None:
    """Of a job's id, or of what its client sent; the job's own span is another one each time."""
    assert Trace.of("a") == Trace.of("a") != Trace.of("b")
    given = Trace.of("a", CLIENT)
    assert (f"{given.trace:032x}", f"{given.parent:016x}") == (TRACE, SPAN)
    assert given.sampled
    assert given.job not in (given.parent, Trace.of("b", CLIENT).job)
    assert Trace.of("a").parent == 0


def test_a_client_decides_whether_its_job_is_traced() -> None:
    """Where it says nothing, a share of the jobs is, the same ones in every service."""
    assert not Trace.of("a", NOT_SAMPLED, ratio=1.0).sampled
    assert Trace.of("a", CLIENT, ratio=0.0).sampled
    jobs = [f"job-{n}" for n in range(1000)]
    some = {job for job in jobs if Trace.of(job, ratio=0.3).sampled}
    assert 200 < len(some) < 400
    assert some < {job for job in jobs if Trace.of(job, ratio=0.6).sampled}


@pytest.mark.parametrize(
    "text",
    ["", "00", CLIENT.upper(), f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
     f"00-{TRACE}-{'0' * 16}-01", CLIENT + "x", f" {CLIENT}"],
)  # fmt: skip
def test_what_is_no_traceparent_is_known_as_none(text: str) -> None:
    assert Parent.of(text) is None


def test_a_push_that_is_sent_again_by_another_span_is_the_same_job() -> None:
    """`traceparent` says where a push comes from, not what it asks for."""
    other = CLIENT.replace(SPAN, "00f067aa0ba902b7")
    fields = raw_push(prompt="x", traceparent=CLIENT), raw_push(prompt="x", traceparent=other)
    assert content_of(fields[0]) == content_of(fields[1]) == content_of(raw_push(prompt="x"))
    typed = [typed_push("a", {"prompt": "x", "traceparent": sent}) for sent in (CLIENT, other)]
    assert content_of(typed[0].raw) == content_of(typed[1].raw)
    spec = accept(read_push("1-0", typed[0].raw), MANIFESTS, PoolDefaults())
    assert spec.traceparent == CLIENT
    assert "traceparent" not in spec.params


def test_a_push_with_a_traceparent_that_is_none_is_told_how_one_looks() -> None:
    push = read_push("1-0", raw_push(prompt="x", traceparent="yes"))
    with pytest.raises(InvalidRequest, match=r"traceparent: .*W3C.*32 hex"):
        accept(push, MANIFESTS, PoolDefaults())


def test_a_task_carries_its_client_s_span_and_nothing_where_there_is_none() -> None:
    """A worker of an earlier version reads tasks of jobs that nobody traces."""
    from services.coordinator.state import Job

    def row(traceparent: str) -> Any:
        spec = replace(a_spec(), traceparent=traceparent)
        return Job.of(spec, {}).row(0)

    plain = pack_task(1, "encode", "noop", ("w",), [row("")])
    traced = pack_task(1, "encode", "noop", ("w",), [row(CLIENT)])
    assert unpack_task(traced)[0].rows[0].traceparent == CLIENT
    assert unpack_task(plain)[0].rows[0].traceparent == ""
    assert len(traced) - len(plain) == len(CLIENT) + 2


def test_traces_that_cannot_be_made_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(NoTracing, match=r"slackwater\[otel\]"):
        open_spans(Settings(otel_endpoint="http://127.0.0.1:1"), "coordinator")


def test_without_an_endpoint_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert open_spans(Settings(), "coordinator") is None


# -- a live pool ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[LocalPool, Collector]]:
    """A pool of real processes, all of which send to one collector."""
    with pytest.MonkeyPatch.context() as patch, collecting() as collector:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # ms: tests do not wait for a full batch
        settings = Settings(
            noop=NOOP, chunk_ms=30, otel_endpoint=collector.url, http_port=free_port()
        )
        with LocalPool(settings=settings, http=True) as pool:
            yield pool, collector


def spans_of(collector: Collector, job: str) -> list[Span]:
    """All spans of one job, once it has ended and every worker has told of its tasks and reports.

    The coordinator sends the waits in front of the job's own span, one for each task.
    """

    def mine(spans: list[Span]) -> list[Span]:
        traces = {s.trace for s in spans if s.about.get("slackwater.job") == job}
        return [s for s in spans if s.trace in traces]

    def whole(spans: list[Span]) -> bool:
        spans = mine(spans)
        waits = {s.about["slackwater.seq"] for s in spans if s.name == "queue"}
        tasks = {s.id: s.about["slackwater.seq"] for s in spans if s.name in STAGES}
        reports = {s.parent for s in spans if s.name == "report"}
        ended = any(s.name == "job" for s in spans)
        return ended and set(tasks.values()) == waits and reports == set(tasks)

    spans = mine(collector.wait_for(whole))
    assert len({span.trace for span in spans}) == 1
    return spans


def test_a_job_is_one_trace_across_all_services(traced: tuple[LocalPool, Collector]) -> None:
    """Pushed over HTTP by a client that traces: its span is around the gateway's, that around the
    job's, and in that stand the waits and the work of three workers, in their order."""
    import httpx

    pool, collector = traced
    with httpx.Client(base_url=pool.http_url, headers={"traceparent": CLIENT}, timeout=60) as http:
        pushed = http.post("/v1/jobs", json={"prompt": "x", "num_inference_steps": 24, "id": "one"})
        assert pushed.is_success, pushed.text
        assert end_of(http, "one")["status"] == "succeeded"
    collector.wait_for(lambda spans: any(s.service == "slackwater-gateway" for s in spans))
    spans = spans_of(collector, "one")
    assert {span.trace for span in spans} == {TRACE}
    assert {span.service for span in spans} == {
        f"slackwater-{service}"
        for service in ("gateway", "coordinator", "encode", "denoise", "decode")
    }
    by_name = {span.name: span for span in spans}
    request, job = by_name["POST /v1/jobs"], by_name["job"]
    assert (request.parent, job.parent) == (SPAN, request.id)
    assert request.about["http.response.status_code"] in (200, 202)
    assert job.about["slackwater.status"] == "succeeded"
    assert not job.failed
    work = [span for span in spans if span.parent == job.id]
    tasks = sorted((s for s in work if s.name in STAGES), key=lambda s: s.about["slackwater.seq"])
    names = [span.name for span in tasks]
    assert names == sorted(names, key=STAGES.index)
    assert set(names) == set(STAGES)
    chunks = [span.about for span in tasks if span.name == "denoise"]
    assert len(chunks) > 1
    steps = [(c["slackwater.step"], c["slackwater.reached"]) for c in chunks]
    assert [reached for _, reached in steps][:-1] == [step for step, _ in steps][1:]
    assert (steps[0][0], steps[-1][1]) == (0, 24)
    waits = [span for span in work if span.name == "queue"]
    assert {span.about["slackwater.seq"] for span in waits} == {
        span.about["slackwater.seq"] for span in tasks
    }
    assert all("slackwater.slack_s" in span.about for span in waits)
    reports = [span for span in spans if span.name == "report"]
    assert {span.parent for span in reports} == {span.id for span in tasks}
    for span in work:
        assert job.begin_s - CLOCKS_S <= span.begin_s <= span.end_s <= job.end_s + CLOCKS_S


def test_a_job_of_nobody_s_trace_has_its_own(traced: tuple[LocalPool, Collector]) -> None:
    """Pushed by a client that does not trace, past the gateway."""
    pool, collector = traced
    with pool.client() as client:
        client.submit("x", id="alone", num_inference_steps=2).wait().raise_for_status()
    spans = spans_of(collector, "alone")
    [job] = [span for span in spans if span.name == "job"]
    assert job.parent == ""
    assert job.trace == f"{Trace.of('alone').trace:032x}"


def test_a_client_that_wants_no_trace_gets_none(traced: tuple[LocalPool, Collector]) -> None:
    pool, collector = traced
    with pool.client() as client:
        quiet = client.submit("x", id="quiet", num_inference_steps=2, traceparent=NOT_SAMPLED)
        quiet.wait().raise_for_status()
        client.submit("x", id="after", num_inference_steps=2).wait().raise_for_status()
    spans_of(collector, "after")
    assert not [s for s in collector.spans if s.about.get("slackwater.job") == "quiet"]


def test_a_canceled_job_s_trace_ends_with_its_reason(traced: tuple[LocalPool, Collector]) -> None:
    pool, collector = traced
    with pool.client() as client:
        job = client.submit("x", id="gone", num_inference_steps=1000)
        next(event for event in job.events() if event.type == "step")
        job.cancel()
        assert job.wait().status == "canceled"
    spans = collector.wait_for(
        lambda spans: any(s.name == "job" and s.about["slackwater.job"] == "gone" for s in spans)
    )
    [ended] = [s for s in spans if s.name == "job" and s.about["slackwater.job"] == "gone"]
    assert ended.about["slackwater.status"] == "canceled"
