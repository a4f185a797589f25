"""Listening sockets that systemd opened before we ran (sd_listen_fds(3), systemd.socket(5)).

Connections wait in such a socket while the service is down, so that a restart refuses nobody. Sockets are told apart
by their names (``FileDescriptorName=``); Twisted 22.4 knows only their order, which is not safe with two of them, so
all of it is done here, ``systemd:`` endpoints included.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import attrs
from twisted.internet import unix
from twisted.internet.tcp import Port as TcpPort
from twisted.python.failure import Failure

from turnstile.config import ConfigError, split_endpoint

#: The first descriptor that systemd passes.
FIRST = 3
#: More would be a mistake.
MOST = 256

_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")
_WILDCARDS = frozenset({"", "0.0.0.0", "::"})


@attrs.frozen
class Inherited:
    """A listening socket that systemd passed.

    :ivar name: its ``FileDescriptorName=``; empty if systemd told none.
    :ivar address: what it is bound to, as :meth:`socket.socket.getsockname` tells it.
    """

    fd: int
    name: str
    family: socket.AddressFamily
    address: Any

    def __str__(self) -> str:
        if self.family == socket.AF_UNIX:
            path = os.fsdecode(self.address)
            return f"@{path[1:]}" if path.startswith("\0") else path
        host, port = self.address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@attrs.frozen
class Listener:
    """A listener that may be given inherited sockets.

    :ivar endpoint: where it would listen by itself: a Twisted endpoint string.
    :ivar setting: the name of the setting that says so.
    :ivar source: where that setting came from; empty if nobody set it.
    """

    endpoint: str
    setting: str
    source: str = ""


@attrs.frozen
class Assignment:
    """Which listener gets which sockets, and the sockets that none has a use for."""

    taken: dict[str, tuple[Inherited, ...]]
    spare: tuple[Inherited, ...]


# -- what systemd passed ---------------------------------------------------------------------------------------------


def parse_environment(environ: Mapping[str, str], pid: int) -> list[tuple[int, str]]:
    """Number and name of each descriptor that was passed to process ``pid``; raises `ConfigError`."""
    if environ.get("LISTEN_PID", "") != str(pid):
        return []
    count = environ.get("LISTEN_FDS", "")
    if not count.isdecimal() or len(count) > 9:
        raise ConfigError(f"LISTEN_FDS={count!r} is not a number of sockets")
    if int(count) > MOST:
        raise ConfigError(f"LISTEN_FDS={count}: more than {MOST} sockets")
    names = environ["LISTEN_FDNAMES"].split(":") if environ.get("LISTEN_FDNAMES") else []
    if names and len(names) != int(count):
        raise ConfigError(f"LISTEN_FDNAMES has {len(names)} names for {count} sockets")
    return [(FIRST + index, names[index] if names else "") for index in range(int(count))]


def initial_environment() -> dict[str, str]:
    """The environment that the process was started with; empty where the system does not tell.

    Twisted reads the variables for itself, and removes them, as soon as its endpoints are imported.
    """
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = [entry.partition(b"=") for entry in file.read().split(b"\0")]
    except OSError:
        return {}
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs if name}


def take_environment(
    environ: MutableMapping[str, str], pid: int, initial: Mapping[str, str] | None = None
) -> tuple[Inherited, ...]:
    """The sockets that systemd passed, kept from children from now on; raises `ConfigError`.

    :param initial: the environment at the start of the process, should variables be gone from ``environ``.
    """
    found = parse_environment({**(initial or {}), **environ}, pid)
    for name in _VARIABLES:
        environ.pop(name, None)
    return tuple(_inspect(fd, name) for fd, name in found)


def _inspect(fd: int, name: str) -> Inherited:
    shown = f"descriptor {fd} ({name or 'no name'}), passed by systemd,"
    try:
        os.set_inheritable(fd, False)
        duplicate = os.dup(fd)
    except OSError as error:
        raise ConfigError(f"{shown} can't be used: {error.strerror}") from None
    try:
        sock = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise ConfigError(f"{shown} is no socket") from None
    with sock:
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if sock.type != socket.SOCK_STREAM or not listens:
            raise ConfigError(
                f"{shown} is no stream socket that listens (ListenStream=, Accept=no)"
            )
        family = socket.AddressFamily(sock.family)
        if family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
            raise ConfigError(f"{shown} is neither an IP nor a unix socket")
        return Inherited(fd, name, family, sock.getsockname())


# -- who gets what ---------------------------------------------------------------------------------------------------


def assign(sockets: Iterable[Inherited], listeners: Mapping[str, Listener]) -> Assignment:
    """Give each of ``listeners`` (by name) the sockets of its name, or those that its ``systemd:`` endpoint means.

    Raises `ConfigError` where the configuration and the sockets contradict each other, or where nobody can tell which
    socket is whose.
    """
    left = list(sockets)
    taken: dict[str, tuple[Inherited, ...]] = {}
    for name, listener in listeners.items():
        if listener.endpoint.startswith("systemd:"):
            taken[name] = (_find(listener, tuple(sockets)),)
    used = [sock for chosen in taken.values() for sock in chosen]
    if len(set(used)) != len(used):
        raise ConfigError("two listeners can't have the same socket of systemd's")
    left = [sock for sock in left if sock not in used]
    for name, listener in listeners.items():
        named = tuple(sock for sock in left if sock.name == name)
        if not named:
            continue
        if name in taken:
            raise ConfigError(
                f"systemd passes a socket named {name} ({named[0]}), but {listener.setting}"
                f" ({listener.source}) means another one"
            )
        _check_agrees(name, listener, named)
        taken[name] = named
    left = [sock for sock in left if sock.name not in taken]
    nameless = [sock for sock in left if not sock.name]
    if nameless:
        open_ = [name for name in listeners if name not in taken]
        if len(nameless) != 1 or len(open_) != 1:
            raise ConfigError(
                f"systemd passes {len(nameless)} sockets without a name: FileDescriptorName= says whose"
                f" they are ({', '.join(listeners)})"
            )
        _check_agrees(open_[0], listeners[open_[0]], tuple(nameless))
        taken[open_[0]] = tuple(nameless)
        left.remove(nameless[0])
    return Assignment(taken, tuple(left))


def _find(listener: Listener, sockets: tuple[Inherited, ...]) -> Inherited:
    _, _, named = split_endpoint(listener.endpoint)
    label = f"{listener.setting} ({listener.endpoint})"
    if "index" in named:
        index = int(named["index"])
        chosen = [sock for sock in sockets if sock.fd == FIRST + index]
    else:
        chosen = [sock for sock in sockets if sock.name == named["name"]]
    if not chosen:
        passed = ", ".join(f"{sock.name or 'no name'} at {sock}" for sock in sockets) or "none"
        raise ConfigError(f"{label}: systemd passed no such socket (it passed: {passed})")
    if len(chosen) > 1:
        raise ConfigError(f"{label}: systemd passed {len(chosen)} sockets of that name, use index=")
    return chosen[0]


def _check_agrees(name: str, listener: Listener, sockets: tuple[Inherited, ...]) -> None:
    """An address that somebody set by hand must be the socket's."""
    if listener.source and not any(_is_at(sock, listener.endpoint) for sock in sockets):
        passed = ", ".join(map(str, sockets))
        raise ConfigError(
            f"systemd passes a socket named {name} ({passed}), but {listener.setting} ({listener.source}) is"
            f" {listener.endpoint}: change the one or the other"
        )


def _is_at(sock: Inherited, endpoint: str) -> bool:
    kind, positional, named = split_endpoint(endpoint)
    if kind == "unix":
        path = positional[0] if positional else named["address"]
        return sock.family == socket.AF_UNIX and os.path.normpath(path) == str(sock)
    if kind not in ("tcp", "tcp6") or sock.family == socket.AF_UNIX:
        return False
    port = int(positional[0] if positional else named["port"])
    interface, host = named.get("interface", ""), sock.address[0]
    same = interface == host or {interface, host} <= _WILDCARDS
    if interface == "localhost":
        same = host in ("127.0.0.1", "::1")
    return same and port == sock.address[1]


# -- listening -------------------------------------------------------------------------------------------------------


class _UnixPort(unix.Port):
    """A unix socket that is systemd's, and stays as it is.

    Twisted's own adopts one by setting its mode (which a service of another user may not) and its backlog, and stops by
    shutting the socket down, for systemd too, and removing its file.
    """

    _shouldShutdown = False

    def startListening(self) -> None:
        port: Any = self
        port.factory.doStart()
        port.socket, port._preexistingSocket = port._preexistingSocket, None
        port.fileno = port.socket.fileno
        port.connected = True
        port.numberAccepts = 100
        port.startReading()

    def connectionLost(self, reason: Failure) -> None:
        TcpPort.connectionLost(self, reason)


def listen(reactor: Any, inherited: Inherited, factory: Any) -> Any:
    """Accept connections from an inherited socket; returns the listening port.

    When it stops to listen, connections that were not accepted stay in the kernel's queue, for the next process.
    """
    os.set_blocking(inherited.fd, False)
    if inherited.family == socket.AF_UNIX:
        adopt: Any = _UnixPort._fromListeningDescriptor
        port = adopt(reactor, inherited.fd, factory)
        port.startListening()
    else:
        port = reactor.adoptStreamPort(inherited.fd, inherited.family, factory)
    # The port has a descriptor of its own.
    os.close(inherited.fd)
    return port


__all__ = ["Assignment", "Inherited", "Listener", "assign", "listen", "take_environment"]
