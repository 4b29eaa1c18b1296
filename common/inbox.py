"""The background threads of a worker: what comes in (Inbox) and signs of life out (Pulse)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from redis.exceptions import RedisError

from common.handles import HandleError
from common.messages import MessageError, TaskRow, seq_of, unpack_task
from common.outage import Outage
from common.scripts import text
from common.stage import Task

__all__ = ["Inbox", "Motion", "Outage", "Pending", "Pulse"]

log = logging.getLogger("slackwater.worker")

# How often a running task's steps are told at most: a person watching sees no more.
PROGRESS_S = 0.05
ODD_S = 0.5  # after an error that is not of Redis


@dataclass(slots=True)
class Pending:
    """A task that arrived and has not been started."""

    entry: str
    task: Task
    raw: list[TaskRow]
    staged: Future[Any] | None = None
    live: list[bool] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Motion:
    """What a worker runs, and when (monotonic) it last made a step; None: it only has to report."""

    seq: int
    steps: int
    moved: float | None


class Inbox(threading.Thread):
    """Reads one worker's stream: tasks into a queue, yields, frees and drains acted on at once.

    `salvage(entry, seq, error)` makes of a task that cannot be read one that fails.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        stream: str,
        block_ms: int,
        stage_in: Callable[[Pending], Future[Any]],
        free: Callable[[bytes], None],
        drain: Callable[[], None],
        salvage: Callable[[str, int, Exception], Pending | None],
    ) -> None:
        super().__init__(name="inbox", daemon=True)
        self._connect, self._stream, self._block_ms = connect, stream, block_ms
        self._stage_in, self._free = stage_in, free
        self._drain, self._salvage = drain, salvage
        self._tasks: deque[Pending] = deque()
        self._news = threading.Condition()
        self._stopping = threading.Event()
        self._last = "0"
        self.yields: set[int] = set()
        self.gone: set[tuple[int, str]] = set()  # rows of the running task whose job has ended

    def run(self) -> None:
        redis, outage = None, Outage("inbox")
        while not self._stopping.is_set():
            try:
                redis = redis or self._connect()
                self.read(redis)
                outage.over()
            except (RedisError, OSError) as error:
                redis = None
                outage.failed(error, self._stopping)

    def read(self, redis: Any) -> None:
        """Wait for news once, and act on them."""
        reply = redis.execute_command(
            "XREAD", "COUNT", 16, "BLOCK", self._block_ms, "STREAMS", self._stream, self._last
        )
        if reply:
            entries = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
            self._take(redis, entries)

    def _take(self, redis: Any, entries: list[Any]) -> None:
        done = []
        for entry, fields in entries:
            if not isinstance(fields, dict):
                fields = dict(zip(fields[::2], fields[1::2], strict=True))
            try:
                if not self._act(text(entry), fields):
                    done.append(entry)
            except (KeyError, ValueError, HandleError) as error:
                log.error("dropped entry %s, which cannot be read: %s", text(entry), error)
                done.append(entry)
            self._last = text(entry)
        if done:
            redis.execute_command("XDEL", self._stream, *done)

    def _act(self, entry: str, fields: dict[bytes, bytes]) -> bool:
        """Take in one entry; True if it has to stay in the stream until its task is started."""
        kind = fields[b"kind"]
        if kind == b"yield":
            self.yields.add(int(fields[b"seq"]))
        elif kind == b"free":
            self._free(fields[b"body"])
        elif kind == b"drain":
            self._drain()
        if kind != b"task":
            return False
        pending = self._pending(entry, fields[b"body"], fields.get(b"seq", b""))
        with self._news:
            self._tasks.append(pending)
            self._news.notify()
        return True

    def _pending(self, entry: str, body: bytes, told: bytes) -> Pending:
        """`told` is the task's seq beside its body, which may be no message at all."""
        try:
            pending = Pending(entry, *unpack_task(body))
        except (MessageError, HandleError) as error:
            seq = int(told) if told.isdigit() else seq_of(body)
            salvaged = self._salvage(entry, seq, error) if seq else None
            if salvaged is None:
                raise
            log.error("seq %d cannot be read and fails: %s", seq, error)
            return salvaged
        pending.staged = self._stage_in(pending)
        return pending

    def take(self, timeout_s: float) -> Pending | None:
        """The next task, waiting for one; None after `timeout_s` or a nudge."""
        with self._news:
            if not self._tasks:
                self._news.wait(timeout_s)
            return self._tasks.popleft() if self._tasks else None

    def poll(self) -> Pending | None:
        """The next task if one is there."""
        with self._news:
            return self._tasks.popleft() if self._tasks else None

    def nudge(self) -> None:
        """Make a waiting `take` return."""
        with self._news:
            self._news.notify_all()

    def stop(self) -> None:
        self._stopping.set()
        self.nudge()


class Pulse(threading.Thread):
    """Renews the worker's lease and tells progress, so that the main thread never waits for it.

    It also knows whether the worker moves: the leader takes a task away that does not.
    """

    def __init__(
        self,
        beat: Callable[[], None],
        tell: Callable[[int, dict[str, int]], None],
        every_s: float,
        show: Callable[[], None] = lambda: None,
    ) -> None:
        """`show` sends previews that were handed over, after a `wake`."""
        super().__init__(name="pulse", daemon=True)
        self._beat, self._tell, self._every_s, self._show = beat, tell, every_s, show
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._progress: tuple[int, dict[str, int]] | None = None
        self._motion = Motion(0, 0, time.monotonic())
        self.outage = Outage("pulse")

    def progress(self, seq: int, steps: dict[str, int]) -> None:
        """Steps reached by each job of task `seq`; only the latest is told."""
        self._motion = Motion(seq, self._motion.steps + 1, time.monotonic())
        self._progress = (seq, steps)
        self._wake.set()

    def begin(self, seq: int) -> None:
        """Task `seq` is being run from now on."""
        self._motion = Motion(seq, 0, time.monotonic())

    def hold(self) -> None:
        """The task has ended; its report may have to wait for a Redis that is away."""
        self._motion = replace(self._motion, moved=None)

    def end(self) -> None:
        """The report is out, and nothing runs."""
        self._motion = Motion(0, 0, time.monotonic())

    def runs(self, seq: int) -> bool:
        return self._motion.seq == seq and self._motion.moved is not None

    def motion(self) -> str:
        """For the worker's record: the seq that runs (0: none), its steps so far, and for how
        long (ms) nothing has moved, by this process' own clock."""
        now = self._motion
        still_s = 0.0 if now.moved is None else time.monotonic() - now.moved
        return f"{now.seq} {now.steps} {round(1000 * still_s)}"

    def run(self) -> None:
        outage, beaten, is_odd = self.outage, float("-inf"), False
        while not self._stopping.is_set():
            try:
                now = time.monotonic()
                if now - beaten >= self._every_s:
                    self._beat()
                    beaten = now
                latest, self._progress = self._progress, None
                if latest is not None:
                    self._tell(*latest)
                self._show()
                outage.over()
            except (RedisError, OSError) as error:
                outage.failed(error, self._stopping)
                # A task that waits for Redis, as for its state, does not hang. It is judged anew.
                if self._motion.moved is not None:
                    self._motion = replace(self._motion, moved=time.monotonic())
                continue
            except Exception:
                # A bug in a figure must not end the lease of a worker that works.
                if not is_odd:
                    log.exception("the heartbeat goes on after an error (told once)")
                is_odd = True
                self._stopping.wait(min(ODD_S, self._every_s))
            self._stopping.wait(PROGRESS_S)
            self._wake.wait(max(0.0, beaten + self._every_s - time.monotonic()))
            self._wake.clear()

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
