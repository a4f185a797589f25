"""Heads and framing under drawn bytes: the same however they are split, and as h11 reads them."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import h11
from hypothesis import given, settings
from hypothesis import strategies as st

from turnstile.proxy.http1 import (
    BadMessage,
    ChunkedBody,
    Framing,
    NoBody,
    RequestHead,
    head_end,
    parse_request,
    parse_response,
    skip_empty_lines,
)


def request(*lines: bytes, first: bytes) -> bytes:
    return b"\r\n".join([first, b"Host: h", *lines, b"", b""])


TOKEN = st.text("abcXYZ019-_!~", min_size=1, max_size=8).map(str.encode)
VALUE = st.binary(max_size=12).map(
    lambda raw: bytes(byte for byte in raw if byte == 9 or (byte >= 32 and byte != 127)).strip(
        b" \t"
    )
)
FIELDS = st.lists(st.tuples(TOKEN.map(lambda t: b"x-" + t), VALUE), max_size=5)
CHUNKS = st.lists(st.binary(min_size=1, max_size=30), max_size=4)


def chunked(chunks: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in chunks) + b"0\r\n\r\n"


@st.composite
def messages(draw: st.DrawFn) -> tuple[bytes, tuple[Any, ...]]:
    """A request in bytes, and what should be read from it."""
    method = draw(st.sampled_from([b"GET", b"POST", b"PUT"]))
    target = b"/" + draw(st.text("ab/%2?;+=", max_size=10)).encode()
    fields = draw(FIELDS)
    body = draw(st.one_of(st.none(), st.binary(max_size=40), CHUNKS))
    lines = [b"%s: %s" % field for field in fields]
    if body is None:
        wire = payload = b""
    elif isinstance(body, bytes):
        lines.append(b"Content-Length: %d" % len(body))
        wire = payload = body
    else:
        lines.append(b"Transfer-Encoding: chunked")
        wire, payload = chunked(body), b"".join(body)
    head = request(*lines, first=method + b" " + target + b" HTTP/1.1")
    return head + wire, (method, target, fields, payload)


def read_all(pieces: list[bytes]) -> list[Any]:
    """Read requests as a connection does; the last item is "bad" if they ended so."""
    found: list[Any] = []
    buffer, searched = b"", 0
    head: RequestHead | None = None
    framing: Framing = NoBody()
    payload: list[bytes] = []
    try:
        for piece in pieces:
            searched, buffer = len(buffer), buffer + piece
            while True:
                if head is None:
                    buffer = skip_empty_lines(buffer)
                    end = head_end(buffer, min(searched, len(buffer)))
                    if end < 0:
                        break
                    head = parse_request(buffer[:end])
                    framing, payload, buffer = head.framing(), [], buffer[end:]
                if not framing.done:
                    buffer = buffer[framing.feed(buffer, payload) :]
                if not framing.done:
                    break
                found.append((head.method, head.target, head.fields, b"".join(payload)))
                head, searched = None, 0
    except BadMessage:
        found.append("bad")
    return found


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


CUTS = st.lists(st.integers(0, 1000), max_size=8)


@given(st.lists(messages(), min_size=1, max_size=3), CUTS)
def test_what_was_written_is_read_however_it_is_split(sent: list[Any], cuts: list[int]) -> None:
    wire = b"".join(data for data, _ in sent)
    assert read_all(split(wire, cuts)) == [expected for _, expected in sent]


NOISE = st.lists(
    st.sampled_from(
        [
            b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" ", b"\t", b":", b";", b"0", b"5", b"a", b"0x", b"+", b",", b"\x00",
            b"\x0b", b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\n", b"POST / HTTP/1.0\r\n", b"Host: h\r\n", b"X: y\r\n",
            b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n", b"chunked",
            b"5\r\nabcde\r\n", b"0\r\n\r\n", b"Connection: close\r\n", b"\x80",
        ]
    ),
    max_size=14,
).map(b"".join)  # fmt: skip


@settings(max_examples=400)
@given(
    st.one_of(
        NOISE, st.binary(max_size=60), NOISE.map(lambda n: b"POST / HTTP/1.1\r\nHost: h\r\n" + n)
    ),
    CUTS,
)
def test_any_split_of_any_bytes_is_read_alike(data: bytes, cuts: list[int]) -> None:
    whole = read_all([data])
    assert read_all(split(data, cuts)) == whole
    assert read_all([data[i : i + 1] for i in range(len(data))]) == whole


@settings(max_examples=300)
@given(NOISE.map(lambda n: b"POST / HTTP/1.1\r\nHost: h\r\n" + n))
def test_what_is_accepted_h11_does_not_read_otherwise(data: bytes) -> None:
    ours = read_all([data])
    theirs: list[Any] = []
    conn = h11.Connection(h11.SERVER)
    conn.receive_data(data)
    with contextlib.suppress(h11.RemoteProtocolError):
        while True:
            event = conn.next_event()
            if isinstance(event, h11.Request):
                current, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                theirs.append((current.method, current.target, body))
                if conn.their_state is not h11.DONE:
                    break
                conn.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                conn.send(h11.EndOfMessage())
                if conn.our_state is not h11.DONE:
                    break
                conn.start_next_cycle()
            else:
                break
    # h11 also stops at "Connection: close"; as far as both go they agree.
    for (method, target, _, payload), other in zip(
        [m for m in ours if m != "bad"], theirs, strict=False
    ):
        assert (method, target, payload) == other


@given(st.one_of(st.binary(max_size=80), NOISE, NOISE.map(lambda n: b"HTTP/1.1 200 OK\r\n" + n)))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    for reader in (head_end, parse_request, parse_response, ChunkedBody().feed):
        with contextlib.suppress(BadMessage):
            reader(data)
