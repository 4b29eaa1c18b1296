"""Who may do what in a pool's Redis: one ACL user for each role, with no more than it needs.

The commands that a script calls are read from its text, and its keys must be open to the role for
reading and writing, which is what Redis asks for the keys of any script. Nobody gets FLUSHALL,
FLUSHDB, KEYS, CONFIG, SCRIPT FLUSH, DEBUG, EVAL, or a key that does not begin with the prefix.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common import spill
from common.keys import Keys
from common.scripts import SOURCES

# Redis 6.2 cannot tell reading from writing, so a role may write there what it should only read.
TELLS_READS = (7, 0)

# With Redis' own words, which name the command, or say that it is the key.
NO_RIGHT = "the user of Redis may not do this ({}); give it the rights that `slackwater acl` prints"

CONNECTION = ("ping", "select", "client|setname", "multi", "exec", "discard", "time")
RUNS_SCRIPTS = ("evalsha", "script|load")

# A name, or a stream of news: what every reader of jobs uses.
READS_JOBS = (
    "exists", "get", "hget", "hgetall", "hmget", "smembers", "ttl", "pttl", "xrange", "xread",
    "xrevrange",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Role:
    """One kind of process. `reads` and `writes` (which includes reading) are made of Keys whose
    variable parts are "*"; `pushes` are only written."""

    name: str
    what: str
    commands: tuple[str, ...]
    scripts: tuple[str, ...] = ()
    reads: Callable[[Keys], Sequence[str]] = lambda _: ()
    writes: Callable[[Keys], Sequence[str]] = lambda _: ()
    pushes: Callable[[Keys], Sequence[str]] = lambda _: ()
    sources: tuple[str, ...] = ()  # of scripts that stand elsewhere than in common/lua

    def allowed(self) -> list[str]:
        """Commands, sorted; "script|load" is a subcommand."""
        called = set(calls_of((*(SOURCES[name] for name in self.scripts), *self.sources)))
        runs = RUNS_SCRIPTS if self.scripts or self.sources else ()
        return sorted({*CONNECTION, *self.commands, *runs, *called})


def calls_of(sources: Iterable[str]) -> set[str]:
    """The commands that Lua scripts call, in lower case."""
    return {
        name.lower()
        for source in sources
        for name in re.findall(r"redis\.p?call\(\s*'(\w+)'", source)
    }


def _seen_by_clients(k: Keys) -> list[str]:
    return [
        k.job("*"), k.result("*"), f"{k.prefix}output:*", k.events("*"), k.preview("*"),
        f"{k.prefix}movie:*", k.active, k.workers, k.worker("*"), k.manifests, k.leader,
    ]  # fmt: skip


def _workers_own(k: Keys) -> list[str]:
    return [
        k.worker("*"), k.workers, k.manifests, k.tasks("*"), f"{k.prefix}task:*", k.reports,
        k.timeline, k.trajectory("*"), k.job("*"), k.events("*"), f"{k.prefix}staged:*",
        f"{k.prefix}latents:*", k.preview("*"),
    ]  # fmt: skip


ROLES = (
    Role(
        "client",
        "pushes and cancels jobs; reads records, results, outputs and events",
        ("scan", "xadd", *READS_JOBS),
        reads=_seen_by_clients,
        writes=lambda k: (k.jobs,),  # read too: a push that nobody has taken yet
        pushes=lambda k: (k.cancel,),
    ),
    Role(
        "worker",
        "takes the tasks of its own stream, reports, keeps states; sees no push and no result",
        ("del", "hdel", "hget", "hgetall", "hexists", "hmget", "hset", "pexpire",
         "smembers", "srandmember", "unlink", "xdel", "xrange", "xread", "xrevrange"),
        ("register", "leave", "start", "progress", "report", "upload", "trace", "preview"),
        reads=lambda k: (k.active,),
        writes=_workers_own,
        sources=(spill.FREE,),
    ),
    Role(
        "coordinator",
        "decides: reads pushes and reports, writes records and results",
        ("get", "del", "hdel", "hget", "hgetall", "hlen", "hmget", "hset", "hincrby", "exists",
         "pexpire", "pttl", "scan", "scard", "smembers", "sscan", "ttl", "type", "wait", "xlen",
         "xrange", "xread"),
        ("submit", "refuse", "dispatch", "yield", "void", "cancel", "finish", "rewind", "shorten",
         "refresh", "mark", "ack", "lead", "leave", "sweep", "lapse", "bury"),
        writes=lambda k: (f"{k.prefix}*",),
    ),
    Role(
        "gateway",
        "HTTP: a client that also counts the jobs of each API key, forgets jobs on request, and "
        "shows the pool",
        ("client|id", "client|unblock", "del", "hdel", "hlen", "hset", "hsetnx", "pexpire", "scan",
         "scard", "sismember", "srandmember", "xadd", "xlen", "zadd", "zrem", "zremrangebyscore",
         "zrevrange", *READS_JOBS),
        reads=lambda k: (
            *_seen_by_clients(k), k.trajectory("*"), f"{k.prefix}task:*", k.tasks("*"), k.timeline,
            k.costs, k.profile, k.policy, k.cancel, k.reports, k.outbox, k.deliveries, k.dead,
            k.janitor,
        ),
        writes=lambda k: (
            k.jobs, k.job("*"), k.result("*"), f"{k.prefix}output:*", k.events("*"),
            k.preview("*"), f"{k.prefix}movie:*", k.pushed_by("*"), k.videos,
        ),
        pushes=lambda k: (k.cancel,),
    ),
    Role(
        "celery",
        "the door and the sender: a client that also sends webhooks and uploads, and makes movies",
        # Not the janitor's: it may write everything, and the leading coordinator sweeps anyway.
        ("xadd", "hdel", "hkeys", "hlen", "set", "zcard", "zrangebyscore", *READS_JOBS),
        ("enter", "lead", "post", "settle"),
        # A webhook says what GET /v1/jobs does, and that looks for a specification too.
        reads=lambda k: (*_seen_by_clients(k), k.trajectory("*")),
        writes=lambda k: (
            k.jobs, k.celery, k.outbox, k.deliveries, k.delivery("*"), k.sender,
            f"{k.prefix}movie:*",
        ),
        pushes=lambda k: (k.cancel,),
    ),
    Role(
        "admin",
        "the `slackwater` command and `slackwater up`: sees all of the pool, steers it",
        ("del", "hdel", "hincrby", "hset", "info", "pexpire", "scan", "scard", "sscan", "type",
         "xadd", "xdel", "xlen", "zrange", "zrevrange", *READS_JOBS),
        ("drain", "leave", "sweep", "lapse", "bury"),
        writes=lambda k: (f"{k.prefix}*",),
    ),
)  # fmt: skip

BY_NAME = {role.name: role for role in ROLES}


def rules(role: Role, prefix: str, version: tuple[int, ...] = TELLS_READS) -> list[str]:
    """What ACL SETUSER takes for `role` after the user's name and password.

    `version`: of the server. Raises ValueError for a prefix that cannot stand in a rule.
    """
    if re.search(r"\s", prefix) or not prefix:
        raise ValueError(f"the prefix {prefix!r} must not be empty or have spaces in it")
    keys = Keys(literal(prefix))
    tells = version >= TELLS_READS
    writes = list(dict.fromkeys(role.writes(keys)))
    reads = [key for key in dict.fromkeys(role.reads(keys)) if key not in writes]
    marked = [("~", writes), ("%R~" if tells else "~", reads)]
    marked.append(("%W~" if tells else "~", list(role.pushes(keys))))
    patterns = [mark + key for mark, those in marked for key in those]
    return ["resetchannels", *patterns, "-@all", *(f"+{name}" for name in role.allowed())]


def literal(text: str) -> str:
    """`text` as a pattern that stands for itself."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)


def user_of(role: Role, pool: str = "slackwater") -> str:
    return f"{pool}-{role.name}"


def hashed(password: str) -> str:
    """A password as a rule in which it does not stand."""
    return "#" + hashlib.sha256(password.encode()).hexdigest()
