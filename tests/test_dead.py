"""Dead letters, workers that take themselves out, and tasks that cannot be read."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from common.arena import Arena
from common.fitness import FAILURES, FAILURES_OF_VALUES, Fitness, breaks_process
from common.job import Result
from common.keys import Keys
from common.messages import pack, unpack_report
from common.noop import NoopCosts, NoopStage
from common.reporting import TRACE_CHARS, failed
from common.scripts import Ttls
from common.stage import DENOISE, ENCODE, Control, Outcome, Row, Task
from common.worker import Identity, Worker
from services.cli.dead_letters import Letter
from services.cli.main import main
from services.cli.terminal import Exit
from tests.fakes import Table, a_spec
from tests.processes import processes, until
from tests.simulated import POISON, Pool, small_pool

# -- the stream --------------------------------------------------------------------------------


def letters(redis: Any, keys: Keys) -> list[dict[bytes, bytes]]:
    return [fields for _, fields in redis.xrange(keys.dead)]


def test_a_letter_is_written_with_the_end_and_only_once(redis_client: Any, keys: Keys) -> None:
    """What failed, where, how often and of what, in the transition that ends the job."""
    table = Table(redis_client, keys)
    spec = table.job(id="a")
    table.register("w")
    seq, _ = table.dispatch([spec], ["w"])
    table.start(seq, "w", [spec])
    assert table.run(table.worker_t.trace("a", seq, "Traceback …")) == ["noted"]
    table.report(seq, "w", [spec], code="stage_error")
    assert table.run(table.worker_t.trace("a", seq, "a zombie's")) == ["late"]
    end = table.t.finish("a", "failed", b"r", [], 9.0, "stage_error", "why", dead=True)
    assert table.run(end) == ["finished"]
    assert table.run(end) == ["gone"]
    (letter,) = letters(redis_client, keys)
    spec_bytes = letter.pop(b"spec")
    assert spec_bytes == spec.to_wire()
    assert letter == {
        b"job": b"a", b"at": b"9000", b"error_code": b"stage_error", b"error": b"why",
        b"attempts": b"1", b"stage": b"encode", b"step": b"0", b"trace": "Traceback …".encode(),
    }  # fmt: skip
    table.run(table.worker_t.leave("w", tell=False))
    redis_client.delete(keys.worker("w"), keys.reports)


def test_the_stream_keeps_the_latest(redis_client: Any, keys: Keys) -> None:
    """Redis trims in whole nodes of the stream, so a few more may stay."""
    table = Table(redis_client, keys, Ttls(dead_letters=5))
    for i in range(300):
        table.job(id=f"j{i}")
        table.run(table.t.finish(f"j{i}", "failed", b"r", [], 9.0, "stage_error", "x", dead=True))
    kept = [letter[b"job"] for letter in letters(redis_client, keys)]
    assert len(kept) < 150
    assert kept[-1] == b"j299"


def test_an_end_for_being_late_spares_a_job_that_is_done(redis_client: Any, keys: Keys) -> None:
    table = Table(redis_client, keys)
    spec = table.job(id="a")
    redis_client.hset(keys.trajectory("a"), "stage", "finish")
    late = table.t.finish("a", "failed", b"late", [], 9.0, "run_timeout", "x", late=True)
    assert table.run(late) == ["done"]
    assert table.record(spec)["status"] == "queued"
    assert table.run(table.t.finish("a", "succeeded", b"good", [], 9.0)) == ["finished"]
    assert redis_client.get(keys.result("a")) == b"good"
    assert letters(redis_client, keys) == []


# -- a pool with poison in it ------------------------------------------------------------------


@pytest.fixture
def pool(redis_client: Any, keys: Keys, arena: Arena) -> Iterator[Pool]:
    with small_pool(redis_client, keys, arena) as made:
        yield made


def push(pool: Pool, job: str, prompt: str = "x", **fields: Any) -> None:
    fields = {"num_inference_steps": 2, "seed": 5, **fields}
    pool.client.xadd(pool.keys.jobs, {"id": job, "prompt": prompt, **fields})


Dead = Callable[..., tuple[int, str]]


@pytest.fixture
def dead(redis_server: str, keys: Keys, capsys: pytest.CaptureFixture[str]) -> Dead:
    """`slackwater dead …` on this pool: its exit code and what it printed."""

    def run(action: str, *words: str) -> tuple[int, str]:
        flags = ["--redis", redis_server, "--prefix", keys.prefix]
        code = main(["dead", action, *words, *flags])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_poison_is_shown_and_its_neighbours_go_on(pool: Pool, dead: Dead) -> None:
    for job in ("a", "b"):
        push(pool, job)
    push(pool, "bad", POISON, slo_ms=60_000, priority=3, user="eve")
    pool.settle()
    for job in ("a", "b"):
        assert Result.from_wire(pool.client.get(pool.keys.result(job))).status == "succeeded"
    code, out = dead("list")
    assert code == Exit.OK
    assert "bad" in out
    assert "stage_error  RuntimeError: this prompt is poison" in out
    code, out = dead("show", "bad", "--json")
    shown = json.loads(out)
    assert shown["attempts"] == 3
    assert shown["params"]["prompt"] == POISON
    assert shown["params"]["slo_ms"] == pytest.approx(60_000)
    assert (shown["params"]["priority"], shown["params"]["user"]) == (3, "eve")
    assert shown["trace"].endswith("RuntimeError: this prompt is poison\n")
    assert "in run" in shown["trace"]  # where, and not only what
    assert "Traceback" in dead("show", "bad")[1]
    assert dead("show", "a")[0] == Exit.UNKNOWN


@pytest.fixture
def retry(pool: Pool, dead: Dead) -> Dead:
    """`slackwater dead retry …` while the pool goes on."""

    def run(*words: str) -> tuple[int, str]:
        with ThreadPoolExecutor(1) as thread:
            said = thread.submit(dead, "retry", *words, "--wait", "60")
            while not said.done():
                pool.let_run(1)
            return said.result()

    return run


def test_retry_pushes_the_same_job_again(pool: Pool, dead: Dead, retry: Dead) -> None:
    """Under a new id, with all that was asked for; the letter is gone, and a second failure leaves
    the next."""
    push(pool, "bad", POISON, width=64, on_late="degrade", min_inference_steps=1, slo_scale=500)
    pool.settle()
    first = json.loads(dead("show", "bad", "--json")[1])["params"]
    assert retry("bad") == (Exit.OK, "bad was pushed again as bad-retry1\n")
    assert "bad  " not in dead("list")[1]
    assert dead("retry", "bad")[0] == Exit.UNKNOWN
    pool.settle()
    again = json.loads(dead("show", "bad-retry1", "--json")[1])["params"]
    assert again.pop("slo_ms") == pytest.approx(first.pop("slo_ms"), abs=1)
    assert again == first
    assert first["width"] == 64
    assert first["seed"] == 5
    assert retry("bad-retry1", "--json")[1] == ('{"id": "bad-retry1", "retry": "bad-retry2"}\n')
    pool.settle()


def test_a_retry_that_is_refused_leaves_its_letter(pool: Pool, dead: Dead, retry: Dead) -> None:
    """And can be made again: the earlier refusal is not its answer."""
    push(pool, "bad", POISON)
    pool.settle()
    manifests = pool.client.hgetall(pool.keys.manifests)
    for name, manifest in manifests.items():
        steps = {"type": "int", "default": 1, "min": 1, "max": 1}
        known = json.loads(manifest)
        known["parameters"] = {**known.get("parameters", {}), "num_inference_steps": steps}
        pool.client.hset(pool.keys.manifests, name, json.dumps(known))
    pool.add_coordinator()
    pool.expire_lead()
    code, said = retry("bad")
    assert (code, "bad-retry1 was refused: num_inference_steps" in said) == (Exit.REFUSED, True)
    assert dead("show", "bad")[0] == Exit.OK
    pool.client.hset(pool.keys.manifests, mapping=manifests)
    pool.expire_lead()
    assert retry("bad") == (Exit.OK, "bad was pushed again as bad-retry2\n")
    assert dead("show", "bad")[0] == Exit.UNKNOWN
    pool.settle()


def test_a_retry_that_nobody_takes_leaves_its_letter(
    redis_client: Any, keys: Keys, dead: Dead
) -> None:
    """No coordinator leads. The same command later is the same job."""
    table = Table(redis_client, keys)
    table.job(id="a")
    table.run(table.t.finish("a", "failed", b"r", [], 9.0, "stage_error", "why", dead=True))
    for _ in range(2):
        code, said = dead("retry", "a", "--wait", "0.1")
        assert (code, "a-retry1 was pushed, and not accepted" in said) == (Exit.NOT_YET, True)
    assert dead("show", "a")[0] == Exit.OK
    redis_client.delete(keys.jobs)


@pytest.mark.parametrize(
    ("given_s", "slo_ms"),
    [(60, 60_000), (30 * 86_400, 30 * 86_400_000), (-5, None), (31 * 86_400, None), (None, None)],
)
def test_a_retry_has_the_parameters_of_its_job(given_s: float | None, slo_ms: float | None) -> None:
    """But no slo that there cannot be: a deadline_ms may be any moment."""
    arrival_s = 1_790_000_000.123
    told = {"callback_url": "https://a.example/x", "upload_url": "s3://b/c"}
    deadline_s = None if given_s is None else arrival_s + given_s
    spec = replace(a_spec("1-0", id="a"), arrival_s=arrival_s, deadline_s=deadline_s, **told)
    push = Letter("1-0", "a", 0.0, "stage_error", "why", 3, ENCODE, 0, "", spec).push()
    assert push.get("slo_ms") == slo_ms
    assert {name: push[name] for name in told} == told


def test_a_job_that_kills_its_workers_leaves_a_letter_too(pool: Pool, dead: Dead) -> None:
    """There is no exception to show: only where it was, and how often."""
    push(pool, "killer", num_inference_steps=50)
    for _ in range(3):
        for _ in range(300):
            pool.let_run(1, pass_s=0.3)
            denoisers = [w for w in pool.living_workers() if w.who.stage == DENOISE]
            at_work = [w for w in denoisers if w.actor.at == "step"]
            if at_work:
                break
        (victim,) = at_work
        victim.actor.kill()
        pool.expire_lease(victim)
        pool.add_worker(DENOISE)
    pool.settle()
    shown = json.loads(dead("show", "killer", "--json")[1])
    assert (shown["error_code"], shown["attempts"]) == ("worker_lost", 3)
    assert (shown["stage"], shown["step"], shown["trace"]) == ("denoise", 0, "")
    pool.store.sweep(lambda owner: True, min_age_s=0)  # what the dead had begun to write


def test_ends_that_were_wished_for_leave_no_letter(pool: Pool) -> None:
    push(pool, "a")
    pool.client.xadd(pool.keys.cancel, {"id": "a"})
    push(pool, "b", width=33)
    push(pool, "c", queue_timeout_ms=1)
    pool.settle()
    assert letters(pool.client, pool.keys) == []


# -- fitness -----------------------------------------------------------------------------------


def test_a_worker_is_unfit_after_failures_of_different_jobs_in_a_row() -> None:
    fitness = Fitness()
    for i in range(FAILURES - 1):
        fitness.note([(f"j{i}", "stage_error", "boom")])
    fitness.note([("j0", "stage_error", "boom")])  # nothing new
    assert fitness.unfit == ""
    fitness.note([("good", "", "")])
    for i in range(FAILURES - 1):
        fitness.note([(f"k{i}", "out_of_memory", "boom")])
        fitness.note([("x", "state_lost", "gone")])  # not its fault, and no proof of health
    assert fitness.unfit == ""
    fitness.note([("last", "stage_error", "boom")])
    assert "k0, k1, last" in fitness.unfit
    assert "boom" in fitness.unfit


def test_jobs_that_are_alike_take_no_worker_along() -> None:
    """What Python raises of odd values says little of the worker, however many bring them; one
    that does nothing else is given up in the end."""
    fitness = Fitness()
    for i in range(FAILURES_OF_VALUES - 1):
        fitness.note([(f"j{i}", "stage_error", "TypeError: can't multiply sequence by float")])
    assert fitness.unfit == ""
    fitness.note([("last", "stage_error", "IndexError: list index out of range")])
    assert "last" in fitness.unfit


def test_errors_of_the_device_end_the_process_at_once() -> None:
    """As torch words them; running out of memory is not one of them."""
    for error in ("CUDA error: device-side assert triggered", "HIP error: invalid device function"):
        assert breaks_process(f"RuntimeError: {error}")
        fitness = Fitness()
        fitness.note([("a", "stage_error", error)])
        assert error in fitness.unfit
    assert not breaks_process("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")


def test_what_a_failure_leaves_is_bounded() -> None:
    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise ValueError("x" * 9000)

    with pytest.raises(ValueError, match="x") as info:
        deep(200)
    outcome = failed(Row("a", {}), info.value)
    assert len(outcome.trace) == TRACE_CHARS
    assert failed(Row("a", {}), MemoryError()).error_code == "out_of_memory"


class Broken(NoopStage):
    """A device that is gone after its first task."""

    def run(self, task: Task, staged: dict[str, bytes], control: Control) -> list[Outcome]:
        raise RuntimeError("CUDA error: device-side assert triggered")


class Bench:
    """One encode worker in a thread, and the test in the coordinator's place."""

    def __init__(self, url: str, redis: Any, keys: Keys, stage: Any) -> None:
        from common.connect import blocking, writing

        self.redis, self.keys = redis, keys
        self.table = Table(redis, keys)
        self.worker = Worker(
            lambda: blocking(url), lambda: writing(url), keys, Ttls(), stage,
            Identity("w", ENCODE, "noop", "here"), lease_s=10.0,
        )  # fmt: skip
        self.thread = threading.Thread(target=self.worker.run)
        self.thread.start()
        until(lambda: redis.exists(keys.worker("w")), "the worker")

    def reports(self) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in self.redis.xrange(self.keys.reports)]

    def end(self) -> None:
        self.worker.drain()
        self.thread.join(20)
        assert not self.thread.is_alive()
        for job in self.redis.smembers(self.keys.active):
            self.table.run(self.table.t.finish(job.decode(), "canceled", b"r", [], 1.0))
        self.redis.delete(self.keys.reports, self.keys.jobs)


@pytest.fixture
def bench_of(
    redis_server: str, redis_client: Any, keys: Keys, arena: Arena
) -> Iterator[Callable[[type[NoopStage]], Bench]]:
    from common.handles import HandleStore

    made: list[Bench] = []

    def make(stage: type[NoopStage]) -> Bench:
        store = HandleStore("here", arena)
        made.append(Bench(redis_server, redis_client, keys, stage(ENCODE, store, NoopCosts())))
        return made[-1]

    yield make
    for bench in made:
        bench.end()


def test_a_broken_device_reports_its_task_and_leaves(
    bench_of: Callable[[type[NoopStage]], Bench],
) -> None:
    """The error is told and counted, what is queued goes back unharmed, the leader hears why."""
    bench = bench_of(Broken)
    first, second = bench.table.job(id="a"), bench.table.job(id="b")
    bench.table.dispatch([first], ["w"])
    bench.thread.join(20)
    assert not bench.thread.is_alive()
    hello, report, bye = bench.reports()
    row = unpack_report(report[b"body"]).rows[0]
    assert (row.error_code, unpack_report(report[b"body"]).draining) == ("stage_error", True)
    assert b"device-side assert" in bye[b"why"]
    assert hello[b"kind"] == b"hello"
    assert bench.worker.unfit
    assert b"Traceback" in bench.redis.hget(bench.keys.trajectory("a"), "trace")
    assert bench.table.dispatch([second], ["w"])[1][0] == "worker"  # nobody is there any more


class Ending(NoopStage):
    """Something in it ends the process."""

    def run(self, task: Task, staged: dict[str, bytes], control: Control) -> list[Outcome]:
        raise SystemExit(1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_ends_over_a_task_says_no_farewell(
    bench_of: Callable[[type[NoopStage]], Bench],
) -> None:
    """Else the leader would hand its job to the next one, and the next, without an attempt."""
    bench = bench_of(Ending)
    bench.table.dispatch([bench.table.job(id="a")], ["w"])
    bench.thread.join(20)
    assert not bench.thread.is_alive()
    assert [report[b"kind"] for report in bench.reports()] == [b"hello"]
    assert bench.redis.sismember(bench.keys.workers, "w")  # until the leader finds its lease gone


def test_a_task_of_another_version_fails_with_its_version(
    bench_of: Callable[[type[NoopStage]], Bench],
) -> None:
    """Dropped, its job would wait for as long as this worker lives."""
    bench = bench_of(NoopStage)
    spec = bench.table.job(id="a")
    message = pack([2, 1, "something", "else", "altogether"])
    t = bench.table.t
    call = t.dispatch(1, ENCODE, "noop", ["w"], [], 0.1, 1.0)
    row_keys, row_args = (bench.keys.trajectory("a"),), ("a", "0")
    args = (*call.args[:4], "1", message, *call.args[6:9], *row_args, *call.args[9:])
    assert bench.table.run(type(call)("dispatch", (*call.keys, *row_keys), args)) == ["dispatched"]
    until(lambda: len(bench.reports()) == 2, "a report")
    (row,) = unpack_report(bench.reports()[1][b"body"]).rows
    assert row.error_code == "stage_error"
    assert "version 2; this worker speaks 1" in row.error
    trajectory = bench.table.trajectory(spec)
    assert (trajectory["attempts"], trajectory["seq"]) == ("1", "0")
    assert not bench.redis.xlen(bench.keys.tasks("w"))


def test_a_task_that_is_no_message_at_all_fails_too(
    bench_of: Callable[[type[NoopStage]], Bench],
) -> None:
    """Its number stands beside its body, so that its job need not wait for this worker's end."""
    bench = bench_of(NoopStage)
    spec = bench.table.job(id="a")
    t = bench.table.t
    call = t.dispatch(1, ENCODE, "noop", ["w"], [], 0.1, 1.0)
    row_keys, row_args = (bench.keys.trajectory("a"),), ("a", "0")
    args = (*call.args[:4], "1", b"\xc1 torn", *call.args[6:9], *row_args, *call.args[9:])
    assert bench.table.run(type(call)("dispatch", (*call.keys, *row_keys), args)) == ["dispatched"]
    until(lambda: len(bench.reports()) == 2, "a report")
    (row,) = unpack_report(bench.reports()[1][b"body"]).rows
    assert (row.job, row.error_code) == ("a", "stage_error")
    assert "not msgpack" in row.error
    assert bench.table.trajectory(spec)["attempts"] == "1"


def test_a_worker_that_keeps_failing_ends_as_a_process(
    redis_server: str, redis_client: Any, keys: Keys, arena_path: str
) -> None:
    """With a code that has it started again: jobs in a row whose states cannot be there."""
    with processes(redis_server, redis_client, keys, arena_path) as pool:
        worker = pool.worker("denoise")
        pool.wait_for_workers(1)
        table = Table(redis_client, keys)
        name = next(iter(redis_client.smembers(keys.workers))).decode()
        for i in range(FAILURES_OF_VALUES):
            spec = a_spec(f"{i + 1}-0", id=f"j{i}")
            table.run(table.t.submit(spec, 1, 1.0, {}))
            redis_client.hset(keys.trajectory(spec.id), "stage", "denoise")
            table.dispatch([spec], [name], DENOISE, 0, 1)  # and no handle to begin from
        worker.join(20)
        assert worker.exitcode == 3
        for i in range(FAILURES):
            table.run(table.t.finish(f"j{i}", "canceled", b"r", [], 1.0))
        redis_client.delete(keys.reports)
