"""Take the tensors out of nested values and put them back: what stays is cheap to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands where a tensor stood."""

    index: int


class Taken:
    """The tensors that were taken out, each once, however many names it had.

    Those of another device stay, and those whose whole memory is at most `small_bytes`: timesteps
    and the like are not worth a slot.
    """

    def __init__(self, device: torch.device, small_bytes: int = 0) -> None:
        self.tensors: list[torch.Tensor] = []
        self._device, self._small_bytes = device, small_bytes
        self._slots: dict[tuple[Any, ...], Slot] = {}

    def take(self, value: Any) -> Any:
        """`value` with slots for the tensors on this device; containers are made anew."""
        if type(value) is torch.Tensor:
            return self._slot(value) if self._goes(value) else value
        if type(value) is dict:
            return {name: self.take(item) for name, item in value.items()}
        if type(value) is list:
            return [self.take(item) for item in value]
        if type(value) is tuple:
            return tuple(self.take(item) for item in value)
        return value

    def _goes(self, tensor: torch.Tensor) -> bool:
        own = tensor.device.type == self._device.type
        return own and tensor.untyped_storage().nbytes() > self._small_bytes

    def _slot(self, tensor: torch.Tensor) -> Slot:
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._slots:
            self._slots[key] = Slot(len(self.tensors))
            self.tensors.append(tensor)
        return self._slots[key]


def put_back(value: Any, tensors: list[torch.Tensor]) -> Any:
    """What `take` was given, with `tensors` in the slots."""
    if type(value) is Slot:
        return tensors[value.index]
    if type(value) is dict:
        return {name: put_back(item, tensors) for name, item in value.items()}
    if type(value) is list:
        return [put_back(item, tensors) for item in value]
    if type(value) is tuple:
        return tuple(put_back(item, tensors) for item in value)
    return value
