"""Which models there are, and whether gateway and pool are well."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError

from common.asks import Ask
from common.errors import RedisAway
from common.stage import STAGES
from services.gateway import schemas
from services.gateway.access import Caller, caller_of
from services.gateway.errors import not_found
from services.gateway.gateway import Gateway, gateway_of
from services.gateway.models import Manifest, ready_for
from services.gateway.openapi import errors

router = APIRouter()

# Under a probe's own time-out, a second by default, so that it hears what is wrong.
REDIS_S = 0.8


def _model(name: str, manifest: Manifest, ready: bool) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "slackwater",
        "task": manifest.get("task", ""),
        "ready": ready,
        "parameters": manifest.get("parameters", {}),
        "limits": manifest.get("limits", {}),
    }


@router.get(
    "/v1/models",
    summary="The models of this pool",
    tags=["models"],
    responses={200: {"model": schemas.ModelList}, **errors(401, 503)},
    response_model=None,
)
async def models(
    gateway: Annotated[Gateway, Depends(gateway_of)],
    _: Annotated[Caller, Depends(caller_of)],
) -> Response:
    manifests, workers = await gateway.models.manifests(), await gateway.client.workers()
    data = [_model(name, m, ready_for(name, workers)) for name, m in sorted(manifests.items())]
    return JSONResponse({"object": "list", "data": data})


@router.get(
    "/v1/models/{model:path}",
    summary="One model: its parameters, defaults and limits",
    tags=["models"],
    responses={200: {"model": schemas.Model}, **errors(401, 404, 503)},
    response_model=None,
)
async def model(
    model: str,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    _: Annotated[Caller, Depends(caller_of)],
) -> Response:
    manifests = await gateway.models.manifests()
    if model not in manifests:
        known = ", ".join(sorted(manifests)) or "none yet"
        raise not_found(f"model: {model[:64]!r} is not served here; served: {known}", param="model")
    ready = ready_for(model, await gateway.client.workers())
    return JSONResponse(_model(model, manifests[model], ready))


# -- health --------------------------------------------------------------------------------


@router.get(
    "/livez",
    summary="Whether this process works",
    tags=["health"],
    responses={
        200: {"model": schemas.Health},
        503: {"model": schemas.Health, "description": "Start it again"},
    },
    response_model=None,
)
async def livez(gateway: Annotated[Gateway, Depends(gateway_of)]) -> Response:
    alive = gateway.client.reads.alive
    status = "ok" if alive else "the task that reads events has died"
    return JSONResponse({"status": status, "pid": os.getpid()}, 200 if alive else 503)


@router.get(
    "/readyz",
    summary="Whether a job pushed now would be made",
    tags=["health"],
    responses={
        200: {"model": schemas.Health},
        503: {"model": schemas.Health, "description": "Not now; `checks` says why"},
    },
    response_model=None,
)
async def readyz(gateway: Annotated[Gateway, Depends(gateway_of)]) -> Response:
    """Redis answers, a coordinator leads, and some model has a worker for each stage."""
    checks = await _checks(gateway)
    ready = all(said == "ok" for said in checks.values())
    body = {"status": "ready" if ready else "not ready", "checks": checks, "pid": os.getpid()}
    return JSONResponse(body, 200 if ready else 503)


async def _checks(gateway: Gateway) -> dict[str, str]:
    client = gateway.client
    try:
        async with asyncio.timeout(REDIS_S):
            [leader] = await client.ask(Ask((("GET", client.keys.leader),)))
            workers = await client.workers()
            manifests = await client.models()
    except (RedisAway, RedisError, OSError):  # a TimeoutError is an OSError
        return {"redis": "does not answer"}
    checks = {"redis": "ok", "coordinator": "ok" if leader else "none leads"}
    whole = [name for name in manifests if ready_for(name, workers)]
    staffed = {w.stage for w in workers if not w.draining}
    for stage in STAGES:
        checks[stage] = "ok" if stage in staffed else "has no worker"
    if set(checks.values()) == {"ok"} and not whole:
        checks["models"] = "none has a worker for every stage"
    return checks
