"""One GPU a worker: with device `cuda`, the workers of a stage on a host share its GPUs out.

A lease is a lock (flock) on a file for each stage and GPU, in a folder beside the arena, which all
workers of a host see, in containers too. The kernel frees it when its process ends, however it
ends. GPUs go by their UUID: in containers their numbers differ, and each begins at 0.

Denoisers take GPUs from the first on, other stages from the last, so that few share one. Imports no
torch: CUDA must not be initialised before CUDA_VISIBLE_DEVICES is set. Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.stage import DENOISE

log = logging.getLogger("slackwater.gpu")

REFUSE, WAIT, OFF = "refuse", "wait", "off"
VISIBLE = "CUDA_VISIBLE_DEVICES"
FOLDER = "gpus"
NVIDIA_SMI_S = 20.0
# A lock tells nobody that it was freed; a worker that waits has minutes of loading before it.
LOOK_AGAIN_S = 1.0


class NoGpu(RuntimeError):
    """Every GPU of this host has a worker of this stage; the message names them and the remedy."""


@dataclass(frozen=True, slots=True)
class GpuLease:
    """A GPU that is this process' own, among workers of its stage, until `free` or its end."""

    gpu: str
    lock: int  # the descriptor that holds it

    def free(self) -> None:
        os.close(self.lock)


def claim(
    stage: str,
    device: str,
    arena_path: str,
    when_taken: str,
    gpus: Callable[[], Sequence[str]] | None = None,
    environment: MutableMapping[str, str] | None = None,
) -> GpuLease | None:
    """A free GPU, and CUDA_VISIBLE_DEVICES set to it; None if `device` needs or allows no choice.

    `when_taken`: `refuse` raises NoGpu, `wait` waits for one. `gpus` lists UUIDs.
    """
    environment = os.environ if environment is None else environment
    if device != "cuda" or when_taken == OFF:
        return None
    found = visible((gpus or installed)(), environment.get(VISIBLE))
    if not found:  # not NVIDIA's, or hidden: torch says what is wrong
        log.warning("device cuda: no GPU is listed here, so none is chosen")
        return None
    if stage != DENOISE:
        found = found[::-1]
    folder = Path(arena_path).parent / FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    said = False
    while True:
        for gpu in found:
            lock = _try_lock(folder / f"{gpu}.{stage}", stage)
            if lock is not None:
                environment[VISIBLE] = gpu
                log.info("%s takes %s, one of %d", stage, gpu, len(found))
                return GpuLease(gpu, lock)
        why = _all_taken(stage, found, folder)
        if when_taken != WAIT:
            raise NoGpu(why)
        if not said:
            log.warning("%s; waiting for one", why)
            said = True
        time.sleep(LOOK_AGAIN_S)


def _try_lock(path: Path, stage: str) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    with contextlib.suppress(OSError):  # the arena may fill its tmpfs to the last page
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} of {os.uname().nodename}".encode())
    return lock


def _all_taken(stage: str, gpus: Sequence[str], folder: Path) -> str:
    holders = []
    for gpu in gpus:
        with contextlib.suppress(OSError):
            holders.append(f"{gpu}: {(folder / f'{gpu}.{stage}').read_text() or 'unnamed'}")
    return (
        f"each of the {len(gpus)} GPUs here has its {stage} worker ({'; '.join(holders)}); start "
        "fewer of them, name a GPU to share it (device cuda:0), or set gpu_lease to wait or off"
    )


# -- which GPUs there are ----------------------------------------------------------------------


def installed() -> list[str]:
    """UUIDs of the GPUs that this process may use, as NVIDIA's driver lists them."""
    try:
        said = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True
        ).stdout
        return re.findall(r"^GPU \d+:.*\(UUID: (GPU-[0-9a-f-]+)\)", said, re.MULTILINE)
    except (OSError, subprocess.SubprocessError):
        pass
    found = []
    for card in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            found += re.findall(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)", card.read_text(), re.MULTILINE)
    return found


def visible(gpus: Sequence[str], allowed: str | None) -> list[str]:
    """Those of `gpus` that CUDA_VISIBLE_DEVICES allows: numbers or beginnings of UUIDs, and as in
    CUDA nothing behind the first that there is not."""
    if allowed is None:
        return list(gpus)
    chosen: list[str] = []
    for word in allowed.split(","):
        name = word.strip()
        if name.isdigit():
            match = list(gpus[int(name) : int(name) + 1])
        else:
            match = [gpu for gpu in gpus if name and gpu.startswith(name)]
        if len(match) != 1:
            break
        chosen += match
    return chosen
