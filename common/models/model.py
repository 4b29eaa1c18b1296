"""One stage's share of a model, loaded: the directory, the pipeline, its split, its device."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from common.models import attention, components, guidance, mixing, quirks, request, schedulers
from common.models.directory import ModelDirectory, open_directory
from common.models.errors import RefusedModel
from common.models.split import split
from common.models.values import DTYPES

log = logging.getLogger(__name__)

# What every request of a text-to-image or text-to-video model brings; presence alone chooses
# the blocks.
TRIGGERS = {"prompt": "x"}


class Model:
    """A model directory, open for one stage ("encode", "denoise" or "decode").

    Raises RefusedModel where the model or a setting cannot be used, before anything is served.
    """

    def __init__(
        self,
        model: str | Path,
        stage: str,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        attention_backend: str = "auto",
        name: str | None = None,
        mixed_sizes: str = "auto",
    ) -> None:
        if dtype not in ("float32", "bfloat16", "float16"):
            raise RefusedModel(f"dtype {dtype!r} is none of float32, bfloat16, float16")
        torch.set_num_threads(threads)  # part of exactness: 1 and 2 threads differ by 5e-7
        quiet_diffusers()
        self.stage = stage
        self.threads = threads
        self.device = _device(device)
        self.make_current()
        self.dtype_name = dtype
        self.attention = attention.resolve(attention_backend, device)
        self.directory: ModelDirectory = open_directory(model, name)
        self.pipe = self.directory.open_pipeline()
        self.split = split(self.pipe, **TRIGGERS)
        # `blocks` is a deep copy at every access; ask it once.
        self.family = str(self.pipe.blocks.model_name)
        self.quirks = quirks.of(self.family)
        self.rule = guidance.rule(self.pipe)
        names = self.split.components(stage)
        if "scheduler" not in names:
            names.append("scheduler")  # a configuration only; its verdict goes in the manifest
        components.load(self.pipe, self.directory, names, device, DTYPES[dtype], self.attention)
        self.quirks.check(self.pipe)
        self.mixed = mixing.choose(mixed_sizes, self)  # how sizes share a forward; None: not
        self.verdict = schedulers.verdict(self.pipe.scheduler)

    def make_current(self) -> None:
        """Have this thread use this model's CUDA device where torch is not told which. A thread
        that never says so uses the first, and opens a context there."""
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)

    def own_pipeline(self, params: dict[str, Any]) -> Any:
        return request.own_pipeline(self.pipe, self.rule, params)

    def initial_state(self, params: dict[str, Any]) -> PipelineState:
        return request.initial_state(self.split, params)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RefusedModel(f"device {name!r} is not a torch device: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RefusedModel(f"device {name!r}: torch sees no CUDA device")
    return device


def quiet_diffusers() -> None:
    """Its warnings and progress bars are for notebooks; errors reach us as exceptions."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
