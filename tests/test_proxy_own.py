"""turnstile's own answers, what it looks into, what it has no patience for, and how it stops."""

from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_twisted
from proxy_kit import OK, OpenEnd, proxying, turn
from twisted.web.resource import Resource

from turnstile.proxy import channel as channel_module
from turnstile.proxy import exchange as exchange_module
from turnstile.proxy.gate import Busy, Ending

GET = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"
GATED = b"GET /gated HTTP/1.1\r\nHost: h\r\n\r\n"
IDLE = channel_module.IDLE_TIMEOUT


def parts(client: Any) -> tuple[bytes, Any]:
    head, _, body = client.take().partition(b"\r\n\r\n")
    assert b"\r\nContent-Length: %d" % len(body) in head
    return head, json.loads(body)


# -- errors


@pytest.mark.parametrize("asynchronously", [False, True])
@pytest.mark.parametrize("path", [b"/gated", b"/api/gated", b"/v1/gated"])
@pytest_twisted.ensureDeferred
async def test_a_busy_card(path: bytes, asynchronously: bool) -> None:
    busy = Busy("the GPU is busy", 503, 9)
    async with proxying() as p:
        p.policy.enter = "later" if asynchronously else busy
        client = await p.client(b"GET " + path + b" HTTP/1.1\r\nHost: h\r\n\r\n")
        if asynchronously:
            await p.policy.waiting()
            p.policy.gate.entering.errback(busy)
        await client.until(b"}")
        head, body = parts(client)
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"\r\nRetry-After: 9\r\n" in head + b"\r\n"
        assert b"\r\nContent-Type: application/json\r\n" in head
        if path.startswith(b"/v1"):
            assert body["error"] == {
                "message": "the GPU is busy",
                "type": "service_unavailable",
                "param": None,
                "code": None,
            }
        else:
            assert body == {"error": "the GPU is busy"}
        await p.policy.ended(Ending.NOT_SENT, False)
        # The connection serves on.
        client.send(b"GET /hello HTTP/1.1\r\nHost: h\r\n\r\n")
        await client.until(b"hello")
        assert p.policy.done == [503] and p.upstream.ends == []


@pytest_twisted.ensureDeferred
async def test_an_error_for_head_has_no_body() -> None:
    async with proxying() as p:
        p.policy.enter = Busy("no", 429, 3)
        client = await p.client(b"HEAD /v1/gated HTTP/1.1\r\nHost: h\r\n\r\n")
        await client.until(b"\r\n\r\n")
        client.send(b"GET /hello HTTP/1.1\r\nHost: h\r\n\r\n")
        await client.until(b"hello")
        head, _, rest = bytes(client.received).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ") and rest.startswith(b"HTTP/1.1 200 ")


@pytest_twisted.ensureDeferred
async def test_thousands_of_refusals_in_one_go() -> None:
    async with proxying() as p:
        p.policy.enter = Busy("no", 503, 3)
        client = await p.client(GATED * 3000)
        await client.when(lambda: client.received.count(b"HTTP/1.1 503 ") == 3000)
        assert len(p.policy.gates) == 3000


class Broken(Resource):
    def render(self, request: Any) -> bytes:
        raise ValueError("bug")


@pytest_twisted.ensureDeferred
async def test_own_pages() -> None:
    async with proxying() as p:
        p.site.pages[b"/broken"] = Broken()  # type: ignore[index]
        for method in (b"POST", b"DELETE", b"OPTIONS"):
            client = await p.client(method + b" /hello HTTP/1.1\r\nHost: h\r\n\r\n")
            await client.until(b"}")
            head, _ = parts(client)
            assert head.startswith(b"HTTP/1.1 405 ") and b"\r\nAllow: GET, HEAD" in head
        client.send(b"HEAD /hello?x HTTP/1.1\r\nHost: h\r\n\r\n")
        await client.until(b"\r\n\r\n")
        head = client.take()
        assert b"\r\nContent-Length: 5" in head and head.endswith(b"\r\n\r\n")
        client.send(b"GET /hello HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        await client.until(b"hello")
        assert b"\r\nConnection: keep-alive\r\n" in client.take()
        # A path that only looks like it is the engine's.
        client.send(b"GET //hello HTTP/1.1\r\nHost: h\r\n\r\n")
        (await p.upstream.request()).send(OK)
        await client.until(b"ok")
        p.failures = 1
        client.take()
        client.send(b"GET /broken HTTP/1.1\r\nHost: h\r\n\r\n")
        await client.until(b"}")
        assert parts(client)[0].startswith(b"HTTP/1.1 500 ")
        client.send(b"GET /hello HTTP/1.0\r\n\r\n")
        await client.closed()


@pytest_twisted.ensureDeferred
async def test_oversized_heads() -> None:
    async with proxying() as p:
        for data in (GET[:-2] + b"X: " + b"a" * 70_000, GET[:-2] + b"a: b\r\n" * 300 + b"\r\n"):
            client = await p.client(data)
            await client.until(b"}")
            assert client.received.startswith(b"HTTP/1.1 431 ")
        assert p.upstream.ends == []


# -- looking into a body


def peek(body: bytes, *fields: bytes, pieces: int = 1) -> list[bytes]:
    head = b"POST /peek HTTP/1.1\r\nHost: h\r\n" + b"".join(f + b"\r\n" for f in fields)
    framed = [head + b"Content-Length: %d\r\n\r\n" % len(body)]
    step = -(-len(body) // pieces)
    return framed + [body[i : i + step] for i in range(0, len(body), step)]


@pytest.mark.parametrize("pieces", [1, 2, 6])
@pytest.mark.parametrize("unloads", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
@pytest_twisted.ensureDeferred
async def test_a_body_that_unloads_needs_no_lease(
    pieces: int, unloads: bool, chunked: bool
) -> None:
    body = b"unload" if unloads else b"chat.."
    async with proxying() as p:
        p.policy.room = "later"
        sent = peek(body, pieces=pieces)
        if chunked:
            sent = [b"POST /peek HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"]
            sent += [b"%x\r\n%s\r\n" % (len(one), one) for one in peek(body, pieces=pieces)[1:]]
            sent += [b"0\r\n\r\n"]
        client = await p.client()
        for piece in sent:
            client.send(piece)
            await turn(3)
        if not unloads:
            await p.policy.clearing()
            p.policy.gate.clearing.callback(None)
        up = await p.upstream.request(sent[-1])
        assert up.received.partition(b"\r\n\r\n")[2] == b"".join(sent[1:])
        up.send(OK)
        await client.until(b"ok")
        assert p.policy.asked == [body] and len(p.policy.gates) == (0 if unloads else 1)


@pytest.mark.parametrize(
    "start",
    [
        b"Content-Length: 4097\r\n\r\n",
        b"\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n" + b"1f4\r\n" + b"a" * 500 + b"\r\n" * 1,
    ],
)
@pytest_twisted.ensureDeferred
async def test_a_body_that_is_too_big_to_be_looked_into(start: bytes) -> None:
    async with proxying() as p:
        client = await p.client(b"POST /peek HTTP/1.1\r\nHost: h\r\n" + start)
        if b"chunked" in start:
            await turn(3)
            assert not p.policy.gates
            client.send(b"1388\r\n" + b"a" * 4000)
        await p.policy.when(lambda: p.policy.gates)
        assert p.policy.asked == []
        await p.upstream.request()
        client.fin()
        await p.policy.when(lambda: p.policy.done)


@pytest_twisted.ensureDeferred
async def test_a_body_that_is_too_slow_to_be_looked_into() -> None:
    async with proxying() as p:
        client = await p.client(
            b"POST /peek HTTP/1.1\r\nHost: h\r\nContent-Length: 6\r\nExpect: 100-continue\r\n\r\n"
        )
        # Such a body is asked for at once.
        await client.until(b"HTTP/1.1 100 Continue\r\n\r\n")
        client.send(b"unl")
        await turn(3)
        p.clock.advance(exchange_module.PEEK_TIMEOUT - 0.1)
        assert not p.policy.gates
        p.clock.advance(0.2)
        await p.policy.when(lambda: p.policy.gates)
        client.send(b"oad")
        up = await p.upstream.request(b"unload")
        up.send(OK)
        await client.until(b"ok")
        assert p.policy.asked == [] and client.received.count(b"100 Continue") == 1


@pytest_twisted.ensureDeferred
async def test_a_client_that_leaves_while_it_is_looked_into() -> None:
    async with proxying() as p:
        client = await p.client(*peek(b"unload")[:1], b"unl")
        await turn(3)
        client.fin()
        await p.policy.when(lambda: p.policy.done == [0])
        assert not p.policy.gates and p.upstream.ends == []


@pytest_twisted.ensureDeferred
async def test_a_refusal_while_the_body_is_looked_into() -> None:
    async with proxying() as p:
        p.policy.enter = Busy("no", 503, 1)
        client = await p.client(
            b"POST /peek HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1388\r\n",
            b"a" * 4500,
        )
        await client.until(b"}")
        assert b"\r\nConnection: close\r\n" in client.received


# -- patience


@pytest_twisted.ensureDeferred
async def test_a_head_that_takes_too_long() -> None:
    async with proxying() as p:
        client = await p.client(GET[:20])
        await turn(5)
        p.clock.advance(IDLE - 1)
        client.send(GET[20:22])
        await turn(3)
        p.clock.advance(2)
        await client.until(b"}")
        assert client.received.startswith(b"HTTP/1.1 408 ")
        assert b"\r\nConnection: close\r\n" in client.received


@pytest_twisted.ensureDeferred
async def test_an_idle_connection_is_closed_without_a_word() -> None:
    async with proxying() as p:
        client = await p.client(GET)
        (await p.upstream.request()).send(OK)
        await client.until(b"ok")
        client.take()
        p.clock.advance(IDLE - 5)
        client.send(b"GET /hello HTTP/1.1\r\nHost: h\r\n\r\n")
        await client.until(b"hello")
        client.take()
        p.clock.advance(IDLE - 5)
        await turn(3)
        assert client.lost is None
        # A head that begins late has its own time.
        client.send(GET[:10])
        await turn(3)
        p.clock.advance(6)
        await turn(3)
        assert client.lost is None
        client.send(GET[10:])
        (await p.upstream.request()).send(OK)
        await client.until(b"ok")
        client.take()
        p.clock.advance(IDLE + 1)
        await client.closed()
        assert client.clean and not client.received


@pytest_twisted.ensureDeferred
async def test_a_body_that_stalls_gives_the_card_back() -> None:
    async with proxying() as p:
        client = await p.client(b"POST /gated HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nabc")
        up = await p.upstream.request(b"abc")
        p.clock.advance(IDLE + 1)
        await client.until(b"}")
        assert client.received.startswith(b"HTTP/1.1 408 ")
        await up.closed()
        await p.policy.ended(Ending.UPSTREAM_LOST, False)


@pytest_twisted.ensureDeferred
async def test_a_body_may_pause_while_its_answer_is_under_way() -> None:
    async with proxying() as p:
        client = await p.client(b"POST /gated HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nabc")
        up = await p.upstream.request(b"abc")
        up.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
        await client.until(b"\r\n\r\n")
        p.clock.advance(IDLE * 2 + 1)
        client.send(b"d")
        await up.until(b"abcd")
        up.send(b"ok")
        await client.until(b"ok")


@pytest_twisted.ensureDeferred
async def test_a_silent_answer_has_all_the_time() -> None:
    async with proxying() as p:
        client = await p.client(GATED)
        up = await p.upstream.request()
        for _ in range(20):
            p.clock.advance(60)
        await turn(3)
        assert client.lost is None and up.lost is None
        up.send(OK)
        await client.until(b"ok")


@pytest.mark.parametrize("contended", [True, False])
@pytest_twisted.ensureDeferred
async def test_a_client_that_reads_nothing_loses_the_card_if_others_wait(contended: bool) -> None:
    async with proxying() as p:
        p.policy.contended = contended
        client = await p.client(GATED)
        up = await p.upstream.request()
        channel = next(iter(p.site.channels))
        client.transport.pauseProducing()
        up.send(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n")
        while not channel._choked:
            up.send(bytes(1_000_000))
            await turn()
        p.clock.advance(IDLE - 1)
        assert channel.transport.connected
        p.clock.advance(2)
        if contended:
            await up.closed()
            await p.policy.ended(Ending.CLIENT_GONE, True)
        else:
            p.clock.advance(IDLE * 20)
            await turn(5)
            assert up.lost is None and p.site.channels == {channel}


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("contended", [True, False])
@pytest_twisted.ensureDeferred
async def test_an_engine_that_is_silent_loses_the_card_if_others_wait(
    contended: bool, begun: bool
) -> None:
    async with proxying() as p:
        p.policy.contended = contended
        client = await p.client(GET)
        (await p.upstream.request()).send(OK)
        await client.until(b"ok")
        client.take()
        p.clock.advance(IDLE - 5)
        client.send(GATED)
        up = await p.upstream.request()
        if begun:
            up.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")
            await client.until(b"abc")
        for _ in range(7):
            p.clock.advance(IDLE)
            await turn(2)
        # A sign of life starts the time again.
        if begun:
            up.send(b"d")
            await client.until(b"abcd")
            for _ in range(7):
                p.clock.advance(IDLE)
                await turn(2)
        assert client.lost is None and up.lost is None
        for _ in range(3):
            p.clock.advance(IDLE)
            await turn(2)
        if not contended:
            assert client.lost is None and up.lost is None
            return
        await up.closed()
        await p.policy.ended(Ending.UPSTREAM_LOST, True)
        if begun:
            await client.closed()
            assert client.take().endswith(b"abcd")
        else:
            await client.until(b"}")
            assert client.received.startswith(b"HTTP/1.1 504 ")


@pytest_twisted.ensureDeferred
async def test_what_follows_a_last_request_is_not_kept() -> None:
    async with proxying() as p:
        client = await p.client(b"\x16\x03\x01 what is this\r\n\r\n", kind=OpenEnd)
        await client.until(b"}")
        assert client.received.startswith(b"HTTP/1.1 400 ")
        channel = next(iter(p.site.channels))
        for _ in range(20):
            client.send(bytes(10_000))
            await turn()
            assert not channel._buffer
        p.clock.advance(channel_module.LINGER)
        await turn(3)
        assert not p.site.channels


# -- the end


@pytest_twisted.ensureDeferred
async def test_shutdown_refuses_what_waits_and_lets_streams_finish() -> None:
    async with proxying() as p:
        streaming = await p.client(GET)
        up = await p.upstream.request()
        up.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab")
        await streaming.until(b"ab")
        unanswered = await p.client(GATED)
        up2 = await p.upstream.request()
        p.policy.enter = "later"
        waiting = await p.client(GATED)
        await p.policy.waiting()
        idle = await p.client()
        await turn(5)
        over: list[Any] = []
        p.site.drain().addCallback(over.append)
        await waiting.until(b"}")
        head, _ = parts(waiting)
        assert head.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: 7\r\n" in head
        assert b"\r\nConnection: close" in head
        await waiting.closed()
        await idle.closed()
        assert not over and streaming.lost is None
        up2.send(OK)
        await unanswered.closed()
        assert b"\r\nConnection: close\r\n" in unanswered.received
        assert unanswered.received.endswith(b"ok")
        streaming.send(GET)
        up.send(b"cd")
        await streaming.closed()
        assert streaming.received.endswith(b"\r\n\r\nabcd")
        await turn(3)
        assert over == [None]
        # Who comes too late is sent away.
        late = await p.client(GET)
        await late.closed()
        assert not late.received


@pytest_twisted.ensureDeferred
async def test_shutdown_refuses_who_backs_off() -> None:
    async with proxying(listen=False) as p:
        client = await p.client(GATED)
        await p.policy.when(lambda: p.policy.retries)
        p.site.drain()
        await client.closed()
        assert client.received.startswith(b"HTTP/1.1 503 ")
        await p.policy.ended(Ending.NOT_SENT, False)


@pytest_twisted.ensureDeferred
async def test_what_takes_too_long_to_shut_down_is_cut() -> None:
    async with proxying() as p:
        client = await p.client(GATED)
        up = await p.upstream.request()
        up.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await client.until(b"abc")
        over: list[Any] = []
        p.site.drain().addCallback(over.append)
        await turn(3)
        assert not over
        p.site.abort()
        await client.closed()
        assert not client.received.endswith(b"0\r\n\r\n")
        await up.closed()
        await p.policy.ended(Ending.UPSTREAM_LOST, True)
        assert over == [None]


@pytest_twisted.ensureDeferred
async def test_shutdown_waits_for_what_is_carried_through() -> None:
    async with proxying() as p:
        p.policy.detached = True
        client = await p.client(b"POST /gated HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\na")
        up = await p.upstream.request(b"a")
        client.fin()
        await p.policy.when(lambda: p.policy.gates)
        while p.site.channels:
            await turn()
        over: list[Any] = []
        p.site.drain().addCallback(over.append)
        await turn(3)
        assert not over
        up.send(OK)
        await p.policy.ended(Ending.DONE, True)
        await turn(3)
        assert over == [None]


@pytest_twisted.ensureDeferred
async def test_shutdown_ends_what_is_carried_through_too_long() -> None:
    async with proxying() as p:
        p.policy.detached = True
        client = await p.client(b"POST /gated HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\na")
        up = await p.upstream.request(b"a")
        client.fin()
        while p.site.channels:
            await turn()
        over: list[Any] = []
        p.site.drain().addCallback(over.append)
        p.site.abort()
        await up.closed()
        await p.policy.ended(Ending.UPSTREAM_LOST, True)
        assert over == [None]
