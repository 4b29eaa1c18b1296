"""The application: routes, errors, limits; `make_app(settings)` for any ASGI server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import Depends, FastAPI

from common.metrics.registry import Registry
from common.settings import Settings
from common.tracing import open_spans
from services.gateway import (
    errors,
    image_routes,
    job_routes,
    metric_routes,
    pool_routes,
    video_routes,
)
from services.gateway.bodies import Guard, known_query
from services.gateway.dashboard import routes as dashboard_routes
from services.gateway.gateway import Gateway
from services.gateway.metrics import GatewayMetrics, Metered
from services.gateway.openapi import describe
from services.gateway.traces import Traced

DESCRIPTION = (
    "Pictures and videos by deadline. `/v1/images` and `/v1/videos` are OpenAI's; `/v1/jobs` has "
    "everything: deadline, priority, slack, eta, events. All are the same jobs underneath."
)


def make_app(settings: Settings) -> FastAPI:
    """Raises KeysError for a list of API keys that cannot be read, NoTracing for traces."""
    gateway = Gateway(settings)
    registry, spans = Registry(), open_spans(settings, "gateway")
    metrics = GatewayMetrics(registry, gateway)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await gateway.client.close()
        metrics.close()
        if spans is not None:
            await asyncio.to_thread(spans.close)

    app = FastAPI(
        title="Slackwater", description=DESCRIPTION, version=_version(), lifespan=lifespan
    )
    app.state.gateway, app.state.registry = gateway, registry
    for routes in (image_routes, video_routes, job_routes, pool_routes, dashboard_routes):
        app.include_router(routes.router, dependencies=[Depends(known_query)])
    if settings.http_metrics != "off":
        figures = metric_routes.router(registry, locked=settings.http_metrics == "key")
        app.include_router(figures, dependencies=[Depends(known_query)])
    errors.install(app)
    app.add_middleware(
        Guard,
        max_body_bytes=settings.http_max_body_bytes,
        max_upload_bytes=settings.http_max_upload_bytes,
    )
    app.add_middleware(Traced, spans=spans)
    app.add_middleware(Metered, metrics=metrics)

    def page() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app, gateway.keyring.locked)
        return app.openapi_schema

    app.openapi = page  # type: ignore[method-assign]
    return app


def _version() -> str:
    try:
        return version("slackwater")
    except PackageNotFoundError:
        return "0"
