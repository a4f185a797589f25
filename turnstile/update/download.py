"""Fetching small files over verified TLS: bounded in size, in time and in redirects, and never over anything less."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any
from urllib.parse import urljoin, urlsplit

from twisted.internet.defer import Deferred, inlineCallbacks
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.web.client import Agent, BrowserLikePolicyForHTTPS, ResponseDone
from twisted.web.http import PotentialDataLoss
from twisted.web.http_headers import Headers

from turnstile import __version__

#: Seconds for connecting, and for one file with all its redirects.
CONNECT_TIMEOUT = 30.0
WHOLE_TIMEOUT = 300.0
MOST_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class DownloadError(Exception):
    """A file could not be fetched; the text is one line that says why."""


class _Collector(Protocol):
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self.done: Deferred[bytes] = Deferred(lambda _: self._drop())

    def dataReceived(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= self._limit:
            self._parts.append(data)
        elif not self.done.called:
            self._parts.clear()
            self.done.errback(DownloadError(f"more than {self._limit} bytes"))
            self._drop()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.done.called:
            return
        # An answer without a length ends with its connection; what was lost then shows in the signature.
        if reason.check(ResponseDone, PotentialDataLoss):
            self.done.callback(b"".join(self._parts))
        else:
            self.done.errback(DownloadError("the connection ended before the file did"))

    def _drop(self) -> None:
        transport: Any = self.transport
        if transport is not None:
            getattr(transport, "abortConnection", transport.loseConnection)()


class Downloader:
    """Fetches files.

    :param policy: an ``IPolicyForHTTPS``; by default the platform's certificate authorities.
    """

    def __init__(self, reactor: Any, policy: Any = None) -> None:
        self._reactor = reactor
        policy = BrowserLikePolicyForHTTPS() if policy is None else policy
        self._agent = Agent(reactor, policy, connectTimeout=CONNECT_TIMEOUT)

    def get(self, url: str, limit: int, accept: str = "*/*") -> Deferred[bytes]:
        """The file at ``url``, at most ``limit`` bytes; fails with `DownloadError`. Cancellable."""
        d = self._get(url, limit, accept)
        d.addTimeout(WHOLE_TIMEOUT, self._reactor, lambda result, _: _late(result))
        return d.addErrback(_translate, url)

    @inlineCallbacks
    def _get(self, url: str, limit: int, accept: str) -> Generator[Deferred[Any], Any, bytes]:
        headers = Headers({"User-Agent": [f"turnstile/{__version__}"], "Accept": [accept]})
        for _ in range(MOST_REDIRECTS + 1):
            if urlsplit(url).scheme.lower() != "https":
                raise DownloadError("it leads to an address that is not https://")
            response = yield self._agent.request(b"GET", url.encode("ascii"), headers)
            if response.code not in _REDIRECTS:
                break
            target = response.headers.getRawHeaders("location", [""])[-1]
            _discard(response)
            if not target:
                raise DownloadError(f"status {response.code} without a location")
            url = urljoin(url, target)
        else:
            raise DownloadError(f"more than {MOST_REDIRECTS} redirects")
        if response.code != 200:
            _discard(response)
            raise DownloadError(f"status {response.code}")
        if isinstance(response.length, int) and response.length > limit:
            _discard(response)
            raise DownloadError(f"more than {limit} bytes")
        collector = _Collector(limit)
        response.deliverBody(collector)
        body: bytes = yield collector.done
        return body


class _Discard(Protocol):
    def connectionMade(self) -> None:
        transport: Any = self.transport
        getattr(transport, "abortConnection", transport.loseConnection)()


def _discard(response: Any) -> None:
    response.deliverBody(_Discard())


def _late(result: Any) -> Any:
    raise DownloadError(f"not done within {WHOLE_TIMEOUT:g} s")


def _translate(failure: Failure, url: str) -> Failure:
    """One of our errors, which says where it happened."""
    error = failure.value
    if isinstance(error, DownloadError):
        return Failure(DownloadError(f"{url}: {error}"))
    reasons = getattr(error, "reasons", None)  # of twisted.web, which wraps what happened
    if reasons:
        error = reasons[-1].value
    text = " ".join(str(error).split())
    if type(error).__module__.startswith("OpenSSL"):
        text = "its certificate is not to be trusted, or it speaks no TLS"
    elif type(error).__name__ == "VerificationError":  # of service-identity
        text = "its certificate is for another host"
    return Failure(DownloadError(f"{url}: {text or type(error).__name__}"))


__all__ = ["DownloadError", "Downloader"]
