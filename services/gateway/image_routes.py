"""`/v1/images/…` as OpenAI has it: one request, one job, answered when its pictures are there."""

from __future__ import annotations

import base64
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from common.job import Result
from services.gateway import bodies, schemas
from services.gateway.access import Caller, caller_of
from services.gateway.errors import DO_NOT_RETRY, ApiError, bad
from services.gateway.gateway import Gateway, gateway_of
from services.gateway.jobs import Pushed
from services.gateway.openapi import body, errors
from services.gateway.prefer import applied, wait_s

router = APIRouter(tags=["images"])

# What these say is what happens here anyway. Everything else goes to the coordinator, which
# refuses what the model does not know.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (None, "auto", "opaque"),
    "moderation": (None, "auto", "low"),
    "partial_images": (None, 0),
    "quality": (None, "auto"),
    "size": (None, "auto"),
    "stream": (None, False),
    "style": (None,),
    "n": (None,),
    "model": (None,),
    "output_format": (None,),
    "output_compression": (None,),
    "user": (None,),
}
FORMATS = ("b64_json", "url")
EXAMPLE = {
    "prompt": "a large red circle on a blue background",
    "size": "128x128",
    "n": 2,
    "seed": 7,
    "num_inference_steps": 20,
    "slo_ms": 10000,
}


def job_of(asked: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The job's parameters and the response format of OpenAI's parameters. Raises a 400."""
    params = dict(asked)
    wanted = params.pop("response_format", None)
    if wanted is None:
        wanted = FORMATS[0]
    if wanted not in FORMATS:
        raise bad("response_format", f"{wanted!r:.64} is none of {', '.join(FORMATS)}")
    for name, values in NEUTRAL.items():
        if name in params and any(_same(params[name], value) for value in values):
            del params[name]
    if "stream" in params:
        raise bad("stream", "pictures are not streamed here; GET /v1/jobs/{id}/events has progress")
    identifier = params.pop("safety_identifier", None)
    if identifier is not None:
        params.setdefault("user", identifier)
    return params, wanted


def _same(value: Any, neutral: Any) -> bool:
    """Equal and of one type: 0 == False in Python, and is something else in JSON."""
    return type(value) is type(neutral) and bool(value == neutral)


@router.post(
    "/v1/images/generations",
    summary="Make pictures and wait for them",
    response_model=None,
    responses={
        200: {"model": schemas.ImagesResponse},
        202: {"model": schemas.Job, "description": "Not done within `Prefer: wait=N`; it goes on"},
        **errors(400, 401, 409, 410, 413, 415, 422, 429, 500, 503, 504),
    },
    openapi_extra=body(schemas.ImageRequest, EXAMPLE, bodies.JSON),
)
async def generate(
    request: Request,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    caller: Annotated[Caller, Depends(caller_of)],
) -> Response:
    """If the client goes away meanwhile, the job is canceled, unless it has an Idempotency-Key."""
    params, wanted = job_of(await bodies.read_json(request))
    await gateway.models.manifest_for(params.get("model"), video=False, instead="/v1/videos")
    pushed = await gateway.jobs.push(request, caller, params)
    patience_s = wait_s(request)
    try:
        result = await gateway.jobs.wait(
            request, pushed, gateway.settings.http_wait_s if patience_s is None else patience_s
        )
    except ClientDisconnect:
        await gateway.jobs.abandon(pushed)
        raise
    if result is None:
        return await _not_yet(request, gateway, pushed, patience_s)
    if result.status != "succeeded":
        await gateway.jobs.refuse(pushed, result)
    answer = await _images(request, gateway, result, wanted)
    return JSONResponse(answer, headers=applied(patience_s))


async def _not_yet(
    request: Request, gateway: Gateway, pushed: Pushed, patience_s: float | None
) -> Response:
    place = {"Location": f"/v1/jobs/{pushed.id}"}
    if patience_s is None:
        raise ApiError(
            504,
            f"job {pushed.id} has not ended within {gateway.settings.http_wait_s:g} s; it goes on: "
            f"GET /v1/jobs/{pushed.id}",
            code="not_yet",
            headers=DO_NOT_RETRY | place,
        )
    found = await gateway.job_json(request, pushed.id)
    return JSONResponse(found, 202, applied(patience_s) | place)


async def _images(
    request: Request, gateway: Gateway, result: Result, wanted: str
) -> dict[str, Any]:
    links = gateway.links(request)
    if wanted == "url":
        data = [{"url": links.output(result.id, n)} for n in range(len(result.outputs))]
    else:
        files = await gateway.files(result)
        data = [{"b64_json": base64.b64encode(content).decode()} for content in files]
    first = result.outputs[0]
    return {
        "created": int(time.time()),
        "data": data,
        "output_format": first.mime.rpartition("/")[2],
        "size": f"{first.width}x{first.height}",
        "slackwater": {
            "id": result.id,
            "seed": result.seed,
            "params": result.params,
            "timings": result.timings,
            "on_time": result.on_time,
            "notes": list(result.notes),
        },
    }


@router.post(
    "/v1/images/edits",
    summary="Change pictures, where the model takes any",
    response_model=None,
    responses=errors(400, 401, 413, 415, 503),
    openapi_extra=body(
        schemas.ImageEditRequest,
        {"image": "(a file)", "prompt": "make it blue"},
        bodies.MULTIPART,
        headers=False,
    ),
    status_code=400,
)
async def edit(
    request: Request,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    _: Annotated[Caller, Depends(caller_of)],
) -> Response:
    """No model that this version can serve takes pictures: a push carries text and numbers."""
    if bodies.content_type(request) == bodies.JSON:
        asked = await bodies.read_json(request)
    else:
        fields, files = await bodies.read_form(request)
        asked = {**fields, **files}
    served = await gateway.models.manifests()
    model = asked.get("model")
    if "image" not in asked and "images" not in asked:
        raise bad("image", "is required")
    if model is not None and model not in served:
        known = ", ".join(sorted(served)) or "none yet"
        raise bad("model", f"{model!r:.64} is not served here; served: {known}")
    raise bad(
        "image",
        f"{model or 'no model served here'} takes {'no' if model else 'a'} picture; POST "
        "/v1/images/generations makes one of a prompt",
        code="unsupported",
    )
