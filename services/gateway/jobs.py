"""What the gateway does with jobs: push, wait, cancel, forget. Routes only translate.

A push goes through `sw:jobs` like everybody's, and what the coordinator says of it becomes the
answer. So nothing here knows what a good job is.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from redis.exceptions import OutOfMemoryError
from starlette.requests import ClientDisconnect

from common import asks
from common.asks import Ask, Ticket
from common.client import full, new_id
from common.errors import JobRefused, ResultExpired, UnknownJob, WaitTimeout
from common.job import Result
from common.push import ID
from common.settings import Settings
from services.gateway.access import Caller, Rates
from services.gateway.client import GatewayClient
from services.gateway.errors import ApiError, bad, is_refusal, of_result
from services.gateway.quota import Quota

log = logging.getLogger("slackwater.gateway")

# A coordinator reads a push within milliseconds. Where none leads or no worker has come yet, a
# push is durable and answered as queued.
ADMISSION_S = 5.0
# A running job ends within one denoising step of its cancel.
CANCEL_S = 30.0
MOST_KEY_CHARS = 255
# What a job may have; DELETE forgets outputs also of a job whose result has gone before them.
MOST_OUTPUTS = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pushed:
    """A push of this gateway. `claimed`: it took a place among its caller's active jobs; `keyed`:
    its id is made from an Idempotency-Key; `named`: a second push could mean the same job, so
    that no single request owns it."""

    ticket: Ticket
    caller: Caller
    claimed: bool
    keyed: bool
    named: bool

    @property
    def id(self) -> str:
        return self.ticket.id


class Jobs:
    def __init__(self, client: GatewayClient, settings: Settings) -> None:
        self.client, self.settings = client, settings
        self.rates, self.quota = Rates(), Quota(client, settings.job_ttl_s)

    # -- pushing -------------------------------------------------------------------------

    async def push(
        self, request: Request, caller: Caller, params: Mapping[str, Any], text: bool = False
    ) -> Pushed:
        """Push a job; `text`: values are text, as from a form. Raises ApiError, InvalidRequest."""
        fields = dict(params)
        if text and "payload" in fields:  # in a push of text it holds a whole job
            raise bad("payload", "is not a parameter; give the parameters one by one")
        given, key = fields.pop("id", None), request.headers.get("idempotency-key")
        if given is not None and not isinstance(given, str):
            raise bad("id", f"must be text, not {type(given).__name__}")
        if given is not None and key is not None:
            raise bad("id", "says the same as Idempotency-Key; give one of the two")
        job = new_id() if given is None else given
        if key is not None:
            job = _id_of(key, caller)
        trace = getattr(request.state, "traceparent", "")
        if trace:
            fields.setdefault("traceparent", trace)
        request.state.job = job
        push = asks.text_push(job, fields) if text else asks.typed_push(job, fields)
        self.rates.take(caller)
        claimed = False
        try:
            claimed = await self.quota.claim(caller, push)
            [ticket] = await self.client.do(asks.submit(self.client.keys, [push]))
        except OutOfMemoryError as error:
            if claimed:
                await self.quota.release(caller, job)
            raise JobRefused(full(job)) from error
        request.state.pushed = job  # what goes wrong from here on must not have it pushed again
        await self.quota.pushed(caller, ticket)
        said = {"job": job, "caller": caller.name}
        log.info("job %s pushed by %s, %s", job, caller.name, request.url.path, extra=said)
        named = given is not None or key is not None
        return Pushed(ticket, caller, claimed, keyed=key is not None, named=named)

    async def admitted(self, pushed: Pushed) -> None:
        """Wait until the coordinator has taken the push. Raises its refusal as an ApiError.

        Returns also where nobody reads pushes for now: the job is queued.
        """
        until = time.monotonic() + ADMISSION_S
        plan = asks.admission(self.client.keys, pushed.ticket, until)
        try:
            sight = await self.client.do(plan, until)
        except WaitTimeout:
            return
        if not sight.record.is_terminal or sight.record.stage:
            return  # it goes on, or it was a job and has ended
        if sight.result is None:
            raise ResultExpired(pushed.id, sight.record.status)
        await self.refuse(pushed, Result.from_wire(sight.result))

    async def refuse(self, pushed: Pushed, result: Result) -> NoReturn:
        """Raise what became of a push that did not succeed as an ApiError."""
        if is_refusal(result) and pushed.claimed:
            await self.quota.release(pushed.caller, pushed.id)
        raise of_result(result, pushed.keyed)

    # -- waiting -------------------------------------------------------------------------

    async def wait(self, request: Request, pushed: Pushed, seconds: float) -> Result | None:
        """The result, whatever it is; None after `seconds`. Raises ClientDisconnect, ApiError."""
        return await self._ended(request, pushed.ticket, seconds)

    async def ended(self, request: Request, job: str, seconds: float) -> None:
        """Wait for the end of a job, `seconds` at most. Raises ClientDisconnect, ApiError."""
        with contextlib.suppress(ResultExpired):
            await self._ended(request, Ticket(job), seconds)

    async def _ended(self, request: Request, ticket: Ticket, seconds: float) -> Result | None:
        until = time.monotonic() + min(seconds, self.settings.http_wait_s)
        plan = asks.wait(self.client.keys, ticket, until)
        try:
            return await while_connected(request, self.client.do(plan, until))
        except WaitTimeout:
            return None

    async def abandon(self, pushed: Pushed) -> None:
        """Nobody waits for it any more: cancel it, unless others may mean the same job."""
        if self.settings.http_cancel_on_disconnect and not pushed.named:
            said = {"job": pushed.id}
            log.info("job %s: its client went away, canceling", pushed.id, extra=said)
            await self.client.do(asks.cancel(self.client.keys, pushed.ticket))

    # -- one job -------------------------------------------------------------------------

    async def cancel(self, job: str) -> None:
        """Ask for a cancel; nothing for a job that has ended. Raises UnknownJob."""
        record = await self.client.status(job)
        if not record.is_terminal:
            log.info("job %s: cancel asked for", job, extra={"job": job})
            await self.client.cancel(job)

    async def forget(self, job: str) -> None:
        """Cancel a job if it is active, then delete all of it. Raises UnknownJob, ApiError."""
        await self.cancel(job)
        try:
            result: Result | None = await self.client.wait(job, CANCEL_S)
        except WaitTimeout:
            raise ApiError(
                409,
                f"job {job} is being canceled and has not ended within {CANCEL_S:.0f} s; delete "
                "it again later",
                code="still_active",
            ) from None
        except ResultExpired:
            result = None
        keys = self.client.keys
        files = MOST_OUTPUTS if result is None else len(result.outputs)
        names = [key(job, n) for n in range(files) for key in (keys.output, keys.movie)]
        names += keys.result(job), keys.events(job), keys.preview(job), keys.job(job)
        await self.client.ask(
            Ask((
                ("DEL", *names),
                ("ZREM", keys.videos, job),
            ))
        )  # fmt: skip
        log.info("job %s deleted", job, extra={"job": job})


def checked_id(job: str) -> str:
    """A job's id as it came in a path. Raises UnknownJob for what cannot be one."""
    if not ID.fullmatch(job):
        raise UnknownJob(job[:64])
    return job


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """What `work` comes to, or ClientDisconnect as soon as the client of `request` is."""
    working = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _id_of(key: str, caller: Caller) -> str:
    """The id that an Idempotency-Key stands for: the same key, the same job; per caller."""
    if not 0 < len(key) <= MOST_KEY_CHARS:
        raise bad("Idempotency-Key", f"must have 1 to {MOST_KEY_CHARS} characters")
    return "once-" + hashlib.sha256(f"{caller.name} {key}".encode()).hexdigest()[:40]
