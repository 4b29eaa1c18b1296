"""A pool in one process: real coordinators and workers as actors (tests/faults.py) over a real
Redis and no-op stages, on a clock that the test moves."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from common.arena import Arena
from common.handles import Handle, HandleStore
from common.inbox import Pending
from common.keys import Keys
from common.noop import NoopCosts, NoopStage
from common.params import PoolDefaults
from common.scripts import Ttls
from common.stage import DECODE, DENOISE, ENCODE, STAGES, Control, Outcome, Task
from common.worker import Identity, Worker
from services.coordinator.admission import Admission
from services.coordinator.core import Core
from services.coordinator.service import Coordinator
from services.costs.model import CostModel
from services.policies import make_policy
from services.policies.base import View
from tests.faults import DEATHS, FAULTS, Actor, Fate, FaultyRedis, Inline, Wire

COSTS = NoopCosts(encode_s=0.05, step_s=0.1, decode_s=0.05)
POISON = "poison"
WORKER_LEASE_S = 5.0
# In Redis a lease never runs out by itself here: a test takes it away.
FOREVER_S = 10_000.0


class SimulatedStage(NoopStage):
    """Stops at every denoising step; fails on poison; notes who ran which dispatch."""

    def __init__(self, kind: str, store: HandleStore, pool: Pool, name: str) -> None:
        super().__init__(kind, store, COSTS, self._step)
        self._pool, self._name = pool, name
        self.actor: Actor | None = None

    def _step(self, seconds: float) -> None:
        self._pool.now += seconds
        if self.actor is not None:
            self.actor.pause("step")

    def run(self, task: Task, staged: dict[str, bytes], control: Control) -> list[Outcome]:
        assert task.seq not in self._pool.ran_by, (
            f"seq {task.seq} was run by {self._pool.ran_by[task.seq]} and by {self._name}"
        )
        self._pool.ran_by[task.seq] = self._name
        if any(row.params["prompt"] == POISON for row in task.rows):
            raise RuntimeError("this prompt is poison")
        return super().run(task, staged, control)

    def free(self, handles: list[Handle]) -> None:
        if self.actor is not None and self.actor.is_running_here():
            self.actor.pause("free")
        super().free(handles)


class SimulatedWorker(Worker):
    """A worker whose background threads are moved by the test."""

    actor: Actor

    def begin(self, actor: Actor) -> None:
        self.actor = actor
        for thread in (self._inbox, self._pulse):
            thread.start = thread.join = lambda *_: None  # type: ignore[method-assign]
        self.run()

    def _next(self) -> Pending | None:
        while True:
            pending = self._inbox.poll()
            if pending is not None or self._draining.is_set():
                return pending
            self.actor.pause("idle")


class Pool:
    """Everything that runs, living and dead."""

    def __init__(self, client: Any, keys: Keys, arena: Arena, policy: str = "slack") -> None:
        self.client, self.keys, self.arena = client, keys, arena
        self.store = HandleStore("here", arena, client, keys.prefix)
        self.policy = policy
        self.now = time.time()
        self.late: list[Callable[[], Any]] = []
        self.ran_by: dict[int, str] = {}
        self.workers: list[SimulatedWorker] = []
        self.coordinators: list[Actor] = []
        self._minds: list[Coordinator] = []
        self.lost_workers = 0  # died, or lost their lease
        self.deserted = False  # at some moment nobody was there who could have freed a state
        self.is_deaf: Callable[[], bool] = lambda: False  # whether an inbox thread lags behind
        self._made = 0

    def clock(self) -> float:
        return self.now

    # -- who is there --------------------------------------------------------------------

    def add_worker(self, kind: str) -> SimulatedWorker:
        self._made += 1
        name = f"{kind}-{self._made}"
        stage = SimulatedStage(kind, self.store, self, name)
        wire = Wire(self.client, None, self.late)
        worker = SimulatedWorker(
            lambda: self.client,
            lambda: FaultyRedis(wire),
            self.keys,
            Ttls(),
            stage,
            Identity(name, kind, "noop", "here"),
            lease_s=FOREVER_S,
            clock=self.clock,
            stager=Inline(),
        )
        wire.actor = stage.actor = worker.actor = Actor(name, worker.begin)
        self.workers.append(worker)
        return worker

    def add_coordinator(self) -> Actor:
        self._made += 1
        wire = Wire(self.client, None, self.late)
        coordinator = Coordinator(
            FaultyRedis(wire),
            self.keys,
            Ttls(),
            self._core,
            lease_s=FOREVER_S,
            worker_lease_s=WORKER_LEASE_S,
            clock=self.clock,
            sleep=lambda _: actor.pause("sleep") and None,
        )
        wire.actor = actor = Actor(
            f"coordinator-{self._made}", lambda _: coordinator.run(lambda: False)
        )
        self.coordinators.append(actor)
        self._minds.append(coordinator)
        return actor

    def _core(self) -> Core:
        view = View(ranks=[], lead_s=0.05, chunk_s=0.3, pack_s=0.3)
        return Core(make_policy(self.policy), CostModel(), Admission(PoolDefaults()), view)

    def living_workers(self) -> list[SimulatedWorker]:
        return [worker for worker in self.workers if not worker.actor.done]

    def living_coordinators(self) -> list[Actor]:
        return [actor for actor in self.coordinators if not actor.done]

    # -- what happens --------------------------------------------------------------------

    def read_inbox(self, worker: SimulatedWorker) -> None:
        worker._inbox._block_ms = 1
        reply = self.client.exists(self.keys.tasks(worker.who.name))
        if reply:
            worker._inbox.read(FaultyRedis(Wire(self.client)))

    def beat(self, worker: SimulatedWorker) -> None:
        if worker.actor.at != "start":
            worker._beat()

    def expire_lease(self, worker: SimulatedWorker) -> None:
        self.lost_workers += 1
        self.client.delete(self.keys.worker(worker.who.name))

    def expire_lead(self) -> None:
        self.client.delete(self.keys.leader)

    def deliver_late(self, count: int | None = None) -> None:
        for _ in range(len(self.late) if count is None else min(count, len(self.late))):
            self.late.pop(0)()

    def step(self, actor: Actor, fate: Fate = Fate.WORKS, cut: float = 0.5) -> None:
        """One actor goes on to its next round trip or step."""
        actor.cut = cut
        actor.step(fate)
        for worker in self.workers:
            if worker.actor is actor and actor.done:
                # Killed, or gone without a word since Redis did not hear it.
                lost = self.client.sismember(self.keys.workers, worker.who.name)
                self.lost_workers += bool(lost or actor.killed)
                self.deserted = self.deserted or not self.living_workers()

    def let_run(
        self,
        rounds: int,
        pass_s: float = 0.05,
        fate: Callable[[Actor], tuple[Fate, float]] = lambda _: (Fate.WORKS, 0.5),
    ) -> None:
        """Everybody goes on, one round trip or step each a round, as `fate` has it."""
        for _ in range(rounds):
            self.now += pass_s
            for actor in self.living_coordinators():
                self.step(actor, *fate(actor))
            for worker in self.living_workers():
                if not self.is_deaf():
                    self.read_inbox(worker)
                self.step(worker.actor, *fate(worker.actor))

    def is_quiet(self) -> bool:
        k = self.keys
        streams = (k.jobs, k.cancel, k.reports, *(k.tasks(w.who.name) for w in self.workers))
        names = {worker.who.name.encode() for worker in self.living_workers()}
        return (
            not self.client.scard(k.active)
            and self.client.smembers(k.workers) == names
            and not any(self.client.xlen(stream) for stream in streams)
            and all(worker.actor.at == "idle" for worker in self.living_workers())
        )

    def go_wrong(
        self,
        rounds: int,
        dice: int,
        often: float,
        deaths: int,
        ask: Callable[[random.Random], None],
    ) -> None:
        """Everybody goes on, and now and then, as the dice fall: a round trip fails, a process
        dies of it and is replaced, a lease runs out, a late command arrives, Redis forgets, and
        a client does what `ask` does."""
        chance = random.Random(dice)
        left = [deaths]

        def fate(actor: Actor) -> tuple[Fate, float]:
            if actor.at in ("start", "idle", "sleep"):
                return Fate.WORKS, 0.5
            # A coordinator that fails reads everything anew: at the rate of workers it would
            # do nothing else.
            scripts = "EVALSHA" in actor.at
            share = 1.0 if actor not in self.coordinators else 0.25 if scripts else 0.05
            if chance.random() >= often * share:
                return Fate.WORKS, 0.5
            dying = left[0] > 0 and chance.random() < 0.2
            left[0] -= dying
            return chance.choice(DEATHS if dying else FAULTS), chance.random()

        self.is_deaf = lambda: chance.random() < 2 * often
        for _ in range(rounds):
            self.let_run(1, chance.choice([0.02, 0.1, 0.5]), fate)
            for happens in (self._lease_accident, self._newcomer, ask):
                if chance.random() < often / 4:
                    happens(chance)
            if chance.random() < 0.2:
                self.deliver_late(1)
            if chance.random() < 0.2 and not self._somebody_leads():
                self.expire_lead()
            for worker in self.living_workers():
                if chance.random() < 0.1:
                    self.beat(worker)

        self.is_deaf = lambda: False

    def _somebody_leads(self) -> bool:
        """Whether the lease is a living coordinator's, and not a dead or a former self's."""
        nonce = self.client.get(self.keys.leader)
        return any(
            not actor.done and made.transitions.nonce.encode() == nonce
            for actor, made in zip(self.coordinators, self._minds, strict=True)
        )

    def _lease_accident(self, chance: random.Random) -> None:
        alive = self.living_workers()
        what = chance.randrange(4)
        if what == 0:
            self.expire_lead()
        elif what == 1 and alive:
            self.expire_lease(chance.choice(alive))
        elif what == 2 and alive:
            chance.choice(alive).drain()
        else:
            self.client.script_flush()

    def _newcomer(self, chance: random.Random) -> None:
        if len(self.living_coordinators()) < 2:
            self.add_coordinator()
        elif len(self.living_workers()) < 6:
            self.add_worker(chance.choice([ENCODE, DENOISE, DECODE]))

    def settle(self) -> None:
        """Nothing goes wrong any more; returns when nothing is left to do."""
        self.deliver_late()
        for worker in self.workers:
            if worker.actor.done:  # its lease runs out
                self.client.delete(self.keys.worker(worker.who.name))
        if not self._somebody_leads():
            self.expire_lead()
        if not self.living_coordinators():
            self.add_coordinator()
        for round_ in range(3000):
            self._replace_workers()
            if round_ % 10 == 0:
                for worker in self.living_workers():
                    self.beat(worker)
                if round_ > 20 and self.is_quiet():
                    return
            self.let_run(1, pass_s=0.5)
        raise AssertionError(f"never came to rest: {self.report()}")

    def _replace_workers(self) -> None:
        """A launcher starts another for the last of a kind that left, died or took itself out."""
        staying = [w for w in self.living_workers() if not w._draining.is_set()]
        for kind in {ENCODE, DENOISE, DECODE} - {w.who.stage for w in staying}:
            self.add_worker(kind)

    def report(self) -> str:
        """For a failure: where everything stands."""
        lines = [f"{a.name} at {a.at}{' (dead)' if a.done else ''}" for a in self.coordinators]
        lines += [
            f"{w.who.name} at {w.actor.at}{' (dead)' if w.actor.done else ''}" for w in self.workers
        ]
        for key in sorted(self.client.scan_iter()):
            kind = self.client.type(key)
            if kind == b"hash" and (b":trajectory:" in key or b":task:" in key):
                found = self.client.hgetall(key)
                lines.append(f"{key!r} { {k: v for k, v in found.items() if len(v) < 60} }")
            elif kind == b"stream" and self.client.xlen(key) and b":events:" not in key:
                lines.append(f"{key!r} has {self.client.xlen(key)} entries")
        return "\n".join(lines)

    def close(self) -> None:
        for actor in (*self.coordinators, *(w.actor for w in self.workers)):
            actor.kill()


@contextmanager
def small_pool(client: Any, keys: Keys, arena: Arena) -> Iterator[Pool]:
    """One worker a stage and a coordinator, which leads."""
    made = Pool(client, keys, arena)
    for kind in STAGES:
        made.add_worker(kind)
    made.add_coordinator()
    made.let_run(12)
    yield made
    made.close()
