"""A self-signed certificate for a test's own server."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def self_signed(folder: Path, name: str, *alternatives: str) -> tuple[Path, Path]:
    """Certificate and key as PEM files for `name`, made by openssl; "IP:…" or "DNS:…" besides."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    names = ",".join((f"DNS:{name}", *alternatives))
    made = subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "2",
         "-subj", f"/CN={name}", "-addext", f"subjectAltName={names}"],
        capture_output=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return certificate, key
