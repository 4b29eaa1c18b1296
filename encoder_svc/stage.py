"""The encode stage: prompts to embeddings.

Each row is encoded alone, exact or not: encoding two prompts together changes both (5e-7),
and a prompt costs little beside the steps that follow.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from common.handles import Handle, HandleStore, Parcel
from common.models import guidance, manifest, parcels, request, state
from common.models.embed_cache import EmbedCache
from common.models.errors import NonFinite
from common.models.model import Model
from common.models.rows import guarded
from common.models.values import is_finite
from common.stage import ENCODE, Control, Outcome, Row, Task

# A prompt of Qwen-Image is up to 7 MB: some forty of the longest, thousands of small ones.
CACHE_BYTES = 256 * 2**20


class EncodeStage:
    """Implements common.stage.Stage for the text encoders of one model."""

    kind = ENCODE

    def __init__(
        self,
        model: str | Path,
        store: HandleStore,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        attention: str = "auto",
        name: str | None = None,
        cache_bytes: int = CACHE_BYTES,
        limits: dict[str, int] | None = None,
    ) -> None:
        self.model = Model(model, ENCODE, device, dtype, threads, attention, name)
        self.store = store
        self.cache = EmbedCache(cache_bytes)
        self._limits = limits
        self._reads = {
            param.name
            for _, block in self.model.split.encode
            for param in block.inputs
            if param.name
        }

    def manifest(self) -> dict[str, Any]:
        return manifest.build(self.model, self._limits)

    def stage_in(self, task: Task) -> None:
        """Nothing to read: a prompt comes with its task."""

    def run(self, task: Task, staged: Any, control: Control) -> list[Outcome]:
        return [guarded(row, partial(self._row, task, row)) for row in task.rows]

    def free(self, handles: list[Handle]) -> None:
        for handle in handles:
            self.store.free(handle)

    def counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.cache.clear()

    def _row(self, task: Task, row: Row) -> Outcome:
        content = self._content(row.params)
        key = self.cache.key(content)
        parcel = self.cache.get(key)
        if parcel is None:
            parcel = self._encode(row.params)
            self.cache.put(key, parcel)
        handle = self.store.put(row.job, task.seq, state.EMBEDS, parcel)
        return Outcome(job=row.job, handles={state.EMBEDS: handle})

    def _content(self, params: dict[str, Any]) -> dict[str, Any]:
        """What the embeddings depend on. Without guidance the negative prompt is not read."""
        on = self._guided(params)
        content = {
            name: value
            for name, value in params.items()
            if request.RENAMED.get(name, name) in self._reads
            and (on or not name.startswith("negative"))
        }
        return {**content, "guided": on}

    def _guided(self, params: dict[str, Any]) -> bool:
        return self.model.quirks.encode_needs_cfg or guidance.is_on(self.model.rule, params)

    def _encode(self, params: dict[str, Any]) -> Parcel:
        model = self.model
        own = model.own_pipeline(params)
        if model.quirks.encode_needs_cfg:
            # Any scale but 1 will do: it only says that a negative prompt is wanted.
            own.guider = own.guider.new(guidance_scale=2.0, enabled=True)
        values = model.initial_state(params)
        request.run_blocks(model.split.encode, own, values)
        embeds = state.capture_embeds(model.split, values)
        for name, value in embeds["values"].items():
            if not is_finite(value):
                raise NonFinite(f"{name} is not finite; the text encoder overflowed")
        return parcels.write(state.EMBEDS, embeds, model.device)
