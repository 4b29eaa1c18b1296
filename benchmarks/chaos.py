"""Everything that can die, dies, under load; a ledger outside the system says what came of it.

`python -m benchmarks.chaos [--seed S] [--minutes M] [--noop] [--json]`

Two coordinators, two workers a stage and a Redis with an append-only file run jobs in exact mode
while a seeded plan kills, freezes, cuts off and restarts them (`chaos_parts/plan.py`). Jobs come
from clients that retry as users' do. Three books are kept outside the system: what was pushed and
each result at the moment it appeared; every fault; and a journal that each worker process writes
before and after each task and at each step. At the end every picture is compared with diffusers'
own pipeline (with --noop: with the hash chain that names every step).

`chunks_redone_per_fault` counts from the journals: task runs that did a step again which an
earlier run of that job had done or begun (for encode and decode: every run after the first),
divided by the number of faults.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.chaos_parts import checks, journal, members, plan
from benchmarks.chaos_parts.faults import Director
from benchmarks.chaos_parts.ledger import Ledger
from benchmarks.chaos_parts.members import Members, until
from common.settings import single_threaded
from common.stage import STAGES

single_threaded()

RATE = 1.4  # jobs a second
NOOP_RATE = 2.0
NOOP = "encode_ms=20,step_ms=25,decode_ms=20,state_kb=64"
END_S = 400.0  # for the last results, on a machine that cannot keep up
DRAIN_S = 30.0
ARENA_S = 150.0  # workers sweep once a minute what is a minute old


def run(
    seed: int,
    seconds: float,
    noop: bool,
    folder: Path,
    *,
    rate: float | None = None,
    faults: list[plan.Fault] | None = None,
    arena_patience_s: float = ARENA_S,
    **settings: Any,
) -> dict[str, Any]:
    """One run; returns the report.

    `seconds` of arrivals at `rate` a second in `folder`, which is to be on tmpfs; `faults` in
    place of the seed's; `settings` of the pool; `arena_patience_s` for the workers' sweep.
    """
    variants = plan.variants(seed, noop)
    right = checks.oracle(variants, noop)
    jobs = plan.jobs(seed, seconds, rate or (NOOP_RATE if noop else RATE), variants)
    members.preload(noop)
    settings = {"chunk_ms": 80.0, "arena_bytes": 32 << 20, "noop": NOOP if noop else "", **settings}
    pool = Members(folder, settings, 2, [(stage, 2) for stage in STAGES])
    ledger = Ledger(pool, variants)
    try:
        pool.start_all()
        claims = checks.arena_claims(pool)
        took_s = drive(pool, ledger, jobs, faults or plan.faults(seed, seconds))
        until(lambda: not checks.undrained(pool), DRAIN_S, "empty streams")
        until(lambda: checks.arena_claims(pool) <= claims, arena_patience_s, "an empty arena")
        found = checks.verdicts(ledger, right, noop)
        left = leftovers(pool, ledger, claims)
    finally:
        ledger.close()
        pool.close()
    left["processes_left"] = pool.left()
    ledger.write(folder / "ledger.jsonl")
    runs = journal.read(folder / "journal")
    return {
        "benchmark": "chaos",
        "seed": seed,
        "device": "timed" if noop else "model",
        "seconds": round(took_s, 1),
        **figures(ledger, runs, found),
        **left,
        "kinds": checks.by_kind(ledger, runs),
        "why": {name: why[:10] for name, why in found.items() if why},
    }


def drive(pool: Members, ledger: Ledger, jobs: list[plan.Job], faults: list[plan.Fault]) -> float:
    """Serve `jobs` and inflict `faults`, each at its time; seconds until the last result."""
    ledger.open()
    begun = time.monotonic()
    director = Director(pool, ledger, faults, begun)
    for job in jobs:
        while (wait := begun + job.at_s - time.monotonic()) > 0:
            pause = director.step()
            time.sleep(min(wait, pause or wait, 0.05))
        ledger.serve(job)
    while not director.is_done:
        time.sleep(min(0.05, director.step()))
    until(ledger.is_complete, END_S, "the last results")
    return time.monotonic() - begun


def leftovers(pool: Members, ledger: Ledger, claims: int) -> dict[str, Any]:
    """Ends the pool, as its operator would; what is there that should not be."""
    left: dict[str, Any] = {
        "streams_left": checks.undrained(pool),
        "arena_blocks_left": checks.arena_claims(pool) - claims,
    }
    ledger.close()
    left["unclean_exits"] = pool.stop()
    left["keys_left"] = checks.immortal(pool)
    checks.sweep_arena(pool)
    left["arena_blocks_after_sweep"] = checks.arena_claims(pool)
    return left


def figures(
    ledger: Ledger, runs: list[journal.TaskRun], found: dict[str, list[str]]
) -> dict[str, Any]:
    redone = checks.blame(runs, ledger.faults)
    lines = list(ledger.lines.values())
    statuses = [str(line.seen.result.status) for line in lines if line.seen]
    return {
        "jobs": len(lines),
        "succeeded": statuses.count("succeeded"),
        "canceled": statuses.count("canceled"),
        "faults": len(ledger.faults),
        "fault_kinds": len({fault.kind for fault in ledger.faults}),
        "lost": len(found["lost"]) + len(found["failed"]),
        "clients_untold": sum(line.answer is None for line in lines),
        "duplicated": len(found["duplicated"]),
        "mismatched": len(found["mismatched"]),
        "task_runs": len(runs),
        "steps_run": sum(len(run.steps) for run in runs),
        "chunks_redone": sum(redone.values()),
        "chunks_redone_per_fault": round(sum(redone.values()) / len(ledger.faults), 3),
        "chunks_redone_by_one_fault_max": max(redone.values(), default=0),
        "client_retries": sum(len(line.trouble) for line in lines),
    }


def is_good(out: dict[str, Any]) -> bool:
    """Whether everything held that is promised."""
    none = ("lost", "duplicated", "mismatched", "clients_untold", "streams_left", "keys_left",
            "processes_left", "unclean_exits", "arena_blocks_left")  # fmt: skip
    return not any(out[name] for name in none) and out["chunks_redone_per_fault"] <= 1


def print_report(out: dict[str, Any]) -> None:
    print(
        f"seed {out['seed']}: {out['jobs']} jobs through {out['faults']} faults of "
        f"{out['fault_kinds']} kinds in {out['seconds']:.0f} s: {out['lost']} lost, "
        f"{out['duplicated']} duplicated, {out['mismatched']} mismatched; "
        f"{out['chunks_redone']} of {out['task_runs']} task runs done again, "
        f"{out['chunks_redone_per_fault']} a fault"
    )
    for kind, row in out["kinds"].items():
        print(
            f"  {kind:20} {row['count']:3} times, {row['in_a_task']:2} in a task, "
            f"redone {row['redone']:2}, recovery median {row['recovery_s_median']} s, max "
            f"{row['recovery_s_max']} s, taken back within {row['taken_back_s_max']} s"
        )
    for name, why in out["why"].items():
        print(f"  {name}: " + "; ".join(why))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=4.0, help="of arrivals and faults")
    parser.add_argument("--rate", type=float, help="jobs a second")
    parser.add_argument("--noop", action="store_true", help="timed steps instead of the model")
    parser.add_argument("--keep", action="store_true", help="keep logs and journals")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
    more = {} if options.rate is None else {"rate": options.rate}
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="slackwater-chaos-", dir=shm))
    good = False
    try:
        out = run(options.seed, 60 * options.minutes, options.noop, folder, **more)
        good = is_good(out)
    finally:
        if good and not options.keep:
            shutil.rmtree(folder)
        else:
            print(f"logs and journals are in {folder}", file=sys.stderr)
    print_report(out)
    if options.json:
        print(json.dumps(out))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
