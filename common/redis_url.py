"""What a Redis URL says, beyond what redis-py reads in one: Sentinels, and a password in a file.

    redis://user:password@host:6379/0            rediss:// is the same with TLS
    unix:///path/to/socket?db=0
    sentinel://user:password@host:26379,other:26379/mymaster/0        sentinels:// with TLS

Options follow a "?": `password_file=/path` (read anew at each connection, so that a password can
be changed) or `password_env=NAME` of an environment variable, which may be unset: no password;
`ssl_ca_certs=/path` and redis-py's other `ssl_…`; those in OPTIONS; with Sentinels
`sentinel_username`, `sentinel_password` and `sentinel_password_file` for the Sentinels themselves.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from redis.credentials import CredentialProvider

SENTINEL_PORT = 26379
SENTINEL_SCHEMES = {"sentinel": "redis", "sentinels": "rediss"}
SCHEMES = ("redis", "rediss", "unix", *SENTINEL_SCHEMES)
# Those of redis-py's that leave replies as they are read here; the names of others are refused.
OPTIONS = frozenset({
    "db", "username", "password", "client_name", "max_connections", "health_check_interval",
    "socket_timeout", "socket_connect_timeout", "socket_keepalive",
})  # fmt: skip
# Whatever is secret among the options.
SECRET = re.compile(r"password(?!_file|_env)", re.IGNORECASE)

REMEDY = (
    "a Redis URL is like redis://user:password@host:6379/0; of a password, every character but "
    "letters, digits and -._~ is written as %XX"
)


class FilePassword(CredentialProvider):
    """A password that stands in a file, and nowhere else."""

    def __init__(self, path: str, user: str = "") -> None:
        """Raises ValueError where the file cannot be read: at the start, not at a reconnection."""
        self._path, self._user = Path(path), user
        try:
            self._read()
        except OSError as error:
            raise ValueError(f"password_file {path} cannot be read: {error.strerror}") from error

    def _read(self) -> str:
        return self._path.read_text().strip()

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._read()
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """`url` is what redis-py takes, without what stands in the other fields."""

    url: str = field(repr=False)
    credentials: CredentialProvider | None = None
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""
    # How the Sentinels themselves are reached.
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Raises ValueError, which shows nothing of a password."""
        try:
            return _parse(url)
        except ValueError as error:
            if isinstance(error, _Known):
                raise ValueError(f"redis_url: {error}") from None
            raise ValueError(f"redis_url: {shown(url)} cannot be read; {REMEDY}") from None


class _Known(ValueError):
    """A message of our own, in which no part of the URL stands unseen."""


def _parse(url: str) -> RedisUrl:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise _Known(f"must begin with {', '.join(s + '://' for s in SCHEMES)}")
    options = dict(parse_qsl(parts.query))
    login, at, where = parts.netloc.rpartition("@")
    credentials: CredentialProvider | None = None
    path, variable = options.pop("password_file", ""), options.pop("password_env", "")
    user, _, password = login.partition(":")
    if bool(password) + bool(path) + bool(variable) > 1:
        raise _Known("has a password and a password_file or password_env; leave one out")
    if path:
        credentials, login, at = _file_password(path, unquote(user)), "", ""
    elif variable and os.environ.get(variable):
        login, at = f"{user}:{quote(os.environ[variable], safe='')}", "@"
    tls = parts.scheme in ("rediss", "sentinels")
    if parts.scheme in SENTINEL_SCHEMES:
        asked = _sentinel_options(options)
    _check_options(options)
    if not tls and any(name.startswith("ssl_") for name in options):
        raise _Known("has ssl_ options, which want rediss:// or sentinels://")
    if parts.scheme not in SENTINEL_SCHEMES:
        _ = parts.port  # raises for what is none
        return RedisUrl(
            _joined(parts.scheme, f"{login}{at}{where}", parts.path, options), credentials
        )
    service, _, db = parts.path.strip("/").partition("/")
    if not where or not service:
        raise _Known("a sentinel:// URL is like sentinel://host:26379,other:26379/mymaster/0")
    if tls:
        asked |= {"ssl": True, **{k: v for k, v in options.items() if k.startswith("ssl_")}}
    # The host is the one that the Sentinels will name.
    plain = _joined(SENTINEL_SCHEMES[parts.scheme], f"{login}{at}sentinel", f"/{db or 0}", options)
    return RedisUrl(plain, credentials, _hosts(where), unquote(service), asked)


def _check_options(options: dict[str, str]) -> None:
    if options.get("protocol") == "2":  # which it is anyway
        del options["protocol"]
    for name in options:
        if name not in OPTIONS and not name.startswith("ssl_"):
            raise _Known(
                f"has the option {name[:32]!r}, which cannot be used here; there are "
                f"{', '.join(sorted(OPTIONS))}, ssl_…, password_file, password_env and, with "
                "Sentinels, sentinel_…"
            )


def _joined(scheme: str, netloc: str, path: str, options: dict[str, str]) -> str:
    return f"{scheme}://{netloc}{path}" + ("?" + urlencode(options) if options else "")


def _file_password(path: str, user: str) -> FilePassword:
    try:
        return FilePassword(path, user)
    except ValueError as error:
        raise _Known(str(error)) from None


def _sentinel_options(options: dict[str, str]) -> dict[str, Any]:
    """Takes the Sentinels' own options out."""
    user = options.pop("sentinel_username", "")
    password = options.pop("sentinel_password", "")
    path = options.pop("sentinel_password_file", "")
    if path:
        return {"credential_provider": _file_password(path, user)}
    return {"username": user or None, "password": password} if password else {}


def _hosts(text: str) -> tuple[tuple[str, int], ...]:
    """ "a:26379,[::1]" -> (("a", 26379), ("::1", 26379))."""
    found = []
    for word in filter(None, text.split(",")):
        one = urlsplit(f"//{word}")
        if not one.hostname:
            raise ValueError(word)
        found.append((one.hostname, one.port or SENTINEL_PORT))
    return tuple(found)


def user_of(url: str) -> str:
    """Who logs in."""
    try:
        return unquote(urlsplit(url).username or "") or "default"
    except ValueError:
        return "?"


def shown(url: str) -> str:
    """The URL without its secrets, for people and logs; of one that cannot be read, too little."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "***" if "@" in url else url
    where, question, query = rest.partition("?")
    if "@" in query:  # the "?" may be one of the password's characters, or the "@" be in an option
        return f"{scheme}://***"
    login, at, where = where.rpartition("@")
    if ":" in login:
        login = login.partition(":")[0] + ":***"
    pairs = [(k, "***" if SECRET.search(k) else v) for k, v in parse_qsl(query)]
    return f"{scheme}://{login}{at}{where}{question}" + urlencode(pairs, safe="*/", quote_via=quote)
