"""When a request is tried again, when it waits, and when it is never sent twice."""

from __future__ import annotations

import socket

import pytest
import pytest_twisted
from proxy_kit import OK, Proxy, proxying, turn

from turnstile.proxy import upstream as upstream_module
from turnstile.proxy.gate import Ending
from turnstile.proxy.retry import RetryPolicy

GET = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"
GATED = b"POST /gated HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy"


def test_the_delay_doubles_and_is_bounded_and_spread() -> None:
    policy = RetryPolicy(initial=1.0, maximum=10.0)
    assert [policy.delay(n, 1.0) for n in (1, 2, 3, 4, 5, 6)] == [1, 2, 4, 8, 10, 10]
    assert [policy.delay(n, 0.0) for n in (1, 2, 5)] == [0.5, 1, 5]
    assert policy.delay(100_000, 1.0) == 10


async def failures(p: Proxy, count: int) -> None:
    await p.policy.when(lambda: len(p.policy.retries) == count, f"{count} failures")
    await turn(2)
    assert len(p.policy.retries) == count


@pytest_twisted.ensureDeferred
async def test_an_upstream_that_is_down_is_waited_for() -> None:
    async with proxying(listen=False) as p:
        client = await p.client(GATED)
        await failures(p, 1)
        # Jitter: three quarters of 1, 2, 4 seconds with this chance.
        for count, wait in ((2, 0.75), (3, 1.5), (4, 3.0)):
            p.clock.advance(wait - 0.01)
            await turn(5)
            assert len(p.policy.retries) == count - 1
            p.clock.advance(0.02)
            await failures(p, count)
        assert p.policy.gate.calls == ["enter", "leave"] * 4
        await p.upstream.listen(p.upstream.number)
        p.clock.advance(6.1)
        up = await p.upstream.request(b"abc")
        up.send(OK)
        await client.until(b"ok")
        await p.policy.ended(Ending.DONE, True)
        assert p.policy.gate.calls[8:-1] == ["enter", "room", "forwarding", ("answered", 200)]
        assert p.policy.retries == ["connect"] * 4 and len(p.policy.gates) == 1


@pytest_twisted.ensureDeferred
async def test_the_lease_is_given_back_before_the_wait_and_asked_for_again() -> None:
    async with proxying(listen=False) as p:
        client = await p.client(GATED)
        await failures(p, 1)
        assert p.policy.gate.calls == ["enter", "leave"]
        p.policy.enter = "later"
        p.clock.advance(1)
        await p.policy.waiting()
        client.fin()
        await p.policy.ended(Ending.NOT_SENT, False)
        assert p.policy.gate.cancelled == 1


@pytest_twisted.ensureDeferred
async def test_a_name_that_does_not_resolve_is_tried_again() -> None:
    async with proxying(url="http://no-such-host.invalid:1") as p:
        client = await p.client(GET)
        await failures(p, 1)
        p.clock.advance(1)
        await failures(p, 2)
        client.fin()
        await p.policy.when(lambda: p.policy.done)


# -- pooled connections


async def pooled(p: Proxy) -> tuple[object, object]:
    """A client, and a connection in the pool."""
    client = await p.client(GET)
    up = await p.upstream.request()
    up.send(OK)
    await client.until(b"ok")
    client.take()
    up.take()
    return client, up


@pytest_twisted.ensureDeferred
async def test_connections_are_kept() -> None:
    async with proxying() as p:
        client, up = await pooled(p)
        for request in (POST, GET, POST):
            client.send(request)
            await up.until(request[-4:])
            up.take()
            up.send(OK)
            await client.until(b"ok")
            client.take()
        assert len(p.upstream.ends) == 1


@pytest_twisted.ensureDeferred
async def test_a_request_that_must_not_be_repeated_takes_a_fresh_connection_after_a_while() -> None:
    async with proxying() as p:
        client, up = await pooled(p)
        p.clock.advance(upstream_module.MAX_IDLE_UNSAFE + 0.1)
        client.send(POST)
        second = await p.upstream.request(b"abc")
        second.send(OK)
        await client.until(b"ok")
        client.take()
        # The latest used one serves first.
        client.send(GET)
        await second.until(b"GET")
        second.send(OK)
        await client.until(b"ok")
        assert not up.received


@pytest_twisted.ensureDeferred
async def test_idle_connections_are_closed() -> None:
    async with proxying() as p:
        _, up = await pooled(p)
        p.clock.advance(upstream_module.MAX_IDLE + 0.1)
        await up.closed()
        assert up.clean and not p.pool._idle


@pytest.mark.parametrize("request_", [GET, POST])
@pytest_twisted.ensureDeferred
async def test_a_connection_that_was_closed_is_not_used(request_: bytes) -> None:
    async with proxying() as p:
        client, up = await pooled(p)
        # Closed, but the reactor has not been round to see it.
        up.transport.getHandle().shutdown(socket.SHUT_WR)
        client.send(request_)
        second = await p.upstream.request(request_[-4:])
        second.send(OK)
        await client.until(b"ok")
        assert not up.received


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest_twisted.ensureDeferred
async def test_a_stale_connection_costs_a_safe_request_nothing(how: str) -> None:
    async with proxying() as p:
        client, up = await pooled(p)
        client.send(GET)
        await up.until(b"GET")
        up.fin() if how == "fin" else up.rst()
        second = await p.upstream.request()
        second.send(OK)
        await client.until(b"ok")
        assert len(p.upstream.ends) == 2 and p.policy.retries == []


@pytest_twisted.ensureDeferred
async def test_only_once() -> None:
    async with proxying() as p:
        client, up = await pooled(p)
        client.send(GET)
        await up.until(b"GET")
        up.fin()
        second = await p.upstream.request()
        second.fin()
        await client.until(b"}")
        assert client.received.startswith(b"HTTP/1.1 502 ")
        assert len(p.upstream.ends) == 2


@pytest.mark.parametrize(
    "request_",
    [POST, b"DELETE /x HTTP/1.1\r\nHost: h\r\n\r\n", GET[:-2] + b"Content-Length: 1\r\n\r\na"],
)
@pytest_twisted.ensureDeferred
async def test_nothing_else_is_sent_twice(request_: bytes) -> None:
    async with proxying() as p:
        client, up = await pooled(p)
        client.send(request_)
        await up.until(request_[-4:])
        up.rst()
        await client.until(b"}")
        assert client.received.startswith(b"HTTP/1.1 502 ")
        assert len(p.upstream.ends) == 1


@pytest_twisted.ensureDeferred
async def test_a_safe_request_is_not_repeated_once_its_answer_has_begun() -> None:
    async with proxying() as p:
        client, up = await pooled(p)
        client.send(GET)
        await up.until(b"GET")
        up.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab")
        await client.until(b"ab")
        up.rst()
        await client.closed()
        assert len(p.upstream.ends) == 1


@pytest.mark.parametrize("how", ["fin", "rst", "speaks"])
@pytest_twisted.ensureDeferred
async def test_a_connection_that_dies_while_room_is_made_is_replaced(how: str) -> None:
    async with proxying() as p:
        p.policy.room = "later"
        client = await p.client(GATED)
        await p.policy.clearing()
        up = await p.upstream.accept()
        if how == "speaks":
            up.send(OK)
        else:
            up.fin() if how == "fin" else up.rst()
        await up.closed()
        await turn(3)
        first, p.policy.gate.clearing = p.policy.gate.clearing, None
        first.callback(None)
        await p.policy.clearing()
        assert not up.received and p.policy.gate.calls == ["enter", "room", "room"]
        p.policy.gate.clearing.callback(None)
        second = await p.upstream.request(b"abc")
        second.send(OK)
        await client.until(b"ok")
        assert p.upstream.everything.count(b"abc") == 1


# -- statuses


@pytest.mark.parametrize("status", [502, 503, 504])
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest_twisted.ensureDeferred
async def test_gateway_errors_are_retried_so_often(method: bytes, status: int) -> None:
    async with proxying(status_limit=2) as p:
        client = await p.client(method + b" /gated HTTP/1.1\r\nHost: h\r\n\r\n")
        for number in range(3):
            up = await p.upstream.request()
            up.send(b"HTTP/1.1 %d No\r\nContent-Length: 4\r\n\r\n" % status)
            if method == b"GET":
                up.send(b"busy")
            if number < 2:
                await up.closed()
                await p.policy.when(lambda: len(p.policy.retries) == number + 1)  # noqa: B023
                assert not client.received and p.policy.gate.calls[-1] == "leave"
                p.clock.advance(0.75 * 2**number)
        await client.until(b"\r\n\r\n")
        assert client.received.startswith(b"HTTP/1.1 %d No\r\n" % status)
        await p.policy.ended(Ending.DONE, True)
        assert p.policy.retries == ["status"] * 2


@pytest.mark.parametrize(
    ("request_", "status"), [(GET, 500), (GET, 501), (GET, 429), (POST, 503), (POST, 502)]
)
@pytest_twisted.ensureDeferred
async def test_other_errors_pass(request_: bytes, status: int) -> None:
    async with proxying() as p:
        client = await p.client(request_)
        up = await p.upstream.request(request_[-4:])
        up.send(b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % status)
        await client.until(b"\r\n\r\n")
        assert client.received.startswith(b"HTTP/1.1 %d No" % status)
        assert p.policy.retries == []


@pytest_twisted.ensureDeferred
async def test_a_retried_status_may_turn_into_an_answer() -> None:
    async with proxying() as p:
        client = await p.client(GET)
        (await p.upstream.request()).send(UNAVAILABLE)
        await failures(p, 1)
        p.clock.advance(1)
        (await p.upstream.request()).send(OK)
        await client.until(b"ok")
        assert b"busy" not in client.received
