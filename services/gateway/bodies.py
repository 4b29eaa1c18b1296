"""Request bodies: bounded, read once, and taken as they are."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.client import new_id
from services.gateway.errors import ApiError, bad

JSON, MULTIPART = "application/json", "multipart/form-data"
FORM = "application/x-www-form-urlencoded"
MOST_FIELDS = 200
MOST_FILES = 20
# OpenAI's clients tell it with an error.
REQUEST_ID = b"x-request-id"


class Guard:
    """ASGI: gives each answer an id, and lets no body grow beyond what is allowed."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, max_upload_bytes: int) -> None:
        self.app, self.max_body, self.max_upload = app, max_body_bytes, max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").decode("latin-1").split(";")[0].strip().lower()
        most = self.max_upload if kind == MULTIPART else self.max_body
        request_id = new_id().encode()
        read = 0

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > most:
                raise TooLarge(most)
            return message

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (REQUEST_ID, request_id)]
            await send(message)

        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            return await too_large(most).response()(scope, receive, marked)
        return await self.app(scope, bounded, marked)


class TooLarge(HTTPException):
    """More arrived than was announced or is allowed."""

    def __init__(self, most: int) -> None:
        super().__init__(413, too_large(most).message)


def too_large(most: int) -> ApiError:
    return ApiError(
        413, f"the request is larger than the {most} bytes allowed", code="request_too_large"
    )


async def read_json(request: Request) -> dict[str, Any]:
    """The JSON object in the body, with every value as it was sent. Raises a 400 or 415."""
    if content_type(request) != JSON:
        raise ApiError(415, f"the body must be {JSON}", param="Content-Type", code="unsupported")
    try:
        value = json.loads(await request.body(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise bad("body", f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad("body", f"must be an object with parameters, not {type(value).__name__}")
    return value


async def read_form(request: Request) -> tuple[dict[str, str], dict[str, UploadFile]]:
    """Fields and files of a form; a list has come as name[]. Raises a 400 or 415."""
    if content_type(request) not in (MULTIPART, FORM):
        raise ApiError(
            415, f"the body must be {MULTIPART}", param="Content-Type", code="unsupported"
        )
    try:
        form = await request.form(max_files=MOST_FILES, max_fields=MOST_FIELDS)
    except (MultiPartException, UnicodeDecodeError) as error:
        raise bad("body", f"is not a form: {error}") from error
    fields: dict[str, str] = {}
    files: dict[str, UploadFile] = {}
    for key, value in form.multi_items():
        name = key.removesuffix("[]")
        if isinstance(value, UploadFile):
            files[name] = value
        elif key.endswith("[]") and name in fields:
            fields[name] += f" {value}"
        elif name in fields:
            raise bad(name, "is given twice")
        else:
            fields[name] = value
    return fields, files


def known_query(request: Request) -> None:
    """Refuse what a path does not know behind its question mark, rather than ignore it."""
    route: APIRoute = request.scope["route"]
    known = {field.alias for field in route.dependant.query_params}
    for name in request.query_params:
        if name not in known:
            there = f"; there are {', '.join(sorted(known))}" if known else ""
            raise bad(name[:64], f"is not a parameter of this path{there}")


def content_type(request: Request) -> str:
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:64]!r} is given twice")
        found[name] = value
    return found
