"""Addresses of files: signed where the gateway asks for a key, so that a browser can show them."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Links:
    """Makes and checks links. Without a `secret` they are bare: whoever asks gets the file."""

    base: str
    secret: bytes | None
    valid_s: float

    def output(self, job: str, n: int) -> str:
        path = f"/v1/jobs/{job}/output/{n}"
        if self.secret is None:
            return self.base + path
        expires = int(time.time() + self.valid_s)
        return f"{self.base}{path}?expires={expires}&signature={self._sign(path, expires)}"

    def allows(self, path: str, expires: str | None, signature: str | None) -> bool:
        """Whether a request came by a link that was made here and has not expired."""
        if self.secret is None or not expires or not signature:
            return False
        if not re.fullmatch(r"\d{1,12}", expires, re.ASCII) or int(expires) < time.time():
            return False
        right = self._sign(path, int(expires))
        return hmac.compare_digest(right.encode(), signature.encode())

    def _sign(self, path: str, expires: int) -> str:
        assert self.secret is not None
        return hmac.new(self.secret, f"{path} {expires}".encode(), hashlib.sha256).hexdigest()[:32]
