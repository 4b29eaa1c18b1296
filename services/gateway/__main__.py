"""`python -m services.gateway`: HTTP on http_host:http_port until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys

import uvicorn
from fastapi import FastAPI

from common.handed import http_sockets, say_ready
from common.logs import set_up
from common.metrics.http import serve
from common.settings import from_command_line
from common.tracing import NoTracing
from services.gateway.access import KeysError
from services.gateway.app import make_app
from services.gateway.gateway import Gateway

log = logging.getLogger("slackwater.gateway")

# Answers that are being written when the end comes; nobody waits for a job by then.
STOP_S = 5
# A connection that was just made is asked something; another process may take those that follow.
JUST_MADE_S = 0.2


class Server(uvicorn.Server):
    """Before it waits for open requests to end, it tells those that wait for jobs."""

    def __init__(self, app: FastAPI, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.gateway: Gateway = app.state.gateway

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        say_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await asyncio.sleep(JUST_MADE_S)
        await self.gateway.stop_waiting()
        await super().shutdown(sockets)


def main() -> int:
    settings = from_command_line("python -m services.gateway")
    set_up(settings.log_level, settings.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        app = make_app(settings)
    except (KeysError, NoTracing) as error:
        print(error, file=sys.stderr)
        return 2
    config = uvicorn.Config(
        app,
        host=settings.http_host,
        port=settings.http_port,
        log_config=None,
        access_log=False,  # its lines would have the signatures of links
        server_header=False,
        timeout_graceful_shutdown=STOP_S,
    )
    if not app.state.gateway.keyring.locked:
        log.warning("no API keys are set: whoever reaches this port may use the pool")
    log.info("HTTP on %s port %d", settings.http_host, settings.http_port)
    port = serve(app.state.registry, settings) if settings.metrics_port else None
    Server(app, config).run(http_sockets() or None)
    if port is not None:
        port.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
