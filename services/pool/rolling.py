"""A rolling restart of one host's share of a pool: one child after another gets a successor, and
leaves once that is ready, so there is never one fewer than wanted.

Asked for by the field "{host}/restart" of `sw:pool`; the launcher deletes it when all is done, or
puts "failed: …" there, with all that had not been replaced still running.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from services.pool.child import Child

log = logging.getLogger("slackwater.pool")

FAILED = "failed: "


class Rolling:
    """`succeed(old)` starts a child like `old` and returns it; `of(role)` are those that stay."""

    def __init__(
        self,
        succeed: Callable[[Child], Child],
        of: Callable[[str], Sequence[Child]],
        say: Callable[[str], None],
    ) -> None:
        self._succeed, self._of, self._say = succeed, of, say
        self._queue: deque[Child] = deque()
        self._old: Child | None = None  # being replaced
        self._new: Child | None = None  # its successor
        self._alone = False  # whether the successor was asked again since the other one left
        self._replaced: list[Child] = []  # the successors so far
        self.request = ""
        self.answer: str | None = None  # to be written in the request's place; "" deletes it

    def ask(self, request: str) -> None:
        """`request` is a token and the roles to restart; one that is under way is not new."""
        if request == self.request or request.startswith(FAILED):
            return
        self.request, self.answer = request, None
        _, *roles = request.split()
        self._queue, self._replaced = deque(c for role in roles for c in self._of(role)), []
        if not self._queue and self._old is None:
            self.answer = f"{FAILED}none of {', '.join(roles)} runs here"
            return
        self._say(f"restarting {len(self._queue)} one by one: {', '.join(roles)}")

    def surplus(self, role: str) -> int:
        """Children of `role` that there are beside the wanted number."""
        new, old = self._new, self._old
        return int(new is not None and new.role == role and old is not None and not old.leaving)

    def done(self) -> None:
        """The answer was written: the next request is a new one."""
        self.request, self.answer = "", None

    @property
    def under_way(self) -> bool:
        return bool(self.request) and self.answer is None

    def tend(self, children: Sequence[Child]) -> None:
        """Go on with it as far as can be; called several times a second."""
        if not self.under_way:
            return
        old, new = self._old, self._new
        if old is None or new is None:
            self._next(children)
        elif new.deaths:
            self._give_up(_death(old, new))
        elif new.leaving or new not in children:  # scaled down: the youngest leave first
            if old.leaving:
                self._old = self._new = None
            else:
                self._give_up(f"the successor of {old.name} was stopped: fewer are wanted now")
        elif old not in children:
            if not self._alone:  # that it was ready beside the other one counts no more
                self._alone, new.ready = True, False
            elif new.ready:
                self._replaced.append(new)
                self._old = self._new = None
        elif new.ready and not old.leaving:
            old.ask_to_stop()

    def _next(self, children: Sequence[Child]) -> None:
        died = [new for new in self._replaced if new.deaths]
        if died:  # it came up and did not get on: nothing else is to be replaced by its like
            self._give_up(f"{died[0].name} died soon after it had taken over, see {died[0].log}")
            return
        while self._queue:
            old = self._queue.popleft()
            if old in children and not old.leaving:
                self._old, self._new, self._alone = old, self._succeed(old), False
                return
        self.answer = ""
        self._say("every one of them was replaced")

    def _give_up(self, why: str) -> None:
        """What has not been replaced goes on. A successor leaves only if its predecessor stays."""
        if self._old is not None and self._new is not None and not self._old.leaving:
            self._new.ask_to_stop()
        self._queue.clear()
        self._old = self._new = None
        self.answer = FAILED + why
        self._say(f"the restart ends here: {why}")


def _death(old: Child, new: Child) -> str:
    if old.leaving:
        return f"{new.name} died when it had to take over from {old.name}, see {new.log}"
    return f"the successor of {old.name} did not become ready, see {new.log}"
