"""Far more jobs in flight than the device holds: all succeed, in bounded memory.

`python -m benchmarks.memory [--jobs N] [--repeats N] [--seed S] [--json]`

A pool of blocks that holds three jobs and an arena that holds about half of all states, so that
the rest overflows to Redis, against a pool that holds everybody in an arena that holds everything:
the same jobs, all in flight at once, one step a chunk under the policy that switches most, so that
nearly every chunk finds its job evicted. Exact mode: each picture is compared with diffusers'.

Peaks are the denoise process's resident memory as the kernel counts it (VmHWM), less what it had
before its first job. The bound is that of one job alone in the same process, plus the pool, plus
`ALLOWANCE_BYTES`. The throughput of both is in jobs a second, from the first push to the last end.

Both run `--repeats` times, every second pair the other way round; of ratios and throughputs the
median counts, of peaks the largest, of jobs that succeed and are identical the fewest, and the
counts of evictions and the like are those of the first pair.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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


def run_pairs(
    limited: Callable[[], Ran], unlimited: Callable[[], Ran], repeats: int
) -> list[tuple[Ran, Ran]]:
    """Both in turn, every second time the other way round."""
    pairs = []
    for turn in range(repeats):
        if turn % 2:
            large, small = unlimited(), limited()
        else:
            small, large = limited(), unlimited()
        pairs.append((small, large))
        print(
            f"pair {turn}: {small.jobs_per_s:.2f} jobs/s, unlimited {large.jobs_per_s:.2f}: "
            f"{small.jobs_per_s / large.jobs_per_s:.3f}",
            flush=True,
        )
    return pairs


def throughput(pairs: list[tuple[Ran, Ran]]) -> dict[str, Any]:
    ratios = [small.jobs_per_s / large.jobs_per_s for small, large in pairs]
    return {
        "jobs_per_s": round(statistics.median(small.jobs_per_s for small, _ in pairs), 3),
        "unlimited_jobs_per_s": round(statistics.median(large.jobs_per_s for _, large in pairs), 3),
        "throughput_ratio": round(statistics.median(ratios), 3),
        "throughput_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "throughput_ratios": [round(ratio, 3) for ratio in ratios],
    }


def resident_bytes(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/status has no {field}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=4, help="pairs of runs")
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
    pairs = run_pairs(
        partial(run, jobs, pool_bytes, 4 * MIB),
        partial(run, jobs, 512 * MIB, 256 * MIB),
        options.repeats,
    )
    small, large = pairs[0]

    loop = DiffusersLoop(str(BUNDLED_MODEL), threads=1)
    _, oracle = loop.run(jobs)
    loop.close()
    identical = min(
        sum(
            result.status == "succeeded" and sums_of(files) == line["sha256"]
            for result, files, line in zip(ran.results, ran.files, oracle, strict=True)
        )
        for ran, _ in pairs
    )
    succeeded = min(sum(r.status == "succeeded" for r in ran.results) for ran, _ in pairs)
    peak = max(ran.peak_bytes for ran, _ in pairs)
    unlimited_peak = max(ran.peak_bytes for _, ran in pairs)
    alone = min(ran.alone_bytes for ran, _ in pairs)
    bound = alone + pool_bytes + ALLOWANCE_BYTES
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
        "peak_bytes": peak,
        "peak_of_one_job_bytes": alone,
        "allowance_bytes": ALLOWANCE_BYTES,
        "bound_bytes": bound,
        "within_bound": peak <= bound,
        "unlimited_peak_bytes": unlimited_peak,
        "unlimited_evictions": large.counts["evictions"],
        "repeats": len(pairs),
        **throughput(pairs),
    }
    least, most = out["throughput_ratio_range"]
    print(
        f"{succeeded} of {len(jobs)} succeeded, {identical} bit-identical; {out['evictions']} "
        f"evictions, {out['spilled_to_redis']} states spilled to Redis; peak "
        f"{peak / MIB:.1f} MiB of at most {bound / MIB:.1f} (unlimited: "
        f"{unlimited_peak / MIB:.1f}); {out['throughput_ratio']} of the unlimited throughput "
        f"({least} to {most} in {len(pairs)} pairs)"
    )
    if options.json:
        print(json.dumps(out))


if __name__ == "__main__":
    main()
