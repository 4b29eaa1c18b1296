"""What this pool sends to: only what its operator listed, at the address that was checked."""

from __future__ import annotations

import contextlib
import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.outgoing import Allowed, NotAllowed, Unresolved
from common.outgoing_http import client
from tests.certificates import self_signed

PUBLIC = "93.184.215.14"


def allowed(text: str, *addresses: str) -> Allowed:
    """A list whose every name resolves to `addresses`."""
    return Allowed.parse(text, resolver=lambda host, port: list(addresses))


# -- the list --------------------------------------------------------------------------------


def test_nothing_is_sent_anywhere_unless_the_operator_lists_it() -> None:
    nothing = allowed("", PUBLIC)
    assert not nothing
    with pytest.raises(NotAllowed, match=r"callback_url: this pool sends nowhere.*outgoing_hosts"):
        nothing.check("https://example.com/hook")


def test_a_listed_host_is_reached_by_https_at_its_usual_port() -> None:
    target = allowed("hooks.example.com", PUBLIC).check("https://Hooks.Example.com/x?y=1")
    assert (target.scheme, target.host, target.port) == ("https", "hooks.example.com", 443)
    assert target.addresses == (PUBLIC,)


@pytest.mark.parametrize(
    ("listed", "url"),
    [
        ("hooks.example.com", "http://hooks.example.com/"),
        ("hooks.example.com", "https://hooks.example.com:8443/"),
        ("hooks.example.com:8443", "https://hooks.example.com/"),
        ("hooks.example.com", "https://other.example.com/"),
        ("hooks.example.com", "https://hooks.example.com.evil.org/"),
        ("example.com", "https://evilexample.com/"),
        ("*.example.com", "https://example.com/"),
        ("*.example.com", "https://evilexample.com/"),
        ("10.0.0.0/8, hooks.example.com", "https://10.0.0.5/"),
    ],
)
def test_another_scheme_port_or_name_than_the_listed_one_is_refused(listed: str, url: str) -> None:
    with pytest.raises(NotAllowed, match="is not listed; the pool's operator can add it"):
        allowed(listed, PUBLIC).check(url)


@pytest.mark.parametrize(
    ("listed", "url"),
    [
        ("*.example.com", "https://a.b.example.com/"),
        ("http://hooks.example.com:8080", "http://hooks.example.com:8080/"),
        ("other.org hooks.example.com\n", "https://hooks.example.com:443/"),
        ("[2606:2800:21f:cb07::1]:8443", "https://[2606:2800:21f:cb07:0::1]:8443/"),
    ],
)
def test_wildcards_ports_schemes_and_addresses_can_be_listed(listed: str, url: str) -> None:
    assert allowed(listed, PUBLIC).check(url).url == url


@pytest.mark.parametrize(
    "entry",
    [
        "ftp://example.com",
        "example.com/path",
        "*",
        "*.com",
        "user@example.com",
        "10.0.0.1/8",
        "a b$",
    ],
)
def test_an_entry_that_cannot_be_meant_is_named(entry: str) -> None:
    with pytest.raises(ValueError, match=r"outgoing_hosts: .*an entry is like hooks\.example\.com"):
        Allowed.parse(entry)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "gopher://hooks.example.com/",
        "//hooks.example.com/",
        "https://",
        "https://user:pass@hooks.example.com/",
        "https://evil.org@hooks.example.com/",
        "https://hooks.example.com\\@evil.org/",
        "https://hooks.example.com/a b",
        "https://hooks.example.com/\r\nX: y",
        "https://hooks.examplе.com/",  # a Cyrillic letter
        "https://hooks.example.com./",
        "https://hooks.example.com:0/",
        "https://hooks.example.com:99999/",
        "https://hooks.example.com/#x",
        "https://[::1/",
        "https://hooks.example.com/" + "x" * 3000,
    ],
)
def test_a_url_that_two_parsers_could_read_differently_is_refused(url: str) -> None:
    with pytest.raises(NotAllowed, match=r"^image_url: "):
        allowed("hooks.example.com", PUBLIC).check(url, field="image_url")


# -- addresses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "0.0.0.0", "240.0.0.1",
        "169.254.169.254", "100.100.100.200", "224.0.0.1", "255.255.255.255",
        "::1", "::", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1",
        "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001::1",
    ],
)  # fmt: skip
def test_a_listed_name_that_is_at_a_private_address_is_refused(address: str) -> None:
    for addresses in ((address,), (PUBLIC, address)):  # one of several is enough
        with pytest.raises(NotAllowed, match=r"hooks\.example\.com is at "):
            allowed("hooks.example.com", *addresses).check("https://hooks.example.com/")


@pytest.mark.parametrize("address", [PUBLIC, "2606:2800:21f:cb07::1", f"::ffff:{PUBLIC}"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert allowed("a.org", address).check("https://a.org/").addresses == (address,)


def test_an_operator_can_open_a_network_or_one_address() -> None:
    inside = allowed("hooks.lan, 10.1.0.0/16", "10.1.2.3")
    assert inside.check("https://hooks.lan/").addresses == ("10.1.2.3",)
    with pytest.raises(NotAllowed, match=r"hooks\.lan is at 10\.2\.0\.1.*add its network"):
        allowed("hooks.lan, 10.1.0.0/16", "10.2.0.1").check("https://hooks.lan/")
    assert allowed("http://10.0.0.5:80").check("http://10.0.0.5/").addresses == ("10.0.0.5",)


@pytest.mark.parametrize("address", ["169.254.169.254", "fd00:ec2::254", "100.100.100.200"])
def test_instance_metadata_cannot_even_be_listed(address: str) -> None:
    host = f"[{address}]" if ":" in address else address
    opened = allowed(f"http://{host}, a.org, 0.0.0.0/0, ::/0", address)
    for url in (f"http://{host}/latest/meta-data/", "https://a.org/"):
        with pytest.raises(NotAllowed, match="to which nothing is ever sent"):
            opened.check(url)


def test_a_name_without_an_address_may_have_one_later() -> None:
    def away(host: str, port: int) -> list[str]:
        raise OSError("no answer")

    with pytest.raises(Unresolved, match=r"a\.org has no address now: no answer"):
        Allowed.parse("a.org", resolver=away).check("https://a.org/")
    with pytest.raises(Unresolved):
        allowed("a.org").check("https://a.org/")


def test_the_list_can_be_asked_without_asking_for_addresses() -> None:
    def never(host: str, port: int) -> list[str]:
        raise AssertionError("it was asked")

    quiet = Allowed.parse("a.org", resolver=never)
    assert quiet.listed("https://a.org/hook").host == "a.org"
    with pytest.raises(NotAllowed):
        quiet.listed("https://b.org/hook")


# -- the client ------------------------------------------------------------------------------


class _Hook(http.server.BaseHTTPRequestHandler):
    """Says which Host it was asked for; /away redirects."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(302 if self.path == "/away" else 200)
        if self.path == "/away":
            self.send_header("Location", "http://127.0.0.1:1/secret")
        self.send_header("X-Host", self.headers["Host"])
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


@contextlib.contextmanager
def listening(tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """A web server on 127.0.0.1; its port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hook) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_the_address_that_was_checked_is_the_one_that_is_dialled() -> None:
    """The name exists nowhere but in the resolver, which is asked once."""
    asked: list[str] = []

    def once(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    with listening() as port:
        listed = Allowed.parse(f"http://hook.invalid:{port}, 127.0.0.0/8", resolver=once)
        with client(listed) as http_client:
            answer = http_client.post(f"http://hook.invalid:{port}/", content=b"x")
    assert answer.status_code == 200
    assert answer.headers["x-host"] == f"hook.invalid:{port}"
    assert asked == ["hook.invalid"]


def test_the_next_address_is_tried_when_one_cannot_be_reached() -> None:
    with listening() as port:
        listed = allowed(f"http://a.invalid:{port}, 127.0.0.0/8, ::1/128", "::1", "127.0.0.1")
        with client(listed) as http_client:
            assert http_client.post(f"http://a.invalid:{port}/").status_code == 200


def test_a_redirect_is_not_followed_and_could_not_lead_elsewhere() -> None:
    with listening() as port:
        listed = allowed(f"http://a.invalid:{port}, 127.0.0.0/8", "127.0.0.1")
        with client(listed) as http_client:
            url = f"http://a.invalid:{port}/away"
            assert http_client.post(url).status_code == 302
            with pytest.raises(NotAllowed, match=r"http://127\.0\.0\.1:1 is not listed"):
                http_client.post(url, follow_redirects=True)


def test_a_name_that_does_not_resolve_is_a_connection_error() -> None:
    with (
        client(allowed("a.org")) as http_client,
        pytest.raises(httpx.ConnectError, match=r"a\.org has no address now"),
    ):
        http_client.post("https://a.org/")


def test_the_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would resolve the name once more, where nobody checks."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with listening() as port:
        listed = allowed(f"http://a.invalid:{port}, 127.0.0.0/8", "127.0.0.1")
        with client(listed) as http_client:
            assert http_client.post(f"http://a.invalid:{port}/").status_code == 200


def test_the_certificate_must_be_the_names_not_the_addresses(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path, "hook.invalid")
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    with listening(serving) as port:
        listed = allowed(f"hook.invalid:{port}, other.invalid:{port}, 127.0.0.0/8", "127.0.0.1")
        with client(listed, verify=trusting) as http_client:
            assert http_client.post(f"https://hook.invalid:{port}/").status_code == 200
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                http_client.post(f"https://other.invalid:{port}/")
