"""What goes wrong, as an HTTP answer in the shape that OpenAI's clients read.

    {"error": {"message": "width: 33 is not a multiple of 16; 32 and 48 are",
               "type": "invalid_request_error", "param": "width", "code": "invalid_request"}}

Refusals come from the coordinator, which alone knows the models; here they only get a status.
"""

from __future__ import annotations

import logging
import math
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from redis.exceptions import NoPermissionError, RedisError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from common.acl import NO_RIGHT
from common.checks import InvalidRequest
from common.errors import JobRefused, RedisAway, ResultExpired, UnknownJob
from common.job import ErrorCode, JobStatus, Result
from services.gateway.reads import Closed

log = logging.getLogger("slackwater.gateway")

INVALID, RATE, SERVER = "invalid_request_error", "rate_limit_error", "server_error"
# What a job's error code means to somebody who waited for its picture; the rest is 500.
STATUS_OF: dict[str, int] = {
    ErrorCode.DEADLINE_MISSED: 504,
    ErrorCode.QUEUE_TIMEOUT: 504,
    ErrorCode.RUN_TIMEOUT: 504,
    ErrorCode.STORAGE_FULL: 503,
}
# OpenAI's clients push again by themselves on 409, 429 and 5xx. A job that the pool tried three
# times, or that somebody canceled, must not come back that way.
DO_NOT_RETRY = {"x-should-retry": "false"}


class ApiError(Exception):
    """An answer that is an error; `param` is the field or header to change."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        kind: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.kind = kind or (SERVER if status >= 500 else RATE if status == 429 else INVALID)
        self.headers = headers or {}

    def behind(self, job: str) -> ApiError:
        """The same to somebody whose job was pushed before it came to this: it goes on, and a
        request sent again would push a second one."""
        said = self.message.partition(";")[0]  # without the advice
        return ApiError(
            self.status,
            f"{said}; job {job} was pushed and goes on: GET /v1/jobs/{job}",
            code=self.code,
            param=self.param,
            kind=self.kind,
            headers=DO_NOT_RETRY | {"Location": f"/v1/jobs/{job}"},
        )

    def response(self) -> JSONResponse:
        error = {
            "message": _encodable(self.message),
            "type": self.kind,
            "param": None if self.param is None else _encodable(self.param),
            "code": self.code,
        }
        return JSONResponse({"error": error}, self.status, self.headers)


def bad(param: str, message: str, code: str = "invalid_request") -> ApiError:
    """A 400 that names the field and begins with it, as the coordinator's do."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def not_found(message: str, code: str = "not_found", param: str | None = None) -> ApiError:
    return ApiError(404, message, code=code, param=param)


def retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def is_refusal(result: Result) -> bool:
    """Whether it never became a job: then it has no effective parameters."""
    return not result.params


def of_result(result: Result, keyed: bool = False) -> ApiError:
    """The answer to a request whose job ended as `result` says, other than well.

    `keyed`: its id was made from an Idempotency-Key.
    """
    code = str(result.error_code or result.status)
    message = result.error or f"the job {result.status}"
    headers: dict[str, str] = {}
    if result.retry_after_s is not None:
        status, headers = 429, retry_after(result.retry_after_s)
    elif code == ErrorCode.CONFLICT and keyed:
        return ApiError(
            422,
            "Idempotency-Key: was used for a request with another body; use a new key",
            param="Idempotency-Key",
            code="idempotency_key_reused",
        )
    elif result.status == JobStatus.CANCELED:
        status, headers = 409, DO_NOT_RETRY
        message = f"job {result.id} was canceled"
    elif is_refusal(result):
        status, headers = 409 if code == ErrorCode.CONFLICT else 400, DO_NOT_RETRY
    else:
        status, headers = STATUS_OF.get(code, 500), DO_NOT_RETRY
        message = f"job {result.id} {result.status}: {message}"
    return ApiError(status, message, code=code, param=result.field or None, headers=headers)


def of_exception(error: Exception) -> ApiError | None:
    """The answer for an exception of the client library; None for one that is not known."""
    match error:
        case InvalidRequest():
            # A push that is too large is one that no model would take.
            return ApiError(400, str(error), param=error.field, code="invalid_request")
        case JobRefused():
            return of_result(error.result)
        case UnknownJob():
            return not_found(f"there is no job {error.job!r}: it is unknown or was forgotten")
        case ResultExpired():
            return ApiError(410, str(error), code="expired")
        case Closed():
            return ApiError(503, "this gateway stops; ask another one", code="stopping")
        case NoPermissionError():
            said = NO_RIGHT.format(error)
            log.error("%s", said)
            return ApiError(503, said, code="no_permission", headers=DO_NOT_RETRY)
        case RedisAway() | RedisError():
            log.warning("Redis is away: %s", error)
            return ApiError(
                503, "the queue is away; try again", code="unavailable", headers=retry_after(1)
            )
    return None


def install(app: FastAPI) -> None:
    """Every error of `app` in the one shape."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        found = _answer_of(error)
        job = getattr(request.state, "pushed", "")
        if job and found.status >= 500 and not isinstance(error, ApiError):
            found = found.behind(job)
        return found.response()

    async def nobody(_: Request, error: Exception) -> Response:
        return Response(status_code=499)  # it is not sent: the client has gone

    app.add_exception_handler(ClientDisconnect, nobody)
    for kind in (
        ApiError, InvalidRequest, JobRefused, UnknownJob, ResultExpired, Closed, RedisAway,
        RedisError, HTTPException, RequestValidationError, Exception,
    ):  # fmt: skip
        app.add_exception_handler(kind, answer)


def _answer_of(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case HTTPException():
            return _of_http(error)
        case RequestValidationError():
            return _of_validation(error)
    known = of_exception(error)
    if known is None:  # Starlette raises it again behind this, so that the log has it
        known = ApiError(500, "the gateway failed; its log says why", code="internal_error")
    return known


def _of_http(error: HTTPException) -> ApiError:
    phrase = HTTPStatus(error.status_code).phrase
    code = phrase.lower().replace(" ", "_")
    message = {
        404: "there is nothing at this path; GET /openapi.json lists what there is",
        405: "this path has other methods; the Allow header lists them",
    }.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {}))


def _of_validation(error: RequestValidationError) -> ApiError:
    first: dict[str, Any] = error.errors()[0]
    name = str(first["loc"][-1]) if first.get("loc") else "request"
    return bad(name, str(first["msg"]))


def _encodable(text: str) -> str:
    """Without halves of surrogate pairs, which came in as JSON escapes and cannot go out."""
    return text.encode("utf-8", "replace").decode()
