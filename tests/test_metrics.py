"""Figures for Prometheus: told by every process, parsed as Prometheus does, exact after cancels."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from celery import Celery
from fastapi.testclient import TestClient

from common.arena import Arena
from common.connect import blocking, writing
from common.keys import Keys
from common.metrics.handoff import TimedStore
from common.metrics.http import serve
from common.metrics.registry import Family, Registry
from common.payload import Parcel
from common.scripts import Ttls
from common.settings import Settings
from common.stage import DENOISE, ENCODE
from services import metrics as all_metrics
from services.cli.main import main
from services.coordinator import events as ev
from services.coordinator.build import build, core_maker
from services.coordinator.metrics import CoordinatorMetrics
from services.coordinator.service import Coordinator
from services.coordinator.watching import Watchers
from services.gateway.app import make_app
from services.pool.local import LocalPool
from tests.processes import processes, until
from tests.scrapes import Scrape, addresses, read, scrape
from tests.servers import free_port, serving

KEY = "sk-prometheus-0123456789"
NOOP = "encode_ms=1,step_ms=5,decode_ms=1"
LONG = 1000  # steps of 5 ms: a job that still runs when a test looks
SERVICES = {"coordinator", "encode", "denoise", "decode", "gateway", "celery"}
GAUGES = (
    "slackwater_jobs", "slackwater_ready_work_seconds", "slackwater_work_left_seconds",
    "slackwater_waiting_slack_seconds_gcount",
)  # fmt: skip
DOCS = Path(__file__).resolve().parent.parent / "docs" / "operations.md"
OWN = ("slackwater_", "process_")


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    settings = Settings(
        noop=NOOP, metrics_port=free_port(), http_port=free_port(), worker_lease_s=2.0
    )
    with LocalPool(settings=settings, http=True, celery=True) as started:
        yield started


@pytest.fixture(scope="module")
def at(pool: LocalPool) -> dict[str, str]:
    """By service, its address."""
    found = addresses(pool, len(SERVICES))
    assert set(found) == SERVICES
    return found


# -- what there is -------------------------------------------------------------------------


def test_every_service_tells_what_the_docs_say_it_tells(at: dict[str, str]) -> None:
    """All of it, nothing else, with the kinds and labels that stand there."""
    group = {
        "coordinator": "the coordinator", "gateway": "the gateway", "celery": "the Celery side",
    }  # fmt: skip
    for service, address in at.items():
        told = scrape(address)
        own = all_metrics.BY_SERVICE[group.get(service, "a worker")]
        shared = all_metrics.BY_SERVICE["every service"]
        known = {family.name.removesuffix("_total"): family for family in (*own, *shared)}
        ours = {name for name in told.families if name.startswith("slackwater_")}
        ours -= {name for name in ours if name.endswith(("_gcount", "_gsum"))}
        assert ours <= set(known)
        assert {family.name.removesuffix("_total") for family in own} <= ours
        for name in ours:
            kind = known[name].kind
            assert told.families[name] == kind.removeprefix("gauge") or kind == "gauge"
        for name, labels in told.labels.items():
            family = known.get(name.removesuffix("_total")) or known.get(name.rpartition("_")[0])
            if family is not None:
                assert labels <= {*family.labels, "le"}
        assert told.tells("process_resident_memory_bytes")


def test_the_docs_have_every_figure() -> None:
    """`python -m services.metrics` prints the part of docs/operations.md that it checks here."""
    assert all_metrics.table() in DOCS.read_text()


def test_a_worker_s_record_says_where_its_figures_are(pool: LocalPool, at: dict[str, str]) -> None:
    redis: Any = writing(pool.redis_url)
    names = redis.smembers(pool.keys.workers)
    told = {redis.hget(pool.keys.worker(name.decode()), "metrics").decode() for name in names}
    redis.close()
    assert told == {at["encode"], at["denoise"], at["decode"]}


# -- what it says --------------------------------------------------------------------------


def grown(address: str, before: Scrape) -> Callable[..., float]:
    """How much a counter has grown since `before`."""
    return lambda name, **labels: scrape(address).of(name, **labels) - before.of(name, **labels)


def test_counts_are_those_of_the_jobs(pool: LocalPool, at: dict[str, str]) -> None:
    """Each job is accepted and ends once, in its class; its steps are counted where they ran.

    One after another: of two at once, the better may call back a task that the other had queued.
    """
    before = {service: scrape(address) for service, address in at.items()}
    with pool.client() as client:
        jobs = []
        for priority in (-1, 0, 0, 7):
            jobs.append(client.submit("x", num_inference_steps=4, priority=priority))
            jobs[-1].wait().raise_for_status()
        bad = client.submit("x", width=33)
        assert bad.wait().error_code == "invalid_request"
    leader = grown(at["coordinator"], before["coordinator"])
    accepted, ended = "slackwater_jobs_accepted_total", "slackwater_jobs_ended_total"
    until(lambda: leader(accepted) == leader(ended) == len(jobs), "all of them")
    for name in (accepted, ended):
        counts = [leader(name, priority=p, model="noop") for p in ("low", "normal", "high")]
        assert counts == [1, 2, 1]
    assert leader(ended, status="succeeded") == len(jobs)
    assert leader(ended, deadline="met") + leader(ended, deadline="missed") == len(jobs)
    assert leader("slackwater_job_seconds_count") == len(jobs)
    assert leader("slackwater_pushes_refused_total", error_code="invalid_request") == 1
    denoiser = grown(at["denoise"], before["denoise"])
    # A worker counts a task once its report is out.
    done, given = "slackwater_tasks_total", "slackwater_tasks_dispatched_total"
    until(lambda: denoiser(done, end="done") == leader(given, stage="denoise"), "all tasks")
    assert denoiser("slackwater_steps_total", model="noop") == 4 * len(jobs)
    assert denoiser("slackwater_batch_rows_count") == denoiser("slackwater_step_seconds_count")
    decoder = grown(at["decode"], before["decode"])
    assert decoder("slackwater_worker_busy_seconds_total") == pytest.approx(
        decoder("slackwater_task_seconds_sum", stage="decode")
    )


def test_gauges_are_zero_again_once_everything_was_canceled(
    pool: LocalPool, at: dict[str, str]
) -> None:
    """One job runs, others wait for the denoiser and for the encoder; all of them are canceled."""
    before = scrape(at["coordinator"])

    def active() -> float:
        return scrape(at["gateway"]).of("slackwater_pool_active_jobs")

    def told() -> Scrape:
        return scrape(at["coordinator"])

    def all_are_where_they_should_be() -> Scrape | None:
        """Between two tasks none runs for a moment."""
        now = told()
        runs = now.of("slackwater_jobs", stage="denoise", state="running") == 1
        waits = now.of("slackwater_jobs", stage="denoise", state="waiting") > 0
        return now if runs and waits and now.of("slackwater_jobs", state="waiting") >= 2 else None

    with pool.client() as client:
        jobs = [client.submit("x", num_inference_steps=LONG, slo_ms=3.6e6) for _ in range(6)]
        next(event for event in jobs[0].events() if event.type == "step")
        until(lambda: told().of("slackwater_jobs") == len(jobs), "all jobs")
        now = until(all_are_where_they_should_be, "one that runs and others that wait")
        assert now.of("slackwater_waiting_slack_seconds_gcount") >= 2
        assert now.of("slackwater_waiting_slack_seconds_bucket", le="0") == 0
        assert now.of("slackwater_ready_work_seconds", stage="denoise") > 0
        left = now.of("slackwater_work_left_seconds", stage="denoise")
        assert left > now.of("slackwater_ready_work_seconds", stage="denoise")
        # It looks at Redis by itself, a moment later.
        until(lambda: active() == len(jobs), "the gateway to see them")
        for job in jobs:
            job.cancel()
        assert {job.wait().status for job in jobs} == {"canceled"}
    until(lambda: not any(map(told().of, GAUGES)), "all of them to be 0")
    assert told().tells("slackwater_jobs")
    canceled = told().of("slackwater_jobs_ended_total", status="canceled", deadline="none")
    assert canceled - before.of("slackwater_jobs_ended_total", status="canceled") == len(jobs)
    until(lambda: active() == 0, "the gateway to see that")


def test_tasks_of_celery_s_programs_are_counted(pool: LocalPool, at: dict[str, str]) -> None:
    counted = grown(at["celery"], scrape(at["celery"]))
    program = Celery("other", broker=pool.redis_url, backend=pool.redis_url)
    with program.connection_for_write():
        good, bad = (
            program.send_task("slackwater.generate", kwargs=asked, queue="slackwater")
            for asked in ({"prompt": "x", "num_inference_steps": 2}, {"prompt": "x", "id": "mine"})
        )
        assert good.get(timeout=60)["status"] == "succeeded"
        with pytest.raises(ValueError, match="task_id"):
            bad.get(timeout=60)
    program.close()
    assert counted("slackwater_celery_tasks_total", verdict="entered") == 1
    assert counted("slackwater_celery_tasks_total", verdict="invalid") == 1
    until(lambda: scrape(at["celery"]).of("slackwater_celery_waiting") == 0, "nobody to wait")
    assert scrape(at["celery"]).of("slackwater_sender") == 1


@contextmanager
def leading(url: str, keys: Keys, **settings: Any) -> Iterator[Registry]:
    """A coordinator on a thread of this process, and what it tells."""
    made = Settings(redis_url=url, prefix=keys.prefix, **settings)
    coordinator, registry = build(made, blocking(url)), Registry()
    coordinator.watchers.add(CoordinatorMetrics(registry, coordinator))
    stopping = threading.Event()
    thread = threading.Thread(target=coordinator.run, args=(stopping.is_set,))
    thread.start()
    try:
        yield registry
    finally:
        stopping.set()
        thread.join()


def test_a_killed_worker_is_a_lost_lease_and_a_row_done_again(
    redis_server: str, redis_client: Any, keys: Keys, arena_path: str
) -> None:
    """Its task had begun: that is an attempt, and the row was handed out a second time."""
    # One chunk has all steps, so that the worker dies in it.
    times: dict[str, Any] = {"worker_lease_s": 2.0, "chunk_ms": 10**6}
    with (
        processes(redis_server, redis_client, keys, arena_path, **times) as pool,
        leading(redis_server, keys, **times) as registry,
    ):
        victim = pool.worker("denoise")
        for kind in ("encode", "decode"):
            pool.worker(kind)
        pool.wait_for_workers(3)
        pool.push("a", steps=60)
        pool.wait_for_event("a", "step")
        pool.kill(victim)
        pool.worker("denoise")
        pool.check("a", steps=60)
        pool.drained()
        told = read(registry)
        assert told.of("slackwater_leases_lost_total", who="worker") >= 1
        assert told.of("slackwater_redelivered_total", why="worker_lost") == 1
        assert told.of("slackwater_failed_attempts_total", error_code="worker_lost") == 1
        assert told.of("slackwater_workers", stage="denoise", state="ready") == 1


def test_figures_are_told_while_redis_is_away(keys: Keys) -> None:
    """That it is, that nobody leads, and nothing of the pool; then that it came back."""
    with serving(persist=True) as server, leading(server.url, keys) as registry:
        until(lambda: read(registry).of("slackwater_leader") == 1, "a leader")
        server.kill()
        until(lambda: read(registry).of("slackwater_redis_up") == 0, "Redis to be missed")
        away = read(registry)
        assert away.tells("slackwater_redis_up")
        assert away.of("slackwater_leader") == 0
        assert not away.tells("slackwater_jobs")
        server.start()
        until(lambda: read(registry).of("slackwater_leader") == 1, "a leader again")
        back = read(registry)
        assert back.of("slackwater_redis_up", service="coordinator") == 1
        assert back.of("slackwater_redis_reconnects_total") >= 1


# -- the gateway ---------------------------------------------------------------------------


def test_requests_are_counted_by_route_never_by_what_clients_make_up(
    pool: LocalPool, at: dict[str, str]
) -> None:
    before = scrape(at["gateway"])
    counted = grown(at["gateway"], before)
    with httpx.Client(base_url=pool.http_url, timeout=30) as http:
        assert http.get("/v1/jobs/nobody").status_code == 404
        assert http.get("/v1/jobs/somebody").status_code == 404
        assert http.get("/made/up").status_code == 404
        http.request("MADEUP", "/livez")
        ours = http.get("/metrics")
    requests = "slackwater_http_requests_total"
    assert counted(requests, method="GET", route="/v1/jobs/{job_id}", status="404") == 2
    assert counted(requests, route="none", status="404") == 1
    assert counted(requests, method="other") == 1
    assert counted("slackwater_http_request_seconds_count", route="/v1/jobs/{job_id}") == 2
    assert "made/up" not in ours.text
    assert "MADEUP" not in ours.text


def test_open_event_streams_are_told_while_they_are_open(
    pool: LocalPool, at: dict[str, str]
) -> None:
    def streams() -> float:
        return scrape(at["gateway"]).of("slackwater_http_event_streams")

    with pool.client() as client, httpx.Client(base_url=pool.http_url, timeout=30) as http:
        job = client.submit("x", num_inference_steps=LONG)
        with http.stream("GET", f"/v1/jobs/{job.id}/events") as stream:
            lines = stream.iter_lines()
            next(lines)
            assert streams() == 1
            job.cancel()
            for _ in lines:
                pass
    until(lambda: streams() == 0, "no open stream")


@pytest.mark.parametrize(
    ("how", "without_key", "with_key"), [("key", 401, 200), ("open", 200, 200), ("off", 404, 404)]
)
def test_the_gateway_s_figures_need_a_key_as_the_settings_say(
    how: Any, without_key: int, with_key: int
) -> None:
    """They are told also while Redis is away, and that it is."""
    settings = Settings(
        redis_url=f"redis://127.0.0.1:{free_port()}/0", http_keys=f"prometheus {KEY}",
        http_metrics=how,
    )  # fmt: skip
    with TestClient(make_app(settings)) as http:
        assert http.get("/metrics").status_code == without_key
        answer = http.get("/metrics", headers={"Authorization": f"Bearer {KEY}"})
        assert answer.status_code == with_key
        if with_key == 200:
            told = Scrape(answer.text)
            assert told.tells("slackwater_redis_up")
            assert told.of("slackwater_redis_up") == 0
            assert not told.tells("slackwater_pool_leader")


# -- one process ---------------------------------------------------------------------------


def a_coordinator(redis: Any, keys: Keys) -> tuple[Coordinator, Registry]:
    made, registry = Coordinator(redis, keys, Ttls(), core_maker(Settings())), Registry()
    made.watchers.add(CoordinatorMetrics(registry, made))
    return made, registry


def test_only_the_leader_tells_of_the_pool(redis_client: Any, keys: Keys) -> None:
    """Else every job would be counted as often as there are coordinators."""
    (first, of_first), (second, of_second) = (a_coordinator(redis_client, keys) for _ in range(2))
    assert first.lead()
    assert not second.lead()
    leads, waits = read(of_first), read(of_second)
    assert (leads.of("slackwater_leader"), waits.of("slackwater_leader")) == (1, 0)
    assert leads.tells("slackwater_jobs")
    assert not waits.tells("slackwater_jobs")
    assert not waits.tells("slackwater_workers")
    first.leadership.release()


def test_what_looks_on_costs_nobody_anything_when_it_fails(caplog: Any) -> None:
    """It is dismissed, once and with its name; the others look on."""
    seen = []

    class Broken:
        def heard(self, *_: Any) -> None:
            raise ZeroDivisionError

        did = heard

    class Sound(Broken):
        def heard(self, *_: Any) -> None:
            seen.append(1)

    watchers = Watchers([Broken(), Sound()])
    core: Any = None
    for _ in range(3):
        watchers.heard(ev.Tick(), core, 0.0)
    assert len(seen) == 3
    assert len([r for r in caplog.records if "Broken" in r.getMessage()]) == 1


def test_a_figure_that_cannot_be_had_hides_no_other() -> None:
    registry = Registry()
    registry.ask(Family("slackwater_broken", "gauge", "x"), lambda: {(): 1 / 0})
    registry.ask(Family("slackwater_sound", "gauge", "x"), lambda: {(): 7})
    assert read(registry).of("slackwater_sound") == 7


def test_processes_of_one_machine_take_one_port_after_another() -> None:
    settings = Settings(metrics_port=free_port())
    ports = [serve(Registry(), settings) for _ in range(2)]
    try:
        first, second = (int(port.address.rpartition(":")[2]) for port in ports)
        assert settings.metrics_port <= first < second
    finally:
        for port in ports:
            port.close()


def test_who_follows_another_keeps_the_port() -> None:
    """Prometheus finds a pool's processes where they were, after a restart and after a death."""

    def since(address: str) -> float:
        return scrape(address).of("process_start_time_seconds")

    settings = Settings(noop=NOOP, metrics_port=free_port())
    with LocalPool(settings=settings) as pool, pool.client() as client:
        before = {each: since(each) for each in addresses(pool, 4).values()}
        assert client.submit("x", num_inference_steps=2).wait(30).status == "succeeded"
        assert main(["restart", "--redis", pool.redis_url]) == 0
        [encoder] = pool.workers(ENCODE)
        os.kill(encoder, signal.SIGKILL)
        until(lambda: pool.workers(ENCODE) not in ([], [encoder]), "a new encoder")
        pool.wait_settled(30)
        after = {address: since(address) for address in before}
        assert all(after[address] > before[address] for address in before)
        pool.scale(DENOISE, 2)
        pool.scale(DENOISE, 1)
        assert addresses(pool, 4).keys() == SERVICES - {"gateway", "celery"}


def test_hand_offs_are_timed_by_path(arena: Arena, redis_client: Any, keys: Keys) -> None:
    """Through the arena, through Redis, and in the message itself; reads in place count too."""
    moved: list[tuple[str, str, int]] = []
    store = TimedStore(
        "here", arena=arena, redis=redis_client, prefix=keys.prefix, inline_bytes=64,
        moved=lambda op, path, seconds, nbytes: moved.append((op, path, nbytes)),
    )  # fmt: skip

    def parcel(nbytes: int) -> Parcel:
        return Parcel({"x": ("uint8", (nbytes,), memoryview(bytes(nbytes)))}, b"")

    small, large = store.put("a", 1, "p", parcel(32)), store.put("a", 1, "q", parcel(5000))
    far = store.put("a", 1, "r", parcel(5000), where="redis")
    for handle in (small, large, far):
        store.get(handle)
        with store.borrow(handle) as found:
            assert found.tensors["x"][1] in ((32,), (5000,))
        store.free(handle)
    for path, nbytes in (("inline", 32), ("arena", 5000), ("redis", 5000)):
        assert moved.count(("put", path, nbytes)) == 1
        assert moved.count(("get", path, nbytes)) == 2
