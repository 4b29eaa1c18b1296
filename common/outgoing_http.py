"""An HTTP client that sends only where common/outgoing.py allows, to the address it checked.

Host header, SNI and certificate check keep the name; only the address is fixed. Redirects are
not followed, proxies and netrc files of the environment are not used.
"""

from __future__ import annotations

import ssl
from typing import Any

import httpx

from common.outgoing import FIELD, Allowed, Unresolved

# A connection may not be used again: it belongs to an address, and two names may share one.
_ONCE = httpx.Limits(max_keepalive_connections=0)


class GuardedTransport(httpx.BaseTransport):
    """Every request is checked anew, one that follows a redirect too.

    Raises NotAllowed for what may not be sent to, httpx.ConnectError for a name without address.
    """

    def __init__(
        self, allowed: Allowed, field: str = FIELD, verify: ssl.SSLContext | bool = True
    ) -> None:
        self._allowed, self._field = allowed, field
        self._inner = httpx.HTTPTransport(verify=verify, trust_env=False, limits=_ONCE)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            target = self._allowed.check(str(request.url), self._field)
        except Unresolved as error:
            raise httpx.ConnectError(str(error), request=request) from error
        extensions = {**request.extensions, "sni_hostname": target.host}
        failed: httpx.TransportError | None = None
        for address in target.addresses:
            pinned = httpx.Request(
                request.method,
                request.url.copy_with(host=address),
                headers=request.headers,  # Host is among them already, with the name
                stream=request.stream,
                extensions=extensions,
            )
            try:
                return self._inner.handle_request(pinned)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failed = error  # nothing was sent yet, so the next address may be tried
        assert failed is not None
        raise failed

    def close(self) -> None:
        self._inner.close()


def client(
    allowed: Allowed,
    field: str = FIELD,
    verify: ssl.SSLContext | bool = True,
    timeout_s: float = 10.0,
    **more: Any,
) -> httpx.Client:
    """A client that can reach what is allowed and nothing else; `more` as httpx.Client takes it.

    An answer is as long as the other side likes: stream it, and stop reading in time.
    """
    transport = GuardedTransport(allowed, field, verify)
    return httpx.Client(
        transport=transport, follow_redirects=False, trust_env=False, timeout=timeout_s, **more
    )
