"""Load a stage's components, and no others; refuse to start when one did not load.

`ModularPipeline.load_components` only logs when a file is corrupt and leaves the component
None, so each is loaded through its own spec here and the first failure is raised with the
component's name. Where the VAE is absent, a stand-in on the meta device takes its place:
without one, `vae_scale_factor` silently becomes 8 and pictures come out at the wrong size.
"""

from __future__ import annotations

import json
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from diffusers import ModularPipeline
from diffusers.models.modeling_utils import ModelMixin

from common.models import attention
from common.models.directory import ModelDirectory
from common.models.errors import RefusedModel


class StandIn:
    """Shape and configuration of a model that another stage holds the weights of.

    Deliberately no nn.Module: diffusers asks the first module it finds for the device.
    Attributes not set here come from the meta-device model, which has no storage.
    """

    def __init__(self, meta: torch.nn.Module) -> None:
        self._meta = meta
        self.config = meta.config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_meta"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{type(self._meta).__name__} is not loaded in this stage")


def load(
    pipe: ModularPipeline,
    directory: ModelDirectory,
    names: list[str],
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    attention_backend: str = "auto",
) -> None:
    """Load `names` into `pipe`, in `dtype`, on `device`, in eval mode and without gradients.

    Components made from configuration (guiders, processors) are already there.
    Raises RefusedModel naming the component, and the file where one is damaged.
    """
    backend = attention.resolve(attention_backend, device)
    for name in names:
        spec = pipe._component_specs[name]
        if spec.default_creation_method != "from_pretrained":
            continue
        if not spec.pretrained_model_name_or_path:
            # The index of a model may leave an optional component out (null).
            if name in directory.index:
                continue
            raise RefusedModel(f"{directory.path}: component {name!r} is not in the model index")
        _check_safetensors(directory.path / (spec.subfolder or ""), name)
        try:
            component = _load_one(spec, dtype)
        except Exception as error:
            hint = ""
            if "low_cpu_mem_usage" in str(error) and find_spec("accelerate") is None:
                hint = " (this model needs the package accelerate: pip install accelerate)"
            raise RefusedModel(f"component {name!r} of {directory.path}: {error}{hint}") from error
        if component is None:
            raise RefusedModel(f"component {name!r} of {directory.path} did not load")
        if isinstance(component, torch.nn.Module):
            component.eval().requires_grad_(False)
            component.to(device)
            if name.startswith(("transformer", "unet")):
                attention.apply(component, backend)
        setattr(pipe, name, component)
    stand_in_absent(pipe)


def _load_one(spec: Any, dtype: torch.dtype) -> Any:
    """Load by the spec; a model whose file lacks weights is refused, not filled at random."""
    if spec.type_hint is None or not issubclass(spec.type_hint, torch.nn.Module):
        return spec.load(local_files_only=True)
    component, info = spec.type_hint.from_pretrained(
        spec.pretrained_model_name_or_path,
        subfolder=spec.subfolder or "",
        variant=spec.variant,
        dtype=dtype,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    for fault in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(fault):
            first = sorted(map(str, info[fault]))[0]
            raise RefusedModel(f"{len(info[fault])} {fault.replace('_', ' ')}, first {first}")
    return component


def stand_in_absent(pipe: ModularPipeline) -> None:
    """Put a StandIn wherever a diffusers model with a local configuration is absent."""
    for name, spec in pipe._component_specs.items():
        if getattr(pipe, name, None) is not None or not spec.pretrained_model_name_or_path:
            continue
        if spec.type_hint is None or not issubclass(spec.type_hint, ModelMixin):
            continue
        try:
            config = spec.type_hint.load_config(
                spec.pretrained_model_name_or_path, subfolder=spec.subfolder, local_files_only=True
            )
            with torch.device("meta"):
                meta = spec.type_hint.from_config(config)
        except Exception as error:
            raise RefusedModel(
                f"component {name!r}: its configuration does not make a model: {error}"
            ) from error
        setattr(pipe, name, StandIn(meta))


def _check_safetensors(folder: Path, name: str) -> None:
    """Cheap integrity check: header readable, and the file as long as the header says."""
    if not folder.is_dir():
        return
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        try:
            with file.open("rb") as handle:
                length = struct.unpack("<Q", handle.read(8))[0]
                if length > size - 8:
                    raise ValueError("header is longer than the file")
                header = json.loads(handle.read(length))
            ends = [entry["data_offsets"][1] for k, entry in header.items() if k != "__metadata__"]
            if 8 + length + max(ends, default=0) != size:
                raise ValueError(
                    f"{size} bytes where the header says {8 + length + max(ends, default=0)}"
                )
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise RefusedModel(f"{file}: component {name!r} is damaged: {error}") from error
