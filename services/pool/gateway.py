"""The port of the HTTP gateway. The launcher opens it and hands it down, so that it stays open
while gateways come and go: a connection made meanwhile waits and is not refused."""

from __future__ import annotations

import errno
import os
import socket

from common.settings import Settings

BACKLOG = 2048  # connections that wait while no gateway is there; the kernel may allow fewer
# What bind says of a family that this machine has not: localhost where there is no IPv6.
NOT_HERE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


class PortTaken(OSError):
    """The port cannot be listened on; the message says which and why."""


def address(settings: Settings) -> str:
    """How it is reached from this machine."""
    host, port = settings.http_address()
    return f"http://{host}:{port}"


def listen(settings: Settings) -> list[socket.socket]:
    """A listening socket for each address of http_host. Raises PortTaken."""
    host, port = settings.http_host, settings.http_port
    listening: list[socket.socket] = []
    refused: OSError | None = None
    try:
        for family, place in _places(host, port):
            try:
                listening.append(_listen(family, place))
            except OSError as error:
                refused = error
                if error.errno not in NOT_HERE:
                    raise
        if not listening:
            raise refused or OSError(errno.EADDRNOTAVAIL, "no such address")
    except OSError as error:
        for each in listening:
            each.close()
        unknown = isinstance(error, socket.gaierror)  # whose numbers are others
        why = str(error.strerror) if unknown else os.strerror(error.errno or 0).lower()
        raise PortTaken(
            f"HTTP cannot be served on port {port} of {host or 'this machine'}: {why}"
        ) from error
    return listening


def _places(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, place) for family, _, _, _, place in found))


def _listen(family: socket.AddressFamily, place: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # IPv4 has a socket of its own
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(place)
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made
