"""Far more jobs in flight than the device holds: all succeed, in bounded memory.

`python -m benchmarks.memory [--jobs N] [--seed S] [--json]`

A pool of blocks that holds three jobs and an arena that holds about half of all states, so that
the rest overflows to Redis, against a pool that holds everybody in an arena that holds everything:
the same jobs, all in flight at once, one step a chunk under the policy that switches most, so that
nearly every chunk finds its job evicted. Exact mode: each picture is compared with diffusers'.

Peaks are the denoise process's resident memory as the kernel counts it (VmHWM), less what it had
before its first job. The bound is that of one job alone in the same process, plus the pool, plus
`ALLOWANCE_BYTES`. The throughput of both is in jobs a second, from the first push to the last end.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.settings import BUNDLED_MODEL, Settings, single_threaded
from common.stage import DENOISE

single_threaded()

SIZE, PICTURES, STEPS = 256, 2, 5
IN_THE_POOL = 3
# The Python side of jobs, the stager's copy of a state that is read ahead, buffers kept warm for
# spilled states, and what the allocator does not give back.
ALLOWANCE_BYTES = 24 * 2**20
MIB = 2**20


@dataclass
class Ran:
    results: list[Any]
    files: list[list[bytes]]
    counts: dict[str, int]
    peak_bytes: int  # over what the process had before its first job
    alone_bytes: int  # as that, of the first job by itself
    jobs_per_s: float


def jobs_of(count: int, seed: int) -> list[dict[str, Any]]:
    from models.training.world import random_captions

    rng = random.Random(seed)
    return [
        {
            "prompt": caption,
            "width": SIZE,
            "height": SIZE,
            "n": PICTURES,
            "num_inference_steps": STEPS,
            "seed": rng.randrange(2**32),
        }
        for caption in random_captions(count, seed)
    ]


def run(jobs: list[dict[str, Any]], cache_bytes: int, arena_bytes: int) -> Ran:
    from benchmarks.servers import worker_counts
    from services.pool.local import LocalPool

    settings = Settings(
        policy="least_slack",
        chunk_ms=1,
        pack_ms=0,
        encode_ahead=len(jobs),
        device_cache_bytes=cache_bytes,
        arena_bytes=arena_bytes,
        embed_cache_bytes=0,
    )
    with LocalPool(settings=settings) as pool:
        client = pool.client()
        (pid,) = (process.pid for process in pool.processes() if process.role == DENOISE)
        before = resident_bytes(pid, "VmHWM")
        client.submit(**jobs[0], slo_ms=600_000).wait().raise_for_status()
        alone = resident_bytes(pid, "VmHWM")
        began = time.perf_counter()
        handles = [client.submit(**job, slo_ms=600_000) for job in jobs]
        results = [handle.wait() for handle in handles]
        took_s = time.perf_counter() - began
        files = [
            [client.output(handle.id, n) for n in range(len(result.outputs))]
            for handle, result in zip(handles, results, strict=True)
        ]
        time.sleep(settings.worker_lease_s / 2)  # counts come with the heartbeats
        counts: dict[str, int] = {}
        for of_worker in worker_counts(pool):
            for name, value in of_worker.items():
                counts[name] = counts.get(name, 0) + value
        peak = resident_bytes(pid, "VmHWM")
        client.close()
    return Ran(results, files, counts, peak - before, alone - before, len(jobs) / took_s)


def resident_bytes(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/status has no {field}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    from benchmarks.diffusers_loop import DiffusersLoop
    from benchmarks.fidelity import sums_of
    from denoise_svc.blocks import BLOCK_BYTES

    jobs = jobs_of(options.jobs, options.seed)
    # What changes (packed latents, 16 channels at an eighth of the size) and what is only read
    # (embeddings) each take whole blocks.
    latents = -(-PICTURES * 16 * (SIZE // 8) ** 2 * 4 // BLOCK_BYTES)
    pool_bytes = IN_THE_POOL * (latents + 1) * BLOCK_BYTES
    small = run(jobs, pool_bytes, arena_bytes=4 * MIB)
    large = run(jobs, 512 * MIB, arena_bytes=256 * MIB)

    loop = DiffusersLoop(str(BUNDLED_MODEL), threads=1)
    _, oracle = loop.run(jobs)
    loop.close()
    identical = sum(
        result.status == "succeeded" and sums_of(files) == line["sha256"]
        for result, files, line in zip(small.results, small.files, oracle, strict=True)
    )
    succeeded = sum(result.status == "succeeded" for result in small.results)
    bound = small.alone_bytes + pool_bytes + ALLOWANCE_BYTES
    out = {
        "benchmark": "memory",
        "jobs": len(jobs),
        "succeeded": succeeded,
        "bit_identical": identical,
        "pool_bytes": pool_bytes,
        "pool_holds_jobs": IN_THE_POOL,
        "evictions": small.counts["evictions"],
        "resumed_from_device": small.counts["resumed_device"],
        "read_back": small.counts["resumed_read"],
        "spilled_to_redis": small.counts["spilled"],
        "peak_bytes": small.peak_bytes,
        "peak_of_one_job_bytes": small.alone_bytes,
        "allowance_bytes": ALLOWANCE_BYTES,
        "bound_bytes": bound,
        "within_bound": small.peak_bytes <= bound,
        "unlimited_peak_bytes": large.peak_bytes,
        "unlimited_evictions": large.counts["evictions"],
        "jobs_per_s": round(small.jobs_per_s, 3),
        "unlimited_jobs_per_s": round(large.jobs_per_s, 3),
        "throughput_ratio": round(small.jobs_per_s / large.jobs_per_s, 3),
    }
    print(
        f"{succeeded} of {len(jobs)} succeeded, {identical} bit-identical; {out['evictions']} "
        f"evictions, {out['spilled_to_redis']} states spilled to Redis; peak "
        f"{small.peak_bytes / MIB:.1f} MiB of at most {bound / MIB:.1f} (unlimited: "
        f"{large.peak_bytes / MIB:.1f}); {out['throughput_ratio']} of the unlimited throughput"
    )
    if options.json:
        print(json.dumps(out))


if __name__ == "__main__":
    main()
