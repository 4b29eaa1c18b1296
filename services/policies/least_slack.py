"""Least slack first, asked again at every step (Mok 1983; the vLLM-Omni RFC #290 has it so).

Slack is deadline − now − remaining; `now` is the same for all, so among waiting jobs the order
is by deadline − remaining and stands still. A running job's slack stays while the others' falls,
so that two of like slack take turns at every step: it thrashes.
"""

from __future__ import annotations

from services.policies.base import Candidate
from services.policies.ordered import Rule


def latest_start_s(candidate: Candidate) -> float:
    """When it must start at the latest."""
    return candidate.deadline_s - candidate.remaining_s


LEAST_SLACK = Rule("least_slack", latest_start_s, chunk="step")
