"""A video that came as one animated picture, as H.264 in MP4, which every player shows."""

from __future__ import annotations

import io
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from PIL import Image, ImageSequence, UnidentifiedImageError

from common.client import Client

picture_of: Any = av.VideoFrame.from_image  # untyped
# Near enough to lossless that nobody sees a difference.
CRF = "17"
MIME = "video/mp4"


def make_movie(client: Client, redis: Any, job: str, n: int, ttl_s: float) -> dict[str, Any]:
    """Make it and keep it beside the file; returns key, mime, bytes, frames and fps.

    Raises JobError, IndexError or ResultExpired for a file that is not there, ValueError for one
    that is no video. A repeat makes the same.
    """
    content, frames, fps = to_mp4(client.output(job, n))
    key = client.keys.movie(job, n)
    redis.set(key, content, px=round(1000 * ttl_s))
    return {"key": key, "mime": MIME, "bytes": len(content), "frames": frames, "fps": float(fps)}


def to_mp4(animated: bytes) -> tuple[bytes, int, Fraction]:
    """The MP4, how many frames it has, and how many a second. Raises ValueError."""
    try:
        with Image.open(io.BytesIO(animated)) as picture:
            frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(picture)]
            duration_ms = picture.info.get("duration") or 0
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError("the file is no picture that can be read") from error
    if len(frames) < 2 or duration_ms <= 0:
        raise ValueError("the file is a single picture, not a video")
    # Durations are whole milliseconds: 62 is 16 frames a second, not 16.129.
    fps = Fraction(1000 / duration_ms).limit_denominator(1000)
    whole = round(fps)
    if round(1000 / whole) == round(duration_ms):
        fps = Fraction(whole)
    width, height = frames[0].size
    with tempfile.TemporaryDirectory(prefix="slackwater-") as folder:
        path = Path(folder) / "movie.mp4"  # a file: its index is moved to its front at the end
        with av.open(path, "w", options={"movflags": "+faststart"}) as container:
            stream = container.add_stream("libx264", rate=fps, options={"crf": CRF})
            stream.width, stream.height = width, height
            # Players want half as many colours as pixels, which odd sizes cannot have.
            stream.pix_fmt = "yuv420p" if width % 2 == 0 == height % 2 else "yuv444p"
            for frame in frames:
                container.mux(stream.encode(picture_of(frame)))
            container.mux(stream.encode())
        return path.read_bytes(), len(frames), fps
