"""Scheduling policies, one idea a file.

Third parties add theirs by an entry point of the group `slackwater.policies`: its name is the
policy's, its object a callable without arguments that makes one (docs/scheduling.md).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from services.policies.base import Policy
from services.policies.edf import EDF
from services.policies.fcfs import Fcfs
from services.policies.least_slack import LEAST_SLACK
from services.policies.monolithic import MONOLITHIC
from services.policies.sjf import SJF
from services.policies.slack import Slack
from services.policies.srtf import SRTF

GROUP = "slackwater.policies"

# Deadlines mean nothing to fcfs and monolithic, so that these have no doomed-last variant.
_WITH_VARIANT = (SJF, SRTF, EDF, LEAST_SLACK)
POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": Fcfs,
    "slack": Slack,
    "monolithic": MONOLITHIC.policy,
    **{rule.name: rule.policy for rule in _WITH_VARIANT},
    **{f"{rule.name}-doomed-last": rule.doomed_last for rule in _WITH_VARIANT},
}

# One line each, for people who choose.
_LAST = "; those that can no longer make it last"
ABOUT = {
    "fcfs": "first come, first served, in chunks",
    "slack": "a set that can jointly make it, by deadline; the others last (the default)",
    "monolithic": "by arrival, each job in one piece: what most servers do",
    "sjf": "shortest job first, each in one piece",
    "srtf": "least work left first",
    "edf": "earliest deadline first",
    "least_slack": "least slack first, asked again at every step",
    "sjf-doomed-last": f"as sjf{_LAST}",
    "srtf-doomed-last": f"as srtf{_LAST}",
    "edf-doomed-last": f"as edf{_LAST}",
    "least_slack-doomed-last": f"as least_slack, in chunks{_LAST}",
}


def third_party() -> dict[str, Callable[[], Policy]]:
    """Loaders of installed policies by name; ours cannot be replaced."""
    found = entry_points(group=GROUP)
    return {entry.name: _maker(entry.load) for entry in found if entry.name not in POLICIES}


def _maker(load: Callable[[], Callable[[], Policy]]) -> Callable[[], Policy]:
    return lambda: load()()


def names() -> list[str]:
    """All policies that there are, ours first."""
    return [*POLICIES, *sorted(third_party())]


def make_policy(name: str) -> Policy:
    """A policy by name; ValueError names those there are, or why a third party's did not load."""
    if name in POLICIES:
        return POLICIES[name]()
    others = third_party()
    if name not in others:
        raise ValueError(f"policy {name!r} is not one of {', '.join([*POLICIES, *sorted(others)])}")
    try:
        policy = others[name]()
    except Exception as error:  # whatever a stranger's module raises on import
        raise ValueError(f"policy {name!r} could not be loaded: {error!r}") from error
    missing = [word for word in ("add", "remove", "plan", "order") if not hasattr(policy, word)]
    if missing:
        raise ValueError(f"policy {name!r} has no {', '.join(missing)}; see services/policies/base")
    return policy
