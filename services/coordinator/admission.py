"""Who may enter: validation against the manifests, the deadline, a bounded queue. Pure."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from common.job import ErrorCode
from common.params import InvalidRequest, PoolDefaults, accept, content_of, id_of, read_push
from services.coordinator.events import Pushed, Refuse, Submit
from services.coordinator.state import Job
from services.costs.model import CostModel, shape_of

log = logging.getLogger("slackwater.coordinator")


@dataclasses.dataclass(slots=True)
class Admission:
    pool: PoolDefaults
    max_jobs: int = 10_000  # active jobs; beyond it a push is refused with retry_after
    slo_scale: float = 3.0  # default deadline: arrival + slo_scale × standalone time

    def decide(
        self,
        event: Pushed,
        manifests: Mapping[str, Mapping[str, Any]],
        costs: CostModel,
        active: int,
        backlog_s: float,
    ) -> Submit | Refuse:
        """A Submit whose spec has its deadline, or a Refuse that says what to change."""
        try:
            push = read_push(event.entry, event.raw)
            spec = accept(push, manifests, self.pool)
        except InvalidRequest as error:
            own = id_of(event.entry, event.raw)
            return Refuse(
                entry=event.entry,
                ids=tuple(dict.fromkeys((event.entry, own))),
                content=content_of(event.raw),
                error_code=ErrorCode.INVALID_REQUEST,
                error=str(error),
                field=error.field,
            )
        except Exception as error:  # a push may be refused, but never stop those behind it
            log.exception("push %s could not be read", event.entry)
            return Refuse(
                entry=event.entry,
                ids=(event.entry,),
                content="",
                error_code=ErrorCode.INVALID_REQUEST,
                error=f"payload: could not be read ({type(error).__name__}); please report this",
                field="payload",
            )
        if active >= self.max_jobs:
            wait = max(1.0, round(backlog_s / max(1, active), 1))
            return Refuse(
                entry=event.entry,
                ids=(event.entry,),  # not its own id: the same push must be able to succeed later
                content=spec.content,
                error_code=ErrorCode.QUEUE_FULL,
                error=f"{active} jobs are active and {self.max_jobs} may be; try again in {wait} s",
                retry_after_s=wait,
            )
        shape = shape_of(spec.params, manifests[spec.model])
        if spec.deadline_s is None:
            standalone = Job.of(spec, shape, 0.0).remaining_s(costs)
            scale = self.slo_scale if spec.slo_scale is None else spec.slo_scale
            spec = dataclasses.replace(spec, deadline_s=spec.arrival_s + scale * standalone)
        return Submit(spec=spec, steps=int(spec.params.get("num_inference_steps") or 1))
