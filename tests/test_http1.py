"""Heads and framing: what is read in one way only is accepted, anything else is refused."""

from __future__ import annotations

import pytest

from turnstile.proxy.http1 import (
    MAX_CHUNK_LINE,
    MAX_FIELDS,
    MAX_HEAD,
    MAX_TRAILERS,
    BadMessage,
    ChunkedBody,
    Framing,
    LengthBody,
    NoBody,
    UntilClose,
    head_end,
    parse_request,
    parse_response,
    skip_empty_lines,
)


def request(*lines: bytes, first: bytes = b"POST /x HTTP/1.1", host: bool = True) -> bytes:
    return b"\r\n".join([first, *([b"Host: h"] if host else []), *lines, b"", b""])


def response(*lines: bytes, first: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"\r\n".join([first, *lines, b"", b""])


def refused(head: bytes, status: int = 400) -> None:
    """However the bytes arrive, they are no request."""
    with pytest.raises(BadMessage) as caught:
        end = head_end(head)
        assert end == len(head)
        parse_request(head[:end])
    assert caught.value.status == status, caught.value.reason


# -- request heads


def test_a_request_is_read() -> None:
    head = parse_request(
        request(
            b"Accept: */*",
            b"x-A:  two  words \t",
            b"Connection: X-b, keep-alive",
            b"X-B: hop",
            b"Content-Length: 12",
            b"X-a:",
            b"Cookie: a=\xe9; b",
            b"TE: trailers",
            b"Trailer: x-sum",
            b"Expect: 100-Continue",
            b"X-Forwarded-For: 1.2.3.4",
            b"X-Forwarded-For: 5.6.7.8",
        )
    )
    assert (head.method, head.target, head.minor, head.host) == (b"POST", b"/x", 1, b"h")
    assert head.fields == [
        (b"Accept", b"*/*"),
        (b"x-A", b"two  words"),
        (b"X-a", b""),
        (b"Cookie", b"a=\xe9; b"),
        (b"Trailer", b"x-sum"),
    ]
    assert head.content_length == 12 and not head.te_chunked and head.keep_alive
    assert head.expect_continue and head.forwarded_for == [b"1.2.3.4", b"5.6.7.8"]
    assert head.header(b"accept") == b"*/*" and head.header(b"nope") is None
    assert head.has_body and head.path == b"/x"


@pytest.mark.parametrize(
    "target",
    [
        b"/",
        b"/userdata/workflows%2Fa%20b.json?overwrite=true",
        b"/a%3Fb%25;c+d//e?",
        b"//x//",
        b"/\xc3\xa9?\"<>{}|\\^`[]'",
        b"/x?y=http://z/",
        b"/..%2f../",
    ],
)
def test_A02_targets_are_opaque(target: bytes) -> None:
    assert parse_request(request(first=b"GET " + target + b" HTTP/1.1")).target == target


@pytest.mark.parametrize(
    ("target", "authority", "origin"),
    [
        (b"http://a.example/x?y", b"a.example", b"/x?y"),
        (b"HTTP://a.example:80", b"a.example:80", b"/"),
        (b"https://[::1]:1?q", b"[::1]:1", b"/?q"),
        (b"http://a//b", b"a", b"//b"),
    ],
)
def test_absolute_form_names_the_host(target: bytes, authority: bytes, origin: bytes) -> None:
    head = parse_request(request(first=b"GET " + target + b" HTTP/1.1"))
    assert (head.authority, head.target) == (authority, origin)


def test_asterisk_form() -> None:
    assert parse_request(request(first=b"OPTIONS * HTTP/1.1")).target == b"*"
    assert parse_request(request(first=b"OPTIONS http://h HTTP/1.1")).target == b"*"
    refused(request(first=b"GET * HTTP/1.1"))


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET / HTTP/1.2", 505),
        (b"GET / HTTP/2.0", 505),
        (b"GET / HTTP/0.9", 505),
        (b"GET / http/1.1", 400),
        (b"GET /", 400),
        (b"GET  / HTTP/1.1", 400),
        (b"GET /  HTTP/1.1", 400),
        (b"GET\t/ HTTP/1.1", 400),
        (b" GET / HTTP/1.1", 400),
        (b"GET / HTTP/1.1 ", 400),
        (b"GET /a b HTTP/1.1", 400),
        (b"GET /a\tb HTTP/1.1", 400),
        (b"GET /a\x00b HTTP/1.1", 400),
        (b"GET /a\rb HTTP/1.1", 400),
        (b"GET /a\x7fb HTTP/1.1", 400),
        (b"GET /a#b HTTP/1.1", 400),
        (b"get / HTTP/1.1", 400),
        (b"Post / HTTP/1.1", 400),
        (b"G(T / HTTP/1.1", 400),
        (b"GET x HTTP/1.1", 400),
        (b"GET ftp://h/ HTTP/1.1", 400),
        (b"GET http:///x HTTP/1.1", 400),
        (b"GET http://u@h/x HTTP/1.1", 400),
        (b"CONNECT h:443 HTTP/1.1", 501),
        (b"CONNECT /x HTTP/1.1", 501),
        (b"", 400),
        (b"\x16\x03\x01\x02", 400),
    ],
)
def test_request_lines_that_are_none(line: bytes, status: int) -> None:
    refused(request(first=line) if line else b"\n\r\n\r\n", status)


@pytest.mark.parametrize(
    "field",
    [
        b"X: a\x0bb",
        b"X: a\x0cb",
        b"X: a\x00b",
        b"X: a\rb",
        b"X: a\x1fb",
        b"X: a\x7f",
        b"X : a",
        b"X\t: a",
        b" X: a",
        b": a",
        b"X",
        b"X a: b",
        b"X\xe9: b",
        b"X: a\r\n folded",
        b"X: a\r\n\tfolded",
        b"X: a\nY: b",
        b"Content-Length: 5\nY: b",
        b"X: a\r\r\nY: b",
        b"X: a\n",
        b"\x00",
        b'"X": a',
    ],
)
def test_H01_fields_that_are_none(field: bytes) -> None:
    refused(request(field))
    refused(request(b"A: b", field, b"C: d"))
    with pytest.raises(BadMessage):
        parse_response(response(b"A: b", field, b"C: d"))


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        [b"Host: h", b"Host: h"],
        [b"Host: h", b"hOST: other"],
        [b"Host: a b"],
        [b"Host: a/b"],
        [b"Host: u@h"],
        [b"Host: h:x"],
        [b"Host: h:1:2"],
        [b"Host: [::1"],
        [b"Host: h?"],
        [b"Host: h#"],
    ],
)
def test_hosts_that_are_refused(hosts: list[bytes]) -> None:
    refused(request(*hosts, host=False))


@pytest.mark.parametrize("host", [b"", b"h", b"h:1", b"[::1]:80", b"1.2.3.4", b"a_b.local", b"h:"])
def test_hosts_that_are_accepted(host: bytes) -> None:
    assert parse_request(request(b"Host: " + host, host=False)).host == host


def test_http_1_0_needs_no_host() -> None:
    head = parse_request(request(first=b"GET / HTTP/1.0", host=False))
    assert head.host is None and not head.keep_alive
    head = parse_request(request(b"Connection: Keep-Alive", first=b"GET / HTTP/1.0"))
    assert head.keep_alive
    head = parse_request(request(b"Connection: keep-alive, close"))
    assert not head.keep_alive


@pytest.mark.parametrize(
    "fields",
    [
        [b"Content-Length: +5"],
        [b"Content-Length: -5"],
        [b"Content-Length: 5,5"],
        [b"Content-Length: 5, 5"],
        [b"Content-Length: 0x5"],
        [b"Content-Length: 5 5"],
        [b"Content-Length: 5_0"],
        [b"Content-Length: "],
        [b"Content-Length: 5.0"],
        [b"Content-Length: \xb2"],
        [b"Content-Length: " + b"9" * 19],
        [b"Content-Length: 46", b"Content-Length: 0"],
        [b"Content-Length: 5", b"content-length: 5"],
        [b"Content-Length: 5", b"Transfer-Encoding: chunked"],
        [b"Transfer-Encoding: chunked", b"Content-Length: 0"],
        [b"Transfer-Encoding: chunked\t", b"Content-Length: 4"],
        [b"Transfer-Encoding: xchunked"],
        [b"Transfer-Encoding: "],
        [b"Transfer-Encoding: chunked, chunked"],
        [b"Transfer-Encoding: gzip, chunked"],
        [b"Transfer-Encoding: chunked, identity"],
        [b"Transfer-Encoding: identity"],
        [b"Transfer-Encoding: chunked;q=1"],
        [b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"],
        [b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked"],
        [b"Transfer-Encoding:\x0bchunked"],
        [b"Connection: transfer-encoding", b"Transfer-Encoding: chunked", b"Content-Length: 3"],
    ],
)
def test_H02_framings_that_are_refused(fields: list[bytes]) -> None:
    refused(request(*fields))


def test_H02_framings_that_are_accepted() -> None:
    assert parse_request(request(b"Content-Length: 007")).content_length == 7
    head = parse_request(request(b"Transfer-Encoding: Chunked\t"))
    assert head.te_chunked and isinstance(head.framing(), ChunkedBody)
    # It is framed anew upstream: naming it in Connection changes nothing.
    head = parse_request(request(b"Connection: content-length, host", b"Content-Length: 3"))
    assert head.content_length == 3 and head.host == b"h"
    assert isinstance(parse_request(request()).framing(), NoBody)
    assert parse_request(request(b"Content-Length: 0")).framing().done


def test_chunked_is_http_1_1() -> None:
    refused(request(b"Transfer-Encoding: chunked", first=b"POST / HTTP/1.0"))
    with pytest.raises(BadMessage):
        parse_response(response(b"Transfer-Encoding: chunked", first=b"HTTP/1.0 200 OK"))


def test_expectations() -> None:
    refused(request(b"Expect: magic"), 417)
    assert not parse_request(
        request(b"Expect: 100-continue", first=b"POST / HTTP/1.0")
    ).expect_continue


def test_sizes() -> None:
    room = MAX_HEAD - len(request(b"X: "))
    assert parse_request(request(b"X: " + b"a" * room))
    whole = request(b"X: " + b"a" * room)
    assert head_end(whole) == MAX_HEAD and head_end(whole[:-1]) == -1
    refused(request(b"X: " + b"a" * (room + 1)), 431)
    with pytest.raises(BadMessage) as caught:
        head_end(b"GET /" + b"a" * MAX_HEAD)
    assert caught.value.status == 431
    assert parse_request(request(*[b"a: b"] * (MAX_FIELDS - 1)))
    refused(request(*[b"a: b"] * MAX_FIELDS), 431)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\n", b"GET / HTTP/1.1\r\nA: b\nC", b"\n", b"a\r\r\n\n"]
)
def test_H01_bare_line_feeds_are_refused_at_once(data: bytes) -> None:
    with pytest.raises(BadMessage):
        head_end(data)


def test_empty_lines_are_skipped() -> None:
    assert skip_empty_lines(b"\r\n\r\nG") == b"G"
    assert skip_empty_lines(b"\n\r\n") == b"\n\r\n"


# -- response heads


def test_a_response_is_read() -> None:
    head = parse_response(
        response(
            b"Set-Cookie: a",
            b"Keep-Alive: timeout=5",
            b"Set-Cookie: b",
            b"connection: X-Hop",
            b"x-hop: 1",
            b"Content-Length: 5",
            b"Content-Length: 5",
            b"Content-Type: Text/Event-Stream",
            b"Trailer: x-sum",
            first=b"HTTP/1.1 200 Fine \xe9 by me",
        )
    )
    assert (head.status, head.reason, head.content_length) == (200, b"Fine \xe9 by me", 5)
    assert head.fields == [
        (b"Set-Cookie", b"a"),
        (b"Set-Cookie", b"b"),
        (b"Content-Type", b"Text/Event-Stream"),
        (b"Trailer", b"x-sum"),
    ]
    assert head.keep_alive and head.content_type == b"text/event-stream"


@pytest.mark.parametrize(
    ("method", "head", "kind"),
    [
        (b"HEAD", response(b"Content-Length: 5"), NoBody),
        (b"HEAD", response(b"Transfer-Encoding: chunked"), NoBody),
        (b"GET", response(b"Content-Length: 5", first=b"HTTP/1.1 204 No"), NoBody),
        (b"GET", response(b"Content-Length: 5", first=b"HTTP/1.1 304 Same"), NoBody),
        (b"GET", response(first=b"HTTP/1.1 100 Go"), NoBody),
        (b"GET", response(b"Content-Length: 5"), LengthBody),
        (b"GET", response(b"Transfer-Encoding: chunked"), ChunkedBody),
        (b"GET", response(), UntilClose),
        (b"GET", response(first=b"HTTP/1.0 200"), UntilClose),
    ],
)
def test_H05_how_responses_end(method: bytes, head: bytes, kind: type[Framing]) -> None:
    assert type(parse_response(head).framing(method)) is kind


@pytest.mark.parametrize(
    "head",
    [
        response(first=b"HTTP/2 200 OK"),
        response(first=b"HTTP/1.1 20 OK"),
        response(first=b"HTTP/1.1 2000 OK"),
        response(first=b"HTTP/1.1 099 OK"),
        response(first=b"HTTP/1.1  200 OK"),
        response(first=b"HTTP/1.1 200 O\x00K"),
        response(first=b"HTTP/1.1 200\tOK"),
        response(first=b"ICY 200 OK"),
        response(first=b"<html>"),
        response(b"Content-Length: 5", b"Content-Length: 6"),
        response(b"Content-Length: 5, 5"),
        response(b"Content-Length: 5", b"Transfer-Encoding: chunked"),
        response(b"Transfer-Encoding: gzip, chunked"),
    ],
)
def test_responses_that_are_refused(head: bytes) -> None:
    with pytest.raises(BadMessage):
        parse_response(head)


# -- chunked bodies


def feed(body: Framing, *pieces: bytes) -> tuple[bytes, bytes, bytes]:
    """What was passed on, what was payload, what is left, given the pieces as a connection would."""
    passed, payload, buffer = b"", [], b""
    for piece in pieces:
        buffer += piece
        if not body.done:
            used = body.feed(buffer, payload)
            passed, buffer = passed + buffer[:used], buffer[used:]
    return passed, b"".join(payload), buffer


@pytest.mark.parametrize(
    ("wire", "payload"),
    [
        (b"0\r\n\r\n", b""),
        (b"3\r\nabc\r\n0\r\n\r\n", b"abc"),
        (b"0003\r\nabc\r\n000\r\n\r\n", b"abc"),
        (b"A;x=y\r\n0123456789\r\n0;last\r\n\r\n", b"0123456789"),
        (b'a \t;x="y z"\t\r\n0123456789\r\n0\r\n\r\n', b"0123456789"),
        (b"2\r\n\r\n\r\n0\r\n\r\n", b"\r\n"),
        (b"1\r\na\r\n0\r\nX-Sum: 1\r\nY:\r\n\r\n", b"a"),
        (b"0000000000000001\r\na\r\n0\r\n\r\n", b"a"),
    ],
)
def test_chunked_bodies(wire: bytes, payload: bytes) -> None:
    assert feed(ChunkedBody(), wire + b"NEXT") == (wire, payload, b"NEXT")
    assert feed(ChunkedBody(), *[wire[i : i + 1] for i in range(len(wire))], b"NEXT") == (
        wire,
        payload,
        b"NEXT",
    )


@pytest.mark.parametrize(
    "wire",
    [
        b"\r\n",
        b"x\r\n",
        b"0x5\r\n12345\r\n",
        b"+5\r\n12345\r\n",
        b"-1\r\n",
        b" 5\r\n12345\r\n",
        b"5 \r\n12345\r\n",
        b"5\n12345\r\n",
        b"5;a\nb\r\n12345\r\n",
        b"5;a\x0bb\r\n12345\r\n",
        b"5;a\rb\r\n12345\r\n",
        b"5;\x00\r\n12345\r\n",
        b"5_0\r\n",
        b"00000000000000001\r\na\r\n",
        b"FFFFFFFFFFFFFFFFF\r\n",
        b"3\r\nabcd\r\n",
        b"3\r\nabc\n0\r\n\r\n",
        b"3\r\nabc\rX",
        b"3\r\nabc0\r\n\r\n",
        b"0\r\nno field\r\n\r\n",
        b"0\r\n folded: x\r\n\r\n",
        b"0\r\nX : y\r\n\r\n",
        b"0\r\nX: y\n\r\n",
        b"0\r\nX: \x0c\r\n\r\n",
        b"1;" + b"a" * MAX_CHUNK_LINE + b"\r\n",
        b"0\r\n" + b"X: y\r\n" * (MAX_TRAILERS // 6 + 1) + b"\r\n",
    ],
)
def test_H01_chunks_that_are_none(wire: bytes) -> None:
    with pytest.raises(BadMessage):
        feed(ChunkedBody(), wire)
    with pytest.raises(BadMessage):
        feed(ChunkedBody(), *[wire[i : i + 1] for i in range(len(wire))])


@pytest.mark.parametrize(
    "part", [b"1;" + b"a" * 3000, b"5", b"5\r", b"0\r\nX: " + b"y" * 9000, b""]
)
def test_an_incomplete_chunk_line_is_kept(part: bytes) -> None:
    assert ChunkedBody().feed(part) == 0


def test_an_endless_line_is_refused() -> None:
    for start in (b"1;", b"0\r\nX: "):
        with pytest.raises(BadMessage):
            feed(ChunkedBody(), *[start, *[b"a" * 1000] * 20])
