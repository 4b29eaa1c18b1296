"""Values of a job's state as plain msgpack plus named tensors, and back.

Only the types listed here cross a process boundary. Tuples stay tuples, bf16 stays bf16,
a tensor that appears twice is stored once, and a dense tensor keeps its memory layout
(strides), since a kernel may choose its path by it. Anything else raises NotCapturable
with the path to the value: a checkpoint that silently loses something is worse than none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from common.models.errors import NotCapturable, StateLost

PLAIN = (bool, int, float, str, type(None))

# name → dtype, only real tensor types: nothing is looked up on torch by a name from the wire.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
NUMPY_KINDS = {
    "float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"
}  # fmt: skip


class Writer:
    """Collects the tensors of one parcel while values become plain."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        # Of each tensor whether it lived on the accelerator; a scheduler keeps sigmas on the CPU.
        self.on_device: list[bool] = []
        self._seen: dict[int, Any] = {}

    def plain(self, value: Any, path: str) -> Any:
        """`value` as msgpack-able data; tensors go to `self.tensors`."""
        if type(value) in PLAIN:
            return value
        kind, content = self._tagged(value, path)
        return {"k": kind, "v": content}

    def _tagged(self, value: Any, path: str) -> tuple[str, Any]:
        if isinstance(value, torch.Tensor):
            return "tensor", self._tensor(value, path)
        if isinstance(value, torch.Size):
            return "size", list(value)
        if type(value) in (list, tuple):
            items = [self.plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
            return ("list" if type(value) is list else "tuple"), items
        if isinstance(value, dict):
            return "dict", [
                [self._key(key, path), self.plain(item, f"{path}.{key}")]
                for key, item in value.items()
            ]
        if isinstance(value, torch.dtype) and value in DTYPE_NAMES:
            return "dtype", DTYPE_NAMES[value]
        if isinstance(value, torch.device):
            return "device", None  # a device belongs to the process, not to the job
        if isinstance(value, np.ndarray) and value.dtype.name in NUMPY_KINDS:
            return "array", self._tensor(torch.from_numpy(np.array(value)), path)
        if isinstance(value, np.generic) and value.dtype.name in NUMPY_KINDS:
            return "scalar", [value.dtype.name, value.item()]
        raise NotCapturable(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, "
            "which a checkpoint does not carry"
        )

    @staticmethod
    def _key(key: Any, path: str) -> Any:
        if type(key) not in (str, int):
            raise NotCapturable(f"{path} has a key of type {type(key).__qualname__}")
        return key

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided:
            raise NotCapturable(f"{path} is a {tensor.layout} tensor of {tensor.dtype}")
        if id(tensor) not in self._seen:
            order = _memory_order(tensor)
            name = str(len(self.tensors))
            self.tensors[name] = tensor.detach().permute(order).contiguous()
            self.on_device.append(tensor.device.type != "cpu")
            self._seen[id(tensor)] = ([name, list(order)], tensor)
        return self._seen[id(tensor)][0]


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from slowest to fastest in memory; identity where that isn't dense."""
    dims = tuple(range(tensor.dim()))
    strides = tuple(tensor.stride())
    order = tuple(sorted(dims, key=lambda d: -strides[d]))
    return order if tensor.permute(order).is_contiguous() else dims


class Reader:
    """The way back; `tensors` are already where they shall live."""

    def __init__(self, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._made: dict[str, torch.Tensor] = {}

    def value(self, plain: Any) -> Any:
        if type(plain) in PLAIN:
            return plain
        try:
            kind, content = plain["k"], plain["v"]
            return self._untagged(kind, content)
        except (KeyError, TypeError, ValueError) as error:
            raise StateLost(f"state is not readable: {error!r}") from error

    def _untagged(self, kind: str, content: Any) -> Any:
        if kind == "tensor":
            return self._tensor(*content)
        if kind == "size":
            return torch.Size(content)
        if kind == "list":
            return [self.value(item) for item in content]
        if kind == "tuple":
            return tuple(self.value(item) for item in content)
        if kind == "dict":
            return {key: self.value(item) for key, item in content}
        if kind == "dtype":
            return DTYPES[content]
        if kind == "device":
            return self._device
        if kind == "array":
            return self._tensor(*content).cpu().numpy()
        if kind == "scalar":
            return np.dtype(content[0]).type(content[1])
        raise ValueError(f"unknown kind {kind!r}")

    def _tensor(self, name: str, order: list[int]) -> torch.Tensor:
        if name not in self._made:
            stored = self._tensors[name]
            back = [0] * len(order)
            for place, dim in enumerate(order):
                back[dim] = place
            self._made[name] = stored.permute(back)
        return self._made[name]


def is_finite(value: Any) -> bool:
    """False for a floating-point tensor with a NaN or an infinity in it; True for all else."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return True
    return bool(torch.isfinite(value).all())
