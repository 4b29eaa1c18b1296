"""What `python -m encoder_svc`, `denoise_svc` and `decoder_svc` have in common."""

from __future__ import annotations

from typing import Any

from common import health
from common.arena import Arena, owner_name
from common.connect import blocking, writing
from common.fitness import EXIT_UNFIT
from common.handles import HandleStore
from common.keys import Keys
from common.logs import set_up
from common.noop import NoopCosts, NoopStage
from common.scripts import text
from common.settings import Settings, from_command_line, single_threaded, ttls_of
from common.stage import DENOISE, ENCODE, Stage
from common.worker import Identity, Worker

# States this small travel in the handle; twelve rows of them still fit a task message.
INLINE_BYTES = 64


def serve(kind: str, settings: Settings) -> None:
    """Run one stage worker until SIGTERM or until it is drained.

    Raises SystemExit(EXIT_UNFIT) if it took itself out: a fresh process may do better.
    """
    redis, keys = writing(settings.redis_url), Keys(settings.prefix)
    arena = Arena.open(settings.arena_path, settings.arena_bytes)
    store = HandleStore(
        settings.host,
        arena=arena,
        redis=redis,
        prefix=settings.prefix,
        inline_bytes=INLINE_BYTES,
        prefer=settings.states,
    )
    stage = make_stage(kind, settings, store)
    worker = Worker(
        lambda: blocking(settings.redis_url),
        lambda: writing(settings.redis_url),
        keys,
        ttls_of(settings),
        stage,
        Identity.new(kind, settings.served_name(), settings.host, settings.device),
        lease_s=settings.worker_lease_s,
        counts=lambda: {**store.counts, **stage.counts()},
        sweep=lambda: _sweep(redis, keys, store),
        connect_pulse=lambda: writing(settings.redis_url, settings.worker_lease_s / 3),
    )
    health.announce(kind, worker.who.name)
    worker.drain_on_sigterm()
    try:
        worker.run()
    finally:
        arena.close()
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


def _sweep(redis: Any, keys: Keys, store: HandleStore) -> int:
    """Free arena blocks of jobs that have ended: only a process that died leaves any."""
    active = {owner_name(text(job)) for job in redis.smembers(keys.active)}
    return store.sweep(lambda owner: owner not in active)


def main(kind: str, prog: str) -> None:
    single_threaded()
    settings = from_command_line(f"python -m {prog}")
    set_up(settings.log_level)
    serve(kind, settings)
