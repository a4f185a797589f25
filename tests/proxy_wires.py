"""The data path without sockets: transports in memory whose every step a test takes by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectError, ConnectionAborted, ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IHalfCloseableDescriptor
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

#: As Twisted's transports.
BUFFER = 64 * 1024
_numbers = itertools.count(1000)


class Handle:
    """What a socket tells about the other side."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._number = next(_numbers)

    def fileno(self) -> int:
        return self._number

    def recv(self, size: int, flags: int) -> bytes:
        if self._wire.inbox:
            return bytes(self._wire.inbox[0][:size])
        if self._wire.ended is None:
            raise BlockingIOError
        if self._wire.ended == "rst":
            raise ConnectionResetError
        return b""


@implementer(IHalfCloseableDescriptor)
class Wire:
    """A transport. What the code under test must not do with it is noted in ``wrongs``."""

    def __init__(self, clock: Clock, wrongs: list[str], name: str) -> None:
        self._clock = clock
        self._wrongs = wrongs
        self._name = name
        self.protocol: Any = None
        self.connected = True
        self.disconnecting = False
        self.half_closed = False
        self.aborting = False
        self.reading = True
        self.producer: Any = None
        self._paused_producer = False
        self.out = bytearray()
        #: All that was ever written.
        self.written = bytearray()
        self.inbox: list[bytes] = []
        #: How the other side ended: "fin" or "rst".
        self.ended: str | None = None
        self.handle = Handle(self)

    def start(self, protocol: Any) -> None:
        self.protocol = protocol
        protocol.makeConnection(self)

    # -- what the code under test calls

    def getPeer(self) -> IPv4Address:
        return IPv4Address("TCP", "192.0.2.1", 1)

    def getHandle(self) -> Handle:
        return self.handle

    def write(self, data: bytes) -> None:
        if self.disconnecting or self.half_closed or self.aborting:
            self._wrongs.append(f"{self._name}: written after its end: {data!r}")
        if not self.connected:
            return
        self.out += data
        self.written += data
        if self.producer is not None and len(self.out) > BUFFER:
            self._paused_producer = True
            self.producer.pauseProducing()

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        assert self.producer is None and streaming
        self.producer = producer

    def unregisterProducer(self) -> None:
        self.producer = None

    def pauseProducing(self) -> None:
        self.reading = False

    def resumeProducing(self) -> None:
        if self.connected and not self.disconnecting:
            self.reading = True
            self._clock.callLater(0, self._read)

    def loseConnection(self) -> None:
        if self.connected and not self.disconnecting:
            self.reading = False
            self.disconnecting = True
            if not self.out:
                self._clock.callLater(0, self._lost, ConnectionDone())

    def loseWriteConnection(self) -> None:
        self.half_closed = True

    def abortConnection(self) -> None:
        if self.connected and not self.aborting:
            self.reading = False
            self.aborting = True
            self._clock.callLater(0, self._lost, ConnectionAborted())

    # -- what the test does, as kernel and other side

    def arrive(self, data: bytes) -> None:
        """Bytes from the other side."""
        if self.connected and self.ended is None:
            self.inbox.append(data)
            self._read()

    def end(self, how: str) -> None:
        """The other side closes or resets."""
        if self.connected and self.ended is None:
            self.ended = how
            self._read()

    def drain(self) -> None:
        """The other side takes all that was written."""
        if not self.connected:
            return
        self.out.clear()
        if self.producer is not None and self._paused_producer:
            self._paused_producer = False
            self.producer.resumeProducing()
        elif self.disconnecting:
            self._lost(ConnectionDone())

    def _read(self) -> None:
        while self.reading and self.connected and self.inbox:
            self.protocol.dataReceived(self.inbox.pop(0))
        if self.reading and self.connected and self.ended is not None:
            self._lost(ConnectionDone() if self.ended == "fin" else ConnectionLost())

    def _lost(self, reason: Exception) -> None:
        if not self.connected:
            return
        self.connected = False
        if self.producer is not None:
            self.producer.stopProducing()
            self.producer = None
        self.protocol.connectionLost(Failure(reason))


class Vigil:
    """Finds out about paused wires once a second, as the real one does about sockets."""

    def __init__(self, clock: Clock, wires: list[Wire]) -> None:
        self._clock = clock
        self._wires = wires
        self.watched: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, gone: Callable[[], None]) -> None:
        self.watched[fd] = gone

    def unwatch(self, fd: int) -> None:
        self.watched.pop(fd, None)

    def look(self) -> None:
        for wire in self._wires:
            fd = wire.handle.fileno()
            if fd in self.watched and wire.ended is not None:
                self.watched.pop(fd)()


class Endpoint:
    """Connects when the test says so."""

    def __init__(self, clock: Clock, wrongs: list[str]) -> None:
        self._clock = clock
        self._wrongs = wrongs
        self._attempts: list[tuple[Any, Deferred[Any]]] = []
        self.wires: list[Wire] = []

    def connect(self, factory: Any) -> Deferred[Any]:
        d: Deferred[Any] = Deferred(self._cancelled)
        self._attempts.append((factory, d))
        return d

    def _cancelled(self, d: Deferred[Any]) -> None:
        self._attempts = [attempt for attempt in self._attempts if attempt[1] is not d]

    def settle(self, success: bool) -> None:
        """The oldest attempt succeeds or fails."""
        if not self._attempts:
            return
        factory, d = self._attempts.pop(0)
        if not success:
            d.errback(ConnectError())
            return
        wire = Wire(self._clock, self._wrongs, f"upstream {len(self.wires)}")
        self.wires.append(wire)
        protocol = factory.buildProtocol(None)
        wire.start(protocol)
        d.callback(protocol)

    @property
    def waiting(self) -> int:
        """How many attempts are under way."""
        return len(self._attempts)
