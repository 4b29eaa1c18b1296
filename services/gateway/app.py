"""The application: routes, errors, limits; `make_app(settings)` for any ASGI server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import Depends, FastAPI

from common.settings import Settings
from services.gateway import errors, image_routes, job_routes, pool_routes, video_routes
from services.gateway.bodies import Guard, known_query
from services.gateway.gateway import Gateway
from services.gateway.openapi import describe

DESCRIPTION = (
    "Pictures and videos by deadline. `/v1/images` and `/v1/videos` are OpenAI's; `/v1/jobs` has "
    "everything: deadline, priority, slack, eta, events. All are the same jobs underneath."
)


def make_app(settings: Settings) -> FastAPI:
    """Raises KeysError for a list of API keys that cannot be read."""
    gateway = Gateway(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await gateway.client.close()

    app = FastAPI(
        title="Slackwater", description=DESCRIPTION, version=_version(), lifespan=lifespan
    )
    app.state.gateway = gateway
    for routes in (image_routes, video_routes, job_routes, pool_routes):
        app.include_router(routes.router, dependencies=[Depends(known_query)])
    errors.install(app)
    app.add_middleware(
        Guard,
        max_body_bytes=settings.http_max_body_bytes,
        max_upload_bytes=settings.http_max_upload_bytes,
    )

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
