"""turnstile's own WebSocket to ComfyUI: hears of every change of the queue.

ComfyUI broadcasts ``status`` to every socket when its queue changes; what else it sends goes to submitters only and is
not relied on. Each connection has a client id of its own that nobody can guess: a second socket with the same id would
take a client's events, and closing the first would leave it deaf.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Protocol

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure
from twisted.web.client import BrowserLikePolicyForHTTPS

#: Seconds until the first attempt to connect again, doubling up to the most.
FIRST_DELAY = 0.1
MOST_DELAY = 5.0


class Sink(Protocol):
    """What hears from one connection. After ``lost`` nothing comes any more."""

    def opened(self) -> None: ...

    def text(self, payload: bytes) -> None: ...

    def lost(self, reason: str) -> None: ...


#: Makes one attempt to connect and returns a function that drops the connection or the attempt, silently.
ConnectEvents = Callable[[Sink], Callable[[], None]]


class EventStream:
    """Keeps a connection up: back-off while ComfyUI is away, at once when there is a job.

    :param connect: makes one attempt.
    :param on_text: is called with each text message.
    :param on_change: is called when the connection came up (true) or went away (false).
    """

    def __init__(
        self,
        clock: IReactorTime,
        connect: ConnectEvents,
        on_text: Callable[[bytes], None],
        on_change: Callable[[bool], None],
    ) -> None:
        self._clock = clock
        self._connect = connect
        self._on_text = on_text
        self._on_change = on_change
        self._drop: Callable[[], None] | None = None
        self._retry: IDelayedCall | None = None
        self._delay = FIRST_DELAY
        self._running = False
        self._attempt: _Attempt | None = None
        self.is_open = False

    @property
    def state(self) -> str:
        """``open``, ``connecting``, ``waiting`` or ``closed``."""
        if self.is_open:
            return "open"
        if self._attempt is not None:
            return "connecting"
        return "waiting" if self._retry is not None else "closed"

    def start(self) -> None:
        """Connect, and stay so."""
        if not self._running:
            self._running = True
            self._try()

    def stop(self) -> None:
        """Close for good."""
        self._running = False
        self._cancel_retry()
        self._attempt = None
        self.is_open = False
        drop, self._drop = self._drop, None
        if drop is not None:
            drop()

    def kick(self) -> None:
        """Something will be watched: do not wait for the next attempt."""
        if self._retry is not None:
            self._cancel_retry()
            self._delay = FIRST_DELAY
            self._try()

    def _cancel_retry(self) -> None:
        retry, self._retry = self._retry, None
        if retry is not None and retry.active():
            retry.cancel()

    def _try(self) -> None:
        self._retry = None
        attempt = self._attempt = _Attempt(self)
        drop = self._connect(attempt)
        if self._attempt is attempt:
            self._drop = drop

    def _opened(self, attempt: _Attempt) -> None:
        if attempt is self._attempt:
            self.is_open = True
            self._delay = FIRST_DELAY
            self._on_change(True)

    def _text(self, attempt: _Attempt, payload: bytes) -> None:
        if attempt is self._attempt:
            self._on_text(payload)

    def _lost(self, attempt: _Attempt) -> None:
        if attempt is not self._attempt:
            return
        self._attempt = self._drop = None
        was_open, self.is_open = self.is_open, False
        if self._running:
            self._retry = self._clock.callLater(self._delay, self._try)
            self._delay = min(self._delay * 2, MOST_DELAY)
        if was_open:
            self._on_change(False)


class _Attempt:
    """One connection's sink; a stale one's events go nowhere."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream

    def opened(self) -> None:
        self._stream._opened(self)

    def text(self, payload: bytes) -> None:
        self._stream._text(self, payload)

    def lost(self, reason: str) -> None:
        self._stream._lost(self)


def make_connect_events(
    reactor: Any,
    upstream: Any,
    *,
    connect_timeout: float | Callable[[], float],
    context_factory: Any = None,
) -> ConnectEvents:
    """How to connect to one ComfyUI.

    :param upstream: its :class:`turnstile.config.Upstream`.
    :param connect_timeout: seconds for connecting; a function is asked each time.
    :param context_factory: an ``IPolicyForHTTPS``; by default the platform's certificate authorities.
    """
    creator: Any = None
    if upstream.is_tls:
        policy = BrowserLikePolicyForHTTPS() if context_factory is None else context_factory
        creator = policy.creatorForNetloc(upstream.host.encode("ascii"), upstream.port)
    base = "ws" + upstream.url.removeprefix("http")

    def connect(sink: Sink) -> Callable[[], None]:
        from turnstile.engines.comfy_socket import events_factory

        seconds = connect_timeout() if callable(connect_timeout) else connect_timeout
        endpoint: Any = HostnameEndpoint(reactor, upstream.host, upstream.port, seconds)
        if creator is not None:
            endpoint = wrapClientTLS(creator, endpoint)
        url = f"{base}/ws?clientId=turnstile-{uuid.uuid4()}"
        factory = events_factory(url, reactor, sink, seconds)
        silent = False
        d: Deferred[Any] = endpoint.connect(factory)
        connected: list[Any] = []

        def failed(failure: Failure) -> None:
            if not silent and not failure.check(CancelledError):
                sink.lost(failure.getErrorMessage())

        def drop() -> None:
            nonlocal silent
            silent = True
            factory.sink = _NOBODY
            d.cancel()
            for protocol in connected:
                protocol.transport.abortConnection()

        d.addCallbacks(connected.append, failed)
        return drop

    return connect


class _Nobody:
    def opened(self) -> None: ...

    def text(self, payload: bytes) -> None: ...

    def lost(self, reason: str) -> None: ...


_NOBODY = _Nobody()

__all__ = ["ConnectEvents", "EventStream", "Sink", "make_connect_events"]
