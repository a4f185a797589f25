"""The data path without sockets: transports in memory whose every step a test takes by hand."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
from proxy_fakes import FakePolicy, Hello
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectError, ConnectionAborted, ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IHalfCloseableDescriptor
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

from turnstile.config import Upstream
from turnstile.proxy import exchange as exchange_module
from turnstile.proxy.channel import ProxyChannel
from turnstile.proxy.gate import Busy
from turnstile.proxy.http1 import BadMessage, Framing, head_end, parse_response
from turnstile.proxy.resource import EngineResource
from turnstile.proxy.retry import RetryPolicy
from turnstile.proxy.site import ProxySite
from turnstile.proxy.upstream import UpstreamPool

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


STATUS_LIMIT = 2
KIB = 1 << 10


class World:
    """One client, one site, one upstream, all in memory."""

    def __init__(self, requests: list[bytes], pieces: list[bytes]) -> None:
        #: What was logged.
        self.events: list[Any] = []
        self.wrongs: list[str] = []
        self.clock = Clock()
        self.policy = FakePolicy()
        self.policy.look = lambda: None  # type: ignore[method-assign]
        self.requests = requests
        self.pieces = pieces
        self.pool = UpstreamPool(self.clock, Upstream.parse("http://127.0.0.1:1"), timeout=5.0)
        self.endpoint = self.pool.endpoint = Endpoint(self.clock, self.wrongs)  # type: ignore[assignment]
        self.resource = EngineResource(
            self.pool,
            self.policy,
            reactor=self.clock,
            retry=RetryPolicy(1.0, 4.0, STATUS_LIMIT),
            observer=self.policy,
            chance=lambda: 0.5,
        )
        self.wire = Wire(self.clock, self.wrongs, "client")
        self.vigil = Vigil(self.clock, [self.wire])
        self.site = ProxySite(
            self.resource,
            {b"/hello": Hello()},  # type: ignore[dict-item]
            clock=self.clock,
            vigil=self.vigil,  # type: ignore[arg-type]
        )
        self.channel = ProxyChannel(self.site)
        self.wire.start(self.channel)

    # -- events

    def step(self, event: tuple[Any, ...]) -> None:
        getattr(self, event[0])(*event[1:])
        self.clock.advance(0)
        self.check()

    def client_sends(self) -> None:
        if self.pieces:
            self.wire.arrive(self.pieces.pop(0))

    def client_ends(self, how: str) -> None:
        self.wire.end(how)

    def client_reads(self) -> None:
        self.wire.drain()

    def connection(self, success: bool) -> None:
        self.endpoint.settle(success)

    def grant(self, success: bool) -> None:
        for gate in self.policy.gates:
            if gate.entering is not None and not gate.entering.called:
                if success:
                    gate.entering.callback(None)
                else:
                    gate.entering.errback(Busy("no", 503, 1))
                return

    def cleared(self) -> None:
        for gate in self.policy.gates:
            if gate.clearing is not None and not gate.clearing.called:
                gate.clearing.callback(None)
                return

    def _alive(self) -> list[Wire]:
        return [w for w in self.endpoint.wires if w.connected and w.ended is None]

    def upstream_says(self, data: bytes, which: int) -> None:
        alive = self._alive()
        if alive:
            alive[which % len(alive)].arrive(data)

    def upstream_ends(self, how: str, which: int) -> None:
        alive = self._alive()
        if alive:
            alive[which % len(alive)].end(how)

    def upstream_reads(self) -> None:
        for wire in self._alive():
            wire.drain()

    def time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.vigil.look()

    def drain(self) -> None:
        if not self.site.stopping:
            self.site.drain()

    # -- what always holds

    def check(self) -> None:
        assert self.wrongs == []
        for conn in self.pool._idle:
            assert conn.sink is None and not conn._expecting and conn._framing is None
            assert conn.lost is None and conn.served and not conn._buffer and not conn._choked
            assert conn.transport.reading
        channel = self.channel
        assert len(channel._buffer) <= 192 * KIB
        if channel.exchange is not None:
            assert channel.exchange._ahead_size <= exchange_module.MAX_AHEAD + 100 * KIB
        most = BUFFER + exchange_module.MAX_AHEAD + 100 * KIB
        for wire in (self.wire, *self.endpoint.wires):
            assert len(wire.out) <= most, (wire._name, len(wire.out))
        failures = [event for event in self.events if event.get("log_failure") is not None]
        assert failures == [], failures
        self.check_upstream()
        self.check_client()

    def check_upstream(self) -> None:
        heads = re.findall(
            rb"(GET|POST|HEAD) /[a-z]*/?([0-9]+) HTTP",
            b"\n".join(w.written for w in self.endpoint.wires),
        )
        for head in heads:
            # Once; a safe one again after a stale connection and after statuses worth another try.
            times = 1 if head[0] == b"POST" else 2 + STATUS_LIMIT * 2
            assert heads.count(head) <= times, heads

    def check_client(self) -> None:
        data = bytes(self.wire.written)
        methods = [request.split(b" ")[0] for request in self.requests]
        count = 0
        while data:
            end = head_end(data)
            assert end > 0, data
            head = parse_response(data[:end])
            data = data[end:]
            if head.status < 200:
                continue
            # What took too long to be said has no method yet.
            method = methods[count] if count < len(methods) and head.status != 408 else b"GET"
            framing: Framing = head.framing(method)
            count += 1
            try:
                data = data[framing.feed(data) if not framing.done else 0 :]
            except BadMessage:
                pytest.fail(f"broken framing: {data!r}")
            if not framing.done:
                break
        assert count <= len(self.requests)

    def finish(self) -> None:
        """The client is gone; what is carried through gets its answer or its end."""
        self.wire.end("rst")
        for _ in range(12):
            self.time(1.0)
            self.wire.drain()
        for wire in self.endpoint.wires:
            wire.end("rst")
        for _ in range(3):
            self.time(400.0)
        self.check()
        assert not self.site.channels and not self.resource.carried and not self.vigil.watched
        assert not self.endpoint.waiting, "an attempt to connect goes on for nobody"
        for gate in self.policy.gates:
            assert [c[0] for c in gate.calls if isinstance(c, tuple)].count("end") == 1, gate.calls
        assert all(conn.sink is None for conn in self.pool._all)
        self.pool.abort()
        self.clock.advance(0)
        assert self.clock.getDelayedCalls() == []
