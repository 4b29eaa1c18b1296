"""What all viewers know: a snapshot for a new one, and what a look changed for the others."""

from __future__ import annotations

from collections import deque
from typing import Any

from services.gateway.dashboard.sight import Json, Sight, bar_json
from services.timeline.runs import natural

# What the chart can look back on, and jobs that the shares are of.
HISTORY_S = 120.0
MOST_ENDED = 200
# Ids of jobs that have ended and need no second look: those of any bar in the history.
MOST_SEEN = 20_000


class Board:
    """Folds one look after the other; no I/O, no clock."""

    def __init__(self) -> None:
        self.last = ""  # entry of the timeline to go on behind
        self.seen: dict[str, None] = {}
        self._whole: Json = {}
        self._jobs: dict[str, Json] = {}
        self._previews: dict[str, Json] = {}
        self._ended: deque[Json] = deque(maxlen=MOST_ENDED)
        self._bars: deque[list[Any]] = deque()
        self._ranks: dict[str, Json] = {}

    @property
    def known(self) -> list[str]:
        """Jobs that were active."""
        return list(self._jobs)

    def snapshot(self) -> Json:
        """All there is to show."""
        return {
            **self._whole,
            "jobs": self._jobs,
            "previews": self._previews,
            "ended": list(self._ended),
            "bars": list(self._bars),
        }

    def fold(self, sight: Sight) -> Json:
        """Take in a look; what it changed.

        `jobs` maps ids to the fields that are new, or to None for one that is no longer active;
        `previews` likewise; `ended` and `bars` are to be added; all else replaces what was there.
        """
        self.last = sight.last
        bars = [bar_json(bar) for bar in sight.bars if bar.end_s > sight.now - HISTORY_S]
        self._bars.extend(bars)
        while self._bars and self._bars[0][3] < sight.now - HISTORY_S:
            self._bars.popleft()
        ended = [job for job in sight.ended if job["id"] not in self.seen]
        ended.sort(key=lambda job: job["finished"] or 0.0)
        self._ended.extend(ended)
        self._remember([job["id"] for job in ended])
        change: Json = {
            "now": sight.now,
            "jobs": _difference(self._jobs, sight.jobs),
            "previews": _difference(self._previews, sight.previews),
            "bars": bars,
            "ended": ended[-MOST_ENDED:],
        }
        self._jobs, self._previews = sight.jobs, sight.previews
        whole: Json = {
            "now": sight.now,
            "pool": {"active": sight.active, "leads": sight.leads, "policy": sight.policy},
            "ranks": self._ranks_of(sight),
            "running": sight.running,
            "memory": sight.memory,
        }
        change |= {name: part for name, part in whole.items() if part != self._whole.get(name)}
        self._whole = whole
        return {name: part for name, part in change.items() if part or name in whole}

    def _remember(self, ids: list[str]) -> None:
        self.seen |= dict.fromkeys(ids)
        while len(self.seen) > MOST_SEEN:
            del self.seen[next(iter(self.seen))]

    def _ranks_of(self, sight: Sight) -> list[Json]:
        """Workers, and those gone that still have a bar in the history. A rank keeps the number
        that it had when it was first seen."""
        here = {worker["name"]: worker for worker in sight.workers}
        shown = {bar[0]: bar[1] for bar in self._bars}
        names = sorted({*here, *shown}, key=natural)
        ranks = {name: self._ranks[name] for name in names if name in self._ranks}
        for name in names:
            rank = here.get(name) or ranks.get(name) or {"name": name, "stage": shown[name]}
            number = ranks[name]["number"] if name in ranks else _free(rank["stage"], ranks)
            ranks[name] = {**rank, "number": number, "gone": name not in here}
        self._ranks = ranks
        return [ranks[name] for name in names]


def _free(stage: str, ranks: dict[str, Json]) -> int:
    """The smallest number, from 1, that no rank of this stage has."""
    taken = {rank["number"] for rank in ranks.values() if rank["stage"] == stage}
    return next(n for n in range(1, len(taken) + 2) if n not in taken)


def _difference(before: dict[str, Json], after: dict[str, Json]) -> dict[str, Json | None]:
    """By name the fields that changed; None for what is no longer there."""
    changed: dict[str, Json | None] = dict.fromkeys(before.keys() - after.keys())
    for name, new in after.items():
        old = before.get(name, {})
        fields = {key: value for key, value in new.items() if key not in old or old[key] != value}
        if fields:
            changed[name] = fields
    return changed
