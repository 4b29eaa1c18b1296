"""Whose rows share a forward pass: company is taken while that pays and makes nobody late.

A member costs what the pass gets longer by, from the measured curve of its rows. At sizes where
that is as much as it would take alone nothing is gained, and nobody is made to wait for company.
Source: continuous batching, as the RFC on chunked scheduling for vLLM-Omni has it; by time and
not by count, since a row of a large picture fills a device that eight small ones do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from common.stage import DENOISE
from services.policies.base import MOST_ROWS, Candidate, Run, View

# A member must cost less than this share of what it takes alone.
PAYS = 0.9
# Waiting jobs that are looked at for one batch.
LOOK = 64
# What a chunk leaves of the weight of those before it, where the pace is averaged.
KEEP = 0.9


def share(
    first: Candidate, company: Iterable[Candidate], view: View, now: float
) -> tuple[list[Candidate], float]:
    """`first` and who runs with it, and the seconds of a step that they share."""
    members, rows = [first], first.rows
    step_s = view.shared_step_s(first, rows)
    for candidate in islice(company, LOOK):
        if len(members) == MOST_ROWS:
            break
        longer_s = view.shared_step_s(first, rows + candidate.rows)
        if longer_s - step_s > PAYS * candidate.step_s:
            break
        if all(bears(member, longer_s, view, now) for member in (*members, candidate)):
            members.append(candidate)
            rows, step_s = rows + candidate.rows, longer_s
    return members, step_s


def bears(member: Candidate, step_s: float, view: View, now: float) -> bool:
    """Whether steps of `step_s` to its end leave it in time, or it is late anyhow."""
    slack_s = member.slack_s(now)
    if slack_s < -view.error * member.remaining_s:
        return True
    return slack_s >= (member.steps - member.step) * (step_s - member.step_s)


def shares(candidate: Candidate) -> bool:
    return candidate.stage == DENOISE and bool(candidate.batch) and not candidate.suspect


def run_together(rank: str, members: list[Candidate], step_s: float, view: View) -> Run:
    """One chunk of about `chunk_s`; a member that has fewer steps left leaves within it."""
    count = max(1, round(view.chunk_s / step_s)) if step_s > 0 else 1
    left = max(member.steps - member.step for member in members)
    if left - count < 0.25 * count:  # a rest that would cost a hand-over of its own
        count = left
    rows = tuple((m.job, min(m.step + count, m.steps)) for m in members)
    return Run(rank, rows, step_s)


class Pace:
    """How much more gets done of late than one by one: what the keep-set may count on."""

    def __init__(self) -> None:
        self.now = 1.0  # in quarters: each change has the keep-sets built anew
        self._alone_s = self._took_s = 0.0

    def ran(self, alone_s: float, took_s: float) -> None:
        """A chunk of `took_s` did what takes `alone_s` one job after the other."""
        self._alone_s = KEEP * self._alone_s + alone_s
        self._took_s = KEEP * self._took_s + took_s
        pace = self._alone_s / self._took_s if self._took_s > 0 else 1.0
        if abs(pace - self.now) > 0.2:
            self.now = max(1.0, round(4 * pace) / 4)
