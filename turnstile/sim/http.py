"""A small HTTP/1.1 server for the simulated engines.

twisted.web hides what these tests must see and script: the target as sent, a client that leaves in
mid-upload, gigabytes of request body without a temporary file, bytes that are no proper answer.
It is a simulator's server: correct for correct clients, with no ambition beyond.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IProtocol, IPushProducer
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from .exchange import READ_AHEAD, Exchange, RecordedRequest

if TYPE_CHECKING:
    from .server import EngineSim

MAX_HEAD = 64 << 10


class BadFraming(Exception):
    """The peer does not speak HTTP."""


@dataclass
class _Chunked:
    """Incremental decoder of a chunked body."""

    buffer: bytearray = field(default_factory=bytearray)
    left: int = 0
    state: str = "size"

    def feed(self, data: bytes, sink: Callable[[bytes], None]) -> bytes | None:
        """Pass decoded bytes to ``sink``; return what follows the body once it has ended."""
        self.buffer += data
        while True:
            if self.state == "data":
                piece = bytes(self.buffer[: self.left])
                del self.buffer[: len(piece)]
                self.left -= len(piece)
                if piece:
                    sink(piece)
                if self.left:
                    return None
                self.state = "crlf"
            end = self.buffer.find(b"\r\n")
            if end < 0:
                if len(self.buffer) > MAX_HEAD:
                    raise BadFraming("endless chunk line")
                return None
            line = bytes(self.buffer[:end])
            del self.buffer[: end + 2]
            if self.state == "crlf":
                if line:
                    raise BadFraming("chunk without end")
                self.state = "size"
            elif self.state == "trailer":
                if not line:
                    return bytes(self.buffer)
            else:
                size = line.split(b";", 1)[0].strip()
                if not size or size.strip(b"0123456789abcdefABCDEF"):
                    raise BadFraming("bad chunk size")
                self.left = int(size, 16)
                self.state = "data" if self.left else "trailer"


@implementer(IPushProducer)
class Connection(Protocol):
    """One client connection: requests one after another, answers in order."""

    transport: Any

    def __init__(self, server: EngineSim, number: int) -> None:
        self.server = server
        self.number = number
        self.keep_alive = True
        self.dead = False
        self.dropped_by_us = False
        self.delegate: IProtocol | None = None
        self.lost: Deferred[None] = Deferred()
        self._buffer = b""
        self._exchange: Exchange | None = None
        self._left = 0
        self._chunks: _Chunked | None = None
        self._paused = False
        self._drain_waiters: list[Deferred[None]] = []
        self._parsing = False
        self._reading_paused = False
        self._served = 0
        self._idle_call: IDelayedCall | None = None

    # -- the transport's side

    def connectionMade(self) -> None:
        self.transport.setTcpNoDelay(True)
        self.transport.registerProducer(self, True)
        self.server.connections.add(self)
        self._idle()

    def dataReceived(self, data: bytes) -> None:
        self._busy()
        if self.delegate is not None:
            self.delegate.dataReceived(data)
            return
        self._buffer = self._buffer + data if self._buffer else data
        self._parse()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._busy()
        self._die()
        if self.delegate is not None:
            self.delegate.connectionLost(reason)
        self.server.connections.discard(self)
        self.lost.callback(None)

    def pauseProducing(self) -> None:
        self._paused = True

    def resumeProducing(self) -> None:
        self._paused = False
        waiters, self._drain_waiters = self._drain_waiters, []
        for waiter in waiters:
            if not waiter.called:
                waiter.callback(None)

    def stopProducing(self) -> None:
        """The connection is going; `connectionLost` does the rest."""

    # -- the exchange's side

    def send(self, data: bytes) -> None:
        if not self.dead:
            self.transport.write(data)

    def drained(self) -> Deferred[None]:
        waiter: Deferred[None] = Deferred()
        if self._paused and not self.dead:
            self._drain_waiters.append(waiter)
        else:
            waiter.callback(None)
        return waiter

    def pause_reading(self) -> None:
        if not self._reading_paused and not self.dead:
            self._reading_paused = True
            self.transport.pauseProducing()

    def resume_reading(self) -> None:
        if self._reading_paused and not self.dead:
            self._reading_paused = False
            self.transport.resumeProducing()

    def drop(self, rst: bool = True) -> None:
        """End the connection from this side: with a reset, or after what was written."""
        if self.dead:
            return
        self.dropped_by_us = True
        if rst:
            self._die()
            self.transport.abortConnection()
        else:
            self.transport.unregisterProducer()
            self.transport.loseConnection()
            self._die()

    def abort(self) -> None:
        """Be gone at once, whatever still waits to be written."""
        self.drop()
        self.transport.abortConnection()

    def upgrade(self, protocol: IProtocol, head: bytes) -> None:
        """Hand the connection over, from this request's head on."""
        rest, self._buffer = self._buffer, b""
        if self._exchange is not None:
            self._exchange.finished = True
        self.transport.unregisterProducer()
        self.delegate = protocol
        protocol.makeConnection(self.transport)
        protocol.dataReceived(head + rest)

    def exchange_finished(self) -> None:
        exchange = self._exchange
        if exchange is None or self.delegate is not None:
            return
        if not exchange.body_done:
            exchange.discard()
            return
        self._exchange = None
        if not self.keep_alive:
            self.drop(rst=False)
            return
        self.resume_reading()
        if self._buffer:
            self._parse()
        if self._exchange is None and not self.dead:
            self._idle()

    def _idle(self) -> None:
        """No request is under way; a server that does not wait for ever hangs up."""
        if self.server.keep_alive_timeout is not None and self._idle_call is None:
            self._idle_call = self.server.clock.callLater(
                self.server.keep_alive_timeout, self._hang_up
            )

    def _busy(self) -> None:
        call, self._idle_call = self._idle_call, None
        if call is not None and call.active():
            call.cancel()

    def _hang_up(self) -> None:
        self._idle_call = None
        self.drop(rst=False)

    def _die(self) -> None:
        if self.dead:
            return
        self.dead = True
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.lost()
        waiters, self._drain_waiters = self._drain_waiters, []
        for waiter in waiters:
            if not waiter.called:
                waiter.callback(None)

    # -- parsing

    def _parse(self) -> None:
        if self._parsing:
            return
        self._parsing = True
        try:
            while not self.dead and self.delegate is None:
                before = (len(self._buffer), self._exchange)
                if self._exchange is None:
                    self._parse_head()
                elif not self._exchange.body_done:
                    self._parse_body(self._exchange)
                elif len(self._buffer) > READ_AHEAD:
                    self.pause_reading()
                if before == (len(self._buffer), self._exchange):
                    break
        except BadFraming as error:
            self._refuse(400, str(error).encode())
        finally:
            self._parsing = False

    def _refuse(self, status: int, why: bytes) -> None:
        phrase = HTTPStatus(status).phrase.encode()
        self.send(
            b"HTTP/1.1 %d %s\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (status, phrase, len(why), why)
        )
        self.drop(rst=False)

    def _parse_head(self) -> None:
        if self._buffer[:2] == b"\r\n":
            self._buffer = self._buffer[2:]
            return
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                self._refuse(431, b"request head too large")
            return
        head, self._buffer = self._buffer[: end + 4], self._buffer[end + 4 :]
        lines = head[:-4].split(b"\r\n")
        parts = lines[0].split(b" ")
        if len(parts) != 3 or parts[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
            raise BadFraming("bad request line")
        headers: list[tuple[bytes, bytes]] = []
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon or not name or name != name.strip():
                raise BadFraming("bad header line")
            headers.append((name, value.strip(b" \t")))
        self._begin(head, parts[0], parts[1], parts[2], headers)

    def _begin(
        self,
        head: bytes,
        method: bytes,
        target: bytes,
        version: bytes,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        server = self.server
        record = RecordedRequest(
            server.clock.seconds(), method.decode("latin-1"), target, headers, self.number
        )
        lengths = {value for name, value in headers if name.lower() == b"content-length"}
        coding = record.header(b"transfer-encoding")
        if len(lengths) > 1 or (lengths and coding is not None):
            raise BadFraming("ambiguous length")
        length = lengths.pop() if lengths else b"0"
        if not length.isdigit() or (coding is not None and coding.lower() != b"chunked"):
            raise BadFraming("bad length")
        if version == b"HTTP/1.1" and record.header(b"host") is None:
            raise BadFraming("missing Host")
        connection = (record.header(b"connection") or b"").lower()
        self.keep_alive = b"close" not in connection and (
            version == b"HTTP/1.1" or b"keep-alive" in connection
        )
        self._busy()
        self._served += 1
        if self._served == server.keep_alive_max:
            self.keep_alive = False
        exchange = Exchange(self, record, head, version)
        self._exchange = exchange
        self._left = int(length)
        self._chunks = _Chunked() if coding is not None else None
        if self._chunks is None and self._left == 0:
            exchange.body_ended()
        elif (record.header(b"expect") or b"").lower() == b"100-continue":
            exchange.expects_continue = True
        server.begin(exchange)

    def _parse_body(self, exchange: Exchange) -> None:
        data, self._buffer = self._buffer, b""
        if exchange.cut_upload_after is not None:
            seen = exchange.record.body_length + len(data)
            if seen >= exchange.cut_upload_after:
                exchange.body_received(data)
                exchange.cut(exchange.cut_rst)
                return
        if self._chunks is not None:
            rest = self._chunks.feed(data, exchange.body_received)
            if rest is None:
                return
            self._buffer = rest
        else:
            piece, self._buffer = data[: self._left], data[self._left :]
            self._left -= len(piece)
            if piece:
                exchange.body_received(piece)
            if self._left:
                return
        if self.dead:
            return
        exchange.body_ended()
        if exchange.finished:
            self.exchange_finished()
