"""`/v1/jobs`: a job with everything there is to say of it, its events, its files."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from common.checks import MAX_INT
from services.gateway import bodies, schemas
from services.gateway.access import Caller, caller_of
from services.gateway.errors import not_found
from services.gateway.events import ENTRY, is_over, stream
from services.gateway.files import file_response, finished
from services.gateway.gateway import Gateway, gateway_of
from services.gateway.jobs import checked_id
from services.gateway.openapi import EVENT, WAIT, body, errors
from services.gateway.prefer import applied, wait_s
from services.gateway.views import View, job_json, views

router = APIRouter(tags=["jobs"])

EXAMPLE = {
    "prompt": "a large blue star on the left on a yellow background",
    "width": 128,
    "height": 128,
    "num_inference_steps": 20,
    "seed": 7,
    "slo_ms": 10000,
    "priority": 5,
    "on_late": "run",
}
PREFER = {"parameters": [WAIT]}


@router.post(
    "/v1/jobs",
    summary="Push a job",
    status_code=202,
    responses={
        200: {"model": schemas.Job, "description": "It has ended"},
        202: {"model": schemas.Job, "description": "It is queued or runs"},
        **errors(400, 401, 409, 410, 413, 415, 422, 429, 503),
    },
    openapi_extra=body(schemas.JobRequest, EXAMPLE, bodies.JSON),
    response_model=None,
)
async def push(
    request: Request,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    caller: Annotated[Caller, Depends(caller_of)],
) -> Response:
    """Answers once the coordinator has taken it; what it refuses is an error here.

    The job goes on if the client goes away.
    """
    pushed = await gateway.jobs.push(request, caller, await bodies.read_json(request))
    await gateway.jobs.admitted(pushed)
    patience_s = wait_s(request)
    if patience_s is not None:
        await gateway.jobs.wait(request, pushed, patience_s)
    return await _answer(request, gateway, pushed.id, patience_s)


async def _answer(
    request: Request, gateway: Gateway, job: str, patience_s: float | None
) -> Response:
    found = await gateway.job_json(request, job)
    status = 200 if found["is_terminal"] else 202
    place = {"Location": f"/v1/jobs/{job}"}
    return JSONResponse(found, status, place | applied(patience_s))


@router.get(
    "/v1/jobs",
    summary="Jobs: running ones, then the queue in order",
    responses={200: {"model": schemas.JobList}, **errors(400, 401, 404, 503)},
    response_model=None,
)
async def listed(
    request: Request,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    _: Annotated[Caller, Depends(caller_of)],
    status: Annotated[
        Literal["active", "all"], Query(description="all: also ended ones, behind the others")
    ] = "active",
    after: Annotated[str | None, Query(description="the last id of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    records = await gateway.client.ps(ended=status == "all")
    ids = [record.id for record in records]
    if after is not None:
        if after not in ids:
            raise not_found("after: there is no such job in this list (any more)", param="after")
        ids = ids[ids.index(after) + 1 :]
    page = ids[:limit]
    known = {record.id: record for record in records}
    links = gateway.links(request)
    found = await gateway.client.do(views(gateway.client.keys, page))
    data: list[dict[str, Any]] = [
        job_json(there if there is not None else View(known[job]), links)
        for job, there in zip(page, found, strict=True)
    ]
    return JSONResponse(
        {
            "object": "list",
            "data": data,
            "has_more": len(ids) > limit,
            "first_id": page[0] if page else None,
            "last_id": page[-1] if page else None,
        }
    )


@router.get(
    "/v1/jobs/{job_id}",
    summary="How a job stands",
    responses={200: {"model": schemas.Job}, **errors(401, 404, 503)},
    response_model=None,
)
async def one(
    request: Request,
    job_id: str,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    _: Annotated[Caller, Depends(caller_of)],
) -> Response:
    return JSONResponse(await gateway.job_json(request, checked_id(job_id)))


@router.delete(
    "/v1/jobs/{job_id}",
    summary="Cancel a job",
    status_code=202,
    responses={
        200: {"model": schemas.Job, "description": "It has ended, however it did"},
        202: {"model": schemas.Job, "description": "It will end within one step"},
        **errors(401, 404, 503),
    },
    openapi_extra=PREFER,
    response_model=None,
)
async def cancel(
    request: Request,
    job_id: str,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    _: Annotated[Caller, Depends(caller_of)],
) -> Response:
    """A job that has ended stays as it ended. `Prefer: wait=N` waits for the end."""
    await gateway.jobs.cancel(checked_id(job_id))
    patience_s = wait_s(request)
    if patience_s is not None:
        await gateway.jobs.ended(request, job_id, patience_s)
    return await _answer(request, gateway, job_id, patience_s)


@router.get(
    "/v1/jobs/{job_id}/events",
    summary="What happens to a job, as server-sent events",
    responses={
        200: {"content": {"text/event-stream": {"schema": EVENT}},
              "description": "Events from the first to the last; then the stream ends"},
        204: {"description": "Last-Event-ID was the last one: do not connect again"},
        **errors(400, 401, 404, 503),
    },
    response_model=None,
)  # fmt: skip
async def events(
    request: Request,
    job_id: str,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    _: Annotated[Caller, Depends(caller_of)],
    last_event_id: Annotated[
        str | None, Header(pattern=ENTRY, description="go on behind this event")
    ] = None,
) -> Response:
    """`step` events count steps; the last event has the whole job. A job goes on whether or not
    somebody listens."""
    job = checked_id(job_id)
    await gateway.client.status(job)
    after = last_event_id or "0"
    if last_event_id is not None and await is_over(gateway, job, after):
        return Response(status_code=204)
    return StreamingResponse(
        stream(gateway, request, job, after),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


@router.get(
    "/v1/jobs/{job_id}/output/{n}",
    summary="A file of a job that succeeded",
    responses={
        200: {"content": {"image/*": {}, "video/*": {}, "application/*": {}},
              "description": "The file, with its own content type"},
        **errors(400, 401, 404, 409, 410, 503),
    },
    response_model=None,
)  # fmt: skip
async def output(
    request: Request,
    job_id: str,
    n: Annotated[int, Path(ge=0, le=MAX_INT)],
    gateway: Annotated[Gateway, Depends(gateway_of)],
    expires: Annotated[str | None, Query(description="of a signed link")] = None,
    signature: Annotated[str | None, Query(description="of a signed link")] = None,
) -> Response:
    """With an API key, or by the signed link in a job's `outputs`."""
    if not gateway.links(request).allows(request.url.path, expires, signature):
        caller_of(request)
    return await file_response(gateway, finished(await gateway.view(checked_id(job_id))), n)
