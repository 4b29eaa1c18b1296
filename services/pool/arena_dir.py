"""The directory on tmpfs in which a pool's states lie, held by a lock while the pool runs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

SHM = Path("/dev/shm")


def arena_dir(state_dir: Path | None) -> tuple[Path, int]:
    """Where on tmpfs this pool's states lie, locked: fixed for a state directory, else new.

    A pool that was killed leaves its directory: a fixed one is used again, since its states
    are still named in Redis; of the others those that nobody has locked are removed here.
    """
    shm = SHM if os.access(SHM, os.W_OK) else Path(tempfile.gettempdir())
    root = shm / f"slackwater-{os.getuid()}"
    root.mkdir(exist_ok=True, mode=0o700)
    for old in root.glob("pool-*"):
        lock = _try_lock(old)
        if lock is not None:
            shutil.rmtree(old, ignore_errors=True)
            os.close(lock)
    if state_dir is not None:
        name = hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:12]
        folder = root / f"state-{name}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _try_lock(folder)
        if lock is not None:
            return folder, lock
        # Held by a container that shares our /dev/shm and has the same path inside.
    folder = Path(tempfile.mkdtemp(prefix="pool-", dir=root))
    lock = _try_lock(folder)
    assert lock is not None
    return folder, lock


def _try_lock(folder: Path) -> int | None:
    """Lock a directory for as long as this process lives; None if another one has it."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
