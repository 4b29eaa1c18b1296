"""How long a state takes from one process to another: by the arena, by Redis, by memcpy.

`python -m benchmarks.handoff [--json] [--repeats N]`

The clock starts before the writer's `put` and stops when the reader, a second process, has
every byte in private memory with its checksum verified (perf_counter is one clock for both).
Repeats are interleaved and medians shown. memcpy is one copy in one process into warm memory,
the floor for either half; checksum is one xxh3 pass, of which every hand-off has two; wake-up
is the hand-off of an empty state, so what the pipe between the processes costs.
Redis runs on this host over loopback TCP, in the default pieces.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from typing import IO, Any

import msgpack
import redis

from benchmarks.servers import redis_server
from common.arena import Arena
from common.handles import Handle, HandleStore, Parcel
from common.payload import digest

SIZES_MB = (0.1, 1, 8, 64)
WARMUP = 2  # the reader's allocator and the kernel's socket buffers grow in the first ones
ARENA_BYTES = 256 << 20


def reader(arena_path: str, url: str) -> None:
    """The second process: take a handle, read its state, answer when that was done."""
    store = HandleStore("bench", Arena.open(arena_path), redis.Redis.from_url(url))
    while True:
        handle = Handle.from_wire(_receive(sys.stdin.buffer))
        started = time.perf_counter()
        parcel = store.get(handle)
        done = time.perf_counter()
        told = [started, done, digest(parcel.tensors["latents"][2])]
        del parcel
        _send(sys.stdout.buffer, told)


class Bench:
    """The writer's side of one run; `samples[size, what]` are seconds."""

    def __init__(self, arena: Arena, url: str) -> None:
        self.store = HandleStore("bench", arena, redis.Redis.from_url(url))
        command = [sys.executable, "-m", "benchmarks.handoff", "--reader", arena.path, url]
        self.reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.samples: dict[tuple[float, str], list[float]] = defaultdict(list)
        self.seq = 0

    def hand_over(self, size: float, where: str, payload: bytes, name: str = "") -> None:
        assert self.reader.stdin is not None
        assert self.reader.stdout is not None
        self.seq += 1
        parcel = Parcel({"latents": ("uint8", (len(payload),), payload)})
        began = time.perf_counter()
        handle = self.store.put("job", self.seq, "latents", parcel, where)
        put = time.perf_counter()
        _send(self.reader.stdin, handle.to_wire())
        started, done, checksum = _receive(self.reader.stdout)
        if checksum != digest(payload):
            raise SystemExit(f"{where}: the reader got other bytes than were put")
        self.store.free(handle)
        name = name or where
        self.samples[size, name].append(done - began)
        self.samples[size, name + "_put"].append(put - began)
        self.samples[size, name + "_get"].append(done - started)

    def local(self, size: float, payload: bytes, warm: memoryview) -> None:
        began = time.perf_counter()
        warm[: len(payload)] = payload
        copied = time.perf_counter()
        digest(payload)
        self.samples[size, "memcpy"].append(copied - began)
        self.samples[size, "checksum"].append(time.perf_counter() - copied)

    def close(self) -> None:
        self.reader.kill()
        self.reader.communicate()


def run(repeats: int) -> dict[str, Any]:
    """Medians in ms by size, and `arena_vs_redis`: Redis's time over the arena's at 8 MB."""
    rng = random.Random(1)
    payloads = {size: rng.randbytes(round(size * (1 << 20))) for size in SIZES_MB}
    warm = memoryview(bytearray(max(map(len, payloads.values()))))
    with (
        tempfile.TemporaryDirectory(prefix="slackwater-bench-", dir="/dev/shm") as folder,
        redis_server() as url,
        Arena.open(f"{folder}/arena", ARENA_BYTES) as arena,
    ):
        bench = Bench(arena, url)
        try:
            for repeat in range(WARMUP + repeats):
                if repeat == WARMUP:
                    bench.samples.clear()
                todo = [(size, what) for size in SIZES_MB for what in ("arena", "redis", "local")]
                rng.shuffle(todo)
                for size, what in todo:
                    if what == "local":
                        bench.local(size, payloads[size], warm)
                        bench.hand_over(size, "inline", b"", "wakeup")
                    else:
                        bench.hand_over(size, what, payloads[size])
        finally:
            bench.close()
            arena.unlink()
    medians: dict[str, dict[str, float]] = defaultdict(dict)
    for (size, what), seconds in bench.samples.items():
        medians[f"{size:g}"][what + "_ms"] = round(statistics.median(seconds) * 1000, 3)
    at_8 = medians["8"]
    return {
        "benchmark": "handoff",
        "arena_vs_redis": round(at_8["redis_ms"] / at_8["arena_ms"], 1),
        "wanted": 10,
        "repeats": repeats,
        "by_mb": {size: dict(sorted(row.items())) for size, row in medians.items()},
    }


def table(result: dict[str, Any]) -> str:
    """The same for people."""
    names = ["memcpy", "checksum", "wakeup", "arena_put", "arena_get", "arena"]
    names += ["redis_put", "redis_get", "redis"]
    lines = ["median ms" + "".join(f"{name:>11}" for name in names) + "  redis/arena"]
    for size in SIZES_MB:
        row = result["by_mb"][f"{size:g}"]
        ratio = row["redis_ms"] / row["arena_ms"]
        cells = "".join(f"{row[name + '_ms']:>11.3f}" for name in names)
        lines.append(f"{size:>6g} MB{cells}{ratio:>12.1f}×")
    return "\n".join(lines)


def _send(pipe: IO[bytes], message: Any) -> None:
    body = msgpack.packb(message)
    pipe.write(len(body).to_bytes(4, "little") + body)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    head = pipe.read(4)
    if len(head) < 4:
        raise SystemExit("the other process of the hand-off is gone")
    return msgpack.unpackb(pipe.read(int.from_bytes(head, "little")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--reader", nargs=2, metavar=("ARENA", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        reader(*options.reader)
        return
    result = run(options.repeats)
    print(table(result))
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
