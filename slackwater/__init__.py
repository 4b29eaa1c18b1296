"""What users import: `from slackwater import Client`. No logic here."""

from common.aclient import AsyncClient, AsyncJobHandle
from common.checks import InvalidRequest
from common.client import Client, JobHandle
from common.errors import (
    JobCanceled,
    JobError,
    JobFailed,
    JobLost,
    JobRefused,
    RedisAway,
    ResultExpired,
    SlackwaterError,
    UnknownJob,
    WaitTimeout,
)
from common.job import ErrorCode, JobStatus, OutputFile, Result
from common.patience import RedisRefused
from common.record import JobEvent, JobRecord, WorkerRecord

__all__ = [
    "AsyncClient",
    "AsyncJobHandle",
    "Client",
    "ErrorCode",
    "InvalidRequest",
    "JobCanceled",
    "JobError",
    "JobEvent",
    "JobFailed",
    "JobHandle",
    "JobLost",
    "JobRecord",
    "JobRefused",
    "JobStatus",
    "OutputFile",
    "RedisAway",
    "RedisRefused",
    "Result",
    "ResultExpired",
    "SlackwaterError",
    "UnknownJob",
    "WaitTimeout",
    "WorkerRecord",
]
