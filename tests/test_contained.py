"""A policy that raises or answers nonsense harms nobody; and a pool may change its policy."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, nan
from typing import Any

import pytest

from common.keys import Keys
from common.scripts import Ttls
from common.stage import DECODE, DENOISE, ENCODE
from services.coordinator import events as ev
from services.coordinator.service import Coordinator
from services.coordinator.watching import Watchers
from services.policies import POLICIES
from services.policies.base import Decision, Degrade, Doomed, Outlook, Preempt, Recall, Run, View
from services.policies.contained import IDLE_S
from tests.mind import Mind, Stranger


def boom(*_: Any) -> Any:
    raise ZeroDivisionError("boom")


class OnceOnly:
    """Rows that stand the check, and no other look."""

    looks = 0

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[tuple[str, int]]:
        self.looks += 1
        if self.looks > 1:
            boom()
        return iter((("a", 0),))


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
    "an encode that ends before None": (
        lambda view: [Run("encode-0", (("a", None),))],  # type: ignore[arg-type]
        "no whole number",
    ),
    "takes no number": (
        lambda view: [Run("encode-0", (("a", 0),), step_s=nan)],
        "nan is not a time",
    ),
    "takes for ever": (
        lambda view: [Run("encode-0", (("a", 0),), step_s=inf)],
        "inf is not a time",
    ),
    "is done before it begins": (
        lambda view: [Run("encode-0", (("a", 0),), step_s=-5.0)],
        "-5.0 is not a time",
    ),
    "takes a word": (
        lambda view: [Run("encode-0", (("a", 0),), step_s="x")],  # type: ignore[arg-type]
        "'x' is not a time",
    ),
    "rows that change while they are read": (
        lambda view: [Run("encode-0", OnceOnly())],  # type: ignore[arg-type]
        "could not be carried out",
    ),
    "preempts a ghost": (lambda view: [Preempt(99)], "does not run"),
    "recalls a ghost": (lambda view: [Recall(99)], "not queued"),
    "dooms one that it runs": (
        lambda view: [Run("encode-0", (("a", 0),)), Doomed("a")],
        "does not wait",
    ),
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


@pytest.mark.parametrize(
    ("stop", "says"),
    [(0, "before step 0"), (-1, "-1"), (11, "11"), (5.5, "no whole number"), (None, "None")],
)
def test_a_chunk_that_ends_nowhere_is_nonsense(stop: Any, says: str) -> None:
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
    assert says in mind.core.policy.last_failure
    stops = [row.stop for e in mind.log if isinstance(e, ev.Dispatch) for row in e.rows]
    assert all(isinstance(stop, int) for stop in stops)


def test_half_a_step_is_nothing_to_degrade_to() -> None:
    mind = Mind(Stranger(lambda view: [Degrade("a", 7.5)]))  # type: ignore[arg-type]
    mind.join(ENCODE, DENOISE, DECODE)
    mind.push("a", on_late="degrade", min_inference_steps=5)
    mind.finish_all()
    assert "may not be degraded to 7.5 steps" in mind.core.policy.last_failure
    assert mind.last(ev.Shorten) is None


@pytest.mark.parametrize("ahead_s", [inf, nan, -1.0, "long"])
def test_an_outlook_that_is_no_time_is_replaced_by_that_of_fcfs(ahead_s: Any) -> None:
    policy = Stranger(lambda view: [])
    policy.outlook = lambda candidate, view, now: Outlook(ahead_s)  # type: ignore[attr-defined]
    mind = Mind(policy)
    mind.join(ENCODE, DENOISE, DECODE)
    (submit,) = [e for e in mind.push("a") if isinstance(e, ev.Submit)]
    assert submit.eta_s - mind.now == pytest.approx(1.1)
    assert mind.core.policy.failures == 1


def test_a_policy_without_a_name_goes_by_its_class() -> None:
    class Anonymous:
        def __init__(self) -> None:
            led = POLICIES["fcfs"]()
            self.add, self.remove, self.plan, self.order = led.add, led.remove, led.plan, led.order

    mind = Mind(Anonymous())  # type: ignore[arg-type]
    mind.join(ENCODE, DENOISE, DECODE)
    mind.push("a")
    assert mind.finish_all()
    assert mind.core.policy.name == "Anonymous"


def test_calling_jobs_doomed_is_not_running_them() -> None:
    """Nor does it keep a policy from being overruled that leaves every rank idle."""
    policy = Stranger(lambda view: [Doomed(c.job) for c in policy.jobs])
    mind = Mind(policy)
    mind.join(ENCODE, DENOISE, DECODE)
    mind.push("a")
    for _ in range(6):
        mind.tick(IDLE_S / 4)
    assert mind.last(ev.Dispatch).rows[0].job == "a"
    assert "left idle" in mind.core.policy.last_failure


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


def test_who_always_wants_something_else_does_not_keep_the_coordinator_from_reading() -> None:
    """Taking tasks back and handing them over again ends some time; at once after the next look
    at the streams it may go on."""

    class Restless:
        wake_at: float | None = None

        def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
            return [ev.Void(1, ("w",), ("a",), False)] if isinstance(event, ev.Tick) else []

    core: Any = Restless()
    service = Coordinator(None, Keys("sw:"), Ttls(), lambda: Mind().core, clock=lambda: 1000.0)
    service.core, service.watchers = core, Watchers([])
    service.scripts.run = lambda calls: [[b"void", b"0"]] * len(calls)  # type: ignore[method-assign]
    service._carry_out(core.handle(ev.Tick(), 1000.0))
    assert core.wake_at == 1000.0
