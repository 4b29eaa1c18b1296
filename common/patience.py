"""What a client makes of an error of Redis: try again, give up, or say what was refused."""

from __future__ import annotations

import time

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    MaxConnectionsError,
    NoPermissionError,
    OutOfMemoryError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common.errors import OfPush, RedisAway, SlackwaterError, WaitTimeout
from common.outage import cannot_now
from common.redis_url import user_of

LOGIN = (AuthenticationError, AuthorizationError)
# A password that is being changed: Redis knows the new one, and the file has it in a moment.
LOGIN_AGAIN_S = 0.5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0


class RedisRefused(SlackwaterError, OfPush, ResponseError):
    """Redis is there and does not do it: the login or a right is missing, or room. The message has
    Redis' own words; redis-py's class of such an error is a base class too."""


class RedisFull(RedisRefused, OutOfMemoryError):
    """Redis is at maxmemory."""


class NoRight(RedisRefused, NoPermissionError):
    """The user of the URL may not do this."""


def is_away(error: Exception) -> bool:
    """Whether to ask again: nobody answers, or nobody who can serve now. A node that stops being
    the master ends blocked commands by UNBLOCKED."""
    if isinstance(error, (*LOGIN, MaxConnectionsError)):  # to redis-py they are ConnectionErrors
        return False
    if isinstance(error, (RedisConnectionError, RedisTimeoutError, OSError)):
        return True
    return cannot_now(error) or str(error).startswith("UNBLOCKED ")


def refusal(error: Exception, url: str = "") -> Exception:
    """What to raise for an error that asking again does not mend; itself if it is no refusal."""
    if isinstance(error, RedisRefused):
        return error
    if isinstance(error, LOGIN):
        return RedisRefused(
            f"the login of user {user_of(url)!r} was refused ({error}); check user and password "
            "of the URL"
        )
    if isinstance(error, MaxConnectionsError):
        return RedisRefused(
            "all connections are in use that max_connections in the URL allows; each wait holds "
            "one, so leave that option out"
        )
    if isinstance(error, OutOfMemoryError):
        return RedisFull(f"Redis is at maxmemory and has no room for this ({error})")
    if isinstance(error, ResponseError):
        kind = NoRight if isinstance(error, NoPermissionError) else RedisRefused
        return kind(str(error))
    return error


class Patience:
    """How long to go on with a Redis that is away."""

    def __init__(self, patience_s: float, deadline: float | None, url: str) -> None:
        self._until = time.monotonic() + patience_s
        self._deadline, self._url = deadline, url
        self._pause_s = FIRST_PAUSE_S
        self._logged_in_again = False

    def pause_after(self, error: Exception) -> float:
        """Seconds to wait before the next try. Raises WaitTimeout, RedisAway, or the RedisRefused
        that `error` stands for."""
        now = time.monotonic()
        if isinstance(error, LOGIN) and not self._logged_in_again:
            self._logged_in_again = True
            return LOGIN_AGAIN_S
        if not is_away(error):
            said = refusal(error, self._url)
            raise said from (error if said is not error else error.__cause__)
        if self._deadline is not None and now >= self._deadline:
            raise WaitTimeout(f"no answer from Redis in the given time: {error}") from error
        if now >= self._until:
            state = "takes no writes for now" if isinstance(error, ResponseError) else "is away"
            raise RedisAway(f"Redis {state}: {error}") from error
        ends = [self._until, *([] if self._deadline is None else [self._deadline])]
        pause, self._pause_s = self._pause_s, min(LONGEST_PAUSE_S, self._pause_s * 2)
        return max(0.0, min(pause, min(ends) - now))
