"""Corners that real sockets seldom show, with every step of both wires taken by hand."""

from __future__ import annotations

from proxy_wires import World

from turnstile.proxy.gate import Ending

KIB = 1 << 10
GET = b"GET /1 HTTP/1.1\r\nHost: h\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def post(size: int, place: bytes = b"/") -> bytes:
    return b"POST %s1 HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (place, size) + bytes(
        size
    )


def pooled(*requests: bytes) -> World:
    """A world with a connection in its pool."""
    world = World([GET, *requests], [GET, *requests])
    for event in (("client_sends",), ("connection", True), ("upstream_says", OK, 0)):
        world.step(event)
    assert len(world.pool._idle) == 1
    world.endpoint.wires[0].drain()
    return world


def test_a_client_that_was_held_back_has_time_to_go_on() -> None:
    # The timer comes round just after the client may send again, and before it does.
    request = post(400 * KIB, b"/gated/")
    world = World([request], [request[i : i + 60 * KIB] for i in range(0, len(request), 60 * KIB)])
    world.policy.enter = "later"
    for _ in range(5):
        world.step(("client_sends",))
    assert not world.wire.reading
    world.step(("time", 74.0))
    world.step(("time", 2.0))
    world.step(("time", 70.0))
    world.step(("grant", True))
    world.step(("connection", True))
    world.step(("upstream_reads",))
    assert world.wire.reading
    world.step(("time", 10.0))
    assert not world.wire.written
    for _ in range(3):
        world.step(("client_sends",))
        world.step(("upstream_reads",))
    world.step(("upstream_says", OK, 0))
    assert world.wire.written == OK
    # One that has time and does not use it is another matter.
    world = World([request], [request[: 60 * KIB]])
    world.step(("client_sends",))
    world.step(("connection", True))
    world.step(("time", 76.0))
    assert world.wire.written.startswith(b"HTTP/1.1 408 ")
    assert world.policy.gate.ending == (Ending.UPSTREAM_LOST, False)
    world.finish()


def test_an_upload_that_is_not_out_yet_spoils_the_connection() -> None:
    request = post(100 * KIB)
    world = World([request, GET], [request[: 60 * KIB], request[60 * KIB :], GET])
    for event in (("client_sends",), ("client_sends",), ("connection", True)):
        world.step(event)
    (first,) = world.endpoint.wires
    assert len(first.out) > 64 * KIB
    world.step(("upstream_says", OK, 0))
    assert not world.pool._idle and first.aborting
    world.step(("client_sends",))
    assert world.endpoint.waiting
    world.finish()


def test_what_came_unasked_is_nobodys_answer() -> None:
    # It is in the socket, but the reactor has not been round to read it.
    world = pooled(GET)
    (first,) = world.endpoint.wires
    first.inbox.append(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
    before = bytes(first.written)
    world.step(("client_sends",))
    assert world.endpoint.waiting and first.written == before
    world.step(("connection", True))
    world.step(("upstream_says", OK, 0))
    assert world.wire.written == OK * 2
    world.finish()


def test_a_client_that_is_not_read_any_more_while_its_answer_is_out() -> None:
    # The end of one answer and the choking of the client come in the same moment.
    size = 90 * KIB
    request = GET * 2
    world = World([GET, GET], [request])
    world.step(("client_sends",))
    world.step(("connection", True))
    (up,) = world.endpoint.wires
    up.drain()
    world.step(
        ("upstream_says", b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size), 0)
    )
    # The next one is not even asked for until the client has read.
    assert up.written.count(b"GET ") == 1 and len(world.pool._idle) == 1 and up.reading
    assert not world.wire.reading
    world.step(("client_reads",))
    assert up.written.count(b"GET ") == 2 and world.wire.reading
    world.step(("upstream_says", OK, 0))
    assert world.wire.written.endswith(OK)
    world.finish()


def test_a_client_that_never_reads_does_not_stay_for_ever() -> None:
    size = 90 * KIB
    world = World([GET, GET], [GET * 2])
    world.step(("client_sends",))
    world.step(("connection", True))
    world.step(
        ("upstream_says", b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size), 0)
    )
    world.step(("time", 80.0))
    world.step(("time", 80.0))
    assert world.wire.disconnecting and b"408" not in world.wire.written
    world.step(("time", 301.0))
    assert not world.site.channels
    world.finish()


def test_one_that_vanishes_while_it_does_not_read() -> None:
    size = 90 * KIB
    world = World([GET, GET], [GET * 2])
    world.step(("client_sends",))
    world.step(("connection", True))
    world.step(
        ("upstream_says", b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size), 0)
    )
    world.step(("client_ends", "rst"))
    assert world.site.channels
    world.step(("time", 1.0))
    assert not world.site.channels
    world.finish()


def test_statuses_are_not_repeated_while_stopping() -> None:
    world = World([GET], [GET])
    world.step(("client_sends",))
    world.step(("connection", True))
    world.step(("drain",))
    world.step(("upstream_says", b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", 0))
    assert world.wire.written.startswith(b"HTTP/1.1 503 No\r\n") and world.wire.disconnecting
    world.finish()
