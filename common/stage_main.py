"""What `python -m encoder_svc`, `denoise_svc` and `decoder_svc` have in common."""

from __future__ import annotations

from common.arena import Arena
from common.connect import blocking, writing
from common.handles import HandleStore
from common.keys import Keys
from common.logs import set_up
from common.noop import NoopCosts, NoopStage
from common.scripts import Ttls
from common.settings import Settings, from_command_line, single_threaded
from common.stage import Stage
from common.worker import Identity, Worker

# States this small travel in the handle; twelve rows of them still fit a task message.
INLINE_BYTES = 64


def serve(kind: str, settings: Settings) -> None:
    """Run one stage worker until SIGTERM."""
    redis = writing(settings.redis_url)
    arena = Arena.open(settings.arena_path, settings.arena_bytes)
    store = HandleStore(settings.host, arena=arena, redis=redis, prefix=settings.prefix, inline_bytes=INLINE_BYTES)
    stage = _stage(kind, settings, store)
    worker = Worker(
        lambda: blocking(settings.redis_url),
        lambda: writing(settings.redis_url),
        Keys(settings.prefix),
        Ttls(result_s=settings.result_ttl_s, output_s=settings.output_ttl_s, job_s=settings.job_ttl_s),
        stage,
        Identity.new(kind, settings.served_name(), settings.host, settings.device),
        lease_s=settings.worker_lease_s,
    )
    worker.drain_on_sigterm()
    try:
        worker.run()
    finally:
        arena.close()


def _stage(kind: str, settings: Settings, store: HandleStore) -> Stage:
    if settings.noop:
        return NoopStage(kind, store, NoopCosts.parse(settings.noop))
    single_threaded()
    from common.models.stages import build_stage  # torch: only now, after the thread settings

    return build_stage(
        kind,
        settings.model,
        store,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        attention=settings.attention,
    )


def main(kind: str, prog: str) -> None:
    single_threaded()
    settings = from_command_line(f"python -m {prog}")
    set_up(settings.log_level)
    serve(kind, settings)
