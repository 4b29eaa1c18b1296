"""What people run today: a Redis list, and one process or more that call diffusers job after job.

`python -m benchmarks.fifo_diffusers URL MODEL` is a worker: it pops jobs from the list `jobs` in
the order of arrival, runs all three stages of each, leaves the pictures and appends a line to the
list `ended`. `fifo_diffusers` starts one or several at a Redis of their own.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.diffusers_loop import call, load
from benchmarks.openloop import Ran
from benchmarks.servers import redis_server
from common.clock import redis_clock
from common.connect import blocking, writing

JOBS, ENDED, READY = "jobs", "ended", "ready"
WORKERS = {"fifo": 1, "fifo-two": 2}  # of each system of this kind, one thread each
OUTPUT_TTL_S = 3600


class Fifo:
    """The workers as a System (benchmarks/openloop.py)."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._redis: Any = writing(url)
        self.clock = redis_clock(self._redis)
        self._pushed = 0

    def push(self, job: str, params: Mapping[str, Any], deadline_s: float) -> None:
        """The deadline is nothing to it."""
        self._redis.rpush(JOBS, json.dumps({"id": job, "arrived_s": self.clock(), **params}))
        self._pushed += 1

    def left(self) -> int:
        return self._pushed - int(self._redis.llen(ENDED))

    def ran(self, jobs: Sequence[str]) -> dict[str, Ran]:
        lines = {line["id"]: line for line in map(json.loads, self._redis.lrange(ENDED, 0, -1))}
        return {
            job: Ran(
                "succeeded",
                lines[job]["arrived_s"],
                lines[job]["started_s"],
                lines[job]["finished_s"],
                {"all": lines[job]["finished_s"] - lines[job]["started_s"]},
            )
            for job in jobs
        }

    def switches(self) -> dict[str, int]:
        """Every job is begun once."""
        return {json.loads(line)["id"]: 1 for line in self._redis.lrange(ENDED, 0, -1)}

    def wait_ready(self, workers: Sequence[subprocess.Popen[bytes]]) -> None:
        """Until all have loaded their model. Raises RuntimeError if one ends instead."""
        while int(self._redis.get(READY) or 0) < len(workers):
            for worker in workers:
                if worker.poll() is not None:
                    raise RuntimeError(f"a worker ended with {worker.returncode}")
            time.sleep(0.1)

    def close(self) -> None:
        self._redis.close()


@contextmanager
def fifo_diffusers(model: str, name: str = "fifo") -> Iterator[Fifo]:
    """A Redis and the WORKERS of `name`, which have loaded `model`."""
    with redis_server() as url:
        command = [sys.executable, "-m", "benchmarks.fifo_diffusers", url, model]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        workers = [subprocess.Popen(command, env=env) for _ in range(WORKERS[name])]
        system = Fifo(name, url)
        try:
            system.wait_ready(workers)
            yield system
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait(30)
            system.close()


def main() -> None:
    url, model = sys.argv[1:]
    server: Any = blocking(url)
    clock = redis_clock(server)
    pipe = load(model, threads=1)
    server.incr(READY)
    while True:
        _, packed = server.blpop([JOBS], 0)
        started_s = clock()
        job = json.loads(packed)
        for number, picture in enumerate(call(pipe, job)):
            file = io.BytesIO()
            picture.save(file, format="PNG")
            server.set(f"output:{job['id']}:{number}", file.getvalue(), ex=OUTPUT_TTL_S)
        line = {
            "id": job["id"],
            "arrived_s": job["arrived_s"],
            "started_s": started_s,
            "finished_s": clock(),
        }
        server.rpush(ENDED, json.dumps(line))


if __name__ == "__main__":
    main()
