"""A video that came as one animated picture, as H.264 in MP4, which every player shows."""

from __future__ import annotations

import io
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from PIL import Image, ImageSequence, UnidentifiedImageError

picture_of: Any = av.VideoFrame.from_image  # untyped
# Near enough to lossless that nobody sees a difference.
CRF = "17"
MIME = "video/mp4"


def to_mp4(animated: bytes) -> tuple[bytes, int, Fraction]:
    """The MP4, how many frames it has, and how many a second. Raises ValueError for what is no
    animated PNG or WebP. The same bytes make the same movie."""
    try:
        with Image.open(io.BytesIO(animated)) as picture:
            frames = getattr(picture, "n_frames", 1)
            picture.load()
            duration_ms = picture.info.get("duration") or 0
            if frames < 2 or duration_ms <= 0:
                raise ValueError("the file is a single picture, not a video")
            fps = _fps(duration_ms)
            return _encode(picture, fps), frames, fps
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError("the file is no picture that can be read") from error


def _fps(duration_ms: float) -> Fraction:
    """Durations are whole milliseconds: 62 is 16 frames a second, not 16.129."""
    fps = Fraction(1000 / duration_ms).limit_denominator(1000)
    whole = round(fps)
    return Fraction(whole) if whole and round(1000 / whole) == round(duration_ms) else fps


def _encode(picture: Image.Image, fps: Fraction) -> bytes:
    """Frame by frame: a long video is never in memory as pixels."""
    width, height = picture.size
    with tempfile.TemporaryDirectory(prefix="slackwater-") as folder:
        path = Path(folder) / "movie.mp4"  # a file: its index is moved to its front at the end
        with av.open(path, "w", options={"movflags": "+faststart"}) as container:
            stream = container.add_stream("libx264", rate=fps, options={"crf": CRF})
            stream.width, stream.height = width, height
            # Players want half as many colours as pixels, which odd sizes cannot have.
            stream.pix_fmt = "yuv420p" if width % 2 == 0 == height % 2 else "yuv444p"
            for frame in ImageSequence.Iterator(picture):
                container.mux(stream.encode(picture_of(frame.convert("RGB"))))
            container.mux(stream.encode())
        return path.read_bytes()
