"""What a worker tells Prometheus: its tasks, what it moved from host to device and back, memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from common.arena import Arena
from common.metrics import process
from common.metrics.registry import BRIEF_SECONDS, SECONDS, Family, Labels, Registry
from common.ran import Ran
from common.stage import DENOISE

if TYPE_CHECKING:
    from common.worker import Worker

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)

INFO = Family(
    "slackwater_worker_info", "gauge", "1; who this worker is",
    ("worker", "stage", "model", "host", "device"),
)  # fmt: skip
DRAINING = Family("slackwater_worker_draining", "gauge", "1 while it hands back and leaves")
BUSY = Family("slackwater_worker_busy_seconds_total", "counter", "time in which it ran tasks")
TASKS = Family(
    "slackwater_tasks_total", "counter",
    "tasks by how they ended here: done, error (of every row), returned (not begun), void (taken "
    "away before the report)",
    ("stage", "model", "end"),
)  # fmt: skip
TASK_SECONDS = Family(
    "slackwater_task_seconds", "histogram",
    "how long tasks ran: a chunk of steps, an encoding, a decoding", ("stage", "model"), SECONDS,
)  # fmt: skip
STEPS = Family("slackwater_steps_total", "counter", "denoising steps done, of all jobs", ("model",))
STEP_SECONDS = Family(
    "slackwater_step_seconds", "histogram", "one denoising step, the middle one of its chunk",
    ("model",), SECONDS,
)  # fmt: skip
BATCH_ROWS = Family(
    "slackwater_batch_rows", "histogram",
    "rows of the largest forward pass that a chunk shared with other jobs; 1: it ran alone",
    ("model",), ROWS,
)  # fmt: skip
STATE_WAIT = Family(
    "slackwater_state_wait_seconds", "histogram",
    "how long a task that could have begun waited for its state to be read", ("stage",),
    BRIEF_SECONDS,
)  # fmt: skip
HANDOFF = Family(
    "slackwater_handoff_seconds", "histogram",
    "writing (put) or reading (get) one state, by path: arena, redis, inline (in the message)",
    ("op", "path"), BRIEF_SECONDS,
)  # fmt: skip
HANDOFF_BYTES = Family(
    "slackwater_handoff_bytes_total", "counter", "bytes of states moved so", ("op", "path")
)
RESUMED = Family(
    "slackwater_chunks_resumed_total", "counter",
    "chunks by where their state was: on the device (no time at all), or read from its handle",
    ("path",),
)  # fmt: skip
EVICTED = Family(
    "slackwater_evictions_total", "counter",
    "jobs whose blocks on the device were given to others, and step caches that were dropped",
    ("what",),
)  # fmt: skip
DEVICE = Family(
    "slackwater_device_pool_bytes", "gauge",
    "the block pool on the device: its size, and what its used blocks hold", ("what",),
)  # fmt: skip
ARENA = Family(
    "slackwater_arena_bytes", "gauge",
    "the arena of this host, as each of its workers sees it: size, used, largest_free, high_water",
    ("arena", "what"),
)  # fmt: skip
ARENA_REFUSED = Family(
    "slackwater_arena_refused_total", "counter", "states for which the arena had no room",
    ("arena",),
)  # fmt: skip
OTHER = Family(
    "slackwater_stage_count", "gauge", "what else the stage counts, by the name it has in "
    "sw:worker:{name}", ("name",),
)  # fmt: skip

FAMILIES = (
    INFO, DRAINING, BUSY, TASKS, TASK_SECONDS, STEPS, STEP_SECONDS, BATCH_ROWS, STATE_WAIT, HANDOFF,
    HANDOFF_BYTES, RESUMED, EVICTED, DEVICE, ARENA, ARENA_REFUSED, OTHER,
)  # fmt: skip
# Names in a stage's `counts()`, and the family and label under which they are told.
KNOWN: dict[str, tuple[Family, str]] = {
    "resumed_device": (RESUMED, "device"),
    "resumed_read": (RESUMED, "read"),
    "evictions": (EVICTED, "job"),
    "cache_evictions": (EVICTED, "step_cache"),
    "pool_bytes": (DEVICE, "size"),
    "pool_used_bytes": (DEVICE, "used"),
    "latents_bytes": (DEVICE, "latents"),
    "embeds_bytes": (DEVICE, "embeds"),
    "cache_state_bytes": (DEVICE, "cache_state"),
}


class WorkerMetrics:
    """Counts of one worker. `ran` is a watcher of its tasks, `moved` of its handle store."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._busy = registry.count(BUSY)
        self._tasks, self._task_s = registry.count(TASKS), registry.spread(TASK_SECONDS)
        self._steps, self._step_s = registry.count(STEPS), registry.spread(STEP_SECONDS)
        self._rows, self._wait_s = registry.spread(BATCH_ROWS), registry.spread(STATE_WAIT)
        self._moved_s, self._bytes = registry.spread(HANDOFF), registry.count(HANDOFF_BYTES)
        self._moving = threading.Lock()  # states are read on another thread than they are written

    def show(
        self,
        worker: Worker,
        arena: Arena,
        stored: Mapping[str, int],
        counts: Callable[[], Mapping[str, int]],
    ) -> None:
        """From now on also what is read off the worker, its arena, its store and its stage."""
        ask, who = self._registry.ask, worker.who
        about = (who.name, who.stage, who.model, who.host, who.device)
        process.describe(
            self._registry, who.stage, lambda: not worker.outage.goes_on,
            lambda: worker.outage.times,
        )  # fmt: skip
        ask(INFO, lambda: {about: 1})
        ask(DRAINING, lambda: {(): float(worker.draining)})
        ask(process.FALLBACKS, lambda: {("spilled",): stored["spilled"]})
        ask(ARENA, lambda: _arena(arena))
        ask(ARENA_REFUSED, lambda: {(arena.id,): arena.stats().refused})
        for family in (RESUMED, EVICTED, DEVICE):
            ask(family, lambda family=family: _known(family, counts()))  # type: ignore[misc]
        ask(OTHER, lambda: {(k,): v for k, v in counts().items() if k not in KNOWN})

    def ran(self, ran: Ran) -> None:
        """A task was reported (common.ran.Watcher)."""
        task = ran.task
        end = _end(ran)
        self._tasks.add(task.stage, task.model, end)
        if ran.returned:
            return
        self._busy.add(by=ran.seconds)
        self._task_s.observe(ran.seconds, task.stage, task.model)
        self._wait_s.observe(ran.waited_s, task.stage)
        if task.stage != DENOISE:
            return
        starts = {row.job: row.start for row in task.rows}
        for outcome in ran.outcomes:
            if outcome.done and not outcome.error_code:
                self._steps.add(task.model, by=outcome.step - starts.get(outcome.job, outcome.step))
                self._rows.observe(max(1, outcome.rows), task.model)
                if outcome.step_s:
                    self._step_s.observe(outcome.step_s, task.model)

    def moved(self, op: str, path: str, seconds: float, nbytes: int) -> None:
        """A state was written or read (common.metrics.handoff.Moved)."""
        with self._moving:
            self._moved_s.observe(seconds, op, path)
            self._bytes.add(op, path, by=nbytes)


def _end(ran: Ran) -> str:
    if ran.returned:
        return "returned"
    if ran.verdict == "void":
        return "void"
    failed = ran.outcomes and all(outcome.error_code for outcome in ran.outcomes)
    return "error" if failed else "done"


def _arena(arena: Arena) -> dict[Labels, float]:
    stats = arena.stats()
    return {
        (arena.id, "size"): stats.size_bytes,
        (arena.id, "used"): stats.used_bytes,
        (arena.id, "largest_free"): stats.largest_free_bytes,
        (arena.id, "high_water"): stats.high_water_bytes,
    }


def _known(family: Family, counts: Mapping[str, int]) -> dict[Labels, float]:
    return {
        (label,): counts[name]
        for name, (its, label) in KNOWN.items()
        if its is family and name in counts
    }
