"""A Redis that answers and takes no writes for a while; and leases shorter than it is looked at."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import RedisError

from benchmarks.chaos_parts.proxy import Proxy
from common.connect import writing
from common.handles import HandleStore, Parcel
from common.keys import Keys
from common.scripts import Scripts, Transitions, Ttls
from tests.processes import processes, until
from tests.servers import binaries, serving


@pytest.mark.parametrize("states", ["auto", "redis"])
def test_writes_refused_for_a_while_cost_no_worker_and_no_attempt(
    redis_server: str, redis_client: Any, keys: Keys, arena_path: str, states: str
) -> None:
    """With too few replicas, say: workers hold their reports, and their states where these lie in
    Redis, and the pool goes on when they are back."""
    short = {"leader_lease_s": 1.0, "states": states}
    with processes(redis_server, redis_client, keys, arena_path, **short) as pool:
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
        assert not {"error", "rewound", "worker_lost"} & set(pool.events("a"))
        assert worker.is_alive()
        assert coordinator.is_alive()
        pool.drained()


@pytest.mark.parametrize("program", binaries(), ids=lambda p: "-".join(Path(p).parts[-4:]))
def test_one_address_that_leads_to_the_next_master_is_followed(program: str, keys: Keys) -> None:
    """As a service's or a proxy's does after a failover, while connections that stand stay with the
    old master, which refuses what is written."""
    state = Parcel({}, b"a state")
    with (
        serving(program=program) as new,
        serving(program=program) as old,
        closing(Proxy(old.port)) as proxy,
        closing(writing(old.url)) as operator,
    ):
        url = f"redis://127.0.0.1:{proxy.link().port}/0"
        scripts, store = Scripts(writing(url)), HandleStore("here", redis=writing(url))
        lead = Transitions(keys, Ttls(), "me:1").lead(60)
        assert scripts.one(lead) == [b"leading"]
        store.put("a", 1, "latents", state)
        proxy.target = new.port
        operator.replicaof("127.0.0.1", new.port)
        with pytest.raises(RedisError):
            scripts.one(lead)
        assert scripts.one(lead) == [b"leading"]
        assert store.get(store.put("a", 2, "latents", state)).meta == b"a state"


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
