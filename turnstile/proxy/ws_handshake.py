"""The opening handshake of a relayed WebSocket: what is asked, what is answered.

Pure functions over bytes, no I/O. RFC 6455 section 4 is the source, RFC 9110 and 9112 where plain
HTTP is meant. The relay that uses them is :mod:`turnstile.proxy.websocket`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable

import attrs

from turnstile.proxy.errors import error_response
from turnstile.proxy.http1 import MAX_HEAD, BadMessage, Headers, ResponseHead, parse_response

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")


@attrs.frozen
class HandshakeError:
    """A client handshake that is refused before anything is connected."""

    status: int
    reason: str


def values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """Every value of a header, in order. *name* is in lower case."""
    return [value.strip(b" \t") for key, value in headers if key.lower() == name]


def tokens(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """The comma-separated members of a header over all its repeats, empty ones left out."""
    return [
        part
        for value in values(headers, name)
        for part in (piece.strip(b" \t") for piece in value.split(b","))
        if part
    ]


def is_websocket_upgrade(method: bytes, version: bytes | tuple[int, int], headers: Headers) -> bool:
    """Whether a request asks for a WebSocket (RFC 6455 section 4.2.1, points 1, 3 and 4).

    Liberal about how ``Connection`` is spelled: ``keep-alive, Upgrade`` and repeats are in use.
    """
    return (
        method == b"GET"
        and version in (b"HTTP/1.1", (1, 1))
        and any(token.lower() == b"websocket" for token in tokens(headers, b"upgrade"))
        and any(token.lower() == b"upgrade" for token in tokens(headers, b"connection"))
    )


def check_client(headers: Headers) -> HandshakeError | None:
    """What is wrong with a client's handshake, if anything (RFC 6455 sections 4.2.1 and 4.4)."""
    if any(value != b"0" for value in values(headers, b"content-length")) or values(
        headers, b"transfer-encoding"
    ):
        return HandshakeError(400, "a WebSocket handshake has no body")
    versions = values(headers, b"sec-websocket-version")
    if not versions:
        return HandshakeError(400, "Sec-WebSocket-Version is missing")
    if versions != [b"13"]:
        return HandshakeError(426, "only WebSocket version 13 is spoken here")
    keys = values(headers, b"sec-websocket-key")
    if len(keys) != 1:
        return HandshakeError(400, "exactly one Sec-WebSocket-Key is needed")
    try:
        good = len(keys[0]) == 24 and len(base64.b64decode(keys[0], validate=True)) == 16
    except (binascii.Error, ValueError):
        good = False
    if not good:
        return HandshakeError(400, "Sec-WebSocket-Key is not 16 bytes in base64")
    if not all(_TOKEN.match(name) for name in tokens(headers, b"sec-websocket-protocol")):
        return HandshakeError(400, "Sec-WebSocket-Protocol is malformed")
    return None


def subprotocols(headers: Headers) -> list[str]:
    """The client's subprotocols in its order, each once."""
    names = tokens(headers, b"sec-websocket-protocol")
    return list(dict.fromkeys(name.decode("ascii") for name in names))


def local_request(headers: Headers) -> bytes:
    """The least handshake that says what a (checked) client said, for autobahn's own parser.

    The client's real head goes to the upstream, which judges Host, Origin and all else; autobahn
    needs only the key and the subprotocols. Extensions are left out, so none is accepted.
    """
    lines = [
        b"GET / HTTP/1.1",
        b"Host: relay",
        b"Upgrade: websocket",
        b"Connection: Upgrade",
        b"Sec-WebSocket-Version: 13",
        b"Sec-WebSocket-Key: " + values(headers, b"sec-websocket-key")[0],
    ]
    names = subprotocols(headers)
    if names:
        lines.append(b"Sec-WebSocket-Protocol: " + ",".join(names).encode("ascii"))
    return b"\r\n".join(lines) + b"\r\n\r\n"


def upstream_request(
    target: bytes, upstream_headers: Headers, client_headers: Headers, key: bytes
) -> bytes:
    """The request head for the upstream: the caller's headers verbatim, then the handshake's."""
    lines = [b"GET " + target + b" HTTP/1.1"]
    lines += [
        name + b": " + value
        for name, value in upstream_headers
        if name.lower() not in (b"connection", b"upgrade")
        and not name.lower().startswith(b"sec-websocket-")
    ]
    lines += [
        b"Upgrade: websocket",
        b"Connection: Upgrade",
        b"Sec-WebSocket-Version: 13",
        b"Sec-WebSocket-Key: " + key,
    ]
    lines += [
        b"Sec-WebSocket-Protocol: " + value
        for value in values(client_headers, b"sec-websocket-protocol")
        if value
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def parse_answer(data: bytes, end: int) -> ResponseHead:
    """Parse the upstream's answer, whose head ends at *end*.

    :raises BadMessage: if it is no answer, or its head too long.
    """
    if not 4 <= end <= MAX_HEAD:
        raise BadMessage("the head of the answer is too long", 502)
    return parse_response(data[:end])


def _lines(headers: Headers) -> bytes:
    return b"".join(name + b": " + value + b"\r\n" for name, value in headers)


def answer_headers(head: ResponseHead) -> bytes:
    """What of a 101 goes to the client besides the handshake, which is between neighbours."""
    return _lines(
        [field for field in head.fields if not field[0].lower().startswith(b"sec-websocket-")]
    )


def local_response(raw: bytes) -> bytes:
    """The handshake's part of a 101, for autobahn's own verification of it."""
    line, *fields = raw[:-4].split(b"\r\n")
    kept = [
        field
        for field in fields
        if re.match(rb"(upgrade|connection|sec-websocket-[^:]*):", field, re.IGNORECASE)
    ]
    version = line.split(b" ", 1)[0]
    return b"\r\n".join([version + b" 101 Switching Protocols", *kept, b"", b""])


def refusal_head(head: ResponseHead) -> bytes:
    """The head of an answer that is no 101. Its body is passed on framed as it is."""
    framing: Headers = [(b"Connection", b"close")]
    if head.te_chunked:
        framing.append((b"Transfer-Encoding", b"chunked"))
    elif head.content_length is not None:
        framing.append((b"Content-Length", b"%d" % head.content_length))
    line = b"HTTP/1.1 %d %s\r\n" % (head.status, head.reason)
    return line + _lines(head.fields) + _lines(framing) + b"\r\n"


def error(status: int, reason: str, target: bytes) -> bytes:
    """An answer of turnstile's own, after which the connection ends."""
    answer = error_response(status, reason, target, keep_alive=False)
    if status == 426:  # RFC 9110 section 15.5.22, RFC 6455 section 4.4
        answer = answer.replace(
            b"\r\nConnection: close\r\n",
            b"\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
            1,
        )
    return answer
