"""What the whole system costs: the same 256 px jobs through plain diffusers loops and through us.

`python -m benchmarks.overhead [--jobs N] [--pairs N] [--json]`

All have the same two cores. The plain ways are one loop of one thread, one loop of two threads,
and two loops of one thread side by side, each with half of the jobs: the most that diffusers makes
of two cores without a scheduler. The system has one thread a process, two denoisers and two
decoders. The ways take turns, the system first or last by turns; of each round the ratio to each
plain way is taken, and to the best of them; the median over the rounds counts, since the machine
is shared. Jobs run in exact mode: the system makes the very same pixels, which is checked.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from common.settings import BUNDLED_MODEL, Settings, single_threaded

single_threaded()

ONE_LOOP, SYSTEM = "one_loop", "system"


def jobs_of(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    colours = ["red", "blue", "green", "yellow"]
    shapes = ["circle", "square", "star", "ring"]
    return [
        {
            "prompt": f"a {rng.choice(colours)} {rng.choice(shapes)} on a white background",
            "negative_prompt": " ",
            "true_cfg_scale": 3.0,
            "width": 256,
            "height": 256,
            "num_inference_steps": 20,
            "seed": rng.randrange(2**31),
        }
        for _ in range(count)
    ]


def through_system(client: Any, jobs: list[dict[str, Any]]) -> tuple[float, list[list[str]]]:
    from PIL import Image

    from benchmarks.diffusers_loop import pixels_sha256

    begun = time.perf_counter()
    handles = [client.submit(**job) for job in jobs]
    results = [handle.wait() for handle in handles]
    seconds = time.perf_counter() - begun
    sums = []
    for handle, result in zip(handles, results, strict=True):
        assert result.status == "succeeded", result.error
        files = [client.output(handle.id, n) for n in range(len(result.outputs))]
        sums.append([pixels_sha256(Image.open(io.BytesIO(data))) for data in files])
    return seconds, sums


def plain_ways(loops: list[Any]) -> dict[str, Callable[[list[dict[str, Any]]], Any]]:
    """By name: what runs jobs and gives seconds and lines. `loops` are two of one thread and one
    of two."""
    from benchmarks.diffusers_loop import run_side_by_side

    return {
        ONE_LOOP: loops[0].run,
        "two_threads": loops[2].run,
        "two_loops": lambda jobs: run_side_by_side(loops[:2], jobs),
    }


def ratios(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over `rounds` (seconds by way) of a plain way's seconds over the system's: of each
    way, and of the best one of each round."""
    plain = [name for name in rounds[0] if name != SYSTEM]
    best = [min(times[name] for name in plain) / times[SYSTEM] for times in rounds]
    return {
        "throughput_ratio": round(statistics.median(best), 3),
        "throughput_ratio_range": [round(min(best), 3), round(max(best), 3)],
        "ratios": {
            name: round(statistics.median(times[name] / times[SYSTEM] for times in rounds), 3)
            for name in plain
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=5, help="rounds")
    parser.add_argument("--denoisers", type=int, default=2)
    parser.add_argument("--decoders", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    from benchmarks.diffusers_loop import DiffusersLoop
    from services.pool.local import LocalPool

    loops = [DiffusersLoop(str(BUNDLED_MODEL), threads) for threads in (1, 1, 2)]
    plain = plain_ways(loops)
    rounds: list[dict[str, float]] = []
    identical = True
    with LocalPool(
        denoisers=options.denoisers, decoders=options.decoders, settings=Settings()
    ) as pool:
        client = pool.client()
        warm = jobs_of(2, seed=0)
        through_system(client, warm)
        for way in plain.values():
            way(warm)
        for turn in range(options.pairs):
            jobs = jobs_of(options.jobs, seed=turn + 1)
            names = [*plain, SYSTEM] if turn % 2 else [SYSTEM, *plain]
            found: dict[str, Any] = {
                name: through_system(client, jobs) if name == SYSTEM else plain[name](jobs)
                for name in names
            }
            # Exactness is promised at the same thread count: ours is one.
            identical &= found[SYSTEM][1] == [line["sha256"] for line in found[ONE_LOOP][1]]
            rounds.append({name: found[name][0] for name in (*plain, SYSTEM)})
            print(
                f"round {turn}: "
                + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in rounds[-1].items()),
                flush=True,
            )
        client.close()
    for loop in loops:
        loop.close()
    out = {
        "benchmark": "overhead", "jobs": options.jobs,
        "pairs": [{name: round(s, 2) for name, s in times.items()} for times in rounds],
        "bit_identical": identical, **ratios(rounds),
    }  # fmt: skip
    print(
        f"the system's throughput is {out['throughput_ratio']} x the best plain way's; "
        + ", ".join(f"{ratio} x {name}" for name, ratio in out["ratios"].items())
        + f"; pixels identical: {identical}"
    )
    if options.json:
        print(json.dumps(out))


if __name__ == "__main__":
    main()
