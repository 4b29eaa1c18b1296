"""What a client raises. A job's own end is data (Result); these are for those who want a raise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.job import Result


class SlackwaterError(Exception):
    """All errors of the client; common/checks.py and common/patience.py have two more."""


class OfPush:
    """What an error of `submit…` says of its jobs: `accepted` are handles of those that are pushed
    all the same, `ids` the ids of the others, in their order.

    Where Redis went away, one of `ids` may have been pushed and only the reply lost: the same push
    again, with its id, is the same job.
    """

    accepted: tuple[Any, ...] = ()
    ids: tuple[str, ...] = ()


class JobError(SlackwaterError):
    """A job that did not succeed; `result` says all, the message names field and remedy."""

    def __init__(self, result: Result) -> None:
        said = result.error or "no more is known"
        super().__init__(f"job {result.id} {result.status}: {said}")
        self.result = result
        self.error_code = result.error_code


class JobRefused(JobError, OfPush):
    """A push that never became a job: invalid_request, conflict or queue_full.

    `field` is the parameter to change, `retry_after_s` when to try again, where that helps.
    """

    CODES = frozenset({"invalid_request", "conflict", "queue_full", "deadline_unreachable"})

    def __init__(self, result: Result) -> None:
        super().__init__(result)
        self.field, self.retry_after_s = result.field, result.retry_after_s


class JobFailed(JobError):
    """A job that was tried and failed, or that expired because it could not be on time."""


class JobCanceled(JobError):
    """A job that somebody canceled."""


class UnknownJob(SlackwaterError):
    """No job of this id is known: never pushed, or its record has expired too."""

    def __init__(self, job: str) -> None:
        super().__init__(
            f"no job {job!r} is known here: check the id and the prefix; records of ended jobs go "
            "after job_ttl_s"
        )
        self.job = job


class JobLost(UnknownJob):
    """A job that was pushed, or seen, here, and of which Redis knows nothing any more."""

    def __init__(self, job: str) -> None:
        SlackwaterError.__init__(
            self,
            f"job {job!r} was here and is gone: Redis was emptied or lost its data (or the record "
            "of a job that ended has expired); push it again",
        )
        self.job = job


class ResultExpired(SlackwaterError):
    """The job ended, its record is there, its result or output is not any more."""

    def __init__(self, job: str, status: str, what: str = "result") -> None:
        super().__init__(
            f"job {job} {status}, but its {what} has expired; push it again, or keep results "
            "longer (result_ttl_s, output_ttl_s)"
        )
        self.job, self.status = job, status


class WaitTimeout(SlackwaterError, TimeoutError):
    """The time given to wait is over; the job goes on."""


class RedisAway(SlackwaterError, OfPush, ConnectionError):
    """Redis did not answer, or took no writes, for as long as the client was told to be patient."""


def raise_for(result: Result) -> None:
    """Raise the error that `result` stands for; nothing for one that succeeded."""
    if result.status == "succeeded":
        return
    if result.status == "canceled":
        raise JobCanceled(result)
    if result.error_code in JobRefused.CODES:
        raise JobRefused(result)
    raise JobFailed(result)
