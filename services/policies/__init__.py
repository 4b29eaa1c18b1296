"""Scheduling policies, one idea a file."""

from __future__ import annotations

from collections.abc import Callable

from services.policies.base import Policy
from services.policies.fcfs import Fcfs
from services.policies.slack import Slack

POLICIES: dict[str, Callable[[], Policy]] = {"slack": Slack, "fcfs": Fcfs}


def make_policy(name: str) -> Policy:
    """A policy by name; ValueError names those there are."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is not one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
