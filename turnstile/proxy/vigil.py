"""Notice clients that vanish while nothing is read from their sockets.

A paused socket whose receive buffer is full hides the client's FIN or RST: the reactor does not watch it for reading,
and reading would only find data. The kernel knows; it is asked about once a second, in one system call for all of them.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IReactorTime
from twisted.protocols.policies import ProtocolWrapper

#: Seconds between two looks.
INTERVAL = 1.0

# Silent for 30 s, then asked every 10 s, three times.
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)


def socket_below(transport: Any) -> Any:
    """The socket of a transport, TLS or not; ``None`` if there is none (any more)."""
    while isinstance(transport, ProtocolWrapper):
        # What TLS calls its handle has no descriptor.
        transport = transport.transport
    try:
        return transport.getHandle()
    except AttributeError:
        return None


def has_input(transport: Any) -> bool:
    """Whether the kernel has bytes of this connection that the reactor did not read yet."""
    sock = socket_below(transport)
    if sock is None:
        return False
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def notice_dead_peers(transport: Any) -> None:
    """Have the kernel ask a TCP peer that is silent for long whether it is still there.

    Without it a machine that lost its power, or a FIN that its sender gave up to deliver, would go unnoticed for hours.
    """
    transport.setTcpKeepAlive(True)
    sock = socket_below(transport)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Vigil:
    """Watches paused sockets for the end of the connection."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._poll = select.poll()
        self._watched: dict[int, Callable[[], None]] = {}
        self._call: Any = None

    def watch(self, fd: int, gone: Callable[[], None]) -> None:
        """Call ``gone`` once the peer of ``fd`` has closed or reset its connection."""
        self._watched[fd] = gone
        self._poll.register(fd, _GONE)
        if self._call is None:
            self._call = self._clock.callLater(INTERVAL, self._look)

    def unwatch(self, fd: int) -> None:
        """Forget ``fd``; must be called before it is closed."""
        if self._watched.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def stop(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _look(self) -> None:
        self._call = None
        if not self._watched:
            return
        for fd, _ in self._poll.poll(0):
            gone = self._watched.get(fd)
            if gone is not None:
                self.unwatch(fd)
                gone()
        if self._watched:
            self._call = self._clock.callLater(INTERVAL, self._look)
