"""A coordinator from settings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from common.keys import Keys
from common.metrics.http import serve
from common.metrics.registry import Registry
from common.outgoing import Allowed
from common.params import PoolDefaults
from common.settings import Settings, ttls_of
from common.tracing import open_spans
from common.uploads import Prefixes
from services.coordinator.admission import Admission
from services.coordinator.core import Core
from services.coordinator.hung import Watch
from services.coordinator.metrics import CoordinatorMetrics
from services.coordinator.service import Coordinator
from services.coordinator.traces import JobTraces
from services.costs.model import CostModel
from services.policies import make_policy
from services.policies.base import View


def core_maker(settings: Settings) -> Callable[[], Core]:
    """Makes an empty core, as each new lead needs one."""

    def make() -> Core:
        core = Core(
            policy=make_policy(settings.policy),
            costs=CostModel(),
            admission=Admission(
                pool=PoolDefaults(
                    exact=settings.exact,
                    model=settings.default_model,
                    outgoing=Allowed.parse(settings.outgoing_hosts),
                    uploads=Prefixes.parse(settings.upload_prefixes),
                ),
                max_jobs=settings.max_jobs,
                max_backlog_s=settings.max_backlog_s,
                slo_scale=settings.slo_scale,
                admit=settings.admit,
            ),
            view=View(
                ranks=[],
                lead_s=settings.lead_ms / 1000,
                chunk_s=settings.chunk_ms / 1000,
                pack_s=settings.pack_ms / 1000,
                ahead=settings.encode_ahead,
                patience_s=settings.patience_s,
                batch=settings.batch,
            ),
        )
        core.refresh_s = settings.refresh_ms / 1000
        core.max_attempts = settings.max_attempts
        core.watch = Watch(settings.hang_s, settings.hang_factor, settings.hang_first_s)
        return core

    return make


def build(settings: Settings, redis: Any) -> Coordinator:
    return Coordinator(
        redis,
        Keys(settings.prefix),
        ttls_of(settings),
        core_maker(settings),
        lease_s=settings.leader_lease_s,
        worker_lease_s=settings.worker_lease_s,
        wait_replicas=settings.redis_wait_replicas,
    )


def observe(coordinator: Coordinator, settings: Settings) -> Callable[[], None]:
    """Figures and traces, as far as the settings want them; what it returns ends them."""
    ends = ExitStack()
    if settings.metrics_port:
        registry = Registry()
        coordinator.watchers.add(CoordinatorMetrics(registry, coordinator))
        ends.callback(serve(registry, settings).close)
    spans = open_spans(settings, "coordinator")
    if spans is not None:
        coordinator.watchers.add(JobTraces(spans))
        ends.callback(spans.close)
    return ends.close
