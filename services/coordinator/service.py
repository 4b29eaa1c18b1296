"""The coordinator's hands: reads the streams, asks the core, carries out what it wants.

Single-threaded and synchronous: one round trip reads all three streams, one more carries out
everything the core decided. It decides nothing itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from common.clock import Clock, keep_right, patient_clock
from common.keys import Keys
from common.messages import MessageError, unpack_report
from common.outage import cannot_now
from common.scripts import Scripts, Transitions, Ttls, text
from services.coordinator import events as ev
from services.coordinator.core import Core
from services.coordinator.effects import OutOfStep, answer_of, call_of, check_fence
from services.coordinator.leader import Fenced, Leadership
from services.coordinator.narration import Narration
from services.coordinator.records import (
    read_active,
    read_manifests,
    read_profiles,
    read_workers,
)
from services.coordinator.replicas import Replicas
from services.coordinator.steering import Steering
from services.coordinator.watching import Watchers
from services.janitor import Janitor

log = logging.getLogger("slackwater.coordinator")

# Entries taken from each stream in one read: enough to amortise a round trip, few enough
# that a burst of pushes delays a report by milliseconds only.
READ_COUNT = 128
# At most this long without a look at the leases; a third of a shorter one, its own or a worker's.
BLOCK_MS = 500
# Of effects that follow from each other: then reports are read, and the lease is kept, before the
# policy is asked again.
MOST_ROUNDS = 32
LIVENESS_S = 1.0
# Between two looks at Redis' clock, and a change of it that is no mere drift.
CLOCK_S, JUMP_S = 10.0, 1.0
SAVE_COSTS_S = 10.0
# Between two rounds of the janitor, and between two pages of keys within one.
SWEEP_S, SWEEP_PAGE_S = 60.0, 0.05


class Coordinator:
    """Leads a pool: call `lead()` until it is True, then `step()` for ever."""

    def __init__(
        self,
        redis: Any,
        keys: Keys,
        ttls: Ttls,
        make_core: Callable[[], Core],
        lease_s: float = 3.0,
        worker_lease_s: float = 5.0,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
        wait_replicas: int = 0,
    ) -> None:
        self.redis = redis
        self.keys = keys
        self.clock = clock or patient_clock(redis)
        self.scripts = Scripts(redis)
        self.transitions = Transitions(keys, ttls, Leadership.new_nonce())
        self.leadership = Leadership(self.scripts, self.transitions, lease_s)
        self.worker_lease_s = worker_lease_s
        self._sleep = sleep
        self._replicas = Replicas(redis, wait_replicas)
        self._make_core = make_core
        self.core = make_core()
        self.steering = Steering(redis, keys, self.core.policy.name)
        self.watchers = Watchers([Narration()])
        self.leads = self.away = False
        self.lost_leads = self.outages = 0
        self._answered_s = -math.inf  # when Redis last answered
        self._well_since = 0.0  # it has answered ever since: so it has to workers, if they live
        self._looked = 0.0
        self._saved = 0.0
        self._clock_set = -math.inf
        self._janitor = Janitor(redis, keys, ttls, self.clock)
        self._sweep_at = math.inf

    # -- leadership ----------------------------------------------------------------------

    def lead(self) -> bool:
        """Try to become leader; on success the core is rebuilt from the records.

        Under a new nonce each time: a command sent before a lost connection may still arrive.
        """
        nonce = Leadership.new_nonce(self.transitions.nonce)
        self.transitions = dataclasses.replace(self.transitions, nonce=nonce)
        self.leadership.transitions = self.transitions
        self._set_clock()
        now = self.clock()
        leads = self.leadership.take(now)
        self._answered(now)
        if not leads:
            return False
        self.rebuild()
        self.leads = True
        return True

    def rebuild(self) -> None:
        now = self.clock()
        self.core = core = self._make_core()
        core.seq = int(self.redis.get(self.keys.seq) or 0)
        core.costs.load(
            {
                name.decode("utf-8", "replace"): seconds.decode("utf-8", "replace")
                for name, seconds in self.redis.hgetall(self.keys.costs).items()
            }
        )
        self._load_profiles()
        core.handle(ev.ManifestsRead(read_manifests(self.redis, self.keys)), now)
        names = sorted(text(name) for name in self.redis.smembers(self.keys.workers))
        for name, worker in read_workers(self.redis, self.keys, names).items():
            # One whose lease ran out may be alive and only have missed a Redis that was away.
            core.handle(ev.Joined(worker or ev.WorkerInfo(name, "", (), "")), now)
        effects: list[ev.Effect] = []
        # By seq: a worker runs its tasks in the order of their dispatch.
        for recovered in sorted(read_active(self.redis, self.keys), key=lambda r: r.seq):
            effects += core.handle(recovered, now)
        self.steering.begin()
        self._sweep_at = now + SWEEP_S
        log.info("leading: %d jobs, %d workers", len(core.jobs), len(core.board.workers))
        self._carry_out(effects)

    def _set_clock(self) -> bool:
        """True if it has jumped: every moment that was remembered here is of another time."""
        self._clock_set = time.monotonic()
        moved_s = keep_right(self.clock, self.redis)
        if abs(moved_s) < JUMP_S:
            return False
        log.warning("Redis' clock is %+.1f s from where it was believed to be", moved_s)
        self._answered_s, self._looked, self._saved = -math.inf, -math.inf, -math.inf
        return True

    def _answered(self, now: float) -> None:
        """Redis answered. Who has been silent for a lease is dead only if Redis was there for all
        of it; a long gap means that it, or this process, may not have been."""
        if now - self._answered_s > self.worker_lease_s / 2:
            self._well_since = now
        self._answered_s = now
        if self.away:
            log.warning("Redis is back")
            self.away = False

    # -- the loop ------------------------------------------------------------------------

    def run(
        self, should_stop: Callable[[], bool], ready: Callable[[], None] = lambda: None
    ) -> None:
        """Lead whenever possible until told to stop; survives Redis going away.

        `ready` is called whenever it leads, or has heard that another does.
        """
        pause = 0.1
        shortest_s = min(self.leadership.lease_s, self.worker_lease_s)
        block_ms = min(BLOCK_MS, int(1000 * shortest_s / 3))
        while not should_stop():
            try:
                leads = self.leads or self.lead()
                ready()
                if not leads:
                    self._sleep(self.leadership.lease_s / 6)
                    continue
                self.step(block_ms)
                pause = 0.1
            except (Fenced, OutOfStep) as error:
                log.warning("%s; starting over from the records", error)
                self.lost_leads += isinstance(error, Fenced)
                self.leads = False
            except (RedisError, OSError) as error:
                if isinstance(error, ResponseError) and not cannot_now(error):
                    log.exception("Redis refused; starting over in %.1f s", pause)
                elif not self.away:  # once, not at every try
                    log.warning("Redis is away (%s); trying again", error)
                    self.away = True
                    self.outages += 1
                self.leads, self._answered_s = False, -math.inf
                self._sleep(pause)
                pause = min(1.0, pause * 2)
        if self.leads:
            with contextlib.suppress(RedisError, OSError):
                self._save_costs()
                self.leadership.release()
            self.leads = False

    def step(self, block_ms: int) -> bool:
        """Read what came, act on it, decide. True if there was anything."""
        now = self.clock()
        self.leadership.keep(now)
        self._answered(now)
        if time.monotonic() - self._clock_set >= CLOCK_S and self._set_clock():
            raise OutOfStep("Redis' clock has jumped")
        if now - self._looked >= LIVENESS_S:
            self._look_for_the_dead(now)
            self._steer(now)
        if now - self._saved >= SAVE_COSTS_S:
            self._save_costs()
            self._load_profiles()
        if now >= self._sweep_at:
            self._sweep(now)
        if self.core.wake_at is not None:
            block_ms = min(block_ms, max(1, int(1000 * (self.core.wake_at - now))))
        entries = self._read(block_ms)
        now = self.clock()
        effects: list[ev.Effect] = []
        handled: list[str] = []
        for stream, entry, fields in entries:
            if stream == self.keys.reports:
                handled.append(entry)
            for event in self._events_of(stream, entry, fields):
                self.watchers.heard(event, self.core, now)
                effects += self.core.handle(event, now)
        effects += self.core.handle(ev.Tick(), now)
        self._carry_out(effects, handled)
        return bool(entries)

    def _read(self, block_ms: int) -> list[tuple[str, str, dict[bytes, bytes]]]:
        streams = {self.keys.reports: "0", self.keys.cancel: "0"}
        if self.core.manifests:  # before the first worker came nobody can tell good from bad
            streams[self.keys.jobs] = "0"
        # redis-py's own xread changes shape with the protocol version; the plain reply does not.
        reply = self.redis.execute_command(
            "XREAD", "COUNT", READ_COUNT, "BLOCK", max(1, block_ms), "STREAMS",
            *streams, *streams.values(),
        )  # fmt: skip
        found = reply.items() if isinstance(reply, dict) else reply or ()
        entries = []
        for stream, items in found:
            if items and isinstance(items[0], list) and items[0] and isinstance(items[0][0], list):
                items = items[0]  # RESP3 wraps once more
            for entry, fields in items:
                if not isinstance(fields, dict):
                    fields = dict(zip(fields[::2], fields[1::2], strict=True))
                entries.append((text(stream), text(entry), fields))
        return entries

    def _events_of(self, stream: str, entry: str, fields: dict[bytes, bytes]) -> list[ev.Event]:
        if stream == self.keys.jobs:
            return [ev.Pushed(entry, fields)]
        if stream == self.keys.cancel:
            return [ev.CancelAsked(entry, fields.get(b"id", b"").decode("utf-8", "replace"))]
        kind = fields.get(b"kind")
        if kind == b"report":
            try:
                report = unpack_report(fields[b"body"])
            except MessageError as error:
                # What it says stands in the trajectories, as the core does not know it.
                log.error("dropped a report that cannot be read: %s", error)
                check_fence(self.scripts.one(self.transitions.ack([entry])))
                raise OutOfStep("a report could not be read") from error
            flags = fields.get(b"flags", b"")
            return [ev.Reported(report, tuple(flag == ord("1") for flag in flags))]
        name = text(fields.get(b"worker", b""))
        if kind == b"bye":
            if b"why" in fields:
                why = text(fields[b"why"])
                log.error("worker %s took itself out: %s", name, why, extra={"worker": name})
            return [ev.Left(name, lost=False)]
        worker = read_workers(self.redis, self.keys, [name])[name]
        if worker is None:
            return []
        said = {"worker": name, "stage": worker.stage}
        models = " ".join(worker.models)
        log.info("worker %s joined: %s, %s", name, worker.stage, models, extra=said)
        manifests = read_manifests(self.redis, self.keys)
        return [ev.ManifestsRead(manifests), ev.Joined(worker)]

    def _carry_out(self, effects: list[ev.Effect], handled: Sequence[str] = ()) -> None:
        """Delete the reports that were `handled`, run `effects`, tell the core how each went, and
        go on with what it wants then."""
        pending, acks = effects, [self.transitions.ack(handled)] if handled else []
        rounds = 0
        while pending or acks:
            rounds += 1
            sent = self.clock()
            calls = [call_of(effect, self.transitions, sent) for effect in pending]
            replies = self.scripts.run([*acks, *calls])
            if any(isinstance(effect, ev.Submit | ev.Finish) for effect in pending):
                self._replicas.wait()
            if acks:
                check_fence(replies.pop(0))
                acks = []
            now = self.clock()
            following: list[ev.Effect] = []
            changed = False
            for effect, reply in zip(pending, replies, strict=True):
                answer = answer_of(effect, reply)
                if not isinstance(reply, Exception):
                    self.watchers.did(effect, text(reply[0]), self.core, sent)
                if answer is not None:
                    changed = True
                    self.watchers.heard(answer, self.core, now)
                    following += self.core.handle(answer, now)
            if changed and not _only_dispatched(pending, replies):
                if rounds < MOST_ROUNDS:
                    following += self.core.handle(ev.Tick(), now)
                else:
                    self.core.wake_at = now  # at the next step, which begins at once
            pending = following

    # -- housekeeping --------------------------------------------------------------------

    def _look_for_the_dead(self, now: float) -> None:
        """Notice workers that came without a word, those whose lease ran out, and those that
        get nothing done."""
        self._looked = now
        names = sorted(text(name) for name in self.redis.smembers(self.keys.workers))
        effects: list[ev.Effect] = []
        found = read_workers(self.redis, self.keys, names)
        for name, worker in found.items():
            known = self.core.board.workers.get(name)
            if worker is not None and worker != known:
                effects += self.core.handle(ev.Joined(worker), now)
            elif worker is None and now >= self._well_since + self.worker_lease_s:
                log.warning("worker %s is gone: its lease ran out", name, extra={"worker": name})
                left = ev.Left(name, lost=True)
                self.watchers.heard(left, self.core, now)
                effects += self.core.handle(left, now)
        for name in set(self.core.board.workers) - set(names):
            effects += self.core.handle(ev.Left(name, lost=False), now)
        beats = ev.Beats(tuple(worker for worker in found.values() if worker is not None))
        effects += self.core.handle(beats, now)
        self._carry_out(effects)

    def _sweep(self, now: float) -> None:
        """One page of what may be left over. Raises OutOfStep where jobs were put right."""
        self._sweep_at = now + SWEEP_S  # so late also where this page cannot be read
        if self._janitor.step():
            self._sweep_at = now + SWEEP_PAGE_S
        elif self._janitor.counts["jobs"] or self._janitor.counts["unlisted"]:
            raise OutOfStep("the records of some jobs had to be put right")

    def _steer(self, now: float) -> None:
        chosen = self.steering.look()
        if chosen is not None:
            self.core.handle(chosen, now)
        self.steering.tell(self.core.policy)

    def _load_profiles(self) -> None:
        """Tables that `slackwater profile` left; one that is known already changes nothing."""
        for model, profile in read_profiles(self.redis, self.keys).items():
            self.core.costs.set_table(model, profile.fits)

    def _save_costs(self) -> None:
        """What is known now stands in place of what was: shapes forgotten here go there, too."""
        self._saved = self.clock()
        learned = self.core.costs.dump()
        if learned:
            mapping = {k: json.dumps(v) for k, v in learned.items()}
            replace = self.redis.pipeline(transaction=True)
            replace.delete(self.keys.costs).hset(self.keys.costs, mapping=mapping)
            with contextlib.suppress(OutOfMemoryError):  # it is a convenience
                replace.execute()


def _only_dispatched(effects: list[ev.Effect], replies: list[Any]) -> bool:
    """True where nothing happened that could change a decision: all dispatches went through."""
    return all(
        (isinstance(effect, ev.Dispatch) and reply[0] == b"dispatched")
        or isinstance(effect, ev.Finish | ev.Refresh | ev.Yield | ev.Refuse)
        for effect, reply in zip(effects, replies, strict=True)
        if not isinstance(reply, RedisError)
    )
