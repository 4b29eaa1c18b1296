"""Where the state of a chunk is written before its report: in the host's arena, or far from it.

The arena outlives every process, and not its host. A job that has cost much goes to Redis, so that
its next chunk can begin anywhere, and so after the host has started again.
"""

from __future__ import annotations

import logging
from typing import Any

from common.handles import Handle, HandleError, HandleStore
from common.models import parcels
from common.stage import Row

log = logging.getLogger("slackwater.worker")

FAR = "redis"


class Checkpoints:
    def __init__(self, store: HandleStore, device: Any, host_risk_s: float = 0.0) -> None:
        """`host_risk_s`: so many seconds of work on a job may be lost with this host; 0: any."""
        self._store, self._device, self._risk_s = store, device, host_risk_s
        self.far = 0  # chunks whose state was left in Redis for this

    def write(
        self, seq: int, row: Row, parts: dict[str, Any], at_risk_s: float
    ) -> dict[str, Handle]:
        """Handles of `parts`, by name, in fresh space; `at_risk_s` is what the job's steps have
        cost. Where they go far, so do the older parts without which they are of no use.

        Raises HandleError and leaves nothing where there is no room.
        """
        packed = {part: parcels.write(part, values, self._device) for part, values in parts.items()}
        if 0 < self._risk_s <= at_risk_s:
            try:
                found = self._put(seq, row, packed, FAR)
                self.far += 1
                return found
            except HandleError as error:
                if error.kind != "full":
                    raise
                log.warning("the state of job %s stays on this host: %s", row.job, error)
        return self._put(seq, row, packed, "auto")

    def _put(self, seq: int, row: Row, packed: dict[str, Any], where: str) -> dict[str, Handle]:
        written: dict[str, Handle] = {}
        try:
            for part, parcel in packed.items():
                written[part] = self._store.put(row.job, seq, part, parcel, where)
            for part, handle in row.handles.items() if where == FAR else ():
                if part not in written and handle.where not in (FAR, "inline"):
                    older = self._store.get(handle)
                    written[part] = self._store.put(row.job, seq, part, older, where)
        except BaseException:
            for handle in written.values():
                self._store.free(handle)
            raise
        return written
