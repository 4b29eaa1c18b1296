"""One part of a job's state as a Parcel: msgpack meta plus raw tensor bytes.

Meta is `[VERSION, part, on an accelerator?, [per tensor: on the accelerator?], [per tensor:
address modulo 64], values]`.
Reading copies every tensor into memory of torch's own: the block it lies in may be freed and
used again while this process still computes. A tensor comes back at the alignment it had,
since CPU kernels round by it: the same weights 24 bytes further on were measured to change a
transformer's output by 5e-7.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np
import torch

from common.handles import Parcel
from common.models.errors import StateLost
from common.models.values import DTYPE_NAMES, DTYPES, Reader, Writer

# Raised when the layout of meta changes; a worker of another version refuses the state.
VERSION = 1
# What torch aligns its CPU allocations to; offsets within are kept.
ALIGN_BYTES = 64


def write(part: str, values: dict[str, Any], device: torch.device) -> Parcel:
    """`values` as a parcel; raises NotCapturable naming the value that cannot be carried."""
    writer = Writer()
    plain = writer.plain(values, part)
    aligned = [_misalignment(t) for t in writer.tensors.values()]
    meta = msgpack.packb([VERSION, part, device.type != "cpu", writer.on_device, aligned, plain])
    tensors = {
        name: (DTYPE_NAMES[t.dtype], tuple(t.shape), _buffer(t))
        for name, t in writer.tensors.items()
    }
    return Parcel(tensors=tensors, meta=meta)


def read(part: str, parcel: Parcel, device: torch.device) -> dict[str, Any]:
    """The values of a parcel, tensors copied and put on `device`.

    Tensors that its writer kept on the CPU beside an accelerator stay there. Where the
    writer had no accelerator, all go to `device`.
    Raises StateLost for another version, another part or damaged meta.
    """
    try:
        version, written, accelerated, on_device, aligned, plain = msgpack.unpackb(
            bytes(parcel.meta), strict_map_key=False
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise StateLost(f"{part}: meta is not readable: {error}") from error
    if version != VERSION or written != part:
        raise StateLost(
            f"expected {part!r} in format {VERSION}, found {written!r} in format {version}"
        )
    tensors = {}
    for name, (dtype, shape, buffer) in parcel.tensors.items():
        tensor = _tensor(dtype, tuple(shape), buffer, aligned[int(name)])
        if on_device[int(name)] or not accelerated:
            tensor = tensor.to(device, non_blocking=True)
        tensors[name] = tensor
    values = Reader(tensors, device).value(plain)
    if not isinstance(values, dict):
        raise StateLost(f"{part}: meta holds no dictionary")
    return values


def _buffer(tensor: torch.Tensor) -> Any:
    """Bytes of a contiguous tensor, as an array; a view where it is on the CPU already."""
    flat = tensor.cpu().reshape(-1)
    if flat.stride(0) != 1:  # a single element may have any stride, which view() refuses
        flat = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
    return flat.view(torch.uint8).numpy()


def _misalignment(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() % ALIGN_BYTES if tensor.device.type == "cpu" else 0


def _tensor(dtype: str, shape: tuple[int, ...], buffer: Any, aligned: int) -> torch.Tensor:
    if dtype not in DTYPES:
        raise StateLost(f"unknown tensor type {dtype!r}")
    kind = DTYPES[dtype]
    if aligned % kind.itemsize:
        raise StateLost(f"{dtype} at an address of {aligned} modulo {ALIGN_BYTES}")
    # torch's own allocations begin at a multiple of 64.
    skip = aligned // kind.itemsize
    out = torch.empty(math.prod(shape) + skip, dtype=kind)[skip:].view(shape)
    if out.numel():
        # Through numpy, which takes read-only buffers; torch warns about them even as a source.
        np.copyto(out.view(-1).view(torch.uint8).numpy(), np.frombuffer(buffer, dtype=np.uint8))
    return out
