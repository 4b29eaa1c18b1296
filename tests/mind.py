"""A core with a Redis that agrees to everything, for tests of what it decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from common.messages import Report, ReportRow
from common.params import PoolDefaults
from common.stage import DECODE, DENOISE, ENCODE
from services.coordinator import events as ev
from services.coordinator.admission import Admission
from services.coordinator.core import Core
from services.coordinator.state import FINISH
from services.costs.model import CostModel
from services.policies import make_policy
from services.policies.base import Candidate, Decision, Policy, View
from tests.fakes import MANIFESTS, raw_push

NOW = 1000.0


class Mind:
    """A core, with a Redis that agrees to everything unless told otherwise."""

    def __init__(self, policy: str | Policy = "slack", ahead: int = 2, **rules: Any) -> None:
        view = View(ranks=[], lead_s=0.05, chunk_s=0.3, pack_s=0.0, ahead=ahead)
        admission = Admission(PoolDefaults(), **rules)
        made = make_policy(policy) if isinstance(policy, str) else policy
        self.core = Core(made, CostModel(), admission, view)
        self.now = NOW
        self.entry = 1_000_000
        self.joined = 0
        self.log: list[ev.Effect] = []
        self.tell(ev.ManifestsRead(MANIFESTS))

    def tell(self, event: ev.Event) -> list[ev.Effect]:
        """Handle one event; the effects are carried out, and those that follow too."""
        done: list[ev.Effect] = []
        pending = self.core.handle(event, self.now)
        while pending:
            done += pending
            answers = [self.answer(effect) for effect in pending]
            pending = []
            for answer in answers:
                pending += self.core.handle(answer, self.now) if answer else []
        self.log += done
        return done

    def answer(self, effect: ev.Effect) -> ev.Event | None:
        match effect:
            case ev.Submit(spec=spec):
                return ev.Submitted(spec, "created")
            case ev.Dispatch(seq=seq):
                return ev.Dispatched(seq, "dispatched")
            case ev.Void(seq=seq, forced=forced, blame=blame):
                return ev.Voided(seq, "void", forced and blame)
            case ev.NoteCancel(job=job):
                return ev.CancelNoted(job, "canceling")
            case ev.Finish(spec=spec):
                return ev.Finished(spec.id, "finished")
        return None

    def tick(self, pass_s: float = 0.0) -> list[ev.Effect]:
        self.now += pass_s
        return self.tell(ev.Tick())

    def join(self, *stages: str) -> list[str]:
        """Workers of these stages come; their names are stage and number."""
        names = []
        for stage in stages:
            names.append(f"{stage}-{self.joined}")
            self.joined += 1
            self.tell(ev.Joined(ev.WorkerInfo(names[-1], stage, ("noop",), "here")))
        return names

    def push(self, job: str, **fields: Any) -> list[ev.Effect]:
        self.entry += 1
        fields = {"prompt": "x", "num_inference_steps": 10, "id": job, **fields}
        return self.tell(ev.Pushed(f"{self.entry}-0", raw_push(**fields)))

    def report(
        self, flight: ev.Dispatch, code: str = "", steps: int | None = None, **changes: Any
    ) -> list[ev.Effect]:
        """The worker did what it was told, or `steps` of it, or failed with `code`."""
        rows = []
        for row in flight.rows:
            stop = row.stop if steps is None else row.start + steps
            job = self.core.jobs.get(row.job)
            after = DECODE if job is None or stop >= job.steps else DENOISE
            following = {ENCODE: DENOISE, DENOISE: after, DECODE: FINISH}
            step = {ENCODE: 0, DENOISE: stop, DECODE: 10}[flight.stage]
            outputs = ({"seq": flight.seq, "n": 0, "mime": "x", "width": 1, "height": 1,
                        "bytes": 1, "sha256": ""},) if flight.stage == DECODE else ()  # fmt: skip
            rows.append(
                ReportRow(row.job, step, following[flight.stage], b"", outputs, 0.1, code, code)
            )
        report = Report(flight.seq, flight.members[0], flight.stage, tuple(rows), 0.1, **changes)
        return self.tell(ev.Reported(report, (True,) * len(rows)))

    def finish_all(self, most: int = 200) -> list[str]:
        """Work everything off; "job:stage:step" of every row that was dispatched, in order."""
        given: dict[int, ev.Dispatch] = {}
        for _ in range(most):
            given |= {e.seq: e for e in self.log if isinstance(e, ev.Dispatch)}
            for seq in list(self.core.board.flights):
                self.report(given[seq])
            if not self.core.jobs:
                return [f"{r.job}:{e.stage}:{r.start}" for e in given.values() for r in e.rows]
            self.tick(0.5)
        raise AssertionError(f"{list(self.core.jobs)} are stranded")

    def last(self, kind: type[Any]) -> Any:
        found = [effect for effect in self.log if isinstance(effect, kind)]
        return found[-1] if found else None

    def run_to_denoise(self, job: str, **fields: Any) -> None:
        """Push a job and have it encoded."""
        self.push(job, **fields)
        self.tick()
        encodes = [e for e in self.log if isinstance(e, ev.Dispatch) and e.stage == ENCODE]
        (flight,) = [e for e in encodes if e.rows[0].job == job]
        self.report(flight)


def kinds(effects: list[ev.Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects if not isinstance(effect, ev.Refresh)]


class Stranger:
    """A third party's policy that answers what a test wants it to."""

    name = "stranger"

    def __init__(self, answer: Callable[[View], Any]) -> None:
        self.answer = answer
        self.jobs: list[Candidate] = []

    def add(self, candidate: Candidate) -> None:
        self.jobs.append(candidate)

    def remove(self, job: str) -> None:
        self.jobs = [c for c in self.jobs if c.job != job]

    def plan(self, view: View, now: float) -> list[Decision]:
        return self.answer(view)  # type: ignore[no-any-return]

    def order(self, now: float) -> Iterable[str]:
        return [c.job for c in self.jobs]
