"""A client that goes away is noticed in every phase, and its gate ends once and rightly."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from proxy_kit import OK, End, Proxy, proxying, turn
from twisted.internet.defer import Deferred

from turnstile.proxy.gate import Ending

GET = b"GET /gated HTTP/1.1\r\nHost: h\r\n\r\n"
HOWS = ["fin", "rst", "half_close"]
KIB, MIB = 1 << 10, 1 << 20


def leave(client: End, how: str) -> None:
    getattr(client, how)()


@pytest.mark.parametrize("how", HOWS)
@pytest_twisted.ensureDeferred
async def test_B03_while_waiting_at_the_gate(how: str) -> None:
    async with proxying() as p:
        p.policy.enter = "later"
        client = await p.client(GET)
        await p.policy.waiting()
        leave(client, how)
        await p.policy.ended(Ending.NOT_SENT, False)
        assert p.policy.gate.cancelled == 1
        assert p.policy.gate.calls == ["enter", ("end", Ending.NOT_SENT, False)]
        assert p.upstream.ends == [] and p.policy.done == [0]


@pytest.mark.parametrize("how", HOWS)
@pytest_twisted.ensureDeferred
async def test_while_backing_off(how: str) -> None:
    async with proxying(listen=False) as p:
        client = await p.client(GET)
        await p.policy.when(lambda: p.policy.retries)
        assert p.policy.gate.calls == ["enter", "leave"]
        leave(client, how)
        await p.policy.ended(Ending.NOT_SENT, False)
        p.clock.advance(600)
        await turn(3)
        assert p.policy.retries == ["connect"]
        assert p.policy.gate.calls == ["enter", "leave", ("end", Ending.NOT_SENT, False)]


@pytest.mark.parametrize("how", HOWS)
@pytest_twisted.ensureDeferred
async def test_while_connecting(how: str) -> None:
    async with proxying() as p:
        # A connection that never comes about.
        given_up: list[Any] = []
        p.pool.connect = lambda: Deferred(given_up.append)  # type: ignore[method-assign]
        client = await p.client(GET)
        await p.policy.when(lambda: p.policy.gates)
        leave(client, how)
        await p.policy.ended(Ending.NOT_SENT, False)
        assert len(given_up) == 1 and p.upstream.ends == []


@pytest.mark.parametrize("how", HOWS)
@pytest_twisted.ensureDeferred
async def test_while_room_is_made(how: str) -> None:
    async with proxying() as p:
        p.policy.room = "later"
        client = await p.client(GET)
        await p.policy.clearing()
        up = await p.upstream.accept()
        leave(client, how)
        await p.policy.ended(Ending.NOT_SENT, False)
        await up.closed()
        assert p.policy.gate.cancelled == 1 and not up.received


@pytest.mark.parametrize("how", HOWS)
@pytest_twisted.ensureDeferred
async def test_A07_while_uploading(how: str) -> None:
    async with proxying() as p:
        client = await p.client(b"POST /gated HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nabc")
        up = await p.upstream.request(b"abc")
        leave(client, how)
        await p.policy.ended(Ending.CLIENT_GONE, False)
        await up.closed()
        assert p.policy.done == [0]


@pytest.mark.parametrize("how", HOWS)
@pytest_twisted.ensureDeferred
async def test_A07_A08_while_waiting_for_the_first_byte(how: str) -> None:
    async with proxying() as p:
        client = await p.client(GET)
        up = await p.upstream.request()
        leave(client, how)
        await up.closed()
        await p.policy.ended(Ending.CLIENT_GONE, True)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "said",
    [b"Content-Length: 99\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc", b"\r\nabc"],
)
@pytest_twisted.ensureDeferred
async def test_H04_while_a_stream_is_silent(said: bytes, how: str) -> None:
    async with proxying() as p:
        client = await p.client(GET)
        up = await p.upstream.request()
        up.send(b"HTTP/1.1 200 OK\r\n" + said)
        await client.until(b"abc")
        leave(client, how)
        await up.closed()
        await p.policy.ended(Ending.CLIENT_GONE, True)
        assert p.policy.done == [200]


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest_twisted.ensureDeferred
async def test_while_the_client_reads_slowly(how: str) -> None:
    async with proxying() as p:
        client = await p.client(GET)
        up = await p.upstream.request()
        client.stop_reading()
        up.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 * MIB), bytes(32 * MIB))
        channel = next(iter(p.site.channels))
        while not channel._choked:
            await turn()
        leave(client, how)
        await up.closed()
        await p.policy.ended(Ending.CLIENT_GONE, True)


async def held_at_the_lock(p: Proxy, size: int) -> Any:
    """A client whose body fills every buffer up to the gate."""
    p.policy.enter = "later"
    client = await p.client(
        b"POST /gated HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size, bytes(size)
    )
    await p.policy.waiting()
    channel = next(iter(p.site.channels))
    while not channel._pauses:
        await turn()
    await turn(50)
    assert client.choked or size < 50 * MIB, "all of it was read"
    # What is read ahead is bounded.
    assert channel.exchange._ahead_size < 512 * 1024
    return client


# A FIN behind more than the buffers hold is not sent until there is room for it: it cannot be seen.
@pytest.mark.parametrize(
    ("how", "size"),
    [("rst", 50 * MIB), ("rst", MIB), ("fin", 320 * KIB), ("half_close", 320 * KIB)],
)
@pytest_twisted.ensureDeferred
async def test_a_body_held_at_the_lock(how: str, size: int) -> None:
    async with proxying() as p:
        client = await held_at_the_lock(p, size)
        leave(client, how)
        await turn(3)
        assert p.policy.gate.ending is None
        p.clock.advance(1.0)
        await p.policy.ended(Ending.NOT_SENT, False)
        assert p.policy.gate.cancelled == 1 and p.upstream.ends == []


@pytest_twisted.ensureDeferred
async def test_while_the_upstream_takes_no_more_of_a_body() -> None:
    async with proxying() as p:
        size = 50 * MIB
        client = await p.client(
            b"POST /gated HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size, bytes(size)
        )
        up = await p.upstream.request()
        up.stop_reading()
        channel = next(iter(p.site.channels))
        while not channel._pauses:
            await turn()
        await turn(50)
        assert client.choked
        client.rst()
        await turn(3)
        assert p.policy.gate.ending is None
        p.clock.advance(1.0)
        await p.policy.ended(Ending.CLIENT_GONE, False)
        up.go_on_reading()
        await up.closed()


@pytest_twisted.ensureDeferred
async def test_a_body_held_for_long_is_not_stalled() -> None:
    async with proxying() as p:
        size = 50 * MIB
        client = await held_at_the_lock(p, size)
        for _ in range(12):
            p.clock.advance(60)
            await turn()
        p.policy.gate.entering.callback(None)
        # The timer that ends idle connections comes round before any more of the body.
        p.clock.advance(20)
        up = await p.upstream.accept()
        await up.when(lambda: len(up.received) > size)
        up.send(OK)
        await client.until(b"ok")
        assert b"408" not in client.received


@pytest_twisted.ensureDeferred
async def test_a_client_that_pipelines_too_much_is_watched_too() -> None:
    async with proxying() as p:
        p.policy.enter = "later"
        client = await p.client(GET + GET * 500_000)
        await p.policy.waiting()
        channel = next(iter(p.site.channels))
        while not channel._pauses:
            await turn()
        await turn(50)
        assert len(channel._buffer) < 256 * 1024
        client.rst()
        await turn(3)
        assert p.policy.gate.ending is None
        p.clock.advance(1.0)
        await p.policy.ended(Ending.NOT_SENT, False)


# -- requests that are carried through


POST = b"POST /gated HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\n"


@pytest.mark.parametrize("how", HOWS)
@pytest_twisted.ensureDeferred
async def test_a_detached_request_is_carried_through(how: str) -> None:
    async with proxying() as p:
        p.policy.detached, p.policy.capture = True, 1000
        client = await p.client(POST + b"abc")
        up = await p.upstream.request(b"abc")
        leave(client, how)
        await turn(5)
        assert up.lost is None and p.policy.gate.ending is None
        up.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await turn(3)
        up.send(b"2\r\nde\r\n0\r\n\r\n")
        await p.policy.ended(Ending.DONE, True)
        assert p.policy.gate.calls[-3:-1] == [("answered", 200), ("captured", b"abcde", True)]
        assert len(p.pool._idle) == 1


@pytest_twisted.ensureDeferred
async def test_a_detached_request_is_carried_through_from_any_point() -> None:
    async with proxying() as p:
        p.policy.detached, p.policy.capture = True, 4
        client = await p.client(POST + b"abc")
        up = await p.upstream.request(b"abc")
        size = 32 * MIB
        client.stop_reading()
        up.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, bytes(size))
        channel = next(iter(p.site.channels))
        while not channel._choked:
            await turn()
        # The upstream is held back for a client that leaves now: the rest must be read nevertheless.
        client.rst()
        await p.policy.ended(Ending.DONE, True)
        assert p.policy.gate.calls[-2] == ("captured", bytes(4), False)


@pytest_twisted.ensureDeferred
async def test_a_detached_request_is_not_carried_on_with_half_a_body() -> None:
    async with proxying() as p:
        p.policy.detached = True
        client = await p.client(POST + b"ab")
        up = await p.upstream.request(b"ab")
        client.fin()
        await up.closed()
        await p.policy.ended(Ending.CLIENT_GONE, False)


@pytest_twisted.ensureDeferred
async def test_a_detached_request_whose_upstream_dies() -> None:
    async with proxying() as p:
        p.policy.detached = True
        client = await p.client(POST + b"abc")
        up = await p.upstream.request(b"abc")
        client.fin()
        await turn(5)
        up.rst()
        await p.policy.ended(Ending.UPSTREAM_LOST, True)
        assert p.policy.done == [0]


@pytest_twisted.ensureDeferred
async def test_B02_an_idle_connection_holds_nothing() -> None:
    async with proxying() as p:
        client = await p.client(GET)
        up = await p.upstream.request()
        up.send(OK)
        await client.until(b"ok")
        await p.policy.ended(Ending.DONE, True)
        assert client.lost is None


@pytest.mark.parametrize("how", ["rst", "fin"])
@pytest_twisted.ensureDeferred
async def test_B01_parallel_clients_that_leave(how: str) -> None:
    async with proxying() as p:
        clients = [await p.client(GET) for _ in range(6)]
        ups = [await p.upstream.request() for _ in range(6)]
        for up in ups[:3]:
            up.send(OK)
        for client in clients:
            leave(client, how)
        await p.policy.when(lambda: all(gate.ending for gate in p.policy.gates))
        assert len(p.policy.gates) == 6
