"""Handles and the store: what was put comes back, or an error says what became of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.arena import Arena
from common.handles import INLINE_LIMIT_BYTES, Handle, HandleError, HandleStore, Parcel
from common.outage import Outage
from common.owners import orphaned
from common.payload import ITEM_BYTES, REUSE_FROM_BYTES, digest
from common.stage_main import Stager

ROOT = Path(__file__).parent.parent


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with Arena.open(str(tmp_path / "arena"), 1 << 20, block_bytes=4096) as opened:
        yield opened


def a_state(size: int = 3000, meta: bytes = b"meta") -> Parcel:
    return Parcel(
        {
            "latents": ("bfloat16", (1, size), os.urandom(2 * size)),
            "rng": ("uint8", (5,), b"01234"),
            "empty": ("float32", (0, 4), b""),
            "scalar": ("int64", (), (7).to_bytes(8, "little")),
        },
        meta,
    )


def assert_same(got: Parcel, put: Parcel) -> None:
    assert list(got.tensors) == list(put.tensors)
    for name, (dtype, shape, buffer) in put.tensors.items():
        assert got.tensors[name][:2] == (dtype, shape)
        assert bytes(got.tensors[name][2]) == bytes(buffer)
    assert got.meta == put.meta


def wire_trip(handle: Handle) -> Handle:
    return Handle.from_wire(msgpack.unpackb(msgpack.packb(handle.to_wire())))


@pytest.mark.parametrize("where", ["arena", "redis", "inline"])
def test_a_state_comes_back_as_it_was_put(arena: Arena, redis_client: Any, where: str) -> None:
    store = HandleStore("host-a", arena, redis_client, piece_bytes=1000)
    state = a_state(300)
    handle = wire_trip(store.put("job-1", 7, "latents", state, where))
    assert handle.where == where
    assert store.can_read(handle)
    assert_same(store.get(handle), state)
    with store.borrow(handle) as borrowed:
        assert_same(borrowed, state)
    assert store.free(handle)


def test_a_handle_of_an_ordinary_job_is_a_few_hundred_bytes(arena: Arena) -> None:
    history = {f"model_outputs.{i}": ("float32", (1, 16, 8, 8), bytes(4096)) for i in range(3)}
    parcel = Parcel({"latents": ("float32", (1, 16, 8, 8), bytes(4096)), **history}, b"{}")
    handle = HandleStore("worker-host-12", arena).put("1732888888888-0", 123456, "latents", parcel)
    assert len(msgpack.packb(handle.to_wire())) < 600


def test_another_process_reads_the_arena_by_the_handle_alone(arena: Arena) -> None:
    handle = HandleStore("host-a", arena).put("job", 1, "latents", a_state(meta=b"hello"))
    script = (
        "import sys, msgpack\n"
        "from common.arena import Arena\n"
        "from common.handles import Handle, HandleStore\n"
        "handle = Handle.from_wire(msgpack.unpackb(sys.stdin.buffer.read()))\n"
        "store = HandleStore(handle.host, Arena.open(handle.location['path']))\n"
        "sys.stdout.buffer.write(store.get(handle).meta)\n"
        "assert store.free(handle) and 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    wire = msgpack.packb(handle.to_wire())
    done = subprocess.run(
        [sys.executable, "-c", script], input=wire, capture_output=True, cwd=ROOT, check=True
    )
    assert done.stdout == b"hello"
    assert arena.stats().used_bytes == 0


def test_a_full_arena_spills_to_redis_and_says_so(arena: Arena, redis_client: Any) -> None:
    store = HandleStore("host-a", arena, redis_client)
    hog = arena.alloc(arena.stats().largest_free_bytes, "hog")
    assert hog is not None
    state = a_state()
    handle = store.put("job", 1, "latents", state)
    assert handle.where == "redis"
    assert store.counts == {"arena": 0, "redis": 1, "inline": 0, "spilled": 1}
    assert_same(store.get(handle), state)
    with pytest.raises(HandleError, match="the arena of host-a is full") as caught:
        store.put("job", 2, "latents", state, "arena")
    assert caught.value.kind == "full"
    with pytest.raises(HandleError, match="no Redis to spill to"):
        HandleStore("host-a", arena).put("job", 2, "latents", state)


def test_spilled_pieces_are_small_and_always_have_a_ttl(redis_client: Any) -> None:
    store = HandleStore("h", None, redis_client, prefix="t:", piece_bytes=1000, spill_ttl_s=60)
    handle = store.put("job", 3, "latents", a_state(2000))
    (key,) = redis_client.keys()
    assert key == b"t:latents:job:3:latents"
    assert 0 < redis_client.ttl(key) <= 60
    assert max(map(len, redis_client.hvals(key))) == 1000
    assert store.free(handle)
    assert not store.free(handle)
    assert not redis_client.keys()


def test_a_full_redis_is_a_full_error_that_leaves_nothing(redis_client: Any) -> None:
    store = HandleStore("h", None, redis_client, piece_bytes=100_000)
    redis_client.config_set("maxmemory", redis_client.info("memory")["used_memory"] + 250_000)
    with pytest.raises(HandleError, match="Redis is full") as caught:
        store.put("job", 1, "latents", a_state(500_000))
    assert caught.value.kind == "full"
    redis_client.config_set("maxmemory", 0)
    assert not redis_client.keys()


class Shaky(redis.Connection):
    """`fates`: whether each of the next commands arrives, and then its reply; after them all do."""

    fates: deque[bool] = deque()
    failed = 0

    def _try(self) -> None:
        if self.fates and not self.fates.popleft():
            type(self).failed += 1
            self.disconnect()
            raise redis.ConnectionError("Redis is away")

    def send_packed_command(self, *args: Any, **options: Any) -> None:
        self._try()
        super().send_packed_command(*args, **options)

    def read_response(self, *args: Any, **options: Any) -> Any:
        reply = super().read_response(*args, **options)
        self._try()
        return reply


def shaky(url: str) -> redis.Redis:
    where = redis.connection.parse_url(url)
    pool = redis.ConnectionPool(connection_class=Shaky, retry=Retry(NoBackoff(), 0), **where)
    return redis.Redis.from_pool(pool)


def test_a_redis_that_is_away_is_waited_for(
    redis_server: str, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of a put, a get or a free was cut off, it is done once Redis is back."""
    store = HandleStore("h", None, shaky(redis_server), piece_bytes=1000)
    pauses: list[bool] = []
    monkeypatch.setattr(Outage, "failed", lambda self, _, stop: pauses.append(stop.is_set()))
    state = a_state()
    for at in range(1, 30, 3):
        Shaky.fates.extend([True] * at + [False])
        handle = store.put("job", at, "latents", state)
        Shaky.fates.extend([True, False, True, True, True, False])
        assert_same(store.get(handle), state)
        Shaky.fates.extend([True, False])  # it may have been done, and nobody heard
        store.free(handle)
        Shaky.fates.clear()
        assert not redis_client.exists(handle.location["key"])
    assert len(pauses) == Shaky.failed > 30


def test_a_worker_that_leaves_waits_for_no_redis(
    redis_server: str, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it could not free there has a TTL."""
    store = HandleStore("h", None, shaky(redis_server))
    handle = store.put("job", 1, "latents", a_state())
    waits = threading.Event()
    failed = Outage.failed

    def wait(*args: Any) -> None:
        waits.set()
        failed(*args)

    monkeypatch.setattr(Outage, "failed", wait)
    Shaky.fates.extend([False] * 1000)
    stager = Stager(store)
    freed = stager.submit(store.free, handle)
    assert waits.wait(30.0)
    stager.shutdown()
    assert isinstance(freed.exception(), redis.ConnectionError)
    Shaky.fates.clear()
    assert redis_client.ttl(handle.location["key"]) > 0


def test_a_freed_block_is_lost_even_after_it_was_reused(arena: Arena) -> None:
    store = HandleStore("host-a", arena)
    old = store.put("job-1", 1, "latents", a_state())
    store.free(old)
    new = store.put("job-2", 2, "latents", a_state())
    assert new.location["offset"] == old.location["offset"]
    with pytest.raises(HandleError, match=r"latents of job job-1 .* no longer there") as caught:
        store.get(old)
    assert caught.value.kind == "lost"
    assert not store.free(old)
    store.get(new)


def test_a_block_freed_while_borrowed_is_lost_at_the_end_of_the_loan(arena: Arena) -> None:
    store = HandleStore("host-a", arena)
    handle = store.put("job-1", 1, "latents", a_state())
    with pytest.raises(HandleError, match="while it was being read"), store.borrow(handle):
        store.free(handle)


def test_a_block_reused_while_its_checksum_is_taken_is_lost_not_corrupt(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost is made again; corrupt raises an alarm."""
    store = HandleStore("host-a", arena)
    handle = store.put("job-1", 1, "latents", a_state())

    def late(view: memoryview) -> str:
        store.free(handle)
        store.put("job-2", 2, "latents", a_state())
        return digest(view)

    monkeypatch.setattr("common.handles.digest", late)
    with pytest.raises(HandleError) as caught, store.borrow(handle):
        raise AssertionError("what is shown is another job's")
    assert caught.value.kind == "lost"


def test_a_private_copy_outlives_its_block(arena: Arena) -> None:
    store = HandleStore("host-a", arena)
    state = a_state()
    handle = store.put("job-1", 1, "latents", state)
    got = store.get(handle)
    store.free(handle)
    store.put("job-2", 2, "latents", a_state())
    assert_same(got, state)


def test_two_states_read_one_after_the_other_share_no_memory(arena: Arena) -> None:
    """Buffers are reused, but only when nothing sees them any more, tensors included."""
    store = HandleStore("host-a", arena)
    states = [a_state(REUSE_FROM_BYTES) for _ in range(3)]
    handles = [store.put(f"job-{i}", 1, "latents", state) for i, state in enumerate(states)]
    first = store.get(handles[0]).tensors["latents"][2][10:20]  # a slice of a view is enough
    second = store.get(handles[1])
    assert bytes(first) == states[0].tensors["latents"][2][10:20]
    assert_same(second, states[1])
    del second
    reused = store.get(handles[2])
    assert bytes(first) == states[0].tensors["latents"][2][10:20]
    assert_same(reused, states[2])
    assert len(store._buffers._buffers) == 2


@pytest.mark.parametrize("where", ["arena", "redis"])
def test_a_flipped_bit_is_corrupt_not_a_picture(
    arena: Arena, redis_client: Any, where: str
) -> None:
    store = HandleStore("host-a", arena, redis_client)
    handle = store.put("job-1", 1, "latents", a_state(), where)
    if where == "arena":
        arena._data[handle.location["offset"] + 50] ^= 1
    else:
        redis_client.hset(handle.location["key"], "0", b"x" * handle.nbytes)
    with pytest.raises(HandleError, match="checksum") as caught:
        store.get(handle)
    assert caught.value.kind == "corrupt"


def test_pieces_that_are_missing_or_too_short_are_told_apart(redis_client: Any) -> None:
    store = HandleStore("host-a", None, redis_client, piece_bytes=1000)
    handle = store.put("job-1", 1, "latents", a_state())
    redis_client.hset(handle.location["key"], "1", b"short")
    with pytest.raises(HandleError, match="bytes where") as caught:
        store.get(handle)
    assert caught.value.kind == "corrupt"
    redis_client.hdel(handle.location["key"], "1")
    with pytest.raises(HandleError) as caught:
        store.get(handle)
    assert caught.value.kind == "lost"


def test_what_lies_elsewhere_is_unreachable_and_the_message_says_where(
    arena: Arena, tmp_path: Path
) -> None:
    store = HandleStore("host-a", arena)
    handle = store.put("job-1", 1, "latents", a_state())
    with Arena.open(str(tmp_path / "b"), 1 << 20) as other:
        cases = {
            "arena of host host-a, and this is host host-b": HandleStore("host-b", other),
            "not open in this process": HandleStore("host-a"),
        }
        for message, reader in cases.items():
            assert not reader.can_read(handle)
            assert not reader.free(handle)
            with pytest.raises(HandleError, match=message) as caught:
                reader.get(handle)
            assert caught.value.kind == "unreachable"
        with pytest.raises(HandleError, match="made anew") as caught:
            HandleStore("host-a", other).get(handle)
        assert caught.value.kind == "lost"
    device = replace(handle, where="device", location={"worker": "w3"})
    with pytest.raises(HandleError, match="device of worker w3"):
        store.get(device)


def test_a_buffer_that_does_not_fit_its_shape_is_refused_before_anything_is_written(
    arena: Arena,
) -> None:
    store = HandleStore("host-a", arena)
    with pytest.raises(ValueError, match=r"tensor x: float32\[2, 3\] is 24 bytes, its buffer 20"):
        store.put("job", 1, "latents", Parcel({"x": ("float32", (2, 3), bytes(20))}))
    strided = memoryview(bytes(48))[::2]
    with pytest.raises(ValueError, match="contiguous"):
        store.put("job", 1, "latents", Parcel({"x": ("float32", (2, 3), strided)}))
    with pytest.raises(ValueError, match="dtype 'float'"):
        store.put("job", 1, "latents", Parcel({"x": ("float", (2, 3), bytes(24))}))
    assert arena.stats().used_bytes == 0


def test_inline_is_for_tiny_states_only(arena: Arena) -> None:
    store = HandleStore("host-a", arena, inline_bytes=200)
    assert store.put("job", 1, "prepared", Parcel({}, b"x" * 100)).where == "inline"
    assert store.put("job", 1, "prepared", Parcel({}, b"x" * 300)).where == "arena"
    with pytest.raises(HandleError, match="inline"):
        store.put("job", 1, "prepared", Parcel({}, bytes(INLINE_LIMIT_BYTES + 1)), "inline")


def test_a_client_that_decodes_is_refused_at_once(redis_server: str) -> None:
    with (
        redis.Redis.from_url(redis_server, decode_responses=True) as client,
        pytest.raises(ValueError, match="decode_responses"),
    ):
        HandleStore("host-a", None, client)


def test_a_sweep_takes_the_orphans_of_dead_jobs(arena: Arena) -> None:
    store = HandleStore("host-a", arena)
    store.put("dead", 1, "latents", a_state())
    alive = store.put("alive", 1, "latents", a_state())
    assert store.sweep(orphaned("sw:", ["alive"]), min_age_s=0.0) == 1
    store.get(alive)


@pytest.mark.parametrize("prefixes", [("sw:", "sw:b:"), ("sw", "sw|b"), ("x" * 99, "x" * 99 + "y")])
def test_pools_that_share_an_arena_leave_each_other_alone(
    arena: Arena, prefixes: tuple[str, str]
) -> None:
    """Whatever their prefixes and ids have in common."""
    stores = [HandleStore("host-a", arena, prefix=prefix) for prefix in prefixes]
    jobs = ["b:job", "job", "y" * 128]
    handles = [store.put(job, 1, "latents", a_state(10)) for store in stores for job in jobs]
    for prefix in prefixes:
        assert not stores[0].sweep(orphaned(prefix, jobs), min_age_s=0.0)
    assert stores[1].sweep(orphaned(prefixes[1], jobs[:2]), min_age_s=0.0) == 1
    assert stores[0].sweep(orphaned(prefixes[0], []), min_age_s=0.0) == 3
    for handle in handles[3:5]:
        stores[1].get(handle)


MISSING = object()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("job", 3),
        ("seq", "7"),
        ("seq", True),
        ("seq", -1),
        ("part", MISSING),
        ("where", "moon"),
        ("host", None),
        ("nbytes", 1.5),
        ("xxh3", 12),
        ("t", {}),
        ("t", [["x", "float32", [1]]]),
        ("t", [["x", "float99", [1], 0]]),
        ("t", [["x", "float32", [-1], 0]]),
        ("t", [["x", "float32", [10**9], 0]]),
        ("loc", []),
        ("loc", {"path": "p", "arena": "a", "offset": 0, "slot": "0", "gen": 1}),
    ],
)
def test_a_malformed_handle_is_refused_by_the_name_of_its_field(
    arena: Arena, field: str, value: Any
) -> None:
    wire = HandleStore("h", arena).put("job", 1, "latents", a_state()).to_wire()
    if value is MISSING:
        del wire[field]
    else:
        wire[field] = value
    with pytest.raises(HandleError, match=rf"handle field {field}\b") as caught:
        Handle.from_wire(wire)
    assert caught.value.kind == "malformed"


@settings(max_examples=60, deadline=None, database=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5), max_size=3)),
        max_size=5,
    ),
    meta=st.binary(max_size=100),
)
def test_any_mix_of_dtypes_and_shapes_survives(
    shapes: list[tuple[str, list[int]]], meta: bytes
) -> None:
    tensors = {}
    for i, (dtype, shape) in enumerate(shapes):
        nbytes = ITEM_BYTES[dtype]
        for n in shape:
            nbytes *= n
        tensors[f"t{i}"] = (dtype, tuple(shape), os.urandom(nbytes))
    parcel = Parcel(tensors, meta)
    path = f"/dev/shm/slackwater-test-{os.getpid()}"
    with Arena.open(path, 256 << 10, block_bytes=4096) as arena:
        store = HandleStore("h", arena)
        handle = store.put("job", 1, "latents", parcel)
        try:
            assert_same(store.get(wire_trip(handle)), parcel)
        finally:
            arena.unlink()
