"""What the control plane costs: no-op stages beside a Celery chain, taskiq streams and docket.

`python -m benchmarks.control_plane [--jobs N] [--rounds N] [--json]`

Every system gets a Redis of its own of the same binary, the same cores and the same closed loop of
WINDOW jobs in flight, each three tasks long, refilled a quarter of the window at a time. A job
counts once its result can be read by a key the client knows; one process pushes and polls. Systems
take turns for several rounds; the median of each counts, since the machine is shared.

Pushing is not alike, since each system is pushed to as its own clients do (`CLIENTS`): ours is an
XADD, so that a refill is one pipeline; taskiq's and docket's clients push a refill concurrently on
an event loop, each job in round trips of its own; Celery's publishes one chain after the other, and
polls only in between. So the figures are of a system with its client, and the peers', Celery's
before all, are in part the client's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import msgpack
import redis

from benchmarks.servers import redis_server

WINDOW = 128
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass
class Load:
    """What a closed loop of `jobs` jobs gave."""

    jobs_per_s: float
    p50_ms: float
    p99_ms: float
    commands_per_job: float
    bytes_per_job: float


@dataclass
class System:
    """A system under load: pushes ids, and names the key that holds a job's result."""

    name: str
    push: Callable[[Sequence[str]], None]
    result_key: Callable[[str], str]


def drive(client: redis.Redis, system: System, jobs: int, window: int, tag: str) -> Load:
    before = _stats(client)
    started, pushed = time.perf_counter(), 0
    pending: dict[str, float] = {}
    latencies: list[float] = []
    while len(latencies) < jobs:
        room = min(window - len(pending), jobs - pushed)
        # Refill in batches, so that systems that can push many at once do.
        if room >= window // 4 or (room and pushed + room == jobs) or not pending:
            ids = [f"{tag}-{pushed + i}" for i in range(room)]
            pushed += room
            now = time.perf_counter()
            pending.update(dict.fromkeys(ids, now))
            system.push(ids)
        ids = list(pending)
        found = client.exists(*map(system.result_key, ids)) if len(ids) == 1 else None
        values = (
            [b"1" if found else None]
            if found is not None
            else client.mget([system.result_key(i) for i in ids])
        )
        now = time.perf_counter()
        done = [i for i, value in zip(ids, values, strict=True) if value is not None]
        latencies += [now - pending.pop(i) for i in done]
        if not done:
            time.sleep(0.001)
    seconds = time.perf_counter() - started
    after = _stats(client)
    latencies.sort()
    return Load(
        jobs_per_s=jobs / seconds,
        p50_ms=1e3 * latencies[len(latencies) // 2],
        p99_ms=1e3 * latencies[int(len(latencies) * 0.99)],
        commands_per_job=(after[0] - before[0]) / jobs,
        bytes_per_job=(after[1] - before[1]) / jobs,
    )


def _stats(client: redis.Redis) -> tuple[int, int]:
    info: Any = client.info("stats")
    # Calls inside a script count as commands too: `commands` is what Redis executed in all.
    return info["total_commands_processed"], info["total_net_input_bytes"] + info[
        "total_net_output_bytes"
    ]


# -- the systems ----------------------------------------------------------------------------


@contextmanager
def _children(commands: list[list[str]], env: dict[str, str]) -> Iterator[None]:
    whole = {**os.environ, **env, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            env=whole,
            cwd=HERE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        yield
    finally:
        for child in running:
            child.send_signal(signal.SIGTERM)
        for child in running:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


@contextmanager
def slackwater(url: str) -> Iterator[System]:
    env = {
        "SLACKWATER_REDIS_URL": url, "SLACKWATER_NOOP": "0", "SLACKWATER_LOG_LEVEL": "WARNING",
        "SLACKWATER_ARENA_BYTES": str(16 * 2**20),
    }  # fmt: skip
    services = ["services.coordinator", "encoder_svc", "denoise_svc", "decoder_svc"]
    client = redis.Redis.from_url(url, protocol=2)

    def push(ids: Sequence[str]) -> None:
        pipe = client.pipeline(transaction=False)
        for job in ids:
            pipe.xadd("sw:jobs", {"payload": msgpack.packb({"id": job, "prompt": "x", "seed": 1})})
        pipe.execute()

    with tempfile.TemporaryDirectory(prefix="slackwater-bench-", dir="/dev/shm") as folder:
        env["SLACKWATER_ARENA_PATH"] = f"{folder}/arena"
        with _children([[service] for service in services], env):
            yield System("slackwater", push, lambda job: f"sw:result:{job}")


@contextmanager
def celery(url: str, processes: int = 2) -> Iterator[System]:
    os.environ["PEER_REDIS"] = url
    from celery import chain

    from benchmarks.peers import celery_chain as peer

    peer.app.conf.broker_url = peer.app.conf.result_backend = url

    def push(ids: Sequence[str]) -> None:
        for job in ids:
            chain(
                peer.encode.s(job), peer.denoise.s(), peer.decode.s().set(task_id=job)
            ).apply_async()

    quiet = ["-l", "ERROR", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    app = ["celery", "-A", "benchmarks.peers.celery_chain", "worker", "-c", str(processes)]
    worker = [*app, *quiet]
    with _children([worker], {"PEER_REDIS": url}):
        yield System("celery_chain", push, lambda job: f"celery-task-meta-{job}")


@contextmanager
def taskiq(url: str, processes: int = 2) -> Iterator[System]:
    os.environ["PEER_REDIS"] = url
    from benchmarks.peers import taskiq_streams as peer

    with _loop() as run:
        run(peer.broker.startup())

        async def push_all(ids: Sequence[str]) -> None:
            await asyncio.gather(*(peer.encode.kiq(job) for job in ids))

        worker = ["taskiq", "worker", "benchmarks.peers.taskiq_streams:broker", "--workers",
                  str(processes), "--log-level", "ERROR"]  # fmt: skip
        with _children([worker], {"PEER_REDIS": url}):
            yield System("taskiq_streams", lambda ids: run(push_all(ids)), lambda job: job)
        run(peer.broker.shutdown())


@contextmanager
def docket(url: str, processes: int = 2) -> Iterator[System]:
    os.environ["PEER_REDIS"] = url
    from docket import Docket

    from benchmarks.peers import docket_chain as peer

    with _loop() as run:
        client = Docket(name="peer", url=url)
        run(client.__aenter__())

        at_once = asyncio.Semaphore(32)  # docket's own connection pool is no larger

        async def push_one(job: str) -> None:
            async with at_once:
                await client.add(peer.encode, key=job)(job)

        async def push_all(ids: Sequence[str]) -> None:
            await asyncio.gather(*map(push_one, ids))

        workers = [["benchmarks.peers.docket_chain"]] * processes
        with _children(workers, {"PEER_REDIS": url}):
            yield System(
                "docket_chain", lambda ids: run(push_all(ids)), lambda job: f"docket-result:{job}"
            )
        run(client.__aexit__(None, None, None))


@contextmanager
def _loop() -> Iterator[Callable[[Any], Any]]:
    """An event loop on a thread of its own: what an asyncio client costs, no more."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


SYSTEMS = {"slackwater": slackwater, "celery_chain": celery, "taskiq_streams": taskiq,
           "docket_chain": docket}  # fmt: skip
CLIENTS = {
    "slackwater": "plain XADD, a refill in one pipeline",
    "celery_chain": "apply_async, one chain after the other",
    "taskiq_streams": "kiq, a refill concurrently",
    "docket_chain": "add, a refill concurrently, 32 at once",
}


def measure(name: str, jobs: int, tag: str) -> dict[str, Load]:
    """One system once, in a process of its own: the peers keep connections in their modules."""
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.control_plane", "--child", name, str(jobs), tag],
        cwd=HERE,
        stdout=subprocess.PIPE,
        check=True,
    )
    loads = json.loads(child.stdout.splitlines()[-1])
    return {which: Load(**fields) for which, fields in loads.items()}


def measure_here(name: str, jobs: int, tag: str) -> dict[str, Load]:
    with ExitStack() as stack:
        url = stack.enter_context(redis_server())
        client = redis.Redis.from_url(url, protocol=2)
        system = stack.enter_context(SYSTEMS[name](url))
        drive(client, system, 100, 32, f"{tag}-warm")  # waits for the start, too
        loaded = drive(client, system, jobs, WINDOW, f"{tag}-load")
        idle = drive(client, system, 100, 1, f"{tag}-idle")
    return {"loaded": loaded, "idle": idle}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        loads = measure_here(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        print(json.dumps({which: load.__dict__ for which, load in loads.items()}))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, Load]]] = {name: [] for name in options.only}
    for r in range(options.rounds):
        for name in options.only:
            loads = measure(name, options.jobs, f"r{r}")
            rounds[name].append(loads)
            load, idle = loads["loaded"], loads["idle"]
            print(
                f"{name:16} round {r}: {load.jobs_per_s:7.0f} jobs/s   p50 {load.p50_ms:6.1f} ms  "
                f"p99 {load.p99_ms:6.1f} ms   alone p50 {idle.p50_ms:5.1f} ms  "
                f"p99 {idle.p99_ms:5.1f} ms   {load.commands_per_job:5.0f} commands, "
                f"{load.bytes_per_job / 1024:5.1f} kB a job",
                flush=True,
            )
    summary = {
        name: {
            which: {
                field: round(statistics.median(getattr(loads[which], field) for loads in runs), 2)
                for field in Load.__dataclass_fields__
            }
            for which in ("loaded", "idle")
        }
        for name, runs in rounds.items()
    }
    best = {name: s["loaded"]["jobs_per_s"] for name, s in summary.items()}
    ours = best.pop("slackwater", None)
    out = {
        "benchmark": "control_plane", "window": WINDOW, "jobs": options.jobs,
        "rounds": options.rounds, "clients": {name: CLIENTS[name] for name in options.only},
        "systems": summary, "jobs_per_s": ours,
        "best_peer": max(best, key=lambda n: best[n], default=None),
        "ratio_to_best_peer": round(ours / max(best.values()), 2) if ours and best else None,
    }  # fmt: skip
    print("pushed: " + "; ".join(f"{name} by {CLIENTS[name]}" for name in options.only))
    print(f"ratio to the best peer ({out['best_peer']}): {out['ratio_to_best_peer']}")
    if options.json:
        print(json.dumps(out))


if __name__ == "__main__":
    main()
