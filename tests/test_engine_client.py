"""How the JSON client reaches an engine."""

from __future__ import annotations

import pytest
import pytest_twisted
from engine_kit import reactor
from twisted.internet import ssl
from twisted.internet.endpoints import HostnameEndpoint, TCP4ClientEndpoint, TCP6ClientEndpoint
from twisted.web.client import URI, BrowserLikePolicyForHTTPS
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface.verify import verifyObject

from turnstile.config import Upstream
from turnstile.engines.client import Unreachable, _Endpoints, make_client


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        (b"http://127.0.0.1:11434/api/ps", TCP4ClientEndpoint),
        (b"http://[::1]:11434/api/ps", TCP6ClientEndpoint),
        (b"http://gpu.example:11434/api/ps", HostnameEndpoint),
        (b"http://localhost/", HostnameEndpoint),
    ],
)
def test_literal_addresses_are_connected_to_without_a_detour(url: bytes, kind: type) -> None:
    factory = _Endpoints(reactor, BrowserLikePolicyForHTTPS(), 5.0)
    verifyObject(IAgentEndpointFactory, factory)
    assert type(factory.endpointForURI(URI.fromBytes(url))) is kind


def test_tls_is_put_around_either() -> None:
    class Policy:
        asked: list[tuple[bytes, int]] = []

        def creatorForNetloc(self, hostname: bytes, port: int) -> object:
            self.asked.append((hostname, port))
            return ssl.optionsForClientTLS("gpu.example")

    factory = _Endpoints(reactor, Policy(), 5.0)
    for url in (b"https://127.0.0.1/", b"https://gpu.example:8443/"):
        endpoint = factory.endpointForURI(URI.fromBytes(url))
        assert type(endpoint) not in (TCP4ClientEndpoint, HostnameEndpoint)
    assert Policy.asked == [(b"127.0.0.1", 443), (b"gpu.example", 8443)]


@pytest_twisted.ensureDeferred
async def test_where_nobody_listens_is_unreachable() -> None:
    for host in ("127.0.0.1", "[::1]", "localhost"):
        client = make_client(reactor, Upstream.parse(f"http://{host}:1"), connect_timeout=5.0)
        with pytest.raises(Unreachable):
            await client.get_json("/", 5.0)
        await client.close()
