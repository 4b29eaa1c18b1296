"""Reads the pages that --html writes."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """What a page holds: its data, what it would load, and whether every tag is closed."""

    VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.data = ""
        self.cells: list[str] = []
        self._inside: dict[str, str | None] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = dict(attrs)
        self.loads += [str(v) for k, v in attrs if k in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"] and self._inside.get("id") == "data":
            self.data += data
        if self.open[-1:] == ["td"]:
            self.cells.append(data)


def data_of(text: str) -> Any:
    return json.loads(Page(text).data)
