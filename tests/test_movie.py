"""From an animated picture to MP4, read back by a decoder."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from PIL import Image

from common.models.images import encode_video
from common.movie import asked, to_mp4
from tests.animations import SIZE, animated, shade

NEAR = 12  # of 255: chroma is halved and rounded


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("fps", [16, 24, 8])
def test_every_frame_is_there_at_its_time(kind: str, fps: int) -> None:
    """As many frames, their size and colours, and the frames a second that were asked for, though
    an animated picture keeps whole milliseconds only."""
    made, frames, rate = to_mp4(animated(kind, 5, fps))
    assert (frames, rate) == (5, fps)
    with av.open(io.BytesIO(made)) as movie:
        stream = movie.streams.video[0]
        assert stream.codec_context.name == "h264"
        assert stream.average_rate == fps
        pictures = [frame.to_image() for frame in movie.decode(stream)]
    assert len(pictures) == 5
    for n, picture in enumerate(pictures):
        assert picture.size == SIZE
        found = picture.getpixel((30, 20))
        assert all(abs(a - b) <= NEAR for a, b in zip(found, shade(n), strict=True))


def decoded(movie: bytes) -> tuple[float, list[Image.Image]]:
    """Its frames a second, and its frames."""
    with av.open(io.BytesIO(movie)) as file:
        stream = file.streams.video[0]
        assert stream.average_rate is not None
        return float(stream.average_rate), [frame.to_image() for frame in file.decode(stream)]


@pytest.mark.parametrize("kind", ["png", "webp"])
@pytest.mark.parametrize("grey", [[0, 0, 0, 90, 180, 180], [0, 90, 90, 90], [50] * 4, [50]])
def test_frames_that_equal_the_one_before_are_there_too(kind: str, grey: list[int]) -> None:
    """The file keeps one picture of them, shown for longer; of a video that does not move at all,
    one picture and no duration."""
    frames = np.array(grey, np.uint8)[:, None, None, None].repeat(32, 1).repeat(32, 2).repeat(3, 3)
    file = encode_video(frames, 16, kind).content
    movie, count, rate = to_mp4(file, fps=16, frames=len(grey))
    fps, pictures = decoded(movie)
    assert (fps, rate, count) == (16, 16, len(grey))
    found = [picture.getpixel((9, 9))[0] for picture in pictures]
    assert found == pytest.approx(grey, abs=NEAR)
    if len(set(grey)) > 1:  # durations alone tell as much
        assert to_mp4(file)[1:] == (count, rate)


@pytest.mark.parametrize("fps", [60, 120, 29.97])
def test_it_plays_as_fast_as_the_job_asked(fps: float) -> None:
    """Whole milliseconds a frame would say 59, 125 and 30."""
    movie, *_ = to_mp4(animated("PNG", 3, fps), **asked({"fps": fps, "num_frames": 3}))
    assert decoded(movie)[0] == pytest.approx(fps)


def test_odd_sizes_are_kept() -> None:
    made, *_ = to_mp4(animated("PNG", 2, 10, (33, 17)))
    with av.open(io.BytesIO(made)) as movie:
        assert next(movie.decode(movie.streams.video[0])).to_image().size == (33, 17)


def test_what_is_no_video_is_refused() -> None:
    still = io.BytesIO()
    Image.new("RGB", (8, 8)).save(still, format="PNG")
    for content, said in ((still.getvalue(), "single picture"), (b"{}", "no picture")):
        with pytest.raises(ValueError, match=said):
            to_mp4(content)
