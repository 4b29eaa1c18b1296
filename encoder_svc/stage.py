"""The encode stage: prompts to embeddings.

An exact row is encoded alone: encoding two prompts together changes both (5e-7). Rows that need
not be exact and have prompts of equal token length are encoded together.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from common.handles import Handle, HandleStore, Parcel
from common.models import guidance, manifest, parcels, request, state, together
from common.models.embed_cache import EmbedCache
from common.models.errors import NonFinite
from common.models.model import Model
from common.models.rows import give_back_memory, guarded, is_fatal, is_out_of_memory
from common.models.values import is_finite
from common.stage import ENCODE, Control, Outcome, Row, Task

log = logging.getLogger(__name__)

# A prompt of Qwen-Image is up to 7 MB: some forty of the longest, thousands of small ones.
CACHE_BYTES = 256 * 2**20
# Before the key of what was encoded with others, which an exact job must not get.
SHARED = "shared "


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
        self._rows = self._encoded = 0  # rows that have their embeddings, prompts encoded
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
        shares = self._encode_together([row for row in task.rows if not row.exact])
        outcomes = [guarded(row, partial(self._row, task, row)) for row in task.rows]
        for outcome in outcomes:
            if outcome.job in shares:
                outcome.seconds += shares[outcome.job]
                outcome.skipped = 0  # at hand since it was encoded just now
        return outcomes

    def free(self, handles: list[Handle]) -> None:
        for handle in handles:
            self.store.free(handle)

    def counts(self) -> dict[str, int]:
        """Rows whose embeddings were at hand, and those whose prompt had to be encoded."""
        return {"embed_hits": max(0, self._rows - self._encoded), "embed_misses": self._encoded}

    def close(self) -> None:
        self.cache.clear()

    def _row(self, task: Task, row: Row) -> Outcome:
        key = self._key(row.params)
        parcel = self.cache.get(key)
        if parcel is None and not row.exact:
            parcel = self.cache.get(SHARED + key)
        at_hand = parcel is not None
        if parcel is None:
            parcel = self._encode(row.params)
            self._encoded += 1
            self.cache.put(key, parcel)
        self._rows += 1
        handle = self.store.put(row.job, task.seq, state.EMBEDS, parcel)
        return Outcome(job=row.job, handles={state.EMBEDS: handle}, skipped=int(at_hand))

    def _encode_together(self, rows: list[Row]) -> dict[str, float]:
        """Fill the cache with what several rows lack; the rest is encoded row by row.

        By job, its share of the seconds that this took.
        """
        groups: dict[Any, dict[str, Row]] = {}
        shares: dict[str, float] = {}
        for row in rows:
            key = self._key(row.params)
            known = key in self.cache or SHARED + key in self.cache
            lengths = None if known else self._lengths(row.params)
            if lengths is not None:
                groups.setdefault(lengths, {})[key] = row
        for group in groups.values():
            if len(group) < 2:
                continue
            began = perf_counter()
            try:
                made = self._encode_all([row.params for row in group.values()])
            except Exception as error:
                if is_fatal(error):
                    raise
                if is_out_of_memory(error):
                    give_back_memory()
                log.warning("%d prompts could not be encoded together: %s", len(group), error)
                continue
            self._encoded += len(group)
            for key, parcel in zip(group, made, strict=True):
                self.cache.put(SHARED + key, parcel)
            share = (perf_counter() - began) / len(group)
            shares |= {row.job: share for row in group.values()}
        return shares

    def _lengths(self, params: dict[str, Any]) -> tuple[Any, ...] | None:
        """Rows of equal lengths may be encoded together; None for one that may not.

        Token counts of every prompt read, by every tokenizer, and the other things that the
        encode blocks read.
        """
        content = self._content(params)
        prompts = {k: content.pop(k) for k in together.PROMPTS if content.get(k) is not None}
        try:
            counts = tuple(
                len(getattr(self.model.pipe, name)(prompt).input_ids)
                for name in together.TOKENIZERS
                if getattr(self.model.pipe, name, None) is not None
                for prompt in prompts.values()
            )
        except Exception:  # what is wrong with the prompt is said when it is encoded
            return None
        return (*prompts, counts, repr(sorted(content.items())))

    def _encode_all(self, rows: list[dict[str, Any]]) -> list[Parcel]:
        """Parcels of several rows, from one run of the encode blocks."""
        joint = dict(rows[0])
        for name in together.PROMPTS:
            if joint.get(name) is not None:
                joint[name] = [params[name] for params in rows]
        embeds = self._run_blocks(joint)
        split = together.split(embeds["values"], len(rows))
        return [
            parcels.write(state.EMBEDS, {**embeds, "values": values}, self.model.device)
            for values in split
        ]

    def _key(self, params: dict[str, Any]) -> str:
        return self.cache.key(self._content(params))

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
        return parcels.write(state.EMBEDS, self._run_blocks(params), self.model.device)

    def _run_blocks(self, params: dict[str, Any]) -> dict[str, Any]:
        """The encode blocks' outputs; prompts in `params` may be lists."""
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
        return embeds
