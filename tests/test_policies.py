"""What each policy promises: an order, whom it interrupts, and how far it works ahead."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from common.stage import DECODE, DENOISE, ENCODE
from services.policies import POLICIES, make_policy
from services.policies.base import (
    MOST_ROWS,
    Candidate,
    Decision,
    Doomed,
    Policy,
    Preempt,
    Rank,
    Recall,
    Run,
    Running,
    View,
    chunk_stop,
)
from services.policies.index import Index
from services.policies.slack import DOOMED_SHARE

NOW = 1000.0


def candidate(job: str, stage: str = DENOISE, due_s: float = 100.0, **changes: Any) -> Candidate:
    """A job of 10 steps of 0.1 s that is due in `due_s`."""
    fields: dict[str, Any] = {
        "job": job, "stage": stage, "model": "m", "arrival_s": NOW, "deadline_s": NOW + due_s,
        "priority": 0, "remaining_s": 1.0, "task_s": 0.1, "step_s": 0.1, "step": 0, "steps": 10,
    }  # fmt: skip
    return Candidate(**{**fields, **changes})


def view(*ranks: Rank, **changes: Any) -> View:
    by_stage: dict[str, list[Rank]] = {}
    for rank in ranks:
        by_stage.setdefault(rank.stage, []).append(rank)
    return View(ranks=list(ranks), by_stage=by_stage, **{"chunk_s": 0.3, "pack_s": 0.0, **changes})


def rank(name: str, stage: str = DENOISE) -> Rank:
    return Rank(name, stage, ("m",))


def busy(name: str, task: Candidate, left_s: float, seq: int = 1) -> Rank:
    return Rank(name, task.stage, ("m",), running=Running(seq, task, NOW + left_s))


def runs(decisions: list[Decision]) -> dict[str, list[str]]:
    """Rank to jobs."""
    return {d.rank: [job for job, _ in d.rows] for d in decisions if isinstance(d, Run)}


both = pytest.mark.parametrize("name", sorted(POLICIES))


def test_an_unknown_policy_is_refused_by_naming_those_there_are() -> None:
    with pytest.raises(ValueError, match="fcfs, slack"):
        make_policy("best")


# -- what all of them keep ---------------------------------------------------------------


@both
def test_an_idle_rank_gets_work_of_its_stage_and_model(name: str) -> None:
    policy = make_policy(name)
    policy.add(candidate("other-stage", DECODE))
    policy.add(candidate("other-model", model="other"))
    policy.add(candidate("mine"))
    assert runs(policy.plan(view(rank("r")), NOW)) == {"r": ["mine"]}


@both
def test_no_job_is_given_to_two_ranks(name: str) -> None:
    policy = make_policy(name)
    policy.add(candidate("a"))
    assert len(runs(policy.plan(view(rank("r"), rank("s")), NOW))) == 1


@both
def test_a_rank_has_one_task_running_and_one_queued_at_most(name: str) -> None:
    """The second comes only shortly before the first ends: late binding."""
    policy = make_policy(name)
    policy.add(candidate("a"))
    assert not runs(policy.plan(view(busy("r", candidate("x"), left_s=0.2)), NOW))
    nearly = busy("r", candidate("x"), left_s=0.01)
    assert runs(policy.plan(view(nearly), NOW)) == {"r": ["a"]}
    nearly.queued = Running(2, candidate("y"), NOW + 0.3)
    assert not runs(policy.plan(view(nearly), NOW))


@both
def test_nobody_idles_while_there_is_work(name: str) -> None:
    """Every idle rank of a stage gets a task while tasks for it last, late ones included."""
    policy = make_policy(name)
    for i in range(3):
        policy.add(candidate(f"late{i}", due_s=-5.0))
        policy.add(candidate(f"e{i}", ENCODE))
        policy.add(candidate(f"d{i}", DECODE))
    ranks = [rank(f"{stage}{i}", stage) for stage in (ENCODE, DENOISE, DECODE) for i in range(3)]
    given = runs(policy.plan(view(*ranks, ahead=9), NOW))
    assert len(given) == 9


@both
def test_encoding_ahead_is_bounded(name: str) -> None:
    """Embeddings that nobody can use yet only take memory, be the jobs in time or late."""
    for due_s in (100.0, -100.0):
        policy = make_policy(name)
        encoder, denoiser = rank("e", ENCODE), busy("r", candidate("x"), left_s=1e6)
        waiting = [candidate(f"j{i:03}", ENCODE, due_s=due_s + i / 1000) for i in range(300)]
        for task in waiting:
            policy.add(task)
        encoded = 0
        while given := runs(policy.plan(view(encoder, denoiser), NOW)):
            (job,) = given["e"]
            policy.remove(job)
            policy.add(candidate(job, DENOISE, due_s=due_s + int(job[1:]) / 1000))
            encoded += 1
        assert 2 <= encoded <= 70


@both
def test_short_tasks_share_a_hand_over(name: str) -> None:
    """Up to pack_s together, and never more rows than a message holds."""
    policy = make_policy(name)
    for i in range(40):
        policy.add(candidate(f"j{i:02}", DECODE, task_s=0.001))
    (rows,) = runs(policy.plan(view(rank("r", DECODE), pack_s=0.005), NOW)).values()
    assert len(rows) == 5
    (rows,) = runs(policy.plan(view(rank("r", DECODE), pack_s=1.0), NOW)).values()
    assert len(rows) == MOST_ROWS


@both
def test_a_job_that_failed_before_runs_alone(name: str) -> None:
    """Whatever killed its worker takes no neighbour with it the next time."""
    policy = make_policy(name)
    for i, suspect in enumerate([False, True, False]):
        task = candidate(f"j{i}", DECODE, due_s=100 + i, arrival_s=NOW + i, suspect=suspect)
        policy.add(task)
    given = []
    for _ in range(3):
        plan = runs(policy.plan(view(rank("r", DECODE), pack_s=1.0), NOW))
        for job in plan.get("r", []):
            policy.remove(job)
        given.append(plan.get("r"))
    assert given == [["j0"], ["j1"], ["j2"]]


@both
def test_order_names_every_waiting_job_once(name: str) -> None:
    policy = make_policy(name)
    for i, stage in enumerate([ENCODE, DENOISE, DECODE, DENOISE]):
        policy.add(candidate(f"j{i}", stage, due_s=i, arrival_s=NOW + i))
    policy.remove("j2")
    policy.remove("nobody")
    assert list(policy.order(NOW)) == ["j0", "j1", "j3"]


@both
def test_the_same_tasks_lead_to_the_same_plan(name: str) -> None:
    """In whatever order they came."""
    tasks = [candidate(f"j{i}", due_s=5 + i % 3, arrival_s=NOW + i) for i in range(5)]
    plans = set()
    for order in itertools.islice(itertools.permutations(tasks), 0, 120, 7):
        policy = make_policy(name)
        for task in order:
            policy.add(task)
        plans.add(str(policy.plan(view(rank("r"), rank("s")), NOW)))
    assert len(plans) == 1


# -- first come, first served ------------------------------------------------------------


def test_fcfs_goes_by_arrival_and_never_interrupts() -> None:
    policy = make_policy("fcfs")
    policy.add(candidate("second", due_s=0.5, arrival_s=NOW + 1))
    policy.add(candidate("first", due_s=500, arrival_s=NOW))
    assert runs(policy.plan(view(rank("r")), NOW)) == {"r": ["first"]}
    decisions = policy.plan(view(busy("r", candidate("x", due_s=1e6), left_s=1e6)), NOW)
    assert decisions == []


# -- slack -------------------------------------------------------------------------------


@pytest.fixture
def slack() -> Policy:
    return make_policy("slack")


def test_slack_goes_by_deadline_among_those_who_can_make_it(slack: Policy) -> None:
    """A job that is late already waits behind one that is not, though it was due first."""
    slack.add(candidate("late", due_s=0.5))
    slack.add(candidate("loose", due_s=50))
    slack.add(candidate("tight", due_s=2))
    decisions = slack.plan(view(rank("r")), NOW)
    assert runs(decisions) == {"r": ["tight"]}
    assert [d.job for d in decisions if isinstance(d, Doomed)] == ["late"]


def test_slack_says_once_that_a_job_is_doomed(slack: Policy) -> None:
    slack.add(candidate("late", due_s=-1))
    first = slack.plan(view(rank("r")), NOW)
    second = slack.plan(view(rank("r")), NOW)
    assert [isinstance(d, Doomed) for d in first] == [True, False]
    assert not any(isinstance(d, Doomed) for d in second)


def test_slack_runs_doomed_jobs_shortest_first(slack: Policy) -> None:
    slack.add(candidate("long", due_s=-1, remaining_s=50.0))
    slack.add(candidate("short", due_s=-1, remaining_s=1.0))
    assert runs(slack.plan(view(rank("r")), NOW)) == {"r": ["short"]}


def test_slack_starves_nobody(slack: Policy) -> None:
    """Doomed jobs get their share while others wait that can make it, and no more."""
    slack.add(candidate("late", due_s=-1, steps=1000))
    given = []
    for i in range(200):
        slack.add(candidate(f"j{i}", due_s=1e6))
        (jobs,) = runs(slack.plan(view(rank("r")), NOW)).values()
        given += jobs
        for job in jobs:
            slack.remove(job)
        if "late" in jobs:
            slack.add(candidate("late", due_s=-1, steps=1000, doomed=True))
    share = given.count("late") / len(given)
    assert DOOMED_SHARE / 2 < share < 2 * DOOMED_SHARE


def test_an_urgent_job_makes_a_long_chunk_yield(slack: Policy) -> None:
    """The running job has time, the urgent one would be late if it waited."""
    slack.add(candidate("urgent", due_s=1.5))
    decisions = slack.plan(view(busy("r", candidate("long", due_s=500), left_s=30, seq=7)), NOW)
    assert Preempt(7) in decisions
    assert runs(decisions) == {"r": ["urgent"]}


def test_nobody_yields_where_waiting_costs_nothing(slack: Policy) -> None:
    """The urgent job can wait for the end; or the running one is due before it; or it is late
    anyway; or another rank is free."""
    urgent = candidate("urgent", due_s=1.5)
    slack.add(urgent)
    soon = busy("r", candidate("long", due_s=500), left_s=0.1)
    assert not any(isinstance(d, Preempt) for d in slack.plan(view(soon), NOW))
    earlier = busy("r", candidate("long", due_s=1.2), left_s=0.5)
    assert not any(isinstance(d, Preempt) for d in slack.plan(view(earlier), NOW))
    long = busy("r", candidate("long", due_s=500), left_s=30)
    assert not any(isinstance(d, Preempt) for d in slack.plan(view(long, rank("s")), NOW))
    slack.remove("urgent")
    slack.add(candidate("lost", due_s=0.2))
    assert not any(isinstance(d, Preempt) for d in slack.plan(view(long), NOW))


def test_a_queued_task_is_recalled_for_an_urgent_one(slack: Policy) -> None:
    """What waits behind the running chunk goes back; the next plan hands out the urgent job."""
    slack.add(candidate("urgent", due_s=1.5))
    held = busy("r", candidate("long", due_s=500), left_s=30, seq=7)
    held.queued = Running(8, candidate("next", due_s=400), NOW + 31)
    decisions = slack.plan(view(held), NOW)
    assert Recall(8) in decisions
    assert not runs(decisions)


def test_the_rank_with_most_time_left_makes_way(slack: Policy) -> None:
    slack.add(candidate("urgent", due_s=1.5))
    ranks = [
        busy("r", candidate("a", due_s=100), left_s=30, seq=1),
        busy("s", candidate("b", due_s=900), left_s=30, seq=2),
    ]
    decisions = slack.plan(view(*ranks), NOW)
    assert Preempt(2) in decisions
    assert Preempt(1) not in decisions


def test_a_decision_walks_no_more_than_it_must(slack: Policy) -> None:
    """With 5,000 jobs waiting, a plan looks at a few."""
    import time

    for i in range(5_000):
        slack.add(candidate(f"j{i}", due_s=100 + i))
    slack.plan(view(rank("r")), NOW)
    begun = time.perf_counter()
    for _ in range(100):
        slack.plan(view(rank("r")), NOW)
    assert (time.perf_counter() - begun) / 100 < 0.005


# -- parts -------------------------------------------------------------------------------


def test_a_chunk_is_sized_in_time_and_takes_a_short_rest_along() -> None:
    task = candidate("j", steps=10)
    assert chunk_stop(task, 0.3) == 3
    assert chunk_stop(candidate("j", step=7, steps=10), 0.3) == 10
    assert chunk_stop(candidate("j", steps=41), 4.0) == 41  # one step more is no chunk of its own
    assert chunk_stop(candidate("j", step_s=5.0), 0.3) == 1
    assert chunk_stop(candidate("j", step_s=0.0), 0.3) == 10


def test_an_index_keeps_the_order_of_its_keys() -> None:
    index = Index()
    for i in (3, 1, 2):
        index.add(candidate(f"j{i}"), i)
    index.add(candidate("j3"), 0)  # again, with another key
    assert [c.job for c in index] == ["j3", "j1", "j2"]
    assert index.remove("nobody") is None
    index.remove("j1")
    assert len(index) == 2
    assert "j1" not in index
