"""What the routes share, one for each process; the routes get it from the application's state."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from common.asks import Ask
from common.errors import ResultExpired
from common.job import Result
from common.settings import Settings
from services.gateway.access import Keyring
from services.gateway.client import GatewayClient
from services.gateway.dashboard.feed import Feed
from services.gateway.jobs import Jobs
from services.gateway.links import Links
from services.gateway.models import Models
from services.gateway.movies import Movies
from services.gateway.views import View, job_json, view


class Gateway:
    """Raises KeysError for a list of keys that cannot be read."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.keyring = Keyring.of(settings)
        self.client = GatewayClient(settings.redis_url, settings.prefix)
        self.jobs = Jobs(self.client, settings)
        self.models = Models(self.client, settings.default_model)
        self.movies = Movies(self.client)
        self.feed = Feed(self.client, self._links(""))

    def links(self, request: Request) -> Links:
        return self._links(self.settings.http_base_url or str(request.base_url))

    def _links(self, base: str) -> Links:
        secret = self.keyring.secret() if self.keyring.locked else None
        return Links(base.rstrip("/"), secret, self.settings.output_ttl_s)

    async def view(self, job: str) -> View:
        """Raises UnknownJob."""
        return await self.client.do(view(self.client.keys, job))

    async def files(self, result: Result) -> list[bytes]:
        """All files of a job that succeeded. Raises ResultExpired."""
        asked = Ask(tuple(("GET", file.key) for file in result.outputs))
        found = await self.client.ask(asked)
        if None in found:
            raise ResultExpired(result.id, result.status, "output")
        return found

    async def job_json(self, request: Request, job: str) -> dict[str, Any]:
        return job_json(await self.view(job), self.links(request))

    async def stop_waiting(self) -> None:
        """Whoever waits is told that this gateway stops; jobs go on."""
        await self.feed.close()
        await self.client.reads.close()


def gateway_of(request: Request) -> Gateway:
    found: Gateway = request.app.state.gateway
    return found
