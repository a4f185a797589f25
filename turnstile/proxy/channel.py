"""The client's side of the data path: one HTTP/1.1 connection, lean, streaming, with backpressure both ways.

It stands where twisted.web's HTTPChannel would: that one hands a request over only after its last body byte, spools
bodies to disk and cannot hold a client back. Requests of one connection are served strictly one after another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableDescriptor, IPushProducer, ISSLTransport
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure
from zope.interface import implementer

from turnstile import log as tlog
from turnstile.proxy.errors import error_response
from turnstile.proxy.exchange import Exchange, Pause
from turnstile.proxy.http1 import (
    BadMessage,
    Framing,
    RequestHead,
    head_end,
    parse_request,
    skip_empty_lines,
)
from turnstile.proxy.pages import render_page
from turnstile.proxy.vigil import notice_dead_peers, socket_below
from turnstile.proxy.websocket import is_websocket_upgrade

if TYPE_CHECKING:
    from turnstile.proxy.site import ProxySite

_log = tlog.Logger()

#: Seconds that a connection may be idle, or take to send a request head.
IDLE_TIMEOUT = 75.0
#: Seconds without reading its answer after which a client that has the card may lose it to others; looked at every
#: ``IDLE_TIMEOUT`` seconds.
STALL_TIMEOUT = 60.0
#: Seconds for which the rest of an unwanted body is read and thrown away, so that the early answer is not lost to a
#: reset (RFC 9112 section 9.6).
LINGER = 2.0
#: Seconds that a client may take to read what is left of its answer once the connection is to be closed. Long: a client
#: that reads slowly would else be shown a cut.
CLOSE_TIMEOUT = 300.0
#: The most bytes of following requests that are read while one is being served.
MAX_PIPELINED = 64 * 1024


_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@implementer(IPushProducer)
class ProxyChannel(Protocol):
    """One client connection."""

    transport: Any

    def __init__(self, site: ProxySite) -> None:
        self.site = site
        self.client = ""
        self.exchange: Exchange | None = None
        self.closing = False
        self._framing: Framing | None = None
        self._buffer = b""
        self._searched = 0
        self._pauses = 0
        self._watched: int | None = None
        #: Whether the client reads slower than it is written to.
        self._choked = False
        self._choked_at = 0.0
        self._silent_since = 0.0
        self._serving = False
        self._timer: Any = None
        self._active_at = 0.0

    # -- life of the connection -------------------------------------------------------------------------------

    def connectionMade(self) -> None:
        transport = self.transport
        with contextlib.suppress(AttributeError, OSError):
            transport.setTcpNoDelay(True)
            notice_dead_peers(transport)
        transport.registerProducer(self, True)
        self.client = getattr(transport.getPeer(), "host", "") or ""
        site = self.site
        site.channels.add(self)
        if site.stopping:
            self.close()
            return
        self._active_at = site.clock.seconds()
        self._timer = site.clock.callLater(IDLE_TIMEOUT, self._check_idle)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008
        self._detach()
        self._buffer = b""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_lost()
        self.site.channel_gone(self)

    def _detach(self) -> None:
        self._unwatch()
        timer, self._timer = self._timer, None
        if timer is not None and timer.active():
            timer.cancel()

    def _check_idle(self) -> None:
        clock = self.site.clock
        now = clock.seconds()
        idle = now - self._active_at
        exchange = self.exchange
        if exchange is not None:
            limit = exchange.stall_timeout
            self._timer = clock.callLater(
                min(IDLE_TIMEOUT, limit or IDLE_TIMEOUT), self._check_idle
            )
            self._check_stall(exchange, now)
        elif idle < IDLE_TIMEOUT:
            self._timer = clock.callLater(IDLE_TIMEOUT - idle, self._check_idle)
        else:
            self._timer = None
            if self._buffer and not self._choked:
                self._refuse(BadMessage("the request head took too long", 408))
            else:
                self.close()

    def _check_stall(self, exchange: Exchange, now: float) -> None:
        """Whether somebody, client or engine, holds up a request, and with it those that wait for the card."""
        limit = exchange.stall_timeout
        if (
            self._framing is not None
            and not self._pauses
            and now - self._active_at >= IDLE_TIMEOUT
            and not exchange.keeps_body_back
        ):
            # Else a client that never ends its upload would keep the card.
            exchange.bad_body(BadMessage("the request body stalled", 408))
        elif self._choked:
            if now - self._choked_at >= STALL_TIMEOUT and exchange.keeps_others_waiting:
                _log.warn(
                    "a client that reads nothing of its answer is cut off: others wait for the card",
                    client=self.client,
                    target=tlog.redact_target(exchange.uri),
                )
                self.transport.abortConnection()
        elif not exchange.silent():
            self._silent_since = now
        elif limit is not None and exchange.keeps_others_waiting:
            # A connection's earlier requests have no part in it.
            seconds = now - max(self._silent_since, self._active_at)
            if seconds >= limit:
                _log.warn(
                    "the engine was silent for {seconds:.0f} s: a request is given up, others wait for the card",
                    seconds=seconds,
                    client=self.client,
                    target=tlog.redact_target(exchange.uri),
                )
                exchange.give_up()

    def shut(self) -> None:
        """End the connection as soon as the request in progress, if any, is answered."""
        self.closing = True
        if self.exchange is None:
            self.close()

    # -- bytes in ---------------------------------------------------------------------------------------------

    def dataReceived(self, data: bytes) -> None:
        exchange = self.exchange
        if self.closing and exchange is None:
            # Not read any more: the rest of an unwanted body, a request behind the last one.
            return
        if self._buffer:
            self._searched = len(self._buffer)
            data = self._buffer + data
        elif exchange is None:
            self._active_at = self.site.clock.seconds()
        if exchange is None:
            self._serve(data)
        elif self._framing is not None:
            self._read_body(data)
        else:
            self._buffer = data
            if len(data) > MAX_PIPELINED:
                self.pause(Pause.PIPELINE)

    def _serve(self, data: bytes) -> None:
        """Serve the requests in ``data`` until one of them takes its time. A loop: answers may come at once."""
        if self._serving:
            self._buffer = data
            return
        self._serving = True
        try:
            self._buffer = data
            while self.exchange is None and self._buffer and not self.closing:
                if self._choked:
                    # Answers that are not read must not pile up.
                    self.pause(Pause.SLOW)
                    return
                if self._buffer.startswith(b"\r\n"):
                    # Stray empty lines between requests (RFC 9112 section 2.2).
                    self._buffer = skip_empty_lines(self._buffer)
                    self._searched = 0
                try:
                    end = head_end(self._buffer, self._searched)
                    if end < 0:
                        break
                    head = parse_request(self._buffer[:end])
                except BadMessage as error:
                    self._refuse(error)
                    return
                rest = self._buffer[end:]
                self._buffer = b""
                self._searched = 0
                if self._start(head, rest):
                    return
        finally:
            self._serving = False

    def _start(self, head: RequestHead, rest: bytes) -> bool:
        """Begin to serve one request; true if the connection was given away."""
        site = self.site
        for mark in site.marks:
            if mark in head.raw:
                self._refuse(site.looped(mark))
                return True
        page = site.pages.get(head.path)
        if page is not None:
            self._serve_page(head, rest)
            return False
        if (
            head.upgrade
            and site.resource.relays_websockets
            and is_websocket_upgrade(head.method, b"HTTP/1.%d" % head.minor, head.received)
        ):
            if head.has_body:
                self._refuse(BadMessage("a WebSocket handshake has no body"))
                return True
            self.transport.unregisterProducer()
            self._detach()
            site.relay(self, head, rest)
            site.channel_gone(self)
            return True
        self._framing = head.framing()
        resource = site.resource if site.route is None else site.route(head)
        exchange = self.exchange = Exchange(self, head, resource)
        if self._framing.done:
            self._framing = None
            self._buffer = rest
            exchange.request_complete()
        elif rest:
            self._read_body(rest)
        if self.exchange is exchange:
            # What the first segment brought is known to be well framed; only now may anything go out.
            resource.render(exchange)
        return False

    def _serve_page(self, head: RequestHead, rest: bytes) -> None:
        keep_alive = head.keep_alive and not head.has_body and not self.closing
        response = render_page(self.site.pages[head.path], head, self.client, keep_alive)
        self.transport.write(response)
        if keep_alive:
            self._buffer = rest
        else:
            self.finish_closing(body_unread=head.has_body)

    def _read_body(self, data: bytes) -> None:
        framing, exchange = self._framing, self.exchange
        assert framing is not None and exchange is not None
        self._active_at = self.site.clock.seconds()
        try:
            used = framing.feed(data)
        except BadMessage as error:
            self._buffer = b""
            exchange.bad_body(error)
            return
        done = framing.done
        if done:
            self._framing = None
        if used == len(data):
            self._buffer = b""
            exchange.request_data(data)
        else:
            self._buffer = data[used:]
            if used:
                exchange.request_data(data[:used])
        if done and self.exchange is exchange:
            exchange.request_complete()

    # -- answers out ------------------------------------------------------------------------------------------

    @property
    def body_unread(self) -> bool:
        """Whether the body of the request in progress is not all here yet."""
        return self._framing is not None

    def send_continue(self) -> None:
        """Tell a client that waits for it to send its body."""
        self._active_at = self.site.clock.seconds()
        self.transport.write(_CONTINUE)

    def finished(self, keep_alive: bool) -> None:
        """The request in progress is answered."""
        self.exchange = None
        unread, self._framing = self._framing is not None, None
        if unread or not keep_alive or self.closing:
            self.finish_closing(body_unread=unread)
            return
        self._active_at = self.site.clock.seconds()
        if self._pauses:
            self._pauses = 0
            self._apply_pauses()
        self._searched = 0
        if self._buffer and not self._serving:
            self._serve(self._buffer)

    def cut(self, *, framed: bool) -> None:
        """End the connection so that the answer in progress is seen to be truncated.

        What was received is still delivered where its framing tells that more should have come; an answer that
        ends with the connection is reset, since an orderly end would look complete.
        """
        self.exchange = None
        self._framing = None
        self._buffer = b""
        if framed:
            self.close()
        else:
            self.transport.abortConnection()

    def finish_closing(self, *, body_unread: bool) -> None:
        """Close after the answer; with body bytes still on their way, read them for a moment first."""
        if not body_unread:
            self.close()
            return
        self.closing = True
        self._buffer = b""
        self._framing = None
        self._pauses = 0
        self._apply_pauses()
        transport: Any = self.transport
        transport.unregisterProducer()
        half_closes = IHalfCloseableDescriptor.providedBy(transport)
        if half_closes and not ISSLTransport.providedBy(transport):
            transport.loseWriteConnection()
        self._restart_timer(LINGER, self.close)

    def close(self) -> None:
        """Close once everything written is out."""
        self.closing = True
        if self.transport.connected:
            self._unwatch()
            self.transport.unregisterProducer()
            self.transport.loseConnection()
            self._restart_timer(CLOSE_TIMEOUT, self._give_up)

    def _restart_timer(self, seconds: float, call: Callable[[], None]) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = self.site.clock.callLater(seconds, call)

    def _give_up(self) -> None:
        self._timer = None
        self.transport.abortConnection()

    def _refuse(self, error: BadMessage) -> None:
        """Answer a message that is none, and close."""
        self.site.refused(self.client, error)
        self._buffer = b""
        self._framing = None
        self.transport.write(error_response(error.status, error.reason, b"", keep_alive=False))
        self.finish_closing(body_unread=True)

    # -- backpressure -----------------------------------------------------------------------------------------

    def pause(self, why: int) -> None:
        """Stop reading from the client for a reason of :class:`Pause`."""
        if not self._pauses & why:
            self._pauses |= why
            self._apply_pauses()

    def unpause(self, why: int) -> None:
        """Take a reason back; reading goes on when none is left."""
        if self._pauses & why:
            self._pauses &= ~why
            self._apply_pauses()

    def _apply_pauses(self) -> None:
        transport = self.transport
        if not self._pauses:
            self._unwatch()
            # The client could not send meanwhile: its time begins anew.
            self._active_at = self.site.clock.seconds()
            transport.resumeProducing()
        elif self._watched is None:
            transport.pauseProducing()
            socket = socket_below(transport)
            fd = socket.fileno() if socket is not None else -1
            if fd >= 0:
                self._watched = fd
                self.site.vigil.watch(fd, self._vanished)

    def _unwatch(self) -> None:
        if self._watched is not None:
            self.site.vigil.unwatch(self._watched)
            self._watched = None

    def _vanished(self) -> None:
        self._watched = None
        self.transport.abortConnection()

    def pauseProducing(self) -> None:
        """The client reads slower than the upstream sends."""
        self._choked = True
        self._choked_at = self.site.clock.seconds()
        if self.exchange is not None:
            self.exchange.client_paused()

    def resumeProducing(self) -> None:
        self._choked = False
        if self.exchange is not None:
            self.exchange.client_resumed()
        elif self._pauses & Pause.SLOW:
            self.unpause(Pause.SLOW)
            self._serve(self._buffer)

    def stopProducing(self) -> None:
        """The transport is gone; connectionLost tells the rest."""
