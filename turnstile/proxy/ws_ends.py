"""The two ends of a relayed WebSocket: autobahn's protocols, joined at the level of frames.

autobahn parses and checks what is received and calls the ``on...`` methods here; they pass it to
the other end as it comes. :mod:`turnstile.proxy.websocket` says what for, and decides when both end.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import struct
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IAddress, IPushProducer
from twisted.internet.protocol import Factory, connectionDone
from twisted.logger import Logger
from twisted.protocols.policies import ProtocolWrapper
from twisted.python.failure import Failure
from zope.interface import implementer

from turnstile.proxy import ws_handshake as handshake
from turnstile.proxy.http1 import MAX_HEAD, BadMessage, Framing, ResponseHead, UntilClose
from turnstile.websockets import websocket as autobahn

if TYPE_CHECKING:
    from turnstile.proxy.websocket import WebSocketRelay

log = Logger()

TEXT_LIMIT = 65536
"""Longest text message that ``on_text`` gets to see."""
EARLY_LIMIT = 65536
"""What a client may send before it has its 101; then it is not read until it has."""

OPEN: int = autobahn.WebSocketServerProtocol.STATE_OPEN
CONNECTING: int = autobahn.WebSocketServerProtocol.STATE_CONNECTING
CLOSED: int = autobahn.WebSocketServerProtocol.STATE_CLOSED
# autobahn cuts its buffer at the front once for each frame, so a long one full of short frames
# would cost quadratic time: it is fed short pieces, except inside a long frame.
_PIECE = 4096
_TEXT = 0x81  # FIN and the opcode
_WHOLE = (_TEXT, 0x82)
_JOIN = 4096  # up to here a frame's head and payload are one write


class End:
    """What both ends share, over autobahn's protocol classes (which are untyped in parts)."""

    # autobahn's
    state: int
    data: bytes
    transport: Any
    current_frame: Any
    inside_message: bool
    current_frame_masker: Any
    control_frame_data: Any
    _dataReceived: Any
    _connectionLost: Any
    sendCloseFrame: Any
    sendPing: Any
    sendPong: Any

    # As a factory's option it comes too late: autobahn sets the socket before it reads the options.
    tcpNoDelay = True

    name: str
    masked: int  # the mask bit that received frames have
    taps = False  # whether somebody wants to see text messages
    relay: WebSocketRelay
    peer_side: End | None = None
    down = False  # the connection is lost
    finishing = False  # nothing more is written, the connection is being closed
    close_received = False  # the peer's Close frame was seen; what follows it is ignored
    paused = False  # not read, because the other end is slow
    octets = 0
    messages = 0
    mid_frame = False  # a data frame is partly written here
    _head = b""  # that frame's head, until its first payload bytes
    _close_after: tuple[int, bytes] | None = None  # Close to send once that frame is complete

    # Received: autobahn calls these.

    def feed(self, data: bytes) -> None:
        """Pass on what the open connection brought."""
        pos, end = self._pass_whole(data), len(data)
        while pos < end and self.state != CLOSED and not self.close_received:
            step = _PIECE
            if self.current_frame is not None:
                step = max(step, self.current_frame.length - self.current_frame_masker.pointer())
            self._dataReceived(data if step >= end and pos == 0 else data[pos : pos + step])
            pos += step

    def _pass_whole(self, data: bytes) -> int:
        """Pass on, as they are, the messages of one frame each that ``data`` begins with: most of all that comes.

        All else, and all that is not as it should be, is for autobahn to parse.

        :return: how many bytes they are.
        """
        peer = self.peer_side
        if (
            self.state != OPEN
            or self.data
            or self.current_frame is not None
            or self.inside_message
            or self.close_received
            or peer is None
            or peer.state != OPEN
            or peer._close_after is not None
        ):
            return 0
        pos, end = 0, len(data)
        texts: list[bytes] = []
        while end - pos > 4 and data[pos] in _WHOLE:
            length = data[pos + 1] ^ self.masked
            start = pos + 2
            if length == 126:
                length = data[pos + 2] << 8 | data[pos + 3]
                start = pos + 4
                if length < 126:
                    break
            elif length > 126:
                # Long, or its mask bit is wrong.
                break
            after = start + length + (4 if self.masked else 0)
            if after > end:
                break
            if self.taps and data[pos] == _TEXT:
                texts.append(data[start:after])
            self.octets += length
            self.messages += 1
            pos = after
        if pos:
            peer.transport.write(data if pos == end else data[:pos])
        for text in texts:
            self.show(text)
        return pos

    def show(self, text: bytes) -> None:
        """A short text message was passed on."""

    def onMessageBegin(self, isBinary: bool) -> None:
        """A data message begins; its frames follow."""

    def onMessageFrameBegin(self, length: int) -> None:
        """A data frame begins: its head is known."""
        if self.peer_side is not None:
            self.peer_side.begin_frame(self.current_frame)

    def onMessageFrameData(self, payload: bytes) -> None:
        """A piece of a data frame, as it was read."""
        self.octets += len(payload)
        if self.peer_side is not None:
            self.peer_side.frame_data(payload)

    def onMessageFrameEnd(self) -> None:
        """A data frame is complete."""
        if self.peer_side is not None:
            self.peer_side.end_frame()

    def onMessageEnd(self) -> None:
        """A data message is complete."""
        self.messages += 1

    def processControlFrame(self) -> Any:
        """Unmask a client's control frame: ``applyMask`` is off, data frames stay masked."""
        payload, mask = b"".join(self.control_frame_data), self.current_frame.mask
        if mask:
            self.control_frame_data = [bytes(c ^ mask[i & 3] for i, c in enumerate(payload))]
        return super().processControlFrame()  # type: ignore[misc]

    def onPing(self, payload: bytes) -> None:
        """Pings go to the other end, which answers them."""
        if self.peer_side is not None:
            self.peer_side.sendPing(payload)

    def onPong(self, payload: bytes) -> None:
        """Pongs too, asked for or not (section 5.5.3)."""
        if self.peer_side is not None:
            self.peer_side.sendPong(payload)

    def onCloseFrame(self, code: int | None, reasonRaw: bytes | None) -> Any:
        """A Close frame: the other end gets it, and it is the last that is read here."""
        # Section 7.4: these never go over the wire; every other code is the endpoints' affair.
        if code is not None and (not 1000 <= code <= 4999 or code in (1004, 1005, 1006, 1015)):
            return self._protocol_violation(f"invalid close code {code}")
        self.close_received = True
        self.data = b""
        self.relay.close_seen(self, code, reasonRaw or b"")
        return None

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:
        """Nothing: :meth:`connectionLost` tells the relay."""

    def _protocol_violation(self, reason: str) -> bool:
        """Autobahn found a broken frame: stop parsing here."""
        self.data = b""
        self.relay.violation(self, reason)
        return True

    def _onOpen(self) -> None:
        """Without autobahn's look at TLS certificates, which is of no use here."""
        self.onOpen()

    def onOpen(self) -> None:
        """The handshake is complete."""

    def dropConnection(self, abort: bool = False) -> None:
        """Autobahn wants to be rid of the connection: only when it failed its handshake."""
        self.relay.autobahn_dropped(self)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The connection is gone."""
        self.down = True
        self._connectionLost(reason)
        self.relay.lost(self, reason)

    # To be sent: the other side calls these.

    def sendData(self, data: bytes, sync: bool = False, chopsize: int | None = None) -> None:
        """Autobahn's way out, for control frames and handshakes, without its log line a call."""
        self.transport.write(data)

    def begin_frame(self, frame: Any) -> None:
        """Begin a data frame like the one received (section 5.2).

        Not autobahn's ``beginMessageFrame``: that one cannot set FIN (each message would end in an
        extra empty frame) and chooses a masking key of its own.
        """
        if self.state != OPEN or self._close_after is not None:
            return
        length = frame.length
        first = frame.opcode | (0x80 if frame.fin else 0)
        masked = 0x80 if frame.mask else 0
        if length < 126:
            head = bytes((first, masked | length))
        elif length < 65536:
            head = struct.pack("!BBH", first, masked | 126, length)
        else:
            head = struct.pack("!BBQ", first, masked | 127, length)
        self._head = head + (frame.mask or b"")
        self.mid_frame = True

    def frame_data(self, payload: bytes) -> None:
        """Some of the begun frame's payload."""
        if not self.mid_frame:
            return
        if not self._head:
            self.transport.write(payload)
        elif len(payload) <= _JOIN:
            self.transport.write(self._head + payload)
        else:
            self.transport.writeSequence((self._head, payload))
        self._head = b""

    def end_frame(self) -> None:
        """The begun frame is complete."""
        self.mid_frame = False
        if self._close_after is not None and self.state == OPEN:
            self.sendCloseFrame(*self._close_after)
            if self.close_received:
                self.finish()

    def send_close_soon(self, code: int, reason: bytes) -> None:
        """Send a Close frame, not in the middle of a data frame."""
        if self.mid_frame:
            self._close_after = (code, reason)
        elif self.state == OPEN:
            self.sendCloseFrame(code, reason)

    # The connection.

    def unregisterProducer(self) -> None:
        """Detach the other side as the producer of what is written here."""
        with contextlib.suppress(RuntimeError):  # some transports mind that there was none
            self.transport.unregisterProducer()

    def _stop(self) -> None:
        self.finishing = True
        self.state = CLOSED
        self.mid_frame = False
        self.unregisterProducer()

    def finish(self, linger: bool = False) -> None:
        """Close the connection when all that was written is sent.

        :param linger: the peer may still be sending. Closing now would reset the connection, and
            the reset can overtake our last bytes (RFC 9112 section 9.6), so only our half is
            closed and what comes is ignored until the peer closes or time is up.
        """
        if self.down or self.finishing:
            return
        self._stop()
        self.transport.resumeProducing()
        # TLS has no half-close, but waits for the peer's closure alert by itself.
        if linger and not isinstance(self.transport, ProtocolWrapper):
            half_close = getattr(self.transport, "loseWriteConnection", None)
            if half_close is not None:
                half_close()
                return
        self.transport.loseConnection()

    def abort(self) -> None:
        """Drop the connection without regard to what is unsent."""
        if not self.down:
            self._stop()
            self.transport.abortConnection()


class ClientEnd(End, autobahn.WebSocketServerProtocol):  # type: ignore[misc,unused-ignore]
    """The server's end of the client's connection."""

    name = "client"
    masked = 0x80
    extra_headers = b""  # of the upstream's 101
    early = b""

    def dataReceived(self, data: bytes) -> None:
        """Bytes from the client; those that come before its 101 are kept for later."""
        if self.state == CONNECTING:
            if self.relay.phase == "connecting":
                self.early += data
                if len(self.early) > EARLY_LIMIT:
                    self.transport.pauseProducing()
                    self.relay.watch(self)
        else:
            self.feed(data)

    def onConnect(self, request: Any) -> Deferred[str | None]:
        """Answer when the upstream has answered."""
        return self.relay.accept

    def feed_early(self) -> None:
        """Parse what came before the 101."""
        if self.paused:
            self.relay.unwatch(self)
            self.transport.resumeProducing()
        early, self.early = self.early, b""
        self.feed(early)

    def sendData(self, data: bytes, sync: bool = False, chopsize: int | None = None) -> None:
        """Add the upstream's own headers (cookies, say) to autobahn's 101."""
        if self.state == CONNECTING:
            data = data[:-2] + self.extra_headers + b"\r\n"
        self.transport.write(data)


class UpstreamEnd(End, autobahn.WebSocketClientProtocol):  # type: ignore[misc,unused-ignore]
    """The client's end of the upstream's connection."""

    name = "upstream"
    masked = 0
    websocket_key: bytes
    _body: Framing | None = None
    _text: list[bytes] | None = None
    _text_length = 0
    _subprotocol: str | None = None

    def dataReceived(self, data: bytes) -> None:
        """Bytes from the upstream: its answer, then frames; or its refusal."""
        if self._body is not None:
            self._refusal_data(data)
        elif self.state == CONNECTING:
            self._dataReceived(data)
        else:
            self.feed(data)

    def startHandshake(self) -> None:
        """Send our request: the prepared headers verbatim, where autobahn would write its own."""
        self.websocket_key = base64.b64encode(os.urandom(16))
        request = self.relay.request
        self.sendData(
            handshake.upstream_request(
                request.target,
                request.upstream_headers,
                request.client_headers,
                self.websocket_key,
            )
        )
        self.relay.upstream_connected()

    def processHandshake(self) -> Any:
        """Look at the answer; a 101 is autobahn's to verify, anything else a refusal to pass on."""
        while True:
            end = self.data.find(b"\r\n\r\n") + 4
            if end < 4 and len(self.data) <= MAX_HEAD:
                return None
            try:
                head = handshake.parse_answer(self.data, end)
            except BadMessage as error:
                return self.failHandshake(error.reason)
            raw, rest = self.data[:end], self.data[end:]
            if head.status == 101 or head.status >= 200:
                break
            self.data = rest  # an interim answer (RFC 9110 section 15.2)
        if head.status != 101:
            return self._refusal(head, rest)
        self.relay.client.extra_headers = handshake.answer_headers(head)
        self.data = handshake.local_response(raw)
        result = super().processHandshake()
        if self.state != CONNECTING:
            self.feed(rest)  # frames that came with the 101
        return result

    def onConnect(self, response: Any) -> None:
        """Autobahn accepts the upstream's answer."""
        self._subprotocol = response.protocol

    def onOpen(self) -> None:
        """Answer the client; frames that came with the 101 are parsed after this."""
        self.relay.opened(self._subprotocol)

    def failHandshake(self, reason: str) -> None:
        """The answer makes no sense."""
        self.relay.fail(502, f"WebSocket handshake with the upstream failed: {reason}")

    def _refusal(self, head: ResponseHead, data: bytes) -> None:
        self._body = head.framing(b"GET")
        self.data = b""
        self.relay.refused(head)
        self._refusal_data(data)

    def _refusal_data(self, data: bytes) -> None:
        assert self._body is not None
        if self.finishing:
            return
        self.data += data  # what the framing left over of the last piece: a part of a chunk's line
        try:
            size = self._body.feed(self.data)
        except BadMessage:
            self.relay.note_end("dropped", "upstream")
            self.relay.abort_both()
            return
        body, self.data = self.data[:size], self.data[size:]
        if body:
            self.octets += size
            self.relay.client.transport.write(body)
        if self._body.done:
            self.relay.refusal_done()

    def refusal_complete(self, reason: Failure) -> bool:
        """Whether the refusal may end where the connection ended."""
        return isinstance(self._body, UntilClose) and reason.check(ConnectionDone) is not None

    # The tap of short text messages.

    def onMessageBegin(self, isBinary: bool) -> None:
        """Watch a text message, if anybody wants to know."""
        self._text = [] if self.relay.on_text is not None and not isBinary else None
        self._text_length = 0

    def onMessageFrameBegin(self, length: int) -> None:
        """Stop watching when the message is too long."""
        self._text_length += length
        if self._text_length > TEXT_LIMIT:
            self._text = None
        super().onMessageFrameBegin(length)

    def onMessageFrameData(self, payload: bytes) -> None:
        """Keep the watched message's bytes."""
        if self._text is not None:
            self._text.append(payload)
        super().onMessageFrameData(payload)

    def onMessageEnd(self) -> None:
        """Show the message."""
        super().onMessageEnd()
        if self._text is not None and self.relay.on_text is not None:
            text, self._text = b"".join(self._text), None
            self.show(text)

    @property
    def taps(self) -> bool:  # type: ignore[override]
        """Whether somebody wants to see text messages."""
        return self.relay.on_text is not None

    def show(self, text: bytes) -> None:
        """Show a text message."""
        on_text = self.relay.on_text
        if on_text is not None and len(text) <= TEXT_LIMIT:
            try:
                on_text(text)
            except Exception:
                log.failure("on_text failed")


@implementer(IPushProducer)
class Source:
    """One side as the producer of what is written to the other."""

    def __init__(self, relay: WebSocketRelay, side: End) -> None:
        self._relay = relay
        self._side = side

    def pauseProducing(self) -> None:
        """The other side is slow."""
        if not self._side.finishing:
            self._side.transport.pauseProducing()
            self._relay.watch(self._side)

    def resumeProducing(self) -> None:
        """It has caught up."""
        self._relay.unwatch(self._side)
        self._side.transport.resumeProducing()

    def stopProducing(self) -> None:
        """It is gone: its connectionLost does what is needed."""


class UpstreamFactory(Factory):
    """Makes the upstream's end when the connection is there."""

    noisy = False

    def __init__(self, relay: WebSocketRelay) -> None:
        self._relay = relay

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """None if nobody wants the connection any more."""
        return self._relay.build_upstream()


def _options(factory: Any) -> Any:
    """Autobahn's own limits and timers off: what is long or late is not for it to judge."""
    options: dict[str, Any] = {
        "utf8validateIncoming": False,  # the endpoints do that; here it would only cost time
        "maxFramePayloadSize": 0,
        "maxMessagePayloadSize": 0,
        "openHandshakeTimeout": 0,
        "closeHandshakeTimeout": 0,
        "autoPingInterval": 0,
        "autoPingTimeout": 0,
    }
    if factory.isServer:
        options["versions"] = [13]
        options["applyMask"] = False
    else:
        options["serverConnectionDropTimeout"] = 0
    factory.setProtocolOptions(**options)
    return factory


# One each for the process: autobahn seeds the random module anew with every factory.
@functools.cache
def server_factory() -> Any:
    """What autobahn wants as the factory of a :class:`ClientEnd`."""
    return _options(autobahn.WebSocketServerFactory(server=None, reactor=object()))


@functools.cache
def client_factory() -> Any:
    """What autobahn wants as the factory of an :class:`UpstreamEnd`; to be copied for each."""
    return _options(autobahn.WebSocketClientFactory(reactor=object()))
