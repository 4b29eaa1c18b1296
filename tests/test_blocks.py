"""The device's blocks: nobody gets another's, nothing is lost, who runs last goes first."""

from __future__ import annotations

from itertools import count
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from common.arena import Arena
from common.handles import Handle, HandleStore
from common.models import parcels, schedulers
from common.models.live import LiveJob
from common.models.step_cache import CacheState
from denoise_svc.blocks import BlockPool, BlockTable
from denoise_svc.residents import Residents
from tests import tiny_models  # noqa: F401 - sets threads before torch is imported

CPU = torch.device("cpu")
BLOCK = 1024
BLOCKS = 24


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    layout = a.stride() == b.stride() and a.data_ptr() % 64 == b.data_ptr() % 64
    return a.dtype == b.dtype and a.shape == b.shape and layout and torch.equal(a, b)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5), torch.randn(1000).to(torch.bfloat16), torch.arange(700),
        torch.tensor(2.5), torch.zeros(0, 4), torch.ones(9, dtype=torch.bool),
        torch.randn(4, 30, 7).permute(2, 0, 1), torch.randn(1, 600).expand(3, 600),
        torch.randn(1000)[3:900], torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{tuple(t.stride())}",
)  # fmt: skip
def test_a_tensor_comes_back_as_it_was(tensor: torch.Tensor) -> None:
    """Bits, shape, strides, and the alignment by which CPU kernels round; in memory of its own."""
    pool = BlockPool(CPU, BLOCKS * BLOCK, BLOCK)
    other = torch.randn(50)
    pieces, nbytes = pool.lay_out([other, tensor])
    table = pool.alloc("latents", nbytes)
    assert table is not None
    pool.scatter(table, [other, tensor], pieces)
    before, back = pool.gather(table)
    assert same(before, other)
    assert same(back, tensor)
    back.zero_() if back.numel() and 0 not in back.stride() else None
    assert same(pool.gather(table)[1], tensor)


def test_freed_blocks_are_not_read() -> None:
    """A state that was freed is refused, once and for all."""
    pool = BlockPool(CPU, BLOCKS * BLOCK, BLOCK)
    table = pool.alloc("embeds", 3000)
    assert table is not None
    pool.free(table)
    for use in (pool.gather, pool.free):
        with pytest.raises(ValueError, match="freed before"):
            use(table)
    assert pool.free_blocks == BLOCKS


class Allocator(RuleBasedStateMachine):
    """Random states come, are read and go."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(CPU, BLOCKS * BLOCK, BLOCK)
        self.held: dict[BlockTable, list[torch.Tensor]] = {}

    def fill(self, table: BlockTable, sizes: list[int]) -> None:
        tensors = [torch.rand(size) for size in sizes]
        pieces, _ = self.pool.lay_out(tensors)
        self.pool.scatter(table, tensors, pieces)
        self.held[table] = tensors

    @rule(
        target=tables,
        kind=st.sampled_from(["latents", "embeds", "cache_state"]),
        sizes=st.lists(st.integers(0, 700), max_size=3),
    )
    def alloc(self, kind: Any, sizes: list[int]) -> Any:
        _, nbytes = self.pool.lay_out([torch.rand(size) for size in sizes])
        room = self.pool.blocks_of(nbytes + 64) <= self.pool.free_blocks
        table = self.pool.alloc(kind, nbytes + 64)
        assert (table is not None) == room
        if table is None:
            return multiple()
        self.fill(table, sizes)
        return table

    @rule(table=tables)
    def read(self, table: BlockTable) -> None:
        for kept, tensor in zip(self.held[table], self.pool.gather(table), strict=True):
            assert torch.equal(kept, tensor)

    @rule(table=consumes(tables))
    def free(self, table: BlockTable) -> None:
        self.pool.free(table)
        del self.held[table]

    @invariant()
    def every_block_has_one_owner(self) -> None:
        owned = [block for table in self.held for block in table.blocks]
        assert len(owned) == len(set(owned))
        assert len(owned) + self.pool.free_blocks == BLOCKS
        assert sum(self.pool.used_bytes.values()) == len(owned) * BLOCK


TestAllocator = Allocator.TestCase
TestAllocator.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def live_job(latents: int, embeds: int, history: int = 0) -> LiveJob:
    """As a denoiser has it after a chunk, with a scheduler that keeps `history` numbers."""
    scheduler = SimpleNamespace(step_index=1, sigmas=torch.linspace(1, 0, 10))
    marks = schedulers.Marks.of(scheduler)
    scheduler.model_outputs = [None, torch.rand(history)] if history else [None, None]
    state = PipelineState()
    state.set("prompt_embeds", torch.rand(embeds))
    state.set("latents", torch.rand(latents))  # the noise it began with
    job = LiveJob(SimpleNamespace(scheduler=scheduler), state, torch.Generator(), marks)
    job.carried = {"latents": torch.rand(latents)}
    return job


def content(job: LiveJob) -> dict[str, Any]:
    """What must be the same after any journey, as copies."""
    outputs = job.pipe.scheduler.model_outputs
    return {
        "latents": job.carried["latents"].clone(),
        "embeds": job.state.values["prompt_embeds"].clone(),
        "outputs": [None if t is None else t.clone() for t in outputs],
    }


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    outputs = zip(a["outputs"], b["outputs"], strict=True)
    alike = all(x is y if x is None or y is None else torch.equal(x, y) for x, y in outputs)
    return alike and all(torch.equal(a[name], b[name]) for name in ("latents", "embeds"))


def residents(blocks: int) -> Residents:
    return Residents(BlockPool(CPU, blocks * BLOCK, BLOCK), clock=lambda: 0.0)


def test_the_job_with_the_most_slack_goes_first() -> None:
    """It runs last; one with still more slack does not push it out, and one that is late goes
    before all."""
    kept = residents(8)  # two jobs
    assert kept.put("soon", 1, live_job(300, 300), 10.0)
    assert kept.put("later", 2, live_job(300, 300), 20.0)
    assert not kept.put("last", 3, live_job(300, 300), 30.0)
    assert kept.put("urgent", 4, live_job(300, 300), 5.0)
    assert [kept.has(*at) for at in (("soon", 1), ("later", 2), ("urgent", 4))] == [
        True,
        False,
        True,
    ]
    assert kept.evictions == 2
    kept.clear()
    kept.put("late", 5, live_job(300, 300), inf)
    kept.put("soon", 6, live_job(300, 300), 10.0)
    kept.put("later", 7, live_job(300, 300), 20.0)
    assert not kept.has("late", 5)
    assert kept.has("soon", 6)


def test_a_job_whose_time_has_passed_makes_room() -> None:
    """It went on elsewhere or was canceled, and nobody says so; a cache of such a job goes too."""
    now = 0.0
    kept = Residents(BlockPool(CPU, 10 * BLOCK, BLOCK), clock=lambda: now)

    def cache() -> CacheState:
        return CacheState([{"0": SimpleNamespace(residual=torch.rand(300))}])

    for seq, name in enumerate(("old", "older")):
        assert kept.put(name, seq, live_job(300, 300), 10.0 - seq)
    assert kept.put_cache("old", 0, cache(), 10.0)
    now = 20.0
    assert kept.put_cache("new", 1, cache(), 100.0)
    assert kept.put("new", 2, live_job(300, 300), 100.0)
    assert kept.put("newer", 3, live_job(300, 300), 200.0)
    assert [kept.has(name, seq) for seq, name in enumerate(("old", "older", "new", "newer"))] == [
        False, False, True, True,
    ]  # fmt: skip
    assert not kept.put("late", 4, live_job(300, 300), 15.0)
    assert kept.has("new", 2)


def test_a_step_cache_goes_before_any_job() -> None:
    """Also that of the most urgent job; and it pushes out no job."""
    kept = residents(8)

    def cache() -> CacheState:
        return CacheState([{"0": SimpleNamespace(residual=torch.rand(300))}])

    kept.put("urgent", 1, live_job(300, 300), 1.0)
    assert kept.put_cache("urgent", 1, cache(), 1.0)
    assert kept.counts()["cache_state_bytes"] == 2 * BLOCK
    kept.put("relaxed", 2, live_job(300, 300), 99.0)
    assert kept.has("relaxed", 2)
    assert kept.take_cache("urgent", 1) is None
    assert not kept.put_cache("urgent", 1, cache(), 1.0)
    assert kept.has("relaxed", 2)
    assert (kept.evictions, kept.cache_evictions) == (0, 2)


def test_what_cannot_stay_is_left_whole() -> None:
    """A job larger than the pool keeps its tensors, and nobody goes for it."""
    kept = residents(4)
    kept.put("small", 1, live_job(300, 300), inf)
    job = live_job(3000, 3000)
    before = content(job)
    assert not kept.put("large", 2, job, 1.0)
    assert equal(content(job), before)
    assert kept.has("small", 1)


def test_a_job_that_there_is_no_memory_to_copy_does_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Out of memory half way: no block is lost, and the job goes on from its handle."""
    kept = residents(8)
    scatter = kept.pool.scatter
    jobs = [live_job(300, 300), live_job(300, 300)]
    before = [content(job) for job in jobs]
    for job, refused in zip(jobs, ("embeds", "latents"), strict=True):

        def short(table: BlockTable, *args: Any, kind: str = refused) -> None:
            if table.kind == kind:
                raise torch.OutOfMemoryError("no memory")
            scatter(table, *args)

        monkeypatch.setattr(kept.pool, "scatter", short)
        assert not kept.put("job", 1, job, 1.0)
        assert kept.counts()["pool_used_bytes"] == 0
        assert kept.pool.free_blocks == 8
    assert kept.evictions == 2
    assert all(equal(content(job), b) for job, b in zip(jobs, before, strict=True))

    def broken(*_: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(kept.pool, "scatter", broken)
    state = CacheState([{"0": SimpleNamespace(residual=torch.rand(300))}])
    with pytest.raises(ValueError, match="a bug"):
        kept.put_cache("job", 1, state, 1.0)
    assert kept.pool.free_blocks == 8


def test_a_job_that_stays_holds_no_other_memory() -> None:
    """Its tensors lie in the blocks and nowhere else."""
    kept = residents(4)
    job = live_job(300, 300)
    latents = job.carried["latents"]
    before = content(job)
    kept.put("job", 1, job, 1.0)
    assert not any(isinstance(v, torch.Tensor) for v in job.state.values.values())
    latents.zero_()
    back = kept.take("job", 1)
    assert back is job
    assert equal(content(back), before)
    assert kept.counts()["pool_used_bytes"] == 0


class Device(RuleBasedStateMachine):
    """A denoiser's jobs: admitted, run, their reports refused, canceled; and the process dies.

    Whatever happens a job goes on from the state of its last accepted report, from the blocks or
    from its handle.
    """

    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        path = str(Path(self.folder.name) / "arena")
        self.store = HandleStore("h", Arena.open(path, 1 << 20, block_bytes=4096))
        self.names, self.seqs = count(), count(1)
        self.truth: dict[str, tuple[Handle, dict[str, Any]]] = {}
        self.residents = residents(BLOCKS)

    def teardown(self) -> None:
        assert self.store.arena is not None
        for name in list(self.truth):
            self.free(name, self.truth.pop(name)[0])
        assert self.store.arena.stats().claims == 0
        assert self.residents.counts()["pool_used_bytes"] == 0
        self.store.arena.close()
        self.folder.cleanup()

    def free(self, name: str, handle: Handle) -> None:
        self.residents.drop(name, handle.seq)
        self.store.free(handle)

    def report(self, name: str, job: LiveJob, latest_s: float) -> Handle:
        """Written through, kept on the device; the handle that the report would name."""
        seq, state = next(self.seqs), content(job)
        handle = self.store.put(name, seq, "latents", parcels.write("latents", state, CPU))
        self.residents.put(name, seq, job, latest_s)
        self.expected = state
        return handle

    @initialize()
    def begin(self) -> None:
        self.crash()

    @rule(
        target=jobs,
        latents=st.integers(1, 1500),
        embeds=st.integers(1, 1500),
        latest_s=st.sampled_from([1.0, 2.0, 3.0, inf]),
    )
    def admit(self, latents: int, embeds: int, latest_s: float) -> str:
        name = f"job-{next(self.names)}"
        handle = self.report(name, live_job(latents, embeds), latest_s)
        self.truth[name] = handle, self.expected
        return name

    @rule(
        name=jobs,
        accepted=st.booleans(),
        history=st.integers(0, 1500),
        latest_s=st.sampled_from([1.0, 2.0, 3.0, inf]),
    )
    def run(self, name: str, accepted: bool, history: int, latest_s: float) -> None:
        handle, state = self.truth[name]
        job = self.residents.take(name, handle.seq)
        if job is None:
            back = parcels.read("latents", self.store.get(handle), CPU)
            assert equal(back, state)
            job = live_job(1, 1)
            job.carried, job.state.values = {"latents": back["latents"]}, {}
            job.state.set("prompt_embeds", back["embeds"])
            job.pipe.scheduler.model_outputs = back["outputs"]
        assert equal(content(job), state)
        job.carried = {"latents": job.carried["latents"] + 1}
        job.pipe.scheduler.model_outputs = [None, torch.rand(history)]  # it grows
        new = self.report(name, job, latest_s)
        if accepted:
            self.truth[name] = new, self.expected
            self.free(name, handle)
        else:
            self.free(name, new)

    @rule(name=jobs, size=st.integers(300, 3000), latest_s=st.sampled_from([1.0, inf]))
    def cache(self, name: str, size: int, latest_s: float) -> None:
        seq = self.truth[name][0].seq
        residual = torch.rand(size)
        state = CacheState([{"0": SimpleNamespace(residual=residual.clone())}])
        if self.residents.put_cache(name, seq, state, latest_s):
            back = self.residents.take_cache(name, seq)
            assert back is state
            assert torch.equal(back.by_hook[0]["0"].residual, residual)
            self.residents.put_cache(name, seq, state, latest_s)

    @rule(name=consumes(jobs))
    def cancel(self, name: str) -> None:
        self.free(name, self.truth.pop(name)[0])

    @rule()
    def crash(self) -> None:
        self.residents = residents(BLOCKS)

    @invariant()
    def every_block_has_one_owner(self) -> None:
        kept = self.residents
        of_jobs = [*kept._live.values(), *kept._caches.values()]
        owned = [block for r in of_jobs for table in r.tables for block in table.blocks]
        assert len(owned) == len(set(owned))
        assert len(owned) + kept.pool.free_blocks == BLOCKS

    @invariant()
    def nothing_is_kept_of_what_has_ended(self) -> None:
        kept = self.residents
        for resident in (*kept._live.values(), *kept._caches.values()):
            assert resident.seq == self.truth[resident.job][0].seq


TestDevice = Device.TestCase
TestDevice.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
