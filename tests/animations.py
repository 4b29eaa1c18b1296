"""Small videos as the decoder leaves them: one animated picture."""

from __future__ import annotations

import io

from PIL import Image

SIZE = (64, 48)


def shade(n: int) -> tuple[int, int, int]:
    """The colour of the n-th frame."""
    return 40 * n % 256, 90, 200 - 30 * n % 200


def animated(kind: str, frames: int, fps: float, size: tuple[int, int] = SIZE) -> bytes:
    """`kind`: PNG or WEBP."""
    pictures = [Image.new("RGB", size, shade(n)) for n in range(frames)]
    file = io.BytesIO()
    pictures[0].save(
        file, format=kind, save_all=True, append_images=pictures[1:], duration=round(1000 / fps),
        loop=0, **({"quality": 100} if kind == "WEBP" else {}),
    )  # fmt: skip
    return file.getvalue()
