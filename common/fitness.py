"""Whether a worker process is fit to go on: errors that no later task can survive, and a record
of tasks that failed one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

# What the process ends with, so that whatever started it starts a fresh one.
EXIT_UNFIT = 3
# A worker that fails so many tasks of different jobs in a row is itself the likelier cause.
FAILURES = 3
# Errors that may be the worker's own fault; the other codes are the job's, or storage's.
SUSPICIOUS = frozenset({"stage_error", "out_of_memory"})
# After an error of the device's own the CUDA context is gone, whatever runs next.
BROKEN_DEVICE = ("CUDA error", "HIP error", "CUDNN_STATUS_EXECUTION_FAILED", "NCCL error")


def breaks_process(error: str) -> bool:
    """Whether `error`, as a stage said it, leaves the process unable to run anything else."""
    return any(sign in error for sign in BROKEN_DEVICE)


class Fitness:
    """Remembers how this worker's tasks ended; `unfit` says why it should end, "" if not."""

    def __init__(self) -> None:
        self.unfit = ""
        self._failed: deque[tuple[str, str]] = deque(maxlen=FAILURES)  # job, error

    def note(self, ends: Iterable[tuple[str, str, str]]) -> None:
        """How one task ended: (job, error code, error) of each row that ran."""
        for job, code, error in ends:
            if breaks_process(error):
                self.unfit = f"its device is broken: {error}"
            elif code not in SUSPICIOUS:
                if not code:
                    self._failed.clear()
                continue
            else:
                self._note_failure(job, error)

    def _note_failure(self, job: str, error: str) -> None:
        """A job that fails again says nothing new about the worker."""
        if any(job == before for before, _ in self._failed):
            return
        self._failed.append((job, error))
        if len(self._failed) == FAILURES:
            jobs = ", ".join(name for name, _ in self._failed)
            self.unfit = self.unfit or (
                f"its last {FAILURES} tasks of different jobs failed ({jobs}); the last: {error}"
            )
