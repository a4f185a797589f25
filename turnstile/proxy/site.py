"""A listener's factory: builds channels, knows them all, and ends them in good order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IAddress, IDelayedCall, IProtocolFactory
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure
from twisted.web.resource import IResource

from turnstile import log as tlog
from turnstile.proxy.channel import ProxyChannel
from turnstile.proxy.http1 import BadMessage, RequestHead
from turnstile.proxy.resource import EngineResource
from turnstile.proxy.retry import connect_with_backoff
from turnstile.proxy.vigil import Vigil
from turnstile.proxy.websocket import UpgradeRequest, WebSocketRelay, start_relay

_log = tlog.Logger()

#: Seconds that clients have to take an answer that they get at the very end.
LAST_WORDS = 0.5


class ProxySite(Factory):
    """Serves one engine's clients, or those of several behind one port.

    :param resource: the engine.
    :param route: which engine a request is for, where there are several; ``None``: all are for ``resource``.
    :param others: those that ``route`` may name beside ``resource``.
    :param pages: our own pages by their exact path; they take precedence over the engine's.
    :param marks: what requests of our own carry; one that comes in here would go round for ever, and is refused.
    :param on_loop: told of the mark of such a request.
    :param on_text: told of text messages that relayed WebSockets carry to clients.
    """

    noisy = False

    def __init__(
        self,
        resource: EngineResource,
        pages: Mapping[bytes, IResource],
        *,
        clock: Any,
        vigil: Vigil,
        on_text: Any = None,
        on_relays: Any = None,
        marks: tuple[bytes, ...] = (),
        on_loop: Callable[[bytes], None] | None = None,
        route: Callable[[RequestHead], EngineResource] | None = None,
        others: Iterable[EngineResource] = (),
    ) -> None:
        self.resource = resource
        self.route = route
        self.resources = (resource, *others)
        self.pages = pages
        self.clock = clock
        self.vigil = vigil
        self.channels: set[ProxyChannel] = set()
        self.relays: set[WebSocketRelay] = set()
        self._on_text = on_text
        self._on_relays = on_relays
        self.marks = marks
        self._on_loop = on_loop
        self._last_words: IDelayedCall | None = None
        #: Set once the listener is being closed.
        self.stopping = False
        self._drained: Deferred[None] | None = None
        for each in self.resources:
            each.carried_through = self._check_drained

    def buildProtocol(self, addr: IAddress | None) -> ProxyChannel:
        return ProxyChannel(self)

    def looped(self, mark: bytes) -> BadMessage:
        """A request of our own came in; returns how it is refused."""
        if self._on_loop is not None:
            self._on_loop(mark)
        return BadMessage("the engine's address leads back to turnstile", 508)

    def refused(self, client: str, error: BadMessage) -> None:
        self.resource.refused(client, error)

    # -- WebSocket --------------------------------------------------------------------------------------------

    def relay(self, channel: ProxyChannel, head: RequestHead, leftover: bytes) -> None:
        """Give a connection that asks for a WebSocket to the relay."""
        resource = self.resource
        pool = resource.pool
        engine = resource.policy.engine
        began = self.clock.seconds()
        client = channel.client
        if tlog.info_enabled:
            tlog.log_request_in(head.method, head.target, client, engine, websocket=True)
        fields = [
            field
            for field in resource.upstream_fields(head, client)
            if not field[0].lower().startswith(b"sec-websocket-")
        ]
        request = UpgradeRequest(
            target=resource.upstream_target(head),
            client_headers=head.received,
            upstream_headers=fields,
        )

        def failed(failure: Failure, wait: float) -> None:
            _log.warn(
                "{engine} not reached for a WebSocket, trying again in {wait:.1f} s: {problem}",
                engine=engine,
                problem=failure.getErrorMessage(),
                wait=wait,
            )

        def connect(factory: IProtocolFactory) -> Deferred[Any]:
            return connect_with_backoff(
                self.clock,
                resource.retry,
                resource.chance,
                lambda: pool.connect_factory(factory),
                failed,
            )

        relay = start_relay(
            channel.transport,
            head.raw,
            leftover,
            request,
            connect,
            clock=self.clock,
            on_text=self._on_text,
        )
        self.relays.add(relay)
        if self._on_relays is not None:
            self._on_relays(1)

        def done(result: Any) -> None:
            self.relays.discard(relay)
            if self._on_relays is not None:
                self._on_relays(-1)
            status = getattr(result, "status", 0)
            if tlog.info_enabled:
                tlog.log_request_out(
                    head.method,
                    head.target,
                    status,
                    self.clock.seconds() - began,
                    client,
                    engine,
                    websocket=True,
                )
            self._check_drained()

        relay.done.addBoth(done)
        if self.stopping:
            relay.close(1001, "turnstile is shutting down")

    # -- shutdown ---------------------------------------------------------------------------------------------

    def channel_gone(self, channel: ProxyChannel) -> None:
        """A channel's connection ended, or was given to a relay."""
        self.channels.discard(channel)
        self._check_drained()

    def _check_drained(self) -> None:
        drained = self._drained
        if drained is not None and self._is_empty():
            self._drained = None
            if self._last_words is not None and self._last_words.active():
                self._last_words.cancel()
            drained.callback(None)

    def _is_empty(self) -> bool:
        if self.channels or self.relays:
            return False
        return not any(resource.carried for resource in self.resources)

    def drain(self) -> Deferred[None]:
        """Refuse what waits, let answers in progress finish, close the rest; fires when all connections are gone."""
        self.stopping = True
        for relay in tuple(self.relays):
            relay.close(1001, "turnstile is shutting down")
        for channel in tuple(self.channels):
            channel.shut()
            if channel.exchange is not None:
                channel.exchange.stop(now=False)
        if self._is_empty():
            return succeed(None)
        self._drained = Deferred()
        return self._drained

    def abort(self) -> None:
        """Cut everything that is left, visibly; what was not answered yet is, and has a moment for that."""
        for relay in tuple(self.relays):
            relay.abort()
        for channel in tuple(self.channels):
            told = channel.exchange is not None and channel.exchange.stop(now=True)
            if told and self._last_words is None:
                self._last_words = self.clock.callLater(LAST_WORDS, self.abort)
            if channel.transport is not None and not told:
                channel.transport.abortConnection()
        for resource in self.resources:
            for exchange in tuple(resource.carried):
                exchange.stop(now=True)
