"""A Redis that answers and takes no writes for a while; and leases shorter than it is looked at."""

from __future__ import annotations

from typing import Any

from common.keys import Keys
from tests.processes import processes, until


def test_writes_refused_for_a_while_cost_no_worker_and_no_attempt(
    redis_server: str, redis_client: Any, keys: Keys, arena_path: str
) -> None:
    """With too few replicas, say: workers hold their reports, and the pool goes on when they are
    back."""
    with processes(redis_server, redis_client, keys, arena_path, leader_lease_s=1.0) as pool:
        coordinator, (worker,) = pool.pool()
        pool.push("a", steps=40)
        pool.wait_for_event("a", "step")
        redis_client.config_set("min-replicas-to-write", 1)
        try:
            # By then its chunk of 100 ms has ended, and could not be reported.
            until(lambda: not redis_client.exists(keys.leader), "nobody to lead")
        finally:
            redis_client.config_set("min-replicas-to-write", 0)
        pool.check("a", steps=40)
        assert pool.record("a")["attempts"] == "0"
        assert worker.is_alive()
        assert coordinator.is_alive()
        pool.drained()


def test_a_lease_of_a_second_runs_out_while_nobody_says_anything(
    redis_server: str, redis_client: Any, keys: Keys, arena_path: str
) -> None:
    """The leader, which waits for news for longer, looks often enough to know that Redis was there
    all the time."""
    with processes(redis_server, redis_client, keys, arena_path, worker_lease_s=1.0) as pool:
        _, (first, second) = pool.pool(denoisers=2)
        pool.push("a", steps=60)
        pool.wait_for_event("a", "step")
        name = pool.record("a")["worker"]
        pids = {int(redis_client.hget(keys.worker(name), "pid")): name}
        pool.kill(first if first.pid in pids else second)
        pool.check("a", steps=60)
        pool.drained()
