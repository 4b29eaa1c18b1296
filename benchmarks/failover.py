"""How soon a pool goes on after a kill -9 of the leader, of a worker in the middle of a job, and of
Redis; and whether a rolling restart fails a job.

`python -m benchmarks.failover [--n N] [--noop] [--json]`

Default leases, eight long jobs in flight all the time. Leader: from the kill to the next
dispatch, which is seen as the dispatch counter in Redis going up. Worker: from the kill of the
denoiser that runs a job to that job's next step, seen in its events; so it is another worker's.
`leader_*` and `worker_*` are what `slackwater up` gives, with two coordinators and two denoisers:
its launcher notices the death of a process at once. `worker_alone_*` is the same kill where no
launcher watches and the worker's lease has to run out. `redis_back_*` is from the kill of a Redis
with an append-only file, which the launcher starts again at once, to the next dispatch. Then every
process but Redis is replaced by a successor, as by `slackwater restart`, under the same load:
`rolling_failed` of `rolling_jobs` did not succeed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis

from common.asks import Ask
from common.client import Client
from common.keys import Keys
from common.settings import Settings, single_threaded
from common.stage import DENOISE, STAGES
from services.pool.child import FIRST_PAUSE_S

single_threaded()

NOOP = "encode_ms=10,step_ms=25,decode_ms=10"
JOB: dict[str, Any] = {"width": 128, "height": 128, "num_inference_steps": 100, "slo_ms": 600_000}
IN_FLIGHT = 8
PATIENCE_S = 60.0
ROLLING_S = 300.0
# A killed denoiser is one that still has this many steps of its job before it.
STEPS_LEFT = 20


@contextlib.contextmanager
def load(client: Client) -> Iterator[None]:
    """Keep jobs in flight."""
    over = threading.Event()

    def serve(index: int) -> None:
        while not over.is_set():
            handle = client.submit(f"a red circle {index}", seed=index, **JOB)
            while not over.is_set() and not handle.status().is_terminal:
                over.wait(0.2)
            if over.is_set():
                handle.cancel()

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(IN_FLIGHT)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def dispatch_after(direct: Any, keys: Keys, kill: Callable[[], None]) -> float:
    """Seconds from `kill` to the next dispatch; Redis, which counts them, may be away meanwhile."""
    kill()
    begun, before = time.monotonic(), -1
    while time.monotonic() - begun < PATIENCE_S:
        with contextlib.suppress(redis.RedisError, OSError):
            now = int(direct.get(keys.seq) or 0)
            before = now if before < 0 else before
            if now != before:
                return time.monotonic() - begun
        time.sleep(0.005)
    raise RuntimeError(f"no dispatch within {PATIENCE_S:.0f} s")


def running_job(client: Client, keys: Keys, direct: Any) -> tuple[str, int]:
    """A job in the middle of a chunk, and the pid of its denoiser."""
    while True:
        for record in client.ps():
            far = record.steps - record.step >= STEPS_LEFT
            if record.stage == DENOISE and record.worker and record.step and far:
                pid = direct.hget(keys.worker(record.worker), "pid")
                # A position means that it waits for its next chunk.
                if pid and direct.hget(keys.job(record.id), "queue_position") is None:
                    return record.id, int(pid)
        time.sleep(0.02)


def step_after(direct: Any, keys: Keys, job: str, kill: Callable[[], None]) -> float:
    """Seconds from `kill` to the job's next step."""
    kill()
    begun = time.monotonic()
    time.sleep(0.01)  # what the dead one had sent arrives
    last = direct.xrevrange(keys.events(job), count=1)[0][0]
    while time.monotonic() - begun < PATIENCE_S:
        reply: Any = direct.xread({keys.events(job): last}, block=1000)
        for entry, fields in reply[0][1] if reply else ():
            last = entry
            if fields[b"type"] in (b"step", b"chunk"):
                return time.monotonic() - begun
    raise RuntimeError(f"no step of {job} within {PATIENCE_S:.0f} s after its worker's end")


# -- what `slackwater up` gives ----------------------------------------------------------------


def leading_pid(pool: Any) -> int:
    """The coordinator whose log says last that it leads."""
    said = re.compile(r"^(\S+ \S+) .*\bleading: ", re.MULTILINE)
    found = []
    for process in pool.processes():
        if process.role == "coordinator":
            stamps = said.findall(process.log.read_text())
            found.append((stamps[-1] if stamps else "", process.pid))
    return int(max(found)[1])


def supervised(n: int, noop: str, rng: random.Random) -> tuple[list[float], list[float]]:
    from services.pool.local import LocalPool

    settings = Settings(noop=noop)
    leaders, workers = [], []
    with (
        LocalPool(denoisers=2, coordinators=2, settings=settings) as pool,
        pool.client() as client,
        load(client),
    ):
        direct = redis.Redis.from_url(pool.redis_url)
        for _ in range(n):
            rest(pool, rng)
            pid = leading_pid(pool)
            leaders.append(dispatch_after(direct, pool.keys, killer(pid)))
        # A fresh leader is patient for that long with workers that have not been heard of.
        time.sleep(settings.worker_lease_s)
        for _ in range(n):
            rest(pool, rng)
            job, pid = running_job(client, pool.keys, direct)
            workers.append(step_after(direct, pool.keys, job, killer(pid)))
        direct.close()
    return leaders, workers


def rest(pool: Any, rng: random.Random) -> None:
    """Until everything is as it was: a restarted process has to be up before the next dies."""
    time.sleep(1.0)
    pool.wait_settled(PATIENCE_S)
    time.sleep(rng.uniform(2.0, 4.0))


def killer(pid: int) -> Callable[[], None]:
    return lambda: os.kill(pid, signal.SIGKILL)


def redis_back(n: int, noop: str, rng: random.Random) -> list[float]:
    from benchmarks.chaos_parts.members import quick
    from services.pool.local import LocalPool

    seconds = []
    settings = Settings(noop=noop)
    with (
        LocalPool(
            denoisers=2, coordinators=2, settings=settings, longest_pause_s=FIRST_PAUSE_S
        ) as pool,
        pool.client() as client,
        load(client),
    ):
        direct = quick(pool.redis_url)
        for _ in range(n):
            rest(pool, rng)
            [pid] = [process.pid for process in pool.processes() if process.role == "redis"]
            seconds.append(dispatch_after(direct, pool.keys, killer(pid)))
        direct.close()
    return seconds


def rolling(noop: str) -> dict[str, Any]:
    """Every process but Redis replaced while jobs run."""
    from services.cli.restart import ROLES
    from services.pool.local import LocalPool
    from services.pool.redis_server import choose_port

    job = {"prompt": "a red circle", "num_inference_steps": 20, "slo_ms": 600_000}
    settings = Settings(noop=noop, http_port=choose_port())
    with (
        LocalPool(denoisers=2, coordinators=2, settings=settings, http=True, celery=True) as pool,
        pool.client() as client,
    ):
        handles = client.submit_many({**job, "seed": i} for i in range(IN_FLIGHT))
        field = f"{pool.settings.host}/restart"
        request = f"{secrets.token_hex(8)} {' '.join(ROLES)}"
        begun = time.monotonic()
        client.ask(Ask((("HSET", pool.keys.pool, field, request),)))
        while (answer := client.ask(Ask((("HGET", pool.keys.pool, field),)))[0]) is not None:
            if answer.decode() != request or time.monotonic() - begun > ROLLING_S:
                raise RuntimeError(f"the restart did not end: {answer.decode()}")
            active = [handle for handle in handles[-2 * IN_FLIGHT :] if handle.result() is None]
            more = IN_FLIGHT - len(active)
            handles += client.submit_many({**job, "seed": len(handles) + i} for i in range(more))
            time.sleep(0.1)
        took_s = time.monotonic() - begun
        ends = [handle.wait(ROLLING_S).status for handle in handles]
    return {
        "rolling_s": round(took_s, 1),
        "rolling_jobs": len(ends),
        "rolling_failed": sum(status != "succeeded" for status in ends),
    }


# -- without a launcher ------------------------------------------------------------------------


def alone(n: int, noop: str, rng: random.Random) -> list[float]:
    from benchmarks.chaos_parts import members

    members.preload(bool(noop))
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="slackwater-failover-", dir=shm))
    counts = [(stage, 2 if stage == DENOISE else 1) for stage in STAGES]
    pool = members.Members(folder, {"noop": noop}, 1, counts)
    seconds = []
    try:
        pool.start_all()
        direct = redis.Redis.from_url(pool.url)
        with Client(pool.url, prefix=pool.keys.prefix) as client, load(client):
            for _ in range(n):
                time.sleep(rng.uniform(1.0, 3.0))
                job, pid = running_job(client, pool.keys, direct)
                victim = next(m for m in pool.all if m.pid == pid)
                seconds.append(step_after(direct, pool.keys, job, victim.kill))
                pool.start(victim)
                members.until(
                    lambda: direct.scard(pool.keys.workers) == len(STAGES) + 1,
                    PATIENCE_S,
                    "the denoiser that was started again",
                )
        pool.stop()
    finally:
        pool.close()
        shutil.rmtree(folder)
    return seconds


# -- report ------------------------------------------------------------------------------------


def figures(name: str, seconds: list[float]) -> dict[str, float]:
    ranked = sorted(seconds)
    return {
        f"{name}_p50_s": round(statistics.median(ranked), 2),
        f"{name}_p95_s": round(ranked[math.ceil(0.95 * len(ranked)) - 1], 2),
        f"{name}_max_s": round(ranked[-1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=10, help="kills of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--noop", action="store_true", help="timed steps instead of the model")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
    noop, rng = NOOP if options.noop else "", random.Random(options.seed)
    leaders, workers = supervised(options.n, noop, rng)
    backs = redis_back(options.n, noop, rng)
    replaced = rolling(noop)
    by_lease = alone(options.n, noop, rng)
    out = {
        "benchmark": "failover",
        "n": options.n,
        "device": "timed" if options.noop else "model",
        "leader_lease_s": Settings().leader_lease_s,
        "worker_lease_s": Settings().worker_lease_s,
        **figures("leader", leaders),
        **figures("worker", workers),
        **figures("worker_alone", by_lease),
        **figures("redis_back", backs),
        **replaced,
    }
    print(
        f"{options.n} kills each: next dispatch after the leader's, median "
        f"{out['leader_p50_s']} s, p95 {out['leader_p95_s']} s; next step after a worker's, p95 "
        f"{out['worker_p95_s']} s, without a launcher {out['worker_alone_p95_s']} s; next "
        f"dispatch after Redis', p95 {out['redis_back_p95_s']} s, max {out['redis_back_max_s']} s; "
        f"a rolling restart took {out['rolling_s']} s and failed {out['rolling_failed']} of "
        f"{out['rolling_jobs']} jobs"
    )
    if options.json:
        print(json.dumps(out))


if __name__ == "__main__":
    main()
