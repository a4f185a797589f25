"""Where routes and policy are seen: the resource that stands for one engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from twisted.web.proxy import ReverseProxyResource
from twisted.web.server import NOT_DONE_YET

from turnstile import log as tlog
from turnstile.engines.base import Admission
from turnstile.proxy.gate import Ending, Gate
from turnstile.proxy.http1 import BadMessage, Headers, RequestHead
from turnstile.proxy.retry import RetryPolicy
from turnstile.proxy.upstream import UpstreamPool

if TYPE_CHECKING:
    from turnstile.proxy.exchange import Exchange

_log = tlog.Logger()


class Policy(Protocol):
    """What an engine and the configuration say about requests; the data path knows no more of them."""

    #: The engine's name in log and metrics.
    engine: str
    #: Seconds for the Retry-After of our own 503.
    retry_after: int
    #: Seconds for which the engine may be silent while others wait for the card; ``None``: somebody else sees to it.
    stall_timeout: float | None
    #: Send the client's Host upstream instead of the upstream's own (ENGINES.md: ComfyUI compares it with Origin).
    keeps_client_host: bool

    def admission(self, method: bytes, target: bytes) -> Admission:
        """The classification table."""
        ...

    def is_unload_only(self, target: bytes, body: bytes) -> bool:
        """Whether a request that was admitted to be looked into only unloads a model."""
        ...

    def absent(self) -> tuple[str, dict[str, Any]]:
        """Why a request is refused that was found to need an engine that does not run, in words and as JSON members."""
        ...

    def open_gate(self, head: RequestHead, client: str) -> Gate:
        """A gate for a request that needs the card."""
        ...


class Observer(Protocol):
    """Who counts requests (metrics)."""

    def request_done(self, engine: str, status: int) -> None: ...

    def retried(self, engine: str, reason: str) -> None: ...


class EngineResource(ReverseProxyResource):
    """One engine's whole URL space.

    twisted.web's ReverseProxyResource names the upstream and is the place where requests arrive; its transport is
    replaced by :class:`turnstile.proxy.exchange.Exchange`, which streams, pools, retries and keeps bytes as they are.
    """

    isLeaf = True

    def __init__(
        self,
        pool: UpstreamPool,
        policy: Policy,
        *,
        reactor: Any,
        retry: RetryPolicy,
        observer: Observer | None = None,
        relays_websockets: bool = False,
        tls: bool = False,
        chance: Callable[[], float] = random.random,
    ) -> None:
        upstream = pool.upstream
        super().__init__(  # type: ignore[no-untyped-call]
            upstream.host, upstream.port, upstream.base_path.encode(), reactor
        )
        self.pool = pool
        self.policy = policy
        self.clock = reactor
        self.retry = retry
        self.chance = chance
        self.relays_websockets = relays_websockets
        #: Exchanges whose client is gone and which go on nevertheless.
        self.carried: set[Exchange] = set()
        #: Called when one of them has ended.
        self.carried_through: Callable[[], None] = _nothing
        self._observer = observer
        self._host = upstream.netloc.encode()
        self._base = upstream.base_path.encode()
        self._proto = b"https" if tls else b"http"

    def getChild(self, path: bytes, request: Any) -> EngineResource:
        """Every path is the upstream's."""
        return self

    def render(self, request: Any) -> int:
        """Set an exchange off.

        :param request: an :class:`~turnstile.proxy.exchange.Exchange`.
        """
        if tlog.info_enabled:
            tlog.log_request_in(request.method, request.uri, request.client, self.policy.engine)
        request.start(self.policy.admission(request.method, request.uri))
        return NOT_DONE_YET

    # -- heads ------------------------------------------------------------------------------------------------

    def upstream_fields(self, head: RequestHead, client: str) -> Headers:
        """The header fields to send upstream, but for those that frame the body."""
        host = head.authority or head.host
        fields = [(b"Host", host if host and self.policy.keeps_client_host else self._host)]
        fields += head.fields
        forwarded = head.forwarded_for
        if client:
            forwarded = [*forwarded, client.encode()]
        if forwarded:
            fields.append((b"X-Forwarded-For", b", ".join(forwarded)))
        fields.append((b"X-Forwarded-Proto", head.forwarded_proto or self._proto))
        forwarded_host = head.forwarded_host or host
        if forwarded_host:
            fields.append((b"X-Forwarded-Host", forwarded_host))
        return fields

    def upstream_target(self, head: RequestHead) -> bytes:
        """The target as the upstream gets it: the client's, behind the upstream's base path."""
        return head.target if head.target == b"*" else self._base + head.target

    def request_head(self, head: RequestHead, client: str) -> bytes:
        """The head to send upstream."""
        if head.te_chunked:
            framing = b"Transfer-Encoding: chunked\r\n\r\n"
        elif head.content_length is not None:
            framing = b"Content-Length: %d\r\n\r\n" % head.content_length
        else:
            framing = b"\r\n"
        lines = [b"%s: %s\r\n" % field for field in self.upstream_fields(head, client)]
        return b"%s %s HTTP/1.1\r\n%s%s" % (
            head.method,
            self.upstream_target(head),
            b"".join(lines),
            framing,
        )

    # -- what is told to people -------------------------------------------------------------------------------

    def retrying(self, exchange: Exchange, problem: str, reason: str, wait: float) -> None:
        """An attempt failed and another follows after ``wait`` seconds."""
        engine = self.policy.engine
        if self._observer is not None:
            self._observer.retried(engine, reason)
        _log.warn(
            "{engine} not reached, trying again in {wait:.1f} s: {problem}",
            engine=engine,
            problem=problem,
            wait=wait,
            target=tlog.redact_target(exchange.uri),
        )

    def ended(self, exchange: Exchange, ending: Ending, duration: float, message: str) -> None:
        """An exchange is over; ``message`` is the error that the client was told."""
        engine = self.policy.engine
        if exchange in self.carried:
            self.carried.discard(exchange)
            self.carried_through()
        if self._observer is not None:
            self._observer.request_done(engine, exchange.status)
        if tlog.info_enabled:
            fields = {"error": message} if message else {}
            if ending is not Ending.DONE:
                fields["ending"] = ending.value
            tlog.log_request_out(
                exchange.method,
                exchange.uri,
                exchange.status,
                duration,
                exchange.client,
                engine,
                **fields,
            )

    def refused(self, client: str, error: BadMessage) -> None:
        """A message was refused as malformed."""
        _log.warn(
            "refused a malformed request to {engine}: {reason}",
            engine=self.policy.engine,
            reason=error.reason,
            status=error.status,
            client=client,
        )


def _nothing() -> None:
    """Nobody needs to know."""
