"""The data path alone, over real sockets: a scripted raw upstream, raw clients, a gate that records its calls."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from twisted.internet import reactor as _reactor
from twisted.internet.defer import Deferred, succeed
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.tcp import Connection, Port
from twisted.logger import globalLogPublisher
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from zope.interface import implementer

from turnstile.config import Upstream
from turnstile.engines.base import Admission
from turnstile.proxy.gate import Ending
from turnstile.proxy.http1 import RequestHead
from turnstile.proxy.resource import EngineResource
from turnstile.proxy.retry import RetryPolicy
from turnstile.proxy.site import ProxySite
from turnstile.proxy.upstream import UpstreamPool
from turnstile.proxy.vigil import Vigil

reactor: Any = _reactor
#: Real seconds after which something counts as never coming.
PATIENCE = 15.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Clocked:
    """The reactor with a time of its own, which stands still unless a test moves it."""

    def __init__(self, clock: Clock) -> None:
        self.callLater = clock.callLater
        self.seconds = clock.seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(reactor, name)


class Watched:
    """Lets tests wait for a condition, which is looked at whenever something happened."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], Any], Deferred[Any]]] = []

    def look(self) -> None:
        """Something happened."""
        for entry in tuple(self._waiting):
            if entry in self._waiting and entry[0]():
                self._waiting.remove(entry)
                # Not from within what is being tested.
                reactor.callLater(0, self._fire, entry[1])

    def _fire(self, d: Deferred[Any]) -> None:
        if not d.called:
            d.callback(None)

    def when(self, condition: Callable[[], Any], what: object = "") -> Deferred[Any]:
        """Fires once ``condition`` holds."""
        if condition():
            return succeed(None)
        d: Deferred[Any] = Deferred()
        self._waiting.append((condition, d))

        def too_late(value: Any, timeout: float) -> Any:
            raise AssertionError(f"it never came true: {what or condition} {self!r}")

        return d.addTimeout(PATIENCE, reactor, too_late)


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


class FakeGate:
    """Records its calls; a test holds the keys."""

    capture = 0
    detached = False

    def __init__(self, policy: FakePolicy) -> None:
        self._policy = policy
        self.calls: list[Any] = []
        self.entering: Deferred[None] | None = None
        self.clearing: Deferred[None] | None = None
        self.cancelled = 0
        self.capture = policy.capture
        self.detached = policy.detached

    def _call(self, *call: Any) -> None:
        self.calls.append(call[0] if len(call) == 1 else call)
        self._policy.look()

    def _cancelled(self, _: object) -> None:
        self.cancelled += 1
        self._policy.look()

    def enter(self) -> Deferred[None] | None:
        self._call("enter")
        if isinstance(self._policy.enter, Exception):
            raise self._policy.enter
        if self._policy.enter == "now":
            return None
        self.entering = Deferred(self._cancelled)
        self._policy.look()
        return self.entering

    def leave(self) -> None:
        self._call("leave")

    def room(self) -> Deferred[None] | None:
        self._call("room")
        if self._policy.room == "now":
            return None
        self.clearing = Deferred(self._cancelled)
        self._policy.look()
        return self.clearing

    def forwarding(self) -> None:
        self._call("forwarding")

    def answered(self, status: int, fields: Any) -> None:
        self._call("answered", status)

    def captured(self, body: bytes, complete: bool) -> None:
        self._call("captured", body, complete)

    def end(self, ending: Ending, *, body_sent: bool) -> None:
        assert not [call for call in self.calls if call[0] == "end"], "end was called twice"
        self._call("end", ending, body_sent)

    @property
    def ending(self) -> Any:
        """How it ended, and whether the request was all sent; None: not yet."""
        return self.calls[-1][1:] if self.calls and self.calls[-1][0] == "end" else None


class FakePolicy(Watched):
    """Requests for ``/gated`` take the lock, those for ``/peek`` are looked into."""

    engine = "fake"
    retry_after = 7
    keeps_client_host = False

    def __init__(self) -> None:
        super().__init__()
        self.enter: Any = "now"
        self.room = "now"
        self.capture = 0
        self.detached = False
        self.gates: list[FakeGate] = []
        self.asked: list[bytes] = []
        #: What the metrics are told.
        self.done: list[int] = []
        self.retries: list[str] = []

    def admission(self, method: bytes, target: bytes) -> Admission:
        if target.startswith((b"/gated", b"/v1/gated", b"/api/gated")):
            return Admission.LEASE
        return Admission.PEEK if target.startswith(b"/peek") else Admission.PASS

    def is_unload_only(self, target: bytes, body: bytes) -> bool:
        self.asked.append(body)
        return body == b"unload"

    def open_gate(self, head: RequestHead, client: str) -> FakeGate:
        self.gates.append(FakeGate(self))
        return self.gates[-1]

    def request_done(self, engine: str, status: int) -> None:
        self.done.append(status)
        self.look()

    def retried(self, engine: str, reason: str) -> None:
        self.retries.append(reason)
        self.look()

    @property
    def gate(self) -> FakeGate:
        """The only gate."""
        assert len(self.gates) == 1
        return self.gates[0]

    def waiting(self, count: int = 1) -> Deferred[Any]:
        """Wait for requests to wait at their gates."""
        return self.when(
            lambda: sum(1 for gate in self.gates if gate.entering) >= count, "a waiter"
        )

    def clearing(self) -> Deferred[Any]:
        """Wait for room to be made at the only gate."""
        return self.when(lambda: self.gates and self.gate.clearing, "room being made")

    def ended(self, ending: Ending, body_sent: bool) -> Deferred[Any]:
        """Wait for the only gate to have ended thus."""
        return self.when(lambda: self.gates and self.gate.ending == (ending, body_sent), ending)


class Hello(Resource):
    """A page of our own."""

    def render(self, request: Any) -> bytes:
        request.setHeader(b"Content-Type", b"text/plain")
        return b"hello"


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
        timed = Clocked(clock) if url is None else reactor
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
            if not [one for one in reactor.getReaders() if isinstance(one, (Connection, Port))]:
                break
        globalLogPublisher.removeObserver(events.append)
    left = [one for one in reactor.getReaders() if isinstance(one, (Connection, Port))]
    assert left == [], left
    assert not site.channels
    for gate in policy.gates:
        assert gate.ending is not None, f"a gate never ended: {gate.calls}"
    failures = [event for event in events if event.get("log_failure") is not None]
    assert len(failures) == proxy.failures, failures
