"""Who is there and what runs where: workers, their ranks, and the tasks in flight.

The policy sees the ranks through `view`; this keeps that picture true.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.coordinator.events import WorkerInfo
from services.coordinator.state import Flight
from services.policies.base import Rank, Running, View


class Board:
    def __init__(self, view: View) -> None:
        self.view = view
        self.workers: dict[str, WorkerInfo] = {}
        self.ranks: dict[str, Rank] = {}  # workers that may be given tasks
        self.flights: dict[int, Flight] = {}

    # -- workers -------------------------------------------------------------------------

    def join(self, worker: WorkerInfo) -> None:
        """A worker came, or came back, or drains."""
        self.workers[worker.name] = worker
        if worker.draining or worker.hung:
            self.ranks.pop(worker.name, None)
        elif worker.name not in self.ranks and worker.stage:
            rank = Rank(worker.name, worker.stage, worker.models, most_units=worker.most_units)
            self.ranks[worker.name] = rank
            for flight in self.flights.values():  # it may have been away only for us
                if worker.name in flight.silent:
                    self.show(flight, worker.name)
        self.arrange()

    def beat(self, workers: Iterable[WorkerInfo]) -> None:
        """What their heartbeats say of their memory."""
        for worker in workers:
            rank = self.ranks.get(worker.name)
            if rank is not None:
                rank.most_units = worker.most_units

    def leave(self, name: str) -> list[Flight]:
        """A worker went: what was in flight there."""
        self.workers.pop(name, None)
        self.retire(name)
        return self.flights_of(name)

    def flights_of(self, name: str) -> list[Flight]:
        return [flight for flight in self.flights.values() if name in flight.members]

    def retire(self, name: str) -> None:
        """Give it no more tasks."""
        if self.ranks.pop(name, None) is not None:
            self.arrange()

    def arrange(self) -> None:
        """Bring the policy's view up to date with the ranks."""
        self.view.ranks = list(self.ranks.values())
        by_stage: dict[str, list[Rank]] = {}
        for rank in self.view.ranks:
            by_stage.setdefault(rank.stage, []).append(rank)
        self.view.by_stage = by_stage

    # -- flights -------------------------------------------------------------------------

    def launch(self, flight: Flight) -> None:
        self.flights[flight.seq] = flight
        self.show(flight)

    def show(self, flight: Flight, *members: str) -> None:
        """Put a flight where the policy sees it: running if its rank is idle, else queued."""
        for member in members or flight.members:
            rank = self.ranks.get(member)
            if rank is None:
                continue
            shown = Running(
                flight.seq, flight.candidate, flight.ends_s, flight.yielding, flight.stop,
                flight.jobs[1:], flight.goes_on, flight.company_s, flight.begins_s, flight.step_s,
            )  # fmt: skip
            if rank.running is None or rank.running.seq == flight.seq:
                rank.running = shown
            else:
                rank.queued = shown

    def ask_yield(self, flight: Flight, now: float) -> None:
        """It will end at its next step."""
        flight.yielding = True
        flight.ends_s = min(flight.ends_s, now + (flight.step_s or flight.candidate.step_s))
        self.show(flight)

    def land(self, flight: Flight, now: float, member: str | None = None) -> None:
        """A flight has left a rank (every one of its members if none is named)."""
        if member is None:
            flight.silent.clear()
        for name in flight.members if member is None else (member,):
            flight.silent.discard(name)
            rank = self.ranks.get(name)
            if rank is None:
                continue
            if rank.queued and rank.queued.seq == flight.seq:
                rank.queued = None
            if rank.running and rank.running.seq == flight.seq:
                rank.running, rank.queued = rank.queued, None
                if rank.running:
                    follower = self.flights[rank.running.seq]
                    follower.begins_s = now
                    follower.ends_s = now + follower.expected_s
                    rank.running.begins_s, rank.running.ends_s = now, follower.ends_s
        if not flight.silent:
            self.flights.pop(flight.seq, None)

    def next_free(self, now: float) -> float | None:
        """When a decision could next differ: a rank is about to be free."""
        lead_s = self.view.lead_s
        soonest = None
        for rank in self.view.ranks:
            running = rank.running
            if running is None or rank.queued is not None:
                continue
            at = running.ends_s - lead_s
            if at > now and (soonest is None or at < soonest):
                soonest = at
        return soonest
