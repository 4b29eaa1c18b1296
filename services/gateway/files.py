"""A job's files as HTTP answers."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import Response

from common.asks import Ask
from common.client import SUFFIXES, file_names
from common.errors import ResultExpired
from common.job import JobStatus, Result
from services.gateway.errors import ApiError, not_found
from services.gateway.gateway import Gateway
from services.gateway.movies import MP4
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
    """The n-th file of a job that succeeded, as it was made. Raises ResultExpired, and a 404."""
    content = await _content(gateway, result, n)
    file = result.outputs[n]
    name = file_names(result.id, result.outputs, Path())[n].name
    return _response(content, file.mime, name, file.sha256)


async def movie_response(gateway: Gateway, result: Result, n: int) -> Response:
    """As `file_response`, with an animated picture as the MP4 that players show."""
    movie = await gateway.movies.of(result, n, await _content(gateway, result, n))
    if movie is None:
        return await file_response(gateway, result, n)
    name = file_names(result.id, result.outputs, Path())[n].with_suffix(".mp4").name
    return _response(movie, MP4, name, hashlib.sha256(movie).hexdigest())


async def _content(gateway: Gateway, result: Result, n: int) -> bytes:
    if not 0 <= n < len(result.outputs):
        raise not_found(f"job {result.id} has {len(result.outputs)} outputs; there is no {n}")
    [content] = await gateway.client.ask(Ask((("GET", result.outputs[n].key),)))
    if content is None:
        raise ResultExpired(result.id, result.status, "output")
    found: bytes = content
    return found


def _response(content: bytes, mime: str, name: str, sha256: str) -> Response:
    known = mime in SUFFIXES
    return Response(
        content,
        # A worker says what it made; no page or script is ever served from here under that name.
        media_type=mime if known else "application/octet-stream",
        headers={
            "ETag": f'"{sha256}"',
            # It never changes, and may show what only its owner should see.
            "Cache-Control": "private, max-age=3600, immutable",
            "Content-Disposition": f'{"inline" if known else "attachment"}; filename="{name}"',
            "X-Content-Type-Options": "nosniff",
        },
    )
