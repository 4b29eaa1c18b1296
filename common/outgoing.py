"""Where this pool may send to: webhooks and uploads go to URLs that clients chose.

Nothing is allowed unless the operator lists it (`outgoing_hosts`), and a listed name must still
resolve to public addresses only: a name's owner could point it at this network otherwise. The
sender connects to the very addresses that were checked (common/outgoing_http.py), because a
second look-up may answer differently.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from common.checks import InvalidRequest

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# A name and a port to its addresses, as text; raises OSError where there are none.
Resolver = Callable[[str, int], Sequence[str]]

FIELD = "callback_url"
SETTING = "outgoing_hosts"
MOST_CHARS = 2048
PORTS = {"https": 443, "http": 80}

# What stands in a URL for other readers than us: two parsers must not see two hosts in it.
_STRANGE = re.compile(r"[^\x21-\x7e]|[\\<>^`{|}\"]")
_NAME = re.compile(
    r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*"
)

_V6_PUBLIC = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Instance metadata (which hands out the machine's own credentials), what reaches this very host by
# another name, and tunnels that hide where they end. Not even an operator's list opens these.
NEVER: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8", "169.254.0.0/16", "100.100.100.200/32", "192.0.0.192/32", "168.63.129.16/32",
        "224.0.0.0/4", "255.255.255.255/32",
        "::/128", "fe80::/10", "fd00:ec2::254/128", "fd20:ce::254/128", "ff00::/8", "2002::/16",
        "2001::/32",
    )
)  # fmt: skip


class NotAllowed(InvalidRequest):
    """A URL that this pool does not send to; trying again changes nothing."""


class Unresolved(ConnectionError):
    """A name that has no address now; it may have one later."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One listed host: "*.example.com" stands for every name below it, not for itself."""

    scheme: str
    host: str
    port: int

    def fits(self, scheme: str, host: str, port: int) -> bool:
        if (scheme, port) != (self.scheme, self.port):
            return False
        if self.host.startswith("*."):
            return host.endswith(self.host[1:]) and _address(host) is None
        return host == self.host


@dataclass(frozen=True, slots=True)
class Place:
    """A URL's parts once it was found on the list; `host` in lower case, without brackets."""

    url: str
    scheme: str
    host: str
    port: int
    field: str


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that may be sent to, and the addresses that were checked, in the resolver's order."""

    url: str
    scheme: str
    host: str
    port: int
    addresses: tuple[str, ...]


def resolve(host: str, port: int) -> list[str]:
    """Every address of a name, by the system's resolver."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


class Allowed:
    """The operator's list."""

    def __init__(
        self, entries: Sequence[Entry], networks: Sequence[Network], resolver: Resolver = resolve
    ) -> None:
        self.entries, self.networks, self._resolver = tuple(entries), tuple(networks), resolver

    def __bool__(self) -> bool:
        """False: nothing at all may be sent to."""
        return bool(self.entries)

    @classmethod
    def parse(cls, text: str, resolver: Resolver = resolve) -> Allowed:
        """From the setting: entries behind each other, with commas, spaces or lines between.

        `hooks.example.com` (https, port 443), `hooks.example.com:8443`, `http://10.0.0.5:8080`,
        `*.example.com`, and networks such as `10.0.0.0/16`: their addresses count as public.
        An address listed as a host counts as public too. Raises ValueError, which names the entry.
        """
        entries: list[Entry] = []
        networks: list[Network] = []
        for word in text.replace(",", " ").split():
            network = _network(word)
            if network is not None:
                networks.append(network)
                continue
            entry = _entry(word)
            entries.append(entry)
            address = _address(entry.host)
            if address is not None:
                networks.append(ipaddress.ip_network(address))
        return cls(entries, networks, resolver)

    def listed(self, url: str, field: str = FIELD) -> Place:
        """Whether the operator listed it; asks nobody. Raises NotAllowed."""
        if not self.entries:
            raise NotAllowed(
                field, f"this pool sends nowhere; its operator can list hosts in {SETTING}"
            )
        scheme, host, port = _parts(url, field)
        if any(entry.fits(scheme, host, port) for entry in self.entries):
            return Place(url, scheme, host, port, field)
        shown = f"{scheme}://{_bracketed(host)}" + ("" if port == PORTS[scheme] else f":{port}")
        raise NotAllowed(
            field, f"{shown} is not listed; the pool's operator can add it to {SETTING}"
        )

    def check(self, url: str, field: str = FIELD) -> Target:
        """Whether it may be sent to now, by every address of its name.

        Raises NotAllowed, or Unresolved where the name has no address.
        """
        place = self.listed(url, field)
        literal = _address(place.host)
        if literal is not None:
            found: Sequence[str] = [place.host]
        else:
            try:
                found = self._resolver(place.host, place.port)
            except (OSError, UnicodeError) as error:
                raise Unresolved(f"{field}: {place.host} has no address now: {error}") from error
            if not found:
                raise Unresolved(f"{field}: {place.host} has no address now")
        for text in found:
            self._check_address(place, text)
        return Target(url, place.scheme, place.host, place.port, tuple(found))

    def _check_address(self, place: Place, text: str) -> None:
        """One that is not public fails the whole name: which one is dialled is up to chance."""
        address = _inner(ipaddress.ip_address(text))
        if any(address in network for network in NEVER):
            raise NotAllowed(
                place.field, f"{place.host} is at {text}, to which nothing is ever sent"
            )
        if _public(address) or any(address in network for network in self.networks):
            return
        raise NotAllowed(
            place.field,
            f"{place.host} is at {text}, which is not a public address; the pool's operator can "
            f"add its network to {SETTING}",
        )


def _parts(url: str, field: str) -> tuple[str, str, int]:
    """Scheme, host and port of a URL that every parser reads in the same way."""
    if len(url) > MOST_CHARS:
        raise NotAllowed(field, f"has {len(url)} characters; up to {MOST_CHARS} are allowed")
    if _STRANGE.search(url):
        raise NotAllowed(
            field, "has characters that a URL may not have; write them as %XX (in a name: xn--…)"
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise NotAllowed(field, f"is no URL: {error}") from error
    if parts.scheme not in PORTS:
        raise NotAllowed(field, "must begin with https:// (or http://, where that is listed)")
    if "@" in parts.netloc:
        raise NotAllowed(field, "must not have a user or password in it")
    if parts.fragment or url.endswith("#"):
        raise NotAllowed(field, "must not have a fragment (#…): nobody would get it")
    address = _address(host)
    if address is None and not _NAME.fullmatch(host):
        raise NotAllowed(field, f"{host[:64]!r} is no host name")
    if port == 0:
        raise NotAllowed(field, "port 0 is none; leave it out for the usual one")
    return parts.scheme, str(address or host), port or PORTS[parts.scheme]


def _entry(word: str) -> Entry:
    scheme, separator, rest = word.rpartition("://")
    if not separator:
        scheme = "https"
    wild = rest.startswith("*.")
    try:
        if rest.strip("/") != rest:
            raise NotAllowed(SETTING, "only a scheme, a host and a port can be listed")
        scheme, host, port = _parts(f"{scheme}://{rest[2:] if wild else rest}", SETTING)
        if urlsplit(f"//{rest}").path or "?" in rest:
            raise NotAllowed(SETTING, "only a scheme, a host and a port can be listed")
        if wild and ("." not in host or _address(host)):
            raise NotAllowed(SETTING, "a * must stand before a domain such as *.example.com")
    except NotAllowed as error:
        raise ValueError(
            f"{error} (in {word!r}; an entry is like hooks.example.com, *.example.com:8443 or "
            "http://10.0.0.5:8080, a network like 10.0.0.0/16)"
        ) from error
    return Entry(scheme, "*." + host if wild else host, port)


def _network(word: str) -> Network | None:
    if "/" not in word:
        return None
    try:
        return ipaddress.ip_network(word)
    except ValueError:
        return None


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _inner(address: Address) -> Address:
    """The IPv4 address in an IPv6 one that only carries it."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id:
            return ipaddress.IPv6Address("fe80::")  # a scope is for links only
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64 or (int(address) >> 32 == 0 and int(address) > 1):
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and address not in _V6_PUBLIC:
        return False
    return address.is_global and not address.is_multicast


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
