"""A headless Chromium for tests of pages; skips where there is none."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
# Pages are drawn by the CPU here, beside whatever else it does.
PATIENCE_MS = 30_000


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A running browser (playwright's, synchronous)."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS, env=dict(os.environ))
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page, and what it complained about or asked others for."""

    def __init__(self, browser: Any, origin: str, **options: Any) -> None:
        self.origin = origin
        self.complaints: list[str] = []
        self.strangers: list[str] = []
        self.dialogs: list[str] = []
        self._context = browser.new_context(**options)
        self.page = self._context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._asked)
        self.page.on("request", self._requested)

    def close(self) -> None:
        self._context.close()

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _asked(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def _requested(self, request: Any) -> None:
        if not request.url.startswith((self.origin, "data:")):
            self.strangers.append(request.url)
