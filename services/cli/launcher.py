"""Finding the launchers (`slackwater up`) that serve a Redis."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from common.asks import Ask
from common.redis_url import shown
from services.cli.terminal import Exit, fail

if TYPE_CHECKING:
    from common.client import Client


def hosts(client: Client) -> list[str]:
    """Host names of the launchers that are alive."""
    start = client.keys.launcher("")
    pattern = "".join("\\" + c if c in "*?[]\\" else c for c in start) + "*"
    found: set[str] = set()
    cursor: bytes | None = None
    while cursor != b"0":
        ask = Ask((("SCAN", cursor or 0, "MATCH", pattern, "COUNT", 1000),))
        [(cursor, names)] = client.ask(ask)
        found |= {name.decode()[len(start) :] for name in names}
    return sorted(found)


def find_host(client: Client, wanted: str | None) -> str:
    """The host whose launcher is meant: the one named, this one, or the only one there is."""
    there = hosts(client)
    name = wanted or (socket.gethostname() if socket.gethostname() in there else None)
    if name is None and len(there) == 1:
        name = there[0]
    if name in there and name is not None:
        return name
    if not there:
        fail(f"no `slackwater up` runs on {shown(client.url)} with the prefix {client.keys.prefix}")
    elif wanted:
        fail(f"no `slackwater up` runs on {wanted}; there are {', '.join(there)}")
    else:
        fail(f"several launchers are there; say which with --host: {', '.join(there)}")
    raise SystemExit(Exit.UNKNOWN)
