"""What every policy keeps to, over random traces, pools and overheads in the simulator."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.toy_table import Crowded, longest_stated_s
from common.stage import DECODE, DENOISE, ENCODE
from services.coordinator import events as ev
from services.coordinator.core import Core
from services.policies import POLICIES, keepset
from services.policies.keepset import KeepSet
from services.simulator.calibrations import Calibration, calibration, flat
from services.simulator.generate import generate
from services.simulator.outcome import Chunk, Outcome
from services.simulator.pool import Overheads
from services.simulator.report import summary
from services.simulator.simulation import MANIFEST, Setting, Simulation, simulate
from services.simulator.traces import TraceJob

FUZZ = float(os.environ.get("SLACKWATER_FUZZ", "0"))

FLAT = Calibration(
    "flat", "a second a step at 1,000 tokens", lambda n: n / 1000, flat(0.3), flat(0.2)
)
NEVER_AHEAD = -float("inf")
# Which models a pool's ranks have, in turn: of one stage, the first has the first of these.
PLACINGS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("a",),),
    (("a", "b"), ("a",), ("b",)),
    (("a",), ("b",)),
    (("a", "b"), ("b", "c"), ("c", "a")),
)


def watch_for_dithering(core: Core) -> None:
    """No job may be given to ranks again and again at one moment, without a step in between."""
    given: Counter[tuple[str, str, int, float]] = Counter()
    inner = core.handle

    def handle(event: ev.Event, now: float) -> list[ev.Effect]:
        effects = inner(event, now)
        for effect in effects:
            if isinstance(effect, ev.Dispatch):
                given.update((row.job, effect.stage, row.start, now) for row in effect.rows)
                assert max(given.values()) <= 3
        return effects

    core.handle = handle  # type: ignore[method-assign]


class Watched(Simulation):
    """A pool of several models, a job's own told by its name. After every moment nobody idles
    beside work that it could do, the policy has not failed, and it has not changed its mind about
    a job that made no step."""

    def __init__(self, trace: list[TraceJob], setting: Setting, placing: int, patience_s: float):
        super().__init__(trace, setting)
        watch_for_dithering(self.core)
        self.core.view.patience_s = patience_s
        placed = itertools.cycle(PLACINGS[placing])
        self.models = sorted({model for models in PLACINGS[placing] for model in models})
        self.core.handle(ev.ManifestsRead(dict.fromkeys(self.models, MANIFEST)), 0.0)
        for name, stage in [(w.name, w.stage) for w in self.workers.all.values()]:
            # One of each stage has all, so that every job can end.
            models = tuple(self.models) if name.endswith("-0") else next(placed)
            self.core.handle(ev.Left(name, False), 0.0)
            self.core.handle(ev.Joined(ev.WorkerInfo(name, stage, models, "simulated")), 0.0)
        inner = self.core.handle

        def handle(event: ev.Event, now: float) -> list[ev.Effect]:
            if isinstance(event, ev.Submitted):
                model = self.models[int(event.spec.id[1:]) % len(self.models)]
                event = replace(event, spec=replace(event.spec, model=model))
            return inner(event, now)

        self.core.handle = handle  # type: ignore[method-assign]

    def _carry_out(self, effects: list[ev.Effect], now: float) -> None:
        super()._carry_out(effects, now)
        assert not self.core.policy.failures, self.core.policy.last_failure
        if self._heard:  # a report is on its way
            return
        waiting: set[tuple[str, str]] = set()
        for job in self.core.jobs.values():
            if not (job.seq or job.ending):
                waiting.add((job.stage, job.spec.model))
        ranks = self.core.board.ranks
        idle: set[tuple[str, str]] = set()
        for worker in self.workers.all.values():
            if worker.running is None:
                idle |= {(worker.stage, model) for model in ranks[worker.name].models}
        for stage, model in waiting & idle:
            assert stage == ENCODE, f"a rank that could {stage} idles beside ready work"
            assert (DENOISE, model) not in idle, "nobody encodes for an idle denoiser"


@st.composite
def traces(draw: st.DrawFn) -> list[TraceJob]:
    jobs = []
    now = 0.0
    for number in range(draw(st.integers(1, 12))):
        now += draw(st.sampled_from([0.0, 0.0, 0.7, 3.0, 20.0]))
        steps = draw(st.integers(1, 9))
        tokens = draw(st.sampled_from([50, 200, 1000, 2500]))
        alone = FLAT.standalone_s(tokens, steps)
        due = now + alone * draw(st.sampled_from([0.5, 1.0, 1.5, 3.0, 10.0]))
        jobs.append(
            TraceJob(
                f"j{number:02}", "any", now, due, alone, tokens, steps,
                priority=draw(st.sampled_from([0, 0, 0, 3, -5])),
                on_late=draw(st.sampled_from(["run", "run", "drop"])),
            )
        )  # fmt: skip
    return jobs


@st.composite
def pools(draw: st.DrawFn) -> Setting:
    return Setting(
        policy=draw(st.sampled_from(sorted(POLICIES))),
        costs=FLAT,
        denoise=draw(st.integers(1, 3)),
        encode=draw(st.integers(1, 2)),
        overheads=Overheads(
            dispatch_s=draw(st.sampled_from([0.0, 0.01])),
            switch_s=draw(st.sampled_from([0.0, 0.2])),
            report_s=draw(st.sampled_from([0.0, 0.02])),
            jitter=draw(st.sampled_from([0.0, 0.1])),
        ),
        lead_s=draw(st.sampled_from([NEVER_AHEAD, 0.0, 0.5])),
        chunk_s=draw(st.sampled_from([0.6, 3.0, 60.0])),
        pack_s=draw(st.sampled_from([0.0, 0.5])),
        error=draw(st.sampled_from([0.0, 0.05])),
        timeline=True,
    )


def check(outcome: Outcome) -> None:
    by_rank: dict[str, list[Chunk]] = {}
    by_job: dict[str, list[Chunk]] = {}
    for chunk in outcome.chunks:
        by_rank.setdefault(chunk.rank, []).append(chunk)
        by_job.setdefault(chunk.job, []).append(chunk)
    for chunks in by_rank.values():
        chunks.sort(key=lambda c: (c.start_s, c.end_s))
        for first, second in itertools.pairwise(chunks):
            assert first.end_s <= second.start_s + 1e-6 or first.end_s == second.end_s
    for name, record in outcome.jobs.items():
        assert record.status in ("succeeded", "expired"), name
        assert record.status == "succeeded" or record.job.on_late == "drop"
        step = 0
        steps = [c for c in by_job.get(name, []) if c.stage == DENOISE]
        for chunk in sorted(steps, key=lambda c: c.start_s):
            assert chunk.start == step, f"{name}: step {chunk.start} follows {step}"
            step = chunk.stop
        if record.succeeded:
            assert step == record.steps_run == record.job.steps
            stages = [c.stage for c in by_job[name]]
            assert stages.count(ENCODE) == stages.count(DECODE) == 1


@settings(
    max_examples=200,
    deadline=None,
    derandomize=not FUZZ,  # the same examples each time, unless SLACKWATER_FUZZ is set
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    traces(), pools(), st.integers(0, len(PLACINGS) - 1), st.sampled_from([0.0, 2.0, 30.0, 2400.0])
)
def test_no_step_is_run_twice_or_skipped_and_nobody_idles_beside_work(
    trace: list[TraceJob], pool: Setting, placing: int, patience_s: float
) -> None:
    """With one model or several, and turns of those who are out often or never: never a task on
    a rank that has one queued (the simulated worker would refuse it), every job ends, its steps
    follow each other, and the same events lead to the same decisions."""
    outcome = Watched(trace, pool, placing, patience_s).run()
    check(outcome)
    again = Watched(trace, pool, placing, patience_s).run()
    assert again.chunks == outcome.chunks
    assert {n: j.finished_s for n, j in again.jobs.items()} == {
        n: j.finished_s for n, j in outcome.jobs.items()
    }


@pytest.mark.parametrize("seed", [14, 40])
def test_slack_gives_no_job_again_and_again_without_a_step(seed: int) -> None:
    """Overloaded, with jobs that are dropped and cut, and with shared passes."""
    toy, rng = calibration("toy"), random.Random(seed)
    scale = rng.choice([1.5, 3, 5])
    trace = generate(70, 1.4, toy, arrivals="bursty", ranks=2, seed=seed, slo_scale=scale)
    for at, job in enumerate(trace):
        on_late = rng.choice(["run", "drop", "degrade"])
        fewest = rng.randrange(1, job.steps) if on_late == "degrade" else 0
        trace[at] = replace(job, on_late=on_late, min_steps=fewest)
    setting = Setting(costs=toy, denoise=2, lead_s=0.02, pack_s=0.005, batch=True, seed=seed)
    simulation = Simulation(trace, setting)
    watch_for_dithering(simulation.core)
    outcome = simulation.run()
    assert all(job.status in ("succeeded", "expired") for job in outcome.jobs.values())


@pytest.mark.parametrize("seed", range(8))
def test_the_keep_set_is_what_a_plain_walk_would_find(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks and tree agree with a sorted list, through splits and emptied blocks."""
    monkeypatch.setattr(keepset, "MOST", 6)
    rng = random.Random(seed)
    kept, plain = KeepSet(), {}

    def spare(entries: list[tuple[float, str, float, float, float]]) -> float:
        total, least = 0.0, float("inf")
        for _, _, limit, load, _ in entries:
            total += load
            least = min(least, limit - total)
        return least

    for _ in range(250):
        grow = rng.random()
        job = f"j{rng.randrange(120)}"
        if grow < 0.65:
            entry = (rng.uniform(0, 100), rng.uniform(0, 150), rng.uniform(0, 3), rng.random())
            kept.put(job, *entry)
            plain[job] = entry
        else:
            kept.discard(job)
            plain.pop(job, None)
        order = sorted((due, j, lim, load, size) for j, (due, lim, load, size) in plain.items())
        assert kept.spare_s == pytest.approx(spare(order))
        clock = rng.uniform(-80, 60)
        new = (rng.uniform(0, 100), "new", rng.uniform(0, 150), rng.uniform(0, 3), 0.0)
        if spare(order) >= clock:
            fits = spare(sorted([*order, new])) >= clock
            assert kept.fits("new", new[0], new[2], new[3], clock) == fits
        elif rng.random() < 0.4:
            total = 0.0
            for at, (_, name, limit, load, _) in enumerate(order):  # noqa: B007
                total += load
                if limit - total < clock:
                    break
            evicted = kept.evict(clock)
            assert evicted is not None
            if limit - load < clock:
                assert evicted == name
            else:
                assert plain[evicted][3] == max(size for *_, size in order[: at + 1])
            del plain[evicted]
    assert len(kept) == len(plain)


def test_a_set_that_is_over_full_by_a_rounding_loses_one_of_its_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keepset, "MOST", 4)
    rng, base = random.Random(1), 1.79e9  # seconds since the epoch: a quarter of a µs is rounded
    for _ in range(300):
        kept, count = KeepSet(), rng.randrange(3, 80)
        for i in range(count):
            limit = base + 100 + rng.random() * 1000
            kept.put(f"j{i}", base + rng.random() * 100, limit, rng.random() * 10, rng.random())
        for _ in range(rng.randrange(count - 1)):
            kept.discard(f"j{rng.randrange(count)}")
        left = len(kept)
        assert kept.evict(math.nextafter(kept.spare_s, math.inf)) is not None
        assert len(kept) == left - 1


@pytest.mark.parametrize("ranks", [1, 4])
def test_nobody_goes_without_a_step_for_longer_than_is_stated(ranks: int) -> None:
    """At 1.4 times what the ranks can do, with a minute's patience: those who are out are more
    and more, and yet each gets a step in time. Without turns some would wait to the end."""
    toy = calibration("toy")
    trace = generate(300 * ranks, 1.4, toy, ranks=ranks, seed=3)
    longest = {}
    for patience_s in (60.0, 1e9):
        setting = Setting(
            "slack", costs=toy, denoise=ranks, switch_s=0.015,
            overheads=Overheads(switch_s=0.015, jitter=0.0), error=0.0,
        )  # fmt: skip
        simulation = Crowded(trace, setting)
        simulation.core.view.patience_s = patience_s
        outcome = simulation.run()
        longest[patience_s] = max(job.longest_wait_s for job in outcome.jobs.values())
        if patience_s == 60.0:
            view, active = simulation.core.view, simulation.most_active
            stated_s = longest_stated_s(trace, active, ranks, view, toy)
    assert longest[60.0] <= stated_s < longest[1e9]


@pytest.mark.parametrize("load", [0.9, 1.4])
def test_slack_is_the_best_of_them_on_the_table_of_the_design(load: float) -> None:
    """One seed of the one-server table, shortened."""
    toy = calibration("toy")
    trace = generate(400, load, toy, seed=5)
    shares, switches = {}, {}
    for policy in ("fcfs", "edf", "srtf", "slack"):
        setting = Setting(
            policy, costs=toy, overheads=Overheads(switch_s=0.015, jitter=0.0), error=0.0
        )
        figures = summary(simulate(trace, setting).jobs.values(), 1.0)
        shares[policy], switches[policy] = figures["on_time"], figures["switches_per_job"]
    assert max(shares, key=lambda name: shares[name]) == "slack"
    assert shares["slack"] > shares["srtf"] + 0.02
    assert shares["slack"] > shares["fcfs"] + 0.4
    assert switches["slack"] <= 2.0
