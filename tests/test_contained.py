"""A policy that raises or answers nonsense harms nobody; and a pool may change its policy."""

from __future__ import annotations

from typing import Any

import pytest

from common.stage import DECODE, DENOISE, ENCODE
from services.coordinator import events as ev
from services.policies import POLICIES
from services.policies.base import Decision, Degrade, Doomed, Preempt, Recall, Run, View
from services.policies.contained import IDLE_S
from tests.mind import Mind, Stranger


def boom(*_: Any) -> Any:
    raise ZeroDivisionError("boom")


NONSENSE: dict[str, tuple[Any, str]] = {
    "raises": (boom, "boom"),
    "nothing at all": (lambda view: None, "NoneType"),
    "not a decision": (lambda view: ["run it"], "not a decision"),
    "no such rank": (lambda view: [Run("nowhere", (("a", 3),))], "not a rank"),
    "no such job": (lambda view: [Run("denoise-1", (("ghost", 3),))], "not ready"),
    "another stage": (lambda view: [Run("decode-2", (("a", 0),))], "ready to"),
    "twice": (lambda view: [Run("encode-0", (("a", 0), ("a", 0)))], "not ready"),
    "no rows": (lambda view: [Run("encode-0", ())], "0 rows"),
    "three tasks a rank": (
        lambda view: [Run("encode-0", ((job, 0),)) for job in ("a", "b", "c")],
        "holds another",
    ),
    "shares a pass with exact jobs": (
        lambda view: [Run("encode-0", (("a", 0), ("b", 0)), step_s=0.1)],
        "cannot share a pass",
    ),
    "preempts a ghost": (lambda view: [Preempt(99)], "does not run"),
    "recalls a ghost": (lambda view: [Recall(99)], "not queued"),
    "dooms a ghost": (lambda view: [Doomed("ghost")], "does not wait"),
    "cuts who would rather be late": (lambda view: [Degrade("a", 2)], "may not be degraded"),
}


@pytest.mark.parametrize(("answer", "says"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_counted_and_fcfs_decides(answer: Any, says: str) -> None:
    """Every job is done, in order of arrival, and the failure says what was wrong."""
    mind = Mind(Stranger(answer))
    mind.join(ENCODE, DENOISE, DECODE)
    for job in ("a", "b", "c"):
        mind.push(job)
    mind.tick()
    assert says in mind.core.policy.last_failure
    ran = mind.finish_all()
    assert [step for step in ran if step.endswith("denoise:0")] == [
        "a:denoise:0", "b:denoise:0", "c:denoise:0",
    ]  # fmt: skip
    assert mind.core.policy.failures > 0


@pytest.mark.parametrize("stop", [0, -1, 11, 5.5, None])
def test_a_chunk_that_ends_nowhere_is_nonsense(stop: Any) -> None:
    def answer(view: View) -> list[Decision]:
        ready = [c for c in policy.jobs if c.stage == DENOISE]
        if ready and not view.by_stage[DENOISE][0].running:
            return [Run("denoise-1", ((ready[0].job, stop),))]
        free = [r for r in view.ranks if r.stage != DENOISE and not r.running]
        return [
            Run(rank.name, ((c.job, 0),)) for rank in free for c in policy.jobs[:1]
            if c.stage == rank.stage
        ]  # fmt: skip

    policy = Stranger(answer)
    mind = Mind(policy)
    mind.join(ENCODE, DENOISE, DECODE)
    mind.push("a")
    mind.finish_all()
    assert mind.core.policy.failures > 0


@pytest.mark.parametrize("name", ["add", "remove"])
def test_a_policy_that_lost_track_of_jobs_is_dismissed(name: str) -> None:
    """fcfs leads from then on, and says why."""
    policy = Stranger(lambda view: [])
    setattr(policy, name, boom)
    mind = Mind(policy)
    mind.join(ENCODE, DENOISE, DECODE)
    mind.push("a")
    mind.tick(IDLE_S + 1)
    mind.tick(IDLE_S + 1)
    mind.finish_all()
    assert mind.core.policy.dismissed
    assert "fcfs decides from now on" in mind.core.policy.last_failure


def test_a_policy_may_wait_but_not_for_ever() -> None:
    """It gets some seconds with every rank idle; then the jobs are run for it."""
    mind = Mind(Stranger(lambda view: []))
    mind.join(ENCODE, DENOISE, DECODE)
    mind.push("a")
    mind.tick()
    mind.tick(IDLE_S / 2)
    assert mind.last(ev.Dispatch) is None
    assert mind.core.policy.failures == 0
    mind.tick(IDLE_S)
    assert mind.last(ev.Dispatch).rows[0].job == "a"
    assert "left idle" in mind.core.policy.last_failure


def test_an_order_without_end_does_not_hang_the_standings() -> None:
    policy = Stranger(lambda view: [])
    policy.order = lambda now: iter(lambda: "a", None)  # type: ignore[method-assign]
    mind = Mind(policy)
    mind.push("a")
    assert [s.job for e in mind.tick(2.0) if isinstance(e, ev.Refresh) for s in e.standings] == [
        "a"
    ]


def test_our_own_policies_never_need_it() -> None:
    for name in POLICIES:
        mind = Mind(name)
        mind.join(ENCODE, DENOISE, DENOISE, DECODE)
        for i in range(8):
            mind.push(f"j{i}", slo_ms=1_000 * (i + 1), num_inference_steps=10)
        mind.finish_all()
        assert mind.core.policy.failures == 0, (name, mind.core.policy.last_failure)


def test_another_policy_takes_over_with_all_jobs() -> None:
    """What waits is handed to it, what runs goes on, nothing is run twice or lost."""
    mind = Mind("fcfs")
    mind.join(ENCODE, DENOISE, DECODE)
    mind.push("long", slo_ms=500_000)
    mind.push("urgent", slo_ms=5_000)
    for _ in range(3):
        for effect in mind.tick(0.1):
            if isinstance(effect, ev.Dispatch):
                mind.report(effect)
    mind.tell(ev.PolicyChosen(POLICIES["edf"]()))
    assert mind.core.policy.name == "edf"
    ran = mind.finish_all()
    assert len(ran) == len(set(ran))
    chunks = [step for step in ran if ":denoise:" in step]
    assert chunks.index("urgent:denoise:9") < chunks.index("long:denoise:9")
