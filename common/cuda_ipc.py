"""Blocks of one worker's device pool, read by another process without leaving the device.

**Not yet run on a GPU, and no stage uses it yet**: the arena serves. Written against torch 2.13's
own reductions (torch/multiprocessing/reductions.py); the protocol is tested on CPU through
torch's shared-memory storages, which need the same thing of their host: one PID namespace.

The protocol, whose messages are plain maps that any carrier may take:

1. *export*: at start a worker exports its pool once to each reader (torch counts readers per
   export). The message says which host, namespaces and device it needs, and a reader that
   cannot open it refuses with the reason; the arena copy then serves.
2. *block lists*: from then on a handle with `where="cuda_ipc"` names the pool and its blocks,
   nothing else crosses. The writer synchronises its stream before it reports the handle.
3. *release*: a reader drops its mapping and tells the exporter, or drops it alone when the
   exporter's lease is gone: memory of a dead exporter must not be read.

Torch is imported on first use, so the control plane may import this file.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

from common.arena import Arena

PROBE_TIMEOUT_S = 60.0  # a second process has to import torch and make a CUDA context
_PROBE_BLOCK_BYTES = 4096


class IpcError(Exception):
    """The pool cannot be opened here, or is not open; read the arena copy instead."""


@dataclass(frozen=True, slots=True)
class Capability:
    """What a worker publishes at start; `reason` says why not, for people."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PoolExport:
    """One reader's ticket to a pool. `storage` is what torch's own reduction would pickle."""

    pool: str
    worker: str
    reader: str
    kernel: str  # boot id: the same on every container of a host
    pid_namespace: str
    ipc_namespace: str
    backend: str  # "cuda" or "cpu_shm"
    device: str  # the GPU's UUID, since ordinals differ with CUDA_VISIBLE_DEVICES
    block_bytes: int
    storage: list[Any]

    def to_wire(self) -> dict[str, Any]:
        """For msgpack."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Any) -> PoolExport:
        """IpcError names what is missing or of the wrong type."""
        if not isinstance(wire, dict):
            raise IpcError(f"a pool export should be a map, got {wire!r:.80}")
        for field in fields(cls):
            kind = {"block_bytes": int, "storage": list}.get(field.name, str)
            if type(wire.get(field.name)) is not kind:
                raise IpcError(f"pool export field {field.name} should be {kind.__name__}")
        return cls(**{field.name: wire[field.name] for field in fields(cls)})


class PoolExporter:
    """The owner's side. `pool` is a contiguous uint8 tensor [blocks, block_bytes]."""

    def __init__(self, pool: Any, worker: str) -> None:
        if pool.dim() != 2 or not pool.is_contiguous() or pool.element_size() != 1:
            raise ValueError("a pool is a contiguous uint8 tensor of shape [blocks, block_bytes]")
        self.pool, self.worker = pool, worker
        self.name = f"{worker}/{secrets.token_hex(4)}"
        self.readers: set[str] = set()

    def export(self, reader: str) -> PoolExport:
        """The export message for `reader`."""
        storage = self.pool.untyped_storage()
        cuda = self.pool.is_cuda
        values = list(storage._share_cuda_()) if cuda else [os.getpid(), *storage._share_fd_cpu_()]
        self.readers.add(reader)
        return PoolExport(
            pool=self.name,
            worker=self.worker,
            reader=reader,
            **_namespaces(),
            backend="cuda" if cuda else "cpu_shm",
            device=_uuid(self.pool.device) if cuda else "cpu",
            block_bytes=self.pool.shape[1],
            storage=values,
        )

    def released(self, message: dict[str, str]) -> None:
        """A reader's release message arrived, or its lease ended. Repeats are harmless."""
        if message.get("pool") == self.name:
            self.readers.discard(message.get("reader", ""))

    def location(self, blocks: list[int]) -> dict[str, Any]:
        """The `location` of a handle on `blocks`. Synchronise the writing stream first."""
        return {"pool": self.name, "blocks": blocks, "worker": self.worker}


class PoolImports:
    """The reader's side: each pool is mapped once and kept."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[PoolExport, Any]] = {}

    def __contains__(self, pool: str) -> bool:
        return pool in self._open

    def open(self, export: PoolExport) -> None:
        """Map the exporter's pool; IpcError with the reason where that cannot work."""
        if export.pool in self._open:
            return
        why_not = _apart(export)
        if why_not:
            raise IpcError(f"cannot open pool {export.pool} of worker {export.worker}: {why_not}")
        import torch

        try:
            storage = _open_cuda(export) if export.backend == "cuda" else _open_cpu(export)
        except (OSError, RuntimeError) as err:
            raise IpcError(f"cannot open pool {export.pool}: {err}") from err
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        whole = flat[: flat.numel() // export.block_bytes * export.block_bytes]
        self._open[export.pool] = (export, whole.view(-1, export.block_bytes))

    def read(self, location: dict[str, Any], nbytes: int) -> Any:
        """A copy, uint8 [nbytes], on the pool's device. IpcError if the pool is not open."""
        import torch

        if location["pool"] not in self._open:
            raise IpcError(
                f"pool {location['pool']} is not open; its worker has to export it first"
            )
        pool = self._open[location["pool"]][1]
        blocks = location["blocks"]
        if any(not 0 <= b < len(pool) for b in blocks) or len(blocks) * pool.shape[1] < nbytes:
            raise IpcError(f"block list {blocks!r:.80} does not hold {nbytes} bytes of this pool")
        index = torch.tensor(blocks, dtype=torch.int64, device=pool.device)
        return pool.index_select(0, index).view(-1)[:nbytes]

    def release(self, pool: str) -> dict[str, str] | None:
        """Unmap; the release message for the exporter, or None if it was not open."""
        entry = self._open.pop(pool, None)
        return {"pool": pool, "reader": entry[0].reader} if entry else None

    def drop_worker(self, worker: str) -> int:
        """Unmap what a worker whose lease ended had exported; how many pools."""
        gone = [name for name, (export, _) in self._open.items() if export.worker == worker]
        for name in gone:
            del self._open[name]
        return len(gone)


def probe(backend: str = "cuda", timeout_s: float = PROBE_TIMEOUT_S) -> Capability:
    """Export one block and have a second process read it: whether IPC works on this host.

    Takes seconds where there is CUDA, nothing where there is none. Whether two *containers*
    share namespaces only shows when one opens the other's export, which says so.
    """
    try:
        import torch
    except ImportError as err:
        return Capability(False, f"torch cannot be imported: {err}")
    if backend == "cuda":
        if not torch.cuda.is_available():
            return Capability(False, f"torch {torch.__version__} sees no CUDA device")
        settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get(
            "PYTORCH_CUDA_ALLOC_CONF", ""
        )
        if "expandable_segments:True" in settings:
            return Capability(
                False, "expandable_segments is on, and its memory has no plain IPC handle"
            )
    import msgpack

    try:
        secret = secrets.token_bytes(_PROBE_BLOCK_BYTES)
        pool = torch.frombuffer(bytearray(secret), dtype=torch.uint8).view(1, -1)
        if backend == "cuda":
            pool = pool.cuda()
            torch.cuda.synchronize()
        export = PoolExporter(pool, "probe").export("probe-reader")
        child = subprocess.run(
            [sys.executable, "-m", "common.cuda_ipc"],
            input=msgpack.packb(export.to_wire()),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as err:
        return Capability(False, f"the probe could not run: {err}")
    if child.returncode or child.stdout != secret:
        last = child.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["wrong bytes"]
        return Capability(False, f"a second process could not read the pool: {last[0]}")
    return Capability(True)


def pin(arena: Arena) -> Capability:
    """Page-lock the arena's mapping, so that copies from and to the device run unattended.

    Where that fails (no CUDA, `ulimit -l`, a driver that refuses shared memory) copies still
    work, at about half the speed.
    """
    import torch

    if not torch.cuda.is_available():
        return Capability(False, f"torch {torch.__version__} sees no CUDA device")
    start = torch.frombuffer(arena.data, dtype=torch.uint8).data_ptr()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = runtime.cudaHostRegister(start, len(arena.data), 0)
    if int(code) != 0:
        return Capability(False, f"cudaHostRegister of {arena.path} failed with {code}")
    return Capability(True)


def _namespaces() -> dict[str, str]:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            kernel = file.read().strip()
    except OSError:
        kernel = socket.gethostname()
    return {
        "kernel": kernel,
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
        "ipc_namespace": os.readlink("/proc/self/ns/ipc"),
    }


def _apart(export: PoolExport) -> str:
    ours = _namespaces()
    if export.kernel != ours["kernel"]:
        return "it is on another host"
    if export.pid_namespace != ours["pid_namespace"]:
        return "its container has its own PID namespace; start both with one (docker: pid: host)"
    if export.ipc_namespace != ours["ipc_namespace"]:
        return "its container has its own IPC namespace; start both with one (docker: ipc: host)"
    return ""


def _uuid(device: Any) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def _open_cuda(export: PoolExport) -> Any:
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    for ordinal in range(torch.cuda.device_count()):
        if _uuid(ordinal) == export.device:
            # the exporter's ordinal comes first in torch's tuple; ours may be another
            return torch.UntypedStorage._new_shared_cuda(ordinal, *export.storage[1:])
    raise IpcError(
        f"cannot open pool {export.pool}: its GPU {export.device} is not visible here; "
        "widen CUDA_VISIBLE_DEVICES"
    )


def _open_cpu(export: PoolExport) -> Any:
    import torch

    pid, number, size = export.storage
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    try:
        storage: Any = torch.UntypedStorage
        return storage._new_shared_fd_cpu(fd, size)  # keeps a duplicate
    finally:
        os.close(fd)


def _probe_reader() -> None:
    import msgpack

    export = PoolExport.from_wire(msgpack.unpackb(sys.stdin.buffer.read()))
    imports = PoolImports()
    imports.open(export)
    got = imports.read({"pool": export.pool, "blocks": [0]}, export.block_bytes)
    sys.stdout.buffer.write(bytes(got.cpu().tolist()))


if __name__ == "__main__":
    _probe_reader()
