"""Whether what comes out is what diffusers makes, bit for bit, however often a job is interrupted.

`python -m benchmarks.fidelity [--jobs N] [--seed S] [--json]`

Random jobs (size, steps, seed, pictures, guidance) run in exact mode on the bundled model, cut
into chunks of a few steps, on three denoise workers: one keeps jobs on its device and writes
through to the arena, one reads every state back from the arena, one from Redis. All jobs are in
flight at once under the policy that switches most, so they are interrupted by each other, resumed
from device, arena and Redis, and moved between processes. The oracle is diffusers' own
`QwenImagePipeline.__call__` in a process with one thread; prompts go in, pixels are compared.
"""

from __future__ import annotations

import argparse
import io
import json
import random
from collections import Counter
from itertools import pairwise
from typing import Any

from common.settings import BUNDLED_MODEL, Settings, single_threaded
from common.stage import DENOISE

single_threaded()

SIZES = [(64, 64), (96, 160), (128, 128), (160, 96), (192, 128), (256, 256)]


def random_jobs(count: int, seed: int) -> list[dict[str, Any]]:
    from models.training.world import random_captions

    captions = random_captions(count, seed)
    rng = random.Random(seed)
    jobs = []
    for caption in captions:
        width, height = rng.choice(SIZES)
        job: dict[str, Any] = {
            "prompt": caption,
            "width": width,
            "height": height,
            "num_inference_steps": rng.randint(4, 16),
            "seed": rng.randrange(2**32),
            "n": rng.choice([1, 1, 2, 3]),
            "true_cfg_scale": round(rng.uniform(1.5, 5.0), 2),
        }
        if rng.random() < 0.6:  # without one, guidance is off
            job["negative_prompt"] = rng.choice([" ", "a blue square", "a red circle"])
        jobs.append(job)
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=28)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    from benchmarks.diffusers_loop import DiffusersLoop
    from benchmarks.servers import extra_worker, worker_counts
    from services.pool.local import LocalPool

    jobs = random_jobs(options.jobs, options.seed)
    settings = Settings(policy="least_slack", chunk_ms=60, pack_ms=0, encode_ahead=8)
    with (
        LocalPool(denoisers=1, settings=settings) as pool,
        extra_worker(pool, "denoise_svc", SLACKWATER_DEVICE_CACHE_BYTES="0"),
        extra_worker(
            pool, "denoise_svc", SLACKWATER_DEVICE_CACHE_BYTES="0", SLACKWATER_STATES="redis"
        ),
    ):
        client = pool.client()
        handles = [client.submit(**job, slo_ms=600_000) for job in jobs]
        results = [handle.wait() for handle in handles]
        ours = [
            [client.output(handle.id, n) for n in range(len(result.outputs))]
            for handle, result in zip(handles, results, strict=True)
        ]
        workers = [worker_path(handle) for handle in handles]
        kinds: Counter[str] = Counter()
        for counts in worker_counts(pool):
            kinds.update(counts)
        client.close()

    loop = DiffusersLoop(str(BUNDLED_MODEL), threads=1)
    _, oracle = loop.run(jobs)
    loop.close()

    identical = 0
    for job, result, files, line in zip(jobs, results, ours, oracle, strict=True):
        same = result.status == "succeeded" and sums_of(files) == line["sha256"]
        identical += same
        if not same:
            print(f"differs: {job} {result.status} {result.error}")
    chunks = sum(len(path) for path in workers)
    out = {
        "benchmark": "fidelity",
        "jobs": len(jobs),
        "pictures": sum(len(files) for files in ours),
        "bit_identical": identical,
        "chunks": chunks,
        "interruptions": chunks - len(jobs),
        "moves_between_processes": sum(a != b for path in workers for a, b in pairwise(path)),
        "denoise_workers": len({worker for path in workers for worker in path}),
        "handles": dict(kinds),
    }
    print(
        f"{identical} of {len(jobs)} jobs bit-identical to diffusers through "
        f"{out['interruptions']} interruptions and {out['moves_between_processes']} moves; "
        f"states {dict(kinds)}"
    )
    if options.json:
        print(json.dumps(out))


def worker_path(handle: Any) -> list[str]:
    """The workers that ran a job's denoise chunks, in order."""
    return [e.worker for e in handle.events() if e.type == "running" and e.stage == DENOISE]


def sums_of(files: list[bytes]) -> list[str]:
    from PIL import Image

    from benchmarks.diffusers_loop import pixels_sha256

    return [pixels_sha256(Image.open(io.BytesIO(data))) for data in files]


if __name__ == "__main__":
    main()
