"""WebSocket relay: one client, one upstream, frames passed on as they come.

Both ends are autobahn protocols. autobahn does the handshakes, parses and checks the frames and
sends the control frames; this module joins the two ends at the level of frames:

* **Constant memory.** A frame's payload is passed on in the pieces in which it is read, whatever
  its length; a slow reader pauses the reading at the other end (``IPushProducer`` both ways).
* **Nothing changes.** Fragmentation, opcodes, FIN bits and payloads stay as they are. A client's
  payload is not even unmasked: the frame goes on with the client's own masking key, which RFC 6455
  section 5.3 wants to be unpredictable to whoever wrote the payload; it still is. Control frames
  are passed on end to end, so that a pong shows that the true peer lives.
* **Both ends live and die together** (sections 5.5.1 and 7). A Close is passed on at once and its
  answer comes back from the other end. A lost connection closes the other one: ComfyUI sends a
  client's events to the newest socket until an older one closes, so an old one must not linger.

Extensions are not offered upstream and not accepted from the client; subprotocols are negotiated
end to end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import attrs
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IReactorTime
from twisted.logger import Logger
from twisted.protocols.policies import ProtocolWrapper
from twisted.python.failure import Failure

from turnstile.proxy import ws_handshake as handshake
from turnstile.proxy.http1 import Headers, ResponseHead
from turnstile.proxy.vigil import Vigil
from turnstile.proxy.ws_ends import (
    OPEN,
    ClientEnd,
    End,
    Source,
    UpstreamEnd,
    UpstreamFactory,
    client_factory,
    server_factory,
)
from turnstile.proxy.ws_handshake import is_websocket_upgrade

__all__ = [
    "Headers",
    "RelayResult",
    "UpgradeRequest",
    "WebSocketRelay",
    "is_websocket_upgrade",
    "start_relay",
]

log = Logger()


@attrs.define
class UpgradeRequest:
    """A client's request to open a WebSocket, prepared for the upstream.

    :ivar target: the request target to send upstream, verbatim, base path already applied.
    :ivar client_headers: the client's headers as received.
    :ivar upstream_headers: the headers to send upstream, verbatim; hop-by-hop ones and
        ``Sec-WebSocket-*`` are not among them.
    """

    target: bytes
    client_headers: Headers
    upstream_headers: Headers


@attrs.frozen
class RelayResult:
    """How a relay ended.

    :ivar how: ``closed`` (Close frames), ``dropped`` (a connection ended without), ``violation``
        (RFC 6455 broken, 1002), ``refused`` (the upstream answered no 101), ``failed`` (turnstile
        answered: 400, 426, 502, 503, 504), ``aborted`` (:meth:`WebSocketRelay.abort`, time-outs).
    :ivar by: ``client``, ``upstream`` or ``relay``: which end began it.
    :ivar status: the status that the client was sent, 0 if it left before.
    """

    how: str
    by: str
    status: int
    close_code: int | None
    close_reason: bytes
    bytes_up: int
    bytes_down: int
    messages_up: int
    messages_down: int


class WebSocketRelay:
    """A relayed WebSocket, from the client's request until both connections are down.

    :ivar done: fires once, with a :class:`RelayResult`, when both are.
    """

    def __init__(
        self,
        request: UpgradeRequest,
        clock: IReactorTime,
        on_text: Callable[[bytes], object] | None,
        on_status: Callable[[int], object] | None,
        handshake_timeout: float,
        close_timeout: float,
    ) -> None:
        self.done: Deferred[RelayResult] = Deferred()
        self.request = request
        self._clock = clock
        self.on_text = on_text
        self._on_status = on_status
        self._handshake_timeout = handshake_timeout
        self._close_timeout = close_timeout
        self.phase = "connecting"  # then "open" or "refusing", then "ending"
        self.accept: Deferred[str | None] = Deferred()
        self._connecting: Deferred[Any] | None = None
        self._timer: Any = None
        self._deadline: Any = None
        self._how: tuple[str, str] | None = None
        self._status = 0
        self._close: tuple[int | None, bytes] | None = None
        self._closing_ourselves = False
        self._vigil = Vigil(clock)
        self._watched: int | None = None
        self.client = ClientEnd()
        self.client.factory = server_factory()
        self.client.relay = self
        self._upstream: UpstreamEnd | None = None

    # For the caller.

    def abort(self) -> None:
        """Drop both connections at once."""
        self.note_end("aborted", "relay")
        self.abort_both()

    def close(self, code: int = 1001, reason: str = "") -> None:
        """Close both ends by the book, and drop them if that takes too long."""
        if self.phase == "connecting":
            self.fail(503, reason or "shutting down")
            return
        self._arm_deadline()
        if self.phase != "open" or self._close is not None:
            return  # it is ending already
        text = reason.encode()[:123].decode(errors="ignore").encode()
        self.note_end("closed", "relay", leave=True)
        self._close = (code, text)
        self._closing_ourselves = True
        for side in self._sides():
            side.send_close_soon(code, text)

    # Opening. The two ends call what has no underscore.

    def _start(
        self,
        transport: Any,
        leftover: bytes,
        connect: Callable[[IProtocolFactory], Deferred[IProtocol]],
    ) -> None:
        if not getattr(transport, "connected", True):
            self.client.down = True
            self.note_end("dropped", "client")
            self._settle()
            return
        client = self.client
        client.transport = transport
        client.unregisterProducer()
        if isinstance(transport, ProtocolWrapper):
            transport.wrappedProtocol = client
        else:
            transport.protocol = client
        client.makeConnection(transport)
        problem = handshake.check_client(self.request.client_headers)
        if problem is not None:
            transport.resumeProducing()
            self.fail(problem.status, problem.reason, "client")
            return
        client._dataReceived(handshake.local_request(self.request.client_headers))
        transport.resumeProducing()
        if leftover:
            client.dataReceived(leftover)
        connecting = self._connecting = maybeDeferred(connect, UpstreamFactory(self))
        connecting.addCallbacks(self._connect_done, self._connect_failed)
        connecting.addErrback(lambda failure: log.failure("relay failed", failure))

    def build_upstream(self) -> UpstreamEnd | None:
        """The upstream is connected: make its end, if it is still wanted."""
        if self.phase != "connecting":
            return None
        factory = copy.copy(client_factory())
        factory.protocols = handshake.subprotocols(self.request.client_headers)
        upstream = self._upstream = UpstreamEnd()
        upstream.factory = factory
        upstream.relay = self
        return upstream

    def upstream_connected(self) -> None:
        """The request was sent."""
        self._timer = self._clock.callLater(self._handshake_timeout, self._handshake_late)

    def _handshake_late(self) -> None:
        self._timer = None
        self.fail(504, "the upstream did not answer the WebSocket handshake in time")

    def _connect_done(self, protocol: Any) -> None:
        self._connecting = None
        if self._upstream is None or self._upstream.down:
            self.fail(502, "the upstream closed the connection instead of answering")
        self._settle()

    def _connect_failed(self, failure: Failure) -> None:
        self._connecting = None
        if self.phase == "connecting":  # else it was cancelled
            self.fail(502, f"cannot connect to the upstream: {failure.getErrorMessage()}")
        self._settle()

    def opened(self, subprotocol: str | None) -> None:
        """The upstream said 101: so do we."""
        upstream, client = self._upstream, self.client
        assert upstream is not None
        if self.phase != "connecting":
            return
        self.phase = "open"
        self._answered(101)
        client.peer_side, upstream.peer_side = upstream, client
        client.transport.registerProducer(Source(self, upstream), True)
        upstream.transport.registerProducer(Source(self, client), True)
        self.accept.callback(subprotocol)
        if client.state != OPEN:
            self.abort()  # cannot happen: both ends know the same subprotocols
            return
        client.feed_early()

    def _answered(self, status: int) -> None:
        self._status = status
        self._cancel_timer()
        if self._on_status is not None:
            try:
                self._on_status(status)
            except Exception:
                log.failure("on_status failed")

    def refused(self, head: ResponseHead) -> None:
        """The upstream said something else: that is the answer."""
        assert self._upstream is not None
        self.phase = "refusing"
        self.note_end("refused", "upstream", leave=True)
        client = self.client
        client.early = b""
        self.unwatch(client)
        client.transport.resumeProducing()
        client.transport.registerProducer(Source(self, self._upstream), True)
        client.transport.write(handshake.refusal_head(head))
        self._answered(head.status)

    def refusal_done(self) -> None:
        """Its body is complete."""
        assert self._upstream is not None
        self.phase = "ending"
        self._upstream.finish()
        self.client.finish(linger=True)
        self._arm_deadline()

    def fail(self, status: int, reason: str, by: str = "relay") -> None:
        """Answer the client ourselves, instead of a 101."""
        if self.phase != "connecting":
            return
        self.note_end("failed", by)
        if not self.client.down:
            self.client.transport.write(handshake.error(status, reason, self.request.target))
            self._answered(status)
            self.client.finish(linger=True)
            self._arm_deadline()
        self._drop_upstream()
        self._settle()

    # Ending.

    def close_seen(self, side: End, code: int | None, reason: bytes) -> None:
        """A Close frame came: pass it on; the second one is the answer to the first."""
        other = side.peer_side
        assert other is not None
        self._arm_deadline()
        if self._closing_ourselves:
            if not side.mid_frame:  # else our Close comes after that frame
                side.finish()
            return
        if self._close is None:
            self._close = (code, reason)
            self.note_end("closed", side.name, leave=True)
        if other.state == OPEN:
            other.sendCloseFrame(code, reason or None)
        if other.close_received:
            side.finish()
            other.finish()

    def violation(self, side: End, reason: str) -> None:
        """Section 7.1.7: fail the connection, and the other one with it."""
        self.note_end("violation", side.name)
        self._arm_deadline()
        for end in self._sides():
            if end.mid_frame:
                end.abort()  # no frame can be put into another
                continue
            if end.state == OPEN:
                end.sendCloseFrame(1002, reason.encode()[:123])
            end.finish(linger=True)

    def autobahn_dropped(self, side: End) -> None:
        """Autobahn gave up on a handshake, or met an error that is not expected."""
        if self.phase == "connecting":
            self.fail(502, "the WebSocket handshake failed")
        else:
            self.abort()

    def lost(self, side: End, reason: Failure) -> None:
        """A connection is down: the other one must not outlive it."""
        self.unwatch(side)
        phase = self.phase
        if side is self.client:
            if phase in ("connecting", "refusing"):
                self.note_end("dropped", "client")
                self._drop_upstream()
        elif phase == "connecting":
            self._cancel_timer()
            if self._connecting is None:  # else `connect` may have better luck the next time
                self.fail(502, "the upstream closed the connection instead of answering")
        elif phase == "refusing":
            assert self._upstream is not None
            if self._upstream.refusal_complete(reason):
                self.refusal_done()
            else:
                self.note_end("dropped", "upstream")
                self.client.abort()
        if phase in ("open", "ending") and side.peer_side is not None:
            self.note_end("dropped", side.name)
            other = side.peer_side
            if side.close_received or reason.check(ConnectionDone):
                # What it said last is still sent, and then an end like its own.
                other.finish(linger=side.close_received)
                self._arm_deadline()
            elif not other.finishing:
                other.abort()
        self._settle()

    def note_end(self, how: str, by: str, leave: bool = False) -> None:
        """Note how it ended, the first time; the relay is over unless *leave*."""
        if self._how is None:
            self._how = (how, by)
        if not leave:
            self.phase = "ending"

    def _sides(self) -> list[End]:
        sides: list[End] = [self.client]
        if self._upstream is not None:
            sides.append(self._upstream)
        return [side for side in sides if not side.down]

    def _drop_upstream(self) -> None:
        self._cancel_timer()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._upstream is not None and self._upstream.transport is not None:
            self._upstream.abort()

    def abort_both(self) -> None:
        """Drop what there is."""
        if self.client.transport is not None:
            self.client.abort()
        self._drop_upstream()
        self._settle()

    def watch(self, side: End) -> None:
        """A side is not read now: a client's end must be noticed nevertheless.

        An upstream's is not looked for: it may have sent more than was read so far.
        """
        side.paused = True
        if side is not self.client or self._watched is not None:
            return
        transport: Any = side.transport
        while isinstance(transport, ProtocolWrapper):
            transport = transport.transport
        if hasattr(transport, "fileno"):
            fd = self._watched = transport.fileno()
            self._vigil.watch(fd, self._client_gone)

    def unwatch(self, side: End) -> None:
        """It is read again, or gone."""
        side.paused = False
        if side is self.client and self._watched is not None:
            self._vigil.unwatch(self._watched)
            self._watched = None

    def _client_gone(self) -> None:
        self.note_end("dropped", "client")
        self.abort_both()

    def _arm_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self._clock.callLater(self._close_timeout, self._out_of_time)

    def _out_of_time(self) -> None:
        self._deadline = None
        self.abort()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _settle(self) -> None:
        """Fire :attr:`done` if everything is over."""
        if self._connecting is not None or self._sides() or self.done.called:
            return
        self._cancel_timer()
        self._vigil.stop()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        how, by = self._how or ("dropped", "relay")
        code, reason = self._close or (None, b"")
        up, down = self.client, self._upstream
        self.done.callback(
            RelayResult(
                how=how,
                by=by,
                status=self._status,
                close_code=code,
                close_reason=reason,
                bytes_up=up.octets,
                bytes_down=down.octets if down is not None else 0,
                messages_up=up.messages,
                messages_down=down.messages if down is not None else 0,
            )
        )


def start_relay(
    transport: Any,
    raw_head: bytes,
    leftover: bytes,
    request: UpgradeRequest,
    connect: Callable[[IProtocolFactory], Deferred[IProtocol]],
    *,
    clock: IReactorTime,
    on_text: Callable[[bytes], object] | None = None,
    on_status: Callable[[int], object] | None = None,
    handshake_timeout: float = 60.0,
    close_timeout: float = 10.0,
) -> WebSocketRelay:
    """Take over a client's connection whose request asks for a WebSocket, and relay it.

    The upstream is connected and answers first; its 101, or its refusal, is the client's answer.

    :param transport: the accepted connection, TCP or TLS. Its protocol is replaced and its producer
        unregistered; timers of the old protocol are the caller's to stop.
    :param raw_head: the request head as received. It is not read again: what matters is in *request*.
    :param leftover: what followed the head: perhaps the first frames.
    :param connect: makes the upstream's connection, with whatever patience it has; its Deferred is
        cancelled when the client goes first.
    :param on_text: sees every text message from the upstream of at most 64 KiB.
    :param on_status: sees the status that the client is sent.
    :param handshake_timeout: seconds for the upstream's answer once it is connected.
    :param close_timeout: seconds for everything after the first sign of an end.
    """
    relay = WebSocketRelay(request, clock, on_text, on_status, handshake_timeout, close_timeout)
    relay._start(transport, leftover, connect)
    return relay
