"""CUDA IPC's protocol, on torch's CPU shared memory: nothing here has run on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import torch

from common.cuda_ipc import IpcError, PoolExport, PoolExporter, PoolImports, probe
from common.handles import Handle

ROOT = Path(__file__).parent.parent


@pytest.fixture
def exporter() -> PoolExporter:
    return PoolExporter(torch.zeros(8, 64, dtype=torch.uint8), "worker-a")


def over_the_wire(export: PoolExport) -> PoolExport:
    return PoolExport.from_wire(msgpack.unpackb(msgpack.packb(export.to_wire())))


READER = """
import sys, json
from common.cuda_ipc import PoolExport, PoolImports
imports = PoolImports()
imports.open(PoolExport.from_wire(json.loads(sys.stdin.readline())))
for line in sys.stdin:
    location, nbytes = json.loads(line)
    print(json.dumps(imports.read(location, nbytes).tolist()), flush=True)
"""


def test_one_export_then_block_lists_carry_every_later_state(exporter: PoolExporter) -> None:
    """A second process opens the pool once and sees what is written afterwards."""
    command = [sys.executable, "-c", READER]
    reader = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    try:
        print(json.dumps(exporter.export("worker-b").to_wire()), file=reader.stdin, flush=True)
        for blocks in [5, 1], [2, 7]:
            state = torch.randint(0, 256, (2, 64), dtype=torch.uint8)
            exporter.pool[torch.tensor(blocks)] = state
            print(json.dumps([exporter.location(blocks), 100]), file=reader.stdin, flush=True)
            assert json.loads(reader.stdout.readline()) == state.view(-1)[:100].tolist()
    finally:
        reader.kill()
        reader.communicate()


def test_a_pool_is_opened_once_and_released_by_message(exporter: PoolExporter) -> None:
    imports = PoolImports()
    export = over_the_wire(exporter.export("worker-b"))
    imports.open(export)
    imports.open(export)
    assert export.pool in imports
    assert exporter.readers == {"worker-b"}
    message = imports.release(export.pool)
    assert message is not None
    exporter.released(message)
    exporter.released(message)
    assert exporter.readers == set()
    assert imports.release(export.pool) is None
    with pytest.raises(IpcError, match="not open"):
        imports.read(exporter.location([0]), 1)


def test_a_dead_exporters_pools_are_dropped(exporter: PoolExporter) -> None:
    imports = PoolImports()
    imports.open(exporter.export("worker-b"))
    assert imports.drop_worker("worker-c") == 0
    assert imports.drop_worker("worker-a") == 1
    assert exporter.name not in imports


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("kernel", "another host"),
        ("pid_namespace", "pid: host"),
        ("ipc_namespace", "ipc: host"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(
    exporter: PoolExporter, field: str, reason: str
) -> None:
    export = PoolExport.from_wire({**exporter.export("worker-b").to_wire(), field: "other"})
    with pytest.raises(IpcError, match=reason):
        PoolImports().open(export)


def test_an_exporter_that_is_gone_is_an_error_not_a_crash(exporter: PoolExporter) -> None:
    export = exporter.export("worker-b")
    with pytest.raises(IpcError, match="cannot open pool"):
        PoolImports().open(replace(export, storage=[2**22 + 1, *export.storage[1:]]))


def test_block_lists_outside_the_pool_are_refused(exporter: PoolExporter) -> None:
    imports = PoolImports()
    imports.open(exporter.export("worker-b"))
    for blocks, nbytes in ([8], 1), ([-1], 1), ([0, 1], 129):
        with pytest.raises(IpcError, match="block list"):
            imports.read(exporter.location(blocks), nbytes)


def test_its_locations_fit_a_handle(exporter: PoolExporter) -> None:
    handle = Handle("j", 1, "latents", "cuda_ipc", "h", (), 64, "0", exporter.location([3]))
    assert Handle.from_wire(msgpack.unpackb(msgpack.packb(handle.to_wire()))) == handle


def test_a_malformed_export_is_refused_by_field(exporter: PoolExporter) -> None:
    wire = exporter.export("worker-b").to_wire()
    with pytest.raises(IpcError, match="block_bytes"):
        PoolExport.from_wire({**wire, "block_bytes": "64"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_the_probe_says_why_there_is_no_cuda_ipc() -> None:
    found = probe()
    assert not found.ok
    assert "no CUDA device" in found.reason


def test_the_probe_really_asks_a_second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert probe("cpu_shm").ok
