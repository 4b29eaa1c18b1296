"""The OpenAPI page: what FastAPI cannot see because bodies are taken as they come."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway import schemas

REQUESTS: tuple[type[BaseModel], ...] = (
    schemas.JobRequest, schemas.ImageRequest, schemas.ImageEditRequest, schemas.VideoRequest,
)  # fmt: skip
REF = "#/components/schemas/{model}"

MEANING = {
    400: "A value that does not fit; `param` names the field, the message the remedy",
    401: "No API key, or one that is not known",
    404: "Not known here",
    409: "Taken by another job, canceled, or not ended yet",
    410: "The job ended, and its result or file has expired",
    413: "Larger than allowed",
    415: "Another content type is wanted",
    422: "The Idempotency-Key was used with another body",
    429: "Too many; Retry-After says when to come back",
    500: "The model failed on this job",
    503: "Not ready",
    504: "Its deadline is past, or it did not end in the time a request waits",
}
# An event stream is described by its events, as OpenAPI 3.2 does.
EVENT = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "id": {"type": "string", "description": "to go on behind it: Last-Event-ID"},
        "event": {"type": "string", "description": "queued, running, step, preview, …, succeeded"},
        "data": {"type": "string", "description": "JSON; the last one has the whole job"},
    },
}
WAIT = {
    "name": "Prefer", "in": "header", "required": False, "schema": {"type": "string"},
    "description": "`wait=N`: answer when the job has ended, or after N seconds with how it stands",
    "example": "wait=10",
}  # fmt: skip
ONCE = {
    "name": "Idempotency-Key", "in": "header", "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
    "description": "the same key and body is the same job",
}  # fmt: skip


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route for its errors."""
    return {status: {"model": schemas.Error, "description": MEANING[status]} for status in statuses}


def body(
    model: type[BaseModel], example: dict[str, Any], *kinds: str, headers: bool = True
) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body itself."""
    media = {"schema": {"$ref": REF.format(model=model.__name__)}, "example": example}
    return {
        "requestBody": {"required": True, "content": dict.fromkeys(kinds, media)},
        "parameters": [WAIT, ONCE] if headers else [],
    }


def describe(app: FastAPI, locked: bool) -> dict[str, Any]:
    """The whole schema of `app`; `locked`: API keys are asked for."""
    page = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    components = page["components"]["schemas"]
    _, definitions = models_json_schema(
        [(model, "validation") for model in REQUESTS], ref_template=REF
    )
    components |= definitions["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    page["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for methods in page["paths"].values():
        for operation in methods.values():
            answers = operation["responses"]
            if "HTTPValidationError" in str(answers.get("422")):
                del answers["422"]  # such a value is answered with 400
            if "401" in answers:
                operation["security"] = [{"key": []}] if locked else [{}, {"key": []}]
    return page
