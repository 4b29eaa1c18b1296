"""The thread that keeps one host's share of a pool running, in the numbers that are wanted.

It starts every child itself (see Child on why), looks at them several times a second and at
Redis twice a second: the wanted numbers stand in the hash `sw:pool`, so `slackwater scale` needs
no connection to the launcher. It never talks to the coordinator.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError

from common.connect import plain
from common.keys import Keys
from common.redis_url import shown
from common.stage import STAGES
from services.pool.child import Child
from services.pool.claim import Claim
from services.pool.hung import HungChildren
from services.pool.redis_server import FLOOR, parse_version
from services.pool.rolling import Rolling

log = logging.getLogger("slackwater.pool")

COORDINATOR, REDIS, GATEWAY, CELERY = "coordinator", "redis", "gateway", "celery"
DOWN = "down"  # the field "{host}/down" asks the launcher to stop
RESTART = "restart"  # "{host}/restart" asks it to replace children one by one
LOOK_S = 0.5
LOOK_UNSETTLED_S = 0.05
READ_S = 5.0  # how often the workers' records are read while nothing changes
REDIS_START_S = 30.0
MOST_WORKERS = 256  # of one stage on one host; a mistyped number must not take the machine down

# Makes the child for a role and an index, not yet started.
MakeChild = Callable[[str, int], Child]


class PoolError(RuntimeError):
    """The pool could not be started or brought to what was asked; the message says why."""


def connect(url: str) -> redis.Redis:
    """Fails within 2 s where Redis hangs: this thread has processes to watch."""
    return plain(url, 2.0, 2.0)


class Supervisor(threading.Thread):
    """Owns the children from `start()` to the end of `run`; other threads only ask."""

    def __init__(
        self,
        make: MakeChild,
        redis_url: str,
        keys: Keys,
        host: str,
        counts: dict[str, int],
        stop_s: float,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(name="supervisor", daemon=True)
        self.make, self.url, self.keys, self.host = make, redis_url, keys, host
        self.wanted = dict(counts)
        self.stop_s, self.say = stop_s, say
        self.children: list[Child] = []
        self.settled = threading.Event()
        self.over = threading.Event()
        self.down_asked = threading.Event()
        self.failure: BaseException | None = None
        self._redis = connect(redis_url)
        self._claim = Claim(self._redis, keys.launcher(host))
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._was_up = False
        self._lock = threading.Lock()
        self._look_at = 0.0
        self._wishes = self._wishes_read = 0
        self._hung, self._read_at = HungChildren(), 0.0
        self._rolling = Rolling(self._succeed, self.of, say)

    # -- asked by other threads ----------------------------------------------------------

    def want(self, stage: str, count: int) -> None:
        """Write the wanted number where this thread, and everyone else, reads it."""
        try:
            self._redis.hset(self.keys.pool, f"{self.host}/{stage}", count)
        except (RedisError, OSError) as error:
            raise PoolError(f"the number was not changed, Redis is away: {error}") from error
        with self._lock:
            self._wishes += 1  # not settled before this thread has read them again
            self.settled.clear()
        self._look_at = 0.0
        self._wake.set()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()

    def of(self, role: str) -> list[Child]:
        """Children of a role, oldest first, without those that are on their way out."""
        with self._lock:
            return [c for c in self.children if c.role == role and not c.leaving]

    # -- the thread ----------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._bring_up()
            while not self._stopping.is_set():
                self._tend()
                self._wake.wait(LOOK_UNSETTLED_S if not self.settled.is_set() else LOOK_S / 2)
                self._wake.clear()
        except BaseException as error:
            self.failure = error
        finally:
            try:
                self._bring_down()
            finally:
                self.over.set()
                self.settled.set()  # whoever waits sees `failure`

    def _bring_up(self) -> None:
        if self.wanted.get(REDIS):
            self._add(REDIS)
        self._await_redis()
        self._claim_host()
        for role, count in self.wanted.items():
            for _ in range(count if role != REDIS else 0):
                self._add(role)

    def _await_redis(self) -> None:
        deadline = time.monotonic() + REDIS_START_S
        while not self._stopping.is_set():
            for child in self.children:
                self._check_first_days(child)
            try:
                self._redis.ping()  # unlike INFO, refused while it reads its data from disk
                info: dict[str, Any] = self._redis.info("server")  # type: ignore[assignment]
            except (RedisError, OSError) as error:
                loading = isinstance(error, BusyLoadingError)
                refused = isinstance(error, AuthenticationError)  # it would be in half a minute too
                if refused or (time.monotonic() > deadline and not loading):
                    raise PoolError(
                        f"Redis at {shown(self.url)} does not answer: {error}"
                    ) from error
                time.sleep(0.02)
                continue
            if parse_version(str(info["redis_version"])) < FLOOR:
                raise PoolError(
                    f"Redis at {shown(self.url)} is version {info['redis_version']}; "
                    f"{'.'.join(map(str, FLOOR))} or later is needed"
                )
            return

    def _claim_host(self) -> None:
        if (other := self._claim.held_by_another()) is not None:
            raise PoolError(
                f"`slackwater up` runs on {self.host} already (pid {other}); change its numbers "
                "with `slackwater scale`, or give this one a name with --host"
            )
        self._beat()
        fields = {f"{self.host}/{s}": self.wanted.get(s, 0) for s in STAGES}
        self._redis.hset(self.keys.pool, mapping=fields)  # type: ignore[arg-type]
        self._redis.hdel(self.keys.pool, f"{self.host}/{DOWN}", f"{self.host}/{RESTART}")

    def _beat(self) -> None:
        self._claim.renew({stage: len(self.of(stage)) for stage in STAGES})

    # -- tending -------------------------------------------------------------------------

    def _tend(self) -> None:
        now = time.monotonic()
        for child in list(self.children):
            self._check_first_days(child)
            how = child.died()
            if how or (child.leaving and not child.pid):
                self._note_end(child, how)
            elif child.process is None and not child.leaving and now >= child.restart_at:
                self._start(child)
        if now >= self._look_at:
            self._look_at = now + (LOOK_S if self.settled.is_set() else LOOK_UNSETTLED_S)
            try:
                self._beat()
                self._read_wanted()
                self._answer_restart()
                if now >= self._read_at or not all(child.ready for child in self.children):
                    self._read_at = now + READ_S
                    self._read_ready()
            except (RedisError, OSError) as error:
                log.debug("Redis is away: %s", error)
        self._rolling.tend(self.children)
        for stage in STAGES:
            self._match(stage)
        self._note_settled()

    def _check_first_days(self, child: Child) -> None:
        """A child that never became ready, at the start, would not next time either."""
        how = child.died()
        if how and not self._was_up and not child.leaving:
            raise PoolError(
                f"{child.name} {how} before it was ready. Its log ({child.log}) ends:\n"
                f"{child.last_words() or '(empty)'}"
            )

    def _start(self, child: Child) -> None:
        """What the machine has no room for now is tried again later: the others go on."""
        try:
            child.start()
        except OSError as error:
            why = f"{child.name} could not be started: {error}"
            if not self._was_up:
                raise PoolError(why) from error
            child.bury()
            self.settled.clear()
            if child.refused != why:
                child.refused = why
                self.say(f"{why}; trying again")

    def _note_end(self, child: Child, how: str) -> None:
        if child.leaving:
            with self._lock:
                self.children.remove(child)
            child.close()
            return
        pid = child.pid
        child.bury()
        if child.role in STAGES:
            self._end_lease(pid)
        self.settled.clear()
        if not child.said:
            child.said = True
            self.say(f"{child.name} (pid {pid}) {how}; starting it again, log: {child.log}")

    def _end_lease(self, pid: int) -> None:
        """A worker that is known to be dead need not be waited for until its lease runs out."""
        try:
            for name in self._names():
                key = self.keys.worker(name)
                if self._redis.hmget(key, "host", "pid") == [self.host.encode(), b"%d" % pid]:
                    self._redis.delete(key)
        except (RedisError, OSError) as error:
            log.debug("Redis is away: %s", error)

    def _read_wanted(self) -> None:
        wishes = self._wishes
        fields = [f"{self.host}/{name}" for name in (*STAGES, RESTART, DOWN)]
        values: list[bytes | None] = self._redis.hmget(self.keys.pool, fields)  # type: ignore[assignment]
        for stage, value in zip(STAGES, values[:-2], strict=True):
            if value is not None and value.isdigit():
                self.wanted[stage] = min(MOST_WORKERS, int(value))
        self._wishes_read = wishes
        if values[-2] is not None and self._was_up:  # later: nothing is there to be replaced
            self._rolling.ask(values[-2].decode())
        if values[-1] is not None:
            self.down_asked.set()

    def _answer_restart(self) -> None:
        answer, field = self._rolling.answer, f"{self.host}/{RESTART}"
        if answer is None:
            return
        if answer:
            self._redis.hset(self.keys.pool, field, answer)
        else:
            self._redis.hdel(self.keys.pool, field)
        self._rolling.done()

    def _read_ready(self) -> None:
        """A worker is ready once it has registered, the others once they say so themselves; a
        coordinator also needs one that leads, Celery's side one that reads the outbox."""
        names = self._names()
        pipe = self._redis.pipeline(transaction=False)
        pipe.exists(self.keys.leader)
        pipe.exists(self.keys.sender)
        for name in names:
            pipe.hmget(self.keys.worker(name), "host", "pid", "hung")
        leading, sending, *found = pipe.execute()
        ours = [(int(pid), hung) for host, pid, hung in found if host == self.host.encode() and pid]
        pids = {pid for pid, _ in ours}
        served = {COORDINATOR: bool(leading), CELERY: bool(sending)}
        self._end_hung([pid for pid, hung in ours if hung])
        for child in self.children:
            if child.role == REDIS:
                child.ready = child.process is not None
            elif child.role in STAGES:
                child.ready = child.pid in pids
            else:
                child.ready = child.announced() and served.get(child.role, True)
            if child.ready:
                child.said = False

    def _end_hung(self, hung: list[int]) -> None:
        overdue = self._hung.overdue(hung, time.monotonic())
        for child in self.children:
            if child.process is not None and child.pid in overdue:
                self.say(f"{child.name} (pid {child.pid}) hangs and is killed")
                child.process.kill()

    def _names(self) -> list[str]:
        members: set[bytes] = self._redis.smembers(self.keys.workers)  # type: ignore[assignment]
        return sorted(name.decode() for name in members)

    def _match(self, stage: str) -> None:
        """As many children of `stage` as wanted; the youngest leaves first."""
        here, wanted = self.of(stage), self.wanted[stage] + self._rolling.surplus(stage)
        if len(here) != wanted:
            self.settled.clear()
            if self._was_up:
                self.say(f"{stage} workers: {len(here)} → {wanted}")
        for _ in range(wanted - len(here)):
            self._add(stage)
        for child in here[wanted:]:
            child.ask_to_stop()

    def _add(self, role: str, like: Child | None = None) -> Child:
        used = {child.name for child in self.children}
        child = next(c for i in range(1, 10_000) if (c := self.make(role, i)).name not in used)
        if like is not None:
            child.follow(like)
        self._start(child)
        with self._lock:
            self.children.append(child)
        return child

    def _succeed(self, old: Child) -> Child:
        self.settled.clear()
        return self._add(old.role, like=old)

    def _note_settled(self) -> None:
        if self.settled.is_set() or self._rolling.under_way:
            return
        if not all(child.ready and not child.leaving for child in self.children):
            return
        with self._lock:
            if self._wishes_read == self._wishes:
                self._was_up = True
                self.settled.set()

    # -- the end -------------------------------------------------------------------------

    def _bring_down(self) -> None:
        """No more requests, then workers drain, then the coordinator, then Redis: each still needs
        the next."""
        until = time.monotonic() + self.stop_s
        for roles in ({GATEWAY, CELERY}, set(STAGES), {COORDINATOR}):
            leaving = [child for child in self.children if child.role in roles]
            for child in leaving:
                child.ask_to_stop()
            for child in leaving:
                patience = until if self._answers() else min(until, time.monotonic() + 1.0)
                if not child.wait(patience):
                    self.say(f"{child.name} did not stop in time and was killed")
        try:
            names = [f"{self.host}/{name}" for name in (*STAGES, RESTART, DOWN)]
            self._redis.hdel(self.keys.pool, *names)
            self._claim.give_up()
            self._redis.close()
        except (RedisError, OSError):
            pass  # its lease runs out
        for child in self.children:
            if child.role == REDIS:
                child.ask_to_stop()
                child.wait(time.monotonic() + 20.0)
            child.close()

    def _answers(self) -> bool:
        """Whether Redis is there: a worker drains by telling it, and waits while it is not."""
        try:
            return bool(self._redis.ping())
        except (RedisError, OSError):
            return False


def orphan_signal(role: str) -> int:
    """What the kernel sends when the launcher was killed: Redis may still write its log out."""
    return signal.SIGTERM if role == REDIS else signal.SIGKILL


def log_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"
