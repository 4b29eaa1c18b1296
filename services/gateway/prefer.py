"""The Prefer header of RFC 7240, of which `wait=N` is known here."""

from __future__ import annotations

import re

from fastapi import Request

WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,9})\"?\s*(?:$|[,;])", re.IGNORECASE)


def wait_s(request: Request) -> float | None:
    """Seconds that the client would wait; None where it does not say (a preference that cannot
    be read is ignored, as the RFC wants it)."""
    found = WAIT.search(",".join(request.headers.getlist("prefer")))
    return float(found[1]) if found else None


def applied(seconds: float | None) -> dict[str, str]:
    return {} if seconds is None else {"Preference-Applied": f"wait={seconds:.0f}"}
