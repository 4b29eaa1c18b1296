"""What forward passes need of the device beside weights and states: learned from their peaks.

A forward's working memory grows with its units: rows × tokens of a row, those of its picture and
those of its prompt. Each one that ran says how much that was, and how far off the estimate before
it; what may run next is what fits with that margin. Where nothing is known anything may try:
running out of memory is the other teacher (`refused`). What one forward taught fades with those
after it. On CPUs, where memory is everybody's, only a worker with a budget measures.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from math import inf
from pathlib import Path

import torch

from common.models.errors import BadInput
from common.models.live import LiveJob
from common.models.rows import is_out_of_memory

log = logging.getLogger(__name__)

# Of a CUDA device that no budget was set for: the rest is its context's and the allocator's.
SHARE_OF_DEVICE = 0.92
FIRST_MARGIN, LEAST_MARGIN, MOST_MARGIN = 1.2, 1.05, 2.0
# What an observation leaves of what earlier ones taught: margin, bytes a unit, what was refused.
KEEP = 0.98
# Rows whose tokens differ by less count as one size: prompts are of all lengths.
SAME_TOKENS = 64
# So many peaks beyond what there is say that a forward does not fit.
SURE = 2
# The batches that the coordinator forms are for the sizes of so many forwards before.
RECENT = 64


def prompt_tokens(job: LiveJob) -> int:
    """Tokens of the job's prompt or negative prompt, whichever is longer: those that go through
    the denoiser beside the picture's."""
    longest = 0
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        found = job.state.get(name)
        each = found if isinstance(found, list) else [found]  # Z-Image: a tensor a prompt
        lengths = (e.shape[-2] for e in each if isinstance(e, torch.Tensor) and e.dim() > 1)
        longest = max(longest, *lengths, 0)
    return longest


class Meter:
    """Peaks of this process's memory on a device, in bytes: resident memory on CPUs."""

    _clear = Path("/proc/self/clear_refs")

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._blind = False  # a kernel or container that keeps this from its processes

    def now(self) -> int:
        if self._cuda:
            return torch.cuda.memory_allocated(self._device)
        return _status("VmRSS")

    def begin(self) -> int | None:
        """Forget earlier peaks; what is used now, or None where peaks cannot be had."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
            return self.now()
        if self._blind:
            return None
        try:
            self._clear.write_text("5")  # see proc(5): resets VmHWM
        except OSError as error:
            self._blind = True
            log.warning(
                "device_budget_bytes: the peaks of forward passes cannot be measured here (%s); "
                "only running out of memory bounds them",
                error,
            )
            return None
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
        self._per_unit: dict[int, float] = {}  # by size: bytes a unit, the most of late
        self._recent: deque[int] = deque(maxlen=RECENT)  # sizes that ran
        self._refused = inf  # units that did not fit of late
        self._over: dict[tuple[int, int], list[int]] = {}  # by rows and size: peaks beyond room
        self._is_warm = False  # whether a forward ran here

    def need_bytes(self, rows: int, tokens: int) -> float:
        """The estimate for a forward of so many rows, without margin; 0 where nothing is known.

        Of a size that never ran it is scaled from the next larger one, or up from the largest:
        attention without flash grows with the square.
        """
        sizes, size = list(self._per_unit), _size(tokens)
        if not sizes:
            return 0.0
        if size in self._per_unit:
            per_unit = self._per_unit[size]
        else:
            seen = min((other for other in sizes if other > size), default=max(sizes))
            per_unit = self._per_unit[seen] * max(1.0, tokens / seen)
        return per_unit * rows * tokens

    def most_rows(self, tokens: int) -> int | None:
        """Rows of this size that surely fit in one forward, at least 1; None for no limit."""
        units = self._units(tokens)
        return None if units == inf else max(1, int(units / max(1, tokens)))

    def most_units(self) -> int:
        """For the coordinator, whose batches keep to it; 0 for no limit.

        The least that the sizes of late allow: what is larger is cut here, and one that runs no
        more is forgotten. The coordinator counts no prompts: what these add is cut here too.
        """
        recent = set(self._recent.copy())  # another thread asks than the one that learns
        units = min((self._units(size) for size in recent), default=self._refused / 2)
        return 0 if units == inf else max(1, int(units))

    def check(self, rows: int, tokens: int) -> None:
        """BadInput for one no smaller, in rows and in size, than what was measured to need more
        than there is: no other try mends that. Nothing is refused by an estimate, which can be
        far off, nor by one peak, which has what another thread took meanwhile."""
        for (other_rows, size), peaks in self._over.items():
            if rows >= other_rows and _size(tokens) >= size and len(peaks) >= SURE:
                raise BadInput(
                    f"its forward pass needs at least {min(peaks) / 2**20:.0f} MiB and the "
                    f"device's budget leaves {max(0.0, self.room) / 2**20:.0f}; use a smaller "
                    "size or n, or raise device_budget_bytes"
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
        measures = self.room != inf and self._is_warm
        before = self._meter.begin() if measures else None
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                self.refused(rows, tokens)
            raise
        self._is_warm = True
        self._refused /= KEEP
        if before is not None:
            self.learn(rows, tokens, self._meter.peak() - before)

    def learn(self, rows: int, tokens: int, nbytes: int) -> None:
        """A forward of so many rows took `nbytes` more than there was; 0 says nothing of it."""
        units, known = rows * tokens, self.need_bytes(rows, tokens)
        if units <= 0 or nbytes <= 0:
            return
        if known:
            off = min(MOST_MARGIN, nbytes / known)
            self.margin = max(LEAST_MARGIN, off, KEEP * self.margin)
        size = _size(tokens)
        self._per_unit[size] = max(KEEP * self._per_unit.get(size, 0.0), nbytes / units)
        self._recent.append(size)
        if nbytes > self.room:
            self._over.setdefault((rows, size), []).append(nbytes)
        else:  # and so does all that is no larger, whatever was measured before
            for each in [o for o in self._over if o[0] <= rows and o[1] <= size]:
                del self._over[each]

    def _units(self, tokens: int) -> float:
        """Units that fit, were all rows of this size; half of what was refused at most."""
        need = self.need_bytes(1, tokens) * self.margin
        fits = max(0.0, self.room) * tokens / need if need else inf
        return min(fits, self._refused / 2)


def _size(tokens: int) -> int:
    """What a row of so many tokens is known by: the most of those that count as alike."""
    return -(-tokens // SAME_TOKENS) * SAME_TOKENS


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0
