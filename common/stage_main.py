"""What `python -m encoder_svc`, `denoise_svc` and `decoder_svc` have in common."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common import health
from common.arena import Arena
from common.connect import blocking, writing
from common.fitness import EXIT_UNFIT
from common.gpu_lease import NoGpu, claim
from common.handles import HandleStore
from common.keys import Keys
from common.logs import set_up
from common.metrics.stage import Observed
from common.noop import NoopCosts, NoopStage
from common.owners import orphaned
from common.scripts import text
from common.settings import Settings, from_command_line, single_threaded, ttls_of
from common.stage import DENOISE, ENCODE, Stage
from common.tracing import NoTracing
from common.worker import Identity, Worker

# States this small travel in the handle; twelve rows of them still fit a task message.
INLINE_BYTES = 64


class Stager(ThreadPoolExecutor):
    """The thread that reads and frees a worker's states. It waits for a Redis that is away, and not
    once its worker leaves: a drain ends, whatever Redis does."""

    def __init__(self, store: HandleStore) -> None:
        super().__init__(1, thread_name_prefix="stager")
        self._store = store

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._store.stop_waiting()
        super().shutdown(wait, cancel_futures=cancel_futures)


def serve(kind: str, settings: Settings) -> None:
    """Run one stage worker until SIGTERM or until it is drained.

    Raises SystemExit(EXIT_UNFIT) if it took itself out: a fresh process may do better.
    """
    redis, keys = writing(settings.redis_url), Keys(settings.prefix)
    arena = Arena.open(settings.arena_path, settings.arena_bytes)
    who = Identity.new(kind, settings.served_name(), settings.host, settings.device)
    observed = Observed(settings, kind, who.name)
    store = observed.store(
        settings.host,
        arena=arena,
        redis=redis,
        prefix=settings.prefix,
        inline_bytes=INLINE_BYTES,
        prefer=settings.states,
    )
    # Before torch is imported. Held until this process ends.
    gpu = claim(kind, settings.device, settings.arena_path, settings.gpu_lease)
    stage = make_stage(kind, settings, store)
    worker = Worker(
        lambda: blocking(settings.redis_url),
        lambda: writing(settings.redis_url),
        keys,
        ttls_of(settings),
        stage,
        who,
        lease_s=settings.worker_lease_s,
        stager=Stager(store),
        counts=lambda: {**store.counts, **_room(arena), **stage.counts()},
        sweep=lambda: _sweep(redis, keys, store),
        connect_pulse=lambda: writing(settings.redis_url, settings.worker_lease_s / 3),
        previews=settings.previews,
        watchers=observed.watchers,
        metrics=observed.address,
    )
    observed.show(worker, arena, store.counts, stage.counts)
    health.announce(kind, worker.who.name)
    worker.drain_on_sigterm()
    try:
        worker.run()
    finally:
        health.withdraw(kind)
        observed.close()
        arena.close()
        if gpu is not None:
            gpu.free()
    if worker.unfit:
        raise SystemExit(EXIT_UNFIT)


def make_stage(kind: str, settings: Settings, store: HandleStore) -> Stage:
    """The stage a worker with these settings runs; loads its part of the model."""
    if settings.noop:
        return NoopStage(kind, store, NoopCosts.parse(settings.noop))
    single_threaded()
    from common.models.stages import build_stage  # torch: only now, after the thread settings

    cache = {ENCODE: settings.embed_cache_bytes, DENOISE: settings.device_cache_bytes}
    extra: dict[str, Any] = {"cache_bytes": cache[kind]} if kind in cache else {}
    if kind == DENOISE:
        extra["budget_bytes"] = settings.device_budget_bytes
        extra["mixed_sizes"] = settings.mixed_sizes
        extra["host_risk_s"] = settings.host_risk_s
    return build_stage(
        kind,
        settings.model,
        store,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        attention=settings.attention,
        name=settings.served_name(),
        fast_decode=settings.fast_decode,
        tiled_decode=settings.tiled_decode,
        **extra,
    )


def _room(arena: Arena) -> dict[str, int]:
    """The host's arena, for the worker's record."""
    stats = arena.stats()
    return {"arena_used_bytes": stats.used_bytes, "arena_bytes": stats.size_bytes}


def _sweep(redis: Any, keys: Keys, store: HandleStore) -> int:
    """Free arena blocks of our pool's jobs that have ended: only a process that died leaves any."""
    return store.sweep(orphaned(keys.prefix, map(text, redis.smembers(keys.active))))


def main(kind: str, prog: str) -> None:
    single_threaded()
    settings = from_command_line(f"python -m {prog}")
    set_up(settings.log_level, settings.log_format)
    try:
        serve(kind, settings)
    except NoTracing as why:
        raise SystemExit(str(why)) from None
    except NoGpu as why:
        raise SystemExit(f"no GPU for this worker: {why}") from None
