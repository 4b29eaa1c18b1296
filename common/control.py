"""What a running stage may ask and tell: the worker's side of common.stage.Showing."""

from __future__ import annotations

import threading
from collections.abc import Callable

from common.inbox import Inbox, Pulse
from common.previews import Previews


class Chunk:
    """The running task, as its stage sees it. Cheap enough for every step: it only looks at flags,
    and leaves what is to be told to the pulse."""

    def __init__(
        self,
        seq: int,
        inbox: Inbox,
        pulse: Pulse,
        draining: threading.Event,
        previews: Previews,
    ) -> None:
        self._seq, self._inbox, self._pulse, self._draining = seq, inbox, pulse, draining
        self._previews = previews
        self._steps: dict[str, int] = {}

    def should_stop(self) -> bool:
        return self._seq in self._inbox.yields or self._draining.is_set()

    def has_left(self, job: str) -> bool:
        return (self._seq, job) in self._inbox.gone

    def progress(self, job: str, step: int) -> None:
        self._steps = {**self._steps, job: step}
        self._pulse.progress(self._seq, self._steps)

    def wants_preview(self, job: str) -> bool:
        return self._previews.wanted(job)

    def preview(self, job: str, step: int, encode: Callable[[], bytes]) -> None:
        self._previews.hand_over(job, step, encode)
