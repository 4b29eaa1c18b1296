"""Where the files of jobs may be copied to: below a prefix that the operator listed.

A URL is one of fsspec's (`s3://bucket/out/7`, `file:///srv/out/7`), read in one way only: what
two programs could read as two places is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.outgoing import NotAllowed

FIELD = "upload_url"
SETTING = "upload_prefixes"
MOST_CHARS = 1024

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
# No `::` (fsspec chains file systems by it), no query, no escape, nothing that ends a word.
_PATH = re.compile(r"[A-Za-z0-9._~/@=+,-]*")


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The operator's list, each entry with a slash at its end."""

    urls: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Prefixes:
        """From the setting: entries with commas, spaces or lines between. Raises ValueError."""
        found = []
        for word in text.replace(",", " ").split():
            try:
                _read(word.rstrip("/") + "/", SETTING)
            except NotAllowed as error:
                raise ValueError(
                    f"{error} (in {word!r}; an entry is like s3://bucket/out)"
                ) from None
            found.append(word.rstrip("/") + "/")
        return cls(tuple(found))

    def check(self, url: str) -> str:
        """The prefix that `url` lies below; asks nobody. Raises NotAllowed."""
        if not self.urls:
            raise NotAllowed(
                FIELD, f"this pool uploads nowhere; its operator can list URLs in {SETTING}"
            )
        _read(url, FIELD)
        for prefix in self.urls:
            if (url.rstrip("/") + "/").startswith(prefix):
                return prefix
        raise NotAllowed(FIELD, f"{url[:64]!r} is below none of {', '.join(self.urls)}")


def _read(url: str, field: str) -> None:
    scheme, separator, path = url.partition("://")
    if len(url) > MOST_CHARS:
        raise NotAllowed(field, f"has {len(url)} characters; up to {MOST_CHARS} are allowed")
    if not separator or not _SCHEME.fullmatch(scheme):
        raise NotAllowed(field, "must be a whole URL, such as s3://bucket/folder")
    if scheme in ("http", "https"):
        raise NotAllowed(field, f"{scheme} has no folders to write to; use callback_url")
    if not _PATH.fullmatch(path):
        raise NotAllowed(field, "may have letters, digits and . _ ~ @ = + , - / behind its scheme")
    parts = path.lstrip("/").rstrip("/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise NotAllowed(field, "must not have an empty part, . or .. in its path")
