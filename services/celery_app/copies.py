"""Copies the files of a job to where it asked for, by fsspec: a cloud's bucket, a folder."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec  # type: ignore[import-untyped]

from common.client import Client, file_names
from common.errors import JobError, ResultExpired, UnknownJob
from common.outgoing import NotAllowed
from common.uploads import Prefixes
from services.celery_app.attempts import Failed, GiveUp

FILE = "file://"


def copy_outputs(client: Client, job: str, url: str, prefixes: Prefixes) -> list[str]:
    """Write each file of a job that succeeded below `url`; returns their URLs.

    A repeat writes the same again. Raises Failed, which may be tried again, or GiveUp.
    """
    try:
        prefix = prefixes.check(url)
    except NotAllowed as error:
        raise GiveUp(str(error)) from error
    try:
        result = client.result(job)
        if result is None:
            raise GiveUp(f"job {job} has not ended")
        names = [path.name for path in file_names(job, result.outputs, Path())]
        contents = [client.output(job, n) for n in range(len(names))]
    except (ResultExpired, JobError, UnknownJob) as error:
        raise GiveUp(str(error)) from error
    urls = [f"{url.rstrip('/')}/{name}" for name in names]
    for target, content in zip(urls, contents, strict=True):
        _write(target, content, prefix)
    return urls


def _write(url: str, content: bytes, prefix: str) -> None:
    try:
        system, path = fsspec.core.url_to_fs(url)
        if url.startswith(FILE):
            _inside(Path(path), Path(prefix.removeprefix(FILE)))
        system.makedirs(os.path.dirname(path), exist_ok=True)
        part = path + ".part" if url.startswith(FILE) else path
        with system.open(part, "wb") as file:
            file.write(content)
        if part != path:  # other systems show an object when it is whole
            os.replace(part, path)
    except GiveUp:
        raise
    except ImportError as error:
        raise GiveUp(f"{url.split(':')[0]} wants another package: {error}") from error
    except Exception as error:  # each file system raises its own
        raise Failed(f"{type(error).__name__}: {error}") from error


def _inside(path: Path, root: Path) -> None:
    """No link may lead out of the operator's folder. Raises GiveUp."""
    real = Path(os.path.realpath(path.parent)) / path.name
    if not real.is_relative_to(os.path.realpath(root)) or path.is_symlink():
        raise GiveUp(f"{path} leads out of {root}")
