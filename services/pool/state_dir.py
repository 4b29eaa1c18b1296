"""The directory in which `slackwater up` keeps what outlives it: Redis' data, logs, an address."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from common.redis_url import shown


class StateDirTaken(RuntimeError):
    """Another launcher uses this directory; the message says which."""


def default_state_dir() -> Path:
    """$SLACKWATER_STATE_DIR, else slackwater/ in the user's state directory (XDG)."""
    given = os.environ.get("SLACKWATER_STATE_DIR")
    if given:
        return Path(given)
    root = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(root) / "slackwater"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a running pool is, as written for the other commands on this machine."""

    pid: int
    redis_url: str
    prefix: str
    host: str
    log_dir: str


class StateDir:
    """Locked while a launcher uses it; the lock goes with the process, however that ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1

    def lock(self) -> None:
        """Raises StateDirTaken."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self.path / "pool.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            self._lock = -1
            other = _read(self.path)
            who = f" (pid {other.pid}, Redis at {shown(other.redis_url)})" if other else ""
            raise StateDirTaken(
                f"another `slackwater up`{who} uses {self.path}; change its numbers with "
                "`slackwater scale`, stop it with `slackwater down`, or give this one its own "
                "directory with --state-dir"
            ) from None

    def write(self, address: Address) -> None:
        part = self.path / "pool.json.part"
        part.unlink(missing_ok=True)
        # For its owner only: the URL may have a password in it.
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(json.dumps(asdict(address)) + "\n")
        part.replace(self.path / "pool.json")

    def release(self) -> None:
        if self._lock >= 0:
            (self.path / "pool.json").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


def running(path: Path | None = None) -> Address | None:
    """The pool that uses a state directory now, if one does."""
    path = path or default_state_dir()
    try:
        lock = os.open(path / "pool.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _read(path)  # held: somebody is there
    finally:
        os.close(lock)
    return None


def _read(path: Path) -> Address | None:
    try:
        return Address(**json.loads((path / "pool.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
