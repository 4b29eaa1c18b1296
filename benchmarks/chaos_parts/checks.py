"""What is verified at the end, from the ledger, the journals and what is left behind."""

from __future__ import annotations

import hashlib
import io
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.chaos_parts.faults import Happened
from benchmarks.chaos_parts.journal import TaskRun, repeats
from benchmarks.chaos_parts.ledger import Ledger, Line
from benchmarks.chaos_parts.members import Members
from common.arena import Arena
from common.handles import HandleStore
from common.job import JobStatus
from common.noop import expected

# Which kinds hurt the member itself, so that recovery means: its job goes on elsewhere.
AT_WORKERS = ("kill_encode", "kill_denoise", "kill_decode", "freeze_worker", "drain_worker",
              "worker_cut", "worker_silence", "worker_lost_replies", "worker_slow",
              "worker_forgotten")  # fmt: skip


# -- right or wrong ----------------------------------------------------------------------------


def oracle(variants: Sequence[dict[str, Any]], noop: bool) -> list[str]:
    """What each variant's file must be: pixels' sha256 by diffusers' own pipeline in a process
    of its own, or the no-op chain."""
    if noop:
        return [expected(v["prompt"], v["seed"], v["num_inference_steps"]) for v in variants]
    from benchmarks.diffusers_loop import DiffusersLoop
    from common.settings import BUNDLED_MODEL

    loop = DiffusersLoop(str(BUNDLED_MODEL), threads=1)
    _, lines = loop.run(variants)
    loop.close()
    return [line["sha256"][0] for line in lines]


def picture(content: bytes, noop: bool) -> str:
    if noop:
        return str(json.loads(content)["chain"])
    from PIL import Image

    from benchmarks.diffusers_loop import pixels_sha256

    return pixels_sha256(Image.open(io.BytesIO(content)))


def verdicts(ledger: Ledger, right: Sequence[str], noop: bool) -> dict[str, list[str]]:
    """Ids of jobs that were lost, failed, duplicated or mismatched, each with why."""
    found: dict[str, list[str]] = {"lost": [], "failed": [], "duplicated": [], "mismatched": []}
    found["lost"] = ledger.missing()
    for job, line in ledger.lines.items():
        if line.seen is None:
            continue
        result = line.seen.result
        if result.status == JobStatus.CANCELED and line.cancel_asked:
            continue
        if result.status != JobStatus.SUCCEEDED:
            found["failed"].append(f"{job}: {result.status} {result.error_code} {result.error}")
        elif not _is_right(line, right[line.job.variant], noop):
            found["mismatched"].append(job)
    found["duplicated"] = ledger.look_again()
    return found


def _is_right(line: Line, right: str, noop: bool) -> bool:
    assert line.seen is not None
    outputs, files = line.seen.result.outputs, line.seen.files
    if len(files) != 1 or files[0] is None:
        return False
    whole = hashlib.sha256(files[0]).hexdigest() == outputs[0].sha256
    return whole and picture(files[0], noop) == right


# -- work done twice, and recovery -------------------------------------------------------------


def blame(runs: Sequence[TaskRun], faults: Sequence[Happened]) -> Counter[int]:
    """Index of a fault -> task runs that had to be done again for it.

    The fault is the last one before the repeat that befell the process whose work was lost, else
    the last one of all; -1 where there was none.
    """
    found: Counter[int] = Counter()
    for again, lost in repeats(runs):
        before = [i for i, fault in enumerate(faults) if fault.at_s <= again.begun_s]
        own = [i for i in before if faults[i].pid == lost.pid]
        found[(own or before or [-1])[-1]] += 1
    return found


def held_at(fault: Happened, runs: Sequence[TaskRun]) -> TaskRun | None:
    """The task run that the fault interrupted."""
    found = [r for r in runs if r.pid == fault.pid and r.begun_s <= fault.at_s
             and (r.ended_s is None or r.ended_s > fault.at_s)]  # fmt: skip
    return found[-1] if found else None


def recovery_s(fault: Happened, runs: Sequence[TaskRun]) -> float | None:
    """From a worker's fault to the next step (outside the denoise stage: begin) of the job it was
    at, in whichever process, its wait for a turn included; from any other to the next dispatch
    that begins. None where nothing was to do."""
    if fault.kind not in AT_WORKERS:
        return min((r.begun_s - fault.at_s for r in runs
                    if r.seq > fault.seq and r.begun_s > fault.at_s), default=None)  # fmt: skip
    held = held_at(fault, runs)
    if held is None:
        return None
    stamps = [at for r in runs if r.job == held.job for at in _stamps(r)]
    return min((at - fault.at_s for at in stamps if at > fault.at_s), default=None)


def _stamps(run: TaskRun) -> list[float]:
    """When it went forward; a chunk's begin is not yet a step."""
    if run.stage == "denoise":
        return list(run.steps.values())
    return [run.begun_s]


def noticed_s(fault: Happened, runs: Sequence[TaskRun], ledger: Ledger) -> float | None:
    """From a worker's fault to the moment at which the coordinator took its task back."""
    held = held_at(fault, runs)
    if held is None:
        return None
    times = ledger.lines[held.job].worker_lost_s if held.job in ledger.lines else []
    return min((at - fault.at_s for at in times if at > fault.at_s), default=None)


def by_kind(ledger: Ledger, runs: Sequence[TaskRun]) -> dict[str, dict[str, Any]]:
    faults = ledger.faults
    redone = blame(runs, faults)
    recovered, noticed = defaultdict(list), defaultdict(list)
    counts: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    again: Counter[str] = Counter()
    for i, fault in enumerate(faults):
        counts[fault.kind] += 1
        busy[fault.kind] += fault.was_busy
        again[fault.kind] += redone[i]
        seconds = recovery_s(fault, runs)
        if seconds is not None:
            recovered[fault.kind].append(seconds)
        seconds = noticed_s(fault, runs, ledger)
        if seconds is not None:
            noticed[fault.kind].append(seconds)
    return {
        kind: {
            "count": count,
            "in_a_task": busy[kind],
            "redone": again[kind],
            "recovery_s_median": _rounded(statistics.median, recovered[kind]),
            "recovery_s_max": _rounded(max, recovered[kind]),
            "taken_back_s_max": _rounded(max, noticed[kind]),
        }
        for kind, count in sorted(counts.items())
    }


def _rounded(of: Any, values: list[float]) -> float | None:
    return round(of(values), 2) if values else None


# -- what is left behind -----------------------------------------------------------------------


def undrained(members: Members) -> list[str]:
    """Streams with entries and jobs still active, once all results are there."""
    keys, db = members.keys, members.checker
    streams = [keys.jobs, keys.cancel, keys.reports]
    streams += [name.decode() for name in db.scan_iter(keys.tasks("*"), count=10_000)]
    left = [f"{name}: {db.xlen(name)}" for name in streams if db.xlen(name)]
    if db.scard(keys.active):
        left.append(f"{keys.active}: {db.scard(keys.active)}")
    return left


def immortal(members: Members) -> list[str]:
    """Keys without a TTL that are not on the list of permanent ones."""
    names = {name.decode() for name in members.checker.scan_iter(count=10_000)}
    names -= members.keys.permanent()
    return sorted(name for name in names if members.checker.ttl(name) == -1)


def arena_claims(members: Members) -> int:
    with Arena.open(members.settings["arena_path"]) as arena:
        return arena.stats().claims


def sweep_arena(members: Members) -> int:
    """What the workers' own sweep frees once a minute, now: blocks of jobs that have ended."""
    with Arena.open(members.settings["arena_path"]) as arena:
        return HandleStore("chaos", arena=arena).sweep(lambda _: True, min_age_s=0.0)
