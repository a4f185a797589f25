"""One proxied request, from its head to the end of its answer.

The order is admission (a lease, where the request needs the card) -> connection to the upstream -> room on the card ->
forwarding. An upstream that cannot be reached is tried again with a growing delay, holding no lease meanwhile.
Whatever ends an exchange goes through :meth:`Exchange._end`, which settles the lease exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from turnstile.engines.base import Admission
from turnstile.log import Logger
from turnstile.proxy.errors import error_response
from turnstile.proxy.gate import Busy, Ending, Gate
from turnstile.proxy.http1 import BadMessage, ChunkedBody, RequestHead, ResponseHead
from turnstile.proxy.retry import SAFE_METHODS

if TYPE_CHECKING:
    from turnstile.proxy.channel import ProxyChannel
    from turnstile.proxy.resource import EngineResource
    from turnstile.proxy.upstream import UpstreamConnection

_log = Logger()

#: The most body bytes that are read ahead of the time when they can be forwarded.
MAX_AHEAD = 256 * 1024
#: The most bytes of a body that is looked into before admission (DECISIONS 13), and the seconds it may take to come.
MAX_PEEK = 4096
PEEK_TIMEOUT = 1.0

# Room for the framing of a body in a few chunks.
_MAX_PEEK_WIRE = MAX_PEEK + 256
_UNBUFFERED_TYPES = (b"text/event-stream", b"application/x-ndjson")


class Pause:
    """Reasons for a channel not to read from its client."""

    AHEAD = 1
    UPSTREAM = 2
    PIPELINE = 4
    SLOW = 8


class Exchange:
    """A request on its way through turnstile."""

    __slots__ = (
        "_ahead",
        "_ahead_size",
        "_capture",
        "_capture_left",
        "_channel",
        "_complete",
        "_conn",
        "_continued",
        "_dechunk",
        "_ended",
        "_failures",
        "_forwarded",
        "_framed",
        "_gate",
        "_head",
        "_heard",
        "_held",
        "_keep_alive",
        "_peeking",
        "_pending",
        "_repeated",
        "_resource",
        "_response",
        "_started",
        "client",
        "status",
    )

    def __init__(self, channel: ProxyChannel, head: RequestHead, resource: EngineResource) -> None:
        self._channel: ProxyChannel | None = channel
        self._head = head
        self._resource = resource
        self.client = channel.client
        #: The status that the client was sent; 0: none.
        self.status = 0
        self._gate: Gate | None = None
        #: Whether a lease may be held (``enter`` succeeded and ``leave`` was not called).
        self._held = False
        self._conn: UpstreamConnection | None = None
        #: What is being waited for, to be cancelled should the client leave: a Deferred or a DelayedCall.
        self._pending: Any = None
        self._ahead: list[bytes] = []
        self._ahead_size = 0
        self._complete = False
        self._peeking = False
        self._continued = False
        self._forwarded = False
        self._failures = 0
        self._repeated = 0
        self._response: ResponseHead | None = None
        self._framed = True
        self._dechunk = False
        self._keep_alive = False
        self._capture: list[bytes] | None = None
        self._capture_left = 0
        self._ended = False
        #: Whether the upstream said anything since :meth:`silent` was asked last.
        self._heard = False
        self._started = resource.clock.seconds()

    # What twisted.web's resources call a request's method and target.
    @property
    def method(self) -> bytes:
        return self._head.method

    @property
    def uri(self) -> bytes:
        return self._head.target

    @property
    def head(self) -> RequestHead:
        return self._head

    @property
    def upload_done(self) -> bool:
        """Whether the whole request was handed to the upstream's connection."""
        return self._forwarded and self._complete

    @property
    def keeps_body_back(self) -> bool:
        """Whether it is in order that the client does not go on with its body."""
        waits = self._head.expect_continue and not self._continued and not self._ahead
        return waits or self._response is not None

    @property
    def keeps_others_waiting(self) -> bool:
        """Whether this request has the card and others wait for it."""
        return self._held and self._gate is not None and self._gate.contended()

    @property
    def stall_timeout(self) -> float | None:
        """Seconds for which the engine may be silent while others wait for the card."""
        return self._resource.policy.stall_timeout

    def silent(self) -> bool:
        """Whether the engine has the request and said nothing since the last time this was asked."""
        heard, self._heard = self._heard, False
        return self._forwarded and self._complete and not heard

    def give_up(self) -> None:
        """End a request that the engine does not go on with."""
        self._fail(504, "the engine was silent for too long while others waited for the GPU")

    # -- from the client --------------------------------------------------------------------------------------

    def request_data(self, data: bytes) -> None:
        """A piece of the body, in its framing."""
        if self._forwarded:
            if self._conn is not None:
                self._conn.transport.write(data)
            return
        self._ahead.append(data)
        self._ahead_size += len(data)
        if self._ahead_size >= MAX_AHEAD and self._channel is not None:
            self._channel.pause(Pause.AHEAD)
        if self._peeking and self._ahead_size > _MAX_PEEK_WIRE:
            self._decide_peek(give_up=True)

    def request_complete(self) -> None:
        """The body is all here."""
        self._complete = True
        if self._peeking:
            self._decide_peek()

    def bad_body(self, error: BadMessage) -> None:
        """The body's framing is broken."""
        self._resource.refused(self.client, error)
        self._fail(error.status, error.reason)

    def client_lost(self) -> None:
        """The client's connection is gone."""
        self._channel = None
        gate = self._gate
        if self._forwarded and self._complete and gate is not None and gate.detached:
            # Carried through: the answer is still needed, if only to know what was started.
            self._resource.carried.add(self)
            if self._conn is not None:
                self._conn.transport.resumeProducing()
            return
        self._cancel_pending()
        self._drop_upstream()
        self._end(Ending.CLIENT_GONE if self._forwarded else Ending.NOT_SENT)

    def client_paused(self) -> None:
        if self._conn is not None:
            self._conn.transport.pauseProducing()

    def client_resumed(self) -> None:
        if self._conn is not None:
            self._conn.transport.resumeProducing()

    # -- admission --------------------------------------------------------------------------------------------

    def start(self, admission: Admission) -> None:
        """Set off; ``admission`` is what the engine's table says of this request."""
        self._guarded(self._start, admission)

    def _guarded(self, step: Callable[..., None], *args: Any) -> None:
        """Whatever goes wrong inside turnstile, the client has an answer and the card is given back."""
        try:
            step(*args)
        except Exception:
            self._broken(Failure())

    def _start(self, admission: Admission) -> None:
        if admission is Admission.PASS:
            self._connect()
            return
        if admission is Admission.ABSENT:
            self._absent()
            return
        if admission is Admission.PEEK and self._may_peek():
            self._peeking = True
            if self._complete:
                self._decide_peek()
            elif self._ahead_size > _MAX_PEEK_WIRE:
                self._decide_peek(give_up=True)
            else:
                self._continue_client()
                self._pending = self._resource.clock.callLater(PEEK_TIMEOUT, self._peek_timeout)
            return
        self._admit()

    def _may_peek(self) -> bool:
        length = self._head.content_length
        return self._head.te_chunked or (length is not None and length <= MAX_PEEK)

    def _peek_timeout(self) -> None:
        self._pending = None
        self._decide_peek(give_up=True)

    def _decide_peek(self, give_up: bool = False) -> None:
        self._guarded(self._decide, give_up)

    def _decide(self, give_up: bool) -> None:
        self._peeking = False
        self._cancel_pending()
        body = b"".join(self._ahead)
        if not give_up and self._head.te_chunked:
            payload: list[bytes] = []
            ChunkedBody().feed(body, payload)
            body = b"".join(payload)
        if not give_up and self._resource.policy.is_unload_only(self._head.target, body):
            self._connect()
        else:
            self._admit()

    def _admit(self) -> None:
        gate = self._gate
        if gate is None:
            gate = self._gate = self._resource.policy.open_gate(self._head, self.client)
        try:
            d = gate.enter()
        except Busy as busy:
            self._busy(busy)
            return
        if d is None:
            self._entered(None)
        else:
            self._wait(d, self._entered, self._not_entered)

    def _entered(self, _: object) -> None:
        self._held = True
        gate = self._gate
        if gate is not None and gate.prepares:
            d = gate.prepare()
            if d is not None:
                self._wait(d, self._prepared, self._not_entered)
                return
        self._connect()

    def _prepared(self, _: object) -> None:
        self._connect()

    def _not_entered(self, failure: Failure) -> None:
        busy = failure.value
        if isinstance(busy, Busy):
            self._busy(busy)
        else:
            self._broken(failure)

    def _busy(self, busy: Busy) -> None:
        self._fail(busy.status, busy.message, retry_after=busy.retry_after)

    def _absent(self) -> None:
        message, details = self._resource.policy.absent()
        self._fail(503, message, details=details)

    # -- connection -------------------------------------------------------------------------------------------

    def _connect(self, fresh: bool = False) -> None:
        pool = self._resource.pool
        conn = None if fresh else pool.take(self._is_safe())
        if conn is not None:
            self._connected(conn)
        else:
            self._wait(pool.connect(), self._connected, self._not_connected)

    def _is_safe(self) -> bool:
        return self._head.method in SAFE_METHODS and not self._head.has_body

    def _not_connected(self, failure: Failure) -> None:
        self._failures += 1
        self._back_off(
            failure.getErrorMessage() or type(failure.value).__name__, "connect", self._failures
        )

    def _back_off(self, problem: str, reason: str, failures: int) -> None:
        resource = self._resource
        if self._held and self._gate is not None:
            self._held = False
            self._gate.leave()
        wait = resource.retry.delay(failures, resource.chance())
        resource.retrying(self, problem, reason, wait)
        self._pending = resource.clock.callLater(wait, self._again)

    def _again(self) -> None:
        self._pending = None
        if self._gate is not None and not self._held:
            self._guarded(self._admit)
        elif self._resource.policy.admission(self.method, self.uri) is Admission.ABSENT:
            # It was there when the request came.
            self._guarded(self._absent)
        else:
            self._guarded(self._connect)

    def _connected(self, conn: UpstreamConnection) -> None:
        self._conn = conn
        conn.claim(self)
        gate = self._gate
        if gate is not None:
            d = gate.room()
            if d is not None:
                self._wait(d, self._forward, self._broken)
                return
        self._forward(None)

    # -- forwarding -------------------------------------------------------------------------------------------

    def _forward(self, _: object) -> None:
        conn = self._conn
        if conn is None or conn.lost is not None:
            # Lost while the card was being cleared: nothing was sent, so a fresh one serves.
            self._connect(fresh=True)
            return
        self._dechunk = self._head.minor == 0
        capture = 0
        if self._gate is not None:
            self._gate.forwarding()
            capture = self._gate.capture
            if capture:
                self._capture = []
                self._capture_left = capture
        conn.begin(self._head.method, self._dechunk or capture > 0)
        self._failures = 0
        self._forwarded = True
        self._continue_client()
        head = self._resource.request_head(self._head, self.client)
        if self._ahead:
            conn.transport.write(head + b"".join(self._ahead))
            self._ahead = []
            if self._ahead_size >= MAX_AHEAD and self._channel is not None:
                self._channel.unpause(Pause.AHEAD)
        else:
            conn.transport.write(head)

    def _continue_client(self) -> None:
        """Ask for the body where the client waits to be asked and has not begun by itself."""
        if self._head.expect_continue and not self._continued and not self._complete:
            self._continued = True
            if not self._ahead and self._channel is not None:
                self._channel.send_continue()

    def upstream_paused(self) -> None:
        if self._channel is not None:
            self._channel.pause(Pause.UPSTREAM)

    def upstream_resumed(self) -> None:
        if self._channel is not None:
            self._channel.unpause(Pause.UPSTREAM)

    # -- from the upstream ------------------------------------------------------------------------------------

    def response_head(self, head: ResponseHead) -> None:
        self._heard = True
        channel = self._channel
        if head.status < 200:
            # 100 answers an expectation that was never sent on; others are for the client to use.
            if head.status != 100 and channel is not None and self._head.minor == 1:
                channel.transport.write(_status_line(head) + _join(head.fields) + b"\r\n")
            return
        if (
            self._resource.retry.repeats_status(self._head.method, head.status, self._repeated)
            and self._is_safe()
            and channel is not None
            and not channel.closing
        ):
            self._repeated += 1
            self._drop_upstream()
            self._forwarded = False
            self._back_off(f"status {head.status}", "status", self._repeated)
            return
        self._response = head
        if self._gate is not None:
            self._gate.answered(head.status, head.fields)
        self.status = head.status
        if channel is None:
            return
        channel.transport.write(self._response_head(head, channel))

    def _response_head(self, head: ResponseHead, channel: ProxyChannel) -> bytes:
        request = self._head
        status = head.status
        extra = b""
        keep_alive = request.keep_alive and not channel.body_unread and not channel.closing
        bodiless = request.method == b"HEAD" or status == 304
        if status == 204:
            pass
        elif head.te_chunked:
            if bodiless:
                pass
            elif self._dechunk:
                keep_alive = self._framed = False
            else:
                extra = b"Transfer-Encoding: chunked\r\n"
        elif head.content_length is not None:
            extra = b"Content-Length: %d\r\n" % head.content_length
        elif not bodiless:
            keep_alive = self._framed = False
        if not keep_alive:
            extra += b"Connection: close\r\n"
        elif request.minor == 0:
            extra += b"Connection: keep-alive\r\n"
        if not head.unbuffered_hint and head.content_type.startswith(_UNBUFFERED_TYPES):
            # Keeps nginx and its like between us and the client from holding the stream back.
            extra += b"X-Accel-Buffering: no\r\n"
        self._keep_alive = keep_alive
        return _status_line(head) + _join(head.fields) + extra + b"\r\n"

    def response_data(self, raw: bytes, payload: list[bytes] | None) -> None:
        self._heard = True
        capture = self._capture
        if capture is not None and payload is not None and self._capture_left >= 0:
            for piece in payload:
                capture.append(piece[: self._capture_left])
                self._capture_left -= len(piece)
                if self._capture_left < 0:
                    break
        channel = self._channel
        if channel is None:
            return
        if self._dechunk and payload is not None:
            raw = b"".join(payload)
            if not raw:
                return
        channel.transport.write(raw)

    def response_done(self) -> None:
        self._conn = None
        channel, self._channel = self._channel, None
        self._end(Ending.DONE)
        if channel is not None:
            channel.finished(self._keep_alive)

    def upstream_lost(self, reason: Failure) -> None:
        conn, self._conn = self._conn, None
        if not self._forwarded:
            # Nothing was sent; _forward finds the connection gone when its time comes.
            return
        if self._response is not None:
            self._truncate(reason)
            return
        if (
            conn is not None
            and conn.served
            and self._is_safe()
            and self._channel is not None
            and not reason.check(BadMessage)
        ):
            # An idle connection that the upstream had given up, and a request that may be sent twice.
            self._forwarded = False
            self._connect(fresh=True)
            return
        error = reason.value
        if isinstance(error, BadMessage):
            problem = f"unreadable answer from the engine: {error.reason}"
        else:
            problem = "the engine closed the connection before it answered"
        self._fail(502, problem)

    def _truncate(self, reason: Failure) -> None:
        channel, self._channel = self._channel, None
        self._end(Ending.UPSTREAM_LOST)
        if channel is not None:
            channel.cut(framed=self._framed)

    # -- ends -------------------------------------------------------------------------------------------------

    def stop(self, *, now: bool) -> bool:
        """The service stops: 503 to whoever still waits; with ``now`` a visible cut for what is being answered.

        :return: whether the client was answered 503.
        """
        if not now and self._forwarded:
            return False
        told = self._channel is not None and self._response is None
        self._fail(503, "turnstile is shutting down", retry_after=self._resource.policy.retry_after)
        return told

    def _fail(
        self,
        status: int,
        message: str,
        retry_after: int | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        """Answer with an error of our own, or cut the answer that has begun."""
        self._cancel_pending()
        self._drop_upstream()
        sent = self._forwarded
        if self._response is not None:
            self._truncate(Failure(CancelledError()))
            return
        channel, self._channel = self._channel, None
        self.status = status if channel is not None else 0
        self._end(Ending.UPSTREAM_LOST if sent else Ending.NOT_SENT, message)
        if channel is None:
            return
        request = self._head
        keep_alive = (
            request.keep_alive
            and request.minor == 1
            and not channel.body_unread
            and not channel.closing
        )
        channel.transport.write(
            error_response(
                status,
                message,
                request.target,
                keep_alive=keep_alive,
                retry_after=retry_after,
                head_only=request.method == b"HEAD",
                details=details,
            )
        )
        channel.finished(keep_alive)

    def _broken(self, failure: Failure) -> None:
        _log.failure("a request could not be served", failure=failure)
        self._fail(500, "internal error in turnstile; its log has more")

    def _end(self, ending: Ending, message: str = "") -> None:
        if self._ended:
            return
        self._ended = True
        gate, self._gate = self._gate, None
        if gate is not None:
            if self._capture is not None and self._response is not None:
                complete = ending is Ending.DONE and self._capture_left >= 0
                gate.captured(b"".join(self._capture), complete)
            gate.end(ending, body_sent=self.upload_done)
        duration = self._resource.clock.seconds() - self._started
        self._resource.ended(self, ending, duration, message)

    def _drop_upstream(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.abort()

    def _wait(self, d: Deferred[Any], done: Any, failed: Any) -> None:
        """Wait for ``d`` so that :meth:`_cancel_pending` can end the wait."""
        self._pending = d

        def fired(value: Any) -> None:
            if self._pending is d:
                self._pending = None
                done(value)

        def errored(failure: Failure) -> None:
            if self._pending is d:
                self._pending = None
                failed(failure)

        d.addCallbacks(fired, errored)
        d.addErrback(self._broken)

    def _cancel_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel()


def _status_line(head: ResponseHead) -> bytes:
    return b"HTTP/1.1 %d %s\r\n" % (head.status, head.reason)


def _join(fields: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%s: %s\r\n" % field for field in fields])
