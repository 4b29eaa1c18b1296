"""Logs: one line a transition, the job's id in each; for people, or as JSON for a log store.

What a line says in words stands in its `extra` fields too: job, seq, stage, worker, step,
slack_s, … In JSON they are keys of the object, so that `job` finds all lines of a job.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

HUMAN = "%(asctime)s %(name)s %(levelname).1s %(message)s"
# What every record has: the rest came by `extra`.
_OWN = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """An object a line: time, level, logger, message, and the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **{k: v for k, v in vars(record).items() if k not in _OWN and v is not None},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def set_up(level: str, form: str = "human") -> None:
    """`form`: human or json."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(HUMAN))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for noisy in ("diffusers", "transformers", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
