"""From an animated picture to MP4, read back by a decoder."""

from __future__ import annotations

import io

import av
import pytest
from PIL import Image

from common.movie import to_mp4
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
