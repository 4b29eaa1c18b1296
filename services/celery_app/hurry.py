"""An end to a request that takes too long in all.

httpx's own limit is for each read and each connection: a receiver that sends a byte now and then,
or a name with many addresses that do not answer, would hold a thread for hours.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Any, Self

CONNECTION = "connection."


class Late(Exception):
    """The time was over before another connection was tried."""


class Hurry:
    """For one request of a blocking httpx client, in a `with`: give its `trace` as the extension of
    that name. Once `limit_s` are over `late` is true, and the connection is shut, which whoever
    reads from it sees at once as an httpx.HTTPError."""

    def __init__(self, limit_s: float) -> None:
        self._timer = threading.Timer(limit_s, self._over)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._stream: Any = None
        self.late = False

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()

    def trace(self, event: str, info: dict[str, Any]) -> None:
        """Raises Late."""
        if not event.startswith(CONNECTION):
            return
        with self._lock:
            if self.late and event.endswith(".started"):
                raise Late
            if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
                self._stream = info["return_value"]
                self._shut()

    def _over(self) -> None:
        with self._lock:
            self.late = True
            self._shut()

    def _shut(self) -> None:
        if self.late and self._stream is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                self._stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
