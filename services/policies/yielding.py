"""Who must make way for a job that would miss its deadline otherwise."""

from __future__ import annotations

from collections.abc import Callable, Set

from common.stage import DENOISE
from services.policies.base import Candidate, Decision, Preempt, Rank, Recall, Running, View

Precedes = Callable[[Candidate, Running], bool]  # whether a job goes before one that a rank has
IsTurn = Callable[[Running], bool]  # whether a task is the turn of one that is out (turns.py)


def make_way(
    urgent: Candidate,
    view: View,
    now: float,
    chunk_s: float,  # no chunk takes longer
    given: Set[str],  # ranks that this plan has given a task
    precedes: Precedes,
    is_turn: IsTurn,
) -> tuple[list[Decision], Rank | None]:
    """What makes room for `urgent`, the first that waits: nothing if it can wait for the first
    chunk to end with as much time again to spare. And the rank to queue it at, if there is one."""
    slack = urgent.slack_s(now)
    if slack < -view.error * urgent.remaining_s or slack / 2 > 2 * chunk_s:
        return [], None  # it is late anyway; or any rank is free soon enough
    victims = []
    able_s = slack / 2 - view.switch_s  # what it can wait
    for rank in view.by_stage.get(DENOISE, ()):
        if urgent.model not in rank.models or rank.name in given:
            continue
        if rank.running is None:
            if rank.queued is None:
                return [], None
            continue
        wait_s = max(0.0, rank.running.ends_s - now)
        if rank.queued:
            wait_s += rank.queued.each_s
        if wait_s <= able_s:
            return [], None
        victims.append(rank)
    return _chosen(urgent, victims, view, now, precedes, is_turn)


def _chosen(
    urgent: Candidate,
    victims: list[Rank],
    view: View,
    now: float,
    precedes: Precedes,
    is_turn: IsTurn,
) -> tuple[list[Decision], Rank | None]:
    open_to = []
    for rank in victims:
        running, queued = rank.running, rank.queued
        assert running is not None
        if queued and (is_turn(queued) or not precedes(urgent, queued)):
            continue  # a turn is short, and was waited for long enough
        interrupts = (
            not running.yielding
            and running.ends_s - now > running.each_s + view.switch_s
            and precedes(urgent, running)
        )
        if queued or interrupts or running.yielding:
            open_to.append((running.candidate.deadline_s, rank, interrupts))
    if not open_to:
        return [], None
    # The one with most time left makes way.
    _, rank, interrupts = max(open_to, key=lambda entry: entry[0])
    decisions: list[Decision] = []
    if rank.queued:
        decisions.append(Recall(rank.queued.seq))
    assert rank.running is not None
    if interrupts:
        decisions.append(Preempt(rank.running.seq))
    return decisions, None if rank.queued else rank
