"""Commands of `slackwater`, run in this process on a given pool."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from services.cli.main import main


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Said]


def commands(
    redis_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Runs a command on the pool at `redis_url`; its exit code and what it printed."""
    monkeypatch.setenv("SLACKWATER_REDIS_URL", redis_url)

    def run(*words: str) -> Said:
        code = main(list(words))
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return run
