"""Whose rows share a forward pass: company is taken while that pays and makes nobody late.

A member costs what the pass gets longer by, from the measured curve of its rows. It must cost
less than it would have cost alone had it been as well off there as those in the pass are by now:
the curve flattens, and from then on company only makes all of them wait for each other. At sizes
where a row costs as much as a pass nothing is gained, and nobody gets company. There is no most
but the message's, and what the rank's memory holds. Where the curve ends no gain is expected of a
further member; one is tried where everybody could bear that, and reports then continue the curve.

A step of denoising, an encode and a decode are passes alike. Source: continuous batching, as the
RFC on chunked scheduling for vLLM-Omni has it; by time and not by count, since a row of a large
picture fills a device that eight small ones do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf

from common.stage import DENOISE, ENCODE
from services.policies.base import MOST_ROWS, Candidate, Pass, Run, View

# A member must cost less than this share of what it takes alone, over what the others gain from
# sharing. 0.8, 0.9, 1: at 1.4 times the load 1.15, 1.13, 1.11 times as many are in time as without
# batches, at 2.5 times always 1.39 (small pictures of the bundled model, simulated, seeds 0 to 5).
PAYS = 0.8
# Waiting jobs that are looked at for one batch, and passed over to find them: 30 µs.
LOOK, SKIM = 64, 256
# Jobs outside a batch that are asked whether they can wait for its passes: the next to be due.
OTHERS = 4
# What a chunk leaves of the weight of those before it, where the pace is averaged.
KEEP = 0.9


def share(
    first: Candidate,
    company: Iterable[Candidate],
    view: View,
    now: float,
    most_units: float = inf,
    others: Sequence[Candidate] = (),
) -> tuple[list[Candidate], float]:
    """`first` and who runs with it, and the seconds of a step, or of the task, that they share.

    `most_units`: rows × tokens that the rank's memory holds; a job alone may ask for more.
    `others`: the next that wait for the rank and stay outside, by deadline.
    """
    members, each_s, tried = [first], first.each_s, False
    alone_s = each_s  # of all members, one after the other
    for candidate in islice(company, LOOK):
        if len(members) == MOST_ROWS:
            break
        larger = pass_of([*members, candidate])
        if larger.units > most_units:
            continue  # a smaller one may fit
        longer_s, known = view.shared_s(larger)
        if not known:
            if tried:
                break
            longer_s = max(longer_s, each_s + candidate.each_s)
        elif longer_s - each_s > PAYS * candidate.each_s * (each_s / alone_s if alone_s else 1.0):
            if larger.mixed:
                continue  # one of another size may pay
            break
        # A pass is not interrupted, so that those outside must bear it, too.
        grown = [*members, candidate]
        waits = all(
            _is_served(other, grown, longer_s, view, now)
            or not _is_served(other, members, each_s, view, now)
            for other in others
            if other.deadline_s < candidate.deadline_s
        )
        if waits and all(bears(member, longer_s, view, now) for member in grown):
            members.append(candidate)
            each_s, tried = longer_s, not known
            alone_s += candidate.each_s
    return members, each_s


def pass_of(members: list[Candidate]) -> Pass:
    """What `members` ask for together."""
    first = members[0]
    rows = sum(member.rows for member in members)
    tokens = max(member.tokens for member in members)
    mixed = first.stage != ENCODE and any(member.tokens != tokens for member in members)
    units = rows * tokens
    if mixed:
        rows = rows_of_largest([(member.rows, member.tokens) for member in members])
    return Pass(first.stage, first.model, rows, tokens, mixed, units)


def rows_of_largest(each: Iterable[tuple[int, int]]) -> int:
    """Rows of several sizes, (rows, tokens) each, as rows of the largest."""
    pairs = list(each)
    largest = max(1, *(tokens for _, tokens in pairs))
    return -(-sum(rows * tokens for rows, tokens in pairs) // largest)


def bears(member: Candidate, each_s: float, view: View, now: float) -> bool:
    """Whether passes of `each_s` to the stage's end leave it in time, or it is late anyhow."""
    slack_s = member.slack_s(now)
    if slack_s < -view.error * member.remaining_s:
        return True
    passes = member.steps - member.step if member.stage == DENOISE else 1
    return slack_s >= passes * (each_s - member.each_s)


def _is_served(
    other: Candidate, members: list[Candidate], each_s: float, view: View, now: float
) -> bool:
    """Whether `other` is in time after a task of `members` and what is then left of those of them
    that are due before it."""
    if other.stage != DENOISE:
        return other.slack_s(now) >= each_s
    count = _steps_of_chunk(members, each_s, view)
    left_s = sum(
        max(0, member.steps - member.step - count) * member.step_s
        for member in members
        if member.deadline_s <= other.deadline_s
    )
    return other.slack_s(now) >= count * each_s + left_s


def _steps_of_chunk(members: list[Candidate], each_s: float, view: View) -> int:
    """Of one of about `chunk_s`, within which a member that has fewer left leaves."""
    count = max(1, round(view.chunk_s / each_s)) if each_s > 0 else 1
    left = max(member.steps - member.step for member in members)
    # A rest that would cost a hand-over of its own is taken along.
    return left if left - count < 0.25 * count else count


def shares(candidate: Candidate, view: View) -> bool:
    return view.batch and bool(candidate.batch) and not candidate.suspect


def run_together(rank: str, members: list[Candidate], each_s: float, view: View) -> Run:
    """One task; of denoising a chunk."""
    if members[0].stage != DENOISE:
        return Run(rank, tuple((member.job, member.steps) for member in members), each_s)
    count = _steps_of_chunk(members, each_s, view)
    rows = tuple((m.job, min(m.step + count, m.steps)) for m in members)
    return Run(rank, rows, each_s)


class Pace:
    """What sharing was worth of late, and what it cost: what the keep-set may count on."""

    def __init__(self) -> None:
        # In quarters: each change has the keep-sets built anew.
        self.now = 1.0  # how much more gets done than one by one
        self.stretch = 1.0  # how much longer one takes for that
        self.members = 1.0  # of a chunk
        self._alone_s = self._took_s = 0.0

    def ran(self, alone_s: float, took_s: float, members: int = 1) -> None:
        """A chunk of `took_s` did what takes `alone_s` one job after the other."""
        self._alone_s = KEEP * self._alone_s + alone_s
        self._took_s = KEEP * self._took_s + took_s
        self.members = KEEP * self.members + (1 - KEEP) * members
        pace = self._alone_s / self._took_s if self._took_s > 0 else 1.0
        self.now = _in_quarters(pace, self.now)
        self.stretch = _in_quarters(self.members / pace, self.stretch)


def _in_quarters(value: float, last: float) -> float:
    """Rounded, where it is no longer near the last such value; 1 at least."""
    return last if abs(value - last) <= 0.2 else max(1.0, round(4 * value) / 4)
