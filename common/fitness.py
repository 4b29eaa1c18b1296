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
# What Python raises of values that code was not written for. Jobs that are alike bring them to any
# worker, so it takes more of them to blame this one.
OF_VALUES = frozenset(
    {
        "ArithmeticError", "AssertionError", "AttributeError", "IndexError", "KeyError",
        "LookupError", "NotImplementedError", "OverflowError", "TypeError", "ValueError",
        "ZeroDivisionError",
    }
)  # fmt: skip
FAILURES_OF_VALUES = 12
# After an error of the device's own the CUDA context is gone, whatever runs next.
BROKEN_DEVICE = ("CUDA error", "HIP error", "CUDNN_STATUS_EXECUTION_FAILED", "NCCL error")


def breaks_process(error: str) -> bool:
    """Whether `error`, as a stage said it, leaves the process unable to run anything else."""
    return any(sign in error for sign in BROKEN_DEVICE)


class Fitness:
    """Remembers how this worker's tasks ended; `unfit` says why it should end, "" if not."""

    def __init__(self) -> None:
        self.unfit = ""
        # Jobs that failed since one succeeded here.
        self._failed: deque[str] = deque(maxlen=FAILURES)
        self._failed_of_values: deque[str] = deque(maxlen=FAILURES_OF_VALUES)

    def note(self, ends: Iterable[tuple[str, str, str]]) -> None:
        """How one task ended: (job, error code, error) of each row that ran."""
        for job, code, error in ends:
            if breaks_process(error):
                self.unfit = f"its device is broken: {error}"
            elif code not in SUSPICIOUS:
                if not code:
                    self._failed.clear()
                    self._failed_of_values.clear()
                continue
            else:
                self._note_failure(job, error)

    def _note_failure(self, job: str, error: str) -> None:
        """A job that fails again says nothing new about the worker."""
        of_values = error.partition(":")[0] in OF_VALUES
        failed = self._failed_of_values if of_values else self._failed
        if job in failed:
            return
        failed.append(job)
        if len(failed) == failed.maxlen:
            self.unfit = self.unfit or (
                f"its last {len(failed)} tasks of different jobs failed ({', '.join(failed)}); the "
                f"last: {error}"
            )
