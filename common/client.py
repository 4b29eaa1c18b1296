"""The blocking client: push jobs, wait for them, follow them, cancel them.

    client = Client()
    job = client.submit("a red circle", width=128, height=128)
    job.wait()
    job.save("out")

Whatever the end, `wait` returns the Result; `raise_for_status()` on it, and everything that
needs a picture (`output`, `save`), raises for a job that did not succeed.

Names without a unit are seconds (`timeout`). A client may be used by many threads; each of them
that waits holds a connection.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common import asks
from common.asks import Ask, Plan, Push, Ticket
from common.connect import pool
from common.errors import JobRefused, RedisAway
from common.job import ErrorCode, JobStatus, OutputFile, Result
from common.keys import Keys
from common.outage import connect_anew
from common.params import merge_manifests
from common.patience import Patience, RedisFull, RedisRefused, is_away, refusal
from common.record import JobEvent, JobRecord, WorkerRecord

DEFAULT_URL = "redis://127.0.0.1:6379/0"
# A Redis that is there answers within this; more means that the connection is dead.
ANSWER_S = 5.0
# For a new connection; a wait on a Redis that hangs may be late by this, if it needs one.
CONNECT_S = 2.0
# How long a Redis that went away is waited for: a restart or a failover.
PATIENCE_S = 30.0
# What is sent at once, so that a slow connection has time for each part.
PART_BYTES = 64 * 1024
SUFFIXES = {
    "image/png": ".png", "image/jpeg": ".jpg", "image/webp": ".webp", "image/gif": ".gif",
    "video/mp4": ".mp4", "application/json": ".json",
}  # fmt: skip

T = TypeVar("T")


class Client:
    """A pool as its users see it. `patience` is how long a Redis that is away is waited for."""

    def __init__(
        self, url: str = DEFAULT_URL, prefix: str = "sw:", patience: float = PATIENCE_S
    ) -> None:
        self.url, self.keys, self.patience = url, Keys(prefix), patience
        self._pool = pool(url, CONNECT_S, CONNECT_S)  # of replies: see _round_trip

    # -- pushing -------------------------------------------------------------------------

    def submit(self, prompt: str, *, id: str | None = None, **params: Any) -> JobHandle:
        """Push one job; `params` are the model's (docs/protocol.md) and slo_ms, priority, …

        Same id and same content is the same job. Raises InvalidRequest for what cannot be
        sent, JobRefused where Redis is full, RedisRefused, RedisAway; what the pool refuses
        shows in `wait`.
        """
        return self._push([asks.typed_push(id_or_new(id), {"prompt": prompt, **params})])[0]

    def submit_many(self, jobs: Iterable[Mapping[str, Any]]) -> list[JobHandle]:
        """Push jobs, each a map of its parameters (and `id`), a few hundred a round trip.

        Raises as `submit`; the error's `accepted` are handles of the jobs that were pushed
        before it, its `ids` the ids of the others.
        """
        return self._push(pushes_of(jobs))

    def submit_text(self, fields: Mapping[str, str], *, id: str | None = None) -> JobHandle:
        """Push a job whose values are text, as from redis-cli: "20" becomes 20 where a number
        is wanted."""
        return self._push([asks.text_push(id_or_new(id), fields)])[0]

    def _push(self, pushes: list[Push]) -> list[JobHandle]:
        accepted: dict[int, Ticket] = {}
        try:
            tickets = self._do(asks.submit(self.keys, pushes, accepted))
        except (RedisRefused, RedisAway) as error:
            handles = [JobHandle(self, accepted[i]) for i in sorted(accepted)]
            raise not_pushed(error, pushes, accepted, handles) from error
        return [JobHandle(self, ticket) for ticket in tickets]

    # -- one job -------------------------------------------------------------------------

    def job(self, id: str) -> JobHandle:
        """A handle on a job that somebody else pushed."""
        return JobHandle(self, Ticket(id))

    def status(self, id: str) -> JobRecord:
        """Where a job stands. Raises UnknownJob."""
        return self._do(asks.status(self.keys, Ticket(id)))

    def result(self, id: str) -> Result | None:
        """How a job ended, None while it has not. Raises UnknownJob, ResultExpired."""
        return self._do(asks.result(self.keys, Ticket(id)))

    def wait(self, id: str, timeout: float | None = None) -> Result:
        """Wait for a job's end. Raises WaitTimeout, UnknownJob, ResultExpired."""
        return self._wait(Ticket(id), timeout)

    def events(self, id: str, timeout: float | None = None) -> Iterator[JobEvent]:
        """What happens to a job until its end, from its first event also if it has ended."""
        return self._events(Ticket(id), timeout)

    def cancel(self, id: str) -> None:
        """Ask that a job be canceled, also one that has not arrived yet.

        Raises RedisRefused at maxmemory, where Redis takes no cancels either.
        """
        self._do(asks.cancel(self.keys, Ticket(id)))

    def output(self, id: str, n: int = 0) -> bytes:
        """The n-th file of a job that succeeded. Raises JobError, IndexError, ResultExpired."""
        return self._do(asks.output(self.keys, Ticket(id), n))

    # -- the pool ------------------------------------------------------------------------

    def ps(self, ended: bool = False) -> list[JobRecord]:
        """Active jobs: running ones, then the queue in order, then pushes not read yet."""
        return self._do(asks.ps(self.keys, ended))

    def statuses(self, ids: Iterable[str]) -> list[JobRecord | None]:
        """The records of several jobs in one round trip; None where there is none."""
        return self._do(asks.statuses(self.keys, list(ids)))

    def workers(self) -> list[WorkerRecord]:
        """Registered workers, by stage."""
        return self._do(asks.workers(self.keys))

    def models(self) -> dict[str, dict[str, Any]]:
        """The manifests of the models served, by name: parameters, defaults, limits."""
        published = self._do(asks.manifests(self.keys))
        return merge_manifests({k.decode(): json.loads(v) for k, v in published.items()})

    def ask(self, ask: Ask) -> list[Any]:
        """Run plain commands in one round trip, patiently; for what has no method here."""
        return self._ask(ask, None)

    def close(self) -> None:
        self._pool.disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- talking to Redis ----------------------------------------------------------------

    def _wait(self, ticket: Ticket, timeout: float | None) -> Result:
        deadline = None if timeout is None else time.monotonic() + timeout
        return self._do(asks.wait(self.keys, ticket, deadline), deadline)

    def _events(self, ticket: Ticket, timeout: float | None) -> Iterator[JobEvent]:
        deadline = None if timeout is None else time.monotonic() + timeout
        plan = asks.events(self.keys, ticket, deadline)
        replies: list[Any] | None = None
        while True:
            try:
                step = plan.send(replies)
            except StopIteration:
                return
            replies = None
            if isinstance(step, Ask):
                replies = self._ask(step, deadline)
            else:
                yield step

    def _do(self, plan: Plan[T], deadline: float | None = None) -> T:
        replies: Any = None
        while True:
            try:
                ask = plan.send(replies)
            except StopIteration as end:
                answer: T = end.value
                return answer
            replies = self._ask(ask, deadline)

    def _ask(self, ask: Ask, deadline: float | None) -> list[Any]:
        """One round trip, repeated while Redis is away, for `patience` seconds at most."""
        patience = Patience(self.patience, deadline, self.url)
        while True:
            try:
                return self._round_trip(ask, deadline)
            except (RedisError, OSError) as error:
                time.sleep(patience.pause_after(error))

    def _round_trip(self, ask: Ask, deadline: float | None) -> list[Any]:
        if not ask.commands:
            return []
        connection: Any = self._pool.get_connection()
        try:
            connection.send_packed_command(parts_of(connection.pack_commands(ask.commands)))
            replies: list[Any] = []
            for _ in ask.commands:
                if not connection.can_read(answer_s(ask, deadline)):
                    raise RedisTimeoutError("Redis does not answer")
                try:
                    replies.append(connection.read_response())
                except ResponseError as error:
                    replies.append(error)
        except BaseException:  # replies that nobody reads would be taken for the next one's
            connection.disconnect()
            raise
        finally:
            self._pool.release(connection)
        try:
            return checked(replies, ask.one_by_one)
        except ResponseError as error:
            if is_away(error):
                connect_anew(self._pool)
            raise


@dataclass(frozen=True, slots=True)
class JobHandle:
    """A job that was pushed here. It never shows another job's picture: a push whose id was
    taken by other content is answered as a conflict."""

    client: Client
    ticket: Ticket

    @property
    def id(self) -> str:
        return self.ticket.id

    def status(self) -> JobRecord:
        return self.client._do(asks.status(self.client.keys, self.ticket))

    def result(self) -> Result | None:
        """None while the job is active. Raises UnknownJob, ResultExpired."""
        return self.client._do(asks.result(self.client.keys, self.ticket))

    def wait(self, timeout: float | None = None) -> Result:
        """The Result, whatever the end. Raises WaitTimeout, UnknownJob, ResultExpired."""
        return self.client._wait(self.ticket, timeout)

    def admitted(self, timeout: float | None = None) -> JobRecord:
        """The record once the pool has decided: `admission` and `eta_s`, or a refusal.

        Raises WaitTimeout.
        """
        next(iter(self.events(timeout)))
        return self.status()

    def events(self, timeout: float | None = None) -> Iterator[JobEvent]:
        return self.client._events(self.ticket, timeout)

    def cancel(self) -> bool:
        """Ask for a cancel; False if the job has ended already."""
        return self.client._do(asks.cancel(self.client.keys, self.ticket))

    def output(self, n: int = 0) -> bytes:
        return self.client._do(asks.output(self.client.keys, self.ticket, n))

    def save(self, directory: str | Path = ".") -> list[Path]:
        """Write every output to `directory`: {id}.png, or {id}-0.png, {id}-1.png, …

        A ":" becomes "_". Files of that name are replaced: jobs whose ids differ in that alone, or
        by a "-0" at their ends, want folders of their own. Raises JobError for a job that did not
        succeed.
        """
        outputs = (self.result() or self.wait()).raise_for_status().outputs
        paths = file_names(self.id, outputs, Path(directory))
        for n, path in enumerate(paths):
            write_whole(path, self.output(n))
        return paths


# -- shared with the asyncio client ----------------------------------------------------------


def answer_s(ask: Ask, deadline: float | None) -> float:
    """How long one reply may take: within the deadline, and a little for the way back."""
    patience = ask.block_s + ANSWER_S
    if deadline is None:
        return patience
    return min(patience, max(0.0, deadline - time.monotonic()) + 0.1)


def parts_of(packed: Iterable[bytes]) -> Iterator[bytes]:
    """Packed commands in pieces of PART_BYTES at most."""
    for chunk in packed:
        for at in range(0, len(chunk), PART_BYTES):
            yield chunk[at : at + PART_BYTES]


def checked(replies: list[Any], one_by_one: bool) -> list[Any]:
    """`replies`, of which with `one_by_one` some may be RedisRefused; without, the first error is
    raised. What asking again mends is raised in any case."""
    errors = [reply for reply in replies if isinstance(reply, Exception)]
    for error in errors:
        if is_away(error):
            raise error
    if errors and not one_by_one:
        raise errors[0]
    return [refusal(reply) if isinstance(reply, Exception) else reply for reply in replies]


def new_id() -> str:
    """An id of the client's own, so that a push repeated after a lost reply stays one job."""
    return uuid.uuid4().hex


def id_or_new(id: str | None) -> str:
    return new_id() if id is None else id


def pushes_of(jobs: Iterable[Mapping[str, Any]]) -> list[Push]:
    """Pushes of maps of parameters. Raises InvalidRequest."""
    pushes = []
    for job in jobs:
        params = dict(job)
        pushes.append(asks.typed_push(id_or_new(params.pop("id", None)), params))
    return pushes


def not_pushed(
    error: RedisRefused | RedisAway, pushes: list[Push], accepted: Iterable[int], handles: list[Any]
) -> RedisRefused | RedisAway | JobRefused:
    """The error of a push, with what became of each job; `handles` are those of `accepted`."""
    there = set(accepted)
    ids = tuple(push.id for i, push in enumerate(pushes) if i not in there)
    said: RedisRefused | RedisAway | JobRefused = type(error)(str(error))
    if isinstance(error, RedisFull):
        said = JobRefused(full(ids[0], len(there), len(pushes)))
    elif isinstance(error, RedisAway):
        which = f"job {ids[0]}" if len(ids) == 1 else f"{len(ids)} of {len(pushes)} jobs (`ids`)"
        said = RedisAway(f"{error}; whether {which} arrived is not known: pushed again with the "
                         "same id and content it is the same job")  # fmt: skip
    said.accepted, said.ids = tuple(handles), ids
    return said


def full(job: str, accepted: int = 0, of: int = 1) -> Result:
    """The result of a push that Redis had no room for; of a number, `accepted` were pushed."""
    part = "" if of == 1 else f" ({accepted} of {of} were pushed)"
    return Result(
        id=job,
        status=JobStatus.FAILED,
        error_code=ErrorCode.QUEUE_FULL,
        error=f"Redis is at maxmemory and takes no new jobs{part}; try again in 10 s",
        retry_after_s=10.0,
    )


def file_names(job: str, outputs: Iterable[OutputFile], directory: Path) -> list[Path]:
    files = list(outputs)
    stem = job.replace(":", "_")
    return [
        directory / f"{stem}{f'-{n}' if len(files) > 1 else ''}{SUFFIXES.get(file.mime, '.bin')}"
        for n, file in enumerate(files)
    ]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)
