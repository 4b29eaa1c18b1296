"""`/` and what it needs: the page, its style and scripts, and its stream of events."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Response
from fastapi.responses import StreamingResponse

from services.gateway.access import Caller, caller_of
from services.gateway.errors import not_found
from services.gateway.gateway import Gateway, gateway_of

router = APIRouter(include_in_schema=False)

PAGE = Path(__file__).parent / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# All of it comes from here: a prompt that got past the escaping could still load and run nothing.
# Previews are in the page as data.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
FILES = {
    path.name: (path.read_bytes(), KINDS[path.suffix])
    for path in sorted(PAGE.iterdir())
    if path.suffix in KINDS
}


@router.get("/", response_model=None)
async def page() -> Response:
    """Holds nothing of the pool: where there are keys, its events ask for one."""
    return _file("index.html")


@router.get("/dashboard/events", response_model=None)
async def events(
    gateway: Annotated[Gateway, Depends(gateway_of)],
    _: Annotated[Caller, Depends(caller_of)],
) -> Response:
    """A snapshot, then changes, as server-sent events."""
    return StreamingResponse(
        gateway.feed.watch(),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


@router.get("/dashboard/{name}", response_model=None)
async def file(name: str) -> Response:
    if name not in FILES:
        raise not_found(f"there is no file {name[:64]!r} of the dashboard")
    return _file(name)


def _file(name: str) -> Response:
    content, kind = FILES[name]
    return Response(content, media_type=kind, headers=HEADERS)
