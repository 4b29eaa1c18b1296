"""What is left after thousands of jobs with cancels among them, and after many deaths.

`python -m benchmarks.soak [--jobs N] [--cancel SHARE] [--kills N] [--minutes M] [--seed S] [--noop]
[--json]`

First `--jobs` small jobs of the bundled model go through one worker a stage, `--cancel` of them
canceled at random moments: who was canceled, what stays in Redis and in the arena, and how the
memory of each process grows from the 200th job to the last. Then, on timed no-op stages, each
service in turn (Redis and the gateway too) is killed `--kills` times with kill -9 while jobs run,
its launcher starting it again: what stays. A part that has not ended after `--minutes` stops there
and says how far it came.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.arena import Arena
from common.client import Client, JobHandle
from common.connect import writing
from common.job import Result
from common.keys import Keys
from common.settings import Settings, single_threaded
from services.pool.local import LocalPool
from services.pool.redis_server import choose_port

single_threaded()

SMALL: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 4, "slo_ms": 3_600_000}
NOOP = "encode_ms=1,step_ms=5,decode_ms=1,state_kb=64"
IN_FLIGHT = 40
WARM = 200  # jobs until caches are full
# Each prompt is another one: by default the encoder's cache would fill up for thousands of jobs.
CACHE_BYTES = 1 << 20
SAMPLE_EVERY = 50
SERVICES = ("coordinator", "encode", "denoise", "decode", "gateway", "redis")
# Between a death and the next start of the same service, which dies far more often than in life.
LONGEST_PAUSE_S = 0.5
PATIENCE_S = 120.0


# -- what is left ----------------------------------------------------------------------------


def left_behind(pool: LocalPool) -> dict[str, Any]:
    """Entries in streams, keys that have no TTL and should, claims in the arena."""
    keys: Keys = pool.keys
    redis: Any = writing(pool.redis_url)
    streams = [keys.jobs, keys.cancel, keys.reports, *redis.scan_iter(keys.tasks("*"))]
    entries = sum(redis.xlen(name) for name in streams)
    lasting = [
        name.decode()
        for name in redis.scan_iter(count=1000)
        if redis.ttl(name) == -1 and name.decode() not in keys.permanent()
    ]
    with Arena.open(pool.settings.arena_path) as arena:
        claims = arena.stats().claims
    redis.close()
    return {"stream_entries": entries, "keys_without_ttl": lasting, "arena_claims": claims}


def settle(pool: LocalPool) -> dict[str, Any]:
    """What is left once nothing changes any more: frees are carried out beside the work."""
    until = time.monotonic() + PATIENCE_S
    found = left_behind(pool)
    while any(found.values()) and time.monotonic() < until:
        time.sleep(0.5)
        found = left_behind(pool)
    return found


# -- many small jobs ---------------------------------------------------------------------------


@dataclass(slots=True)
class Memory:
    """Resident memory of each process, in KiB, by how many jobs had been pushed."""

    pids: dict[str, int]
    seen: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def look(self, jobs: int) -> None:
        for name, pid in self.pids.items():
            self.seen.setdefault(name, []).append((jobs, resident_kib(pid)))

    def tenths(self) -> dict[str, list[tuple[int, int]]]:
        """From the moment at which it was warm, in ten steps: whether it grows on, or has grown."""
        out = {}
        for name, points in self.seen.items():
            warm = [point for point in points if point[0] >= WARM] or points
            out[name] = [*warm[:: max(1, len(warm) // 10)], points[-1]]
        return out

    def slopes(self) -> dict[str, float]:
        """KiB a thousand jobs, by least squares, once warm."""
        out = {}
        for name, points in self.seen.items():
            warm = [point for point in points if point[0] >= WARM] or points
            jobs, kib = zip(*warm, strict=True)
            out[name] = round(1000 * float(np.polyfit(jobs, kib, 1)[0]), 1)
        return out


def resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise ProcessLookupError(pid)


def many_jobs(count: int, share: float, seed: int, noop: bool, limit_s: float) -> dict[str, Any]:
    rng = random.Random(seed)
    settings = Settings(noop=NOOP if noop else "", embed_cache_bytes=CACHE_BYTES)
    with LocalPool(settings=settings) as pool, pool.client() as client:
        memory = Memory({p.name: p.pid for p in pool.processes() if p.role != "redis"})
        arena_before = left_behind(pool)["arena_claims"]
        asked: set[str] = set()
        handles: list[JobHandle] = []
        begun = time.monotonic()
        for number in range(count):
            if time.monotonic() - begun > limit_s:
                break
            handles.append(client.submit(f"a red circle {number}", seed=number, **SMALL))
            if rng.random() < share:
                cancel_later(client, handles[-1], rng.uniform(0.0, 2.0))
                asked.add(handles[-1].id)
            if number >= IN_FLIGHT:
                handles[number - IN_FLIGHT].wait(PATIENCE_S)
            if number % SAMPLE_EVERY == 0:
                memory.look(number)
                print(f"soak: {number} jobs", file=sys.stderr, flush=True)
        ends = {handle.id: handle.wait(PATIENCE_S).status for handle in handles}
        took_s, count = time.monotonic() - begun, len(handles)
        memory.look(count)
        canceled = {job for job, status in ends.items() if status == "canceled"}
        return {
            "jobs": count,
            "jobs_per_s": round(count / took_s, 1),
            "cancels_asked": len(asked),
            "canceled": len(canceled),
            "canceled_unasked": len(canceled - asked),
            "not_succeeded": sum(
                status != "succeeded" for job, status in ends.items() if job not in asked
            ),
            "memory_kib_by_jobs": memory.tenths(),
            "memory_kib_per_1000_jobs": memory.slopes(),
            "arena_claims_before": arena_before,
            **settle(pool),
        }


def cancel_later(client: Client, handle: JobHandle, after_s: float) -> None:
    timer = threading.Timer(after_s, handle.cancel)
    timer.daemon = True
    timer.start()


# -- many deaths -------------------------------------------------------------------------------


def many_deaths(kills: int, seed: int, limit_s: float) -> dict[str, Any]:
    """The services in turn, `kills` rounds of them, while jobs run."""
    rng = random.Random(seed)
    done: dict[str, int] = dict.fromkeys(SERVICES, 0)
    settings = Settings(noop=NOOP, http_port=choose_port())
    made = LocalPool(settings=settings, http=True, longest_pause_s=LONGEST_PAUSE_S)
    with made as pool, pool.client() as client:
        arena_before = left_behind(pool)["arena_claims"]
        jobs, begun = Jobs(client), time.monotonic()
        for _ in range(kills):
            for service in SERVICES:
                if time.monotonic() - begun > limit_s:
                    break
                jobs.keep_going()
                time.sleep(rng.uniform(0.0, 0.3))
                await_another(pool, service, kill_one(pool, service))
                done[service] += 1
        ends = jobs.finish()
        return {
            "kills": done,
            "jobs": len(ends),
            "not_succeeded": sum(end.status != "succeeded" for end in ends),
            "why": dict(Counter(f"{end.error_code}: {end.error}" for end in ends if end.error)),
            "arena_claims_before": arena_before,
            **settle(pool),
        }


@dataclass(slots=True)
class Jobs:
    client: Client
    handles: list[JobHandle] = field(default_factory=list)

    def keep_going(self) -> None:
        """Some eight jobs that have not ended."""
        active = sum(not handle.status().is_terminal for handle in self.handles[-16:])
        for _ in range(8 - active):
            self.handles.append(
                self.client.submit("a red circle", num_inference_steps=100, slo_ms=3_600_000)
            )

    def finish(self) -> list[Result]:
        return [handle.wait(PATIENCE_S) for handle in self.handles]


def kill_one(pool: LocalPool, service: str) -> int:
    """The pid of the one that was killed."""
    victim = next(process.pid for process in pool.processes() if process.role == service)
    os.kill(victim, signal.SIGKILL)
    return victim


def await_another(pool: LocalPool, service: str, victim: int) -> None:
    """Wait until `service` is run by another process than `victim`, and everything is ready."""
    until = time.monotonic() + PATIENCE_S
    while [p.pid for p in pool.processes() if p.role == service] in ([], [victim]):
        if time.monotonic() > until:
            raise RuntimeError(f"no other {service} within {PATIENCE_S:.0f} s")
        time.sleep(0.01)
    pool.wait_settled(PATIENCE_S)


def parts(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    if args.jobs:
        print(f"soak: {args.jobs} jobs", file=sys.stderr, flush=True)
        yield (
            "many_jobs",
            many_jobs(args.jobs, args.cancel, args.seed, args.noop, 60 * args.minutes),
        )
    if args.kills:
        print(f"soak: {args.kills} kills of each service", file=sys.stderr, flush=True)
        yield "many_deaths", many_deaths(args.kills, args.seed, 60 * args.minutes)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--cancel", type=float, default=0.05)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=30.0, help="of each part at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noop", action="store_true", help="no model in the first part either")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    out: dict[str, Any] = {"benchmark": "soak", "seed": args.seed}
    for name, found in parts(args):
        out[name] = found
        if not args.json:
            print(name)
            for key, value in found.items():
                print(f"  {key:26} {value}")
    if args.json:
        print(json.dumps(out))


if __name__ == "__main__":
    main()
