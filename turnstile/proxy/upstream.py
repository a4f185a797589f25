"""Connections to an engine: pooled, kept alive, and honest about what happened to them."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from twisted.internet import ssl
from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import (
    HostnameEndpoint,
    TCP4ClientEndpoint,
    TCP6ClientEndpoint,
    wrapClientTLS,
)
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.error import TimeoutError as ConnectTimeout
from twisted.internet.interfaces import (
    IAddress,
    IHandshakeListener,
    IProtocolFactory,
    IPushProducer,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import Factory
from twisted.internet.protocol import Protocol as TwistedProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from turnstile.config import Upstream
from turnstile.proxy.http1 import BadMessage, Framing, ResponseHead, head_end, parse_response
from turnstile.proxy.vigil import socket_below

_log = Logger()

#: Seconds after which an idle connection is closed.
MAX_IDLE = 30.0
#: Seconds of idleness up to which a connection may carry a request that must not be repeated. Shorter than any
#: keep-alive time of the engines and of the servers that stand before them (the shortest in use is 5 s).
MAX_IDLE_UNSAFE = 2.0
#: The most idle connections kept for one engine.
MAX_KEPT = 256


class ResponseSink(Protocol):
    """What an upstream connection tells the exchange that uses it."""

    @property
    def upload_done(self) -> bool:
        """Whether the whole request was handed to the connection."""
        ...

    def response_head(self, head: ResponseHead) -> None:
        """The head may be kept back until it can go out with the first bytes of the body …"""
        ...

    def response_flush(self) -> None:
        """… of which there are none yet."""
        ...

    def response_data(self, raw: bytes, payload: list[bytes] | None) -> None: ...

    def response_done(self) -> None: ...

    def upstream_lost(self, reason: Failure) -> None: ...

    def upstream_paused(self) -> None: ...

    def upstream_resumed(self) -> None: ...


@implementer(IHandshakeListener, IPushProducer)
class UpstreamConnection(TwistedProtocol):
    """One HTTP/1.1 connection to an engine, used by one exchange at a time."""

    #: The transport as Twisted gives it; typed loosely since plain TCP and TLS differ.
    transport: Any

    def __init__(self, pool: UpstreamPool, ready: Callable[[UpstreamConnection], None]) -> None:
        self.pool = pool
        self.sink: ResponseSink | None = None
        self.connected_ok = False
        #: Set once the transport is gone.
        self.lost: Failure | None = None
        #: How many answers this connection has given; 0: fresh.
        self.served = 0
        self.idle_since = 0.0
        self.want_payload = False
        self._ready = ready
        self._method = b""
        self._head: ResponseHead | None = None
        self._framing: Framing | None = None
        self._buffer = b""
        self._expecting = False
        #: Whether the peer reads slower than it is written to.
        self._choked = False
        self._paused = False
        self._handle: Any = None

    # -- life of the connection -------------------------------------------------------------------------------

    def connectionMade(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.transport.setTcpNoDelay(True)
        self.transport.registerProducer(self, True)
        if not self.pool.tls:
            # The endpoint's wrapper has done its work, and would be in the way of every read.
            self.transport.protocol = self
            self._connected()

    def handshakeCompleted(self) -> None:
        """The TLS handshake is over; a certificate that did not verify is on its way to connectionLost."""
        if not self.transport.disconnecting:
            self._connected()

    def _connected(self) -> None:
        self.connected_ok = True
        self._ready(self)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008
        self.lost = reason
        self.pool.forget(self)
        if not self.connected_ok:
            self.pool.handshake_failed(self, reason)
            return
        sink = self.sink
        if sink is None:
            return
        framing = self._framing
        if (
            framing is not None
            and self._head is not None
            and not self._head.te_chunked
            and self._head.content_length is None
            and reason.check(ConnectionDone)
        ):
            self._finish_response()
            return
        self.sink = None
        sink.upstream_lost(reason)

    def abort(self) -> None:
        """Drop the connection at once; the exchange hears nothing more."""
        self.sink = None
        if self.lost is None:
            self.transport.abortConnection()

    def close(self) -> None:
        """Close a connection that is not in use."""
        self.sink = None
        if self.lost is not None:
            return
        if self.pool.tls:
            # An orderly end of TLS waits for the peer's, however long.
            self.transport.abortConnection()
        else:
            self.transport.unregisterProducer()
            self.transport.loseConnection()

    def is_stale(self) -> bool:
        """Whether the peer has closed or said something while the connection was idle."""
        if self.lost is not None:
            return True
        handle = self._handle
        if handle is None:
            handle = self._handle = socket_below(self.transport)
            if handle is None:
                return True
        try:
            handle.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True
        return True

    # -- one exchange -----------------------------------------------------------------------------------------

    def claim(self, sink: ResponseSink) -> None:
        """Reserve the connection; nothing is sent yet, so nothing may come."""
        self.sink = sink

    def begin(self, method: bytes, want_payload: bool) -> None:
        """Expect one answer to a ``method`` request.

        :param want_payload: hand the body on free of its framing too.
        """
        self._method = method
        self.want_payload = want_payload
        self._head = None
        self._framing = None
        self._expecting = True

    def dataReceived(self, data: bytes) -> None:
        if not self._expecting or self.sink is None:
            # Bytes that nobody asked for: whatever they are, this connection cannot be trusted any more.
            sink = self.sink
            self.abort()
            self.lost = self.lost or Failure(ConnectionDone("unexpected data"))
            if sink is not None:
                sink.upstream_lost(self.lost)
            return
        if self._buffer:
            searched = len(self._buffer)
            data = self._buffer + data
            self._buffer = b""
        else:
            searched = 0
        try:
            if self._framing is None:
                sink = self.sink
                rest = self._read_head(data, searched)
                if rest is not None:
                    self._read_body(rest)
                if self.sink is sink:
                    sink.response_flush()
            else:
                self._read_body(data)
        except BadMessage as error:
            _log.warn("unreadable answer from upstream: {reason}", reason=error.reason)
            sink = self.sink
            self.abort()
            if sink is not None:
                sink.upstream_lost(Failure(error))

    def _read_head(self, data: bytes, searched: int) -> bytes | None:
        while True:
            end = head_end(data, searched)
            if end < 0:
                self._buffer = data
                return None
            head = parse_response(data[:end])
            data = data[end:]
            searched = 0
            if head.status == 101:
                raise BadMessage("unexpected switch of protocols", 502)
            sink = self.sink
            assert sink is not None
            if head.status >= 200:
                break
            sink.response_head(head)
            if self.sink is not sink:
                return None
        self._head = head
        self._framing = head.framing(self._method)
        sink.response_head(head)
        if self.sink is not sink:
            return None
        if self._framing.done:
            if data:
                head.keep_alive = False
            self._finish_response()
            return None
        return data or None

    def _read_body(self, data: bytes) -> None:
        framing = self._framing
        sink = self.sink
        assert framing is not None and sink is not None
        payload: list[bytes] | None = [] if self.want_payload else None
        used = framing.feed(data, payload)
        if used == len(data):
            sink.response_data(data, payload)
        else:
            rest = data[used:]
            if used:
                sink.response_data(data[:used], payload)
            if not framing.done:
                self._buffer = rest
            elif self._head is not None:
                # More than the message holds: the connection is out of step and is not used again.
                self._head.keep_alive = False
        if framing.done and self.sink is sink:
            self._finish_response()

    def _finish_response(self) -> None:
        sink, head = self.sink, self._head
        assert sink is not None and head is not None
        self.sink = None
        self._expecting = False
        self._framing = None
        self._buffer = b""
        self.served += 1
        # Given back first: the end of this exchange may start another one that can use the connection. Not if a part of
        # the request has yet to leave: the next one would stand behind it.
        if not sink.upload_done or self._choked:
            self.abort()
        elif head.keep_alive and self.lost is None:
            self.pool.give_back(self)
        else:
            self.close()
        sink.response_done()

    # -- backpressure -----------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Read nothing for a while: the client is slow."""
        self._paused = True
        self.transport.pauseProducing()

    def resume(self) -> None:
        """Go on reading."""
        if self._paused:
            self._paused = False
            self.transport.resumeProducing()

    def pauseProducing(self) -> None:
        """The upstream reads slower than the client sends."""
        self._choked = True
        if self.sink is not None:
            self.sink.upstream_paused()

    def resumeProducing(self) -> None:
        self._choked = False
        if self.sink is not None:
            self.sink.upstream_resumed()

    def stopProducing(self) -> None:
        """The transport is gone; connectionLost tells the rest."""


class _OneShot(Factory):
    noisy = False

    def __init__(self, build: Callable[[], UpstreamConnection]) -> None:
        self._build = build

    def buildProtocol(self, addr: IAddress | None) -> UpstreamConnection:
        return self._build()


def make_endpoint(
    reactor: Any, upstream: Upstream, timeout: float, trust_root: Any = None
) -> IStreamClientEndpoint:
    """A client endpoint for ``upstream``; TLS verifies the certificate and the name (service-identity).

    :param timeout: seconds until an attempt to connect is given up.
    :param trust_root: the certificates to trust instead of the platform's.
    """
    host, port = upstream.host, upstream.port
    endpoint: Any
    if isIPAddress(host):
        endpoint = TCP4ClientEndpoint(reactor, host, port, timeout=timeout)
    elif isIPv6Address(host):
        endpoint = TCP6ClientEndpoint(reactor, host, port, timeout=timeout)
    else:
        # A name with an address of a family that nothing listens on must not cost the default 0.3 s.
        endpoint = HostnameEndpoint(reactor, host, port, timeout=timeout, attemptDelay=0.02)
    if upstream.scheme == "https":
        options = ssl.optionsForClientTLS(host, trustRoot=trust_root)
        endpoint = wrapClientTLS(options, endpoint)
    result: IStreamClientEndpoint = endpoint
    return result


class UpstreamPool:
    """Connections to one engine.

    :param reactor: makes the connections and tells the time.
    :param timeout: seconds until an attempt to connect, TLS handshake included, is given up.
    """

    def __init__(
        self, reactor: Any, upstream: Upstream, *, timeout: float, trust_root: Any = None
    ) -> None:
        self.upstream = upstream
        self.tls = upstream.scheme == "https"
        self._reactor = reactor
        self._trust_root = trust_root
        self.set_timeout(timeout)
        self._idle: deque[UpstreamConnection] = deque()
        self._all: set[UpstreamConnection] = set()
        self._handshakes: dict[UpstreamConnection, Deferred[UpstreamConnection]] = {}
        self._sweep: Any = None
        self._closed = False

    def set_timeout(self, seconds: float) -> None:
        """Give later attempts to connect so many seconds."""
        self._timeout = seconds
        self.endpoint = make_endpoint(self._reactor, self.upstream, seconds, self._trust_root)

    def take(self, safe: bool) -> UpstreamConnection | None:
        """An idle connection that is still alive, the latest used first.

        :param safe: whether the request may be repeated should the connection turn out to be dead.
        """
        now = self._reactor.seconds()
        limit = MAX_IDLE if safe else MAX_IDLE_UNSAFE
        idle = self._idle
        while idle:
            conn = idle[-1]
            if now - conn.idle_since > limit:
                # Those before it are older still.
                return None
            idle.pop()
            if not conn.is_stale():
                return conn
            conn.abort()
        return None

    def connect(self) -> Deferred[UpstreamConnection]:
        """A fresh connection, its TLS handshake done; fails with whatever kept it from coming about.

        Cancelling the Deferred gives the attempt up.
        """
        attempt: Any = None
        timer: Any = None
        made: list[UpstreamConnection] = []

        def cancel(_: object) -> None:
            if timer is not None and timer.active():
                timer.cancel()
            attempt.cancel()
            for conn in made:
                self._handshakes.pop(conn, None)
                conn.abort()

        result: Deferred[UpstreamConnection] = Deferred(cancel)

        def build() -> UpstreamConnection:
            conn = UpstreamConnection(self, ready)
            made.append(conn)
            self._all.add(conn)
            if self.tls:
                self._handshakes[conn] = result
            return conn

        def ready(conn: UpstreamConnection) -> None:
            self._handshakes.pop(conn, None)
            if timer is not None and timer.active():
                timer.cancel()
            if result.called:
                conn.abort()
            else:
                result.callback(conn)

        def failed(failure: Failure) -> None:
            if timer is not None and timer.active():
                timer.cancel()
            if not result.called:
                result.errback(failure)

        def too_slow() -> None:
            if not result.called:
                for conn in made:
                    self._handshakes.pop(conn, None)
                    conn.abort()
                result.errback(ConnectTimeout(string="TLS handshake took too long"))

        if self.tls:
            timer = self._reactor.callLater(self._timeout, too_slow)
        attempt = self.endpoint.connect(_OneShot(build))
        attempt.addErrback(failed)
        return result

    def connect_factory(self, factory: IProtocolFactory) -> Deferred[Any]:
        """A fresh connection for another protocol than HTTP (the WebSocket relay)."""
        d: Deferred[Any] = self.endpoint.connect(factory)
        return d

    def handshake_failed(self, conn: UpstreamConnection, reason: Failure) -> None:
        result = self._handshakes.pop(conn, None)
        if result is not None and not result.called:
            result.errback(reason)

    def give_back(self, conn: UpstreamConnection) -> None:
        """Keep a connection whose answer is complete."""
        if self._closed or conn.lost is not None:
            conn.close()
            return
        conn.idle_since = self._reactor.seconds()
        # A pause for a client that has since gone must not keep the end of the connection from being seen.
        conn.resume()
        self._idle.append(conn)
        if len(self._idle) > MAX_KEPT:
            self._idle.popleft().close()
        if self._sweep is None:
            self._sweep = self._reactor.callLater(MAX_IDLE, self._close_idle)

    def forget(self, conn: UpstreamConnection) -> None:
        self._all.discard(conn)
        with contextlib.suppress(ValueError):
            self._idle.remove(conn)

    def _close_idle(self) -> None:
        self._sweep = None
        now = self._reactor.seconds()
        while self._idle and now - self._idle[0].idle_since >= MAX_IDLE:
            self._idle.popleft().close()
        if self._idle and not self._closed:
            wait = MAX_IDLE - (now - self._idle[0].idle_since)
            self._sweep = self._reactor.callLater(max(wait, 0.1), self._close_idle)

    def close(self) -> None:
        """Close idle connections now and those in use when their answer is complete."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        while self._idle:
            self._idle.popleft().close()

    def abort(self) -> None:
        """Drop every connection."""
        self.close()
        for conn in tuple(self._all):
            sink = conn.sink
            conn.abort()
            if sink is not None:
                sink.upstream_lost(Failure(ConnectionAborted()))
