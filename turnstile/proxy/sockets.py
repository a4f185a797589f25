"""Sockets of the data path: Twisted's TCP transports, with a shorter way to the kernel and back.

Twisted buffers what is written, asks the kernel to be told when the socket takes bytes, which it nearly always does,
and sends on the reactor's next turn: two more system calls and a turn of the loop for each write. Here a write goes out
at once, and only what the kernel does not take is buffered, in Twisted's own buffer and under Twisted's own rules
(producers, half-closes, the end of a connection).

And every event of a socket passes through Twisted's log context, which costs more than to read a small message:
:class:`SocketLoop` keeps these sockets in an epoll object of its own, in which the reactor's is but one descriptor.
"""

from __future__ import annotations

import select
from typing import Any
from weakref import WeakKeyDictionary

from twisted.internet.interfaces import IReactorPluggableNameResolver
from twisted.internet.main import CONNECTION_DONE, CONNECTION_LOST
from twisted.internet.tcp import Client, Connector, Port, Server
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import alsoProvides

try:
    from twisted.internet.epollreactor import EPollReactor
except ImportError:  # not Linux
    EPollReactor = None  # type: ignore[assignment,misc]

_log = Logger()

#: Bytes asked for in one read: so many at first, more while reads come back full.
LEAST_READ = 16 * 1024
MOST_READ = 256 * 1024

# The most events that are handled before timers have their turn.
_BATCH = 64
_IN, _OUT = 1, 4
_ENDED = 8 | 16  # EPOLLERR, EPOLLHUP
_DONE, _LOST = Failure(CONNECTION_DONE), Failure(CONNECTION_LOST)


class _Direct:
    """Mixed into Twisted's transports: writes that do not wait, reads that fit what comes."""

    # Twisted's
    connected: int
    dataBuffer: bytes
    protocol: Any
    socket: Any
    startWriting: Any
    _aborting: bool
    _maybePauseProducer: Any
    _tempDataBuffer: list[bytes]
    _tempDataLen: int
    _writeDisconnected: bool

    _read_size = LEAST_READ

    def write(self, data: bytes) -> None:
        """Send, or keep what the kernel does not take now."""
        if not self.connected or self._writeDisconnected or self._aborting or not data:
            return
        if not self._tempDataBuffer and not self.dataBuffer:
            try:
                sent = self.socket.send(data)
            except OSError:
                # Full; or broken, which doWrite will find as well, where the reactor is ready for the end.
                sent = 0
            if sent == len(data):
                return
            if sent:
                data = data[sent:]
        self._tempDataBuffer.append(data)
        self._tempDataLen += len(data)
        self._maybePauseProducer()
        self.startWriting()

    def writeSequence(self, iovec: Any) -> None:
        """As one write."""
        self.write(b"".join(iovec))

    def doRead(self) -> Any:
        """Read once."""
        size = self._read_size
        try:
            data = self.socket.recv(size)
        except BlockingIOError:
            return None
        except OSError:
            return CONNECTION_LOST
        got = len(data)
        if got == size:
            if size < MOST_READ:
                self._read_size = size * 2
        elif not got:
            return CONNECTION_DONE
        elif size > LEAST_READ and got < size // 4:
            self._read_size = size // 2
        self.protocol.dataReceived(data)
        return None


class DirectServer(_Direct, Server):
    """An accepted connection."""


class DirectClient(_Direct, Client):
    """A connection that was made."""


class _Connector(Connector):
    """Makes a :class:`DirectClient`."""

    def _makeTransport(self) -> DirectClient:
        return DirectClient(  # type: ignore[no-untyped-call]
            self.host, self.port, self.bindAddress, self, self.reactor
        )


class SocketLoop:
    """A set of sockets, waited for together with everything that the reactor waits for.

    Stands in for the reactor where transports and endpoints want one: what is not about its sockets is the reactor's.
    One for each reactor, whose ``doIteration`` it takes the place of: :func:`socket_loop`.
    """

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self._epoll = select.epoll()
        self._transports: dict[int, Any] = {}
        self._masks: dict[int, int] = {}
        self.callLater = reactor.callLater
        self.seconds = reactor.seconds
        if IReactorPluggableNameResolver.providedBy(reactor):
            alsoProvides(self, IReactorPluggableNameResolver)
        self._poll_reactor = reactor.doIteration
        self._reactor_fd: int = reactor._poller.fileno()
        self._epoll.register(self._reactor_fd, _IN)
        reactor.doIteration = self.iterate
        reactor.addSystemEventTrigger("during", "shutdown", self._disconnect_all)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reactor, name)

    def connectTCP(
        self, host: str, port: int, factory: Any, timeout: float = 30.0, bindAddress: Any = None
    ) -> Connector:
        """As the reactor's."""
        connector = _Connector(host, port, factory, timeout, bindAddress, self)
        connector.connect()
        return connector

    def adopt(self, port: Any) -> None:
        """Have what a TCP port accepts from now on be sockets of this loop."""
        if isinstance(port, Port) and port.transport is Server:
            port.transport = self._accepted  # type: ignore[assignment]

    def _accepted(
        self, sock: Any, protocol: Any, client: Any, server: Any, number: int, _: Any
    ) -> DirectServer:
        return DirectServer(sock, protocol, client, server, number, self)  # type: ignore[arg-type]

    # -- IReactorFDSet, for the transports ------------------------------------------------------------------------

    def addReader(self, transport: Any) -> None:
        self._change(transport, _IN, 0)

    def addWriter(self, transport: Any) -> None:
        self._change(transport, _OUT, 0)

    def removeReader(self, transport: Any) -> None:
        self._change(transport, 0, _IN)

    def removeWriter(self, transport: Any) -> None:
        self._change(transport, 0, _OUT)

    def _change(self, transport: Any, add: int, remove: int) -> None:
        fd = transport.fileno()
        masks = self._masks
        before = masks.get(fd, 0)
        mask = (before | add) & ~remove
        if mask == before:
            return
        if not before:
            self._epoll.register(fd, mask)
            self._transports[fd] = transport
        elif mask:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.unregister(fd)
            del masks[fd], self._transports[fd]
            return
        masks[fd] = mask

    def getReaders(self) -> list[Any]:
        """The transports that are read from."""
        return [self._transports[fd] for fd, mask in self._masks.items() if mask & _IN]

    # -- for the reactor ------------------------------------------------------------------------------------------

    def iterate(self, timeout: float | None) -> None:
        """Wait for events, at most ``timeout`` seconds, and handle them: the reactor's and ours."""
        transports = self._transports
        for fd, event in self._epoll.poll(timeout, _BATCH):
            transport = transports.get(fd)
            if transport is None:
                # Not ours; or ended by an earlier event of the batch.
                if fd == self._reactor_fd:
                    self._poll_reactor(0)
                continue
            try:
                if event == _IN:
                    why = transport.doRead()
                    if why is not None:
                        self._end(transport, why, in_read=True)
                else:
                    self._unusual(transport, fd, event)
            except Exception as error:
                _log.failure("a connection failed")
                self._end(transport, error, in_read=False)

    def _unusual(self, transport: Any, fd: int, event: int) -> None:
        """As the reactor's: a connection that ended is read to its end first."""
        why: Any = None
        in_read = False
        if event & _ENDED and not event & _IN:
            in_read = bool(self._masks[fd] & _IN)
            why = CONNECTION_DONE if in_read else CONNECTION_LOST
        else:
            if event & _IN:
                why = transport.doRead()
                in_read = True
            # Reading may have ended it.
            if why is None and event & _OUT and fd in self._transports:
                why = transport.doWrite()
                in_read = False
        if why is not None:
            self._end(transport, why, in_read=in_read)

    def _end(self, transport: Any, why: Exception, *, in_read: bool) -> None:
        self.removeReader(transport)
        if why is CONNECTION_DONE and in_read:
            transport.readConnectionLost(_DONE)
            return
        self.removeWriter(transport)
        if why is CONNECTION_DONE or why is CONNECTION_LOST:
            transport.connectionLost(_DONE if why is CONNECTION_DONE else _LOST)
        else:
            transport.connectionLost(Failure(why))

    def _disconnect_all(self) -> None:
        """The reactor stops: so do the sockets."""
        for transport in tuple(self._transports.values()):
            transport.connectionLost(_LOST)


_loops: WeakKeyDictionary[Any, SocketLoop] = WeakKeyDictionary()


def socket_loop(reactor: Any) -> Any:
    """The :class:`SocketLoop` of ``reactor``; where that can't be (no epoll), the reactor itself."""
    if isinstance(reactor, SocketLoop):
        return reactor
    if EPollReactor is None or not isinstance(reactor, EPollReactor):
        return reactor
    loop = _loops.get(reactor)
    if loop is None:
        loop = _loops[reactor] = SocketLoop(reactor)
    return loop
