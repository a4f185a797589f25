"""Clients of random schedules: connections in virtual time, which may go away at any point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from autobahn.twisted.websocket import WebSocketClientProtocol
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure
from virtual_net import LOCALHOST, VirtualReactor

#: Seconds after which clients give up.
PATIENCE = 300.0


@attrs.define(eq=False)
class Answer:
    """How a request ended, as its client saw it."""

    status: int = 0
    body: bytes = b""
    #: Whether the answer came whole.
    complete: bool = False
    #: Whether the client left before.
    left: bool = False


@attrs.define
class Leave:
    """When a client goes away: at a point of the request, and so many seconds later."""

    at: str
    after: float
    reset: bool


class Caller(Protocol):
    """A client's connection: one request at a time."""

    transport: Any

    def __init__(self, world: VirtualReactor) -> None:
        self.world = world
        self.busy = False
        self.open = False
        self._buffer = b""
        self._answer = Answer()
        self._done: Deferred[Answer] | None = None
        self._left: int | None = None
        self._chunked = False
        self._head_read = False
        self._leave: Leave | None = None

    def connectionMade(self) -> None:
        self.open = True

    def request(
        self,
        method: str,
        target: str,
        body: bytes | None,
        leave: Leave | None,
        pause: float,
        fields: Sequence[str] = (),
    ) -> Deferred[Answer]:
        """Send a request; the answer always comes, if only as the connection's end."""
        self.busy = True
        self._buffer, self._answer = b"", Answer()
        self._head_read = self._chunked = False
        self._left = None
        self._leave = leave
        self._method = method
        d = self._done = Deferred()
        patience = self.world.callLater(PATIENCE, self._go, d, False)

        def over(answer: Answer) -> Answer:
            if patience.active():
                patience.cancel()
            return answer

        d.addBoth(over)
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: {LOCALHOST}:{self.transport.getPeer().port}\r\n"
        )
        head += "".join(f"{field}\r\n" for field in fields)
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        data = head.encode() + b"\r\n"
        if leave is not None and leave.at == "head":
            self.transport.write(data[: len(data) // 2])
            self._go_in(leave)
        elif body and (pause or (leave is not None and leave.at == "body")):
            half = len(body) // 2
            self.transport.write(data + body[:half])
            if leave is not None and leave.at == "body":
                self._go_in(leave)
            else:
                self.world.callLater(pause, self._send_rest, d, body[half:])
        else:
            self.transport.write(data + (body or b""))
            self._sent()
        return d

    def _send_rest(self, d: Deferred[Answer], rest: bytes) -> None:
        if self._done is d and self.open:
            self.transport.write(rest)
            self._sent()

    def _sent(self) -> None:
        if self._leave is not None and self._leave.at == "sent":
            self._go_in(self._leave)

    def _go_in(self, leave: Leave) -> None:
        self.world.callLater(leave.after, self._go, self._done, leave.reset)

    def _go(self, d: Any, reset: bool) -> None:
        if d is not self._done or not self.open:
            return
        self._answer.left = True
        if reset:
            self.transport.abortConnection()
        else:
            self.transport.loseConnection()

    def dataReceived(self, data: bytes) -> None:
        self._buffer += data
        while not self._head_read:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
            self._read_head(head)
        leave = self._leave
        if leave is not None and leave.at == "answer":
            self._leave = None
            self._go_in(leave)
        if self._chunked:
            if self._buffer.endswith(b"\r\n0\r\n\r\n") or self._buffer == b"0\r\n\r\n":
                self._finish(True)
        elif self._left is not None and len(self._buffer) >= self._left:
            self._finish(True)

    def _read_head(self, head: bytes) -> None:
        lines = head.lower().split(b"\r\n")
        status = int(lines[0].split(b" ")[1])
        if status < 200:
            return
        self._head_read = True
        self._answer.status = status
        fields = dict(line.split(b": ", 1) for line in lines[1:])
        if self._method == "HEAD" or status in (204, 304):
            self._left = 0
        elif b"content-length" in fields:
            self._left = int(fields[b"content-length"])
        else:
            self._chunked = fields.get(b"transfer-encoding") == b"chunked"
        if fields.get(b"connection") == b"close":
            self.open = False

    def _finish(self, complete: bool) -> None:
        d, self._done = self._done, None
        if d is not None:
            answer = self._answer
            answer.body, answer.complete = self._buffer, complete
            self.busy = False
            d.callback(answer)

    def connectionLost(self, reason: Failure | None = None) -> None:
        self.open = False
        endless = self._head_read and not self._chunked and self._left is None
        self._finish(endless and not self._answer.left)


class OneShot(Factory):
    noisy = False

    def __init__(self, caller: Caller, failed: Callable[[], None]) -> None:
        self.caller = caller
        self._failed = failed

    def buildProtocol(self, addr: object) -> Caller:
        return self.caller

    def startedConnecting(self, connector: object) -> None: ...

    def clientConnectionFailed(self, connector: object, reason: object) -> None:
        self._failed()

    def clientConnectionLost(self, connector: object, reason: object) -> None: ...


class Events(WebSocketClientProtocol):  # type: ignore[misc]
    """A page's WebSocket."""

    ended: Deferred[None]

    def onClose(self, clean: bool, code: int | None, reason: str | None) -> None: ...

    def connectionLost(self, reason: Failure) -> None:
        super().connectionLost(reason)
        if not self.factory.ended.called:
            self.factory.ended.callback(None)


def unchunk(body: bytes) -> bytes:
    """A body that may be framed as one chunk."""
    first, _, rest = body.partition(b"\r\n")
    return rest.partition(b"\r\n")[0] if rest and first.isalnum() else body
