"""Redis connections that do not hang.

redis-py 8's defaults retry a blocking read for a minute. A client that blocks gets a BLOCK of 2 s
at most (BLOCK_MS) and a timeout a little above; a client that writes gets a timeout too. Neither
retries: their callers repeat scripts only, which are safe to repeat.
"""

from __future__ import annotations

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

# A longer BLOCK would outlive a lost connection unnoticed; Redis answers sooner if there is news.
BLOCK_MS = 2000
# No reply by then means that the connection is dead, though nothing has closed it: a firewall that
# lost its state swallows what is sent for ever.
READ_TIMEOUT_S = BLOCK_MS / 1000 + 3.0
WRITE_TIMEOUT_S = 10.0


def blocking(url: str) -> redis.Redis:
    """For XREAD BLOCK of BLOCK_MS at most."""
    return redis.Redis.from_url(
        url,
        socket_timeout=READ_TIMEOUT_S,
        socket_connect_timeout=5.0,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )


def writing(url: str, timeout_s: float = WRITE_TIMEOUT_S) -> redis.Redis:
    """For scripts and plain commands."""
    return redis.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=5.0,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
