"""A small HTTP port of a process' own on which Prometheus reads its figures."""

from __future__ import annotations

import errno
import logging
import socket
from wsgiref.simple_server import WSGIServer

from prometheus_client import start_http_server

from common.metrics.registry import Registry
from common.settings import Settings

log = logging.getLogger("slackwater.metrics")

# Processes of one machine take the first free port from `metrics_port` on.
PORTS = 64


class Port:
    """An open one; `address` is host:port as others reach it."""

    def __init__(self, server: WSGIServer, host: str) -> None:
        everywhere = host in ("0.0.0.0", "::", "")
        self._server = server
        self.address = f"{socket.gethostname() if everywhere else host}:{server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def serve(registry: Registry, settings: Settings) -> Port:
    """Serve `registry` on the first free port from `metrics_port` on.

    Raises OSError if there is no such address, or no free port among PORTS.
    """
    first = settings.metrics_port
    for number in range(first, first + PORTS):
        try:
            server, _ = start_http_server(number, settings.metrics_host, registry.prometheus)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise
        port = Port(server, settings.metrics_host)
        log.info("metrics on http://%s/metrics", port.address)
        return port
    raise OSError(
        errno.EADDRINUSE, f"metrics_port: all of {first} to {first + PORTS - 1} are taken"
    )
