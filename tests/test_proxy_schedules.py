"""Any order of events: the gate ends once, nothing is written after an end, nothing is sent twice or kept for ever."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from proxy_fakes import FakePolicy, Hello
from proxy_wires import BUFFER, Endpoint, Vigil, Wire
from twisted.internet.task import Clock
from twisted.logger import globalLogPublisher

from turnstile.config import Upstream
from turnstile.proxy import exchange as exchange_module
from turnstile.proxy.channel import ProxyChannel
from turnstile.proxy.gate import Busy
from turnstile.proxy.http1 import BadMessage, Framing, head_end, parse_response
from turnstile.proxy.resource import EngineResource
from turnstile.proxy.retry import RetryPolicy
from turnstile.proxy.site import ProxySite
from turnstile.proxy.upstream import UpstreamPool

KIB = 1 << 10
STATUS_LIMIT = 2


class World:
    """One client, one site, one upstream, all in memory."""

    def __init__(self, requests: list[bytes], pieces: list[bytes]) -> None:
        #: What was logged.
        self.events: list[Any] = []
        self.wrongs: list[str] = []
        self.clock = Clock()
        self.policy = FakePolicy()
        self.policy.look = lambda: None  # type: ignore[method-assign]
        self.requests = requests
        self.pieces = pieces
        self.pool = UpstreamPool(self.clock, Upstream.parse("http://127.0.0.1:1"), timeout=5.0)
        self.endpoint = self.pool.endpoint = Endpoint(self.clock, self.wrongs)  # type: ignore[assignment]
        self.resource = EngineResource(
            self.pool,
            self.policy,
            reactor=self.clock,
            retry=RetryPolicy(1.0, 4.0, STATUS_LIMIT),
            observer=self.policy,
            chance=lambda: 0.5,
        )
        self.wire = Wire(self.clock, self.wrongs, "client")
        self.vigil = Vigil(self.clock, [self.wire])
        self.site = ProxySite(
            self.resource,
            {b"/hello": Hello()},  # type: ignore[dict-item]
            clock=self.clock,
            vigil=self.vigil,  # type: ignore[arg-type]
        )
        self.channel = ProxyChannel(self.site)
        self.wire.start(self.channel)

    # -- events

    def step(self, event: tuple[Any, ...]) -> None:
        getattr(self, event[0])(*event[1:])
        self.clock.advance(0)
        self.check()

    def client_sends(self) -> None:
        if self.pieces:
            self.wire.arrive(self.pieces.pop(0))

    def client_ends(self, how: str) -> None:
        self.wire.end(how)

    def client_reads(self) -> None:
        self.wire.drain()

    def connection(self, success: bool) -> None:
        self.endpoint.settle(success)

    def grant(self, success: bool) -> None:
        for gate in self.policy.gates:
            if gate.entering is not None and not gate.entering.called:
                if success:
                    gate.entering.callback(None)
                else:
                    gate.entering.errback(Busy("no", 503, 1))
                return

    def cleared(self) -> None:
        for gate in self.policy.gates:
            if gate.clearing is not None and not gate.clearing.called:
                gate.clearing.callback(None)
                return

    def _alive(self) -> list[Wire]:
        return [w for w in self.endpoint.wires if w.connected and w.ended is None]

    def upstream_says(self, data: bytes, which: int) -> None:
        alive = self._alive()
        if alive:
            alive[which % len(alive)].arrive(data)

    def upstream_ends(self, how: str, which: int) -> None:
        alive = self._alive()
        if alive:
            alive[which % len(alive)].end(how)

    def upstream_reads(self) -> None:
        for wire in self._alive():
            wire.drain()

    def time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.vigil.look()

    def drain(self) -> None:
        if not self.site.stopping:
            self.site.drain()

    # -- what always holds

    def check(self) -> None:
        assert self.wrongs == []
        for conn in self.pool._idle:
            assert conn.sink is None and not conn._expecting and conn._framing is None
            assert conn.lost is None and conn.served and not conn._buffer and not conn._choked
            assert conn.transport.reading
        channel = self.channel
        assert len(channel._buffer) <= 192 * KIB
        if channel.exchange is not None:
            assert channel.exchange._ahead_size <= exchange_module.MAX_AHEAD + 100 * KIB
        most = BUFFER + exchange_module.MAX_AHEAD + 100 * KIB
        for wire in (self.wire, *self.endpoint.wires):
            assert len(wire.out) <= most, (wire._name, len(wire.out))
        failures = [event for event in self.events if event.get("log_failure") is not None]
        assert failures == [], failures
        self.check_upstream()
        self.check_client()

    def check_upstream(self) -> None:
        heads = re.findall(
            rb"(GET|POST|HEAD) /[a-z]*/?([0-9]+) HTTP",
            b"\n".join(w.written for w in self.endpoint.wires),
        )
        for head in heads:
            # Once; a safe one again after a stale connection and after statuses worth another try.
            times = 1 if head[0] == b"POST" else 2 + STATUS_LIMIT * 2
            assert heads.count(head) <= times, heads

    def check_client(self) -> None:
        data = bytes(self.wire.written)
        methods = [request.split(b" ")[0] for request in self.requests]
        count = 0
        while data:
            end = head_end(data)
            assert end > 0, data
            head = parse_response(data[:end])
            data = data[end:]
            if head.status < 200:
                continue
            # What took too long to be said has no method yet.
            method = methods[count] if count < len(methods) and head.status != 408 else b"GET"
            framing: Framing = head.framing(method)
            count += 1
            try:
                data = data[framing.feed(data) if not framing.done else 0 :]
            except BadMessage:
                pytest.fail(f"broken framing: {data!r}")
            if not framing.done:
                break
        assert count <= len(self.requests)

    def finish(self) -> None:
        """The client is gone; what is carried through gets its answer or its end."""
        self.wire.end("rst")
        for _ in range(12):
            self.time(1.0)
            self.wire.drain()
        for wire in self.endpoint.wires:
            wire.end("rst")
        for _ in range(3):
            self.time(400.0)
        self.check()
        assert not self.site.channels and not self.resource.carried and not self.vigil.watched
        assert not self.endpoint.waiting, "an attempt to connect goes on for nobody"
        for gate in self.policy.gates:
            assert [c[0] for c in gate.calls if isinstance(c, tuple)].count("end") == 1, gate.calls
        assert all(conn.sink is None for conn in self.pool._all)
        self.pool.abort()
        self.clock.advance(0)
        assert self.clock.getDelayedCalls() == []


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
