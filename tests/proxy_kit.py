"""The data path alone, over real sockets: a scripted raw upstream, raw clients, a gate that records its calls."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from proxy_fakes import FakePolicy, Hello, Watched
from twisted.internet import reactor as _reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.tcp import Connection, Port
from twisted.logger import globalLogPublisher
from twisted.python.failure import Failure
from zope.interface import implementer

from turnstile.config import Upstream
from turnstile.proxy.resource import EngineResource
from turnstile.proxy.retry import RetryPolicy
from turnstile.proxy.site import ProxySite
from turnstile.proxy.sockets import SocketLoop, socket_loop
from turnstile.proxy.upstream import UpstreamPool
from turnstile.proxy.vigil import Vigil

reactor: Any = _reactor
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Clocked:
    """Sockets with a time of their own, which stands still unless a test moves it."""

    def __init__(self, clock: Clock, sockets: SocketLoop) -> None:
        self._sockets = sockets
        self.callLater = clock.callLater
        self.seconds = clock.seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sockets, name)


class End(Protocol, Watched):
    """One end of a TCP connection, driven by a test."""

    transport: Any

    def __init__(self) -> None:
        Watched.__init__(self)
        self.received = bytearray()
        self.lost: Failure | None = None
        self.choked = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} lost={self.lost} received={bytes(self.received[-300:])!r}>"

    def connectionMade(self) -> None:
        self.transport.setTcpNoDelay(True)
        self.transport.registerProducer(self, True)

    def pauseProducing(self) -> None:
        self.choked = True

    def resumeProducing(self) -> None:
        self.choked = False
        self.look()

    def stopProducing(self) -> None: ...

    def dataReceived(self, data: bytes) -> None:
        self.received += data
        self.look()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008
        self.lost = reason
        self.look()

    def until(self, data: bytes) -> Deferred[Any]:
        """Wait for bytes to have come."""
        return self.when(lambda: data in self.received, data)

    def take(self) -> bytes:
        """What came since the last call."""
        data = bytes(self.received)
        self.received.clear()
        return data

    def closed(self) -> Deferred[Any]:
        """Wait for the other side to end the connection."""
        return self.when(lambda: self.lost is not None, "the end of the connection")

    @property
    def clean(self) -> bool:
        """Whether the other side ended the connection with FIN rather than RST."""
        assert self.lost is not None
        return bool(self.lost.check(ConnectionDone))

    def send(self, *pieces: bytes) -> None:
        """Write."""
        self.transport.write(b"".join(pieces))

    def drained(self) -> Deferred[Any]:
        """Wait for the other side to have taken most of what was sent."""
        return self.when(lambda: not self.choked, "room to write")

    def stop_reading(self) -> None:
        """Let what comes pile up."""
        self.transport.pauseProducing()

    def go_on_reading(self) -> None:
        self.transport.resumeProducing()

    def fin(self) -> None:
        """Close."""
        self.transport.unregisterProducer()
        self.transport.loseConnection()

    def half_close(self) -> None:
        """FIN, but go on reading."""
        self.transport.loseWriteConnection()

    def rst(self) -> None:
        """Reset, at once."""
        handle = self.transport.getHandle()
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abortConnection()


@implementer(IHalfCloseableProtocol)
class OpenEnd(End):
    """One that goes on sending when the other side has ended its half."""

    ended = False

    def readConnectionLost(self) -> None:
        self.ended = True
        self.look()

    def writeConnectionLost(self) -> None: ...


class RawUpstream(Factory, Watched):
    """A server that does what a test tells each of its connections to do."""

    noisy = False
    protocol = End

    def __init__(self) -> None:
        Watched.__init__(self)
        self.ends: list[End] = []
        self._taken = 0
        self.port: Any = None

    async def listen(self, port: int = 0) -> None:
        endpoint = TCP4ServerEndpoint(reactor, port, interface="127.0.0.1")
        self.port = await endpoint.listen(self)
        self.number: int = self.port.getHost().port

    def buildProtocol(self, addr: Any) -> End:
        end = End()
        self.ends.append(end)
        reactor.callLater(0, self.look)
        return end

    async def accept(self) -> End:
        """The next connection."""
        await self.when(lambda: len(self.ends) > self._taken and self.ends[self._taken].transport)
        self._taken += 1
        return self.ends[self._taken - 1]

    @property
    def everything(self) -> bytes:
        """All that was ever received."""
        return b"".join(bytes(end.received) for end in self.ends)

    async def request(self, ends_with: bytes = b"\r\n\r\n") -> End:
        """The next connection, once it has brought a request head."""
        end = await self.accept()
        await end.until(ends_with)
        return end

    async def stop(self) -> None:
        if self.port is not None:
            await self.port.stopListening()


class Proxy:
    """A site before a raw upstream."""

    def __init__(self, upstream: RawUpstream, policy: FakePolicy, clock: Clock) -> None:
        self.upstream = upstream
        self.policy = policy
        self.clock = clock
        self.clients: list[End] = []
        #: How many failures the log may have.
        self.failures = 0
        self.more_ports: list[Any] = []
        self.site: ProxySite
        self.pool: UpstreamPool
        self.port: Any = None

    async def client(self, *sends: bytes, kind: type[End] = End) -> Any:
        """A connected client, its first bytes sent."""
        host = self.port.getHost()
        endpoint = TCP4ClientEndpoint(reactor, host.host, host.port)
        factory = Factory.forProtocol(kind)
        factory.noisy = False
        end: End = await endpoint.connect(factory)
        self.clients.append(end)
        if sends:
            end.send(*sends)
        return end


def turn(times: int = 1) -> Deferred[Any]:
    """Let the reactor go round."""
    d: Deferred[Any] = Deferred()
    reactor.callLater(0, d.callback, None)
    if times > 1:
        d.addCallback(lambda _: turn(times - 1))
    return d


def open_sockets() -> list[Any]:
    """What the reactor still reads."""
    readers = [*reactor.getReaders(), *socket_loop(reactor).getReaders()]
    return [one for one in readers if isinstance(one, (Connection, Port))]


@asynccontextmanager
async def proxying(
    *,
    listen: bool = True,
    url: str | None = None,
    timeout: float = 5.0,
    trust_root: Any = None,
    status_limit: int = 3,
    base: str = "",
    policy: FakePolicy | None = None,
    upstream: RawUpstream | None = None,
) -> AsyncIterator[Proxy]:
    """A proxy whose time stands still, on real sockets. Fails if anything is left or an error was logged.

    :param url: of the upstream; its pool then has the real time, for name resolution and handshakes.
    :param upstream: listens already.
    """
    events: list[Any] = []
    globalLogPublisher.addObserver(events.append)
    listen = listen and upstream is None
    upstream = upstream or RawUpstream()
    policy = policy or FakePolicy()
    clock = Clock()
    proxy = Proxy(upstream, policy, clock)
    try:
        if listen:
            await upstream.listen()
        elif url is None:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                upstream.number = probe.getsockname()[1]
        where = url or f"http://127.0.0.1:{upstream.number}{base}"
        sockets = socket_loop(reactor)
        timed = Clocked(clock, sockets) if url is None else sockets
        pool = proxy.pool = UpstreamPool(
            timed, Upstream.parse(where), timeout=timeout, trust_root=trust_root
        )
        resource = EngineResource(
            pool,
            policy,
            reactor=clock,
            retry=RetryPolicy(1.0, 60.0, status_limit),
            observer=policy,
            chance=lambda: 0.5,
        )
        site = proxy.site = ProxySite(
            resource,
            {b"/hello": Hello()},
            clock=clock,
            vigil=Vigil(clock),  # type: ignore[arg-type]
        )
        proxy.port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(site)
        sockets.adopt(proxy.port)
        yield proxy
    finally:
        if proxy.port is not None:
            for port in (proxy.port, *proxy.more_ports):
                await port.stopListening()
            for client in proxy.clients:
                if client.lost is None:
                    client.transport.abortConnection()
            proxy.site.abort()
            proxy.pool.abort()
        for end in upstream.ends:
            if end.lost is None and end.transport is not None:
                end.transport.abortConnection()
        await upstream.stop()
        for _ in range(200):
            await turn()
            if not open_sockets():
                break
        globalLogPublisher.removeObserver(events.append)
    left = open_sockets()
    assert left == [], left
    assert not site.channels
    for gate in policy.gates:
        assert gate.ending is not None, f"a gate never ended: {gate.calls}"
    failures = [event for event in events if event.get("log_failure") is not None]
    assert len(failures) == proxy.failures, failures
