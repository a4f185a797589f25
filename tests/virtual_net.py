"""A reactor without a machine: virtual time, and TCP connections in memory.

What happens in it is a function of its seed alone: every segment takes a random moment on its way, and time passes only
from event to event, so that an hour of traffic takes seconds and plays again exactly. TCP is kept honest where the data
path depends on it: order, windows that fill, producers that are paused, FIN behind unread data, RST, connections that
are refused, a close with unread data that becomes a reset, writes to a connection that is gone.
"""

from __future__ import annotations

import heapq
import itertools
import select
import socket
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from twisted.internet import error
from twisted.internet.address import IPv4Address
from twisted.internet.base import BaseConnector, DelayedCall
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import (
    IConsumer,
    IHalfCloseableDescriptor,
    IHalfCloseableProtocol,
    IListeningPort,
    IReactorPluggableNameResolver,
    IReactorTCP,
    IReactorTime,
    ITCPTransport,
)
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

_log = Logger()

LOCALHOST = "127.0.0.1"
#: Bytes that a connection holds in each direction before the sender has to wait.
WINDOW = 256 * 1024
#: The least and the most seconds that a segment takes.
LATENCY = (0.00005, 0.002)

_FIN, _RST = "FIN", "RST"


class Stuck(Exception):
    """What was waited for did not come about in time."""


@implementer(IReactorTime, IReactorTCP, IReactorPluggableNameResolver)
class VirtualReactor:
    """Time and TCP for a whole system in one process.

    :param rng: decides how long each segment takes.
    """

    def __init__(self, rng: Random, latency: tuple[float, float] = LATENCY) -> None:
        self.rng = rng
        self.latency = latency
        self.listeners: dict[int, Port] = {}
        self.transports: dict[int, Transport] = {}
        self.events = 0
        self._now = 1000.0
        self._heap: list[tuple[float, int, DelayedCall]] = []
        self._serial = itertools.count()
        self._ports = itertools.count(20000)
        self._fds = itertools.count(1 << 20)
        self.nameResolver = _Literal()

    # -- time

    def seconds(self) -> float:
        return self._now

    def callLater(self, delay: float, f: Callable[..., Any], *args: Any, **kw: Any) -> DelayedCall:
        assert delay >= 0, f"{f} called {delay} seconds later"
        # A delay that is too small to change the time would have a timer spin, as no real clock does.
        delay = max(delay, 1e-6) if delay else 0.0
        call = DelayedCall(self._now + delay, f, args, kw, _ignore, self._push, self.seconds)
        self._push(call)
        return call

    def _push(self, call: DelayedCall) -> None:
        heapq.heappush(self._heap, (call.time, next(self._serial), call))

    def getDelayedCalls(self) -> list[DelayedCall]:
        return list({id(call): call for _, _, call in self._heap if call.active()}.values())

    def callFromThread(self, f: Callable[..., Any], *args: Any, **kw: Any) -> None:
        self.callLater(0, f, *args, **kw)

    def callWhenRunning(self, f: Callable[..., Any], *args: Any, **kw: Any) -> None:
        self.callLater(0, f, *args, **kw)

    def installNameResolver(self, resolver: Any) -> Any:
        before, self.nameResolver = self.nameResolver, resolver
        return before

    def step(self) -> bool:
        """The next event; false if nothing is left to happen."""
        while self._heap:
            time, _, call = heapq.heappop(self._heap)
            if call.cancelled or call.called or time != call.time:
                continue
            if call.delayed_time:
                call.activate_delay()
                self._push(call)
                continue
            self._now = max(self._now, time)
            self.events += 1
            call.called = 1
            try:
                call.func(*call.args, **call.kw)
            except Exception:
                _log.failure("an event failed")
            return True
        return False

    def until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Let time pass until ``condition`` holds, at most so long.

        :raises Stuck: if it does not.
        """
        deadline = self._now + seconds
        while not condition():
            if self._now >= deadline or not self.step():
                raise Stuck(f"not within {seconds:g} s")

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        over = self.callLater(seconds, _ignore, None)
        while over.active():
            self.step()

    def wait(self, d: Deferred[Any], seconds: float = 600.0) -> Any:
        """The result of ``d``, letting time pass until it is there."""
        results: list[Any] = []
        d.addBoth(results.append)
        self.until(lambda: bool(results), seconds)
        if isinstance(results[0], Failure):
            results[0].raiseException()
        return results[0]

    # -- TCP

    def travel(self) -> float:
        return self.rng.uniform(*self.latency)

    def new_fd(self) -> int:
        return next(self._fds)

    def new_port(self) -> int:
        return next(self._ports)

    def listenTCP(self, port: int, factory: Any, backlog: int = 50, interface: str = "") -> Port:
        listener = Port(self, port or self.new_port(), factory)
        listener.startListening()
        return listener

    def connectTCP(
        self, host: str, port: int, factory: Any, timeout: float = 30, bindAddress: Any = None
    ) -> Connector:
        connector = Connector(self, host, port, factory, timeout)
        connector.connect()
        return connector

    def poll(self) -> Poll:
        """Stands in for ``select.poll()``."""
        return Poll(self)


class _Literal:
    """Resolves addresses, which is all that anybody here asks for."""

    def resolveHostName(
        self, receiver: Any, hostName: str, portNumber: int = 0, *_: Any, **__: Any
    ) -> Any:
        receiver.resolutionBegan(None)
        receiver.addressResolved(IPv4Address("TCP", hostName, portNumber))
        receiver.resolutionComplete()
        return receiver


class Poll:
    """``select.poll`` for connections in memory: knows of ends and resets only."""

    def __init__(self, reactor: VirtualReactor) -> None:
        self._reactor = reactor
        self._fds: set[int] = set()

    def register(self, fd: int, events: int) -> None:
        self._fds.add(fd)

    def unregister(self, fd: int) -> None:
        self._fds.remove(fd)

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        found = []
        for fd in sorted(self._fds):
            transport = self._reactor.transports.get(fd)
            if transport is None:
                found.append((fd, select.POLLNVAL))
            elif _FIN in transport.inbox or _RST in transport.inbox:
                found.append((fd, select.POLLHUP))
        return found


@implementer(IListeningPort)
class Port:
    """A listening port."""

    def __init__(self, reactor: VirtualReactor, number: int, factory: Any) -> None:
        self._reactor = reactor
        self._number = number
        self.factory = factory

    def startListening(self) -> None:
        listeners = self._reactor.listeners
        if self._number in listeners:
            raise error.CannotListenError(LOCALHOST, self._number, OSError(98, "in use"))
        self.factory.doStart()
        listeners[self._number] = self

    def stopListening(self) -> Deferred[None]:
        if self._reactor.listeners.get(self._number) is self:
            del self._reactor.listeners[self._number]
            self.factory.doStop()
        return succeed(None)

    def getHost(self) -> IPv4Address:
        return IPv4Address("TCP", LOCALHOST, self._number)


class Connector(BaseConnector):
    """One attempt to connect."""

    def __init__(
        self, reactor: VirtualReactor, host: str, port: int, factory: Any, timeout: float | None
    ) -> None:
        self.virtual = reactor
        self._address = IPv4Address("TCP", host, port)
        super().__init__(factory, timeout, reactor)

    def _makeTransport(self) -> Transport:
        transport = Transport(
            self.virtual,
            IPv4Address("TCP", LOCALHOST, self.virtual.new_port()),
            self._address,
            self,
        )
        self.virtual.callLater(self.virtual.travel(), transport.dial)
        return transport

    def getDestination(self) -> IPv4Address:
        return self._address


class _Handle:
    """What may be asked of a socket."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def fileno(self) -> int:
        return self._transport.fileno()

    def recv(self, size: int, flags: int = 0) -> bytes:
        assert flags & socket.MSG_PEEK
        inbox = self._transport.inbox
        if not inbox:
            raise BlockingIOError
        if inbox[0] == _RST:
            raise ConnectionResetError
        return b"" if inbox[0] == _FIN else inbox[0][:size]


@implementer(ITCPTransport, IHalfCloseableDescriptor, IConsumer)
class Transport:
    """One end of a connection; what its methods do is what twisted.internet.tcp does."""

    bufferSize = 64 * 1024

    def __init__(
        self,
        reactor: VirtualReactor,
        host: IPv4Address,
        peer: IPv4Address,
        connector: Connector | None = None,
    ) -> None:
        self.reactor = reactor
        self.connector = connector
        self.protocol: Any = None
        self.other: Transport | None = None
        self.connected = 0
        self.disconnected = 0
        self.disconnecting = 0
        self.reading = True
        self.producer: Any = None
        self.streamingProducer = False
        self.producerPaused = False
        #: What has arrived and was not read yet: bytes, an end, or a reset.
        self.inbox: deque[Any] = deque()
        self._host = host
        self._peer = peer
        self._fd = reactor.new_fd()
        self._waiting = bytearray()
        self._in_flight = 0
        self._last_arrival = 0.0
        self._aborting = False
        self._write_disconnecting = False
        self._write_disconnected = False
        self._socket_closed = False
        self._resuming = False

    # -- connecting

    def dial(self) -> None:
        connector = self.connector
        if connector is None or self.disconnected:
            return
        listener = self.reactor.listeners.get(self._peer.port)
        if listener is None:
            self.failIfNotConnected(error.ConnectionRefusedError(string="Connection refused"))
            return
        server = Transport(self.reactor, self._peer, self._host)
        self.other, server.other = server, self
        self._open(connector.buildProtocol(self._peer))
        self.reactor.callLater(self.reactor.travel(), server.accept, listener)

    def accept(self, listener: Port) -> None:
        if self.reactor.listeners.get(self._peer_port()) is not listener:
            self._close_socket(_RST)
            self.disconnected = 1
            return
        protocol = listener.factory.buildProtocol(self._peer)
        if protocol is None:
            self._close_socket(_RST)
            self.disconnected = 1
            return
        self._open(protocol)
        self._read()

    def _peer_port(self) -> int:
        return self._host.port

    def _open(self, protocol: Any) -> None:
        if protocol is None:
            self.connected = 1
            self.loseConnection()
            return
        self.connected = 1
        self.reactor.transports[self._fd] = self
        self.protocol = protocol
        protocol.makeConnection(self)
        self._flush()

    def failIfNotConnected(self, err: Exception) -> None:
        if self.connected or self.disconnected:
            return
        self.disconnected = 1
        connector, self.connector = self.connector, None
        assert connector is not None
        connector.connectionFailed(Failure(err))

    # -- writing

    def write(self, data: bytes) -> None:
        assert isinstance(data, bytes), type(data)
        if not self.connected or self._write_disconnected or not data:
            return
        self._waiting += data
        self._flush()
        if self.producer is not None and self.streamingProducer and not self.producerPaused:
            if len(self._waiting) > self.bufferSize:
                self.producerPaused = True
                self.producer.pauseProducing()

    def writeSequence(self, iovec: Any) -> None:
        self.write(b"".join(iovec))

    def _flush(self) -> None:
        """Give the kernel what it takes."""
        if not self.connected or self.disconnected or self._aborting:
            return
        if self._waiting:
            if _RST in self.inbox:
                self.reactor.callLater(0, self._lost, error.ConnectionLost("Broken pipe"))
                return
            piece = bytes(self._waiting[: WINDOW - self._in_flight])
            if piece:
                del self._waiting[: len(piece)]
                self._in_flight += len(piece)
                self._send(piece)
        if self._waiting:
            return
        if self.producer is not None and (self.producerPaused or not self.streamingProducer):
            self.producerPaused = False
            self.reactor.callLater(0, self._resume_producer)
        elif self.disconnecting:
            self._disconnect()
        elif self._write_disconnecting and not self._write_disconnected:
            self._write_disconnected = True
            self._send(_FIN)
            client = IHalfCloseableProtocol(self.protocol, None)
            if client is not None:
                client.writeConnectionLost()

    def _resume_producer(self) -> None:
        if self.producer is not None and not self.producerPaused:
            self.producer.resumeProducing()
        if self.disconnecting:
            self._flush()

    def _send(self, item: Any) -> None:
        now = self.reactor.seconds()
        self._last_arrival = max(self._last_arrival, now + self.reactor.travel())
        assert self.other is not None
        self.reactor.callLater(self._last_arrival - now, self.other.arrive, item)

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        if self.producer is not None:
            raise RuntimeError("a producer is registered already")
        if self.disconnected:
            producer.stopProducing()
            return
        self.producer, self.streamingProducer = producer, streaming
        self.producerPaused = False
        if not streaming:
            producer.resumeProducing()

    def unregisterProducer(self) -> None:
        self.producer = None
        if self.connected and self.disconnecting:
            self.reactor.callLater(0, self._flush)

    # -- reading

    def arrive(self, item: Any) -> None:
        if self._socket_closed:
            if isinstance(item, bytes) and self.other is not None and item:
                # A closed socket answers data with a reset.
                self._send(_RST)
            return
        self.inbox.append(item)
        if self.reading:
            self._read()

    def _read(self) -> None:
        while self.inbox and self.reading and self.connected and not self._aborting:
            item = self.inbox.popleft()
            if isinstance(item, bytes):
                while self.inbox and isinstance(self.inbox[0], bytes):
                    item += self.inbox.popleft()
                other = self.other
                assert other is not None
                other._in_flight -= len(item)
                if other._waiting:
                    self.reactor.callLater(self.reactor.travel(), other._flush)
                try:
                    self.protocol.dataReceived(item)
                except Exception as e:
                    _log.failure("dataReceived failed")
                    self._lost(e)
            elif item == _RST:
                self._lost(error.ConnectionLost("Connection reset by peer"))
            else:
                client = IHalfCloseableProtocol(self.protocol, None)
                if client is not None:
                    client.readConnectionLost()
                else:
                    self._lost(error.ConnectionDone())

    def pauseProducing(self) -> None:
        self.reading = False

    def resumeProducing(self) -> None:
        if self.connected and not self.disconnecting:
            self.reading = True
            if self.inbox and not self._resuming:
                self._resuming = True
                self.reactor.callLater(0, self._read_again)

    stopReading = pauseProducing
    startReading = resumeProducing

    def _read_again(self) -> None:
        self._resuming = False
        self._read()

    # -- ending

    def stopProducing(self) -> None:
        self.loseConnection()

    def loseConnection(self, _: Any = None) -> None:
        if not self.connected or self.disconnecting:
            return
        self.reading = False
        self.disconnecting = 1
        if self._write_disconnected:
            self._disconnect()
        else:
            self.reactor.callLater(0, self._flush)

    def _disconnect(self) -> None:
        self.reactor.callLater(0, self._lost, error.ConnectionDone())

    def loseWriteConnection(self) -> None:
        self._write_disconnecting = True
        self.reactor.callLater(0, self._flush)

    def abortConnection(self) -> None:
        if self.disconnected or self._aborting:
            return
        self._aborting = True
        self.reading = False
        self.reactor.callLater(0, self._lost, error.ConnectionAborted())

    def _close_socket(self, how: str) -> None:
        if self._socket_closed:
            return
        self._socket_closed = True
        self.reactor.transports.pop(self._fd, None)
        if self.other is not None:
            self._send(how)
        self.inbox.clear()

    def _lost(self, reason: Exception) -> None:
        if self.disconnected:
            return
        self.disconnected = 1
        self.connected = 0
        unread = any(isinstance(item, bytes) for item in self.inbox)
        self._close_socket(_RST if self._aborting or unread else _FIN)
        producer, self.producer = self.producer, None
        if producer is not None:
            producer.stopProducing()
        failure = Failure(reason)
        if self.protocol is not None:
            self.protocol.connectionLost(failure)
        if self.connector is not None:
            self.connector.connectionLost(failure)

    # -- what it is

    def fileno(self) -> int:
        return -1 if self._socket_closed else self._fd

    def getHandle(self) -> _Handle:
        return _Handle(self)

    def getHost(self) -> IPv4Address:
        return self._host

    def getPeer(self) -> IPv4Address:
        return self._peer

    def setTcpNoDelay(self, enabled: bool) -> None: ...

    def getTcpNoDelay(self) -> bool:
        return True

    def setTcpKeepAlive(self, enabled: bool) -> None: ...

    def getTcpKeepAlive(self) -> bool:
        return True


def _ignore(_: Any) -> None: ...
