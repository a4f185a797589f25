"""The whole data path over any split of the same bytes: the same result, whoever cut them, network or attacker."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_wires import World

from turnstile.proxy.http1 import head_end, parse_response

CUTS = st.lists(st.integers(0, 5000), max_size=8)


def split(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def run(client: list[bytes], answers: list[list[bytes]], end: str = "") -> World:
    """A client sends its pieces, the upstream answers each request that it has; at the end it may close."""
    world = World([b"GET / HTTP/1.1"] * 20, client)
    while world.pieces:
        world.step(("client_sends",))
        world.step(("connection", True))
    for pieces in answers:
        world.step(("connection", True))
        for piece in pieces:
            world.step(("upstream_says", piece, -1))
    if end:
        world.step(("upstream_ends", end, -1))
    return world


def outcome(world: World) -> tuple[bytes, bytes, bool, bool, list[int]]:
    """What the upstream got, what the client got, how its connection stands, and the answers by their status."""
    upstream = b"".join(bytes(wire.written) for wire in world.endpoint.wires)
    wire = world.wire
    gone = wire.aborting or not wire.connected
    return upstream, bytes(wire.written), wire.disconnecting, gone, world.policy.done


def chunked(pieces: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


BODIES = st.one_of(
    st.binary(max_size=60).map(lambda body: b"Content-Length: %d\r\n\r\n%s" % (len(body), body)),
    st.lists(st.binary(min_size=1, max_size=30), max_size=4).map(
        lambda pieces: b"Transfer-Encoding: chunked\r\n\r\n" + chunked(pieces)
    ),
)
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([b"POST /a", b"POST /gated/b", b"POST /peek/c", b"PUT /d?e=%2F"]), BODIES
    ).map(lambda t: t[0] + b" HTTP/1.1\r\nHost: h\r\nX-Y:  z \r\n" + t[1]),
    min_size=1,
    max_size=3,
)
ANSWERS = BODIES.map(
    lambda body: b"HTTP/1.1 200 OK\r\nX-A: b\r\nContent-Type: text/event-stream\r\n" + body
)


@settings(max_examples=150)
@given(REQUESTS, st.lists(ANSWERS, min_size=3, max_size=3), CUTS, st.lists(CUTS, min_size=3))
def test_well_formed_traffic(
    requests: list[bytes], answers: list[bytes], cuts: list[int], more: list[list[int]]
) -> None:
    sent, answers = b"".join(requests), answers[: len(requests)]
    whole = outcome(run([sent], [[answer] for answer in answers]))
    pieces = [split(answer, cuts) for answer, cuts in zip(answers, more, strict=False)]
    assert outcome(run(split(sent, cuts), pieces)) == whole
    assert whole[4] == [200] * len(requests)


SECRET = b"POST /smuggled HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"
#: Two readings each: in one of them a second request hides in the body.
SMUGGLING = [
    b"Content-Length: %d\r\nContent-Length: 0\r\n\r\n" % len(SECRET),
    b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(SECRET),
    b"Content-Length: 0, %d\r\n\r\n" % len(SECRET),
    b"Content-Length: +0\r\n\r\n",
    b"Content-Length: 0x0\r\n\r\n",
    b"Content-Length: -1\r\n\r\n",
    b"Content-Length : 0\r\n\r\n",
    b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding\r\n : chunked\r\n\r\n0\r\n\r\n",
    b"X: y\r\n folded\r\nContent-Length: 0\r\n\r\n",
    b"X: y\nContent-Length: 0\r\n\r\n",
    b"X: y\rContent-Length: 0\r\n\r\n",
    b"Host: other\r\nContent-Length: 0\r\n\r\n",
    b"\x00: y\r\nContent-Length: 0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n+0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n1;a=\nb\r\nx\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n1\r\nxx\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n1\nx\n0\n\n",
    b"Transfer-Encoding: chunked\r\n\r\n11111111111111111\r\nx\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: y\nZ: \r\n\r\n",
]


@settings(max_examples=300)
@given(st.sampled_from(SMUGGLING), st.sampled_from([b"/a", b"/gated/b", b"/peek/c"]), CUTS)
def test_what_can_be_read_in_two_ways_is_refused(
    framing: bytes, path: bytes, cuts: list[int]
) -> None:
    sent = b"POST " + path + b" HTTP/1.1\r\nHost: h\r\n" + framing + SECRET
    upstream, client, closing, gone, _ = outcome(run(split(sent, cuts), []))
    assert b"smuggled" not in upstream
    assert client.startswith(b"HTTP/1.1 400 ")
    assert client.count(b"HTTP/1.1 ") == 1
    assert closing or gone or b"Connection: close" in client


@settings(max_examples=100)
@given(st.sampled_from(SMUGGLING), CUTS)
def test_nothing_of_it_goes_upstream_if_it_came_in_one_piece(
    framing: bytes, cuts: list[int]
) -> None:
    sent = b"POST /a HTTP/1.1\r\nHost: h\r\n" + framing + SECRET
    assert outcome(run([sent], []))[0] == b""


TRUNCATED = st.one_of(
    st.just(b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n" + b"x" * 40),
    st.just(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked([b"x" * 20] * 3)),
    st.just(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nX: y\r\n\r\n"
    ),
)


@settings(max_examples=300)
@given(TRUNCATED, st.integers(1, 5000), CUTS, st.sampled_from(["fin", "rst"]))
def test_an_answer_that_is_cut_off_is_seen_to_be(
    answer: bytes, kept: int, cuts: list[int], end: str
) -> None:
    kept = kept % len(answer)  # at least one byte is missing
    request = [b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"]
    whole = outcome(run(list(request), [[answer[:kept]]] if kept else [], end))
    pieces = split(answer[:kept], cuts)
    result = outcome(run(list(request), [pieces], end))
    assert result == whole
    client = result[1]
    begin = head_end(answer[:kept])
    if begin < 0:
        assert client.startswith(b"HTTP/1.1 502 ")
        return
    assert client.startswith(b"HTTP/1.1 200 OK\r\n")
    framing = parse_response(client[: head_end(client)]).framing(b"POST")
    framing.feed(client[head_end(client) :])
    assert not framing.done
    assert result[2] or result[3]
