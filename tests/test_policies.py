"""What each policy promises: an order, whom it interrupts, and how far it works ahead."""

from __future__ import annotations

import itertools

import pytest

from common.stage import DECODE, DENOISE, ENCODE
from services.policies import POLICIES, make_policy
from services.policies.base import (
    MOST_ROWS,
    Rank,
    Running,
    chunk_stop,
)
from services.policies.groups import Groups
from services.policies.index import AgedLanes, Index
from tests.candidates import NOW, busy, candidate, rank, runs, view

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
def test_a_busy_model_keeps_no_other_from_encoding(name: str) -> None:
    """What waits for one model's denoiser is no work for another's."""
    policy = make_policy(name)
    for i in range(100):
        policy.add(candidate(f"a{i:02}", DENOISE, due_s=50 + i, model="a"))
        policy.add(candidate(f"x{i:02}", ENCODE, due_s=200 + i, model="a"))
    policy.add(candidate("b", ENCODE, due_s=500.0, arrival_s=NOW + 1, model="b"))
    ranks = [Rank(f"{stage} {m}", stage, (m,)) for stage in (ENCODE, DENOISE) for m in ("a", "b")]
    ranks[2].running = Running(1, candidate("running", model="a"), NOW + 1e6)
    assert runs(policy.plan(view(*ranks), NOW)) == {"encode b": ["b"]}


@pytest.mark.parametrize("name", ["fcfs", "edf", "sjf", "edf-doomed-last"])
@pytest.mark.parametrize("due_s", [500.0, -500.0])
def test_an_encoder_of_two_models_encodes_for_the_one_that_waits(name: str, due_s: float) -> None:
    policy = make_policy(name)
    for i in range(100):
        policy.add(candidate(f"a{i:02}", DENOISE, due_s=due_s - 200 + i, model="a"))
        policy.add(candidate(f"x{i:02}", ENCODE, due_s=due_s - 100 + i, model="a"))
    policy.add(candidate("b", ENCODE, due_s=due_s, arrival_s=NOW + 1, model="b"))
    denoiser = Rank("d", DENOISE, ("a", "b"), running=Running(1, candidate("r", model="a"), 1e9))
    assert runs(policy.plan(view(Rank("e", ENCODE, ("a", "b")), denoiser), NOW)) == {"e": ["b"]}


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


def test_lanes_show_a_rank_only_what_it_can_run() -> None:
    """Merged by key over its models; and who has been there longest, over those."""
    lanes = AgedLanes()
    for at, (job, model) in enumerate([("z", "m"), ("y", "n"), ("x", "m"), ("w", "o")]):
        lanes.enter(candidate(job, model=model), ord(job), since=at)
    assert [c.job for c in lanes.of(("m",))] == ["x", "z"]
    assert [c.job for c in lanes.of(("n", "m", "none"))] == ["x", "y", "z"]
    assert [c.job for c in lanes.longest(("m", "n"), until=1)] == ["z", "y"]
    lanes.remove("z")
    assert [c.job for c in lanes.longest(("m", "n"), until=9)] == ["y", "x"]
    assert [c.job for c in lanes.heads(but={"x"})] == ["w", "y"]
    assert len(lanes) == 3


def test_a_job_counts_on_its_models_ranks_and_on_those_around_them() -> None:
    """Models that share ranks share their time; those that overlap in part are joined."""

    def sizes(*placed: tuple[str, ...]) -> dict[str, list[int]]:
        groups = Groups()
        groups.arrange([Rank(f"r{i}", DENOISE, models) for i, models in enumerate(placed)])
        return {model: [group.size for group in groups.of(model)] for model in ("a", "b", "none")}

    assert sizes(("a",), ("b",), ("b",)) == {"a": [1], "b": [2], "none": [1]}
    assert sizes(("a", "b"), ("b",)) == {"a": [1, 2], "b": [2], "none": [1]}
    assert sizes(("a",), ("a", "b"), ("b",)) == {"a": [2, 3], "b": [2, 3], "none": [1]}
