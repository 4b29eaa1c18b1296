"""How long an urgent job waits beyond the step that was running when it became ready.

`python -m benchmarks.preemption [--n N] [--noop] [--json]`

A background job of long steps keeps the only denoiser busy. Urgent jobs arrive at random moments;
each becomes ready when its encode task is reported, somewhere within a running step. Measured by
stamps of the denoise worker's own process on the monotonic clock: from the end of that step to the
beginning of the urgent job's first forward pass. In between lie the yield, the checkpoint of the
background job, its report, the urgent job's start and its preparation (timesteps, noise).

A job of which there is nothing to measure is left out, and counted by its reason (`left_out`): it
was never seen ready, it found the rank free (it began before any step of the background job had
ended), no step ended after it was ready, or it never began. One that became ready in the last
moments of a step, too late to make that step the last, waits for one more: it is in the figures,
and counted (`missed_step`).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.settings import Settings, single_threaded

single_threaded()

BACKGROUND = {"width": 256, "height": 256, "num_inference_steps": 200, "n": 3}
URGENT = {"width": 64, "height": 64, "num_inference_steps": 2}


# -- the denoise worker, with a stopwatch -------------------------------------------------------


def stamped_worker(path: str) -> None:
    """A denoise worker like any other that also writes (event, job, monotonic time) lines."""
    import common.stage_main as stage_main
    from common.stage import DENOISE, Control, Outcome, Task

    out = open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the process lives
    make = stage_main.make_stage

    class StampedControl:
        def __init__(self, control: Control, job: str) -> None:
            self._control, self._job = control, job

        def should_stop(self) -> bool:
            return self._control.should_stop()

        def has_left(self, job: str) -> bool:
            return self._control.has_left(job)

        def progress(self, job: str, step: int) -> None:
            print("step_end", job, time.monotonic(), file=out)
            self._control.progress(job, step)

    def stamped(kind: str, settings: Settings, store: Any) -> Any:
        stage: Any = make(kind, settings, store)
        run = stage.run
        running = [""]

        def forward_begins(*_: Any) -> None:
            if running[0]:
                print("first_forward", running[0], time.monotonic(), file=out)
                running[0] = ""

        if settings.noop:
            sleep = stage._sleep

            def first_sleep(seconds: float) -> None:
                forward_begins()
                sleep(seconds)

            stage._sleep = first_sleep
        else:
            stage.model.pipe.transformer.register_forward_pre_hook(forward_begins)

        def run_stamped(task: Task, staged: Any, control: Control) -> list[Outcome]:
            running[0] = task.rows[0].job
            done: list[Outcome] = run(task, staged, StampedControl(control, running[0]))
            return done

        stage.run = run_stamped
        return stage

    stage_main.make_stage = stamped
    settings = Settings()
    stage_main.serve(DENOISE, settings)


# -- the measurement ----------------------------------------------------------------------------


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "--worker":
        stamped_worker(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--noop", action="store_true", help="timed steps instead of the model")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    from benchmarks.servers import extra_worker
    from services.pool.local import LocalPool

    # The timed device: 100 ms a step at 256 px, a few at 64.
    noop = "encode_ms=1,step_ms=1,token_ms=0.4,decode_ms=1" if options.noop else ""
    rng = random.Random(options.seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalPool(denoisers=0, settings=Settings(noop=noop, chunk_ms=5_000)) as pool,
    ):
        stamps = Path(folder) / "stamps"
        with (
            extra_worker(pool, "benchmarks.preemption", "--worker", str(stamps)),
            pool.client() as client,
        ):
            ready = measure(client, options.n, rng)
        out = evaluate(stamps.read_text().splitlines(), ready, options.n)
    out = {"benchmark": "preemption", "device": "timed" if options.noop else "model", **out}
    print(
        f"{out['n']} urgent jobs, step {out['step_ms_median']:.0f} ms: overhead "
        f"p50 {out['overhead_ms_p50']:.1f}, p95 {out['overhead_ms_p95']:.1f}, max "
        f"{out['overhead_ms_max']:.1f} ms; {out['missed_step']} "
        f"({100 * out['missed_share']:.1f} %) missed the end of their step; left out of "
        f"{out['pushed']}: "
        + (", ".join(f"{n} {why}" for why, n in out["left_out"].items() if n) or "none")
    )
    if options.json:
        print(json.dumps(out))


def measure(client: Any, n: int, rng: random.Random) -> dict[str, float]:
    """Push urgent jobs one by one; returns when each became ready, by the wall clock."""
    for params in (BACKGROUND, URGENT):  # the cost model learns both shapes
        client.submit(prompt="warm", **{**params, "num_inference_steps": 2}).wait()
    offset = time.monotonic() - time.time()
    ready = {}
    background = None
    for i in range(n):
        if background is None or background.status().is_terminal:
            background = client.submit(prompt="background", slo_ms=3_600_000, **BACKGROUND)
            wait_for_steps(background)
        time.sleep(rng.uniform(0.05, 0.35))
        urgent = client.submit(id=f"urgent-{i}", prompt=f"a red circle {i}", slo_ms=1_000, **URGENT)
        urgent.wait()
        for event in urgent.events():
            if event.type == "chunk" and event.next == "denoise":
                ready[urgent.id] = event.at_s + offset
                break
    if background is not None:
        background.cancel()
        background.wait()
    return ready


def wait_for_steps(job: Any) -> None:
    for event in job.events():
        if event.type == "step":
            return


def evaluate(lines: list[str], ready: dict[str, float], pushed: int) -> dict[str, Any]:
    """`ready` has those of `pushed` urgent jobs that were seen ready. Raises ValueError if there
    is nothing to measure of any of them."""
    events = [(kind, job, float(at)) for kind, job, at in (line.split() for line in lines)]
    begun = {job: at for kind, job, at in reversed(events) if kind == "first_forward"}
    ends = [at for kind, job, at in events if kind == "step_end" and not job.startswith("urgent")]
    steps = [b - a for a, b in pairwise(ends) if b - a < 1.0]
    step_s = statistics.median(steps)
    overheads, missed = [], 0
    left_out = {"never_ready": pushed - len(ready), "rank_free": 0, "no_step_after": 0,
                "never_began": 0}  # fmt: skip
    for job, at in ready.items():
        # `at` is in whole milliseconds, so a step end within that millisecond is not counted.
        after = next((end for end in ends if end >= at - 0.001), None)
        if job not in begun:
            left_out["never_began"] += 1
            continue
        if after is None:
            left_out["no_step_after"] += 1
            continue
        overhead = begun[job] - after
        if overhead < 0:
            left_out["rank_free"] += 1
            continue
        missed += overhead > 0.8 * step_s
        overheads.append(1e3 * overhead)
    if not overheads:
        raise ValueError(f"none of {pushed} jobs could be measured: {left_out}")
    overheads.sort()
    return {
        "pushed": pushed,
        "n": len(overheads),
        "left_out": left_out,
        "step_ms_median": round(1e3 * step_s, 1),
        "overhead_ms_p50": round(overheads[len(overheads) // 2], 2),
        "overhead_ms_p95": round(overheads[int(len(overheads) * 0.95)], 2),
        "overhead_ms_max": round(overheads[-1], 2),
        "missed_step": missed,
        "missed_share": round(missed / len(overheads), 4),
    }


if __name__ == "__main__":
    main()
