"""Make a stage, setting thread counts before torch is first imported."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from common.handles import HandleStore
from common.stage import DECODE, DENOISE, ENCODE, STAGES, Stage

# By name, so that asking for one stage imports no other, and none before threads are set.
CLASSES = {
    ENCODE: ("encoder_svc.stage", "EncodeStage"),
    DENOISE: ("denoise_svc.stage", "DenoiseStage"),
    DECODE: ("decoder_svc.stage", "DecodeStage"),
}
# Read by OpenMP and MKL once, when torch loads them. Waiting threads must sleep: beside
# other busy processes, spinning ones turn an 8 ms forward into 1,250 ms.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def set_threads(threads: int) -> None:
    """Set the environment for `threads` compute threads; call before torch is imported.

    Raises RuntimeError where torch is imported already under other settings, since then a
    pool that should be exact would not be.
    """
    wanted = {name: str(threads) for name in THREAD_VARIABLES} | {"OMP_WAIT_POLICY": "PASSIVE"}
    # MKL takes its count from OpenMP's where it has none of its own.
    wrong = {
        name: value
        for name, value in wanted.items()
        if os.environ.get(name) != value and name != "MKL_NUM_THREADS"
    }
    if wrong and "torch" in sys.modules:
        settings = " ".join(f"{name}={value}" for name, value in wrong.items())
        raise RuntimeError(f"torch was imported before its threads were set; start with {settings}")
    os.environ.update(wanted)


def build_stage(
    kind: str,
    model: str | Path,
    store: HandleStore,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = 1,
    attention: str = "auto",
    name: str | None = None,
    limits: dict[str, int] | None = None,
    cache_bytes: int | None = None,
    budget_bytes: int = 0,
    fast_decode: bool = False,
    tiled_decode: bool = False,
    mixed_sizes: str = "auto",
    host_risk_s: float = 0.0,
) -> Stage:
    """An encode, denoise or decode stage with its components loaded.

    `cache_bytes` bounds the encoder's embeddings or is the denoiser's block pool; None means their
    defaults. `budget_bytes` is all that a denoiser may use of its device; 0: no limit.
    `fast_decode` and `tiled_decode` are the decoder's (decoder_svc/stage.py), `mixed_sizes`
    (mixing.py) and `host_risk_s` (denoise_svc/checkpoints.py) the denoiser's. Raises RefusedModel
    (common/models/errors.py) where the model cannot be served, naming file or component.
    """
    if kind not in STAGES:
        raise ValueError(f"stage {kind!r} is none of {', '.join(STAGES)}")
    set_threads(threads)
    module, cls = CLASSES[kind]
    settings: dict[str, Any] = {}
    if kind == DECODE:  # which caches nothing
        settings = {"fast_decode": fast_decode, "tiled_decode": tiled_decode}
    elif cache_bytes is not None:
        settings = {"cache_bytes": cache_bytes}
    if kind == DENOISE:
        settings["budget_bytes"] = budget_bytes
        settings["mixed_sizes"] = mixed_sizes
        settings["host_risk_s"] = host_risk_s
    stage: Stage = getattr(import_module(module), cls)(
        model,
        store,
        device=device,
        dtype=dtype,
        threads=threads,
        attention=attention,
        name=name,
        limits=limits,
        **settings,
    )
    return stage
