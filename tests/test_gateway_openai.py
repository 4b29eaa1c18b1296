"""OpenAI's own client, unmodified, against the bundled model and a stand-in for one of videos."""

from __future__ import annotations

import base64
import io
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import av
import httpx
import openai
import pytest
from openai import OpenAI
from PIL import Image

from common.connect import writing
from common.noop import expected
from common.settings import Settings
from examples import http_openai
from services.gateway.video_routes import _nearest
from services.pool.local import LocalPool
from tests.animations import animated
from tests.gateway_server import LONG, WAIT_S, error_of, gateway
from tests.servers import free_port

ROOT = Path(__file__).resolve().parent.parent
MODEL = "tiny-qwen-image"
KEY = "sk-openai-client-0123456789"
FAST = {"num_inference_steps": 4, "seed": 3}
# The video calls are marked as deprecated: OpenAI's own service has ended them.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    """The bundled model, and no-op stages that call themselves a model of videos."""
    stand_in = Settings(
        noop="encode_ms=1,step_ms=5,decode_ms=1,video=1", model_name="stand-in", host="stand-in"
    )
    bundled = Settings(default_model=MODEL, http_port=free_port())
    with (
        LocalPool(settings=bundled, http=True) as running,
        LocalPool(settings=stand_in, redis_url=running.redis_url, coordinators=0),
    ):
        yield running


@pytest.fixture
def client(pool: LocalPool) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{pool.http_url}/v1", api_key="any", max_retries=0) as opened:
        yield opened


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


# -- pictures ------------------------------------------------------------------------------


def test_a_picture_comes_as_base64_or_by_its_address(client: OpenAI) -> None:
    asked = {
        "model": MODEL, "prompt": "a red circle on a blue background", "size": "96x64",
        "extra_body": FAST,
    }  # fmt: skip
    by_value = client.images.generate(**asked)
    assert by_value.data
    content = base64.b64decode(by_value.data[0].b64_json or "")
    assert (opened(content).format, opened(content).size) == ("PNG", (96, 64))
    assert (by_value.size, by_value.output_format) == ("96x64", "png")
    by_address = client.images.generate(**asked, response_format="url")
    assert by_address.data
    assert by_address.data[0].b64_json is None
    answer = httpx.get(by_address.data[0].url or "", timeout=WAIT_S)
    assert answer.headers["content-type"] == "image/png"
    assert answer.content == content, "the same seed is the same picture"


def test_n_pictures_are_n_different_ones(client: OpenAI) -> None:
    made = client.images.generate(
        model=MODEL, prompt="a green ring", n=4, size="64x64", output_format="webp",
        extra_body={"num_inference_steps": 4},
    )  # fmt: skip
    files = {base64.b64decode(image.b64_json or "") for image in made.data or ()}
    assert {(opened(f).format, opened(f).size) for f in files} == {("WEBP", (64, 64))}
    assert len(files) == 4
    params = made.slackwater["params"]  # type: ignore[attr-defined]
    assert params["seed"] == made.slackwater["seed"]  # type: ignore[attr-defined]
    assert (params["n"], params["num_inference_steps"]) == (4, 4)


def test_what_changes_nothing_is_taken_and_what_would_is_refused(client: OpenAI) -> None:
    made = client.images.generate(
        model=MODEL, prompt="a blue star", size="auto", quality="auto", background="opaque",
        moderation="low", n=None, user="u1", extra_body=FAST,
    )  # fmt: skip
    params = made.slackwater["params"]  # type: ignore[attr-defined]
    assert (params["user"], params["n"]) == ("u1", 1)
    for name, value in (
        ("quality", "hd"), ("background", "transparent"), ("style", "vivid"),
        ("output_format", "gif"), ("n", 11), ("size", "33x32"), ("response_format", "jpg"),
        ("response_format", ""), ("partial_images", 2),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            client.images.generate(model=MODEL, prompt="a blue star", **{name: value})  # type: ignore[call-overload]
        assert caught.value.param == ("width" if name == "size" else name)
        assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(model=MODEL, prompt="a blue star", stream=True)
    assert caught.value.param == "stream"


def test_edits_are_refused_where_no_model_takes_a_picture(client: OpenAI) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (32, 32)).save(picture, "PNG")
    for model in (MODEL, openai.omit):
        with pytest.raises(openai.BadRequestError, match=r"takes .* picture") as caught:
            client.images.edit(model=model, image=picture.getvalue(), prompt="make it blue")
        assert (caught.value.param, caught.value.code) == ("image", "unsupported")
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.edit(model="flux", image=picture.getvalue(), prompt="make it blue")
    assert caught.value.param == "model"


# -- errors --------------------------------------------------------------------------------


def test_errors_are_the_clients_own_classes(pool: LocalPool, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'nix' is not served here; served: stand-in"):
        client.models.retrieve("nix")
    with pytest.raises(openai.NotFoundError, match="no job 'nobody'"):
        client.videos.retrieve("nobody")
    with pytest.raises(openai.BadRequestError, match="'flux' is not served here"):
        client.images.generate(model="flux", prompt="a red circle")
    with pytest.raises(openai.BadRequestError, match="stand-in makes videos; POST /v1/videos"):
        client.images.generate(model="stand-in", prompt="a red circle")
    with pytest.raises(openai.BadRequestError, match=f"{MODEL} makes pictures; POST /v1/images"):
        client.videos.create(model=MODEL, prompt="a red circle")
    with gateway(pool, http_keys=f"me {KEY} per_minute=10", http_wait_s=0.3) as http:
        base = f"{str(http.base_url).rstrip('/')}/v1"
        with pytest.raises(openai.AuthenticationError) as caught:
            OpenAI(base_url=base, api_key="sk-wrong-0123456789").models.list()
        assert caught.value.code == "invalid_api_key"
        mine = OpenAI(base_url=base, api_key=KEY, max_retries=0)
        with pytest.raises(openai.InternalServerError, match="has not ended within"):
            mine.images.generate(
                model=MODEL, prompt="slow", extra_body={"num_inference_steps": 200}
            )
        with pytest.raises(openai.RateLimitError) as limited:
            mine.images.generate(model=MODEL, prompt="slow")
        assert limited.value.code == "rate_limit_exceeded"
        [slow] = http.get("/v1/jobs", headers={"Authorization": f"Bearer {KEY}"}).json()["data"]
        http.delete(f"/v1/jobs/{slow['id']}", headers={"Authorization": f"Bearer {KEY}"})


def test_models_say_what_they_make_and_whether_they_are_ready(client: OpenAI) -> None:
    assert [(m.id, m.task, m.ready) for m in client.models.list()] == [  # type: ignore[attr-defined]
        ("stand-in", "text-to-video", True), (MODEL, "text-to-image", True),
    ]  # fmt: skip
    model = client.models.retrieve(MODEL)
    width = model.parameters["width"]  # type: ignore[attr-defined]
    assert width["default"] % width["multiple_of"] == 0


# -- videos --------------------------------------------------------------------------------


def test_a_video_is_created_polled_fetched_and_deleted(client: OpenAI) -> None:
    created = client.videos.create(
        prompt="a wave", size="64x48", seconds="4",
        extra_body={"num_inference_steps": 60, "seed": 5},
    )  # fmt: skip
    assert (created.object, created.model, created.size) == ("video", "stand-in", "64x48")
    assert created.status in ("queued", "in_progress")
    done = client.videos.poll(created.id, poll_interval_ms=20)
    assert (done.status, done.progress, done.seconds) == ("completed", 100, "4")
    assert done.expires_at is not None
    assert done.completed_at is not None
    assert done.expires_at > done.completed_at >= done.created_at
    content = client.videos.download_content(created.id)
    assert expected("a wave", 5, 60) in content.text
    with pytest.raises(openai.BadRequestError) as caught:
        client.videos.download_content(created.id, variant="thumbnail")
    assert caught.value.param == "variant"
    assert client.videos.delete(created.id).deleted
    for call in (client.videos.retrieve, client.videos.download_content, client.videos.delete):
        with pytest.raises(openai.NotFoundError):
            call(created.id)
    assert created.id not in {video.id for video in client.videos.list()}


def test_a_video_is_downloaded_as_mp4_and_gone_with_its_job(
    pool: LocalPool, client: OpenAI
) -> None:
    """Players show no animated PNG, which is what a decoder leaves; that is there too."""
    done = client.videos.create_and_poll(prompt="a circle", poll_interval_ms=20)
    redis = writing(pool.redis_url)
    frames = animated("PNG", frames=5, fps=16)  # the no-op decoder's file is none
    redis.set(pool.keys.output(done.id, 0), frames, ex=600)
    for _ in range(2):
        answer = client.videos.download_content(done.id)
        assert answer.response.headers["content-type"] == "video/mp4"
        assert answer.response.headers["content-disposition"].endswith(f'{done.id}.mp4"')
        with av.open(io.BytesIO(answer.content)) as movie:
            assert movie.streams.video[0].codec_context.name == "h264"
            assert len(list(movie.decode(video=0))) == 5
    with httpx.Client(base_url=pool.http_url, timeout=WAIT_S) as http:
        original = http.get(f"/v1/videos/{done.id}/content", params={"variant": "original"})
    assert original.content == frames
    assert client.videos.delete(done.id).deleted
    assert not list(redis.scan_iter(f"*{done.id}*"))
    redis.close()


def test_deleting_a_running_video_stops_it(pool: LocalPool, client: OpenAI) -> None:
    video = client.videos.create(prompt="long", extra_body={"num_inference_steps": LONG})
    with pytest.raises(openai.ConflictError, match="its files come at its end"):
        client.videos.download_content(video.id)
    with pool.client() as jobs:
        next(event for event in jobs.events(video.id, WAIT_S) if event.type == "step")
        assert client.videos.retrieve(video.id).status == "in_progress"
        assert client.videos.delete(video.id).deleted
        assert not [job for job in jobs.ps() if job.id == video.id]
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(video.id)


def test_videos_are_listed_newest_first_and_page_by_page(client: OpenAI) -> None:
    made = [client.videos.create(prompt=f"v{i}").id for i in range(5)]
    for video in made:
        assert client.videos.poll(video, poll_interval_ms=10).status == "completed"
    assert [video.id for video in client.videos.list(limit=2)] == made[::-1]  # all pages
    assert client.videos.list(limit=2).has_more
    assert [v.id for v in client.videos.list(limit=2, order="asc").data] == made[:2]
    assert [v.id for v in client.videos.list(after=made[1]).data] == made[:1]
    client.videos.delete(made[2])
    page = client.videos.list(limit=2)
    assert [v.id for v in page.data] == made[:2:-1]
    assert page.has_more
    for video in {*made} - {made[2]}:
        client.videos.delete(video)


def test_what_a_video_cannot_have_is_refused(client: OpenAI) -> None:
    for asked, param in (
        ({"seconds": "no"}, "seconds"),
        ({"seconds": "0.01"}, "seconds"),
        ({"seconds": "4", "extra_body": {"num_frames": 5}}, "seconds"),
        ({"size": "33x32"}, "width"),
        ({"input_reference": b"a picture"}, "input_reference"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"extra_body": {"payload": "{}"}}, "payload"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.videos.create(prompt="a wave", **asked)  # type: ignore[arg-type]
        assert caught.value.param == param, asked


def test_a_video_may_be_asked_for_as_json(pool: LocalPool) -> None:
    body = {"prompt": "a wave", "seconds": 1.5, "fps": 8, "num_inference_steps": 3}
    with httpx.Client(base_url=pool.http_url, timeout=WAIT_S) as http:
        answer = http.post("/v1/videos", json=body, headers={"Prefer": "wait=20"})
        assert (answer.status_code, answer.json()["status"]) == (200, "completed")
        assert answer.json()["seconds"] == "1.5"
        job = http.get(f"/v1/jobs/{answer.json()['id']}").json()
        assert (job["params"]["num_frames"], job["params"]["fps"]) == (13, 8)
        http.delete(answer.headers["location"])
        body["input_reference"] = {"image_url": "http://127.0.0.1/x.png"}
        answer = http.post("/v1/videos", json=body)
        assert "URLs are not fetched" in error_of(answer, 400)["message"]


@pytest.mark.parametrize(
    ("frames", "right"), [(151, 153), (149, 149), (65, 65), (2, 1), (260, 257), (400, 401)]
)
def test_seconds_become_frames_that_the_model_makes(frames: int, right: int) -> None:
    """The nearest; what is beyond its bounds stays there, to be refused."""
    assert _nearest(frames, {"min": 1, "max": 260, "step": 4}) == right
    assert _nearest(frames, {"min": 1, "max": 1000}) == frames


# -- the page in docs ----------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    """The fenced blocks of docs/http.md in one language."""
    page = (ROOT / "docs" / "http.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_the_example_prints_what_the_docs_show(
    pool: LocalPool, capsys: pytest.CaptureFixture[str]
) -> None:
    http_openai.main(pool.http_url)
    [shown] = blocks("text")
    assert plain(capsys.readouterr().out) == plain(shown)


def plain(printed: str) -> str:
    """Without what differs from run to run: ids and the port."""
    return re.sub(r"[0-9a-f]{32}|:\d{4,5}/", "…", printed)


def test_the_commands_in_the_docs_work(pool: LocalPool, tmp_path: Path) -> None:
    [script] = blocks("sh")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script.replace("http://127.0.0.1:8000", pool.http_url)],
        cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not re.search(r'"error": ?{', done.stdout)
    assert "event: succeeded" in done.stdout
    assert opened((tmp_path / "ring.png").read_bytes()).size == (128, 128)


def test_the_python_in_the_docs_works(pool: LocalPool, capsys: pytest.CaptureFixture[str]) -> None:
    [program] = blocks("python")
    exec(program.replace("http://127.0.0.1:8000", pool.http_url), {})
    assert capsys.readouterr().out == "2 1 True\n"
