"""What `slack` promises: who is kept, who goes first, who makes way, and that nobody starves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.stage import DECODE, DENOISE, ENCODE
from services.coordinator import events as ev
from services.policies import make_policy
from services.policies.base import (
    Candidate,
    Degrade,
    Doomed,
    Foresees,
    Policy,
    Preempt,
    Rank,
    Recall,
    Run,
    Running,
    View,
)
from services.policies.keeping import is_late
from services.policies.turns import SHARE, longest_wait_s
from services.simulator.calibrations import calibration
from services.simulator.pool import Overheads
from services.simulator.simulation import Setting, simulate
from services.simulator.traces import TraceJob
from tests.candidates import NOW, busy, candidate, rank, runs, view
from tests.mind import Mind


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
    """Jobs that are out get a step within the time that is stated, though others that can make
    it always wait; and no more than their share of the rank."""
    pool = view(rank("r"), chunk_s=0.1, switch_s=0.0, patience_s=20.0)
    late = [f"late{i}" for i in range(3)]
    for job in late:
        slack.add(candidate(job, due_s=-1, steps=1000))
    now, last, longest, turns = NOW, dict.fromkeys(late, NOW), 0.0, 0
    for i in range(3000):
        slack.add(candidate(f"j{i}", due_s=1e6, steps=1))
        (job,) = runs(slack.plan(pool, now))["r"]
        slack.remove(job)
        if job in late:
            longest = max(longest, now - last[job])
            turns += 1
        now += 0.1
        if job in late:
            last[job] = now
            slack.add(candidate(job, due_s=-1, steps=1000, doomed=True))
    assert turns > 30
    assert longest <= longest_wait_s(out=3, ranks=1, step_s=0.1, view=pool)
    assert turns / 3000 <= SHARE


def test_nobody_has_a_turn_before_it_has_waited_long(slack: Policy) -> None:
    """Those who can make it come first until then; a rank without such a job is not so patient."""
    pool = view(rank("r"), patience_s=20.0)
    slack.add(candidate("short", due_s=-1, remaining_s=0.5))
    slack.add(candidate("long", due_s=-1, remaining_s=50.0, steps=500))
    assert runs(slack.plan(pool, NOW)) == {"r": ["short"]}
    slack.remove("short")
    slack.add(candidate("other", due_s=-1, remaining_s=0.5))
    slack.add(candidate("kept", due_s=1e6))
    assert runs(slack.plan(pool, NOW + 19)) == {"r": ["kept"]}
    slack.remove("kept")
    (turn,) = [d for d in slack.plan(pool, NOW + 19) if isinstance(d, Run)]
    assert turn.rows == (("long", 1),)  # a step, not a chunk
    assert runs(slack.plan(pool, NOW + 9)) == {"r": ["other"]}


def test_a_turn_is_not_taken_back(slack: Policy) -> None:
    """It was waited for long enough and takes one step."""
    pool = view(rank("r"), patience_s=20.0)
    slack.add(candidate("late", due_s=-1))
    slack.plan(pool, NOW)
    assert runs(slack.plan(pool, NOW + 10)) == {"r": ["late"]}
    slack.remove("late")
    held = busy("r", candidate("long", due_s=500), left_s=30, seq=7)
    held.queued = Running(8, candidate("late", due_s=-1, doomed=True), NOW + 31, stop=1)
    slack.add(candidate("urgent", due_s=1.5))
    assert not any(isinstance(d, Recall) for d in slack.plan(view(held), NOW))


def begun(slack: Policy, job: Candidate) -> None:
    """`job` runs a chunk on rank r and is back."""
    slack.add(job)
    assert runs(slack.plan(view(rank("r")), NOW)) == {"r": [job.job]}
    slack.remove(job.job)
    slack.add(replace(job, step=3))


@pytest.mark.parametrize(
    ("new_due_s", "elsewhere_due_s", "goes_on"),
    [
        (20.0, 99.0, "a"),  # who comes takes the place of the one that is due last
        (20.0, 25.0, "new"),  # which is this one
        (1.8, 99.0, "new"),  # it cannot wait for the other's chunk to end
    ],
)
def test_a_job_stays_where_it_is_while_one_due_later_runs_elsewhere(
    slack: Policy, new_due_s: float, elsewhere_due_s: float, goes_on: str
) -> None:
    begun(slack, candidate("a", due_s=30))
    slack.add(candidate("new", due_s=new_due_s))
    other = busy("s", candidate("b", due_s=elsewhere_due_s), left_s=0.5)
    assert runs(slack.plan(view(rank("r"), other), NOW)) == {"r": [goes_on]}


def test_a_job_goes_on_where_it_ran_if_another_rank_is_free(slack: Policy) -> None:
    begun(slack, candidate("a", due_s=30))
    slack.add(candidate("new", due_s=20))
    assert runs(slack.plan(view(rank("s"), rank("r")), NOW)) == {"r": ["a"], "s": ["new"]}


def test_ranks_of_another_model_make_no_room(slack: Policy) -> None:
    """Two jobs that one rank can do in time are kept; of three the largest is out, however many
    ranks there are for another model; and a rank that runs both makes room for it."""
    jobs = [
        candidate("a", due_s=2.5),
        candidate("b", due_s=2.5),
        candidate("c", due_s=2.5, remaining_s=1.2, steps=12),
    ]
    others = [Rank(f"other{i}", DENOISE, ("other",)) for i in range(9)]
    idle = busy("r", candidate("x", due_s=0.1), left_s=0.0)
    for ranks, last in ((others, "c"), ([*others, Rank("s", DENOISE, ("other", "m"))], None)):
        policy = make_policy("slack")
        for job in jobs:
            policy.add(job)
        policy.add(candidate("loose", due_s=99.0))
        for busy_one in ranks:
            busy_one.running = Running(5, candidate("y", due_s=50), NOW + 9)
        policy.plan(view(idle, *ranks, lead_s=-1.0), NOW)
        order = list(policy.order(NOW))
        assert (order[-1] == "c") == (last == "c"), order


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


def test_an_urgent_job_makes_way_though_one_of_another_model_waits_before_it(
    slack: Policy,
) -> None:
    held = Rank("s", DENOISE, ("other",))
    held.running = Running(3, candidate("o", due_s=0.9, model="other"), NOW + 0.1)
    slack.add(candidate("first", due_s=1.45, model="other"))
    slack.add(candidate("urgent", due_s=1.5))
    long = busy("r", candidate("long", due_s=500), left_s=30, seq=7)
    assert Preempt(7) in slack.plan(view(held, long), NOW)


def test_the_rank_with_most_time_left_makes_way(slack: Policy) -> None:
    slack.add(candidate("urgent", due_s=1.5))
    ranks = [
        busy("r", candidate("a", due_s=100), left_s=30, seq=1),
        busy("s", candidate("b", due_s=900), left_s=30, seq=2),
    ]
    decisions = slack.plan(view(*ranks), NOW)
    assert Preempt(2) in decisions
    assert Preempt(1) not in decisions


def test_a_rank_that_got_a_task_is_not_given_another_in_the_same_plan(slack: Policy) -> None:
    """It makes way already, and is handed the first job ahead of time; the next cannot wait."""
    held = busy("r", candidate("long", due_s=500), left_s=0.2)
    assert held.running is not None
    held.running.yielding = True
    for job, due_s in (("first", 0.45), ("next", 0.5)):
        slack.add(candidate(job, due_s=due_s, steps=1, remaining_s=0.1))
    (run,) = [d for d in slack.plan(view(held, lead_s=0.3), NOW) if isinstance(d, Run)]
    assert run.rows == (("first", 1),)


@pytest.mark.parametrize("lead_s", [0.02, -float("inf")])
@pytest.mark.parametrize("slack_s", [0.05, 0.1, 0.3])
def test_slack_keeps_two_jobs_that_edf_keeps(lead_s: float, slack_s: float) -> None:
    """The first has less slack than a step takes; the other, due later, comes while it runs, and
    must wait for its end. A job is not late since it runs."""
    costs = calibration("toy")
    step_s = costs.seconds(DENOISE, 1024)
    alone_s = 20 * step_s
    for at in range(2, 40, 4):
        arrival_s = at * step_s / 2 + 0.01
        due_s = alone_s + max(arrival_s, alone_s)
        first = TraceJob("A", "A", 0.0, alone_s + slack_s, alone_s, 1024, 20)
        then = TraceJob("B", "B", arrival_s, due_s + 0.6, alone_s, 1024, 20)
        overheads = Overheads(switch_s=0.005, jitter=0.0)
        for policy in ("edf", "slack"):
            setting = Setting(policy, costs=costs, lead_s=lead_s, overheads=overheads)
            late = [
                j.job.id for j in simulate([first, then], setting).jobs.values() if not j.on_time
            ]
            assert not late, (policy, at)


@pytest.mark.parametrize("first", ["monolithic", "fcfs", "slack"])
def test_a_policy_that_takes_over_counts_what_is_under_way(first: str) -> None:
    """10 s that run and are due in 14 s leave no room for 8 s that are due in 13 s."""
    mind = Mind(first)
    mind.join(ENCODE, DENOISE, DECODE)
    mind.run_to_denoise("long", num_inference_steps=100, slo_ms=14_000)
    mind.tick()
    if first != "slack":
        mind.tell(ev.PolicyChosen(make_policy("slack")))
    (submit,) = mind.push("new", num_inference_steps=80, slo_ms=13_000)
    assert isinstance(submit, ev.Submit)
    assert submit.best_effort


def test_a_job_that_was_cut_counts_while_it_runs(slack: Policy) -> None:
    """It has 1 s to run, due in 1.05 s: a second job of 1 s does not fit beside it."""
    assert isinstance(slack, Foresees)
    slack.add(candidate("cut", due_s=1.05, steps=20, remaining_s=2.0, fewest=5))
    cut, run = slack.plan(view(rank("r")), NOW)
    assert isinstance(cut, Degrade)
    assert isinstance(run, Run)
    shorter = candidate("cut", due_s=1.05, steps=cut.steps, remaining_s=cut.steps * 0.1)
    slack.remove("cut")
    slack.add(shorter)
    slack.remove("cut")  # it is handed over
    pool = view(busy("r", shorter, left_s=0.3))
    slack.add(candidate("loose", due_s=50))
    slack.plan(pool, NOW)
    assert not slack.outlook(candidate("new", due_s=1.5), pool, NOW).fits  # type: ignore[attr-defined]


def test_a_job_that_is_kept_now_and_then_gets_its_turn(slack: Policy) -> None:
    """It has had no step since it was out first, and is overdue since."""
    pool = view(rank("r"), patience_s=100.0)
    slack.add(candidate("long", due_s=1800, steps=10_000, remaining_s=1000))
    hog = candidate("hog", due_s=1500, steps=9000, remaining_s=900)

    def given(now: float) -> str:
        (job,) = runs(slack.plan(pool, now))["r"]
        return job

    slack.add(hog)
    assert given(NOW) == "hog"
    slack.remove("hog")  # and ends
    assert given(NOW + 60) == "long"  # which is kept again, but nobody takes it
    slack.add(hog)
    found = []
    for chunk in range(20):
        found.append(given(NOW + 120 + 0.3 * chunk))
        slack.remove("hog")
        slack.add(hog)
    assert "long" in found


def test_company_makes_nobody_late_who_waits_outside(slack: Policy) -> None:
    """A step of the first and one of the exact job are both in time; a second companion that is
    due much later would make that first step too long."""
    step = {"steps": 10, "step": 9, "step_s": 0.5, "remaining_s": 0.5}
    slack.add(candidate("first", due_s=1.4, batch="k", tokens=16, **step))
    slack.add(candidate("exact", due_s=1.45, **step))
    for i in range(3):
        job = candidate(f"c{i}", batch="k", tokens=16, step_s=0.5, remaining_s=5.0)
        slack.add(job)
    pool = view(
        rank("r"), chunk_s=0.6, shared_s=lambda shared: (0.5 + 0.3 * (shared.rows - 1), True)
    )
    assert runs(slack.plan(pool, NOW)) == {"r": ["first", "c0"]}
    slack.remove("exact")
    assert runs(slack.plan(pool, NOW)) == {"r": ["first", "c0", "c1"]}


def test_a_decision_walks_no_more_than_it_must(
    slack: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 5,000 jobs waiting, a plan looks at a few."""
    looked_at: list[str] = []

    def counted(job: Candidate, now: float, view: View) -> bool:
        looked_at.append(job.job)
        return is_late(job, now, view)

    monkeypatch.setattr("services.policies.slack.is_late", counted)
    for i in range(5_000):
        slack.add(candidate(f"j{i:04}", due_s=100 + i))
        slack.add(candidate(f"other{i:04}", due_s=1 + i, model="other"))
    slack.plan(view(rank("r")), NOW)
    looked_at.clear()
    assert runs(slack.plan(view(rank("r")), NOW)) == {"r": ["j0000"]}
    assert len(looked_at) < 10


def test_slack_says_what_a_job_would_find(slack: Policy) -> None:
    """It fits beside those that are kept or it does not; those that are due before it go first,
    or, if it does not fit, all that are kept."""
    assert isinstance(slack, Foresees)
    pool = view(busy("r", candidate("x", due_s=1.5), left_s=0.3))  # all of x: 1 s
    for name, due_s in (("a", 2.0), ("b", 50.0), ("late", -1.0)):
        slack.add(candidate(name, due_s=due_s))
    slack.plan(pool, NOW)

    def found(**changes: Any) -> tuple[float, bool | None]:
        outlook = slack.outlook(candidate("new", ENCODE, **changes), pool, NOW)  # type: ignore[attr-defined]
        return round(outlook.ahead_s, 6), outlook.fits

    assert found(due_s=40.0) == (2.0, True)
    assert found(due_s=60.0) == (3.0, True)
    assert found(due_s=1.9) == (3.0, False)  # a would be late
    assert found(due_s=0.5, remaining_s=9.0) == (4.0, False)
