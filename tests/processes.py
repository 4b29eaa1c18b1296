"""Real processes of a pool on no-op stages, forked from a server that has imported everything, so
that one starts in milliseconds; and ways to wait for what they do."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from common.job import Result
from common.keys import Keys
from common.noop import expected
from common.settings import Settings

PATIENCE_S = 30.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["common.stage_main", "services.coordinator.build"])


def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """The first true answer of `condition`, asked often."""
    end = time.monotonic() + patience_s
    while not (answer := condition()):
        assert time.monotonic() < end, f"waited {patience_s:.0f} s for {what}"
        time.sleep(0.005)
    return answer


def _stage(kind: str, settings: dict[str, Any]) -> None:
    from common.logs import set_up
    from common.stage_main import serve

    set_up(settings.get("log_level", "ERROR"))
    serve(kind, Settings(**settings))


def _coordinator(settings: dict[str, Any]) -> None:
    import threading

    from common.connect import blocking
    from common.logs import set_up
    from services.coordinator.build import build

    set_up(settings.get("log_level", "ERROR"))
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    made = Settings(**settings)
    build(made, blocking(made.redis_url)).run(stopping.is_set)


class Processes:
    """A pool whose members a test starts, signals and waits for."""

    def __init__(self, url: str, client: Any, keys: Keys, arena: str, **more: Any) -> None:
        self.client, self.keys = client, keys
        self.settings: dict[str, Any] = {
            "redis_url": url, "prefix": keys.prefix, "arena_path": arena, "arena_bytes": 4 << 20,
            # With states large enough to need the arena.
            "host": "here", "noop": "step_ms=20,state_kb=64", "chunk_ms": 100,
            "log_level": "CRITICAL", **more,
        }  # fmt: skip
        self._all: list[BaseProcess] = []

    # -- processes -----------------------------------------------------------------------

    def coordinator(self) -> BaseProcess:
        return self._start(_coordinator, self.settings)

    def worker(self, kind: str, **more: Any) -> BaseProcess:
        return self._start(_stage, kind, {**self.settings, **more})

    def pool(self, denoisers: int = 1) -> tuple[BaseProcess, list[BaseProcess]]:
        """One of each, with so many denoisers, and all of them registered."""
        coordinator = self.coordinator()
        workers = [self.worker(kind) for kind in ("encode", "decode", *["denoise"] * denoisers)]
        self.wait_for_workers(len(workers))
        return coordinator, workers[2:]

    def wait_for_workers(self, count: int) -> None:
        until(lambda: self.client.scard(self.keys.workers) == count, f"{count} workers")

    def _start(self, target: Callable[..., None], *args: Any) -> BaseProcess:
        process = _context.Process(target=target, args=args)
        process.start()
        self._all.append(process)
        return process

    @staticmethod
    def signal(process: BaseProcess, number: int) -> None:
        assert process.pid
        os.kill(process.pid, number)

    def kill(self, process: BaseProcess) -> None:
        """kill -9."""
        self.signal(process, signal.SIGKILL)
        process.join(PATIENCE_S)

    def stop(self, process: BaseProcess) -> None:
        """SIGTERM, and wait for its end."""
        self.signal(process, signal.SIGTERM)
        process.join(PATIENCE_S)
        assert process.exitcode == 0, f"ended with {process.exitcode}"

    def close(self) -> None:
        for process in self._all:
            if process.is_alive():
                self.signal(process, signal.SIGCONT)
                process.kill()
            process.join()

    # -- jobs ----------------------------------------------------------------------------

    def push(self, job: str, steps: int = 5, **fields: Any) -> None:
        fields = {"prompt": job, "seed": 7, "num_inference_steps": steps, **fields}
        self.client.xadd(self.keys.jobs, {"id": job, **fields})

    def wait_for_event(self, job: str, *types: str) -> str:
        """The first event of one of `types` in the job's stream."""
        last, end = "0", time.monotonic() + PATIENCE_S
        seen: list[str] = []
        while time.monotonic() < end:
            reply: Any = self.client.xread({self.keys.events(job): last}, block=500)
            for entry, fields in reply[0][1] if reply else ():
                last = entry
                seen.append(fields[b"type"].decode())
                if seen[-1] in types:
                    return seen[-1]
        raise AssertionError(f"{job}: none of {types} among {seen}; {self.record(job)}")

    def result(self, job: str) -> Result:
        """Its result, waited for."""
        self.wait_for_event(job, "succeeded", "failed", "canceled", "expired")
        packed: Any = self.client.get(self.keys.result(job))
        return Result.from_wire(packed)

    def record(self, job: str) -> dict[str, str]:
        found: Any = self.client.hgetall(self.keys.job(job))
        return {k.decode(): v.decode() for k, v in found.items()}

    def events(self, job: str) -> list[str]:
        found: Any = self.client.xrange(self.keys.events(job))
        return [fields[b"type"].decode() for _, fields in found]

    def check(self, job: str, steps: int = 5, prompt: str | None = None) -> None:
        """It succeeded, and its file names every step once and in order."""
        result = self.result(job)
        assert result.status == "succeeded", f"{job}: {result.error_code}: {result.error}"
        content: Any = self.client.get(result.outputs[0].key)
        right = expected(prompt or job, 7, steps)
        assert json.loads(content) == {"job": job, "chain": right}
        assert [e for e in self.events(job) if e == "succeeded"] == ["succeeded"]

    def drained(self) -> None:
        """Wait until nothing is active and the streams are empty."""
        k = self.keys
        until(lambda: not self.client.scard(k.active), "no active job")
        until(lambda: not self.client.xlen(k.reports), "no report")
        for key in self.client.scan_iter(k.tasks("*")):
            self._until_empty(key)

    def _until_empty(self, stream: bytes) -> None:
        until(lambda: not self.client.xlen(stream), f"nothing in {stream!r}")


@contextlib.contextmanager
def processes(
    url: str, client: Any, keys: Keys, arena: str, **settings: Any
) -> Iterator[Processes]:
    made = Processes(url, client, keys, arena, **settings)
    try:
        yield made
    finally:
        made.close()
