"""A small HTTP/1.1 server for the simulated engines.

twisted.web hides what these tests must see and script: the target as sent, a client that leaves in
mid-upload, gigabytes of request body without a temporary file, bytes that are no proper answer.
It is a simulator's server: correct for correct clients, with no ambition beyond.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote_to_bytes

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IProtocol, IPushProducer
from twisted.internet.protocol import Protocol, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from .faults import Rule

if TYPE_CHECKING:
    from .server import EngineSim

log = Logger()

MAX_HEAD = 64 << 10
KEEP_BODY = 64 << 10
READ_AHEAD = 1 << 20

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(eq=False)
class RecordedRequest:
    """One request as it came over the wire.  Times are ``clock.seconds()``."""

    time: float
    method: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    connection: int
    body: bytes = b""
    body_length: int = 0
    complete: bool = False
    status: int | None = None
    answered_at: float | None = None
    finished_at: float | None = None
    disconnected_at: float | None = None

    @property
    def path(self) -> bytes:
        """The target up to the question mark, as sent."""
        return self.target.split(b"?", 1)[0]

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header, or None."""
        wanted = name.lower()
        return next((value for key, value in self.headers if key.lower() == wanted), None)

    def json(self) -> Any:
        """The body (its first 64 KiB are kept) as JSON."""
        return json.loads(self.body)


class HttpError(Exception):
    """Answer the request with this and be done."""

    def __init__(
        self,
        status: int,
        body: bytes = b"",
        content_type: bytes = b"text/plain; charset=utf-8",
        *,
        close: bool = False,
    ) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body
        self.content_type = content_type
        self.close = close


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


class Exchange:
    """One request and its answer, as a handler sees them."""

    def __init__(
        self, connection: Connection, record: RecordedRequest, head: bytes, version: bytes
    ) -> None:
        self.connection = connection
        self.record = record
        self.raw_head = head
        self.version = version
        self.method = record.method
        self.target = record.target
        self.path = unquote_to_bytes(record.path).decode("utf-8", "replace")
        query = record.target.partition(b"?")[2].decode("utf-8", "replace")
        self.query = {key: values[-1] for key, values in parse_qs(query, True).items()}
        self.started = False
        self.finished = False
        self.body_done = False
        self.task: Deferred[None] | None = None
        self.extra_headers: list[tuple[bytes, bytes]] = []
        self.expects_continue = False
        self.cut_upload_after: int | None = None
        self.cut_rst = True
        self._sink: Callable[[bytes], None] | None = None
        self._early: list[bytes] = []
        self._early_size = 0
        self._body_waiter: Deferred[None] | None = None
        self._chunked = False
        self._bodyless = False
        self._cut: Rule | None = None
        self._sent = 0
        self._trickle: Rule | None = None
        self._trickled = bytearray()
        self._trickle_call: IDelayedCall | None = None
        self._ending = False

    def header(self, name: bytes) -> bytes | None:
        return self.record.header(name)

    @property
    def gone(self) -> bool:
        """Whether the connection is no more."""
        return self.connection.dead

    # -- the request's body

    async def stream(self, sink: Callable[[bytes], None]) -> int:
        """Pass the body to ``sink`` as it comes; returns its length."""
        self._attach(sink)
        if not self.body_done:
            self._body_waiter = Deferred()
            await self._body_waiter
        return self.record.body_length

    async def body(self, limit: int | None = None) -> bytes:
        """The whole body; raises a 413 as soon as it is longer than ``limit``."""
        parts: list[bytes] = []
        size = 0
        too_long = False

        def collect(data: bytes) -> None:
            nonlocal size, too_long
            size += len(data)
            if limit is None or size <= limit:
                parts.append(data)
            elif not too_long:
                too_long = True
                parts.clear()
                waiter, self._body_waiter = self._body_waiter, None
                if waiter is not None and not waiter.called:
                    waiter.callback(None)

        await self.stream(collect)
        if too_long:
            text = f"Maximum request body size {limit} exceeded, actual body size {size}"
            raise HttpError(413, text.encode())
        return b"".join(parts)

    def discard(self) -> None:
        """Throw the rest of the body away as it comes."""
        self._attach(_nowhere)

    def _attach(self, sink: Callable[[bytes], None]) -> None:
        if self.expects_continue and not self.body_done and not self.started:
            self.expects_continue = False
            self.connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._sink = sink
        early, self._early = self._early, []
        for data in early:
            sink(data)
        if self._early_size > READ_AHEAD:
            self.connection.resume_reading()
        self._early_size = 0

    def body_received(self, data: bytes) -> None:
        record = self.record
        record.body_length += len(data)
        if len(record.body) < KEEP_BODY:
            record.body += data[: KEEP_BODY - len(record.body)]
        if self._sink is not None:
            self._sink(data)
        else:
            self._early.append(data)
            self._early_size += len(data)
            if self._early_size > READ_AHEAD:
                self.connection.pause_reading()

    def body_ended(self) -> None:
        self.body_done = True
        self.record.complete = True
        waiter, self._body_waiter = self._body_waiter, None
        if waiter is not None and not waiter.called:
            waiter.callback(None)

    # -- the answer

    def start(
        self,
        status: int,
        headers: Headers = (),
        *,
        content_type: bytes | None = None,
        length: int | None = None,
        close: bool = False,
    ) -> None:
        """Send the head.  Without ``length`` the body is chunked (or ends with the connection)."""
        if self.started:
            raise RuntimeError("answer already started")
        self.started = True
        record = self.record
        record.status = status
        record.answered_at = self.connection.server.clock.seconds()
        lines = [*self.connection.server.standard_headers(), *headers, *self.extra_headers]
        if content_type is not None:
            lines.append((b"Content-Type", content_type))
        self._bodyless = self.method == "HEAD" or status in (204, 304) or status < 200
        if length is not None and status not in (204, 304):
            lines.append((b"Content-Length", b"%d" % length))
        elif length is None and not self._bodyless:
            if self.version == b"HTTP/1.1":
                self._chunked = True
                lines.append((b"Transfer-Encoding", b"chunked"))
            else:
                close = True
        if close or not self.connection.keep_alive:
            self.connection.keep_alive = False
            lines.append((b"Connection", b"close"))
        try:
            reason = HTTPStatus(status).phrase.encode()
        except ValueError:
            reason = b"Unknown"
        head = b"HTTP/1.1 %d %s\r\n" % (status, reason)
        head += b"".join(b"%s: %s\r\n" % line for line in lines) + b"\r\n"
        self.connection.send(head)
        if self._cut is not None and self._cut.kind == "drop" and self._cut.after == 0:
            self._cut_now()

    def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        if not data or self._bodyless or self.gone:
            return
        if self._trickle is not None:
            self._trickled += data
            self._tick()
            return
        self._emit(data)

    async def drain(self) -> None:
        """Wait until the client has taken most of what was written."""
        await self.connection.drained()

    def finish(self) -> None:
        """End the answer; the connection serves its next request, if it may."""
        if self.finished:
            return
        if self._trickled and not self.gone:
            self._ending = True
            return
        if self._chunked and not self.gone:
            self.connection.send(b"0\r\n\r\n")
        self.finished = True
        if not self.gone:
            self.record.finished_at = self.connection.server.clock.seconds()
        self.connection.exchange_finished()

    def reply(
        self,
        status: int,
        body: bytes = b"",
        content_type: bytes | None = b"text/plain; charset=utf-8",
        headers: Headers = (),
        *,
        close: bool = False,
    ) -> None:
        """A whole answer at once."""
        if self.gone:
            return
        self.start(status, headers, content_type=content_type, length=len(body), close=close)
        self.write(body)
        self.finish()

    def json(self, value: Any, status: int = 200, headers: Headers = ()) -> None:
        """A whole JSON answer."""
        data = json.dumps(value, separators=(",", ":")).encode()
        self.reply(status, data, b"application/json; charset=utf-8", headers)

    def arm(self, rule: Rule) -> None:
        """Let a fault loose on the answer."""
        if rule.kind == "trickle":
            self._trickle = rule
        elif rule.kind == "drop":
            self._cut = rule
        elif rule.kind == "drop_upload":
            self.cut_upload_after = rule.after
            self.cut_rst = rule.rst

    def cut(self, rst: bool) -> None:
        """Drop the connection here and now."""
        self.connection.drop(rst)

    def _emit(self, data: bytes) -> None:
        cut = self._cut
        cutting = False
        if cut is not None and cut.kind == "drop" and cut.after is not None:
            room = cut.after - self._sent
            if len(data) >= room:
                data, cutting = data[:room], True
        self._sent += len(data)
        if data:
            # A cut-off chunk announces one byte more than comes.
            size = len(data) + 1 if cutting else len(data)
            if self._chunked:
                frame = b"%x\r\n%s" % (size, data)
                self.connection.send(frame if cutting else frame + b"\r\n")
            else:
                self.connection.send(data)
        if cutting:
            self._cut_now()

    def _cut_now(self) -> None:
        assert self._cut is not None
        self.cut(self._cut.rst)

    def _tick(self) -> None:
        if self._trickle_call is None and self._trickle is not None:
            server = self.connection.server
            self._trickle_call = server.clock.callLater(
                server.real(self._trickle.seconds), self._drip
            )

    def _drip(self) -> None:
        self._trickle_call = None
        if self.gone or self._trickle is None:
            return
        piece = bytes(self._trickled[: self._trickle.size])
        del self._trickled[: len(piece)]
        self._emit(piece)
        if self._trickled:
            self._tick()
        elif self._ending:
            self.finish()

    def lost(self) -> None:
        """The connection has ended, whoever ended it."""
        if self._trickle_call is not None:
            self._trickle_call.cancel()
            self._trickle_call = None
        if not self.finished:
            self.finished = True
            if not self.connection.dropped_by_us:
                self.record.disconnected_at = self.connection.server.clock.seconds()
        if self.task is not None:
            self.task.cancel()


def _nowhere(data: bytes) -> None:
    """Where discarded bytes go."""


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

    # -- the transport's side

    def connectionMade(self) -> None:
        self.transport.setTcpNoDelay(True)
        self.transport.registerProducer(self, True)
        self.server.connections.add(self)

    def dataReceived(self, data: bytes) -> None:
        if self.delegate is not None:
            self.delegate.dataReceived(data)
            return
        self._buffer = self._buffer + data if self._buffer else data
        self._parse()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
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
