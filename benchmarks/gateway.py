"""What HTTP costs: jobs through the gateway beside an empty route of the same server, and many open
event streams while jobs flow.

`python -m benchmarks.gateway [--seconds S] [--rounds N] [--streams N] [--json]`

A pool of stages that take no time, and a gateway in a process of its own that answers one route
more: POST /empty reads its body and says {}. The same client sends the same body over the same
number of connections to three places in turn: /empty, /v1/jobs (answered once the coordinator has
taken the job) and /v1/jobs with `Prefer: wait` (answered when it has ended). The median of the
rounds counts, since the machine is shared; the client's own cost is in all three.

Then event streams are opened on a few long jobs, many on each, while short ones go on being pushed
and waited for. Redis is the witness: each stream must have had every entry of its job's events.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from fastapi import Request, Response

from benchmarks.servers import pool_env
from common.settings import Settings
from services.pool.local import LocalPool
from services.pool.redis_server import choose_port

CONNECTIONS = 32
FLOW_CONNECTIONS = 8
WATCHED_JOBS = 20
# 2.56 ms a step at 256 px, 0.01 ms at 16 px.
NOOP = "token_ms=0.01"
SHORT = {"prompt": "x", "width": 16, "height": 16}
LONG = {"prompt": "x", "width": 256, "height": 256, "num_inference_steps": 400}
PLACES: dict[str, tuple[str, str]] = {
    "empty": ("/empty", ""),
    "push": ("/v1/jobs", ""),
    "job": ("/v1/jobs", "Prefer: wait=60\r\n"),
}
# Descriptors that a process has besides its streams.
SPARE_FILES = 200


# -- the server ------------------------------------------------------------------------------


def serve() -> None:
    """The gateway as `python -m services.gateway` runs it, with one route more."""
    import uvicorn

    from common.logs import set_up
    from services.gateway.__main__ import Server
    from services.gateway.app import make_app

    settings = Settings()
    set_up("WARNING")
    _many_files()
    app = make_app(settings)

    @app.post("/empty")
    async def empty(request: Request) -> Response:
        await request.body()
        return Response(b"{}", media_type="application/json")

    config = uvicorn.Config(
        app, host="127.0.0.1", port=settings.http_port, log_config=None, access_log=False
    )
    Server(app, config).run()


@contextmanager
def gateway(pool: LocalPool) -> Iterator[tuple[int, int]]:
    """Port and process of a gateway of the pool, once it answers."""
    port = choose_port()
    env = {**pool_env(pool), "SLACKWATER_HTTP_PORT": str(port), "SLACKWATER_HTTP_KEYS": ""}
    server = subprocess.Popen([sys.executable, "-m", "benchmarks.gateway", "--serve"], env=env)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert server.poll() is None, "the gateway has ended"
                time.sleep(0.05)
        yield port, server.pid
    finally:
        server.terminate()
        server.wait(30)


# -- the client ------------------------------------------------------------------------------


class Connection:
    """One kept-alive HTTP/1.1 connection, no more of the protocol than the gateway's answers need:
    a client that costs little beside what it measures."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def post(self, path: str, body: bytes, headers: str = "") -> tuple[int, bytes]:
        """Status and body of the answer."""
        self._writer.write(
            f"POST {path} HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n{headers}"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        status, head = await self._head()
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None, head
        return status, await self._reader.readexactly(int(length[1]))

    async def events(self, job: str) -> AsyncIterator[str]:
        """Entry ids of a job's events until the stream ends."""
        path = f"/v1/jobs/{job}/events"
        self._writer.write(f"GET {path} HTTP/1.1\r\nHost: gateway\r\n\r\n".encode())
        status, _ = await self._head()
        assert status == 200, status
        while (line := await self._reader.readline()).strip() != b"0":  # the last chunk
            assert line, "the stream was cut"
            if line.startswith(b"id: "):
                yield line[4:].strip().decode()

    async def _head(self) -> tuple[int, bytes]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        return int(head.split(b" ", 2)[1]), head

    def close(self) -> None:
        self._writer.close()


@dataclass
class Load:
    """What a closed loop over some connections gave."""

    per_s: float
    p50_ms: float
    p99_ms: float
    count: int


async def drive(port: int, place: str, connections: int, seconds: float) -> Load:
    """Each connection sends its next request when the last is answered."""
    path, headers = PLACES[place]
    body = json.dumps(SHORT).encode()
    opened = [await Connection.open(port) for _ in range(connections)]
    times: list[float] = []
    began = time.perf_counter()

    async def loop(connection: Connection) -> None:
        while (sent := time.perf_counter()) < began + seconds:
            status, answer = await connection.post(path, body, headers)
            assert status in (200, 202), answer
            times.append(time.perf_counter() - sent)

    await asyncio.gather(*map(loop, opened))
    took = time.perf_counter() - began
    for connection in opened:
        connection.close()
    times.sort()
    return Load(
        per_s=len(times) / took,
        p50_ms=1e3 * times[len(times) // 2],
        p99_ms=1e3 * times[int(len(times) * 0.99)],
        count=len(times),
    )


async def watch(port: int, pid: int, client: Any, pool: LocalPool, streams: int) -> dict[str, Any]:
    """Open streams on a few long jobs while short ones flow, and hold Redis against them."""
    alone_mb = _memory_mb(pid)
    pushing = await Connection.open(port)
    jobs: list[str] = []
    for _ in range(WATCHED_JOBS):
        status, answer = await pushing.post("/v1/jobs", json.dumps(LONG).encode())
        assert status in (200, 202), answer
        jobs.append(json.loads(answer)["id"])
    pushing.close()
    seen: list[list[str]] = [[] for _ in range(streams)]
    peak_mb, open_now, most_open = alone_mb, 0, 0

    async def follow(n: int) -> None:
        nonlocal open_now, most_open
        connection = await Connection.open(port)
        open_now += 1
        most_open = max(most_open, open_now)
        async for entry in connection.events(jobs[n % len(jobs)]):
            seen[n].append(entry)
        open_now -= 1
        connection.close()

    flow: list[Load] = []

    async def flowing() -> None:
        nonlocal peak_mb
        while not followed.done():
            flow.append(await drive(port, "job", FLOW_CONNECTIONS, 1.0))
            peak_mb = max(peak_mb, _memory_mb(pid))

    began = time.perf_counter()
    followed = asyncio.ensure_future(asyncio.gather(*(follow(n) for n in range(streams))))
    await asyncio.gather(followed, flowing())
    took = time.perf_counter() - began

    wanted = {
        job: [entry.decode() for entry, _ in client.xrange(pool.keys.events(job))] for job in jobs
    }
    missing = sum(
        len(set(wanted[jobs[n % len(jobs)]]) - set(entries)) for n, entries in enumerate(seen)
    )
    twice = sum(len(entries) - len(set(entries)) for entries in seen)
    delivered = sum(map(len, seen))
    return {
        "streams": streams,
        "open_at_once": most_open,
        "watched_jobs": len(jobs),
        "events_delivered": delivered,
        "events_missing": missing,
        "events_twice": twice,
        "events_per_s": round(delivered / took, 1),
        "seconds": round(took, 1),
        "jobs_per_s_beside": round(sum(load.count for load in flow) / took, 1),
        "job_p99_ms_beside": round(statistics.median(load.p99_ms for load in flow), 1),
        "gateway_mb_alone": round(alone_mb, 1),
        "gateway_mb_peak": round(peak_mb, 1),
        "kb_a_stream": round(1024 * (peak_mb - alone_mb) / streams, 1),
    }


def _memory_mb(pid: int) -> float:
    """Resident memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def _many_files() -> int:
    """As many open files as this user may have; how many that is."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


async def measure(options: argparse.Namespace, pool: LocalPool) -> dict[str, Any]:
    streams = min(options.streams, _many_files() - SPARE_FILES)
    if streams < options.streams:
        print(f"ulimit -n allows {streams} streams, not {options.streams}", file=sys.stderr)
    client = redis.Redis.from_url(pool.redis_url)
    rounds: dict[str, list[Load]] = {place: [] for place in PLACES}
    with gateway(pool) as (port, pid):
        for place in PLACES:
            await drive(port, place, CONNECTIONS, 0.5)  # warm
        for number in range(options.rounds):
            for place in PLACES:
                load = await drive(port, place, CONNECTIONS, options.seconds)
                rounds[place].append(load)
                print(
                    f"round {number} {place:6} {load.per_s:7.0f}/s   p50 {load.p50_ms:6.1f} ms   "
                    f"p99 {load.p99_ms:6.1f} ms",
                    flush=True,
                )
        watched = await watch(port, pid, client, pool, streams)
    client.close()
    summary = {
        place: {
            field: round(statistics.median(getattr(load, field) for load in loads), 1)
            for field in ("per_s", "p50_ms", "p99_ms")
        }
        for place, loads in rounds.items()
    }
    return {
        "benchmark": "gateway",
        "connections": CONNECTIONS,
        "seconds": options.seconds,
        "rounds": options.rounds,
        "cpus": os.cpu_count(),
        "routes": summary,
        "push_of_empty": round(summary["push"]["per_s"] / summary["empty"]["per_s"], 3),
        "job_of_empty": round(summary["job"]["per_s"] / summary["empty"]["per_s"], 3),
        "event_streams": watched,
    }


def main() -> int:
    if sys.argv[1:] == ["--serve"]:
        serve()
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=1000, help="open event streams")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    settings = Settings(noop=NOOP, arena_bytes=16 * 2**20, log_level="WARNING")
    with LocalPool(settings=settings) as pool:
        out = asyncio.run(measure(options, pool))
    watched = out["event_streams"]
    print(
        f"of the empty route's rate: push {out['push_of_empty']:.3f}, whole job "
        f"{out['job_of_empty']:.3f}; {watched['open_at_once']} streams at once: "
        f"{watched['events_delivered']} events, {watched['events_missing']} missing, "
        f"{watched['events_twice']} twice, {watched['kb_a_stream']} kB each"
    )
    if options.json:
        print(json.dumps(out))
    return 1 if watched["events_missing"] or watched["events_twice"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
