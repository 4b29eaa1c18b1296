"""Goes through a pool's keys page by page and has the scripts judge what may be left over.

SCAN never holds Redis up, and the leader, who does this beside its work, takes a page at a time.
Any number may sweep at once: each verdict is one script's, so the second finds nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from redis.exceptions import OutOfMemoryError, ResponseError

from common.arena import SWEEP_MIN_AGE_S, Arena
from common.clock import Clock, redis_clock
from common.keys import Keys
from common.owners import orphaned
from common.scripts import Scripts, Transitions, Ttls, text
from common.settings import Settings, ttls_of
from services.janitor.orphans import FOUND, Orphans, Seen, Suspect

log = logging.getLogger("slackwater.janitor")

# Keys a page, for about a millisecond of Redis' time in all.
PAGE = 200
NAMED = 5  # of a kind, in the log
COUNTS_TTL_S = 24 * 3600.0


class Janitor:
    """`counts`: of the round that goes on, or of the last one. `act=False` changes nothing."""

    def __init__(
        self, redis: Any, keys: Keys, ttls: Ttls, clock: Clock | None = None, act: bool = True
    ) -> None:
        self._redis, self._keys, self._act = redis, keys, act
        self._clock = clock or redis_clock(redis)
        self._scripts = Scripts(redis)
        self._orphans = Orphans(Transitions(keys, ttls), act)
        self._round: Iterator[None] | None = None
        self.counts: Counter[str] = Counter()
        self._found: dict[str, set[str]] = {}  # a scan may show a key twice

    def step(self) -> bool:
        """Look at one page; False at the end of a round. The next step begins another one."""
        if self._round is None:
            self.counts, self._found = Counter(), {}
            self._round = self._pages()
        try:
            next(self._round)
            return True
        except StopIteration:
            self._round = None
            self._conclude()
            return False
        except BaseException:  # Redis is away: from the beginning next time
            self._round = None
            raise

    def _pages(self) -> Iterator[None]:
        self._judge(self._dead_workers())
        yield
        for page in _scan(self._redis.sscan, self._keys.active):
            now = self._clock()
            self._judge([self._orphans.job(job, now) for job in page])
            yield
        for page in _scan(self._redis.scan, match=_literally(self._keys.prefix) + "*"):
            self._judge(self._suspects(page))
            yield

    def _dead_workers(self) -> list[Suspect]:
        names = sorted(text(name) for name in self._redis.smembers(self._keys.workers))
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.exists(self._keys.worker(name))
            pipe.exists(self._keys.tasks(name))
        found = pipe.execute()
        looks = zip(names, found[::2], found[1::2], strict=True)
        suspects = (self._orphans.worker(name, bool(a), bool(b)) for name, a, b in looks)
        return [suspect for suspect in suspects if suspect is not None]

    def _suspects(self, page: Sequence[str]) -> list[Suspect]:
        pipe = self._redis.pipeline(transaction=False)
        for name in page:
            pipe.pttl(name)
        seen = [Seen(name, ttl) for name, ttl in zip(page, pipe.execute(), strict=True)]
        found = (self._orphans.suspect(each, self._clock()) for each in self._read(seen))
        return [suspect for suspect in found if suspect is not None]

    def _read(self, seen: Sequence[Seen]) -> list[Seen]:
        """With the fields without which nothing can be said of some of them."""
        wanted = [self._orphans.to_read(each.name, each.ttl_ms) for each in seen]
        pipe = self._redis.pipeline(transaction=False)
        for each, fields in zip(seen, wanted, strict=True):
            if fields:
                pipe.hmget(each.name, fields)
        replies = iter(pipe.execute(raise_on_error=False))
        read = []
        for each, fields in zip(seen, wanted, strict=True):
            values = next(replies) if fields else ()
            if not isinstance(values, ResponseError):  # no hash: somebody else's key
                known = tuple(None if value is None else text(value) for value in values)
                read.append(Seen(each.name, each.ttl_ms, known))
        return read

    def _judge(self, suspects: Sequence[Suspect]) -> None:
        judged = [suspect for suspect in suspects if suspect.call is not None]
        replies = self._scripts.run([suspect.call for suspect in judged if suspect.call])
        for suspect in suspects:
            if suspect.call is None:
                self._count(suspect.kind, suspect.name)
        for suspect, reply in zip(judged, replies, strict=True):
            if isinstance(reply, ResponseError):
                log.warning("%s cannot be judged: %s", suspect.name, reply)
                continue
            kind = FOUND.get(text(reply[0]))
            if kind is not None:
                self._count(kind or suspect.kind, suspect.name)

    def _count(self, kind: str, name: str) -> None:
        names = self._found.setdefault(kind, set())
        names.add(name)
        self.counts[kind] = len(names)

    def _conclude(self) -> None:
        """Say what was found, and add it to what the pool's hash says."""
        for kind, count in self.counts.items():
            named = ", ".join(sorted(self._found[kind])[:NAMED])
            log.warning("%s: %d (%s%s)", kind, count, named, " …" if count > NAMED else "")
        if not self._act:
            return
        key = self._keys.janitor
        pipe = self._redis.pipeline(transaction=False)
        for kind, count in self.counts.items():
            if kind == "unknown":  # these stay: as many as there are, not once more each time
                pipe.hset(key, kind, count)
            else:
                pipe.hincrby(key, kind, count)
        pipe.hset(key, "at", round(1000 * self._clock()))
        pipe.hincrby(key, "rounds", 1)
        pipe.pexpire(key, round(1000 * COUNTS_TTL_S))
        for reply in pipe.execute(raise_on_error=False):
            if isinstance(reply, Exception) and not isinstance(reply, OutOfMemoryError):
                raise reply


def sweep(
    redis: Any, settings: Settings, *, act: bool = True, arena: Arena | None = None
) -> dict[str, int]:
    """One whole round: what was found, by kind (`orphans.KINDS`). `redis` returns bytes.

    `arena` is one of this pool on this host: its blocks of jobs that have ended are freed too,
    where they are older than a minute. Raises RedisError.
    """
    keys = Keys(settings.prefix)
    janitor = Janitor(redis, keys, ttls_of(settings), act=act)
    while janitor.step():
        pass
    counts = dict(janitor.counts)
    if arena is not None and (freed := _sweep_arena(redis, keys, arena, act)):
        counts["arena"] = freed
    return counts


def _sweep_arena(redis: Any, keys: Keys, arena: Arena, act: bool) -> int:
    """As each worker does once a minute."""
    is_left = orphaned(keys.prefix, map(text, redis.smembers(keys.active)))
    if act:
        return arena.free_owned_by(is_left)
    return sum(is_left(owner) for owner, _, age_s in arena.owners() if age_s >= SWEEP_MIN_AGE_S)


def _scan(scan: Any, *args: Any, **options: Any) -> Iterator[list[str]]:
    """Names, a page at a time; names that are no text are nobody's here."""
    cursor = None
    while cursor != 0:
        cursor, names = scan(*args, cursor=cursor or 0, count=PAGE, **options)
        yield [name.decode() for name in names if name.isascii()]


def _literally(prefix: str) -> str:
    """A pattern that matches `prefix` itself."""
    return "".join("\\" + c if c in "*?[]\\" else c for c in prefix)
