"""The plain thing to compare with: a loop over diffusers' own pipeline, in a process of its own.

`python -m benchmarks.diffusers_loop MODEL THREADS` reads one JSON job a line on stdin ("go" after
the last one starts them) and writes one JSON line per job: seconds, and sha256 of each picture's
pixels. Pictures are encoded as PNG too, as the system does.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any


def load(model: str, threads: int) -> Any:
    """diffusers' own pipeline, silent, on the CPU."""
    import diffusers
    import torch
    import transformers
    from diffusers import QwenImagePipeline

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    pipe = QwenImagePipeline.from_pretrained(model, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(pipe: Any, job: dict[str, Any]) -> Any:
    """One job by diffusers' own `__call__`, from the parameters that a client pushes."""
    import torch

    return pipe(
        prompt=job["prompt"],
        negative_prompt=job.get("negative_prompt"),
        width=job["width"],
        height=job["height"],
        num_inference_steps=job["num_inference_steps"],
        true_cfg_scale=job.get("true_cfg_scale", 4.0),
        num_images_per_prompt=job.get("n", 1),
        generator=torch.Generator("cpu").manual_seed(job["seed"]),
    ).images


def pixels_sha256(picture: Any) -> str:
    return hashlib.sha256(picture.convert("RGB").tobytes()).hexdigest()


class DiffusersLoop:
    """That process, from outside; `run` times a list of jobs in it."""

    def __init__(self, model: str, threads: int) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.diffusers_loop", model, str(threads)],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, jobs: Sequence[dict[str, Any]]) -> tuple[float, list[dict[str, Any]]]:
        """Seconds for all of them, and each one's line."""
        self.begin(jobs)
        return self.end(jobs)

    def begin(self, jobs: Sequence[dict[str, Any]]) -> None:
        assert self._process.stdin
        for job in jobs:
            self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def end(self, jobs: Sequence[dict[str, Any]]) -> tuple[float, list[dict[str, Any]]]:
        """What `run` gives, of the jobs that `begin` was given."""
        assert self._process.stdout
        lines = [json.loads(self._process.stdout.readline()) for _ in range(len(jobs) + 1)]
        return lines[-1]["total_s"], lines[:-1]

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)


def run_side_by_side(
    loops: Sequence[DiffusersLoop], jobs: Sequence[dict[str, Any]]
) -> tuple[float, list[dict[str, Any]]]:
    """The jobs dealt out to several loops that run at once: seconds from the start to the last
    end, and each job's line."""
    shares = [jobs[i :: len(loops)] for i in range(len(loops))]
    begun = time.perf_counter()
    for loop, share in zip(loops, shares, strict=True):
        loop.begin(share)
    found = [loop.end(share)[1] for loop, share in zip(loops, shares, strict=True)]
    seconds = time.perf_counter() - begun
    return seconds, [found[i % len(loops)][i // len(loops)] for i in range(len(jobs))]


def main() -> None:
    pipe = load(sys.argv[1], threads=int(sys.argv[2]))
    jobs: list[dict[str, Any]] = []
    for line in sys.stdin:
        if line.strip() != "go":
            jobs.append(json.loads(line))
            continue
        begun = time.perf_counter()
        for job in jobs:
            at = time.perf_counter()
            pictures = call(pipe, job)
            for picture in pictures:
                picture.save(io.BytesIO(), format="PNG")
            seconds = time.perf_counter() - at
            print(json.dumps({"s": seconds, "sha256": [pixels_sha256(p) for p in pictures]}))
        print(json.dumps({"total_s": time.perf_counter() - begun}), flush=True)
        jobs = []


if __name__ == "__main__":
    main()
