"""What a launcher (services/pool) hands down to a process it starts: a pipe on which that says that
it is ready, the socket on which it tells its figures, and to the gateway the sockets it listens on.
Started by hand, it has none of them."""

from __future__ import annotations

import contextlib
import os
import socket

READY_FD = "SLACKWATER_READY_FD"
HTTP_FDS = "SLACKWATER_HTTP_FDS"
METRICS_FD = "SLACKWATER_METRICS_FD"


def say_ready() -> None:
    """Tell the launcher, if there is one, that this process can take its predecessor's place.

    Saying it again changes nothing.
    """
    pipe = os.environ.pop(READY_FD, "")
    if pipe.isdigit():
        with contextlib.suppress(OSError):  # nobody hears it any more
            os.write(int(pipe), b"1")
            os.close(int(pipe))


def http_sockets() -> list[socket.socket]:
    """Listening sockets that were handed down; none for a gateway that has to open its own."""
    return [socket.socket(fileno=int(fd)) for fd in os.environ.pop(HTTP_FDS, "").split()]


def metrics_socket() -> socket.socket | None:
    """The listening socket for this process' figures, if one was handed down; once."""
    fd = os.environ.pop(METRICS_FD, "")
    return socket.socket(fileno=int(fd)) if fd else None
