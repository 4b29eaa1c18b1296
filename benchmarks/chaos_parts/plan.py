"""The seeded plan: which jobs come when, and what befalls whom. The same seed, the same plan."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

# kind -> (least, most) seconds until its victim is started, woken or connected again. A freeze is
# longer than the victim's lease (3 s for a coordinator, 5 s for a worker).
KINDS: dict[str, tuple[float, float]] = {
    "kill_encode": (0.2, 1.5),
    "kill_denoise": (0.2, 1.5),
    "kill_decode": (0.2, 1.5),
    "kill_leader": (0.2, 1.5),
    "kill_standby": (0.2, 1.5),
    "freeze_worker": (5.5, 8.0),
    "freeze_leader": (3.5, 6.0),
    "redis_kill": (0.1, 1.5),
    "redis_freeze": (1.0, 4.0),
    "worker_cut": (0.5, 7.0),
    "worker_silence": (0.5, 7.0),
    "worker_lost_replies": (3.0, 3.0),
    "worker_slow": (2.0, 5.0),
    "worker_forgotten": (0.0, 0.0),
    "leader_cut": (0.5, 5.0),
    "leader_forgotten": (0.0, 0.0),
    "drain_worker": (0.2, 1.0),
    "client_killed": (0.0, 0.0),
    "client_lost_replies": (3.0, 3.0),
}
FAULTS_A_MINUTE = 9
# Before the first fault, and after the last one before arrivals end.
QUIET_S = (3.0, 4.0)
CANCELED = 0.03  # share of jobs
# Steps. A long job still runs when a worker that was frozen over it wakes up.
SHORT, LONG = (6, 20), (80, 120)
PROMPTS = (
    "a red circle on a blue background",
    "two green squares",
    "a small yellow triangle above a red square",
    "a blue circle",
)


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float  # after the start
    kind: str
    hold_s: float
    pick: float  # 0 … 1: which of those it may befall


@dataclass(frozen=True, slots=True)
class Job:
    at_s: float
    id: str
    variant: int
    params: dict[str, Any]
    cancel_after_s: float | None = None


def faults(seed: int, seconds: float) -> list[Fault]:
    """At least one of every kind, evenly mixed, at jittered moments."""
    rng = random.Random(f"faults {seed}")
    count = max(len(KINDS), round(FAULTS_A_MINUTE * seconds / 60))
    kinds: list[str] = []
    while len(kinds) < count:
        kinds += rng.sample(list(KINDS), len(KINDS))
    begin, end = QUIET_S[0], max(QUIET_S[0] + 1.0, seconds - QUIET_S[1])
    gap = (end - begin) / count
    return [
        Fault(begin + gap * (i + rng.random()), kind, rng.uniform(*KINDS[kind]), rng.random())
        for i, kind in enumerate(kinds[:count])
    ]


def variants(seed: int, noop: bool) -> list[dict[str, Any]]:
    """A few distinct jobs that all pushes are made of, so that an oracle can run each once."""
    rng = random.Random(f"variants {seed}")
    found = []
    for i in range(12):
        side = rng.choice([64, 96, 128])
        job: dict[str, Any] = {
            "prompt": PROMPTS[i % len(PROMPTS)],
            "width": side,
            "height": rng.choice([64, side]),
            "num_inference_steps": rng.randint(*(LONG if i in (4, 9) else SHORT)),
            "seed": rng.randrange(2**32),
        }
        if not noop and i % 3 == 0:
            job["negative_prompt"] = " "
        found.append(job)
    return found


def jobs(seed: int, seconds: float, rate: float, of: list[dict[str, Any]]) -> list[Job]:
    """Poisson arrivals, `rate` a second; a third of them in a hurry, so that chunks are yielded."""
    rng = random.Random(f"jobs {seed}")
    made: list[Job] = []
    at = 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        variant = rng.randrange(len(of))
        slo_ms = rng.choice([2_000, 60_000, 60_000])
        cancel = rng.uniform(0.0, 2.0) if rng.random() < CANCELED else None
        params = {**of[variant], "slo_ms": slo_ms}
        made.append(Job(at, f"c{seed}-{len(made):04d}", variant, params, cancel))
    return made
