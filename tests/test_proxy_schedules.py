"""Any order of events: the gate ends once, nothing is written after an end, nothing is sent twice or kept for ever."""

from __future__ import annotations

import itertools
import random
from typing import Any

from hypothesis import given, note, settings
from hypothesis import strategies as st
from proxy_wires import World
from twisted.logger import globalLogPublisher

from turnstile.proxy.gate import Busy

KIB = 1 << 10


def body(kind: str, size: int) -> bytes:
    data = b"unload" if size == 6 else b"b" * size
    if kind == "length":
        return b"Content-Length: %d\r\n\r\n" % size + data
    if kind == "chunked":
        return b"Transfer-Encoding: chunked\r\n\r\n" + (
            b"%x\r\n%s\r\n" % (size, data) if size else b""
        ) + b"0\r\n\r\n"  # fmt: skip
    return b"\r\n"


@st.composite
def traffic(draw: st.DrawFn) -> tuple[list[bytes], list[bytes]]:
    """Requests, and the pieces in which their bytes come."""
    requests = []
    for number in range(draw(st.integers(1, 3))):
        method = draw(st.sampled_from([b"GET", b"POST", b"HEAD", b"POST"]))
        place = draw(st.sampled_from([b"/", b"/gated/", b"/gated/", b"/peek/"]))
        kind = draw(st.sampled_from(["none", "length", "chunked"]))
        size = draw(st.sampled_from([0, 6, 6, 5000, 300 * KIB]))
        if method != b"POST":
            kind = "none"
        lines = [
            method
            + b" "
            + place
            + b"%d HTTP/1.%d" % (number, kind == "chunked" or draw(st.integers(0, 1)))
        ]
        if draw(st.booleans()):
            lines.append(b"Expect: 100-continue")
        if draw(st.booleans()):
            lines.append(b"Connection: keep-alive")
        requests.append(b"\r\n".join([*lines, b"Host: h", b""]) + body(kind, size))
    data = b"".join(requests)
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=6))
    places = [0, *range(60 * KIB, len(data), 60 * KIB), *cuts, len(data)]
    ordered = sorted(set(places))
    return requests, [data[a:b] for a, b in itertools.pairwise(ordered)]


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
SAYS = [
    *[OK] * 6,
    OK[:20],
    OK[20:],
    OK + OK,
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    *[b"3\r\nabc\r\n"] * 2,
    b"0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (90 * KIB),
    *[bytes(45 * KIB)] * 2,
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.1 204 No\r\n\r\n",
    b"HTTP/1.1 100 Go\r\n\r\n",
    b"HTTP/1.1 103 Hint\r\n\r\n",
    b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 413 Big\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx",
    b"garbage\r\n\r\n",
]


def possible(world: World, chance_of_end: bool) -> list[tuple[Any, ...]]:
    """What may happen next; likely things several times."""
    gates = world.policy.gates
    events: list[tuple[Any, ...]] = [("time", 0.1), ("time", 1.0)] * 2
    events += [("time", 40.0), ("time", 80.0)]
    if world.pieces:
        events += [("client_sends",)] * 24
    if world.wire.out:
        events += [("client_reads",)] * 3
    if world.endpoint.waiting:
        events += [("connection", True)] * 24 + [("connection", False)] * 2
    if any(gate.entering and not gate.entering.called for gate in gates):
        events += [("grant", True)] * 24 + [("grant", False)]
    if any(gate.clearing and not gate.clearing.called for gate in gates):
        events += [("cleared",)] * 24
    if world._alive():
        events += [("upstream_says", None, 0)] * 24 + [("upstream_says", None, 1)]
        events += [("upstream_ends", how, which) for how in ("fin", "rst") for which in (0, 1)]
        events += [("upstream_reads",)] * 3
    if world.wire.ended is None and chance_of_end:
        events += [("client_ends", "fin"), ("client_ends", "rst")]
    return [*events, ("drain",)] if chance_of_end else events


@settings(max_examples=300, deadline=None)
@given(traffic(), st.integers(0, 1 << 32))
def test_any_order_of_events(drawn: tuple[list[bytes], list[bytes]], seed: int) -> None:
    # Drawn by Random: hypothesis prefers what is early in a list, and would seldom get far.
    chance = random.Random(seed)
    world = World(*drawn)
    policy = world.policy
    policy.enter = chance.choice(["now", "now", "later", "later", "later", Busy("no", 503, 1)])
    policy.room = chance.choice(["now", "later"])
    policy.detached, policy.capture = chance.choice([False, True]), chance.choice([0, 4, 9999])
    globalLogPublisher.addObserver(world.events.append)
    try:
        for _ in range(chance.randint(5, 60)):
            event = chance.choice(possible(world, chance.random() < 0.3))
            if event[0] == "upstream_says":
                event = ("upstream_says", chance.choice(SAYS), event[2])
            note(repr(event))
            world.step(event)
        world.finish()
    finally:
        globalLogPublisher.removeObserver(world.events.append)
