"""What clients ask of Redis, without I/O: shared by the blocking and the asyncio client.

Each function is a generator that yields `Ask`s (commands for one round trip), is sent their
replies, and returns an answer; `events` yields JobEvents in between. Every Ask is safe to
repeat: reads by nature, pushes because each carries the job's id.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from common.checks import InvalidRequest
from common.errors import JobLost, ResultExpired, UnknownJob, WaitTimeout
from common.job import Result
from common.keys import Keys
from common.messages import pack
from common.push import ID, MAX_PUSH_BYTES, TRACEPARENT, content_of, id_of
from common.record import GOES_ON, JobEvent, JobRecord, WorkerRecord, in_queue_order

# A lost connection shows within this; see common.connect.
BLOCK_S = 2.0
PAGE = 500
# How many unread pushes a list of jobs shows.
PUSHES = 2000

T = TypeVar("T")
Raw = dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Ask:
    """Commands for one round trip; the reply may take `block_s` longer than usual.

    With `one_by_one` an error stands in its command's place, unless asking again mends it.
    """

    commands: tuple[tuple[Any, ...], ...]
    block_s: float = 0.0
    one_by_one: bool = False


Plan = Generator[Ask, list[Any], T]
EventPlan = Generator[Ask | JobEvent, Any, None]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A job as its pusher knows it. With `entry` and `content` an answer that belongs to
    another job of the same id is told apart; without, the id alone counts."""

    id: str
    entry: str = ""
    content: str = ""


@dataclass(frozen=True, slots=True)
class Push:
    """One job ready to be pushed: its id and the stream entry's fields."""

    id: str
    raw: Raw

    @property
    def content(self) -> str:
        return content_of(self.raw)

    def ask(self, keys: Keys) -> tuple[Any, ...]:
        flat = [item for pair in self.raw.items() for item in pair]
        return ("XADD", keys.jobs, "*", "id", self.id, *flat)


def typed_push(job: str, params: Mapping[str, Any]) -> Push:
    """With values of their own type. Raises InvalidRequest for what cannot be sent."""
    trace = params.get("traceparent")
    if not isinstance(trace, str | None):
        raise InvalidRequest("traceparent", f"must be text, not {type(trace).__name__}")
    for name, value in params.items():
        try:
            pack([name, value])
        except (TypeError, ValueError, OverflowError) as error:
            shown = str(name).encode("utf-8", "replace").decode()  # a name may be what is wrong
            raise InvalidRequest(shown, f"cannot be sent: {error}") from error
    content = dict(sorted(params.items()))
    content.pop("traceparent", None)  # beside the payload it is no part of the content
    raw = {b"payload": pack(content)}
    if trace is not None:
        raw[TRACEPARENT] = trace.encode()
    return _checked(Push(job, raw))


def text_push(job: str, fields: Mapping[str, str]) -> Push:
    """With values as text, as from redis-cli: the model's manifest says what they are.

    Raises InvalidRequest for what cannot be sent.
    """
    raw = {}
    for name, value in fields.items():
        if not isinstance(value, str):
            raise InvalidRequest(str(name), f"must be text, not {type(value).__name__}")
        try:
            raw[name.encode()] = value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(name, f"cannot be sent: it is not UTF-8 ({error})") from error
    return _checked(Push(job, raw))


def _checked(push: Push) -> Push:
    if not isinstance(push.id, str):
        raise InvalidRequest("id", f"must be text, not {type(push.id).__name__}")
    if not ID.fullmatch(push.id):
        raise InvalidRequest(
            "id",
            f"{push.id[:64]!r} must be 1–128 letters, digits, '.', '_', ':' or '-', beginning with "
            "a letter or digit",
        )
    size = sum(len(k) + len(v) for k, v in push.raw.items()) + len(push.id) + 2
    if size > MAX_PUSH_BYTES:
        raise InvalidRequest("payload", f"is {size} bytes; up to {MAX_PUSH_BYTES} are allowed")
    return push


def submit(
    keys: Keys, pushes: Sequence[Push], accepted: dict[int, Ticket] | None = None
) -> Plan[list[Ticket]]:
    """Push; `accepted` is filled as it goes, by place in `pushes`, for when not all can be pushed.

    Raises the first refusal, once all of a page have been tried.
    """
    tickets: dict[int, Ticket] = {} if accepted is None else accepted
    for at in range(0, len(pushes), PAGE):
        page = pushes[at : at + PAGE]
        replies = yield Ask(tuple(push.ask(keys) for push in page), one_by_one=True)
        for i, (push, reply) in enumerate(zip(page, replies, strict=True), at):
            if not isinstance(reply, Exception):
                tickets[i] = Ticket(push.id, reply.decode(), push.content)
        refused = [reply for reply in replies if isinstance(reply, Exception)]
        if refused:
            raise refused[0]
    return [tickets[i] for i in range(len(pushes))]


# -- one job -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sight:
    """A job as found: `at` is the id its record stands under, "" while nobody has read it."""

    record: JobRecord
    at: str
    result: bytes | None = None


def look(keys: Keys, ticket: Ticket, result: bool = False) -> Plan[Sight]:
    """Find a job. Raises UnknownJob."""
    ids = [ticket.id]
    if ticket.entry and ticket.entry != ticket.id:
        ids.append(ticket.entry)  # where a push is answered whose id belongs to another job
    # In the order in which things come to be, so that a push which becomes a job in between is seen
    # as one of the two, and an end with its result. A full Redis would refuse a MULTI.
    commands: list[tuple[Any, ...]] = []
    if ticket.entry:
        commands.append(("XRANGE", keys.jobs, ticket.entry, ticket.entry))
    for job in ids:
        commands.append(("HGETALL", keys.job(job)))
        commands.append(("GET", keys.result(job)) if result else ("EXISTS", keys.result(job)))
    replies = yield Ask(tuple(commands))
    pushes = replies.pop(0) if ticket.entry else []
    for i, job in enumerate(ids):
        record = JobRecord.of(job, _pairs(replies[2 * i]))
        mine = job == ticket.entry or ticket.content in ("", record.content)
        if record.status and mine:
            return Sight(record, job, replies[2 * i + 1] if result else None)
    if ticket.entry:
        if pushes:
            return _pushed(ticket.id, *pushes[0])
        raise JobLost(ticket.id)
    return (yield from _look_among_pushes(keys, ticket, result))


def _look_again(keys: Keys, ticket: Ticket, was_seen: bool, result: bool = False) -> Plan[Sight]:
    """As `look`, for one that waits. Raises JobLost if there was something to see before."""
    try:
        return (yield from look(keys, ticket, result))
    except UnknownJob as error:
        if was_seen:
            raise JobLost(ticket.id) from error
        raise


def _look_among_pushes(keys: Keys, ticket: Ticket, result: bool) -> Plan[Sight]:
    """Through all that nobody has read yet, the latest first."""
    before, entries = "+", [()]
    while entries:
        [entries] = yield Ask((("XREVRANGE", keys.jobs, before, "-", "COUNT", PAGE),))
        for entry, flat in entries:
            if id_of(entry.decode(), _pairs(flat)) == ticket.id:
                return _pushed(ticket.id, entry, flat)
            before = f"({entry.decode()}"
    # It may have been read in between.
    fields, found = yield Ask((("HGETALL", keys.job(ticket.id)), ("GET", keys.result(ticket.id))))
    record = JobRecord.of(ticket.id, _pairs(fields))
    if not record.status:
        raise UnknownJob(ticket.id)
    return Sight(record, ticket.id, found if result else None)


def _pushed(job: str, entry: bytes, flat: Any) -> Sight:
    prompt = _pairs(flat).get(b"prompt", b"").decode("utf-8", "replace")
    return Sight(JobRecord.pushed(job, entry.decode(), prompt), "")


def status(keys: Keys, ticket: Ticket) -> Plan[JobRecord]:
    return (yield from look(keys, ticket)).record


def result(keys: Keys, ticket: Ticket) -> Plan[Result | None]:
    """The result, None while the job is active. Raises UnknownJob, ResultExpired."""
    return _result_of((yield from look(keys, ticket, result=True)))


def _result_of(sight: Sight) -> Result | None:
    if sight.result is not None:
        return Result.from_wire(sight.result)
    if sight.record.is_terminal:
        raise ResultExpired(sight.record.id, sight.record.status)
    return None


def wait(keys: Keys, ticket: Ticket, deadline: float | None) -> Plan[Result]:
    """The result, once there is one; `deadline` by the monotonic clock.

    Raises WaitTimeout, UnknownJob, ResultExpired. A status that this version does not know is
    waited for only while the record says that it is not terminal.
    """
    last = dict.fromkeys(_streams(keys, ticket), "0")
    was_seen = False
    while True:
        found = _result_of((yield from _look_again(keys, ticket, was_seen, result=True)))
        if found is not None:
            return found
        was_seen = True
        news = False
        while not news:
            entries = yield from _read(last, _block_s(deadline, ticket.id))
            news = not entries or any(event.type not in GOES_ON for _, event in entries)


def admission(keys: Keys, ticket: Ticket, deadline: float) -> Plan[Sight]:
    """The job once its push has been read, with its result if it was refused or has ended.

    Raises WaitTimeout while no coordinator has read it by `deadline`, UnknownJob.
    """
    while True:
        sight = yield from look(keys, ticket, result=True)
        if sight.at:
            return sight
        streams = dict.fromkeys(_streams(keys, ticket), "0")
        yield from _read(streams, _block_s(deadline, ticket.id))


def events(keys: Keys, ticket: Ticket, deadline: float | None, after: str = "0") -> EventPlan:
    """Every event from the first (of the latest 256) to the job's end; for an ended job too.

    `after` is the `entry` of an event, to go on behind it.
    """
    own, last, was_seen = "", {"": after}, False
    while True:
        sight = yield from _look_again(keys, ticket, was_seen)
        was_seen = True
        if not sight.at:  # nobody has read the push: wait for a first event, then look again
            streams = dict.fromkeys(_streams(keys, ticket), "0")
            yield from _read(streams, _block_s(deadline, ticket.id))
            continue
        if sight.at != own:
            own, last = sight.at, {keys.events(sight.at): after}
        ended, news = sight.record.is_terminal, False
        while not news:
            block_s = None if ended else _block_s(deadline, ticket.id)
            entries = yield from _read(last, block_s)
            for _, event in entries:
                yield event
                if event.is_terminal:
                    return
            if ended and not entries:  # the stream is gone, or its end is a word of a later version
                record = sight.record
                yield JobEvent(
                    record.status, record.finished_s or 0.0, is_terminal=True,
                    error_code=record.error_code, error=record.error,
                )  # fmt: skip
                return
            news = not ended and (not entries or any(e.type not in GOES_ON for _, e in entries))


def cancel(keys: Keys, ticket: Ticket) -> Plan[bool]:
    """Ask for a cancel; False where the push was refused or has ended (nothing is sent).

    With the id alone it is sent in any case: a job that arrives later is canceled then.
    """
    if ticket.entry:
        sight = yield from look(keys, ticket)
        if sight.record.is_terminal:
            return False
        if not sight.at:  # an unread push whose id is taken already will be refused
            [taken] = yield Ask((("HGET", keys.job(ticket.id), "content"),))
            if taken is not None and taken.decode() != ticket.content:
                return False
    yield Ask((("XADD", keys.cancel, "*", "id", ticket.id),))
    return True


def output(keys: Keys, ticket: Ticket, n: int) -> Plan[bytes]:
    """The n-th file's bytes. Raises JobError for a job without, IndexError, ResultExpired."""
    found = yield from result(keys, ticket)
    if found is None:
        raise WaitTimeout(f"job {ticket.id} has not ended; wait for it first")
    found.raise_for_status()
    if not 0 <= n < len(found.outputs):
        raise IndexError(f"job {ticket.id} has {len(found.outputs)} outputs; there is no {n}")
    [content] = yield Ask((("GET", found.outputs[n].key),))
    if content is None:
        raise ResultExpired(ticket.id, found.status, "output")
    return bytes(content)


# -- many ----------------------------------------------------------------------------------


def statuses(keys: Keys, jobs: Sequence[str]) -> Plan[list[JobRecord | None]]:
    """The records of `jobs`; None where there is none."""
    found: list[JobRecord | None] = []
    for at in range(0, len(jobs), PAGE):
        page = jobs[at : at + PAGE]
        for job, fields in zip(page, (yield _hashes(map(keys.job, page))), strict=True):
            record = JobRecord.of(job, _pairs(fields))
            found.append(record if record.status else None)
    return found


def ps(keys: Keys, ended: bool = False) -> Plan[list[JobRecord]]:
    """Active jobs in queue order, then the first PUSHES of the unread pushes; `ended` adds those
    whose record remains."""
    active, pushes = yield Ask(
        (("SMEMBERS", keys.active), ("XRANGE", keys.jobs, "-", "+", "COUNT", PUSHES))
    )
    ids = {job.decode() for job in active}
    if ended:
        ids |= yield from _all_ids(keys)
    records = [r for r in (yield from statuses(keys, sorted(ids))) if r is not None]
    if not ended:
        records = [r for r in records if not r.is_terminal]
    known = {r.id for r in records}
    waiting = []
    for entry, flat in pushes:
        job = id_of(entry.decode(), _pairs(flat))
        if job not in known:
            waiting.append(_pushed(job, entry, flat).record)
    return in_queue_order([*records, *waiting])


def _all_ids(keys: Keys) -> Plan[set[str]]:
    start = keys.job("")
    pattern = "".join("\\" + c if c in "*?[]\\" else c for c in start) + "*"
    ids: set[str] = set()
    cursor = b"0"
    while True:
        [(cursor, names)] = yield Ask((("SCAN", cursor, "MATCH", pattern, "COUNT", 1000),))
        ids |= {name.decode()[len(start) :] for name in names}
        if cursor == b"0":
            return ids


def workers(keys: Keys) -> Plan[list[WorkerRecord]]:
    """Workers whose lease has not run out, by stage and name."""
    [members] = yield Ask((("SMEMBERS", keys.workers),))
    names = sorted(name.decode() for name in members)
    found = yield _hashes(map(keys.worker, names))
    records = [WorkerRecord.of(n, _pairs(f)) for n, f in zip(names, found, strict=True) if f]
    order = {"encode": 0, "denoise": 1, "decode": 2}
    return sorted(records, key=lambda r: (order.get(r.stage, 3), r.name))


def manifests(keys: Keys) -> Plan[Raw]:
    """What workers published: "{model}/{stage}" -> JSON."""
    [fields] = yield Ask((("HGETALL", keys.manifests),))
    return _pairs(fields)


# -- reading -------------------------------------------------------------------------------


def _hashes(names: Iterable[str]) -> Ask:
    return Ask(tuple(("HGETALL", name) for name in names))


def _streams(keys: Keys, ticket: Ticket) -> list[str]:
    """Where news of a job may come: under its id, or, if the push is refused, its entry's."""
    return [keys.events(job) for job in dict.fromkeys((ticket.id, ticket.entry)) if job]


def _block_s(deadline: float | None, job: str) -> float:
    if deadline is None:
        return BLOCK_S
    left = deadline - time.monotonic()
    if left <= 0:
        raise WaitTimeout(f"job {job} has not ended yet; it goes on")
    return min(BLOCK_S, left)


def _read(last: dict[str, str], block_s: float | None) -> Plan[list[tuple[str, JobEvent]]]:
    """New events of the streams in `last`, which is moved on; waits up to `block_s` seconds."""
    block = () if block_s is None else ("BLOCK", max(1, round(1000 * block_s)))
    command = ("XREAD", *block, "STREAMS", *last, *last.values())
    [reply] = yield Ask((command,), block_s or 0.0)
    found = []
    for stream, entries in reply or ():
        for entry, flat in entries:
            found.append((stream.decode(), JobEvent.of(_pairs(flat), entry.decode())))
            last[stream.decode()] = entry.decode()
    return found


def _pairs(flat: Sequence[bytes]) -> Raw:
    return dict(zip(flat[::2], flat[1::2], strict=True))
