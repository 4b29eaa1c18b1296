"""The outbox' scripts and its reader's lease, on a real Redis, without Celery or a network."""

from __future__ import annotations

from typing import Any

import pytest

from common.health import Sick, check_celery
from common.keys import Keys
from common.scripts import Scripts
from services.celery_app.attempts import pause_s
from services.celery_app.lease import Deposed, Lease
from services.celery_app.transitions import Owed, SenderTransitions

HOOK = Owed("msg_1-1", "webhook", "a", "https://example.com/", b"body")
COPY = Owed("upl_1-1", "upload", "a", "s3://there/a", b"then")


@pytest.fixture
def lease(redis_client: Any, keys: Keys) -> Lease:
    held = Lease(Scripts(redis_client), keys)
    assert held.take()
    return held


def test_a_celery_task_enters_once(redis_client: Any, keys: Keys) -> None:
    """Its push and its note appear together; a message that comes again adds nothing."""
    scripts, call = Scripts(redis_client), SenderTransitions(keys).enter("a", b"who", {b"p": b"x"})
    verdict, entry = scripts.one(call)
    assert verdict == b"entered"
    assert redis_client.xrange(keys.jobs) == [(entry, {b"id": b"a", b"p": b"x"})]
    assert redis_client.hget(keys.celery, "a") == entry + b" who"
    assert scripts.one(call) == [b"known"]
    assert redis_client.xlen(keys.jobs) == 1
    redis_client.delete(keys.jobs, keys.celery)


def test_a_full_redis_takes_no_task(redis_client: Any, keys: Keys) -> None:
    """Neither push nor note."""
    redis_client.config_set("maxmemory", 1)
    with pytest.raises(Exception, match="maxmemory"):
        Scripts(redis_client).one(SenderTransitions(keys).enter("a", b"who", {b"p": b"x"}))
    redis_client.config_set("maxmemory", 0)
    assert not redis_client.exists(keys.jobs, keys.celery)


def test_an_entry_becomes_deliveries_at_once(redis_client: Any, keys: Keys, lease: Lease) -> None:
    """It leaves the outbox as what is owed for it is noted, due now; a repeat adds none."""
    entry = redis_client.xadd(keys.outbox, {"job": "a", "body": "b"}).decode()
    call = lease.transitions.post(entry, [HOOK, COPY], 7.0)
    assert lease.run(call) == [b"posted"]
    assert redis_client.xlen(keys.outbox) == 0
    due = redis_client.zrange(keys.deliveries, 0, -1, withscores=True)
    assert due == [(b"msg_1-1", 7000.0), (b"upl_1-1", 7000.0)]
    found = redis_client.hgetall(keys.delivery("msg_1-1"))
    assert (found[b"url"], found[b"body"], found[b"attempts"]) == (HOOK.url.encode(), b"body", b"0")
    assert redis_client.ttl(keys.delivery("msg_1-1")) > 86_400
    assert lease.run(call) == [b"gone"]
    assert redis_client.zcard(keys.deliveries) == 2
    for one in (HOOK, COPY):
        assert lease.run(lease.transitions.settle(one.name, "done")) == [b"settled"]


def test_a_delivery_is_tried_again_done_or_given_up(
    redis_client: Any, keys: Keys, lease: Lease
) -> None:
    """Failures are counted; what is done leaves nothing; what is given up can be looked at."""
    t = lease.transitions
    entry = redis_client.xadd(keys.outbox, {"job": "a"}).decode()
    lease.run(t.post(entry, [HOOK, COPY], 7.0))
    assert lease.run(t.settle(HOOK.name, "again", 9.0, "busy")) == [b"settled"]
    assert redis_client.zscore(keys.deliveries, HOOK.name) == 9000.0
    assert redis_client.hmget(keys.delivery(HOOK.name), "attempts", "error") == [b"1", b"busy"]
    assert lease.run(t.settle(HOOK.name, "given_up", error="gone")) == [b"settled"]
    assert redis_client.zscore(keys.deliveries, HOOK.name) is None
    assert redis_client.hget(keys.delivery(HOOK.name), "given_up") == b"1"
    assert lease.run(t.settle(HOOK.name, "done")) == [b"gone"]
    assert lease.run(t.settle(COPY.name, "done", job="a", follows=b"news")) == [b"settled"]
    assert not redis_client.exists(keys.delivery(COPY.name))
    [(_, told)] = redis_client.xrange(keys.outbox)
    assert told == {b"job": b"a", b"body": b"news"}
    redis_client.delete(keys.outbox)


def test_one_process_reads_and_a_former_one_changes_nothing(
    redis_client: Any, keys: Keys, lease: Lease
) -> None:
    """The second stands by until the first gives up or falls silent; the first is fenced then."""
    second = Lease(Scripts(redis_client), keys)
    assert not second.take()
    entry = redis_client.xadd(keys.outbox, {"job": "a"}).decode()
    redis_client.delete(keys.sender)  # its lease ran out while it was frozen
    assert second.take()
    with pytest.raises(Deposed):
        lease.run(lease.transitions.post(entry, [HOOK], 7.0))
    with pytest.raises(Deposed):
        lease.run(lease.transitions.settle(HOOK.name, "done"))
    assert redis_client.xlen(keys.outbox) == 1
    second.release()
    assert lease.take()
    assert lease.run(lease.transitions.post(entry, [], 7.0)) == [b"posted"]


def test_health_is_whether_the_outbox_is_read(redis_client: Any, keys: Keys) -> None:
    """Without a reader, or with an entry that nobody takes, the Celery side is sick."""
    with pytest.raises(Sick, match="nobody reads"):
        check_celery(redis_client, keys)
    lease = Lease(Scripts(redis_client), keys)
    assert lease.take()
    assert "0 deliveries owed" in check_celery(redis_client, keys)
    redis_client.xadd(keys.outbox, {"job": "a"}, id="1-1")  # of 1970
    with pytest.raises(Sick, match="is not read"):
        check_celery(redis_client, keys)
    redis_client.delete(keys.outbox)


def test_pauses_grow_and_have_an_end() -> None:
    """Three times as long each time, two hours at most, never all at the same moment."""
    pauses = [pause_s(n, 5.0) for n in (1, 2, 3, 30, 3000)]
    for pause, exact in zip(pauses, (5, 15, 45, 7200, 7200), strict=True):
        assert abs(pause - exact) <= exact / 10
    assert len({pause_s(1, 5.0) for _ in range(5)}) > 1
