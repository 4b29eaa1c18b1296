"""One line a transition, the job's id in each."""

from __future__ import annotations

import logging


def set_up(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(name)s %(levelname).1s %(message)s"
    )
    for noisy in ("diffusers", "transformers", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
