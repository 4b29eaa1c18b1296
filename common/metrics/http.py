"""A small HTTP port of a process' own on which Prometheus reads its figures."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

from common.handed import metrics_socket
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
    """Serve `registry` on the socket that the launcher handed down, else on one of `listen`."""
    server = _Server(metrics_socket() or listen(settings), settings.metrics_host)
    server.set_app(make_wsgi_app(registry.prometheus))
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    port = Port(server, settings.metrics_host)
    log.info("metrics on http://%s/metrics", port.address)
    return port


def listen(settings: Settings) -> socket.socket:
    """A socket on the first free port from `metrics_port` on.

    Raises OSError if there is no such address, or no free port among PORTS.
    """
    host, first = settings.metrics_host, settings.metrics_port
    for number in range(first, first + PORTS):
        [(family, _, _, _, place), *_] = socket.getaddrinfo(
            host or None, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        try:
            return socket.create_server(place[:2], family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        errno.EADDRINUSE, f"metrics_port: all of {first} to {first + PORTS - 1} are taken"
    )


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """On a socket that listens already, and that a successor may be listening on too."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, host: str) -> None:
        super().__init__(listening.getsockname()[:2], _Silent, bind_and_activate=False)
        self.socket.close()  # the one that it made
        self.socket = listening
        self.socket.setblocking(False)  # another process may have taken what select has seen
        self.server_name, self.server_port = host, listening.getsockname()[1]
        self.setup_environ()
