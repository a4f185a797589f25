"""TLS upstream, verified; and TLS and UNIX listeners."""

from __future__ import annotations

import datetime
import ipaddress
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from proxy_kit import OK, End, Proxy, RawUpstream, proxying, reactor, turn
from twisted.internet import ssl
from twisted.internet.endpoints import (
    TCP4ClientEndpoint,
    UNIXClientEndpoint,
    UNIXServerEndpoint,
    wrapClientTLS,
)
from twisted.internet.protocol import Factory
from twisted.protocols.tls import TLSMemoryBIOFactory

GET = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"
KIB, MIB = 1 << 10, 1 << 20


@lru_cache
def certificate(name: str) -> tuple[str, str]:
    """A self-signed certificate and its key, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    alternative: Any
    try:
        alternative = x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        alternative = x509.DNSName(name)
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return built.public_bytes(pem).decode(), private.decode()


def server_context(name: str) -> Any:
    return ssl.PrivateCertificate.loadPEM("".join(certificate(name))).options()


def trusting(name: str) -> Any:
    return ssl.trustRootFromCertificates([ssl.Certificate.loadPEM(certificate(name)[0])])


class TLSUpstream(RawUpstream):
    """A raw upstream behind TLS."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    async def listen(self, port: int = 0) -> None:
        factory = TLSMemoryBIOFactory(server_context(self._name), False, self)
        self.port = reactor.listenTCP(port, factory, interface="127.0.0.1")
        self.number = self.port.getHost().port


@pytest_twisted.ensureDeferred
async def test_an_upstream_behind_tls() -> None:
    upstream = TLSUpstream("127.0.0.1")
    await upstream.listen()
    url = f"https://127.0.0.1:{upstream.number}"
    async with proxying(url=url, trust_root=trusting("127.0.0.1"), upstream=upstream) as p:
        client = await p.client(GET)
        up = await upstream.request()
        assert b"\r\nHost: 127.0.0.1:%d\r\n" % upstream.number in up.received
        up.send(OK)
        await client.until(b"ok")
        client.take()
        up.take()
        # Kept, for requests with a body too.
        size = 8 * MIB
        client.send(
            b"POST /gated HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size, bytes(size)
        )
        await up.when(lambda: len(up.received) > size)
        assert len(upstream.ends) == 1
        up.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, bytes(size))
        await client.when(lambda: len(client.received) > size)
        client.take()
        # An answer that ends with the connection, in an orderly way.
        client.send(GET)
        await up.until(b"GET")
        up.send(b"HTTP/1.1 200 OK\r\n\r\nall")
        up.fin()
        await client.closed()
        assert client.clean and client.received.endswith(b"\r\n\r\nall")


@pytest.mark.parametrize("how", ["rst", "fin"])
@pytest_twisted.ensureDeferred
async def test_a_tls_answer_without_its_end_is_cut(how: str) -> None:
    upstream = TLSUpstream("127.0.0.1")
    await upstream.listen()
    url = f"https://127.0.0.1:{upstream.number}"
    async with proxying(url=url, trust_root=trusting("127.0.0.1"), upstream=upstream) as p:
        client = await p.client(GET)
        up = await upstream.request()
        up.send(b"HTTP/1.1 200 OK\r\n\r\nnot all")
        await client.until(b"not all")
        below = up.transport.transport
        # Without TLS's own farewell.
        below.loseConnection() if how == "fin" else below.abortConnection()
        await client.closed()
        assert not client.clean


@pytest.mark.parametrize(
    ("name", "trusted"),
    [("127.0.0.1", None), ("other.example", "other.example"), ("127.0.0.1", "other.example")],
    ids=["self-signed", "wrong name", "other authority"],
)
@pytest_twisted.ensureDeferred
async def test_an_upstream_that_is_not_verified_is_sent_nothing(
    name: str, trusted: str | None
) -> None:
    upstream = TLSUpstream(name)
    await upstream.listen()
    root = trusting(trusted) if trusted else None
    url = f"https://127.0.0.1:{upstream.number}"
    async with proxying(url=url, trust_root=root, upstream=upstream) as p:
        client = await p.client(b"POST /gated HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\na")
        await p.policy.when(lambda: p.policy.retries)
        assert p.policy.gate.calls == ["enter", "leave"]
        p.clock.advance(1)
        await p.policy.when(lambda: len(p.policy.retries) == 2)
        assert not upstream.everything and not client.received
        client.fin()
        await p.policy.when(lambda: p.policy.done)


@pytest_twisted.ensureDeferred
async def test_a_tls_handshake_that_hangs_is_given_up() -> None:
    # A plain server that never says a word.
    upstream = RawUpstream()
    await upstream.listen()
    url = f"https://127.0.0.1:{upstream.number}"
    async with proxying(url=url, upstream=upstream, timeout=0.05) as p:
        client = await p.client(GET)
        await p.policy.when(lambda: p.policy.retries)
        up = await upstream.accept()
        await up.closed()
        client.fin()
        await p.policy.when(lambda: p.policy.done)


@pytest_twisted.ensureDeferred
async def test_a_client_that_leaves_during_a_tls_handshake() -> None:
    upstream = RawUpstream()
    await upstream.listen()
    url = f"https://127.0.0.1:{upstream.number}"
    async with proxying(url=url, upstream=upstream) as p:
        client = await p.client(GET)
        up = await upstream.accept()
        await up.when(lambda: up.received)
        client.fin()
        await up.closed()
        await p.policy.when(lambda: p.policy.done == [0])


# -- listeners


async def tls_client(p: Proxy, *sends: bytes) -> Any:
    port = reactor.listenTCP(
        0,
        TLSMemoryBIOFactory(server_context("127.0.0.1"), False, p.site),
        interface="127.0.0.1",
    )
    p.more_ports.append(port)
    options = ssl.optionsForClientTLS("127.0.0.1", trustRoot=trusting("127.0.0.1"))
    endpoint = wrapClientTLS(options, TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port))
    factory = Factory.forProtocol(End)
    factory.noisy = False
    client: Any = await endpoint.connect(factory)
    p.clients.append(client)
    client.send(*sends)
    return client


@pytest_twisted.ensureDeferred
async def test_a_tls_client_is_served_and_held_back() -> None:
    async with proxying() as p:
        size = 32 * MIB
        client = await tls_client(p, GET)
        up = await p.upstream.request()
        client.stop_reading()
        up.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, bytes(size))
        channel = next(iter(p.site.channels))
        while not channel._choked:
            await turn()
        await turn(100)
        assert up.choked
        client.go_on_reading()
        await client.when(lambda: len(client.received) > size)
        client.take()
        up.take()
        client.send(b"GET /hello HTTP/1.1\r\nHost: h\r\n\r\n", GET)
        await up.until(b"GET")
        up.send(OK)
        await client.until(b"\r\n\r\nok")
        assert b"hello" in client.received


@pytest_twisted.ensureDeferred
async def test_a_tls_client_that_vanishes_at_the_lock() -> None:
    async with proxying() as p:
        p.policy.enter = "later"
        size = 16 * MIB
        client = await tls_client(
            p, b"POST /gated HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size, bytes(size)
        )
        await p.policy.waiting()
        channel = next(iter(p.site.channels))
        while not channel._pauses:
            await turn()
        await turn(50)
        client.transport.abortConnection()
        await turn(3)
        assert p.policy.gate.ending is None
        p.clock.advance(1.0)
        await p.policy.when(lambda: p.policy.gate.ending)


@pytest_twisted.ensureDeferred
async def test_a_tls_client_gets_an_early_answer() -> None:
    async with proxying() as p:
        client = await tls_client(
            p, b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999\r\n\r\n", bytes(64 * KIB)
        )
        up = await p.upstream.request()
        up.send(b"HTTP/1.1 413 No\r\nContent-Length: 3\r\n\r\nbig")
        for _ in range(10):
            client.send(bytes(64 * KIB))
            await turn()
        await client.until(b"big")
        p.clock.advance(2.0)
        await client.closed()


@pytest_twisted.ensureDeferred
async def test_a_client_on_a_unix_socket() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "s")
        async with proxying() as p:
            p.more_ports.append(await UNIXServerEndpoint(reactor, path).listen(p.site))
            factory = Factory.forProtocol(UnixEnd)
            factory.noisy = False
            client: Any = await UNIXClientEndpoint(reactor, path).connect(factory)
            p.clients.append(client)
            client.send(GET)
            up = await p.upstream.request()
            assert b"X-Forwarded-For" not in up.received
            up.send(OK)
            await client.until(b"ok")
            client.send(b"POST /gated HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nabc")
            await up.until(b"abc")
            client.fin()
            await up.closed()


class UnixEnd(End):
    def connectionMade(self) -> None:
        self.transport.registerProducer(self, True)
