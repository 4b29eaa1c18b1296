"""Real services on a stage: each runs in its own thread and stops at every round trip to Redis and
at every denoising step, until the test says how that goes on. One thread runs at a time, so a
list of choices gives the same run again.

At a round trip the choices are: it works; it never arrives (connection error); it works and its
reply is lost; it arrives later, when its sender has long tried again; only its first commands
arrive; and the same with the process dying there and then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import redis
from redis.client import Pipeline


class Fate(Enum):
    """What becomes of the round trip or step at which an actor stands."""

    WORKS = "works"
    REFUSED = "refused"  # connection error, nothing was sent
    LOST_REPLY = "lost reply"  # it ran, then a connection error
    LATE = "late"  # connection error; it runs when the test delivers it
    CUT = "cut"  # the first commands of a pipeline ran, then a connection error
    DIES_BEFORE = "dies before"
    DIES_AFTER = "dies after"  # it ran, and nobody heard
    DIES_LATE = "dies, and what it sent arrives late"
    DIES_WITHIN = "dies within"  # the first commands of a pipeline ran

    @property
    def dies(self) -> bool:
        return self.value.startswith("dies")


FAULTS = [fate for fate in Fate if not fate.dies and fate is not Fate.WORKS]
DEATHS = [fate for fate in Fate if fate.dies]


class Killed(BaseException):
    """The process has gone; not an Exception, so that no handler of ours survives it."""


class Actor:
    """A thread that runs only inside `step`, up to its next `pause`."""

    def __init__(self, name: str, body: Callable[[Actor], None]) -> None:
        self.name = name
        self.at = "start"  # where it stands
        self.done = False
        self.killed = False
        self.error: BaseException | None = None
        self.cut = 0.5  # where a pipeline is cut, as a share of its commands
        self._fate = Fate.WORKS
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True, name=name)
        self._thread.start()

    def _run(self, body: Callable[[Actor], None]) -> None:
        self._go.acquire()
        try:
            if not self.killed:
                body(self)
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self._back.release()

    def step(self, fate: Fate = Fate.WORKS) -> None:
        """Go on to the next pause. Raises what the actor died of, if that was not the test."""
        if self.done:
            return
        self._fate = fate
        self._go.release()
        assert self._back.acquire(timeout=30), f"{self.name} hangs at {self.at}"
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def pause(self, at: str) -> Fate:
        """Called by the actor: stand here until the test goes on."""
        if self.killed:
            raise Killed
        self.at = at
        self._back.release()
        self._go.acquire()
        if self.killed:
            raise Killed
        if self._fate.dies:
            self.killed = True
            if self._fate is Fate.DIES_BEFORE:
                raise Killed
        return self._fate

    def is_running_here(self) -> bool:
        return threading.current_thread() is self._thread

    def kill(self) -> None:
        """End it wherever it stands."""
        if not self.done:
            self.killed = True
            self.step()


@dataclass
class Wire:
    """Between one actor and Redis."""

    client: Any
    actor: Actor | None = None  # None: everything works at once
    late: list[Callable[[], Any]] = field(default_factory=list)  # shared by all wires

    def pass_on(
        self, what: str, whole: Callable[[], Any], part: Callable[[float], Any] | None = None
    ) -> Any:
        if self.actor is None or not self.actor.is_running_here():
            return whole()
        fate = self.actor.pause(what)
        if fate is Fate.WORKS:
            return whole()
        if fate in (Fate.LOST_REPLY, Fate.DIES_AFTER):
            whole()
        elif fate in (Fate.LATE, Fate.DIES_LATE):
            self.late.append(whole)
        elif fate in (Fate.CUT, Fate.DIES_WITHIN) and part is not None:
            part(self.actor.cut)
        if fate.dies:
            raise Killed
        raise redis.ConnectionError(f"made up: {fate.value}")


class FaultyRedis:
    """What our services need of redis.Redis, each round trip at the test's mercy."""

    def __init__(self, wire: Wire) -> None:
        self._wire, self._real = wire, wire.client

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> FaultyPipeline:
        return FaultyPipeline(self._wire)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        args = _without_block(args)
        return self._wire.pass_on(str(args[0]), lambda: self._real.execute_command(*args))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._wire.pass_on(name, lambda: method(*args, **kwargs))

        return call


class FaultyPipeline(Pipeline):
    """Not a transaction: a connection may break between any two of its commands."""

    def __init__(self, wire: Wire) -> None:
        real = wire.client
        super().__init__(real.connection_pool, real.response_callbacks, False, None)
        self._wire = wire

    def execute(self, raise_on_error: bool = True) -> Any:
        stack = list(self.command_stack)
        self.reset()
        names = " ".join(str(args[0]) for args, _ in stack[:3])
        return self._wire.pass_on(
            f"pipeline of {len(stack)}: {names}",
            lambda: self._send(stack, raise_on_error),
            lambda share: self._send(stack[: int(len(stack) * share)], False),
        )

    def _send(self, stack: list[Any], raise_on_error: bool) -> Any:
        with self._wire.client.pipeline(transaction=False) as pipe:
            for args, options in stack:
                pipe.execute_command(*args, **options)
            return pipe.execute(raise_on_error=raise_on_error)


def _without_block(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if "BLOCK" not in args:
        return args
    at = args.index("BLOCK")
    return args[:at] + args[at + 2 :]


class Inline(Executor):
    """A worker's stager without a thread: what is submitted is done at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
