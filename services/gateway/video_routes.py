"""`/v1/videos` as OpenAI has it: jobs that are asked after."""

from __future__ import annotations

import logging
import math
import re
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError

from common.asks import Ask
from common.errors import RedisAway
from services.gateway import bodies, schemas
from services.gateway.access import Caller, caller_of
from services.gateway.errors import bad, not_found
from services.gateway.files import file_response, finished, movie_response
from services.gateway.gateway import Gateway, gateway_of
from services.gateway.jobs import Pushed, checked_id
from services.gateway.models import Manifest
from services.gateway.openapi import body, errors
from services.gateway.prefer import applied, wait_s
from services.gateway.views import View, video_json, views

router = APIRouter(tags=["videos"])
log = logging.getLogger("slackwater.gateway")

REFERENCE = "input_reference"
OPTIONAL = ("model", "seconds", "size", REFERENCE)  # null is as good as left out
NUMBER = re.compile(r"\d{1,5}(\.\d{1,6})?")
EXAMPLE = {"prompt": "a red circle that becomes a blue square", "size": "128x128", "seconds": "4"}
# The list goes back as far as records do; a page looks at this many of its newest at most.
MOST_LISTED = 10_000


async def job_of(gateway: Gateway, asked: dict[str, Any]) -> dict[str, Any]:
    """The job's parameters of OpenAI's. Raises a 400."""
    params = {name: v for name, v in asked.items() if v is not None or name not in OPTIONAL}
    if REFERENCE in params:
        raise bad(
            REFERENCE,
            "no model served here takes a picture, and URLs are not fetched; leave it out",
            code="unsupported",
        )
    if params.get("size") == "auto":
        del params["size"]
    if "model" not in params and (only := await gateway.models.only_video_model()) is not None:
        params["model"] = only
    manifest = await gateway.models.manifest_for(
        params.get("model"), video=True, instead="/v1/images/generations"
    )
    if "seconds" in params:
        _to_frames(params, manifest)
    return params


def _to_frames(params: dict[str, Any], manifest: Manifest) -> None:
    """Replace `seconds` by the frames that play that long: one more than seconds × fps, since the
    first stands at 0 s, or the nearest number that the model makes. Left for the coordinator to
    refuse where a model has no such thing."""
    schema = manifest.get("parameters", {})
    if "seconds" in schema or not {"num_frames", "fps"} <= set(schema):
        return
    if "num_frames" in params:
        raise bad("seconds", "says the same as num_frames; give one of the two")
    seconds = str(params.pop("seconds"))
    fps = params.get("fps", params.get("frame_rate", schema["fps"]["default"]))
    if not NUMBER.fullmatch(seconds) or float(seconds) <= 0:
        raise bad("seconds", f'{seconds!r:.64} is not a number above 0, such as "4"')
    if not NUMBER.fullmatch(str(fps)):
        return  # the coordinator says what is wrong with it; num_frames has a default
    frames = float(seconds) * float(fps)
    if not math.isclose(frames, round(frames), abs_tol=1e-6):
        raise bad("seconds", f"{seconds} s at {fps} frames a second are {frames:g} frames; give a "
                  "length that makes a whole number")  # fmt: skip
    params["num_frames"] = _nearest(round(frames) + 1, schema["num_frames"])


def _nearest(frames: int, rule: dict[str, Any]) -> int:
    """The nearest number of frames that `rule` allows; the larger of two. One that is out of its
    bounds stays out, for the coordinator to say so."""
    step, least, most = rule.get("step", 1), rule.get("min", 1), rule.get("max", math.inf)
    steps = math.floor((frames - least) / step + 0.5)
    if frames <= most < least + steps * step:
        steps -= 1
    return int(least + steps * step)


async def _pushed(gateway: Gateway, pushed: Pushed) -> None:
    """Put it on the list of videos, for as long as its record may stay. The video goes on whether
    that works or not."""
    now_ms = round(1000 * time.time())
    ttl_ms = round(1000 * gateway.settings.job_ttl_s)
    key = gateway.client.keys.videos
    ask = Ask((
        ("ZADD", key, "NX", now_ms, pushed.id),
        ("ZREMRANGEBYSCORE", key, "-inf", now_ms - 2 * ttl_ms),
        ("PEXPIRE", key, 2 * ttl_ms),
    ))  # fmt: skip
    try:
        await gateway.client.ask(ask)
    except (RedisAway, RedisError) as error:
        log.warning("video %s is not on the list: %s", pushed.id, error)


@router.post(
    "/v1/videos",
    summary="Begin a video",
    response_model=None,
    responses={
        200: {"model": schemas.Video},
        **errors(400, 401, 409, 410, 413, 415, 422, 429, 503),
    },
    openapi_extra=body(schemas.VideoRequest, EXAMPLE, bodies.JSON, bodies.MULTIPART),
)
async def create(
    request: Request,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    caller: Annotated[Caller, Depends(caller_of)],
) -> Response:
    """Answers with the job as it stands; ask again until it is `completed` or `failed`."""
    is_json = bodies.content_type(request) == bodies.JSON
    if is_json:
        asked = await bodies.read_json(request)
    else:
        fields, files = await bodies.read_form(request)
        asked = {**fields, **files}
    params = await job_of(gateway, asked)
    if not is_json:
        params = {name: str(value) for name, value in params.items()}
    pushed = await gateway.jobs.push(request, caller, params, text=not is_json)
    await gateway.jobs.admitted(pushed)
    await _pushed(gateway, pushed)
    patience_s = wait_s(request)
    if patience_s is not None:
        await gateway.jobs.wait(request, pushed, patience_s)
    found = await gateway.view(pushed.id)
    place = {"Location": f"/v1/videos/{pushed.id}"}
    return JSONResponse(video_json(found), headers=place | applied(patience_s))


@router.get(
    "/v1/videos",
    summary="Videos that were begun here, the newest first",
    responses={200: {"model": schemas.VideoList}, **errors(400, 401, 404, 503)},
    response_model=None,
)
async def listed(
    gateway: Annotated[Gateway, Depends(gateway_of)],
    _: Annotated[Caller, Depends(caller_of)],
    after: Annotated[str | None, Query(description="the last id of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    client, key = gateway.client, gateway.client.keys.videos
    [newest] = await client.ask(Ask((("ZREVRANGE", key, 0, MOST_LISTED - 1),)))
    ids = [job.decode() for job in newest]
    if order == "asc":
        ids.reverse()
    if after is not None:
        if after not in ids:
            raise not_found("after: there is no such video", param="after")
        ids = ids[ids.index(after) + 1 :]
    data: list[dict[str, Any]] = []
    more = False
    while ids and not more:
        page, ids = ids[:limit], ids[limit:]
        found = [v for v in await client.do(views(client.keys, page)) if v is not None]
        data += [video_json(v) for v in found]
        more = len(data) > limit or (len(data) == limit and bool(ids))
    data = data[:limit]
    return JSONResponse(
        {
            "object": "list",
            "data": data,
            "has_more": more,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
        }
    )


async def _video(gateway: Gateway, job: str) -> View:
    """Raises UnknownJob, also for the job of a model that makes pictures."""
    found = await gateway.view(checked_id(job))
    model = found.record.model
    if model and not await gateway.models.makes_videos(model):
        raise not_found(f"job {job} makes pictures; GET /v1/jobs/{job}")
    return found


@router.get(
    "/v1/videos/{video_id}",
    summary="How a video stands",
    responses={200: {"model": schemas.Video}, **errors(401, 404, 503)},
    response_model=None,
)
async def one(
    video_id: str,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    _: Annotated[Caller, Depends(caller_of)],
) -> Response:
    return JSONResponse(video_json(await _video(gateway, video_id)))


@router.get(
    "/v1/videos/{video_id}/content",
    summary="The file",
    responses={
        200: {"content": {"video/*": {}, "image/*": {}, "application/*": {}},
              "description": "The file, with its own content type"},
        **errors(400, 401, 404, 409, 410, 503),
    },
    response_model=None,
)  # fmt: skip
async def content(
    video_id: str,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    _: Annotated[Caller, Depends(caller_of)],
    variant: Annotated[
        str,
        Query(description="video (the default): as MP4; original: the file as the model's worker "
                          "made it, an animated PNG or WebP")
    ] = "video",
) -> Response:  # fmt: skip
    """An MP4 is made when it is asked for; the newest are kept."""
    if variant not in ("video", "original"):
        raise bad("variant", f"{variant!r:.64} is not made here; video and original are")
    result = finished(await _video(gateway, video_id))
    if variant == "original":
        return await file_response(gateway, result, 0)
    return await movie_response(gateway, result, 0)


@router.delete(
    "/v1/videos/{video_id}",
    summary="Cancel a video if it is active, and delete it",
    responses={200: {"model": schemas.DeletedVideo}, **errors(401, 404, 409, 503)},
    response_model=None,
)
async def delete(
    video_id: str,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    _: Annotated[Caller, Depends(caller_of)],
) -> Response:
    """Answered when nothing computes it any more: a running one ends within one step."""
    await _video(gateway, video_id)
    await gateway.jobs.forget(video_id)
    return JSONResponse({"id": video_id, "object": "video.deleted", "deleted": True})
