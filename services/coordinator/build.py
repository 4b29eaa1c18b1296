"""A coordinator from settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.keys import Keys
from common.params import PoolDefaults
from common.settings import Settings, ttls_of
from services.coordinator.admission import Admission
from services.coordinator.core import Core
from services.coordinator.hung import Watch
from services.coordinator.service import Coordinator
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
                pool=PoolDefaults(exact=settings.exact, model=settings.default_model),
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
    )
