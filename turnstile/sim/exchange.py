"""One request and its answer, as it is recorded and as a handler sees it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote_to_bytes

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall

from .faults import Rule

if TYPE_CHECKING:
    from .http import Connection

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
        #: Whether the answer is chunked although its length is known.
        self.always_chunked = False
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
        if self.always_chunked and self._bodyless:
            lines.append((b"Transfer-Encoding", b"chunked"))
        elif length is not None and status not in (204, 304) and not self.always_chunked:
            lines.append((b"Content-Length", b"%d" % length))
        elif not self._bodyless:
            if self.version == b"HTTP/1.1":
                self._chunked = True
                lines.append((b"Transfer-Encoding", b"chunked"))
            else:
                close = True
        if close or (status >= 400 and self.connection.server.closes_on_errors):
            self.connection.keep_alive = False
        lines += self.connection.server.connection_headers(self.connection.keep_alive)
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
        if self.task is not None:
            # The handler itself is writing this: it can be cancelled only once it waits.
            self.connection.server.clock.callLater(0, self.task.cancel)

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
