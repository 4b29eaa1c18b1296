"""What a worker's watchers (figures, traces) are told of each task once it is reported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.stage import Outcome, Task

log = logging.getLogger("slackwater.worker")


@dataclass(slots=True)
class Ran:
    """One task. Times in seconds since the epoch by Redis' clock.

    `waited_s` of `seconds` it waited for its state to be read; `returned`: it was handed back as
    it was. `verdict` is the report script's: done, void (it was taken away before) or unknown.
    """

    task: Task
    outcomes: Sequence[Outcome]
    begun_s: float
    seconds: float = 0.0
    waited_s: float = 0.0
    returned: bool = False
    verdict: str = ""
    reported_s: float = 0.0


Watcher = Callable[[Ran], None]


def tell(watchers: Sequence[Watcher], ran: Ran) -> None:
    """What goes wrong with a watcher costs no task."""
    for watcher in watchers:
        try:
            watcher(ran)
        except Exception:
            log.exception("seq %d: a watcher failed", ran.task.seq)
