"""Whether jobs of several sizes share a forward pass: what the model can, and what was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.models import ragged

if TYPE_CHECKING:
    from common.models.model import Model

CHOICES = ("auto", "on", "off")
# A profile must show this much for `auto`; repeated measurements differ by a few per cent.
PAYS = 1.05


def possible(model: Model) -> bool:
    """Whether the family's rows may differ in size, and this transformer is one that takes them."""
    how = model.quirks.batching
    transformer = getattr(model.pipe, "transformer", None)
    return how is not None and how.mixes and ragged.usable(transformer)


def choose(setting: str, model: Model) -> ragged.Form | None:
    """How sizes are mixed in one forward; None: one forward a size.

    `auto` is what the model's profile.json says of this kind of device, and None without one.
    Where the model cannot, `on` changes nothing.
    """
    if setting not in CHOICES:
        raise ValueError(f"mixed sizes {setting!r} is none of {', '.join(CHOICES)}")
    if setting == "off" or not possible(model):
        return None
    profile = model.directory.profile
    measured = profile.get("mixed") or {}
    pays = profile.get("device") == model.device.type and measured.get("speedup", 0.0) >= PAYS
    return "packed" if setting == "on" or pays else None
