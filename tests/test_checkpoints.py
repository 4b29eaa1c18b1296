"""States that are left far from their host, since too much work would be lost with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.arena import Arena
from common.handles import HandleStore
from tests.tiny_models import shared_qwenimage
from tests.tiny_pipeline import Stages

ARENA_BYTES = 32 * 2**20


class Host:
    """The stages on one host, whose states can go to Redis too."""

    def __init__(self, folder: Path, redis: Any, name: str, risk_s: float) -> None:
        self.stages = Stages(shared_qwenimage(), folder / name)
        arena = Arena.open(str(folder / name), ARENA_BYTES)
        store = HandleStore(name, arena, redis, "{t}:")
        self.stages.store = store
        for stage in self.stages.by_kind.values():
            stage.store = store
        denoise = self.stages.by_kind["denoise"]
        denoise.checkpoints = type(denoise.checkpoints)(store, torch.device("cpu"), risk_s)


@pytest.fixture
def hosts(tmp_path: Path, redis_client: Any) -> dict[str, Host]:
    return {
        "careful": Host(tmp_path, redis_client, "careful", 1e-6),
        "careless": Host(tmp_path, redis_client, "careless", 0.0),
        "patient": Host(tmp_path, redis_client, "patient", 3600.0),
    }


def test_a_job_that_cost_enough_goes_on_when_its_host_is_gone(hosts: dict[str, Host]) -> None:
    """With all it needs, and to the very same bits."""
    job = hosts["careful"].stages.job(num_inference_steps=6)
    job.run("encode")
    job.denoise([2, 4])
    assert {part: handle.where for part, handle in job.handles.items()} == {
        "embeds": "redis", "prepared": "redis", "latents": "redis",
    }  # fmt: skip
    arena = hosts["careful"].stages.store.arena
    assert arena is not None
    assert arena.stats().claims == 0
    whole = hosts["careless"].stages.job("whole", num_inference_steps=6)
    whole.run("encode")
    whole.denoise([6])
    job.stages = hosts["careless"].stages  # the other one is no more
    job.denoise([6])
    assert torch.equal(job.latents(), whole.latents())
    job.free()
    whole.free()


@pytest.mark.parametrize("name", ["careless", "patient"])
def test_a_job_that_cost_little_stays_on_its_host(hosts: dict[str, Host], name: str) -> None:
    job = hosts[name].stages.job(num_inference_steps=4)
    job.run("encode")
    job.denoise([2, 4])
    assert {handle.where for handle in job.handles.values()} == {"arena"}
    job.free()


def test_a_full_redis_leaves_it_on_its_host(hosts: dict[str, Host], redis_client: Any) -> None:
    """Rather than failing it; and nothing half-written stays."""
    job = hosts["careful"].stages.job(num_inference_steps=4)
    job.run("encode")
    redis_client.config_set("maxmemory", 1)
    job.denoise([2])
    redis_client.config_set("maxmemory", 0)
    assert {handle.where for handle in job.handles.values()} == {"arena"}
    assert not list(redis_client.scan_iter("{t}:latents:*"))
    job.denoise([4])
    assert {handle.where for handle in job.handles.values()} == {"redis"}
    job.free()
    assert not list(redis_client.scan_iter("{t}:latents:*"))
