"""What every service says of itself: its version, and how it gets on with Redis."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from common.metrics.registry import Family, Registry

BUILD = Family(
    "slackwater_build_info", "gauge", "1; which service of which version this is",
    ("service", "version"),
)  # fmt: skip
REDIS_UP = Family(
    "slackwater_redis_up", "gauge", "1 while Redis answers this process", ("service",)
)
REDIS_RECONNECTS = Family(
    "slackwater_redis_reconnects_total", "counter", "times that Redis was away and came back",
    ("service",),
)  # fmt: skip
FALLBACKS = Family(
    "slackwater_fallbacks_total", "counter",
    "times that something second best was done: spilled (the arena was full, so that a state went "
    "to Redis), alone (jobs that were to share a forward pass ran one by one)",
    ("kind",),
)  # fmt: skip
FAMILIES = (BUILD, REDIS_UP, REDIS_RECONNECTS, FALLBACKS)


def describe(
    registry: Registry, service: str, up: Callable[[], bool], reconnects: Callable[[], int]
) -> None:
    registry.ask(BUILD, lambda: {(service, _version()): 1})
    registry.ask(REDIS_UP, lambda: {(service,): float(up())})
    registry.ask(REDIS_RECONNECTS, lambda: {(service,): reconnects()})


def _version() -> str:
    try:
        return version("slackwater")
    except PackageNotFoundError:
        return "0"
