"""The WebSocket relay: real peers over real sockets, odd ones in memory."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import hashlib
import itertools
import os
import socket
import ssl
import struct
import threading

import aiohttp
import aiohttp.web
import attrs
import pytest
import pytest_twisted
import websockets.asyncio.client
import websockets.asyncio.server
import websockets.exceptions
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint
from twisted.internet.error import ConnectError, ConnectionDone, ConnectionLost
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.ssl import CertificateOptions
from twisted.internet.task import Clock, deferLater
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure

from turnstile.proxy.http1 import parse_request
from turnstile.proxy.websocket import UpgradeRequest, is_websocket_upgrade, start_relay
from turnstile.proxy.ws_ends import EARLY_LIMIT, TEXT_LIMIT

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
MASK = b"\x81\x02\x7f\xfe"
MIB = 1 << 20


# ---- frames, as RFC 6455 section 5.2 has them


def xor(payload, mask):
    return bytes(byte ^ mask[i & 3] for i, byte in enumerate(payload))


def frame(opcode, payload=b"", *, fin=True, mask=None):
    length = len(payload)
    bit = 0x80 if mask else 0
    if length < 126:
        head = struct.pack("!BB", opcode | fin << 7, bit | length)
    elif length < 65536:
        head = struct.pack("!BBH", opcode | fin << 7, bit | 126, length)
    else:
        head = struct.pack("!BBQ", opcode | fin << 7, bit | 127, length)
    return head + (mask + xor(payload, mask) if mask else payload)


def close_frame(code=None, reason=b"", mask=None):
    return frame(8, b"" if code is None else struct.pack("!H", code) + reason, mask=mask)


def frames(data):
    """Every frame of some bytes as (opcode, fin, payload), masked or not; all must be whole."""
    found = []
    while data:
        opcode, fin, masked, length, pos = (
            data[0] & 15,
            data[0] >> 7,
            data[1] >> 7,
            data[1] & 127,
            2,
        )
        if length >= 126:
            size = 2 if length == 126 else 8
            length, pos = int.from_bytes(data[2 : 2 + size], "big"), 2 + size
        mask = data[pos : pos + 4] if masked else b"\0\0\0\0"
        pos += 4 * masked
        assert len(data) >= pos + length
        found.append((opcode, bool(fin), xor(data[pos : pos + length], mask)))
        data = data[pos + length :]
    return found


def accept(key):
    return base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())


def field(head, name):
    """All values of a header in a head."""
    return [
        line.partition(b":")[2].strip()
        for line in head.split(b"\r\n")[1:]
        if line.partition(b":")[0].lower() == name.lower()
    ]


def switching(head, *more):
    lines = [b"HTTP/1.1 101 Switching Protocols", b"Upgrade: websocket", b"Connection: Upgrade"]
    lines.append(b"Sec-WebSocket-Accept: " + accept(field(head, b"sec-websocket-key")[0]))
    return b"\r\n".join([*lines, *more, b"", b""])


def request_head(*more, target=b"/ws?clientId=a%2Fb", connection=b"keep-alive, Upgrade"):
    return b"\r\n".join(
        [
            b"GET " + target + b" HTTP/1.1",
            b"Host: box:9188",
            b"Connection: " + connection,
            b"Upgrade: WebSocket",
            b"Sec-WebSocket-Version: 13",
            b"Sec-WebSocket-Key: " + KEY,
            *more,
            b"",
            b"",
        ]
    )


def upgrade_request(head):
    parsed = parse_request(head)
    fields = [(n, v) for n, v in parsed.fields if not n.lower().startswith(b"sec-websocket-")]
    return UpgradeRequest(
        target=parsed.target,
        client_headers=parsed.received,
        upstream_headers=[(b"Host", parsed.host), *fields],
    )


# ---- in memory


class Wire(StringTransport):
    """A transport that also notes half-closing and aborting."""

    half_closed = False
    aborted = False

    def loseWriteConnection(self):
        assert self.producer is None
        self.half_closed = True

    def loseConnection(self):
        assert self.producer is None
        super().loseConnection()

    def abortConnection(self):
        self.aborted = True
        self.disconnecting = True

    @property
    def open(self):
        return not (self.half_closed or self.disconnecting)


class Rig:
    """A relay between two wires; the test plays both peers."""

    def __init__(self, head=None, leftover=b"", *, connect=True, upgrade=None, **options):
        self.clock = Clock()
        self.client = Wire()
        self.upstream = Wire()
        self.statuses = []
        self.texts = []
        self.results = []
        self.cancelled = False
        self.connecting = Deferred(self._cancel)
        self.upstream_protocol = None
        head = request_head() if head is None else head
        self.relay = start_relay(
            self.client,
            head,
            leftover,
            upgrade or upgrade_request(head),
            self._connect,
            clock=self.clock,
            on_text=self.texts.append,
            on_status=self.statuses.append,
            **options,
        )
        self.relay.done.addCallback(self.results.append)
        self.client_protocol = self.client.protocol
        if connect and self.statuses == []:
            self.connected()

    def _cancel(self, deferred):
        self.cancelled = True

    def _connect(self, factory):
        self.factory = factory
        return self.connecting

    def connected(self):
        self.upstream_protocol = self.factory.buildProtocol(None)
        self.upstream_protocol.makeConnection(self.upstream)
        self.connecting.callback(self.upstream_protocol)
        self.sent = self.upstream.value()
        self.upstream.clear()

    def open(self, *more, first=b""):
        """The upstream says 101. Returns the head that the client gets."""
        self.down(switching(self.sent, *more) + first)
        head, _, rest = self.client.value().partition(b"\r\n\r\n")
        self.client.clear()
        self.client.write(rest)
        return head + b"\r\n\r\n"

    def up(self, data):
        self.client_protocol.dataReceived(data)

    def down(self, data):
        self.upstream_protocol.dataReceived(data)

    def client_lost(self, kind=ConnectionDone):
        self.client_protocol.connectionLost(Failure(kind()))

    def upstream_lost(self, kind=ConnectionDone):
        self.upstream_protocol.connectionLost(Failure(kind()))

    def finish(self):
        """Both peers go; the relay must be over and leave no timer."""
        for protocol in (self.client_protocol, self.upstream_protocol):
            if protocol is not None and not protocol.down:
                protocol.connectionLost(Failure(ConnectionDone()))
        (result,) = self.results
        assert self.clock.getDelayedCalls() == []
        return result


@pytest.mark.parametrize(
    ("method", "version", "headers", "expected"),
    [
        (b"GET", b"HTTP/1.1", [(b"Upgrade", b"websocket"), (b"Connection", b"Upgrade")], True),
        (
            b"GET",
            (1, 1),
            [(b"UPGRADE", b"WebSocket"), (b"connection", b"keep-alive, UPGRADE")],
            True,
        ),
        (
            b"GET",
            (1, 1),
            [
                (b"Upgrade", b"h2c"),
                (b"Upgrade", b"websocket"),
                (b"Connection", b"keep-alive"),
                (b"Connection", b"upgrade"),
            ],
            True,
        ),
        (b"GET", (1, 1), [(b"Upgrade", b"h2c, websocket"), (b"Connection", b"Upgrade")], True),
        (b"POST", (1, 1), [(b"Upgrade", b"websocket"), (b"Connection", b"Upgrade")], False),
        (b"GET", (1, 0), [(b"Upgrade", b"websocket"), (b"Connection", b"Upgrade")], False),
        (b"GET", (1, 1), [(b"Upgrade", b"websocket"), (b"Connection", b"keep-alive")], False),
        (b"GET", (1, 1), [(b"Upgrade", b"websockets"), (b"Connection", b"Upgrade")], False),
        (b"GET", (1, 1), [(b"Connection", b"Upgrade")], False),
    ],
)
def test_is_upgrade(method, version, headers, expected):
    assert is_websocket_upgrade(method, version, headers) is expected


def test_upstream_request_is_verbatim():
    rig = Rig(
        request_head(
            b"Origin: http://box:9188",
            b"cookie: a=1; b=2",
            b"X-Two: one",
            b"x-two: TWO",
            b"X-Latin: \xe9",
            b"Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits",
            b"Sec-WebSocket-Protocol: v2, v1",
            target=b"/api//ws?clientId=a%2Fb&x=%20?",
        )
    )
    line, *fields = rig.sent[:-4].split(b"\r\n")
    assert line == b"GET /api//ws?clientId=a%2Fb&x=%20? HTTP/1.1"
    assert fields[:6] == [
        b"Host: box:9188",
        b"Origin: http://box:9188",
        b"cookie: a=1; b=2",
        b"X-Two: one",
        b"x-two: TWO",
        b"X-Latin: \xe9",
    ]
    assert len(base64.b64decode(field(rig.sent, b"sec-websocket-key")[0])) == 16
    assert field(rig.sent, b"sec-websocket-key") != [KEY]
    assert field(rig.sent, b"sec-websocket-version") == [b"13"]
    assert field(rig.sent, b"sec-websocket-protocol") == [b"v2, v1"]
    assert field(rig.sent, b"connection") == [b"Upgrade"]
    assert field(rig.sent, b"upgrade") == [b"websocket"]
    assert field(rig.sent, b"sec-websocket-extensions") == []
    assert rig.client.value() == b""  # nothing is answered before the upstream did
    rig.client_lost()
    rig.finish()


def test_answer_has_the_upstreams_headers_and_first_frame():
    """H09, both in one segment."""
    rig = Rig()
    head = rig.open(
        b"Set-Cookie: a=1",
        b"set-cookie: b=\xe9",
        b"Date: now",
        b"Keep-Alive: timeout=5",
        b"Content-Length: 0",
        first=frame(1, b"hello"),
    )
    assert head.startswith(b"HTTP/1.1 101 ")
    assert field(head, b"sec-websocket-accept") == [accept(KEY)]
    assert field(head, b"set-cookie") == [b"a=1", b"b=\xe9"]
    assert field(head, b"date") == [b"now"]
    assert field(head, b"connection") == [b"Upgrade"]
    for absent in (b"keep-alive", b"content-length", b"sec-websocket-extensions"):
        assert field(head, absent) == []
    assert rig.client.value() == frame(1, b"hello")
    assert rig.statuses == [101]
    assert rig.texts == [b"hello"]
    rig.client_lost()
    assert rig.finish().status == 101


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (request_head().replace(KEY, b"dGhlIHNhbXBsZSBub25jZQ="), 400),
        (request_head().replace(KEY, b"dGhlIHNhbXBsZSBub25jZQ!="), 400),
        (request_head().replace(b"Sec-WebSocket-Key", b"X-Key"), 400),
        (request_head(b"Sec-WebSocket-Key: " + KEY), 400),
        (request_head().replace(b"Version: 13", b"Version: 8"), 426),
        (request_head().replace(b"Version: 13", b"Version: 12"), 426),
        (request_head(b"Sec-WebSocket-Version: 13"), 426),
        (request_head().replace(b"Sec-WebSocket-Version", b"X-Version"), 400),
        (request_head(b"Sec-WebSocket-Protocol: a b"), 400),
        (request_head(b"Content-Length: 5"), 400),
    ],
)
def test_bad_client_handshake(head, status):
    rig = Rig(head, b"whatever", connect=False)
    answer = rig.client.value()
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert not rig.connecting.called
    assert not hasattr(rig, "factory")
    assert b'{"error": "' in answer
    if status == 426:
        assert field(answer, b"sec-websocket-version") == [b"13"]
        assert field(answer, b"upgrade") == [b"websocket"]
    assert rig.client.half_closed
    result = rig.finish()
    assert (result.how, result.by, result.status) == ("failed", "client", status)


def test_subprotocol_end_to_end():
    rig = Rig(request_head(b"Sec-WebSocket-Protocol: v2", b"Sec-WebSocket-Protocol: v1, v2"))
    assert field(rig.sent, b"sec-websocket-protocol") == [b"v2", b"v1, v2"]
    head = rig.open(b"Sec-WebSocket-Protocol: v1")
    assert field(head, b"sec-websocket-protocol") == [b"v1"]
    rig.client_lost()
    rig.finish()


@pytest.mark.parametrize(
    "answer",
    [
        lambda sent: switching(sent, b"Sec-WebSocket-Protocol: unasked"),
        lambda sent: switching(sent, b"Sec-WebSocket-Extensions: permessage-deflate"),
        lambda sent: switching(sent).replace(b"Sec-WebSocket-Accept: ", b"Sec-WebSocket-Accept: x"),
        lambda sent: switching(sent).replace(b"Upgrade: websocket\r\n", b""),
        lambda sent: b"SSH-2.0-OpenSSH\r\n\r\n",
        lambda sent: b"HTTP/1.1 101 Switching Protocols\r\nno header\r\n\r\n",
        lambda sent: b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70000,
        lambda sent: b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
)
def test_bad_upstream_answer(answer):
    rig = Rig()
    rig.down(answer(rig.sent))
    assert rig.client.value().startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
    assert rig.upstream.aborted
    assert rig.client.half_closed
    assert (rig.finish().how, rig.statuses) == ("failed", [502])


REFUSAL = b"HTTP/1.1 403 No way\r\nX-A: 1\r\nx-a: 2\r\nContent-Type: text/plain\r\n"


@pytest.mark.parametrize(
    ("framing", "body", "extra"),
    [
        (b"Content-Length: 9\r\n", b"forbidden", b""),
        (b"Content-Length: 9\r\n", b"forbidden", b"junk"),
        (b"Content-Length: 0\r\n", b"", b""),
        (b"Transfer-Encoding: chunked\r\n", b"4\r\nforb\r\n5;x\r\nidden\r\n0\r\n\r\n", b""),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_refusal_is_passed(framing, body, extra, step):
    rig = Rig()
    answer = b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + REFUSAL + framing + b"\r\n" + body + extra
    for pos in range(0, len(answer), step):
        rig.down(answer[pos : pos + step])
    head, _, got = rig.client.value().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 403 No way\r\n")
    assert field(head, b"x-a") == [b"1", b"2"]
    assert framing in head + b"\r\n"
    assert field(head, b"connection") == [b"close"]
    assert got == body
    assert rig.client.half_closed
    assert rig.upstream.disconnecting
    result = rig.finish()
    assert (result.how, result.by, result.status) == ("refused", "upstream", 403)
    assert rig.statuses == [403]


@pytest.mark.parametrize(("kind", "whole"), [(ConnectionDone, True), (ConnectionLost, False)])
def test_refusal_that_ends_with_the_connection(kind, whole):
    rig = Rig()
    rig.down(REFUSAL + b"\r\nforb")
    rig.down(b"idden")
    assert rig.client.value().endswith(b"\r\n\r\nforbidden")
    assert rig.client.open
    rig.upstream_lost(kind)
    assert rig.client.half_closed is whole
    assert rig.client.aborted is not whole
    rig.finish()


def test_refusal_cut_off():
    rig = Rig()
    rig.down(REFUSAL + b"Content-Length: 9\r\n\r\nforb")
    rig.upstream_lost()
    assert rig.client.aborted
    rig.finish()


def test_refusal_backpressure_and_client_leaving():
    rig = Rig()
    rig.down(REFUSAL + b"Content-Length: 900000\r\n\r\nforb")
    rig.client.producer.pauseProducing()
    assert rig.upstream.producerState == "paused"
    rig.client.producer.resumeProducing()
    assert rig.upstream.producerState == "producing"
    rig.client_lost()
    assert rig.upstream.aborted
    assert rig.finish().how == "refused"


def test_client_leaves_while_connecting():
    rig = Rig(connect=False)
    rig.client_lost()
    assert rig.cancelled
    result = rig.finish()
    assert (result.how, result.by, result.status) == ("dropped", "client", 0)
    assert rig.factory.buildProtocol(None) is None


def test_client_leaves_before_the_answer():
    rig = Rig()
    rig.client_lost()
    assert rig.upstream.aborted
    assert rig.results == []
    rig.down(switching(rig.sent))  # too late
    assert rig.finish().by == "client"
    assert rig.client.value() == b""


def test_connect_fails():
    rig = Rig(connect=False)
    rig.connecting.errback(ConnectError("refused"))
    assert rig.client.value().startswith(b"HTTP/1.1 502 ")
    assert rig.finish().status == 502


def test_upstream_closes_instead_of_answering():
    rig = Rig()
    rig.upstream_lost()
    assert rig.client.value().startswith(b"HTTP/1.1 502 ")
    assert rig.finish().status == 502


def test_connect_that_tries_again_after_a_lost_connection():
    """TLS fails after the transport is made: that is for `connect` to judge."""
    rig = Rig(connect=False)
    first = rig.factory.buildProtocol(None)
    first.makeConnection(Wire())
    first.connectionLost(Failure(ConnectionLost()))
    assert rig.client.value() == b""
    rig.connected()
    rig.open()
    assert rig.statuses == [101]
    rig.client_lost()
    rig.finish()


def test_upstream_answers_too_late():
    rig = Rig(handshake_timeout=30)
    rig.clock.advance(29)
    assert rig.client.value() == b""
    rig.clock.advance(1)
    assert rig.client.value().startswith(b"HTTP/1.1 504 ")
    assert rig.upstream.aborted
    assert rig.finish().status == 504


def test_early_frames_are_kept_in_order():
    one, two, three = (frame(1, text, mask=MASK) for text in (b"one", b"t\r\n\r\nwo", b"three"))
    rig = Rig(leftover=one[:5])
    rig.up(one[5:] + two)
    assert rig.upstream.value() == b""
    rig.open()
    rig.up(three)
    assert rig.upstream.value() == one + two + three
    rig.client_lost()
    assert rig.finish().messages_up == 3


def test_early_frames_are_bounded():
    rig = Rig(connect=False)
    rig.up(b"\x82\xff" + struct.pack("!Q", MIB) + MASK + b"x" * EARLY_LIMIT)
    assert rig.client.producerState == "paused"
    rig.connected()
    rig.open()
    assert rig.client.producerState == "producing"
    assert len(rig.upstream.value()) == EARLY_LIMIT + 14
    rig.client_lost()
    rig.finish()


def test_frames_are_passed_as_they_are():
    """Fragments, FIN bits, control frames between them, empty ones, every form of the length."""
    rig = Rig()
    rig.open()
    down = [
        frame(1, b"a" * 125, fin=False),
        frame(9, b"ping"),
        frame(0, b"", fin=False),
        frame(10, b"unasked"),
        frame(0, b"\xff" * 126),  # not UTF-8: not our business
        frame(2, b"b" * 65535),
        frame(2, b"c" * 65536, fin=False),
        frame(0),
        frame(1),
        frame(9),
    ]
    for data in down:
        rig.down(data)
    assert rig.client.value() == b"".join(down)
    up = [
        frame(2, b"a" * 70000, fin=False, mask=MASK),
        frame(0, b"b" * 300, mask=os.urandom(4)),
        frame(1, mask=MASK),
    ]
    for data in up:
        rig.up(data)
    assert rig.upstream.value() == b"".join(up)
    rig.upstream.clear()
    rig.up(frame(9, b"hi", mask=MASK) + frame(10, mask=MASK) + frame(10, b"x" * 125, mask=MASK))
    assert rig.upstream.value()[1] & 0x80  # masked
    assert frames(rig.upstream.value()) == [
        (9, True, b"hi"),
        (10, True, b""),
        (10, True, b"x" * 125),
    ]
    rig.client_lost()
    result = rig.finish()
    assert (result.messages_up, result.messages_down) == (2, 4)
    assert (result.bytes_up, result.bytes_down) == (70300, 125 + 126 + 65535 + 65536)


CODES = [
    (None, b""),
    (1000, b""),
    (1000, "tschüß".encode()),
    (1001, b"going away"),
    (1009, b"too big"),
    (1011, b"x" * 123),
    (1012, b""),
    (1014, b"bad gateway"),
    (2999, b""),
    (3000, b""),
    (4999, b"own"),
]


@pytest.mark.parametrize(("code", "reason"), CODES)
@pytest.mark.parametrize("by", ["client", "upstream"])
def test_close_codes(code, reason, by):
    rig = Rig()
    rig.open()
    payload = b"" if code is None else struct.pack("!H", code) + reason
    if by == "client":
        rig.up(close_frame(code, reason, MASK) + frame(1, b"too late", mask=MASK))
        assert frames(rig.upstream.value()) == [(8, True, payload)]
        rig.down(frame(1, b"still"))  # the client may still be told something
        assert rig.client.open and rig.upstream.open
        rig.down(close_frame(4000, b"reply"))
        assert frames(rig.client.value()) == [(1, True, b"still"), (8, True, b"\x0f\xa0reply")]
    else:
        rig.down(close_frame(code, reason) + frame(1, b"too late"))
        assert frames(rig.client.value()) == [(8, True, payload)]
        rig.up(close_frame(4000, b"reply", MASK))
        assert frames(rig.upstream.value()) == [(8, True, b"\x0f\xa0reply")]
    assert rig.client.disconnecting and not rig.client.aborted
    assert rig.upstream.disconnecting and not rig.upstream.aborted
    result = rig.finish()
    assert (result.how, result.by) == ("closed", by)
    assert (result.close_code, result.close_reason) == (code, reason)


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1015, 5000, 65535])
def test_close_codes_that_must_not_be_sent(code):
    rig = Rig()
    rig.open()
    rig.up(close_frame(code, b"", MASK))
    assert frames(rig.client.value())[0][2][:2] == struct.pack("!H", 1002)
    assert rig.finish().how == "violation"


def test_close_then_lost_at_once():
    """A page that is reloaded: the upstream learns of it now, not after a time-out."""
    rig = Rig()
    rig.open()
    rig.up(close_frame(1001, b"", MASK))
    rig.client_lost(ConnectionLost)
    assert frames(rig.upstream.value()) == [(8, True, b"\x03\xe9")]
    assert rig.upstream.half_closed
    assert rig.finish().close_code == 1001


def test_close_without_an_answer():
    rig = Rig(close_timeout=10)
    rig.open()
    rig.down(close_frame(1000))
    rig.clock.advance(10)
    assert rig.client.aborted and rig.upstream.aborted
    rig.finish()


def test_close_reaches_a_peer_that_is_still_sending():
    """ComfyUI closes with 1009 in the middle of a big message: the client must get to see it."""
    rig = Rig()
    rig.open()
    rig.up(b"\x82\xff" + struct.pack("!Q", MIB) + MASK + b"x" * 1000)
    rig.down(close_frame(1009, b"too big"))
    rig.upstream_lost(ConnectionLost)
    assert frames(rig.client.value()) == [(8, True, b"\x03\xf1too big")]
    rig.up(b"x" * 1000)
    assert rig.client.half_closed and not rig.client.disconnecting
    rig.clock.advance(10)
    assert rig.client.aborted
    rig.finish()


@pytest.mark.parametrize("by", ["client", "upstream"])
@pytest.mark.parametrize("kind", [ConnectionDone, ConnectionLost])
def test_one_dropped_other_dropped(by, kind):
    rig = Rig()
    rig.open()
    rig.up(frame(2, b"last words", mask=MASK)[:-2])
    (rig.client_lost if by == "client" else rig.upstream_lost)(kind)
    other = rig.upstream if by == "client" else rig.client
    assert other.disconnecting
    assert other.aborted is (kind is ConnectionLost)
    result = rig.finish()
    assert (result.how, result.by, result.close_code) == ("dropped", by, None)


def test_dropped_peer_that_does_not_go():
    rig = Rig()
    rig.open()
    rig.client_lost()
    assert not rig.upstream.aborted
    rig.clock.advance(10)
    assert rig.upstream.aborted
    rig.finish()


@pytest.mark.parametrize(
    ("by", "data"),
    [
        ("client", frame(1, b"unmasked")),
        ("client", frame(0x41, b"reserved bit", mask=MASK)),
        ("client", frame(3, b"opcode", mask=MASK)),
        ("client", frame(11, b"opcode", mask=MASK)),
        ("client", frame(0, b"continues nothing", mask=MASK)),
        ("client", frame(9, b"fragmented", fin=False, mask=MASK)),
        ("client", frame(9, b"x" * 126, mask=MASK)),
        ("client", frame(8, b"\x03", mask=MASK)),
        ("client", frame(1, b"a", fin=False, mask=MASK) + frame(1, b"b", mask=MASK)),
        ("client", b"\x82\xfe\x00\x05" + MASK + b"abcde"),
        ("upstream", frame(1, b"masked", mask=MASK)),
        ("upstream", frame(0x41, b"reserved bit")),
        ("upstream", frame(5, b"opcode")),
    ],
)
def test_violations(by, data):
    rig = Rig()
    rig.open()
    (rig.up if by == "client" else rig.down)(data + frame(1, b"unseen", mask=MASK))
    for wire in (rig.client, rig.upstream):
        opcode, _, payload = frames(wire.value())[-1]
        assert (opcode, payload[:2]) == (8, struct.pack("!H", 1002))
        assert wire.half_closed
    result = rig.finish()
    assert (result.how, result.by) == ("violation", by)


def test_violation_in_the_middle_of_the_other_ends_frame():
    rig = Rig()
    rig.open()
    rig.down(frame(2, b"x" * 100)[:50])
    rig.up(frame(3, mask=MASK))
    assert rig.client.value() == frame(2, b"x" * 100)[:50]  # nothing inside a frame
    assert rig.client.aborted
    assert frames(rig.upstream.value())[0][0] == 8
    rig.finish()


def test_shutdown():
    rig = Rig()
    rig.open()
    rig.down(frame(2, b"x" * 100)[:50])
    rig.relay.close(1001, "shutdown")
    said = (8, True, b"\x03\xe9shutdown")
    assert frames(rig.upstream.value()) == [said]
    rig.down(frame(2, b"x" * 100)[50:] + frame(1, b"not any more"))
    assert frames(rig.client.value()) == [(2, True, b"x" * 100), said]
    rig.up(frame(1, b"nor this", mask=MASK) + close_frame(1001, b"", MASK))
    assert rig.client.disconnecting
    assert frames(rig.upstream.value()) == [said]
    rig.down(close_frame(1001))
    assert rig.upstream.disconnecting and not rig.upstream.aborted
    result = rig.finish()
    assert (result.how, result.by, result.close_code) == ("closed", "relay", 1001)


def test_shutdown_is_bounded():
    rig = Rig(close_timeout=5)
    rig.open()
    rig.relay.close()
    rig.clock.advance(5)
    assert rig.client.aborted and rig.upstream.aborted
    rig.finish()


def test_shutdown_before_the_answer():
    rig = Rig(connect=False)
    rig.relay.close()
    assert rig.client.value().startswith(b"HTTP/1.1 503 ")
    rig.finish()


def test_abort():
    rig = Rig()
    rig.open()
    rig.relay.abort()
    assert rig.client.aborted and rig.upstream.aborted
    rig.up(frame(1, b"x", mask=MASK))
    assert rig.upstream.value() == b""
    result = rig.finish()
    assert (result.how, result.by) == ("aborted", "relay")


def test_text_tap():
    rig = Rig()
    rig.open()
    rig.down(frame(1, b'{"type"', fin=False) + frame(9, b"ping") + frame(0, b": 1}"))
    rig.down(frame(2, b"binary"))
    rig.down(frame(1, b"x" * TEXT_LIMIT))
    rig.down(frame(1, b"x" * TEXT_LIMIT, fin=False) + frame(0, b"y"))
    rig.down(frame(1, b"x" * (TEXT_LIMIT + 1)))
    rig.down(frame(1))
    rig.up(frame(1, b"from the client", mask=MASK))
    assert rig.texts == [b'{"type": 1}', b"x" * TEXT_LIMIT, b""]
    rig.client_lost()
    rig.finish()


def test_backpressure_both_ways():
    rig = Rig()
    rig.open()
    rig.client.producer.pauseProducing()
    assert (rig.upstream.producerState, rig.client.producerState) == ("paused", "producing")
    rig.client.producer.resumeProducing()
    rig.upstream.producer.pauseProducing()
    assert (rig.upstream.producerState, rig.client.producerState) == ("producing", "paused")
    rig.upstream.producer.resumeProducing()
    assert rig.client.producerState == "producing"
    rig.client_lost()
    rig.finish()


def split(data, cuts):
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


PAYLOADS = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([125, 126, 5000, 65535, 65536, 70000]).map(
        lambda size: b"\r\n\r\n" * (size // 4)
    ),
)
MESSAGES = st.lists(
    st.tuples(st.sampled_from([1, 2]), st.lists(PAYLOADS, min_size=1, max_size=3), st.booleans()),
    max_size=5,
)


def stream(messages, mask):
    """The bytes of some messages, each in fragments, some with a ping between them."""
    out = []
    for opcode, parts, ping in messages:
        for index, part in enumerate(parts):
            out.append(frame(0 if index else opcode, part, fin=index == len(parts) - 1, mask=mask))
            if ping:
                out.append(frame(9, b"p", mask=mask))
    return b"".join(out)


@settings(max_examples=150, deadline=None)
@given(
    up=MESSAGES,
    down=MESSAGES,
    cuts_up=st.lists(st.integers(0, 1 << 20), max_size=12),
    cuts_down=st.lists(st.integers(0, 1 << 20), max_size=12),
    early=st.integers(0, 3),
)
def test_any_split_gives_the_same(up, down, cuts_up, cuts_down, early):
    up, down = stream(up, MASK), stream(down, None)
    pieces = split(up, cuts_up)
    rig = Rig(leftover=b"".join(pieces[:early]))
    answer = switching(rig.sent)
    for piece in split(answer + down, cuts_down):
        rig.down(piece)
    for piece in pieces[early:]:
        rig.up(piece)
    head, _, got = rig.client.value().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    assert got == down
    assert frames(rig.upstream.value()) == frames(up)
    rig.client_lost()
    rig.finish()


# ---- over real sockets


class Peers:
    """Real WebSocket programs on an event loop of their own thread."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.running = set()  # else nothing but cycles may refer to what is being waited for
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def run(self, coroutine):
        """A Deferred of what the coroutine does over there."""
        done = Deferred()
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)

        def finished(future):
            self.running.discard(future)
            error = future.exception()
            if error is None:
                reactor.callFromThread(done.callback, future.result())
            else:
                reactor.callFromThread(done.errback, Failure(error))

        self.running.add(future)
        future.add_done_callback(finished)
        return done

    def stop(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        left = asyncio.all_tasks(self.loop)
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()
        assert not left


@pytest.fixture(scope="module")
def peers():
    peers = Peers()
    yield peers
    peers.stop()


class Channel(Protocol):
    """As much of an HTTP channel as it takes to get a relay going."""

    received = b""

    def dataReceived(self, data):
        self.received += data
        head, found, rest = self.received.partition(b"\r\n\r\n")
        if found:
            head += found
            parsed = parse_request(head)
            assert is_websocket_upgrade(parsed.method, (1, parsed.minor), parsed.received)
            endpoint = HostnameEndpoint(reactor, "127.0.0.1", self.factory.upstream_port)
            relay = start_relay(
                self.transport,
                head,
                rest,
                upgrade_request(head),
                endpoint.connect,
                clock=self.factory.clock,
                on_text=self.factory.texts.append,
            )
            self.factory.relays.append(relay)


@attrs.define
class Front:
    """Listens for clients and relays them to one upstream."""

    factory: Factory
    port: int

    @property
    def relays(self):
        return self.factory.relays


@pytest.fixture
def front():
    """A function that makes a Front for an upstream's port."""
    ports, made = [], []

    def make(upstream_port, tls=None, clock=reactor):
        factory = Factory.forProtocol(Channel)
        factory.noisy = False
        factory.upstream_port = upstream_port
        factory.clock = clock
        factory.relays = []
        factory.texts = []
        if tls is None:
            port = reactor.listenTCP(0, factory, interface="127.0.0.1")
        else:
            port = reactor.listenSSL(0, factory, tls, interface="127.0.0.1")
        ports.append(port)
        made.append(factory)
        return Front(factory, port.getHost().port)

    yield make
    for port in ports:
        pytest_twisted.blockon(port.stopListening())
    for factory in made:
        for relay in factory.relays:
            if not relay.done.called:
                relay.abort()
                pytest_twisted.blockon(relay.done)
    pytest_twisted.blockon(deferLater(reactor, 0, lambda: None))
    assert [call for call in reactor.getDelayedCalls() if call.active()] == []


async def until(condition):
    """Let the reactor run until something is so; the run's own limit is the time-out."""
    while not condition():
        await deferLater(reactor, 0, lambda: None)


def in_test(function):
    return pytest_twisted.ensureDeferred(function)


@contextlib.asynccontextmanager
async def websockets_server(handler, **options):
    async with websockets.asyncio.server.serve(
        handler, "127.0.0.1", 0, max_size=None, ping_interval=None, **options
    ) as server:
        yield server.sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def aiohttp_server(handler):
    async def handle(request):
        ws = aiohttp.web.WebSocketResponse(max_msg_size=0, protocols=("v1",))
        await ws.prepare(request)
        await handler(ws)
        return ws

    app = aiohttp.web.Application()
    app.router.add_get("/{tail:.*}", handle)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield site._server.sockets[0].getsockname()[1]
    await runner.cleanup()


@pytest.fixture
def serve(peers):
    started = []

    async def start(manager):
        port = await peers.run(manager.__aenter__())
        started.append(manager)
        return port

    yield start
    for manager in started:
        pytest_twisted.blockon(peers.run(manager.__aexit__(None, None, None)))


def client(port, path="/ws", **options):
    options.setdefault("ping_interval", None)
    scheme = "wss" if options.get("ssl") else "ws"
    return websockets.asyncio.client.connect(
        f"{scheme}://127.0.0.1:{port}{path}", max_size=None, proxy=None, **options
    )


async def websockets_echo(ws):
    async for message in ws:
        await ws.send(message)


async def aiohttp_echo(ws):
    async for message in ws:
        if message.type is aiohttp.WSMsgType.TEXT:
            await ws.send_str(message.data)
        else:
            await ws.send_bytes(message.data)


@pytest.mark.parametrize("kind", ["websockets", "aiohttp"])
@in_test
async def test_echo_with_websockets_client(kind, peers, serve, front):
    """H09: permessage-deflate is offered by this client and understood by these servers."""
    port = await serve(
        websockets_server(websockets_echo, subprotocols=["v1"])
        if kind == "websockets"
        else aiohttp_server(aiohttp_echo)
    )
    relays = front(port)

    async def talk():
        async with client(relays.port, subprotocols=["v2", "v1"]) as ws:
            assert ws.subprotocol == "v1"
            assert ws.protocol.extensions == []
            for message in ("héllo", b"\x00\xff" * 1000, "", b""):
                await ws.send(message)
                assert await ws.recv() == message
            await (await ws.ping(b"alive?"))

    await peers.run(talk())
    result = await relays.relays[0].done
    assert (result.how, result.by, result.close_code) == ("closed", "client", 1000)
    assert (result.messages_up, result.messages_down) == (4, 4)


@pytest.mark.parametrize("kind", ["websockets", "aiohttp"])
@in_test
async def test_echo_with_aiohttp_client(kind, peers, serve, front):
    port = await serve(
        websockets_server(websockets_echo) if kind == "websockets" else aiohttp_server(aiohttp_echo)
    )
    relays = front(port)

    async def talk():
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"http://127.0.0.1:{relays.port}/ws", compress=15) as ws,
        ):
            await ws.send_str("héllo")
            assert await ws.receive_str() == "héllo"
            await ws.send_bytes(b"x" * 100000)
            assert await ws.receive_bytes() == b"x" * 100000
            await ws.close(code=4001, message=b"enough")

    await peers.run(talk())
    result = await relays.relays[0].done
    assert (result.close_code, result.close_reason) == (4001, b"enough")


BINARY = os.urandom(4096) * 4096  # 16 MiB
TEXT = "grüße, " * (5 * MIB // 8)


def pieces(message, size=65536):
    return (message[pos : pos + size] for pos in range(0, len(message), size))


@in_test
async def test_f07_big_messages_to_the_client(peers, serve, front):
    answered = asyncio.Event()

    async def upstream(ws):
        await ws.send(BINARY)
        await ws.send(TEXT)
        await ws.send(pieces(BINARY))
        await ws.send(pieces(TEXT))
        await (await ws.ping(b"still there?"))
        answered.set()
        await ws.wait_closed()

    relays = front(await serve(websockets_server(upstream)))

    async def talk():
        async with client(relays.port) as ws:
            for expected in (BINARY, TEXT):
                assert await ws.recv() == expected
            for expected in (BINARY, TEXT):
                count, got = 0, []
                async for part in ws.recv_streaming():
                    count += 1
                    got.append(part)
                assert type(expected)().join(got) == expected
                assert count >= len(expected) // 65536
            await answered.wait()
            await ws.send("open")

    await peers.run(talk())
    result = await relays.relays[0].done
    assert (result.messages_down, result.messages_up, result.close_code) == (4, 1, 1000)


@in_test
async def test_big_messages_to_the_upstream(peers, serve, front):
    got = []

    async def upstream(ws):
        async for message in ws:
            got.append(message)

    relays = front(await serve(websockets_server(upstream)))

    async def talk():
        async with client(relays.port) as ws:
            await ws.send(BINARY)
            await ws.send(TEXT)
            await ws.send(pieces(BINARY))
            await (await ws.ping())

    await peers.run(talk())
    await relays.relays[0].done
    assert got == [BINARY, TEXT, BINARY]


@pytest.mark.parametrize(
    ("code", "reason"), [(1000, ""), (1001, "bye"), (1009, "big"), (3000, ""), (4999, "own")]
)
@in_test
async def test_close_code_of_a_real_server(code, reason, peers, serve, front):
    async def upstream(ws):
        await ws.close(code, reason)

    relays = front(await serve(websockets_server(upstream)))

    async def talk():
        async with client(relays.port) as ws:
            await ws.wait_closed()
            return ws.close_code, ws.close_reason

    assert await peers.run(talk()) == (code, reason)
    assert (await relays.relays[0].done).by == "upstream"


@in_test
async def test_refusal_of_a_real_server(peers, serve, front):
    """H09: an Origin check answers 403, and its body is what the client sees."""

    async def upstream(ws):
        raise AssertionError

    relays = front(await serve(websockets_server(upstream, origins=["http://box:9188"])))

    async def talk():
        with pytest.raises(websockets.exceptions.InvalidStatus) as info:
            async with client(relays.port, origin="http://evil.test"):
                pass
        return info.value.response

    response = await peers.run(talk())
    assert response.status_code == 403
    assert b"Origin" in response.body
    assert (await relays.relays[0].done).how == "refused"


@contextlib.asynccontextmanager
async def raw_server(handler):
    """A plain TCP upstream that has said 101 when the handler gets its streams."""

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(switching(head))
        try:
            await handler(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=1 << 16)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


async def raw_client(port, **options):
    sock = socket.socket()
    for option, value in options.items():
        sock.setsockopt(socket.SOL_SOCKET, getattr(socket, option), value)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock)
    writer.write(request_head())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    return reader, writer


def reset(writer):
    """Close with RST."""
    writer.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )
    writer.transport.abort()


async def ended(reader):
    """How a connection ended, after the bytes that came: "FIN" or "RST"."""
    try:
        return await reader.read(), "FIN"
    except ConnectionResetError:
        return b"", "RST"


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("by", ["client", "upstream"])
@in_test
async def test_abrupt_ends(by, how, peers, serve, front):
    over = peers.loop.create_future()
    go = asyncio.Event()

    async def upstream(reader, writer):
        if by == "upstream":
            await go.wait()
            if how == "RST":
                reset(writer)
        else:
            over.set_result(await ended(reader))

    relays = front(await serve(raw_server(upstream)))

    async def talk():
        reader, writer = await raw_client(relays.port)
        if by == "upstream":
            go.set()
            over.set_result(await ended(reader))
        elif how == "RST":
            reset(writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return await over

    assert await peers.run(talk()) == (b"", how)
    result = await relays.relays[0].done
    assert (result.how, result.by) == ("dropped", by)


def unsent(transport):
    """Bytes that a Twisted TCP transport holds."""
    return len(transport.dataBuffer) - transport.offset + transport._tempDataLen


def watch_buffer(transport):
    """Note the most bytes that it ever holds."""
    most = [0]
    write, sequence = transport.write, transport.writeSequence

    def noted(do):
        def call(data):
            do(data)
            most[0] = max(most[0], unsent(transport))

        return call

    transport.write, transport.writeSequence = noted(write), noted(sequence)
    return most


@pytest.mark.parametrize("direction", ["down", "up"])
@in_test
async def test_slow_reader_bounds_memory(direction, peers, serve, front):
    """A frame of 64 MiB to a peer that reads nothing for a while: its source is paused."""
    mask = None if direction == "down" else MASK
    head = frame(2, b"", mask=mask)
    head = head[:1] + bytes([head[1] | 127]) + struct.pack("!Q", 64 * MIB) + (mask or b"")
    block = os.urandom(64) * 1024
    start, read = asyncio.Event(), asyncio.Event()

    async def send(writer):
        await start.wait()
        writer.write(head)
        for _ in range(1024):
            writer.write(block)
            await writer.drain()

    async def receive(reader):
        await read.wait()
        assert await reader.readexactly(len(head)) == head
        for _ in range(1024):
            assert await reader.readexactly(len(block)) == block

    async def upstream(reader, writer):
        await (send(writer) if direction == "down" else receive(reader))
        await reader.read()

    relays = front(await serve(raw_server(upstream)))

    async def talk():
        reader, writer = await raw_client(relays.port, SO_RCVBUF=65536)
        await (receive(reader) if direction == "down" else send(writer))
        writer.close()
        await writer.wait_closed()

    async def tell(event):
        event.set()

    talking = peers.run(talk())
    await until(lambda: relays.relays and relays.relays[0].phase == "open")
    relay = relays.relays[0]
    sink, source = relay.client, relay._upstream
    assert sink.transport.getTcpNoDelay() and source.transport.getTcpNoDelay()
    if direction == "up":
        sink, source = source, sink
    most = watch_buffer(sink.transport)
    await peers.run(tell(start))
    await until(lambda: source.paused)
    assert source.octets < 32 * MIB
    await peers.run(tell(read))
    await talking
    result = await relay.done
    assert (result.bytes_down, result.bytes_up)[direction == "up"] == 64 * MIB
    assert 65536 < most[0] < 512 * 1024


@in_test
async def test_client_vanishes_while_not_read(peers, serve, front):
    """The upstream is stuck, so nothing is read from the client; its reset is noticed anyway."""
    clock = Clock()
    over = peers.loop.create_future()
    read = asyncio.Event()

    async def upstream(reader, writer):
        await read.wait()
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(MIB):
                pass
        over.set_result(None)

    relays = front(await serve(raw_server(upstream)), clock=clock)
    vanish = asyncio.Event()

    async def talk():
        _, writer = await raw_client(relays.port)
        writer.write(b"\x82\xff" + struct.pack("!Q", 64 * MIB) + MASK + bytes(64 * MIB))
        await vanish.wait()
        reset(writer)
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def tell(event):
        event.set()

    talking = peers.run(talk())
    await until(lambda: relays.relays and relays.relays[0].client.paused)
    await peers.run(tell(vanish))
    await talking
    relay = relays.relays[0]

    def looked():
        # More than once: the kernel may take a little more for the upstream, so that reading goes on and stops again.
        clock.advance(1.0)
        return relay.done.called

    await until(looked)
    result = await relay.done
    assert (result.how, result.by) == ("dropped", "client")
    assert clock.getDelayedCalls() == []
    await peers.run(tell(read))
    await peers.run(asyncio.wait_for(over, 60))


def certificate():
    """A key and a self-signed certificate for 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from OpenSSL import crypto

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime(2020, 1, 1)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=36500))
        .sign(key, hashes.SHA256())
    )
    return crypto.PKey.from_cryptography_key(key), crypto.X509.from_cryptography(cert)


@in_test
async def test_client_over_tls(peers, serve, front):
    key, cert = certificate()
    port = await serve(websockets_server(websockets_echo))
    relays = front(port, tls=CertificateOptions(privateKey=key, certificate=cert))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE

    async def talk():
        async with client(relays.port, ssl=context) as ws:
            for message in ("hello", BINARY):
                await ws.send(message)
                assert await ws.recv() == message
            await ws.close(3001, "done")

    await peers.run(talk())
    assert (await relays.relays[0].done).close_code == 3001
