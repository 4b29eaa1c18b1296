"""What forward passes need of the device beside weights and states: learned from their peaks.

A forward's working memory grows with its units (rows × tokens of a row). Each one that ran says
how much that was, and how far off the estimate before it; what may run next is what fits with that
margin. Where nothing is known anything may try: running out of memory is the other teacher
(`refused`). On CPUs, where memory is everybody's, only a worker with a budget measures.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from math import inf
from pathlib import Path

import torch

from common.models.errors import BadInput

log = logging.getLogger(__name__)

# Of a CUDA device that no budget was set for: the rest is its context's and the allocator's.
SHARE_OF_DEVICE = 0.92
FIRST_MARGIN, LEAST_MARGIN, MOST_MARGIN = 1.2, 1.05, 2.0
# What an observation leaves of the margin that earlier ones taught.
KEEP = 0.98


class Meter:
    """Peaks of this process's memory on a device, in bytes: resident memory on CPUs."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"

    def now(self) -> int:
        if self._cuda:
            return torch.cuda.memory_allocated(self._device)
        return _status("VmRSS")

    def begin(self) -> int:
        """Forget earlier peaks; what is used now."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # see proc(5): resets VmHWM
        return self.now()

    def peak(self) -> int:
        """The most that was used since `begin`."""
        if self._cuda:
            return torch.cuda.max_memory_allocated(self._device)
        return _status("VmHWM")


class Footprint:
    def __init__(
        self, device: torch.device, budget_bytes: int, pool_bytes: int, meter: Meter | None = None
    ) -> None:
        """Made once weights and pool are on the device. `budget_bytes` is all that this process
        may use there; 0 is no limit on CPUs, and nearly all of a CUDA device."""
        self._meter = meter or Meter(device)
        if not budget_bytes and device.type == "cuda":
            _, total = torch.cuda.mem_get_info(device)
            budget_bytes = int(SHARE_OF_DEVICE * total)
        self.budget_bytes = budget_bytes
        self.room = inf
        if budget_bytes:
            taken = self._meter.now()
            # A pool in main memory claims its pages as it fills.
            taken += pool_bytes if device.type != "cuda" else 0
            self.room = budget_bytes - taken
            if self.room <= 0:
                log.warning(
                    "device_budget_bytes: weights and pool take %d of the %d bytes; forward passes "
                    "will not fit",
                    taken,
                    budget_bytes,
                )
        self.margin = FIRST_MARGIN
        self._per_unit: dict[int, float] = {}  # by tokens of a row: bytes a unit, the most seen
        self._refused = inf  # units that once did not fit
        self._is_warm = False  # whether a forward ran here

    def need_bytes(self, rows: int, tokens: int) -> float:
        """The estimate for a forward of so many rows, without margin; 0 where nothing is known.

        Of a size that never ran it is scaled from the next larger one, or up from the largest:
        attention without flash grows with the square.
        """
        if not self._per_unit:
            return 0.0
        if tokens in self._per_unit:
            per_unit = self._per_unit[tokens]
        else:
            larger = [seen for seen in self._per_unit if seen > tokens]
            seen = min(larger) if larger else max(self._per_unit)
            per_unit = self._per_unit[seen] * max(1.0, tokens / seen)
        return per_unit * rows * tokens

    def most_rows(self, tokens: int) -> int | None:
        """Rows of this size that surely fit in one forward, at least 1; None for no limit."""
        units = self._units(tokens)
        return None if units == inf else max(1, int(units / max(1, tokens)))

    def most_units(self) -> int:
        """For the coordinator, whose batches keep to it; 0 for no limit."""
        seen = list(self._per_unit)  # another thread asks than the one that learns
        units = min((self._units(tokens) for tokens in seen), default=self._refused / 2)
        return 0 if units == inf else max(1, int(units))

    def check(self, rows: int, tokens: int) -> None:
        """BadInput for one that would need more than there is, run alone or not: no other try
        mends that. A size that never ran may try, since scaled estimates can be far off."""
        need = self.need_bytes(rows, tokens)
        if tokens in self._per_unit and need > self.room:
            raise BadInput(
                f"its forward pass needs about {need / 2**20:.0f} MiB and the device's budget "
                f"leaves {max(0.0, self.room) / 2**20:.0f}; use a smaller size or n, or raise "
                "device_budget_bytes"
            )

    def refused(self, rows: int, tokens: int) -> None:
        """A forward of so many rows ran out of memory."""
        self._refused = min(self._refused, rows * tokens)

    @contextlib.contextmanager
    def watch(self, rows: int, tokens: int) -> Iterator[None]:
        """Learn from the forwards inside, the largest of which has so many rows.

        Not from the first of a process, whose peak has what is there once and for all: kernels,
        workspaces, the allocator's own.
        """
        if self.room == inf or not self._is_warm:
            yield
            self._is_warm = True
            return
        before = self._meter.begin()
        yield
        self.learn(rows, tokens, self._meter.peak() - before)

    def learn(self, rows: int, tokens: int, nbytes: int) -> None:
        """A forward of so many rows took `nbytes` more than there was; 0 says nothing of it."""
        units, known = rows * tokens, self.need_bytes(rows, tokens)
        if units <= 0 or nbytes <= 0:
            return
        if known:
            off = min(MOST_MARGIN, nbytes / known)
            self.margin = max(LEAST_MARGIN, off, KEEP * self.margin)
        self._per_unit[tokens] = max(self._per_unit.get(tokens, 0.0), nbytes / units)

    def _units(self, tokens: int) -> float:
        """Units that fit, were all rows of this size; half of what was refused at most."""
        need = self.need_bytes(1, tokens) * self.margin
        fits = max(0.0, self.room) * tokens / need if need else inf
        return min(fits, self._refused / 2)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0
