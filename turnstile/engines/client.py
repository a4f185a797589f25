"""A small JSON client for looking at engines and telling them things.

It stands on a treq-shaped object (``request(method, url, headers=, data=, ...)``), so that tests pass a stub. Every
call has a hard time limit on the injected clock, after which the connection is dropped; bodies are bounded; nothing
is ever sent a second time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from hyperlink import EncodedURL
from twisted.internet import error
from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.defer import Deferred, maybeDeferred, succeed
from twisted.internet.endpoints import (
    HostnameEndpoint,
    TCP4ClientEndpoint,
    TCP6ClientEndpoint,
    wrapClientTLS,
)
from twisted.internet.interfaces import IReactorTime
from twisted.internet.protocol import Protocol as TwistedProtocol
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure
from twisted.web.client import (
    URI,
    Agent,
    BrowserLikePolicyForHTTPS,
    HTTPConnectionPool,
    ResponseDone,
)
from twisted.web.http import PotentialDataLoss
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

#: The most bytes of an answer that are read. A queue holds every job's whole graph, so this is generous.
BODY_LIMIT = 64 * 1024 * 1024

#: The header field of calls that carry a mark.
MARK_FIELD = "X-Turnstile-Call"

#: Seconds an idle connection is kept; below the 75 s after which aiohttp servers close theirs.
IDLE_TIMEOUT = 15.0

#: Seconds between the addresses of a name that are tried.
ATTEMPT_DELAY = 0.05


class ClientError(Exception):
    """A call to an engine failed."""


class Unreachable(ClientError):
    """Nobody listens there (refused, no route, no such host): the engine's process is not running."""


class TimedOut(ClientError):
    """No whole answer within the time limit; says nothing about the process."""


class Broken(ClientError):
    """The connection ended or could not be begun, or what came was not HTTP."""


class HttpError(ClientError):
    """An answer other than 2xx."""

    def __init__(self, status: int, body: bytes = b"") -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.body = body


class BadAnswer(ClientError):
    """A 2xx answer that is not what the engine should say (not JSON, too large, another shape)."""


class Target(Protocol):
    """What is needed of an upstream's address; see :class:`turnstile.config.Upstream`."""

    @property
    def url(self) -> str: ...


class _Collector(TwistedProtocol):
    """Gathers a body up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self.done: Deferred[bytes] = Deferred(lambda _: self._drop())

    def dataReceived(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit:
            self._parts.clear()
            self._end(Failure(BadAnswer(f"more than {self._limit} bytes")))
            self._drop()
        else:
            self._parts.append(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if reason.check(ResponseDone, PotentialDataLoss):
            self._end(b"".join(self._parts))
        else:
            self._end(reason)

    def _end(self, result: bytes | Failure) -> None:
        if not self.done.called:
            self.done.callback(result)

    def _drop(self) -> None:
        transport = self.transport
        if transport is not None:
            getattr(transport, "abortConnection", transport.loseConnection)()


class _ReadyURL(EncodedURL):
    """A URL of ASCII only. treq has hyperlink encode host names, which fails on IPv6 literals."""

    def to_uri(self) -> _ReadyURL:
        return self


class JsonClient:
    """Calls to one engine.

    :param http: a treq-shaped client.
    :param clock: the source of time limits.
    :param base_url: the engine's address, without a slash at its end.
    :param pool: the connection pool that :meth:`close` empties.
    :param mark: sent with every call, so that one which comes back to its sender is known there.
    :param headers: sent with every call too (an API key).
    """

    def __init__(
        self,
        http: Any,
        clock: IReactorTime,
        base_url: str,
        *,
        pool: HTTPConnectionPool | None = None,
        limit: int = BODY_LIMIT,
        mark: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._headers = {**(headers or {}), **({MARK_FIELD: mark} if mark else {})}
        self._http = http
        self._clock = clock
        self.base_url = base_url.rstrip("/")
        self._literal = "[" in base_url
        self._pool = pool
        self._limit = limit

    def get_json(self, path: str, timeout: float) -> Deferred[Any]:
        """The parsed answer to a GET.

        :param path: from the engine's root, percent-encoded where needed.
        """
        return self._call("GET", path, None, timeout, _parse)

    def post_json(self, path: str, payload: object, timeout: float) -> Deferred[bytes]:
        """The body of the 2xx answer to a POST."""
        return self._call("POST", path, json.dumps(payload).encode(), timeout, bytes)

    def delete(self, path: str, timeout: float) -> Deferred[bytes]:
        """The body of the 2xx answer to a DELETE."""
        return self._call("DELETE", path, None, timeout, bytes)

    def open(self, path: str, timeout: float) -> Deferred[Any]:
        """The 2xx answer to a GET, once its head is there; who asked takes the body, which may never end.

        :param timeout: seconds until the head must have come.
        """
        return self._bounded(lambda: self._request("GET", path, None, self._check), timeout)

    def close(self) -> Deferred[None]:
        """Close the idle connections."""
        if self._pool is None:
            return succeed(None)
        d: Deferred[None] = self._pool.closeCachedConnections()
        return d

    def _call(
        self,
        method: str,
        path: str,
        data: bytes | None,
        timeout: float,
        convert: Callable[[bytes], Any],
    ) -> Deferred[Any]:
        def begin() -> Deferred[Any]:
            return self._request(method, path, data, self._read).addCallback(convert)

        return self._bounded(begin, timeout)

    def _bounded(self, begin: Callable[[], Deferred[Any]], timeout: float) -> Deferred[Any]:
        # The caller's Deferred is apart from the work: a cancelled or expired call must end at once and with its own
        # error, whatever the layers below make of being cancelled.
        open_ = True

        def close() -> None:
            nonlocal open_
            open_ = False
            if expiry.active():
                expiry.cancel()

        def give_up(_: object = None) -> None:
            close()
            work.cancel()

        def expire() -> None:
            give_up()
            outer.errback(TimedOut(f"no answer within {timeout:g} s"))

        def finish(result: Any) -> None:
            if open_:
                close()
                outer.callback(result)

        outer: Deferred[Any] = Deferred(give_up)
        expiry = self._clock.callLater(max(timeout, 0.0), expire)
        work = maybeDeferred(begin)
        work.addErrback(_translate).addBoth(finish)
        return outer

    def _request(
        self, method: str, path: str, data: bytes | None, take: Callable[[Any], Any]
    ) -> Deferred[Any]:
        headers = dict(self._headers)
        if data is not None:
            headers["Content-Type"] = "application/json"
        url = self.base_url + path
        d: Deferred[Any] = maybeDeferred(
            self._http.request,
            method,
            _ReadyURL.from_text(url) if self._literal else url,
            headers=headers,
            data=data,
            allow_redirects=False,
            unbuffered=True,
        )
        return d.addCallback(take)

    def _check(self, response: Any) -> Any:
        return response if 200 <= response.code < 300 else self._read(response)

    def _read(self, response: Any) -> Deferred[bytes]:
        collector = _Collector(self._limit)
        response.deliverBody(collector)
        if 200 <= response.code < 300:
            return collector.done

        def refused(result: bytes | Failure) -> bytes:
            # The status says it all, even where the explanation is cut off.
            raise HttpError(response.code, b"" if isinstance(result, Failure) else result[:500])

        return collector.done.addBoth(refused)


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as e:
        raise BadAnswer(f"not JSON: {type(e).__name__}") from None


def _translate(failure: Failure) -> Failure:
    """One of our errors for whatever the layers below raised."""
    value = failure.value
    if isinstance(value, ClientError):
        return failure
    if isinstance(value, (error.TimeoutError, error.TCPTimedOutError)):
        return Failure(TimedOut("no connection"))
    if isinstance(value, error.ConnectBindError):
        # No socket could be made (too many open files): our trouble, which says nothing about the engine.
        return Failure(Broken(str(value)))
    if isinstance(value, (error.ConnectError, error.DNSLookupError)):
        return Failure(Unreachable(type(value).__name__))
    return Failure(Broken(type(value).__name__))


@implementer(IAgentEndpointFactory)
class _Endpoints:
    """Connections that fail at once where nobody listens.

    twisted's own take their time (0.3 s) to find out that an address was the only one, which every look at an engine
    that is not there would cost.
    """

    def __init__(self, reactor: Any, policy: Any, timeout: float) -> None:
        self._reactor = reactor
        self._policy = policy
        self._timeout = timeout

    def endpointForURI(self, uri: URI) -> Any:
        """Called by the agent."""
        host = uri.host.decode("ascii").strip("[]")
        endpoint: Any
        if isIPAddress(host):
            endpoint = TCP4ClientEndpoint(self._reactor, host, uri.port, self._timeout)
        elif isIPv6Address(host):
            endpoint = TCP6ClientEndpoint(self._reactor, host, uri.port, self._timeout)
        else:
            endpoint = HostnameEndpoint(
                self._reactor, host, uri.port, self._timeout, attemptDelay=ATTEMPT_DELAY
            )
        if uri.scheme == b"https":
            return wrapClientTLS(self._policy.creatorForNetloc(uri.host, uri.port), endpoint)
        return endpoint


def make_client(
    reactor: Any,
    upstream: Target,
    *,
    connect_timeout: float,
    context_factory: Any = None,
    mark: str = "",
    headers: Mapping[str, str] | None = None,
) -> JsonClient:
    """A client for one upstream, with a few connections of its own that are kept alive.

    :param context_factory: an ``IPolicyForHTTPS``; by default the platform's certificate authorities.
    :param mark: see :class:`JsonClient`.
    :param headers: see :class:`JsonClient`.
    """
    from treq.client import HTTPClient

    pool = HTTPConnectionPool(reactor, persistent=True)
    pool.retryAutomatically = False
    pool.maxPersistentPerHost = 4
    pool.cachedConnectionTimeout = IDLE_TIMEOUT  # type: ignore[assignment]
    policy = BrowserLikePolicyForHTTPS() if context_factory is None else context_factory
    endpoints = _Endpoints(reactor, policy, connect_timeout)
    agent = Agent.usingEndpointFactory(reactor, endpoints, pool)
    return JsonClient(
        HTTPClient(agent), reactor, upstream.url, pool=pool, mark=mark, headers=headers
    )


__all__ = [
    "BadAnswer",
    "Broken",
    "ClientError",
    "HttpError",
    "JsonClient",
    "TimedOut",
    "Unreachable",
    "make_client",
]
