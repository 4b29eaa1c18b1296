"""Children that the coordinator found to hang: after a while they are killed, and started again.

A worker that hangs in a system call or on a device hears no SIGTERM, and keeps its device and its
memory; one that only was slow lets go of its task, and is left alone.
"""

from __future__ import annotations

from collections.abc import Collection

# A worker that hangs for this long has had time enough for one slow step to end.
KILL_AFTER_S = 30.0


class HungChildren:
    def __init__(self, after_s: float = KILL_AFTER_S) -> None:
        self._after_s = after_s
        self._since: dict[int, float] = {}

    def overdue(self, hung: Collection[int], now: float) -> list[int]:
        """Those of the pids that hang `now` (s, monotonic) that have done so for too long."""
        self._since = {pid: self._since.get(pid, now) for pid in hung}
        return [pid for pid, since in self._since.items() if now - since >= self._after_s]
