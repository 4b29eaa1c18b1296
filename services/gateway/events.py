"""A job's events as server-sent events (WHATWG HTML, §9.2)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from redis.exceptions import RedisError

from common.asks import Ask
from common.errors import SlackwaterError
from common.record import JobEvent
from services.gateway.gateway import Gateway
from services.gateway.previews import Previews
from services.gateway.reads import Closed

log = logging.getLogger("slackwater.gateway")

ENTRY = r"^\d{1,19}-\d{1,19}$"
# A comment this often, so that no proxy takes the stream for dead.
PING_S = 15.0
# Events after which there may be a preview.
GROWING = frozenset({"step", "chunk"})


async def stream(gateway: Gateway, request: Request, job: str, after: str) -> AsyncIterator[bytes]:
    """Frames of the events behind the entry `after`, to the job's end or this gateway's."""
    events, previews = gateway.client.events(job, after=after), Previews(gateway.client, job)
    coming: asyncio.Task[JobEvent] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
            patience_s = max(0.0, min(PING_S, previews.due_in_s()))
            done, _ = await asyncio.wait((coming,), timeout=patience_s)
            if previews.due_in_s() <= 0:
                preview = await previews.fresh()
                if preview is not None:
                    yield preview
            elif not done:
                yield b": still here\n\n"
            if not done:
                continue
            event, coming = coming.result(), None
            if event.type in GROWING:
                previews.stir()
            whole = await gateway.job_json(request, job) if event.is_terminal else None
            yield frame(event, whole)
    except (StopAsyncIteration, Closed):
        return
    except (SlackwaterError, RedisError) as error:  # a browser comes back by itself
        log.warning("job %s: its event stream ends early: %s", job, error)
    finally:
        if coming is not None:
            coming.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, Exception):
                await coming
        await events.aclose()  # type: ignore[attr-defined]


def frame(event: JobEvent, job: dict[str, Any] | None) -> bytes:
    """One event; `job` goes along with the last."""
    data = event.to_json()
    data.pop("entry", None)
    if job is not None:
        data["job"] = job
    lines = [f"event: {event.type}", f"data: {json.dumps(data)}"]
    if event.entry:
        lines.insert(0, f"id: {event.entry}")
    return ("\n".join(lines) + "\n\n").encode()


async def is_over(gateway: Gateway, job: str, after: str) -> bool:
    """Whether a job has ended and has no event behind the entry `after`."""
    keys = gateway.client.keys
    ended, newer = await gateway.client.ask(
        Ask((
            ("HGET", keys.job(job), "is_terminal"),
            ("XRANGE", keys.events(job), f"({after}", "+", "COUNT", 1),
        ))
    )  # fmt: skip
    return bool(ended == b"1" and not newer)
