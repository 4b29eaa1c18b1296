"""Finding out whether the HTTP gateway that was started here is the one that answers."""

from __future__ import annotations

import http.client
import json

from common.settings import Settings

# The supervisor has other processes to watch.
PATIENCE_S = 0.5


def address(settings: Settings) -> str:
    """How it is reached from this machine."""
    host, port = settings.http_address()
    return f"http://{host}:{port}"


def answers(settings: Settings, pid: int) -> bool:
    """Whether process `pid` serves http_host:http_port, and not another one."""
    asking = http.client.HTTPConnection(*settings.http_address(), timeout=PATIENCE_S)
    try:
        asking.request("GET", "/livez")
        said = json.loads(asking.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        asking.close()
    return isinstance(said, dict) and said.get("pid") == pid
