"""Whatever fails, and whenever: every job ends once, right, and leaves nothing behind.

Real coordinators, workers, scripts and Redis, moved one round trip at a time by hypothesis, which
lets any of them be refused, unheard, late, cut off in a pipeline or dead (tests/faults.py). The
state of a job is a hash chain over its steps, so its file proves that none was lost or repeated.

SLACKWATER_FUZZ=20 runs it twenty times as long and with fresh seeds; SLACKWATER_SHRINK=1 makes a
failing run shorter, which can take minutes.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import tempfile
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import msgpack
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.arena import Arena
from common.connect import writing
from common.inbox import Outage
from common.keys import Keys
from common.noop import expected
from common.owners import owner_of
from common.stage import DECODE, DENOISE, ENCODE
from tests.faults import DEATHS, FAULTS, Fate
from tests.servers import leaks
from tests.simulated import POISON, Pool, SimulatedWorker

KEYS = Keys("{m}:")
# One test explores for minutes.
pytestmark = pytest.mark.timeout(900)
FUZZ = float(os.environ.get("SLACKWATER_FUZZ", "0"))
ENDS = {"succeeded", "failed", "canceled", "expired"}
NAMES = ["a", "b", "c", "d"]
MOST_ATTEMPTS = 3
START_S = 1_700_000_000.0


class Impatient(Outage):
    """Tries again at once."""

    def failed(self, error: Exception, stop: Any) -> None:
        pass


@dataclass
class Told:
    """What clients did, as the streams saw it: the ledger that the system does not keep."""

    pushes: list[tuple[str, dict[str, str], bool]] = field(default_factory=list)
    canceled: dict[str, int] = field(default_factory=dict)  # id -> pushes before the cancel

    def owner(self, job: str) -> tuple[int, str, dict[str, str], bool] | None:
        """The push that `job`'s record belongs to: the first that asked for this id."""
        for at, (entry, fields, valid) in enumerate(self.pushes):
            if fields.get("id", entry) == job:
                return at, entry, fields, valid
        return None


fates = st.sampled_from([*[Fate.WORKS] * 12, *FAULTS, *DEATHS])
prompts = st.sampled_from(["a red circle", "a blue square", "three cats", POISON])


class Slackwater(RuleBasedStateMachine):
    client: Any

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.folder = tempfile.mkdtemp(prefix="slackwater-fuzz-", dir="/dev/shm")
        # A few blocks only: some states spill to Redis.
        self.arena = Arena.open(self.folder + "/arena", 1 << 20, block_bytes=128 << 10)
        self.told = Told()
        self.results: dict[bytes, bytes] = {}
        self.impatient = mock.patch("common.worker.Outage", Impatient)
        self.impatient.start()

    @initialize(
        policy=st.sampled_from(["slack", "slack", "fcfs"]),
        jobs=st.lists(st.tuples(prompts, st.integers(1, 7)), min_size=1, max_size=3),
        dice=st.integers(0, 2**32),
        often=st.sampled_from([0.0, 0.1, 0.2, 0.4]),
        deaths=st.integers(0, 4),
    )
    def a_pool_with_work(
        self, policy: str, jobs: list[tuple[str, int]], dice: int, often: float, deaths: int
    ) -> None:
        self.pool = Pool(self.client, KEYS, self.arena, policy)
        self.pool.now = START_S
        self.at_last = (150, dice, often, deaths)  # goes wrong before all is well again
        for name, (prompt, steps) in zip(NAMES, jobs, strict=False):
            self.push(name, prompt, steps, urgent=False, twice=1)
        for kind in (ENCODE, DENOISE, DENOISE, DECODE):
            self.pool.add_worker(kind)
        self.pool.add_coordinator()
        self.pool.let_run(12)

    # -- clients -------------------------------------------------------------------------

    def _push(self, fields: dict[str, str], valid: bool) -> str:
        # By the pool's clock, so that a run can be repeated: arrivals decide who is first.
        entry = f"{int(self.pool.now * 1000)}-{len(self.told.pushes) + 1}"
        self.client.xadd(KEYS.jobs, fields, id=entry)
        self.told.pushes.append((entry, fields, valid))
        return entry

    @rule(
        job=st.sampled_from([*NAMES, ""]),
        prompt=prompts,
        steps=st.integers(1, 7),
        urgent=st.booleans(),
        twice=st.integers(0, 5),
    )
    def push(self, job: str, prompt: str, steps: int, urgent: bool, twice: int) -> None:
        """Also the same id again, with the same content or other; some pushes are sent twice."""
        fields = {"prompt": prompt, "num_inference_steps": str(steps), "seed": "7"}
        if job:
            fields["id"] = job
        if urgent:
            fields["slo_ms"] = "900"
        self._push(fields, True)
        if not twice:  # the client never heard and pushed again
            self._push(fields, True)

    @rule(which=st.integers(0, 50))
    @precondition(lambda self: self.told.pushes)
    def push_the_same_again(self, which: int) -> None:
        _, fields, valid = self.told.pushes[which % len(self.told.pushes)]
        if "id" in fields:
            self._push(fields, valid)

    @rule(
        job=st.sampled_from([*NAMES, ""]),
        bad=st.sampled_from([{"width": "33"}, {"colour": "red"}, {"num_inference_steps": "0"}]),
    )
    def push_nonsense(self, job: str, bad: dict[str, str]) -> None:
        self._push({"prompt": "x", **bad, **({"id": job} if job else {})}, False)

    @rule(job=st.sampled_from(NAMES), known=st.integers(0, 50), by_entry=st.booleans())
    def cancel(self, job: str, known: int, by_entry: bool) -> None:
        if by_entry and self.told.pushes:
            job = self.told.pushes[known % len(self.told.pushes)][0]
        self.client.xadd(KEYS.cancel, {"id": job})
        self.told.canceled.setdefault(job, len(self.told.pushes))

    @rule(prompt=prompts, rounds=st.integers(0, 5))
    def cancel_before_the_push(self, prompt: str, rounds: int) -> None:
        """An id that nobody has used, canceled before its job is there."""
        job = f"early{len(self.told.pushes)}"
        self.client.xadd(KEYS.cancel, {"id": job})
        self.told.canceled[job] = len(self.told.pushes)
        self.pool.let_run(rounds)
        self.push(job, prompt, 3, urgent=False, twice=1)

    # -- services ------------------------------------------------------------------------

    @rule(
        rounds=st.integers(5, 40),
        dice=st.integers(0, 2**32),
        often=st.sampled_from([0.05, 0.2, 0.4]),
        deaths=st.integers(0, 2),
    )
    def rough_going(self, rounds: int, dice: int, often: float, deaths: int) -> None:
        self.pool.go_wrong(rounds, dice, often, deaths, self.ask)

    def ask(self, chance: random.Random) -> None:
        """A client cancels a job, or pushes one more."""
        if chance.random() < 0.5:
            self.cancel(chance.choice(NAMES), chance.randrange(50), chance.random() < 0.3)
        else:
            name = chance.choice([*NAMES, ""])
            self.push(
                name, "a red circle", chance.randint(1, 7), urgent=chance.random() < 0.3, twice=1
            )

    @rule(which=st.integers(0, 9), fate=fates, cut=st.floats(0, 1), more=st.integers(0, 6))
    def coordinator_steps(self, which: int, fate: Fate, cut: float, more: int) -> None:
        alive = self.pool.living_coordinators()
        if alive:
            actor = alive[which % len(alive)]
            for _ in range(more):
                actor.step()
            self.pool.step(actor, fate, cut)

    @rule()
    @precondition(lambda self: len(self.pool.living_coordinators()) < 3)
    def coordinator_starts(self) -> None:
        self.pool.add_coordinator()

    @rule()
    def leader_falls_asleep(self) -> None:
        """Its lease runs out; it does not know, and tries to go on."""
        self.pool.expire_lead()

    def _worker(self, which: int) -> SimulatedWorker | None:
        alive = self.pool.living_workers()
        return alive[which % len(alive)] if alive else None

    @rule(which=st.integers(0, 9), fate=fates, cut=st.floats(0, 1), more=st.integers(0, 6))
    def worker_steps(self, which: int, fate: Fate, cut: float, more: int) -> None:
        worker = self._worker(which)
        if worker is None:
            return
        for _ in range(more):
            self.pool.read_inbox(worker)
            worker.actor.step()
        if worker.actor.done:
            return
        if not fate.dies and worker.actor.at == "start":
            fate = Fate.WORKS
        self.pool.step(worker.actor, fate, cut)

    @rule(which=st.integers(0, 9))
    def worker_beats(self, which: int) -> None:
        worker = self._worker(which)
        if worker is not None:
            self.pool.beat(worker)

    @rule(which=st.integers(0, 9))
    def worker_is_cut_off(self, which: int) -> None:
        """Its lease runs out while it lives: a zombie until its next beat."""
        worker = self._worker(which)
        if worker is not None:
            self.pool.expire_lease(worker)

    @rule(which=st.integers(0, 9))
    def worker_is_told_to_drain(self, which: int) -> None:
        worker = self._worker(which)
        if worker is not None:
            worker.drain()

    @rule(kind=st.sampled_from([ENCODE, DENOISE, DECODE]))
    @precondition(lambda self: len(self.pool.living_workers()) < 7)
    def worker_starts(self, kind: str) -> None:
        self.pool.add_worker(kind)

    # -- the world -----------------------------------------------------------------------

    @rule(rounds=st.integers(1, 25))
    def all_goes_well(self, rounds: int) -> None:
        self.pool.let_run(rounds)

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 60.0]), forgets=st.booleans())
    def time_passes(self, seconds: float, forgets: bool) -> None:
        """Redis may forget its scripts."""
        self.pool.now += seconds
        if forgets:
            self.client.script_flush()

    @rule(count=st.integers(1, 3))
    @precondition(lambda self: self.pool.late)
    def late_commands_arrive(self, count: int) -> None:
        self.pool.deliver_late(count)

    # -- what must hold ------------------------------------------------------------------

    @invariant()
    def a_result_never_changes(self) -> None:
        names = sorted(
            {f.get("id", e) for e, f, _ in self.told.pushes} | {e for e, *_ in self.told.pushes}
        )
        if not names:
            return
        found = self.client.mget([KEYS.result(name) for name in names])
        active = {job.decode() for job in self.client.smembers(KEYS.active)}
        for name, value in zip(names, found, strict=True):
            key = name.encode()
            assert (
                self.results.setdefault(key, value) == value if value else key not in self.results
            )
            assert not (value and name in active), f"{name} has ended and is active"

    def teardown(self) -> None:
        try:
            if hasattr(self, "pool"):
                self.pool.go_wrong(*self.at_last, self.ask)
                self.pool.settle()
                self.a_result_never_changes()
                self.check_jobs()
                self.check_nothing_left()
        finally:
            self.impatient.stop()
            if hasattr(self, "pool"):
                self.pool.close()
            self.arena.close()
            shutil.rmtree(self.folder)

    def check_jobs(self) -> None:
        pushes = self.told.pushes
        answered = set()
        for at, (entry, fields, valid) in enumerate(pushes):
            job = fields.get("id", entry)
            first_at, _, first, first_valid = self.told.owner(job) or (0, "", {}, True)
            if first_at == at:
                answered |= {job} | (set() if valid else {entry})
                self.check_job(job, fields, valid, at)
            elif first == fields and first_valid and valid:
                pass  # the same job
            else:
                answered.add(entry)
                code = "conflict" if valid else "invalid_request"
                self.check_failed(entry, {code})
            if not valid:
                self.check_failed(entry, {"invalid_request"})
        prefix = KEYS.result("")
        found = {key.decode()[len(prefix) :] for key in self.client.scan_iter(prefix + "*")}
        assert found == answered, "results that nobody asked for, or missing ones"

    def check_failed(self, job: str, codes: set[str]) -> None:
        result = self.result(job)
        assert result["status"] == "failed"
        assert result["error_code"] in codes, f"{job}: {result['error_code']}: {result['error']}"
        self.check_ended_once(job, "failed")

    def check_job(self, job: str, fields: dict[str, str], valid: bool, at: int) -> None:
        if not valid:
            self.check_failed(job, {"invalid_request"})
            return
        result = self.result(job)
        status = result["status"]
        self.check_ended_once(job, status)
        canceled_at = self.told.canceled.get(job)
        if status == "canceled":
            assert canceled_at is not None, f"{job} was canceled and nobody asked"
        if canceled_at is not None and canceled_at <= at:
            assert status == "canceled", f"{job} was canceled before it came, and {status}"
        if status == "succeeded":
            assert fields["prompt"] != POISON
            (file,) = result["outputs"]
            said = json.loads(self.client.get(file["key"]))
            right = expected(fields["prompt"], 7, int(fields["num_inference_steps"]))
            assert said == {"job": job, "chain": right}, f"{job} lost or repeated a step"
            assert self.client.hget(KEYS.job(job), "progress") == b"1.000"
        if status == "failed":
            allowed = {"worker_lost"} if self.pool.lost_workers >= MOST_ATTEMPTS else set()
            if fields["prompt"] == POISON:
                allowed.add("stage_error")
            elif self.pool.lost_workers >= MOST_ATTEMPTS - 1:
                allowed.add("stage_error")  # beside poison once, and twice on a dying worker
            self.check_failed(job, allowed)
            assert int(self.client.hget(KEYS.job(job), "attempts")) >= MOST_ATTEMPTS
        assert status != "expired"

    def check_ended_once(self, job: str, status: str) -> None:
        record = self.client.hgetall(KEYS.job(job))
        assert record[b"status"].decode() == status
        assert record[b"is_terminal"] == b"1"
        events = [fields[b"type"].decode() for _, fields in self.client.xrange(KEYS.events(job))]
        assert [event for event in events if event in ENDS] == [status], events
        assert events[-1] == status, events

    def result(self, job: str) -> dict[str, Any]:
        packed = self.client.get(KEYS.result(job))
        assert packed, f"{job} has no result; {self.client.hgetall(KEYS.job(job))}"
        result: dict[str, Any] = msgpack.unpackb(packed)
        return result

    def check_nothing_left(self) -> None:
        left = leaks(self.client, KEYS.permanent())
        assert not left, left
        spilled = [key.decode() for key in self.client.scan_iter(KEYS.prefix + "latents:*")]
        kept = [owner for owner, _, _ in self.arena.owners()]
        if not self.pool.lost_workers and not self.pool.deserted:
            assert not kept, f"left in the arena: {kept}"
            assert not spilled, f"left in Redis: {spilled}"
        # What a dead worker left, or nobody was there to free, has an owner that has ended: a
        # sweep finds all of it.
        ended = {owner_of(KEYS.prefix, name.decode()) for name in self.results}
        assert set(kept) <= ended
        self.pool.store.sweep(lambda owner: owner in ended, min_age_s=0)
        assert self.arena.stats().claims == 0


def test_every_job_ends_once_and_right_whatever_fails(redis_server: str) -> None:
    """Any order of pushes, cancels, crashes, lost replies, zombies and restarts."""
    logging.disable(logging.CRITICAL)
    Slackwater.client = writing(redis_server)
    try:
        from hypothesis.stateful import run_state_machine_as_test

        run_state_machine_as_test(
            Slackwater,
            settings=settings(
                max_examples=int(150 * max(1.0, FUZZ)),
                stateful_step_count=20,
                deadline=None,
                derandomize=not FUZZ,
                database=None,
                print_blob=True,
                report_multiple_bugs=False,
                phases=[
                    Phase.generate,
                    *([Phase.shrink] if "SLACKWATER_SHRINK" in os.environ else []),
                ],
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        Slackwater.client.flushall()
        Slackwater.client.close()
        logging.disable(logging.NOTSET)
