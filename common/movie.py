"""A video that came as one animated picture, as H.264 in MP4, which every player shows."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
from fractions import Fraction
from math import gcd
from pathlib import Path
from typing import Any

import av
from PIL import Image, ImageSequence, UnidentifiedImageError

picture_of: Any = av.VideoFrame.from_image  # untyped
# Near enough to lossless that nobody sees a difference.
CRF = "17"
MIME = "video/mp4"


def to_mp4(
    animated: bytes, fps: float | None = None, frames: int | None = None
) -> tuple[bytes, int, Fraction]:
    """The MP4, how many frames it has, and how many a second. Raises ValueError for what is no
    video. A repeat makes the same, though now and then x264 packs it into other bytes.

    `fps` and `frames` are what the job asked for (`asked`); without `fps` only an animated PNG or
    WebP is a video, and its durations, whole milliseconds, must tell.
    """
    try:
        with Image.open(io.BytesIO(animated)) as picture:
            shown_ms = _durations(picture)
            if not fps and not all(shown_ms):
                raise ValueError("the file is a single picture, not a video")
            rate = Fraction(fps).limit_denominator(1001) if fps else _fps(gcd(*shown_ms))
            times = _repeats(shown_ms, rate, frames)
            return _encode(picture, rate, times), sum(times), rate
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError("the file is no picture that can be read") from error


def asked(params: Mapping[str, Any]) -> dict[str, Any]:
    """What `to_mp4` wants to know of a job, from its parameters."""
    return {"fps": params.get("fps"), "frames": params.get("num_frames")}


def _durations(picture: Image.Image) -> list[int]:
    """Milliseconds that each picture of the file is shown; 0 of one that does not move."""
    shown_ms = []
    for frame in ImageSequence.Iterator(picture):
        frame.load()
        shown_ms.append(round(frame.info.get("duration") or 0))
    return shown_ms


def _repeats(shown_ms: list[int], fps: Fraction, frames: int | None) -> list[int]:
    """How many frames each picture stands for: whoever writes the file leaves out one that equals
    the one before, which is then shown for longer."""
    if not all(shown_ms):
        return [frames or 1]
    frame_ms = max(1, round(1000 / fps))  # as images.encode_video writes it
    return [max(1, round(ms / frame_ms)) for ms in shown_ms]


def _fps(duration_ms: int) -> Fraction:
    """Durations are whole milliseconds: 62 is 16 frames a second, not 16.129."""
    fps = Fraction(1000, duration_ms)
    whole = round(fps)
    return Fraction(whole) if whole and round(1000 / whole) == duration_ms else fps


def _encode(picture: Image.Image, fps: Fraction, times: list[int]) -> bytes:
    """Frame by frame: a long video is never in memory as pixels."""
    width, height = picture.size
    with tempfile.TemporaryDirectory(prefix="slackwater-") as folder:
        path = Path(folder) / "movie.mp4"  # a file: its index is moved to its front at the end
        with av.open(path, "w", options={"movflags": "+faststart"}) as container:
            stream = container.add_stream("libx264", rate=fps, options={"crf": CRF})
            stream.width, stream.height = width, height
            # Players want half as many colours as pixels, which odd sizes cannot have.
            stream.pix_fmt = "yuv420p" if width % 2 == 0 == height % 2 else "yuv444p"
            for frame, shown in zip(ImageSequence.Iterator(picture), times, strict=True):
                pixels = frame.convert("RGB")
                for _ in range(shown):
                    container.mux(stream.encode(picture_of(pixels)))
            container.mux(stream.encode())
        return path.read_bytes()
