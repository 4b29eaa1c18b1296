"""What is served: manifests as the workers published them, and who is there to run them."""

from __future__ import annotations

import time
from typing import Any

from common.record import WorkerRecord
from common.stage import STAGES
from services.gateway.client import GatewayClient
from services.gateway.errors import bad

# Manifests change when a worker of another model joins.
FRESH_S = 1.0
VIDEO = "text-to-video"

Manifest = dict[str, Any]


class Models:
    """`default` is the model of a job that names none, where several are served."""

    def __init__(self, client: GatewayClient, default: str) -> None:
        self._client, self._default = client, default
        self._manifests: dict[str, Manifest] = {}
        self._read_at = -FRESH_S

    async def manifests(self) -> dict[str, Manifest]:
        """By model name; those of which all stages have been seen."""
        if time.monotonic() - self._read_at >= FRESH_S:
            self._manifests = await self._client.models()
            self._read_at = time.monotonic()
        return self._manifests

    async def makes_videos(self, model: str) -> bool:
        return is_video((await self.manifests()).get(model, {}))

    async def manifest_for(self, model: Any, video: bool, instead: str) -> Manifest:
        """The manifest of the model that a request means, empty where only the coordinator can
        say. Raises a 400 where that model makes the other thing; `instead` is its path."""
        manifests = await self.manifests()
        if model is None:
            model = next(iter(manifests), None) if len(manifests) == 1 else self._default
        manifest = manifests.get(model) if isinstance(model, str) else None
        if manifest is None:
            return {}
        if is_video(manifest) != video:
            what = "pictures" if video else "videos"
            raise bad("model", f"{model} makes {what}; POST {instead} has them made")
        return manifest

    async def only_video_model(self) -> str | None:
        """The model a video is made with where none is named and only one can."""
        names = [name for name, found in (await self.manifests()).items() if is_video(found)]
        return names[0] if len(names) == 1 else None


def is_video(manifest: Manifest) -> bool:
    return manifest.get("task") == VIDEO


def ready_for(model: str, workers: list[WorkerRecord]) -> bool:
    """Whether each stage of `model` has a worker that stays."""
    staffed = {w.stage for w in workers if model in w.models and not w.draining}
    return set(STAGES) <= staffed
