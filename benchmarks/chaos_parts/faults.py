"""Carries the plan out: chooses each victim among those that are well, hurts it, mends it later."""

from __future__ import annotations

import heapq
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.chaos_parts.members import COORDINATOR, Member, Members
from benchmarks.chaos_parts.plan import Fault
from common.stage import STAGES

if TYPE_CHECKING:
    from benchmarks.chaos_parts.ledger import Ledger

# A fault whose victim is not there (it lies dead from an earlier one) is tried again.
AGAIN_S = 0.5
# A worker is hurt in the middle of a task, if it has one within this time.
IDLE_S = 3.0
GIVE_UP_S = 60.0
LOST_REPLIES = 6
CLIENT_S = 5.0


@dataclass(slots=True)
class Happened:
    """One fault as it was carried out; times are monotonic seconds."""

    kind: str
    at_s: float
    victim: str
    pid: int
    seq: int  # the last dispatch before it, so far as known
    was_busy: bool = False  # a worker in the middle of a task


class Director:
    """Runs faults at their times; `step` does what is due and says when to come again."""

    def __init__(self, members: Members, ledger: Ledger, plan: list[Fault], begin_s: float) -> None:
        self.members, self.ledger, self._begin_s = members, ledger, begin_s
        self._count = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        for fault in plan:
            self._at(begin_s + fault.at_s, partial(self._inflict, fault))

    @property
    def is_done(self) -> bool:
        return not self._due

    def step(self) -> float:
        """Seconds until the next thing is due."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else 0.0

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (at_s, self._count, action))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._at(time.monotonic() + seconds, action)

    def _inflict(self, fault: Fault) -> None:
        if time.monotonic() > self._begin_s + fault.at_s + GIVE_UP_S:
            print(f"{fault.kind}: nobody to hurt for {GIVE_UP_S:.0f} s", file=sys.stderr)
        elif not self._try(fault):
            self._later(AGAIN_S, partial(self._inflict, fault))

    def _try(self, fault: Fault) -> bool:
        if fault.kind.startswith("redis_"):
            return self._redis(fault)
        if fault.kind.startswith("client_"):
            return self._client(fault)
        victim = self._victim(fault)
        if victim is None:
            return False
        self._hurt_in_task(fault, victim, time.monotonic())
        return True

    def _hurt_in_task(self, fault: Fault, victim: Member, since_s: float) -> None:
        """Hurt a worker as soon as it is busy; if it has nothing to do for long, nevertheless."""
        late = time.monotonic() - since_s > IDLE_S
        if not victim.is_well:
            self._inflict(fault)  # another fault took it meanwhile
        elif late or victim.role == COORDINATOR or self.members.is_busy(victim):
            self._hurt(fault, victim)
        else:
            self._later(0.003, partial(self._hurt_in_task, fault, victim, since_s))

    def _hurt(self, fault: Fault, victim: Member) -> None:
        busy = victim.role != COORDINATOR and self.members.is_busy(victim)
        pid, at = victim.pid, time.monotonic()
        what, _, _ = fault.kind.partition("_")
        if what == "kill":
            victim.kill()
            self._later(fault.hold_s, partial(self.members.start, victim))
        elif what == "freeze":
            victim.signal(signal.SIGSTOP)
            victim.frozen = True
            self._later(fault.hold_s, partial(self._thaw, victim))
        elif what == "drain":
            victim.leaving = True
            victim.signal(signal.SIGTERM)
            self._later(fault.hold_s, partial(self._start_once_gone, victim))
        else:
            self._hurt_link(fault, victim)
        self._note(fault.kind, at, victim.name, pid, busy)

    def _victim(self, fault: Fault) -> Member | None:
        who = fault.kind.rpartition("_")[2] if "kill" in fault.kind else fault.kind
        leader = self.members.leader()
        if "leader" in who:
            return leader
        if who == "standby":
            others = [m for m in self.members.of(COORDINATOR) if m is not leader]
            return others[0] if leader is not None and others else None
        stages = [who] if who in STAGES else STAGES
        found = [m for m in self.members.of(*stages) if not m.link.is_cut]
        # A busy denoiser is what hurts most: half of the worker faults take one.
        if who not in STAGES and fault.pick < 0.5:
            found = [m for m in found if m.role == "denoise"] or found
        return found[int(fault.pick * 997) % len(found)] if found else None

    def _hurt_link(self, fault: Fault, victim: Member) -> None:
        link = victim.link
        if fault.kind.endswith("cut"):
            link.cut()
        elif fault.kind.endswith("silence"):
            link.is_silent = True
        elif fault.kind.endswith("slow"):
            link.delay_s = 0.15
        elif fault.kind.endswith("forgotten"):
            link.forget()
        else:
            link.replies_to_lose = LOST_REPLIES
        self._later(fault.hold_s, link.mend)

    def _thaw(self, victim: Member) -> None:
        victim.signal(signal.SIGCONT)
        victim.frozen = False

    def _start_once_gone(self, victim: Member) -> None:
        if victim.is_alive:
            self._later(0.2, partial(self._start_once_gone, victim))
        else:
            self.members.start(victim)

    # -- Redis and clients ---------------------------------------------------------------

    def _redis(self, fault: Fault) -> bool:
        if not self.members.redis_is_well:
            return False
        self.ledger.look()
        at = time.monotonic()
        if fault.kind == "redis_kill":
            pid = self.members.kill_redis()
            self._later(fault.hold_s, self.members.start_redis)
        else:
            pid = self.members.signal_redis(signal.SIGSTOP)
            self._later(fault.hold_s, self._wake_redis)
        self._note(fault.kind, at, "redis", pid)
        return True

    def _wake_redis(self) -> None:
        self.members.signal_redis(signal.SIGCONT)

    def _client(self, fault: Fault) -> bool:
        """Killed with half of its push sent, or with the push done and its reply lost; or the
        reply is lost on clients that go on."""
        at = time.monotonic()
        if fault.kind == "client_lost_replies":
            self.members.client_link.replies_to_lose = LOST_REPLIES
            self._later(fault.hold_s, self.members.client_link.mend)
            self._note(fault.kind, at, "clients", 0)
            return True
        if not self.members.redis_is_well:
            return False
        link = self.members.proxy.link()
        half = fault.pick < 0.5
        link.halve_next, link.replies_to_lose = half, int(not half)
        job = self.ledger.spare_job(fault.pick)
        client = self.members.push_and_die(job.id, job.params, link)
        link.was_hit.wait(CLIENT_S)
        client.kill()
        client.join(CLIENT_S)
        self._note(fault.kind, at, job.id, client.pid or 0)
        self.ledger.serve(job)  # again, by a client that lives
        return True

    def _note(self, kind: str, at: float, victim: str, pid: int, busy: bool = False) -> None:
        self.ledger.faults.append(Happened(kind, at, victim, pid, self.ledger.last_seq(), busy))
