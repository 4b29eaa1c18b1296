"""The gateway's part of a job's trace: the request that pushed it, and whose part that was."""

from __future__ import annotations

import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.traceparent import Parent
from common.tracing import Spans, new_span

HEADER = b"traceparent"


class Traced:
    """ASGI: leaves in `request.state.traceparent` what a job pushed by this request is part of.

    That is a span of its own if this gateway traces (`spans`), else the client's, if it sent one; a
    header that is none is as good as none. The span is made if `request.state.job` was set.
    """

    def __init__(self, app: ASGIApp, spans: Spans | None) -> None:
        self.app, self.spans = app, spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        state = scope.setdefault("state", {})
        sent = dict(scope["headers"]).get(HEADER, b"").decode("latin-1")
        given = Parent.of(sent)
        if self.spans is None:
            state["traceparent"] = sent if given is not None else ""
            return await self.app(scope, receive, send)
        ours = Parent(
            given.trace if given else secrets.randbits(128) or 1,
            new_span(),
            given.sampled if given else secrets.randbelow(2**53) < self.spans.ratio * 2**53,
        )
        state["traceparent"] = str(ours)
        begun_s, status = time.time(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            if ours.sampled and state.get("job"):
                route = getattr(scope.get("route"), "path", scope["path"])
                about = {
                    "slackwater.job": state["job"], "http.request.method": scope["method"],
                    "http.route": route, "http.response.status_code": status or None,
                }  # fmt: skip
                self.spans.add(
                    f"{scope['method']} {route}", ours.trace, given.span if given else 0,
                    begun_s, time.time(), about, span=ours.span, server=True,
                    error=f"status {status}" if status >= 500 else "",
                )  # fmt: skip
