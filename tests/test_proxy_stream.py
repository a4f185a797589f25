"""Bodies pass as they come, in both directions, with little held back."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from proxy_kit import OK, proxying, turn
from twisted.web.resource import Resource

MIB = 1 << 20
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest_twisted.ensureDeferred
async def test_first_byte_out_before_the_last_is_in() -> None:
    async with proxying() as p:
        client = await p.client(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 6\r\n\r\nabc")
        up = await p.upstream.request(b"abc")
        client.send(b"de")
        await up.until(b"abcde")
        client.send(b"f")
        await up.until(b"abcdef")
        up.send(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n")
        await client.until(b"\r\n\r\n")
        up.send(b"12")
        await client.until(b"12")
        up.send(b"3456")
        await client.until(b"123456")


@pytest.mark.parametrize("kind", [b"text/event-stream; charset=utf-8", b"application/x-ndjson"])
@pytest.mark.parametrize(
    "hint", [b"", b"X-Accel-Buffering: no\r\n", b"x-accel-buffering: no\r\n" * 2]
)
@pytest_twisted.ensureDeferred
async def test_A05_events_pass_one_by_one_with_one_hint(kind: bytes, hint: bytes) -> None:
    async with proxying() as p:
        client = await p.client(b"GET /stream HTTP/1.1\r\nHost: h\r\n\r\n")
        up = await p.upstream.request()
        up.send(b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\n" + hint)
        up.send(b"Transfer-Encoding: chunked\r\n\r\n")
        await client.until(b"\r\n\r\n")
        assert client.received.lower().count(b"x-accel-buffering: no") == 1
        for number in range(5):
            # The next one is sent only when this one has arrived.
            up.send(b"8\r\nevent %d\n\r\n" % number)
            await client.until(b"event %d\n\r\n" % number)
        up.send(b"0\r\n\r\n")
        await client.until(b"0\r\n\r\n")


@pytest_twisted.ensureDeferred
async def test_A05_other_answers_get_no_hint() -> None:
    async with proxying() as p:
        client = await p.client(b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n")
        up = await p.upstream.request()
        up.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        await client.until(b"{}")
        assert b"accel" not in client.received.lower()


@pytest.mark.parametrize("chunked", [False, True])
@pytest_twisted.ensureDeferred
async def test_a_download_is_not_buffered(chunked: bool) -> None:
    size = 64 * MIB
    async with proxying() as p:
        client = await p.client(b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n")
        up = await p.upstream.request()
        client.stop_reading()
        up.send(CHUNKED if chunked else b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        piece = bytes(64 * 1024)
        wire = b"10000\r\n" + piece + b"\r\n" if chunked else piece
        sent = 0

        def feed() -> None:
            nonlocal sent
            while not up.choked and sent < size:
                sent += len(piece)
                up.send(wire)

        # A client that does not read: the upstream comes to a halt after what sockets and turnstile hold.
        for _ in range(60):
            feed()
            await turn(20)
        assert sent < 24 * MIB
        channel = next(iter(p.site.channels))
        assert len(channel.transport.dataBuffer) + channel.transport._tempDataLen < 256 * 1024
        client.go_on_reading()
        while sent < size:
            await up.drained()
            feed()
        if chunked:
            up.send(b"0\r\n\r\n")
        body = size + (size // len(piece)) * 9 + 5 if chunked else size
        head = client.received.find(b"\r\n\r\n", 0, 4096) + 4
        await client.when(lambda: len(client.received) == head + body)


@pytest.mark.parametrize("chunked", [False, True])
@pytest_twisted.ensureDeferred
async def test_an_upload_is_not_buffered(chunked: bool) -> None:
    size = 64 * MIB
    async with proxying() as p:
        framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % size
        client = await p.client(b"POST /x HTTP/1.1\r\nHost: h\r\n" + framing + b"\r\n\r\n")
        up = await p.upstream.request()
        up.stop_reading()
        piece = bytes(64 * 1024)
        wire = b"10000\r\n" + piece + b"\r\n" if chunked else piece
        sent = 0

        def feed() -> None:
            nonlocal sent
            while not client.choked and sent < size:
                sent += len(piece)
                client.send(wire)

        for _ in range(60):
            feed()
            await turn(20)
        assert sent < 24 * MIB
        (conn,) = p.pool._all
        assert len(conn.transport.dataBuffer) + conn.transport._tempDataLen < 256 * 1024
        up.take()
        up.go_on_reading()
        while sent < size:
            await client.drained()
            feed()
        if chunked:
            client.send(b"0\r\n\r\n")
        body = size + (size // len(piece)) * 9 + 5 if chunked else size
        await up.when(lambda: len(up.received) == body)
        up.send(OK)
        await client.until(b"\r\n\r\nok")


@pytest_twisted.ensureDeferred
async def test_after_backpressure_the_connections_serve_again() -> None:
    async with proxying() as p:
        client = await p.client(b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n")
        up = await p.upstream.request()
        client.stop_reading()
        size = 8 * MIB
        up.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, bytes(size))
        await turn(50)
        client.go_on_reading()
        await client.when(lambda: len(client.received) > size)
        client.take()
        up.take()
        for _ in range(2):
            client.send(b"GET /y HTTP/1.1\r\nHost: h\r\n\r\n")
            await up.until(b"\r\n\r\n")
            up.take()
            up.send(OK)
            await client.until(b"\r\n\r\nok")
            client.take()
        assert len(p.upstream.ends) == 1


class Big(Resource):
    def render(self, request: Any) -> bytes:
        return bytes(64 * 1024)


@pytest_twisted.ensureDeferred
async def test_answers_that_are_not_read_do_not_pile_up() -> None:
    async with proxying() as p:
        p.site.pages[b"/big"] = Big()  # type: ignore[index]
        count = 600
        client = await p.client()
        client.stop_reading()
        client.send(b"GET /big HTTP/1.1\r\nHost: h\r\n\r\n" * count)
        await turn(100)
        channel = next(iter(p.site.channels))
        held = len(channel.transport.dataBuffer) + channel.transport._tempDataLen
        assert held < 256 * 1024 and channel._buffer
        client.go_on_reading()
        await client.when(lambda: len(client.received) > count * 64 * 1024)
        assert client.received.count(b"HTTP/1.1 200 OK") == count
