"""A job's files as HTTP answers."""

from __future__ import annotations

from pathlib import Path

from fastapi import Response

from common.asks import Ask
from common.client import SUFFIXES, file_names
from common.errors import ResultExpired
from common.job import JobStatus, Result
from services.gateway.errors import ApiError, not_found
from services.gateway.gateway import Gateway
from services.gateway.views import View


def finished(found: View) -> Result:
    """The result of a job that has files. Raises ResultExpired, and a 409 where it has none."""
    record, result = found.record, found.result
    if not record.is_terminal:
        raise ApiError(
            409, f"job {record.id} is {record.status}; its files come at its end", code="not_ended"
        )
    if record.status != JobStatus.SUCCEEDED:
        why = record.error or "it has no files"
        code = record.error_code or str(record.status)
        raise ApiError(409, f"job {record.id} {record.status}: {why}", code=code)
    if result is None:
        raise ResultExpired(record.id, record.status)
    return result


async def file_response(gateway: Gateway, result: Result, n: int) -> Response:
    """The n-th file of a job that succeeded. Raises ResultExpired, and a 404."""
    if not 0 <= n < len(result.outputs):
        raise not_found(f"job {result.id} has {len(result.outputs)} outputs; there is no {n}")
    file = result.outputs[n]
    [content] = await gateway.client.ask(Ask((("GET", file.key),)))
    if content is None:
        raise ResultExpired(result.id, result.status, "output")
    name = file_names(result.id, result.outputs, Path())[n].name
    known = file.mime in SUFFIXES
    return Response(
        content,
        # A worker says what it made; no page or script is ever served from here under that name.
        media_type=file.mime if known else "application/octet-stream",
        headers={
            "ETag": f'"{file.sha256}"',
            # It never changes, and may show what only its owner should see.
            "Cache-Control": "private, max-age=3600, immutable",
            "Content-Disposition": f'{"inline" if known else "attachment"}; filename="{name}"',
            "X-Content-Type-Options": "nosniff",
        },
    )
