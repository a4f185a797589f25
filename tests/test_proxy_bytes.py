"""What is sent on, byte for byte: targets, fields, bodies, trailers; how answers end."""

from __future__ import annotations

import pytest
import pytest_twisted
from proxy_fakes import FakePolicy
from proxy_kit import OK, proxying, turn

from turnstile.proxy.gate import Ending

GET = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"


def client_policy() -> FakePolicy:
    policy = FakePolicy()
    policy.keeps_client_host = True
    return policy


@pytest.mark.parametrize(
    "target",
    [
        b"/userdata/workflows%2Fa%20b.json?overwrite=true",
        b"/a%3Fb%25c;d+e//f?g=%2f&h",
        b"//x//?",
        b"/../x/./y",
        b"/?",
        b"/\xc3\xa9",
    ],
)
@pytest_twisted.ensureDeferred
async def test_A02_the_target_is_sent_verbatim(target: bytes) -> None:
    async with proxying() as p:
        client = await p.client(b"GET " + target + b" HTTP/1.1\r\nHost: h\r\n\r\n")
        up = await p.upstream.request()
        assert up.received.startswith(b"GET " + target + b" HTTP/1.1\r\n")
        up.send(OK)
        await client.until(b"ok")


@pytest_twisted.ensureDeferred
async def test_a_base_path_goes_before_the_target() -> None:
    async with proxying(base="/deep%20er") as p:
        client = await p.client(b"GET //x?y HTTP/1.1\r\nHost: h\r\n\r\n")
        up = await p.upstream.request()
        assert up.received.startswith(b"GET /deep%20er//x?y HTTP/1.1\r\n")
        up.send(OK)
        await client.until(b"ok")
        up.take()
        client.send(b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n")
        await up.until(b"OPTIONS * HTTP/1.1\r\n")
        up.send(OK)


@pytest_twisted.ensureDeferred
async def test_fields_of_a_request() -> None:
    async with proxying() as p:
        await p.client(
            b"POST /x HTTP/1.1\r\nB: 2\r\nHost: h:1\r\nCookie: a\r\na: 1\r\nCOOKIE: b\r\nA:  1 \r\n"
            b"Connection: keep-alive, X-Hop\r\nx-hop: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\nUpgrade: h2c\r\n"
            b"Proxy-Connection: x\r\nX-Forwarded-For: 9.9.9.9\r\nOrigin: null\r\nContent-Length: 3\r\n\r\nabc"
        )
        up = await p.upstream.request(b"abc")
        port = p.upstream.number
        assert bytes(up.received) == (
            b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nB: 2\r\nCookie: a\r\na: 1\r\nCOOKIE: b\r\nA: 1\r\n"
            b"Origin: null\r\nX-Forwarded-For: 9.9.9.9, 127.0.0.1\r\nX-Forwarded-Proto: http\r\n"
            b"X-Forwarded-Host: h:1\r\nContent-Length: 3\r\n\r\nabc" % port
        )
        up.send(OK)


@pytest_twisted.ensureDeferred
async def test_C07_the_host_is_the_upstreams_own() -> None:
    async with proxying() as p:
        await p.client(
            b"GET / HTTP/1.1\r\nHost: gpu.example:11434\r\nOrigin: chrome-extension://x\r\n\r\n"
        )
        up = await p.upstream.request()
        assert b"\r\nHost: 127.0.0.1:%d\r\n" % p.upstream.number in up.received
        assert b"\r\nOrigin: chrome-extension://x\r\n" in up.received
        assert b"\r\nX-Forwarded-Host: gpu.example:11434\r\n" in up.received
        up.send(OK)


@pytest.mark.parametrize(
    ("line", "host", "sent"),
    [
        (b"GET / HTTP/1.1", b"Host: box:9188\r\n", b"box:9188"),
        (b"GET http://real/ HTTP/1.1", b"Host: box\r\n", b"real"),
        (b"GET / HTTP/1.0", b"", None),
        (b"GET / HTTP/1.1", b"Host:\r\n", None),
    ],
)
@pytest_twisted.ensureDeferred
async def test_F10_the_host_is_the_clients(line: bytes, host: bytes, sent: bytes | None) -> None:
    async with proxying(policy=client_policy()) as p:
        await p.client(line + b"\r\nOrigin: http://box:9188\r\n" + host + b"\r\n")
        up = await p.upstream.request()
        sent = sent or b"127.0.0.1:%d" % p.upstream.number
        assert up.received.startswith(b"GET / HTTP/1.1\r\nHost: " + sent + b"\r\n")
        assert b"\r\nOrigin: http://box:9188\r\n" in up.received
        assert up.received.count(b"\r\nHost: ") == 1
        up.send(OK)


@pytest_twisted.ensureDeferred
async def test_fields_of_an_answer() -> None:
    async with proxying() as p:
        client = await p.client(GET)
        up = await p.upstream.request()
        up.send(
            b"HTTP/1.1 418 I'm a \xe9 pot\r\nSet-Cookie: a=1\r\nB: 2\r\nset-cookie: b=2\r\nKeep-Alive: 5\r\n"
            b"Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nProxy-Authenticate: Basic\r\nContent-Length: 2\r\n"
            b"Date: x\r\n\r\nhi"
        )
        await client.until(b"hi")
        assert bytes(client.received) == (
            b"HTTP/1.1 418 I'm a \xe9 pot\r\nSet-Cookie: a=1\r\nB: 2\r\nset-cookie: b=2\r\n"
            b"Proxy-Authenticate: Basic\r\nDate: x\r\nContent-Length: 2\r\n\r\nhi"
        )


@pytest_twisted.ensureDeferred
async def test_chunks_and_trailers_pass_as_they_are() -> None:
    wire = b"3;x=y\r\nabc\r\n02\r\nde\r\n0\r\nX-Sum: 1\r\nX-B: 2\r\n\r\n"
    async with proxying() as p:
        client = await p.client(
            b"POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTrailer: x-sum\r\n\r\n",
            wire,
        )
        up = await p.upstream.request(b"X-B: 2\r\n\r\n")
        assert up.received.endswith(b"\r\n\r\n" + wire)
        assert up.received.count(b"Transfer-Encoding: chunked\r\n") == 1
        assert b"\r\nTrailer: x-sum\r\n" in up.received
        up.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: x-sum\r\n\r\n", wire)
        await client.until(b"X-B: 2\r\n\r\n")
        assert bytes(client.received) == (
            b"HTTP/1.1 200 OK\r\nTrailer: x-sum\r\nTransfer-Encoding: chunked\r\n\r\n" + wire
        )


@pytest_twisted.ensureDeferred
async def test_H02_no_second_request_is_smuggled() -> None:
    hidden = b"POST /api/delete HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"
    shapes = [
        b"Content-Length: %d\r\nContent-Length: 0\r\n" % len(hidden),
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n" % len(hidden),
        b"Transfer-Encoding: chunked\t\r\nContent-Length: 4\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 0\nX: y\r\n",
        b"Content-Length : 0\r\n",
    ]
    async with proxying() as p:
        for shape in shapes:
            client = await p.client(b"POST /x HTTP/1.1\r\nHost: h\r\n" + shape + b"\r\n" + hidden)
            await client.until(b"\r\n\r\n")
            assert client.received.startswith(b"HTTP/1.1 400 "), shape
            assert b"Connection: close" in client.received
            client.send(hidden)
            await turn(3)
        assert p.upstream.ends == []


@pytest.mark.parametrize(
    "bad", [b"0x5\r\nabcde\r\n", b"5;a\nb\r\nabcde\r\n", b"5;\x0b\r\nabcde\r\n", b"5\nabcde\r\n"]
)
@pytest_twisted.ensureDeferred
async def test_H01_a_bad_chunk_reaches_nobody(bad: bytes) -> None:
    head = b"POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with proxying() as p:
        # In the first segment: the upstream is not even connected to.
        client = await p.client(head + bad)
        await client.until(b"\r\n\r\n")
        assert client.received.startswith(b"HTTP/1.1 400 ")
        assert p.upstream.ends == []
        # Later: it is cut off, and has seen no bad byte.
        client = await p.client(head + b"3\r\nabc\r\n")
        up = await p.upstream.request(b"abc\r\n")
        client.send(bad)
        await client.until(b"\r\n\r\n")
        assert client.received.startswith(b"HTTP/1.1 400 ")
        await up.closed()
        assert up.received.endswith(b"\r\n\r\n3\r\nabc\r\n")


# -- how answers end


@pytest_twisted.ensureDeferred
async def test_H03_pipelined_requests_are_answered_in_order() -> None:
    async with proxying() as p:
        client = await p.client(
            b"POST /slow HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}",
            b"GET /hello HTTP/1.1\r\nHost: h\r\n\r\nGET /fast HTTP/1.1\r\nHost: h\r\n\r\n",
        )
        up = await p.upstream.request(b"{}")
        await turn(5)
        assert b"/fast" not in p.upstream.everything and not client.received
        up.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nslow")
        await up.until(b"GET /fast ")
        up.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfast")
        await client.until(b"fast")
        received = bytes(client.received)
        assert received.index(b"slow") < received.index(b"hello") < received.index(b"fast")


@pytest_twisted.ensureDeferred
async def test_H03_closing_cancels_both() -> None:
    async with proxying() as p:
        p.policy.enter = "later"
        client = await p.client(
            b"GET /gated HTTP/1.1\r\nHost: h\r\n\r\n" + b"GET /fast HTTP/1.1\r\nHost: h\r\n\r\n"
        )
        await p.policy.waiting()
        client.fin()
        await p.policy.ended(Ending.NOT_SENT, False)
        assert p.policy.gate.cancelled == 1 and p.upstream.ends == []


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        (b"HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n"),
        (b"HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        (b"HEAD", b"HTTP/1.1 200 OK\r\nX: y\r\n\r\n"),
        (b"GET", b"HTTP/1.1 204 No Content\r\n\r\n"),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\nETag: x\r\nContent-Length: 9\r\n\r\n"),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n"),
        (b"GET", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_H05_answers_without_a_body(method: bytes, answer: bytes) -> None:
    async with proxying() as p:
        client = await p.client()
        for number in range(2):
            client.send(method + b" / HTTP/1.1\r\nHost: h\r\n\r\n")
            if number == 0:
                up = await p.upstream.request()
            else:
                await up.until(b"\r\n\r\n")
            up.take()
            up.send(answer)
            await client.until(b"\r\n\r\n")
            head = client.take()
            assert head.startswith(answer.split(b"\r\n")[0]) and head.endswith(b"\r\n\r\n")
            length = b"Content-Length" in answer
            assert (b"Content-Length" in head) == length and b"close" not in head
        assert len(p.upstream.ends) == 1


@pytest_twisted.ensureDeferred
async def test_H05_an_answer_that_ends_with_the_connection() -> None:
    async with proxying() as p:
        client = await p.client(GET)
        up = await p.upstream.request()
        up.send(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        await client.until(b"all of it")
        up.fin()
        await client.closed()
        assert client.clean
        assert bytes(client.received) == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall of it"


@pytest_twisted.ensureDeferred
async def test_interim_answers() -> None:
    async with proxying() as p:
        client = await p.client(GET)
        up = await p.upstream.request()
        up.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
        await client.until(b"\r\n\r\n")
        up.send(OK)
        await client.until(b"ok")
        assert bytes(client.received) == b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK
        # An HTTP/1.0 client knows none of them.
        client = await p.client(b"GET /x HTTP/1.0\r\n\r\n")
        up.take()
        await up.until(b"\r\n\r\n")
        up.send(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK)
        await client.closed()
        assert client.received.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest_twisted.ensureDeferred
async def test_http_1_0_clients() -> None:
    keep = b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    async with proxying() as p:
        client = await p.client(keep)
        up = await p.upstream.request()
        up.take()
        up.send(OK)
        await client.until(b"ok")
        assert b"\r\nConnection: keep-alive\r\n" in client.take()
        client.send(keep)
        await up.until(b"\r\n\r\n")
        up.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await client.until(b"abc")
        up.send(b"2\r\nde\r\n0\r\nX: y\r\n\r\n")
        await client.closed()
        assert bytes(client.received) == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabcde"
        assert client.clean


@pytest_twisted.ensureDeferred
async def test_connection_close_is_obeyed() -> None:
    async with proxying() as p:
        client = await p.client(b"GET /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        up = await p.upstream.request()
        assert b"onnection" not in up.received
        up.send(OK)
        await client.closed()
        assert b"Connection: close\r\n" in client.received and client.received.endswith(b"ok")
        # The upstream's wish concerns the upstream's connection only.
        client = await p.client(GET)
        up.take()
        await up.until(b"\r\n\r\n")
        up.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")
        await client.until(b"ok")
        assert b"close" not in client.take()
        await up.closed()
        client.send(GET)
        (await p.upstream.request()).send(OK)
        await client.until(b"ok")


@pytest_twisted.ensureDeferred
async def test_thousands_of_pipelined_requests() -> None:
    async with proxying() as p:
        count = 3000
        client = await p.client(
            (GET + b"GET /hello HTTP/1.1\r\nHost: h\r\n\r\n" * 9) * (count // 10)
        )
        up = await p.upstream.accept()
        seen = 0
        while seen < count // 10:
            await up.until(b"\r\n\r\n")
            up.take()
            seen += 1
            up.send(OK)
        await client.when(lambda: client.received.count(b"HTTP/1.1 200 OK") == count)
        assert client.received.endswith(b"hello")
