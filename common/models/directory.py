"""A model directory (or hub id), checked before a single weight is read.

Refused with `RefusedModel`: no index, a pipeline that diffusers has no modular form of,
custom code, components from libraries other than diffusers and transformers, and weights
that exist only as pickles.
"""

from __future__ import annotations

import contextlib
import json
import struct
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from common.models.errors import RefusedModel

if TYPE_CHECKING:
    from diffusers import ModularPipeline

INDEXES = ("modular_model_index.json", "model_index.json")
# Ours, and no part of the model.
OVERRIDES, PROFILE = "slackwater.json", "profile.json"
PREVIEW = "preview.json"
LIBRARIES = ("diffusers", "transformers")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5")
# What a hub id is fetched as: configurations, vocabularies and safetensors, nothing to unpickle.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True)
class ModelDirectory:
    """A local directory in diffusers format. `name` is what the pool calls the model."""

    path: Path
    name: str
    index: dict[str, Any] = field(repr=False)
    overrides: dict[str, Any] = field(repr=False, default_factory=dict)
    profile: dict[str, Any] = field(repr=False, default_factory=dict)  # docs/costs.md

    @cached_property
    def pipeline_class(self) -> str:
        """Class named in the index, classic (`QwenImagePipeline`) or modular."""
        return str(self.index.get("_class_name", ""))

    @cached_property
    def component_names(self) -> list[str]:
        """Components the index lists with a class, in its order."""
        return [
            name
            for name, spec in self.index.items()
            if isinstance(spec, list) and len(spec) >= 2 and spec[1] is not None
        ]

    @cached_property
    def fingerprint(self) -> str:
        """xxh3 over configurations and safetensors headers: equal for equal models.

        Headers hold names, shapes and offsets, not the weights, so this is quick and tells
        two models apart unless they differ in weights alone.
        """
        digest = xxhash.xxh3_64()
        for file in sorted(self.path.rglob("*")):
            if file.suffix not in (".json", ".safetensors", ".txt"):
                continue
            if file.name in (OVERRIDES, PROFILE, PREVIEW):
                continue
            digest.update(str(file.relative_to(self.path)).encode())
            digest.update(str(file.stat().st_size).encode())
            if file.suffix == ".safetensors":
                with file.open("rb") as handle:
                    length = struct.unpack("<Q", handle.read(8).ljust(8, b"\0"))[0]
                    digest.update(handle.read(min(length, 100_000_000)))
            else:
                digest.update(file.read_bytes())
        return digest.hexdigest()

    def open_pipeline(self) -> ModularPipeline:
        """The ModularPipeline of this directory, without weights."""
        from diffusers import ModularPipeline

        try:
            pipe = ModularPipeline.from_pretrained(
                str(self.path), trust_remote_code=False, local_files_only=True
            )
        except Exception as error:
            raise RefusedModel(f"{self.path}: {error}") from error
        if getattr(pipe, "blocks", None) is None or not pipe.blocks.sub_blocks:
            raise RefusedModel(_no_modular_form(self.path, self.pipeline_class))
        return pipe


def open_directory(model: str | Path, name: str | None = None) -> ModelDirectory:
    """Resolve a path or hub id and check what can be checked without loading.

    A hub id is looked up in the local cache first and fetched when it isn't there, unless
    HF_HUB_OFFLINE is set.
    """
    path = Path(model)
    if not path.is_dir():
        path = _fetch(str(model))
    index = _read_index(path)
    overrides, profile = (
        _read_json(path / file) if (path / file).is_file() else {} for file in (OVERRIDES, PROFILE)
    )
    name = name or str(overrides.get("name") or Path(str(model).rstrip("/")).name)
    directory = ModelDirectory(
        path=path, name=name, index=index, overrides=overrides, profile=profile
    )
    _check_class(directory)
    _check_code(directory)
    _check_weights(directory)
    return directory


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RefusedModel(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise RefusedModel(f"{file}: expected a JSON object")
    return content


def _read_index(path: Path) -> dict[str, Any]:
    for name in INDEXES:
        if (path / name).is_file():
            return _read_json(path / name)
    raise RefusedModel(
        f"{path} is not a diffusers model directory: it has neither model_index.json "
        "nor modular_model_index.json"
    )


def _fetch(model: str) -> Path:
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise RefusedModel(
            f"{model}: no such directory (a Hugging Face hub id looks like 'Qwen/Qwen-Image')"
        )
    from huggingface_hub import snapshot_download

    # Whatever the cache lookup raises, the download will say better.
    with contextlib.suppress(Exception):
        return Path(snapshot_download(model, allow_patterns=HUB_PATTERNS, local_files_only=True))
    try:
        return Path(snapshot_download(model, allow_patterns=HUB_PATTERNS))
    except Exception as error:
        raise RefusedModel(
            f"{model}: no such directory, not in the Hugging Face cache, and not fetched: {error}"
        ) from error


def _no_modular_form(path: Path, class_name: str) -> str:
    from importlib.metadata import version

    from diffusers.modular_pipelines.modular_pipeline import MODULAR_PIPELINE_MAPPING

    return (
        f"{path}: diffusers {version('diffusers')} has no modular form of {class_name or '?'}; "
        f"it has one for the families {', '.join(sorted(MODULAR_PIPELINE_MAPPING))}"
    )


def _check_class(directory: ModelDirectory) -> None:
    import diffusers
    from diffusers.modular_pipelines.modular_pipeline import MODULAR_PIPELINE_MAPPING

    name = directory.pipeline_class
    cls = getattr(diffusers, name, None) if name.isidentifier() else None
    if cls is None:
        raise RefusedModel(
            f"{directory.path}: unknown pipeline class {name!r}; this diffusers does not have it"
        )
    if issubclass(cls, diffusers.ModularPipeline):
        return
    from diffusers.pipelines.auto_pipeline import _get_model

    if _get_model(name) not in MODULAR_PIPELINE_MAPPING:
        raise RefusedModel(_no_modular_form(directory.path, name))


def _check_code(directory: ModelDirectory) -> None:
    """No custom code: neither custom blocks nor components of unknown libraries."""
    modular = directory.path / "modular_config.json"
    if modular.is_file() and "auto_map" in _read_json(modular):
        raise RefusedModel(
            f"{modular}: asks for custom code (auto_map); models that bring code are not loaded"
        )
    for name in directory.component_names:
        library = directory.index[name][0]
        if library is not None and library not in LIBRARIES:
            raise RefusedModel(
                f"{directory.path}: component {name!r} comes from {library!r}, which is custom "
                f"code; only {' and '.join(LIBRARIES)} are loaded"
            )


def _check_weights(directory: ModelDirectory) -> None:
    """A component whose weights exist only as pickles is refused by file name."""
    for name in directory.component_names:
        folder = directory.path / name
        if not folder.is_dir():
            continue
        files = sorted(file for file in folder.iterdir() if file.is_file())
        pickles = [file for file in files if file.suffix in PICKLES]
        if pickles and not any(file.suffix == ".safetensors" for file in files):
            raise RefusedModel(
                f"{pickles[0]}: component {name!r} has pickled weights and no .safetensors; "
                "pickles can run code and are not loaded (convert with save_pretrained)"
            )
