"""The harness' own books: what was pushed, what came out when, and whether it ever changed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from benchmarks.chaos_parts.faults import Happened
from benchmarks.chaos_parts.members import Members
from benchmarks.chaos_parts.plan import Job
from common.client import Client
from common.errors import JobRefused, RedisAway, UnknownJob, WaitTimeout
from common.job import Result
from common.keys import Keys

LOOK_S = 0.05
CUSTOMERS = 48
ANSWER_S = 800.0  # longer than any run: what is looked for is who is never told
SLICE_S = 1.0  # of a wait, after which it is seen that the books are closed
ENDS = (b"succeeded", b"failed", b"canceled", b"expired")


@dataclass(slots=True)
class Seen:
    """A result as it first appeared."""

    at_s: float
    packed: bytes
    result: Result
    files: list[bytes | None]


@dataclass(slots=True)
class Line:
    """One job in the books."""

    job: Job
    pushed_s: float
    cancel_asked: bool = False
    seen: Seen | None = None
    answer: Result | None = None  # what its own client was told
    trouble: list[str] = field(default_factory=list)
    worker_lost_s: list[float] = field(default_factory=list)  # by its events


class Ledger:
    """Serves jobs as users do, through a retrying client, and watches results beside it."""

    def __init__(self, members: Members, variants: list[dict[str, Any]]) -> None:
        self.members, self.variants = members, variants
        self.lines: dict[str, Line] = {}
        self.faults: list[Happened] = []
        self._seq = 0
        self._lock = threading.Lock()
        self._spare = 0
        port = members.client_link.port
        self._client = Client(f"redis://127.0.0.1:{port}/0", prefix=members.keys.prefix)
        self._customers = ThreadPoolExecutor(CUSTOMERS, thread_name_prefix="customer")
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def open(self) -> None:
        self._watcher.start()

    def close(self) -> None:
        """Customers of lost jobs leave, too."""
        self._over.set()
        self._customers.shutdown(wait=True, cancel_futures=True)
        if self._watcher.is_alive():
            self._watcher.join()
        self._client.close()

    # -- customers -----------------------------------------------------------------------

    def serve(self, job: Job) -> None:
        """Push it, wait for its end; again, with the same id, if Redis was away too long."""
        line = Line(job, time.monotonic())
        with self._lock:
            self.lines[job.id] = line
        self._customers.submit(self._serve, line)

    def spare_job(self, pick: float) -> Job:
        """One beside the plan's, for a client that dies."""
        self._spare += 1
        variant = int(pick * 997) % len(self.variants)
        return Job(0.0, f"spare-{self._spare}", variant, {**self.variants[variant]})

    def _serve(self, line: Line) -> None:
        job, until = line.job, time.monotonic() + ANSWER_S
        while line.answer is None and time.monotonic() < until and not self._over.is_set():
            try:
                handle = self._client.submit(**job.params, id=job.id)
                if job.cancel_after_s is not None and not line.cancel_asked:
                    time.sleep(job.cancel_after_s)
                    line.cancel_asked = True
                    handle.cancel()
                line.answer = self._answer(handle, until)
            except (RedisAway, JobRefused, UnknownJob, WaitTimeout, redis.RedisError) as error:
                line.trouble.append(f"{type(error).__name__}: {error}")
                time.sleep(0.2)

    def _answer(self, handle: Any, until: float) -> Result | None:
        """The job's end; None once the books are closed. Raises WaitTimeout, and what a client's
        wait raises."""
        while not self._over.is_set():
            left = until - time.monotonic()
            try:
                found: Result = handle.wait(min(left, SLICE_S))
                return found
            except WaitTimeout:
                if left <= SLICE_S:
                    raise
        return None

    # -- the watcher ---------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._over.is_set():
            self.look()
            self._over.wait(LOOK_S)

    def look(self) -> None:
        """Note results that have appeared since, and the last dispatch's number."""
        with self._lock:
            waiting = [line for line in self.lines.values() if line.seen is None]
            with contextlib.suppress(redis.RedisError, OSError):
                direct, keys = self.members.direct, self.members.keys
                names = [keys.seq, *(keys.result(line.job.id) for line in waiting)]
                seq, *found = direct.mget(names)
                self._seq = int(seq or 0)
                now = time.monotonic()
                for line, packed in zip(waiting, found, strict=True):
                    if packed is not None:
                        line.seen = self._read(direct, packed, now)

    def _read(self, db: Any, packed: bytes, now: float) -> Seen:
        result = Result.from_wire(packed)
        files = [db.get(output.key) for output in result.outputs]
        return Seen(now, packed, result, files)

    def last_seq(self) -> int:
        with self._lock, contextlib.suppress(redis.RedisError, OSError):
            if self.members.redis_is_well:
                self._seq = int(self.members.direct.get(self.members.keys.seq) or 0)
        return self._seq

    def write(self, path: Path) -> None:
        """Faults and jobs, a JSON object a line, for a look at a run that was kept."""
        lines = [dataclasses.asdict(fault) for fault in self.faults]
        for job, line in self.lines.items():
            seen = line.seen
            lines.append({
                "job": job, "pushed_s": line.pushed_s, "params": line.job.params,
                "seen_s": seen and seen.at_s, "status": seen and str(seen.result.status),
                "trouble": line.trouble,
            })  # fmt: skip
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    # -- the end -------------------------------------------------------------------------

    def is_complete(self) -> bool:
        """Every job has a result, and its client knows."""
        return all(line.seen and line.answer for line in self.lines.values())

    def missing(self) -> list[str]:
        return [job for job, line in self.lines.items() if line.seen is None]

    def look_again(self) -> list[str]:
        """Jobs that ended more than once: a result or a file that is not as it first was or as
        its client was told, a second final event, or a file too many."""
        keys: Keys = self.members.keys
        db: Any = self.members.checker
        files: Counter[str] = Counter()
        for name in db.scan_iter(keys.output("*", 0)[:-1] + "*", count=10_000):
            files[name.decode().rpartition(":")[0]] += 1
        changed = []
        for job, line in self.lines.items():
            if line.seen is None:
                continue
            events = [fields for _, fields in db.xrange(keys.events(job))]
            line.worker_lost_s = worker_lost_s(events)
            once = sum(event[b"type"] in ENDS for event in events) == 1
            here = files[keys.output(job, 0).rpartition(":")[0]]
            if not once or here != len(line.seen.files) or not self._is_as_seen(line, line.seen):
                changed.append(job)
        return changed

    def _is_as_seen(self, line: Line, seen: Seen) -> bool:
        db = self.members.checker
        again = db.get(self.members.keys.result(line.job.id))
        if again != seen.packed or line.answer not in (None, seen.result):
            return False
        return self._read(db, again, seen.at_s).files == seen.files


def worker_lost_s(events: list[dict[bytes, bytes]]) -> list[float]:
    """When a job was taken from a worker that was believed dead, in monotonic seconds."""
    ahead_s = time.time() - time.monotonic()
    return [
        float(event[b"at"]) / 1000 - ahead_s for event in events if event[b"type"] == b"worker_lost"
    ]
