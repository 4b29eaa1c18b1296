"""`python -m common.health coordinator|encode|denoise|decode|gateway|celery`: does it get on?

One line that says why, and exit 0 or 1. A process that is there and gets nothing done is not
healthy: a worker must renew its lease and move its task on, a coordinator must keep the lead
and read its streams. Imports no torch, and takes the same settings as the
service it looks at: SLACKWATER_ variables, or flags after the role.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from common.connect import plain
from common.keys import Keys
from common.settings import Settings, from_command_line

COORDINATOR, GATEWAY, CELERY = "coordinator", "gateway", "celery"
STAGES = ("encode", "denoise", "decode")
# Under the time-out of a health check, so that the line still says what was wrong.
REDIS_TIMEOUT_S = 3.0
# The leader reads its streams many times a second; a Redis that saves or a burst of pushes
# accounts for a second or two.
LAG_S = 10.0
# A task that has not moved for this long, or ten times what it was expected to take in all, is
# stuck. The first steps after a start may compile kernels, so the floor is far above a step.
STUCK_S = 60.0
STUCK_TIMES = 10.0
# How many active jobs are searched for this worker's task. More than that are sampled: the
# next check looks at others.
JOBS_LOOKED_AT = 2000


class Sick(Exception):
    """Not healthy; the message says why."""


# -- which worker is ours -------------------------------------------------------------------


def announce(stage: str, worker: str) -> None:
    """Leave a worker's name where a check in the same container finds it, and clear away what dead
    workers left there.

    Its own process number does not tell a worker from a replica's: in containers all are alike.
    """
    path = _presence(stage, os.getpid())
    fresh = path.with_suffix(".new")
    try:
        fresh.write_text(f"{worker}\n{_started(os.getpid())}")
        fresh.replace(path)
    except OSError as error:  # only the health check needs it
        print(f"health: cannot write {path}: {error}", file=sys.stderr)
    for left in _presences("*"):
        with contextlib.suppress(OSError):
            if not _named(left) and left.stat().st_uid == os.getuid():
                left.unlink()


def withdraw(stage: str) -> None:
    """Take the name away again: this worker ends."""
    with contextlib.suppress(OSError):
        _presence(stage, os.getpid()).unlink()


def _presence(stage: str, pid: int) -> Path:
    return Path(tempfile.gettempdir()) / f"slackwater-{stage}-{pid}.worker"


def _presences(stage: str) -> list[Path]:
    return sorted(_presence(stage, 0).parent.glob(f"slackwater-{stage}-*.worker"))


def _announced(stage: str) -> list[str]:
    """Names of the workers of this stage whose processes live here."""
    return [name for path in _presences(stage) if (name := _named(path))]


def _named(path: Path) -> str:
    """The name in a worker's file; "" unless the very process that wrote it still lives.

    Process numbers come again, in a container that was restarted more often than not.
    """
    pid = path.stem.rpartition("-")[2]
    try:
        name, _, started = path.read_text().partition("\n")
    except OSError:
        return ""
    return name if pid.isdigit() and started and started == _started(int(pid)) else ""


def _started(pid: int) -> str:
    """When the process began, in ticks since the machine's start; "" if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(") ")[2].split()[19]


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _registered(db: Any, keys: Keys, stage: str, host: str) -> list[str]:
    """Names from Redis that could be ours; with replicas on one host, theirs as well."""
    names = sorted(name.decode() for name in db.smembers(keys.workers))
    pipe = db.pipeline(transaction=False)
    for name in names:
        pipe.hmget(keys.worker(name), "stage", "host", "pid")
    return [
        name
        for name, (its_stage, its_host, pid) in zip(names, pipe.execute(), strict=True)
        if its_stage == stage.encode() and its_host == host.encode() and _lives(int(pid))
    ]


# -- a worker -------------------------------------------------------------------------------


def check_worker(db: Any, keys: Keys, stage: str, host: str) -> str:
    """Healthy if every worker of this stage in this container is. Raises Sick."""
    names = _announced(stage) or _registered(db, keys, stage, host)
    if not names:
        raise Sick(f"no {stage} worker of this container is registered; is its model loading?")
    return "; ".join(_worker(db, keys, name) for name in names)


def _worker(db: Any, keys: Keys, name: str) -> str:
    """Its record is its lease: Redis drops it when no heartbeat comes."""
    now_s = _now(db)
    beat, draining, hung = db.hmget(keys.worker(name), "beat", "draining", "hung")
    if beat is None:
        raise Sick(f"{name} is not registered: its lease ran out or it has left")
    age_s = now_s - int(beat) / 1000
    if draining == b"1":
        return f"{name} is draining"
    if hung:
        raise Sick(f"{name} was found to hang ({hung.decode()}) and is given no tasks")
    task = _running(db, keys, name)
    if task is not None:
        seq, moved_s, expected_s = task
        still_s, limit_s = now_s - moved_s, max(STUCK_S, STUCK_TIMES * expected_s)
        if still_s > limit_s:
            raise Sick(f"{name}: seq {seq} has not moved for {still_s:.0f} s (limit {limit_s:.0f})")
        return f"{name} runs seq {seq}, which moved {max(0.0, still_s):.1f} s ago"
    waiting_s = _oldest_age(db, keys.tasks(name), now_s)
    if waiting_s > STUCK_S:
        raise Sick(f"{name} runs nothing, and a task has waited for it for {waiting_s:.0f} s")
    return f"{name} waits for work, heard of {max(0.0, age_s):.1f} s ago"


def _running(db: Any, keys: Keys, name: str) -> tuple[int, float, float] | None:
    """The worker's task: its seq, when it last moved (Redis' time, s), how long it should take."""
    jobs = [job.decode() for job in db.srandmember(keys.active, JOBS_LOOKED_AT)]
    pipe = db.pipeline(transaction=False)
    for job in jobs:
        pipe.hget(keys.job(job), "worker")
    ours = [job for job, at in zip(jobs, pipe.execute(), strict=True) if at == name.encode()]
    for job in ours:  # where a job ran last stays in its record, so there may be several
        seq = int(db.hget(keys.trajectory(job), "seq") or 0)
        state, started, expected = db.hmget(keys.task(seq), "state", f"started:{name}", "expected")
        if state != b"running" or started is None:
            continue
        last = db.xrevrange(keys.events(job), count=1)  # one a step
        moved_s = max(int(started) / 1000, _entry_s(last[0][0]) if last else 0.0)
        return seq, moved_s, float(expected or 0) / 1000
    return None


# -- the coordinator ------------------------------------------------------------------------


def check_coordinator(db: Any, keys: Keys) -> str:
    """Healthy if the pool is led and its streams are read. Raises Sick."""
    leader = db.get(keys.leader)
    if leader is None:
        raise Sick("nobody leads: no coordinator holds the lease")
    streams = [keys.reports, keys.cancel]
    if db.exists(keys.manifests):  # pushes wait for the first worker
        streams.append(keys.jobs)
    now_s = _now(db)
    ages = {stream: _oldest_age(db, stream, now_s) for stream in streams}
    worst = max(ages, key=lambda stream: ages[stream])
    if ages[worst] > LAG_S:
        raise Sick(f"{worst} is not read: its oldest entry is {ages[worst]:.1f} s old")
    return f"{leader.decode()} leads, lag {ages[worst]:.1f} s, {db.scard(keys.active)} active jobs"


# -- the gateway ----------------------------------------------------------------------------


def check_gateway(settings: Settings) -> str:
    """Healthy if it answers, and reads events. Raises Sick."""
    asking = http.client.HTTPConnection(*settings.http_address(), timeout=REDIS_TIMEOUT_S)
    try:
        asking.request("GET", "/livez")
        answer = asking.getresponse()
        said = answer.read(4096).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise Sick(f"no answer on port {settings.http_port}: {error!r}") from error
    finally:
        asking.close()
    if answer.status != http.client.OK:
        raise Sick(said)
    return f"answers on port {settings.http_port}"


# -- the Celery side ------------------------------------------------------------------------


def check_celery(db: Any, keys: Keys) -> str:
    """Healthy if the outbox is read. How long receivers of webhooks keep us waiting is theirs.
    Raises Sick."""
    if not db.exists(keys.sender):
        raise Sick("nobody reads the outbox: no sender holds the lease")
    age_s = _oldest_age(db, keys.outbox, _now(db))
    if age_s > LAG_S:
        raise Sick(f"{keys.outbox} is not read: its oldest entry is {age_s:.1f} s old")
    owed, tasks = db.zcard(keys.deliveries), db.hlen(keys.celery)
    return f"the outbox is read, lag {age_s:.1f} s, {owed} deliveries owed, {tasks} tasks followed"


# -- small things ---------------------------------------------------------------------------


def _now(db: Any) -> float:
    seconds, micros = db.time()
    return float(seconds) + float(micros) / 1e6


def _entry_s(entry: bytes) -> float:
    """The time in a stream entry's id, in seconds."""
    return int(entry.partition(b"-")[0]) / 1000


def _oldest_age(db: Any, stream: str, now_s: float) -> float:
    first = db.xrange(stream, count=1)
    return max(0.0, now_s - _entry_s(first[0][0])) if first else 0.0


def check(role: str, settings: Settings, db: Any = None) -> str:
    """Why `role` is healthy, in a line. Raises Sick, RedisError or OSError where it is not."""
    if role == GATEWAY:
        return check_gateway(settings)
    keys = Keys(settings.prefix)
    db = db or plain(settings.redis_url, REDIS_TIMEOUT_S, REDIS_TIMEOUT_S)
    if role == COORDINATOR:
        return check_coordinator(db, keys)
    if role == CELERY:
        return check_celery(db, keys)
    return check_worker(db, keys, role, settings.host)


def main(arguments: list[str] | None = None) -> int:
    role, *flags = (sys.argv[1:] if arguments is None else arguments) or [""]
    roles = (COORDINATOR, GATEWAY, CELERY, *STAGES)
    if role not in roles:
        print(f"usage: python -m common.health {'|'.join(roles)} [--redis-url …]")
        return 2  # Docker takes every status but 0 for unhealthy
    try:
        print(
            f"healthy: {check(role, from_command_line(f'python -m common.health {role}', flags))}"
        )
        return 0
    except Sick as why:
        print(f"unhealthy: {why}")
    except (RedisError, OSError) as error:
        print(f"unhealthy: Redis is away: {error}")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
