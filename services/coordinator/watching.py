"""Those who look on while the coordinator works: figures, traces, the log.

They change nothing, and what goes wrong with one of them stays with it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from services.coordinator import events as ev

if TYPE_CHECKING:
    from services.coordinator.core import Core

log = logging.getLogger("slackwater.coordinator")


class Watcher(Protocol):
    def heard(self, event: ev.Event, core: Core, now: float) -> None:
        """Something came; the core has yet to be told."""
        ...

    def did(self, effect: ev.Effect, verdict: str, core: Core, now: float) -> None:
        """Redis has answered an effect that was sent at `now`; the core has yet to be told."""
        ...


class Watchers:
    """Several as one. One that raises is not asked again."""

    def __init__(self, watchers: Sequence[Watcher] = ()) -> None:
        self._all = list(watchers)

    def add(self, watcher: Watcher) -> None:
        self._all.append(watcher)

    def heard(self, event: ev.Event, core: Core, now: float) -> None:
        for watcher in self._all:
            try:
                watcher.heard(event, core, now)
            except Exception:
                self._dismiss(watcher)

    def did(self, effect: ev.Effect, verdict: str, core: Core, now: float) -> None:
        for watcher in self._all:
            try:
                watcher.did(effect, verdict, core, now)
            except Exception:
                self._dismiss(watcher)

    def _dismiss(self, watcher: Watcher) -> None:
        log.exception("%s failed and looks on no more", type(watcher).__name__)
        self._all = [other for other in self._all if other is not watcher]
