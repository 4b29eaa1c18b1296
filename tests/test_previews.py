"""Previews: small pictures of what a running job has come to."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from common.keys import Keys
from common.models.preview import MOST_BYTES, MOST_PX, BadProjection, Projection, encode, grid
from common.previews import PREVIEW_S, STAY_S, Previews
from common.scripts import Scripts, Transitions, Ttls
from common.settings import BUNDLED_MODEL, Settings
from services.pool.local import LocalPool
from tests.gateway_server import Http, end_of, events, gateway, push
from tests.tiny_pipeline import Control, Stages

PROMPT = "a large red circle on a blue background"
CPU = torch.device("cpu")


class Watching(Control):
    """A Control that wants every preview."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[int, bytes]] = []

    def wants_preview(self, job: str) -> bool:
        return True

    def preview(self, job: str, step: int, make: Callable[[], bytes]) -> None:
        self.shown.append((step, make()))


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    return Stages(BUNDLED_MODEL, tmp_path_factory.mktemp("arena") / "arena")


@pytest.fixture(scope="module")
def made(stages: Stages) -> tuple[list[tuple[int, bytes]], np.ndarray, torch.Tensor]:
    """What was shown of a job on the way, its picture, and the latents it ended with."""
    job = stages.job(prompt=PROMPT, width=128, height=128, num_inference_steps=12, seed=3)
    job.run("encode")
    control = Watching()
    job.run("denoise", 5, control)
    job.run("denoise", 12, control)
    latents = job.latents()
    [picture] = job.pictures()
    job.free()
    return control.shown, picture, latents


def alike(one: np.ndarray, other: np.ndarray) -> float:
    """Correlation of two pictures, the second one brought to the size of the first."""
    small = Image.fromarray(other).resize(one.shape[1::-1], Image.Resampling.BOX)
    return float(np.corrcoef(one.ravel().astype(float), np.array(small).ravel())[0, 1])


# -- the projection ------------------------------------------------------------------------


def test_the_projection_of_the_last_latents_resembles_the_picture(made: Any) -> None:
    _, picture, latents = made
    projection = Projection.open(BUNDLED_MODEL, CPU)
    assert projection is not None
    pixels = projection.pixels(latents, 128, 128)
    assert pixels.shape == (32, 32, 3)
    assert alike(pixels, picture) > 0.9


def test_previews_resemble_the_picture_long_before_it_is_there(made: Any) -> None:
    """They show where the trajectory is heading, not its noise; and each is a small file."""
    shown, picture, _ = made
    assert [step for step, _ in shown] == list(range(1, 12)), "not of a job that is done"
    files = [np.array(Image.open(io.BytesIO(content)).convert("RGB")) for _, content in shown]
    likeness = [alike(pixels, picture) for pixels in files]
    assert min(likeness[len(likeness) // 2 :]) > 0.85
    assert all(len(content) <= MOST_BYTES for _, content in shown)


def test_whoever_looks_on_changes_nothing(stages: Stages) -> None:
    """Latents are bit-identical with and without previews."""
    ends = []
    for control in (Watching(), Control()):
        job = stages.job(prompt=PROMPT, num_inference_steps=4, seed=5)
        job.run("encode")
        job.run("denoise", 4, control)
        ends.append(job.latents())
        job.free()
    assert torch.equal(*ends)


def test_a_preview_is_small_whatever_it_shows() -> None:
    """A large picture of noise still makes a file that Redis can carry."""
    weights = torch.randn(48, 9)
    pixels = Projection(weights, 4).pixels(torch.randn(2, 64 * 48, 8), 1024, 768)
    assert max(pixels.shape[:2]) == MOST_PX
    assert pixels.shape[0] > pixels.shape[1]
    assert len(encode(pixels)) <= MOST_BYTES


def test_latents_of_another_make_have_no_preview() -> None:
    projection = Projection(torch.zeros(3, 9), 1)
    with pytest.raises(BadProjection, match="8 numbers a token"):
        projection.pixels(torch.zeros(1, 16, 4), 64, 64)
    with pytest.raises(BadProjection, match="no rule"):
        grid(torch.zeros(1, 8, 3, 4, 4), 64, 64)
    assert grid(torch.zeros(1, 8, 4, 6), 64, 96).shape == (4, 6, 8)


def test_a_model_without_a_map_or_with_a_broken_one_has_no_previews(tmp_path: Path) -> None:
    assert Projection.open(tmp_path, CPU) is None
    (tmp_path / "preview.json").write_text('{"version": 1, "side": 2, "weights": [[1]]}')
    assert Projection.open(tmp_path, CPU) is None


# -- from the thread that computes to Redis ------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_job_is_shown_twice_a_second_at_most() -> None:
    clock, woken, put = Clock(), threading.Event(), []
    previews = Previews(lambda *one: put.append(one), woken.set, clock=clock)
    assert previews.wanted("a")
    previews.hand_over("a", 1, lambda: b"one")
    assert woken.is_set()
    assert not previews.wanted("a")
    assert previews.wanted("b"), "each job has its own measure"
    clock.now += PREVIEW_S
    assert previews.wanted("a")
    previews.hand_over("a", 2, lambda: b"two")
    previews.send()
    previews.send()
    assert put == [("a", 2, b"two")], "only the latest is sent, once"
    assert not Previews(lambda *one: None, woken.set, on=False).wanted("a")


def test_a_preview_that_cannot_be_made_or_kept_harms_nobody() -> None:
    put: list[str] = []

    def refuse(job: str, step: int, content: bytes) -> None:
        put.append(job)
        raise ResponseError("OOM command not allowed when used memory > 'maxmemory'.")

    def fail() -> bytes:
        raise ValueError("no such picture")

    previews = Previews(refuse, lambda: None)
    previews.hand_over("a", 1, fail)
    previews.hand_over("b", 1, lambda: b"x")
    previews.send()
    assert put == ["b"]

    def away(job: str, step: int, content: bytes) -> None:
        raise RedisConnectionError

    previews = Previews(away, lambda: None)
    previews.hand_over("a", 1, lambda: b"x")
    with pytest.raises(RedisConnectionError):  # the pulse thread waits until Redis is back
        previews.send()


def test_only_a_job_that_has_not_ended_gets_a_preview(redis_client: Any, keys: Keys) -> None:
    scripts, transitions = Scripts(redis_client), Transitions(keys, Ttls())
    shows = transitions.preview("a", 3, b"\x00png", STAY_S)
    assert scripts.one(shows) == [b"gone"]
    assert not redis_client.exists(keys.preview("a"))
    redis_client.hset(keys.trajectory("a"), "seq", "0")
    for _ in range(2):  # a repeat overwrites
        assert scripts.one(shows) == [b"shown"]
    assert redis_client.hgetall(keys.preview("a")) == {b"step": b"3", b"image": b"\x00png"}
    assert 0 < redis_client.ttl(keys.preview("a")) <= STAY_S
    redis_client.delete(keys.trajectory("a"))


# -- over HTTP -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with LocalPool(settings=Settings()) as running:
        yield running


@pytest.fixture(scope="module")
def http(pool: LocalPool) -> Iterator[Http]:
    with gateway(pool) as client:
        yield client


def test_a_watched_job_shows_what_it_has_come_to(pool: LocalPool, http: Http) -> None:
    """`preview` events lie between its steps; nothing of them stays for ever."""
    job = push(http, PROMPT, width=256, height=256, num_inference_steps=200)
    seen: list[dict[str, Any]] = []
    with http.stream("GET", f"/v1/jobs/{job}/events") as stream:
        for event in events(stream.iter_lines()):
            if event["event"] == "preview":
                assert "id" not in event, "Last-Event-ID counts the job's own events"
                seen.append(json.loads(event["data"]))
                if len(seen) == 2:
                    break
    first, second = seen
    assert 0 < first["step"] < second["step"] < 200
    for shown in seen:
        content = base64.b64decode(shown["image"])
        image = Image.open(io.BytesIO(content))
        assert (shown["mime"], image.format, image.size) == ("image/webp", "WEBP", (64, 64))
        assert len(content) <= MOST_BYTES
    with pool.client() as client:
        [[ttl]] = [client.ask(_one("TTL", client.keys.preview(job)))]
    assert 0 < ttl <= STAY_S
    http.delete(f"/v1/jobs/{job}")
    assert end_of(http, job)["status"] == "canceled"


def _one(*command: str) -> Any:
    from common.asks import Ask

    return Ask((command,))
