"""Answers that come early, late, broken or cut: the client is shown what happened."""

from __future__ import annotations

import json

import pytest
import pytest_twisted
from proxy_kit import OK, End, OpenEnd, proxying, turn

from turnstile.proxy import channel as channel_module
from turnstile.proxy.gate import Busy, Ending

GET = b"GET /gated HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /gated HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
KIB = 1024


def end(up: End, how: str) -> None:
    up.fin() if how == "fin" else up.rst()


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"]
)
@pytest_twisted.ensureDeferred
async def test_E03_an_upstream_that_dies_before_its_answer(said: bytes, how: str) -> None:
    async with proxying() as p:
        client = await p.client(POST + b"abc")
        up = await p.upstream.request(b"abc")
        if said:
            up.send(said)
            await turn(3)
        end(up, how)
        await client.until(b"}")
        head, _, body = bytes(client.received).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
        assert b"closed the connection" in body and isinstance(json.loads(body)["error"], str)
        await p.policy.ended(Ending.UPSTREAM_LOST, True)
        # Nothing was sent twice, and the client's connection serves on.
        client.take()
        client.send(b"GET /hello HTTP/1.1\r\nHost: h\r\n\r\n")
        await client.until(b"hello")
        assert len(p.upstream.ends) == 1


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n",
        CHUNKED + b"3\r\nabc\r\n",
        CHUNKED + b"9\r\nabc",
        CHUNKED + b"3\r\nabc\r\n0\r\n",
        CHUNKED + b"3\r\nabc\r\n0\r\nX: y\r\n",
    ],
)
@pytest_twisted.ensureDeferred
async def test_E03_a_framed_answer_that_is_cut(said: bytes, how: str) -> None:
    async with proxying() as p:
        client = await p.client(GET)
        up = await p.upstream.request()
        up.send(said)
        await client.until(said.partition(b"\r\n\r\n")[2][:8] or b"\r\n\r\n")
        end(up, how)
        await client.closed()
        body = client.received.partition(b"\r\n\r\n")[2]
        assert len(body) < 9 if b"Length" in said else not body.endswith(b"\r\n\r\n")
        await p.policy.ended(Ending.UPSTREAM_LOST, True)


@pytest_twisted.ensureDeferred
async def test_E03_a_close_delimited_answer_that_is_cut() -> None:
    async with proxying() as p:
        client = await p.client(GET)
        up = await p.upstream.request()
        up.send(b"HTTP/1.1 200 OK\r\n\r\nabc")
        await client.until(b"abc")
        up.rst()
        await client.closed()
        assert not client.clean
        await p.policy.ended(Ending.UPSTREAM_LOST, True)


@pytest_twisted.ensureDeferred
async def test_E03_a_dechunked_answer_that_is_cut() -> None:
    async with proxying() as p:
        client = await p.client(b"GET /gated HTTP/1.0\r\n\r\n")
        up = await p.upstream.request()
        up.send(CHUNKED + b"3\r\nabc\r\n")
        await client.until(b"abc")
        up.fin()
        await client.closed()
        assert not client.clean
        await p.policy.ended(Ending.UPSTREAM_LOST, True)


@pytest.mark.parametrize(
    ("said", "begun"),
    [
        (b"garbage\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", False),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000, False),
        (CHUNKED + b"zz\r\n", True),
        (CHUNKED + b"3\r\nabcd\r\n", True),
    ],
)
@pytest_twisted.ensureDeferred
async def test_E03_an_answer_that_is_none(said: bytes, begun: bool) -> None:
    async with proxying() as p:
        client = await p.client(GET)
        up = await p.upstream.request()
        up.send(said)
        if begun:
            await client.closed()
            assert not client.received.endswith(b"0\r\n\r\n")
        else:
            await client.until(b"}")
            assert client.received.startswith(b"HTTP/1.1 502 ")
        await up.closed()
        await p.policy.ended(Ending.UPSTREAM_LOST, True)
        assert len(p.upstream.ends) == 1


@pytest_twisted.ensureDeferred
async def test_more_than_the_answer_ends_the_connection() -> None:
    async with proxying() as p:
        for extra in (b"X", OK):
            client = await p.client(GET)
            up = await p.upstream.request()
            up.send(OK + extra)
            await client.until(b"ok")
            await up.closed()
            await turn(3)
            assert bytes(client.received) == OK


@pytest_twisted.ensureDeferred
async def test_what_an_idle_connection_says_is_nobodys_answer() -> None:
    async with proxying() as p:
        client = await p.client(GET)
        up = await p.upstream.request()
        up.send(OK)
        await client.until(b"ok")
        up.send(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        await up.closed()
        client.take()
        client.send(GET)
        (await p.upstream.request()).send(OK)
        await client.until(b"ok")
        assert b"408" not in client.received


# -- early answers


@pytest_twisted.ensureDeferred
async def test_an_early_answer_reaches_a_client_that_still_sends() -> None:
    early = b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig"
    async with proxying() as p:
        head = b"POST /gated HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999\r\n\r\n"
        client = await p.client(head, bytes(100 * KIB), kind=OpenEnd)
        up = await p.upstream.request()
        up.send(early)
        await client.until(b"big")
        assert b"\r\nConnection: close\r\n" in client.received
        # The upstream's connection has the rest of an upload before it: nobody else gets it.
        await up.closed()
        await p.policy.ended(Ending.DONE, False)
        # What comes is read for a moment, and then the connection ends.
        for _ in range(20):
            client.send(bytes(100 * KIB))
            await turn()
        assert client.ended and client.lost is None
        p.clock.advance(channel_module.LINGER)
        await turn(3)
        assert not p.site.channels
        assert len(p.upstream.ends) == 1


@pytest_twisted.ensureDeferred
async def test_an_early_answer_may_overtake_an_upload_that_still_completes() -> None:
    async with proxying() as p:
        client = await p.client(POST + b"a")
        up = await p.upstream.request(b"\r\n\r\na")
        up.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no")
        await client.until(b"\r\n\r\no")
        client.send(b"bc")
        await up.until(b"abc")
        up.send(b"k")
        await client.closed()
        assert client.clean and client.received.endswith(b"\r\n\r\nok")
        # Both messages are whole: the connection is as good as new.
        await p.policy.ended(Ending.DONE, True)
        client = await p.client(b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n")
        await up.until(b"GET /x")
        up.send(OK)
        await client.until(b"ok")


@pytest_twisted.ensureDeferred
async def test_a_connection_with_an_unsent_upload_is_not_pooled() -> None:
    size = 24 * KIB * KIB
    async with proxying() as p:
        client = await p.client(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size)
        up = await p.upstream.request()
        up.stop_reading()
        sent = 0
        while sent < size:
            if client.choked:
                break
            client.send(bytes(64 * KIB))
            sent += 64 * KIB
            await turn(5)
        up.send(OK)
        await client.until(b"ok")
        await turn()
        assert not p.pool._idle
        up.go_on_reading()
        await up.closed()


# -- interim: 100-continue


def expecting(target: bytes, length: int = 3) -> bytes:
    return (
        b"POST " + target + b" HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n"
        b"Content-Length: %d\r\n\r\n" % length
    )


@pytest_twisted.ensureDeferred
async def test_100_continue_comes_with_the_connection() -> None:
    async with proxying() as p:
        client = await p.client(expecting(b"/x"))
        up = await p.upstream.request()
        assert b"xpect" not in up.received
        await client.until(b"HTTP/1.1 100 Continue\r\n\r\n")
        client.send(b"abc")
        await up.until(b"abc")
        up.send(b"HTTP/1.1 100 Continue\r\n\r\n" + OK)
        await client.until(b"ok")
        assert client.received.count(b"100 Continue") == 1


@pytest_twisted.ensureDeferred
async def test_100_continue_waits_for_the_grant() -> None:
    async with proxying() as p:
        p.policy.enter = p.policy.room = "later"
        client = await p.client(expecting(b"/gated"))
        await p.policy.waiting()
        # However long that takes, the client does not stall: it was told to wait.
        for _ in range(10):
            p.clock.advance(60)
        await turn(3)
        assert not client.received and p.upstream.ends == []
        p.policy.gate.entering.callback(None)
        await p.policy.clearing()
        await turn(3)
        assert not client.received
        p.policy.gate.clearing.callback(None)
        await client.until(b"HTTP/1.1 100 Continue\r\n\r\n")
        # Now it may stall.
        p.clock.advance(50)
        client.send(b"abc")
        up = p.upstream.ends[0]
        await up.until(b"abc")
        up.send(OK)
        await client.until(b"ok")


@pytest_twisted.ensureDeferred
async def test_a_body_that_comes_unasked_is_not_asked_for() -> None:
    async with proxying() as p:
        client = await p.client(expecting(b"/x") + b"a")
        up = await p.upstream.request(b"\r\n\r\na")
        client.send(b"bc")
        await up.until(b"abc")
        up.send(OK)
        await client.until(b"ok")
        assert b"100" not in client.received


@pytest_twisted.ensureDeferred
async def test_a_refusal_comes_instead_of_100_continue() -> None:
    async with proxying() as p:
        p.policy.enter = Busy("no", 503, 9)
        client = await p.client(expecting(b"/gated", 10_000_000))
        await client.until(b"}")
        assert client.received.startswith(b"HTTP/1.1 503 ") and b"100 " not in client.received
        assert b"\r\nRetry-After: 9\r\n" in client.received
        client.fin()
        await turn(3)


@pytest_twisted.ensureDeferred
async def test_a_bug_in_a_gate_is_an_answer() -> None:
    async with proxying() as p:
        p.failures = 1
        p.policy.enter = "later"
        client = await p.client(GET)
        await p.policy.waiting()
        p.policy.gate.entering.errback(ValueError("bug"))
        await client.until(b"}")
        assert client.received.startswith(b"HTTP/1.1 500 ")
        await p.policy.ended(Ending.NOT_SENT, False)
