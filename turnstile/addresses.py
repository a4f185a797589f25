"""Addresses: engine URLs, listeners, and whether two of them are the same place. Nothing is opened or looked up."""

import ipaddress
import os
import re
from collections.abc import Callable
from urllib.parse import urlsplit

import attrs


class ConfigError(ValueError):
    """The configuration can't be used; its text is one line that says why and where."""


# -- engine URLs -----------------------------------------------------------------------------------

_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


@attrs.frozen
class Upstream:
    """Where an engine is: the parts of its URL.

    ``host`` is an address (IPv6 without brackets) or an ASCII host name; ``base_path`` is empty
    or starts with a slash, never ends with one, and is kept as it was written.
    """

    scheme: str
    host: str
    port: int
    base_path: str = ""

    @classmethod
    def parse(cls, text: str) -> "Upstream":
        """Take an ``http`` or ``https`` URL apart; raises `ConfigError` with the reason."""
        if any(ord(char) <= 0x20 or ord(char) == 0x7F for char in text):
            raise ConfigError("a URL can't contain blanks or control characters")
        if "://" not in text:
            shown = _mask(text)
            raise ConfigError(f"{shown!r} is not a URL (is it http://{shown.lstrip('/')} ?)")
        shown = _mask(text)
        try:
            parts = urlsplit(text)
        except ValueError:
            raise ConfigError(f"{shown!r} is not a URL: its host can't be understood") from None
        scheme = parts.scheme.lower()
        if scheme not in _DEFAULT_PORTS:
            raise ConfigError(f"{shown!r}: only http:// and https:// URLs are understood")
        if "@" in parts.netloc:
            raise ConfigError(
                f"{shown!r}: a user name or password in the URL isn't supported"
                " (engines take none, and URLs end up in logs)"
            )
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(
                f"{shown!r} is not a URL: its port is not a number up to 65535"
            ) from None
        if parts.query or parts.fragment or text.endswith(("?", "#")):
            raise ConfigError(f"{shown!r}: an engine's URL has no query and no fragment")
        if port == 0:
            raise ConfigError(f"{shown!r}: port 0 can't be connected to")
        path = parts.path.rstrip("/")
        if not path.isascii() or "\\" in path:
            raise ConfigError(f"{shown!r}: percent-encode the path")
        host = _check_host(parts.netloc, parts.hostname or "", shown)
        return cls(scheme, host, port or _DEFAULT_PORTS[scheme], path)

    @property
    def is_tls(self) -> bool:
        """Whether connections to it are encrypted."""
        return self.scheme == "https"

    @property
    def netloc(self) -> str:
        """What clients put into the Host header: the default port is left out."""
        host = f"[{self.host.partition('%')[0]}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL again, in its canonical form."""
        host = f"[{self.host.replace('%', '%25')}]" if ":" in self.host else self.host
        port = "" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.base_path}"

    def __str__(self) -> str:
        return self.url


def _check_host(netloc: str, host: str, text: str) -> str:
    if netloc.startswith("["):
        address, _, zone = host.partition("%")
        try:
            parsed = ipaddress.IPv6Address(address)
        except ValueError:
            raise ConfigError(f"{text!r}: {address!r} is not an IPv6 address") from None
        zone = zone.removeprefix("25")
        return f"{parsed}%{zone}" if zone else str(parsed)
    if not host.isascii():
        try:
            host = host.encode("idna").decode("ascii")
        except UnicodeError as error:
            raise ConfigError(f"{text!r}: not a host name: {error}") from None
    if not host:
        raise ConfigError(f"{text!r}: the host is missing")
    if not _HOST_NAME.fullmatch(host) or ".." in host or len(host) > 253:
        raise ConfigError(f"{text!r}: {host!r} is not a host name")
    return host


def _mask(url: str) -> str:
    """``url`` without what may be a password or a token; made for what is no proper URL, too."""
    # A password may contain what ends a host: everything up to the last @ goes.
    scheme, slashes, rest = url.rpartition("://") if url.count("://") == 1 else ("", "", url)
    _, at, after = rest.rpartition("@")
    url = f"{scheme}{slashes}{'***' if at else ''}{at}{after}"
    return re.sub(r"(?s)(?<=[?#]).+", "***", url)


# -- listeners -------------------------------------------------------------------------------------

_ENDPOINT_TYPES = frozenset({"tcp", "tcp6", "ssl", "unix", "systemd", "haproxy", "tls", "stdio"})
_HOST_PORT = re.compile(r"(?P<host>[^\s:\[\]=\\]*|\[[^\[\]\s]+\]):(?P<port>[0-9]+)")


def parse_listen(text: str, bare_host: str = "") -> str:
    """Return the Twisted endpoint string that ``text`` stands for, checked but not opened.

    Besides endpoint strings these are understood: ``11434`` and ``:11434`` (all IPv4 interfaces,
    or ``bare_host`` if that is given), ``host:11434``, ``[::1]:11434``.
    """
    if not text.isprintable() or text[-1:] == "\\":
        raise ConfigError(f"{text!r} is not a listening address")
    kind = text.partition(":")[0]
    if kind not in _ENDPOINT_TYPES or kind == text:
        match = _HOST_PORT.fullmatch(f":{text}" if text.isdecimal() and text.isascii() else text)
        if match:
            host = match["host"] or bare_host
            port = _check_port(match["port"], text)
            if host.startswith("["):
                host = host[1:-1]
                try:
                    ipaddress.IPv6Address(host.partition("%")[0])
                except ValueError:
                    raise ConfigError(f"{text!r}: {host!r} is not an IPv6 address") from None
            elif host == "*":
                host = ""
            elif host and not _HOST_NAME.fullmatch(host):
                raise ConfigError(f"{text!r}: {host!r} is not a host name")
            interface = host.replace(":", "\\:")
            return f"tcp:{port}:interface={interface}" if host else f"tcp:{port}"
        if kind == text or (text.count(":") > 1 and "=" not in text):
            raise ConfigError(
                f"{text!r} is not a listening address (like :11434, 127.0.0.1:11434,"
                " [::1]:11434, or a Twisted endpoint such as unix:/run/turnstile.sock)"
            )
    _check_endpoint(text)
    return text


def _check_port(text: str, whole: str) -> int:
    if len(text) > 5 or int(text) > 65535:
        raise ConfigError(f"{whole!r}: a port is a number up to 65535")
    return int(text)


def _check_endpoint(text: str) -> None:
    """Let Twisted take ``text`` apart, with no reactor at hand and nothing opened."""
    from twisted.internet import endpoints

    try:
        kind, positional, named = split_endpoint(text)
        if kind == "systemd":
            # Twisted would look for the descriptor at once, and 22.4 knows no names.
            names = set(named) - {"domain"}
            if positional or names not in ({"index"}, {"name"}):
                raise ValueError("it takes domain= and one of index= and name=")
            if named.get("domain") not in ("INET", "INET6", "UNIX"):
                raise ValueError("domain= is INET, INET6 or UNIX")
            if not named.get("index", "0").isdecimal():
                raise ValueError("index= is a number")
            return
        if kind == "stdio":
            raise ValueError("standard input can't be listened on")
        if kind in ("tcp", "tcp6", "ssl"):
            port = positional[0] if positional else named.get("port", "")
            if not port.isdecimal() or not port.isascii():
                raise ValueError("the port is missing or not a number")
            _check_port(port, text)
        if kind == "unix" and not (positional[0] if positional else named.get("address")):
            raise ValueError("the path is missing")
        parse: Callable[[object, str], object] = endpoints.serverFromString
        parse(_NoReactor(), text)
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{text!r} is not a usable Twisted endpoint: {reason}") from None


class _NoReactor:
    """Stands in for a reactor while an endpoint string is only taken apart."""


def split_endpoint(text: str) -> tuple[str, list[str], dict[str, str]]:
    """Type, positional and named arguments of an endpoint string; backslash escapes."""
    positional: list[str] = []
    named: dict[str, str] = {}
    for part in re.findall(r"(?:^|:)((?:\\.|[^:\\])*)", text):
        pieces = re.fullmatch(r"((?:\\.|[^=\\])*)(?:(=)(.*))?", part, re.DOTALL)
        if pieces is None:
            raise ValueError("a stray backslash")
        name, equals, value = (re.sub(r"\\(.)", r"\1", piece or "") for piece in pieces.groups())
        if equals:
            named[name] = value
        else:
            positional.append(name)
    if not positional:
        raise ValueError("the type is missing")
    return positional[0], positional[1:], named


_WILDCARDS = frozenset({"", "0.0.0.0", "::"})


def is_loopback(host: str) -> bool:
    """Whether connecting to ``host`` stays on this machine by its name or address alone."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def tcp_place(endpoint: str) -> tuple[str, int] | None:
    """Interface and port of a TCP listener; None for other kinds and for port 0 (any)."""
    kind, positional, named = split_endpoint(endpoint)
    if kind not in ("tcp", "tcp6", "ssl"):
        return None
    port = int(positional[0] if positional else named["port"])
    interface = named.get("interface", "")
    return (interface, port) if port else None


def same_place(one: str, other: str) -> bool:
    """Whether two listeners can't both be opened."""
    first, second = tcp_place(one), tcp_place(other)
    if first and second:
        same_host = first[0] == second[0] or not _WILDCARDS.isdisjoint((first[0], second[0]))
        return first[1] == second[1] and same_host
    if first or second:
        return False
    split_one, split_other = split_endpoint(one), split_endpoint(other)
    if split_one[0] == split_other[0] == "unix":
        paths = [
            os.path.normpath(positional[0] if positional else named["address"])
            for _, positional, named in (split_one, split_other)
        ]
        return paths[0] == paths[1]
    return one == other and split_one[0] == "systemd"


def leads_back(upstream: Upstream, endpoint: str) -> bool:
    """Whether an engine's URL points at turnstile's own listener on this machine."""
    place = tcp_place(endpoint)
    if place is None or place[1] != upstream.port:
        return False
    host = upstream.host.lower().rstrip(".")
    if place[0] in _WILDCARDS:
        return is_loopback(host) or host in _WILDCARDS
    return host == place[0] or {host, place[0]} <= {"localhost", "127.0.0.1"}
