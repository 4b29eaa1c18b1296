"""One row, guarded: whatever it raises becomes its Outcome and leaves its neighbours alone."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from time import perf_counter

import torch

from common.handles import HandleError
from common.models.errors import RowFailed
from common.stage import Outcome, Row

log = logging.getLogger(__name__)


def guarded(row: Row, work: Callable[[], Outcome]) -> Outcome:
    """Run `work`; its Outcome with `seconds` filled in, or one that says what went wrong.

    Only errors that leave the whole device unusable are raised.
    """
    began = perf_counter()
    try:
        outcome = work()
    except RowFailed as error:
        outcome = _failed(row, error.code, str(error))
    except HandleError as error:
        code = "storage_full" if error.kind == "full" else "state_lost"
        outcome = _failed(row, code, str(error))
    except Exception as error:
        if is_fatal(error):
            raise
        if is_out_of_memory(error):
            give_back_memory()
            outcome = _failed(row, "out_of_memory", f"not enough memory for this job: {error}")
        else:
            log.exception("job %s failed", row.job)
            outcome = _failed(row, "stage_error", f"{type(error).__name__}: {error}")
        outcome.trace = traceback.format_exc()
    outcome.seconds = perf_counter() - began
    return outcome


def is_fatal(error: Exception) -> bool:
    """Whether the CUDA context is gone, so that no later row can succeed in this process.

    Torch says so in a RuntimeError; other errors may quote a job's own words.
    """
    return isinstance(error, RuntimeError) and "CUDA error: " in str(error)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a smaller piece of work may succeed; torch's CPU allocator has no error class."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def give_back_memory() -> None:
    """What the allocator holds in reserve, back to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _failed(row: Row, code: str, message: str) -> Outcome:
    return Outcome(job=row.job, step=row.start, error_code=code, error=message[:2000])
