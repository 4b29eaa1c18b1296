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
        self.request = ""
        self.answer: str | None = None  # to be written in the request's place; "" deletes it

    def ask(self, request: str) -> None:
        """`request` is a token and the roles to restart; one that is under way is not new."""
        if request == self.request or request.startswith(FAILED):
            return
        self.request, self.answer = request, None
        _, *roles = request.split()
        self._queue = deque(child for role in roles for child in self._of(role))
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
        if self._old is None:
            self._next(children)
            return
        assert self._new is not None
        if self._old not in children:  # it has left
            self._old = self._new = None
        elif self._new.deaths:
            self._give_up()
        elif self._new.ready and not self._old.leaving:
            self._old.ask_to_stop()

    def _next(self, children: Sequence[Child]) -> None:
        while self._queue:
            old = self._queue.popleft()
            if old in children and not old.leaving:
                self._old, self._new = old, self._succeed(old)
                return
        self.answer = ""
        self._say("every one of them was replaced")

    def _give_up(self) -> None:
        assert self._old is not None
        assert self._new is not None
        why = f"the successor of {self._old.name} did not become ready, see {self._new.log}"
        self._new.ask_to_stop()
        self._queue.clear()
        self._old = self._new = None
        self.answer = FAILED + why
        self._say(f"the restart ends here: {why}")
