"""`/metrics`: the gateway's figures for Prometheus, with or without an API key."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST

from common.metrics.registry import Registry
from services.gateway.access import caller_of
from services.gateway.openapi import errors


def router(registry: Registry, locked: bool) -> APIRouter:
    """`locked`: an API key is asked for where there are any."""
    made = APIRouter(tags=["health"])

    # No `async`: it asks Redis, and FastAPI runs it on a thread.
    @made.get(
        "/metrics",
        summary="Figures for Prometheus",
        responses={
            200: {"content": {"text/plain": {}}, "description": "In Prometheus' text format"},
            **(errors(401) if locked else {}),
        },
        dependencies=[Depends(caller_of)] if locked else [],
        response_model=None,
    )
    def metrics() -> Response:
        return Response(registry.text(), media_type=CONTENT_TYPE_LATEST)

    return made
