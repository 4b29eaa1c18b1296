"""Previews of a running job, for its event stream: each is sent once."""

from __future__ import annotations

import base64
import json
import math
import time

from common.asks import Ask
from services.gateway.client import GatewayClient

# After a step the worker takes about a tenth of a second to leave a preview, two a second at most.
LOOK_S = 0.4
# Looks at a job that has none come ever more seldom: most models bring no map.
SELDOM_S = 10.0
MIME = "image/webp"


class Previews:
    """Looks for a new one a moment after `stir`, which the job's steps call."""

    def __init__(self, client: GatewayClient, job: str) -> None:
        self._client, self._key = client, client.keys.preview(job)
        self._due = math.inf
        self._pause_s = LOOK_S
        self._step = b""

    def stir(self) -> None:
        self._due = min(self._due, time.monotonic() + self._pause_s)

    def due_in_s(self) -> float:
        return self._due - time.monotonic()

    async def fresh(self) -> bytes | None:
        """The event of the latest one, None where that was sent already."""
        self._due = math.inf
        [(step, image)] = await self._client.ask(Ask((("HMGET", self._key, "step", "image"),)))
        if step is None or image is None:
            self._pause_s = min(SELDOM_S, 2 * self._pause_s)
            return None
        self._pause_s = LOOK_S
        if step == self._step:
            return None
        self._step = step
        data = {"step": int(step), "mime": MIME, "image": base64.b64encode(image).decode()}
        return f"event: preview\ndata: {json.dumps(data)}\n\n".encode()
