"""Redis connections that do not hang, made from any URL that common/redis_url.py knows.

redis-py 8's defaults retry a blocking read for a minute. A client that blocks gets a BLOCK of 2 s
at most (BLOCK_MS) and a timeout a little above; a client that writes gets a timeout too. Neither
retries: their callers repeat scripts only, which are safe to repeat.

With Sentinels every new connection asks them who is the master; a connection to a former master
ends at its first write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.redis_url import RedisUrl

# Untyped in redis-py.
_parse_url: Any = redis.connection.parse_url
_Sentinel: Any = redis.sentinel.Sentinel
_SentinelPool: Any = redis.sentinel.SentinelConnectionPool
_AsyncSentinel: Any = redis.asyncio.sentinel.Sentinel
_AsyncSentinelPool: Any = redis.asyncio.sentinel.SentinelConnectionPool

# A longer BLOCK would outlive a lost connection unnoticed; Redis answers sooner if there is news.
BLOCK_MS = 2000
# No reply by then means that the connection is dead, though nothing has closed it: a firewall that
# lost its state swallows what is sent for ever.
READ_TIMEOUT_S = BLOCK_MS / 1000 + 3.0
WRITE_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
# A Sentinel that is there answers at once; there are others to ask.
SENTINEL_TIMEOUT_S = 1.0
# Each wait holds a connection; redis-py's own bound, 100, would look like a Redis that is away.
MAX_CONNECTIONS = 2**31 - 1


def blocking(url: str) -> redis.Redis:
    """For XREAD BLOCK of BLOCK_MS at most."""
    return plain(url, READ_TIMEOUT_S)


def writing(url: str, timeout_s: float = WRITE_TIMEOUT_S) -> redis.Redis:
    """For scripts and plain commands."""
    return plain(url, timeout_s)


def plain(url: str, timeout_s: float, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> redis.Redis:
    """A client with these timeouts (s), which never tries twice."""
    return redis.Redis.from_pool(pool(url, timeout_s, connect_timeout_s))


def pool(url: str, timeout_s: float | None, connect_timeout_s: float) -> redis.ConnectionPool:
    """The connections of a blocking client. Raises ValueError for a URL that cannot be read."""
    meant = RedisUrl.parse(url)
    options = _options(meant, timeout_s, connect_timeout_s)
    options["retry"] = Retry(NoBackoff(), 0)
    if not meant.sentinels:
        return redis.ConnectionPool(**options)
    sentinel = _Sentinel(meant.sentinels, sentinel_kwargs=_asked(meant, Retry(NoBackoff(), 0)))
    made: redis.ConnectionPool = _SentinelPool(meant.service, sentinel, **_managed(options))
    return made


def async_pool(
    url: str, timeout_s: float | None, connect_timeout_s: float
) -> redis.asyncio.ConnectionPool:
    """The connections of an asyncio client; None for no time limit on replies."""
    meant = RedisUrl.parse(url)
    retry = redis.asyncio.retry.Retry(NoBackoff(), 0)
    options = _options(meant, timeout_s, connect_timeout_s)
    tls = options.pop("connection_class", None) is redis.connection.SSLConnection
    options["retry"] = retry
    if "path" in options:
        options["connection_class"] = redis.asyncio.UnixDomainSocketConnection
    elif tls:
        options["connection_class"] = redis.asyncio.SSLConnection
    if not meant.sentinels:
        return redis.asyncio.ConnectionPool(**options)
    sentinel = _AsyncSentinel(meant.sentinels, sentinel_kwargs=_asked(meant, retry))
    made: redis.asyncio.ConnectionPool = _AsyncSentinelPool(
        meant.service, sentinel, **_managed(options)
    )
    return made


@contextlib.contextmanager
def on_bytes(connection: Any, call: Callable[[], None]) -> Iterator[None]:
    """Call `call` for whatever an asyncio connection receives inside: redis-py times whole replies,
    and one of many megabytes is no sign of a dead connection."""
    reader = connection._reader
    feed = reader.feed_data

    def feed_and_call(data: bytes) -> None:
        feed(data)
        call()

    reader.feed_data = feed_and_call
    try:
        yield
    finally:
        del reader.feed_data


def _options(meant: RedisUrl, timeout_s: float | None, connect_timeout_s: float) -> dict[str, Any]:
    """As redis-py's from_url: what stands in the URL wins."""
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": connect_timeout_s,
        "protocol": 2,
        "max_connections": MAX_CONNECTIONS,
        **_parse_url(meant.url),
    }
    if meant.credentials is not None:
        options["credential_provider"] = meant.credentials
    return options


def _managed(options: dict[str, Any]) -> dict[str, Any]:
    """The options of connections whose address the Sentinels name."""
    tls = issubclass(
        options.pop("connection_class", object),
        (redis.connection.SSLConnection, redis.asyncio.SSLConnection),
    )
    options.pop("host")
    options.pop("port", None)
    return {**options, "ssl": tls}


def _asked(meant: RedisUrl, retry: Any) -> dict[str, Any]:
    return {
        "socket_timeout": SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": SENTINEL_TIMEOUT_S,
        "retry": retry,
        "protocol": 2,
        **meant.sentinel_options,
    }
