"""One child process of the launcher: started, restarted with growing pauses, stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.handed import METRICS_FD, READY_FD

PR_SET_PDEATHSIG = 1
# Pauses before a restart: the first is short, since most deaths are single.
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
# One that lived this long was well: its next death counts as the first again.
WELL_S = 30.0
TAIL_BYTES = 4000

try:  # before any fork: the child must not import or look up anything
    _prctl: Any = ctypes.CDLL(None, use_errno=True).prctl
except (AttributeError, OSError):  # no Linux: children outlive a launcher killed by kill -9
    _prctl = None


@dataclass(slots=True)
class Child:
    """A role to fill and the process that fills it now.

    The kernel sends `orphan_signal` when the *thread* that called `start` ends, so one
    long-lived thread starts all children (services/pool/supervisor.py).
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    role: str = ""
    orphan_signal: int = signal.SIGKILL
    sockets: Sequence[int] = ()  # handed down to the process
    # Opens the socket on which the process tells its figures; it is kept for those that follow.
    listen: Callable[[], socket.socket] | None = None
    figures: socket.socket | None = None
    announces: bool = False  # it says itself when it is ready (common/handed.py)
    process: subprocess.Popen[bytes] | None = None
    ready: bool = False
    leaving: bool = False
    started_at: float = 0.0
    restart_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    longest_pause_s: float = LONGEST_PAUSE_S
    deaths: int = 0
    said: bool = field(default=False)
    refused: str = ""  # why it could not be started the last time
    _ear: int = -1  # where it is heard saying that it is ready; closed then
    _announced: bool = False

    @property
    def pid(self) -> int:
        """0 while there is no process."""
        return self.process.pid if self.process is not None else 0

    def start(self) -> None:
        """Raises OSError where the machine has no room for it, or there is no place for its log
        or port."""
        parent, orphaned = os.getpid(), self.orphan_signal
        environment, handed, mouth = dict(self.environment), list(self.sockets), -1

        def bind_to_parent() -> None:
            if _prctl is not None:
                _prctl(PR_SET_PDEATHSIG, orphaned, 0, 0, 0)
                if os.getppid() != parent:  # it died before the line above
                    os._exit(1)

        self._forget()
        try:
            if self.announces:
                self._ear, mouth = os.pipe()
                os.set_blocking(self._ear, False)
                environment[READY_FD] = str(mouth)
                handed.append(mouth)
            if self.figures is None and self.listen is not None:
                self.figures = self.listen()
            if self.figures is not None:
                environment[METRICS_FD] = str(self.figures.fileno())
                handed.append(self.figures.fileno())
            with open(self.log, "ab") as log:
                self.process = subprocess.Popen(
                    self.command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C goes to a whole process group; the launcher alone decides who stops
                    # when.
                    start_new_session=True,
                    pass_fds=handed,
                    preexec_fn=bind_to_parent,
                )
        finally:
            if mouth >= 0:
                os.close(mouth)
        self.started_at, self.ready, self.refused = time.monotonic(), False, ""

    def follow(self, old: Child) -> None:
        """Take what is the old one's for good: its device, and the port of its figures."""
        self.environment = old.environment
        self.figures = old.figures.dup() if old.figures is not None else None

    def close(self) -> None:
        """It is not started again."""
        self._forget()
        if self.figures is not None:
            self.figures.close()
            self.figures = None

    def announced(self) -> bool:
        """Whether this very process has said that it is ready."""
        if self._ear >= 0:
            with contextlib.suppress(BlockingIOError):  # not yet
                self._announced = bool(os.read(self._ear, 1))  # nothing: it has ended
                self._close_ear()
        return self._announced

    def _forget(self) -> None:
        self._close_ear()
        self._announced = False

    def _close_ear(self) -> None:
        if self._ear >= 0:
            os.close(self._ear)
            self._ear = -1

    def died(self) -> str:
        """How the process ended, in words, or "" while it runs or before it was started."""
        code = self.process.poll() if self.process is not None else None
        if code is None:
            return ""
        if code >= 0:
            return f"exited with {code}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def bury(self) -> None:
        """Note a death, or a start that was refused, and when to try again."""
        self._forget()
        now = time.monotonic()
        if self.ready and now - self.started_at >= WELL_S:
            self.pause_s, self.said = FIRST_PAUSE_S, False
        self.restart_at = now + self.pause_s
        self.pause_s = min(self.longest_pause_s, self.pause_s * 2)
        self.process, self.ready = None, False
        self.deaths += 1

    def ask_to_stop(self) -> None:
        self.leaving = True
        self._close_ear()
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()

    def wait(self, until: float) -> bool:
        """Wait for its end until the monotonic time `until`; kill it then. False if killed."""
        if self.process is None:
            return True
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False
        return True

    def last_words(self) -> str:
        """The end of its log."""
        try:
            with open(self.log, "rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                return log.read().decode("utf-8", "replace").strip()
        except OSError:
            return ""
