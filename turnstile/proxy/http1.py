"""HTTP/1.1 heads and message framing, strict and without I/O (RFC 9112).

Heads are always parsed whole and written anew; bodies are only *framed*: the trackers say how many of the bytes at
hand belong to the message, and those bytes are forwarded as they are. Whatever two parsers could read in two ways
is refused, since such a message may carry a second request past the lock (request smuggling).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

Headers = list[tuple[bytes, bytes]]

#: The most bytes of a request or response head.
MAX_HEAD: Final = 64 * 1024
#: The most header fields of a head.
MAX_FIELDS: Final = 256
#: The most bytes of one chunk-size line, extensions included.
MAX_CHUNK_LINE: Final = 4096
#: The most bytes of a chunked body's trailer section.
MAX_TRAILERS: Final = 16 * 1024

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
# Methods are case-sensitive, and no engine has one in small letters: what reads "post" as POST would be asked past the
# table that does not. The target is opaque here, but for what RFC 9112 section 3.2 keeps out of it: white space,
# controls, a fragment.
_METHOD = rb"[!#$%&'*+\-.^_`|~0-9A-Z]+"
_REQUEST_LINE = re.compile(rb"(" + _METHOD + rb") ([!-\"$-~\x80-\xff]+) HTTP/1\.([01])\r\n")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: ([\t\x20-\x7e\x80-\xff]*))?\r\n")
# Anchored behind a line feed, so that a match never begins inside a line that is not a field. The first does not match
# values that end in white space, which would have to be cut off.
_FIELD = re.compile(rb"(?<=\n)(" + _TOKEN + rb"):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)(?<![ \t])\r\n")
_PADDED_FIELD = re.compile(rb"(?<=\n)(" + _TOKEN + rb"):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)\r\n")
_EMPTY_LINES = re.compile(rb"(?:\r\n)+")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[^\x00-\x08\x0a-\x1f\x7f]*)?\r\n")
_TRAILERS = re.compile(rb"(?:" + _TOKEN + rb":[^\x00-\x08\x0a-\x1f\x7f]*\r\n)*\r\n")
_HOST = re.compile(
    rb"(?:\[[0-9A-Fa-f:.%A-Za-z]+\]|[A-Za-z0-9._~!$&'()*+,;=%\-\x80-\xff]*)(?::[0-9]*)?"
)
_ABSOLUTE = re.compile(rb"[Hh][Tt][Tt][Pp][Ss]?://([^/?]*)")

_colon: Final = b": ".join

#: RFC 9110 section 7.6.1, and the older names that proxies must not pass on either.
HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"transfer-encoding",
        b"upgrade",
    )
)
#: What calls of our own to engines carry (:mod:`turnstile.engines.client`).
CALL_MARK: Final = b"x-turnstile-call"
# Fields that decide how a message is read; a Connection header cannot name them away.
_FRAMING_FIELDS: Final = frozenset((b"content-length", b"transfer-encoding", b"host"))
_REQUEST_SPECIAL: Final = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"x-forwarded-for",
    b"x-forwarded-proto",
    b"x-forwarded-host",
    CALL_MARK,
}
_RESPONSE_SPECIAL: Final = (HOP_BY_HOP - {b"proxy-authenticate"}) | {
    b"content-length",
    b"x-accel-buffering",
    b"content-type",
}


class BadMessage(Exception):
    """The peer's bytes are not a message that can be read in one way only.

    :ivar status: the status to answer a client with.
    """

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status


class Framing:
    """Finds the end of a message's body."""

    __slots__ = ("done",)
    done: bool

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        """How many of the bytes at the start of ``data`` belong to the message and are complete in themselves.

        The rest is either the next message (``done`` is set) or to be given again with more bytes after it. Pieces of
        the body proper are appended to ``payload`` where it is given.

        :raises BadMessage: if the framing is broken.
        """
        raise NotImplementedError


class NoBody(Framing):
    """A message that ends with its head."""

    __slots__ = ()

    def __init__(self) -> None:
        self.done = True

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        return 0


class LengthBody(Framing):
    """A body of known length (Content-Length)."""

    __slots__ = ("left",)

    def __init__(self, length: int) -> None:
        self.left = length
        self.done = length == 0

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        size = len(data)
        if size >= self.left:
            size = self.left
            self.done = True
        self.left -= size
        if payload is not None and size:
            payload.append(data if size == len(data) else data[:size])
        return size


class UntilClose(Framing):
    """A response body that ends with the connection."""

    __slots__ = ()

    def __init__(self) -> None:
        self.done = False

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        if payload is not None:
            payload.append(data)
        return len(data)


class ChunkedBody(Framing):
    """A body in the chunked coding (RFC 9112 section 7.1), its trailer section included."""

    __slots__ = ("_data_left", "_state")
    _SIZE, _DATA, _DATA_END = range(3)

    def __init__(self) -> None:
        self.done = False
        self._state = self._SIZE
        self._data_left = 0

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        pos = 0
        end = len(data)
        state = self._state
        while pos < end:
            if state == self._SIZE:
                match = _CHUNK_LINE.match(data, pos)
                if match is None:
                    if _refuse_partial(data, pos, MAX_CHUNK_LINE):
                        raise BadMessage("invalid chunk size line")
                    break
                begin = match.end()
                if begin - pos > MAX_CHUNK_LINE:
                    raise BadMessage("chunk size line too long")
                size = int(match[1], 16)
                if not size:
                    pos = self._last(data, pos, begin)
                    break
                after = begin + size
                if data[after : after + 2] == b"\r\n":
                    # The whole chunk is here, as it mostly is.
                    if payload is not None:
                        payload.append(data[begin:after])
                    pos = after + 2
                else:
                    self._data_left = size
                    state = self._DATA
                    pos = begin
            elif state == self._DATA:
                size = min(self._data_left, end - pos)
                if payload is not None:
                    payload.append(data[pos : pos + size])
                pos += size
                self._data_left -= size
                if self._data_left:
                    break
                state = self._DATA_END
            else:
                if data.startswith(b"\r\n", pos):
                    pos += 2
                    state = self._SIZE
                elif end - pos == 1 and data[pos] == 13:
                    break
                else:
                    raise BadMessage("chunk data is not followed by CRLF")
        self._state = state
        return pos

    def _last(self, data: bytes, pos: int, begin: int) -> int:
        """Where the last chunk, whose size line is from ``pos`` to ``begin``, ends with its trailers.

        It is handed on together with them, once all of them are here: until then that is ``pos``.
        """
        trailers = _TRAILERS.match(data, begin)
        if trailers is None:
            section = data[begin:]
            if len(section) > MAX_TRAILERS or _bad_trailers(section):
                raise BadMessage("invalid trailer section")
            return pos
        if trailers.end() - begin > MAX_TRAILERS:
            raise BadMessage("trailer section too long")
        self.done = True
        return trailers.end()


def _refuse_partial(data: bytes, pos: int, limit: int) -> bool:
    """Whether what begins at ``pos`` can no longer become a chunk size line."""
    rest = data[pos:]
    if b"\n" in rest or len(rest) > limit:
        return True
    # Letters that no size line begins with are refused at once, not only when the line is complete.
    digits = re.match(rb"[0-9A-Fa-f]*", rest)
    size = digits.end() if digits is not None else 0
    if size > 16 or (size == 0 and rest):
        return True
    return size < len(rest) and rest[size : size + 1] not in (b" ", b"\t", b";", b"\r")


def _bad_trailers(section: bytes) -> bool:
    """Whether an incomplete trailer section is wrong already."""
    complete = section[: section.rfind(b"\n") + 1]
    if not complete:
        return False
    return re.fullmatch(rb"(?:" + _TOKEN + rb":[^\x00-\x08\x0a-\x1f\x7f]*\r\n)*", complete) is None


class RequestHead:
    """A request's head, parsed; ``fields`` are those to forward, in order and as they came."""

    __slots__ = (
        "authority",
        "content_length",
        "expect_continue",
        "fields",
        "forwarded_for",
        "forwarded_host",
        "forwarded_proto",
        "host",
        "keep_alive",
        "mark",
        "method",
        "minor",
        "raw",
        "received",
        "target",
        "te_chunked",
        "upgrade",
    )
    method: bytes
    target: bytes
    minor: int
    #: All header fields as they were received.
    received: Headers
    #: The end-to-end fields: without Host, framing, Expect, X-Forwarded-* and everything hop-by-hop.
    fields: Headers
    host: bytes | None
    #: The authority of an absolute-form target, which overrides Host (RFC 9112 section 3.2.2).
    authority: bytes | None
    content_length: int | None
    te_chunked: bool
    keep_alive: bool
    expect_continue: bool
    upgrade: list[bytes]
    forwarded_for: list[bytes]
    forwarded_proto: bytes | None
    forwarded_host: bytes | None
    #: The value of :data:`CALL_MARK`; empty: none.
    mark: bytes
    raw: bytes

    def header(self, name: bytes) -> bytes | None:
        """The first value of a received field, by its lower-case name."""
        for key, value in self.received:
            if key.lower() == name:
                return value
        return None

    @property
    def path(self) -> bytes:
        """The target without its query, still percent-encoded."""
        return self.target.partition(b"?")[0]

    @property
    def has_body(self) -> bool:
        return self.te_chunked or bool(self.content_length)

    def framing(self) -> Framing:
        """A fresh tracker for this request's body."""
        if self.te_chunked:
            return ChunkedBody()
        if self.content_length:
            return LengthBody(self.content_length)
        return NoBody()


class ResponseHead:
    """A response's head, parsed; ``fields`` are those to forward."""

    __slots__ = (
        "content_length",
        "content_type",
        "fields",
        "keep_alive",
        "minor",
        "reason",
        "status",
        "te_chunked",
        "unbuffered_hint",
    )
    status: int
    reason: bytes
    minor: int
    fields: Headers
    content_length: int | None
    #: In lower case.
    content_type: bytes
    te_chunked: bool
    keep_alive: bool
    #: Whether the upstream itself sent X-Accel-Buffering.
    unbuffered_hint: bool

    def framing(self, method: bytes) -> Framing:
        """A fresh tracker for the body of this response to a ``method`` request (RFC 9112 section 6.3)."""
        status = self.status
        if method == b"HEAD" or status == 204 or status == 304 or status < 200:
            return NoBody()
        if self.te_chunked:
            return ChunkedBody()
        if self.content_length is not None:
            return LengthBody(self.content_length)
        return UntilClose()


def head_end(data: bytes, searched: int = 0) -> int:
    """Where the head at the start of ``data`` ends (behind its empty line), or -1 if it is not complete.

    :param searched: how many bytes are known not to hold the end.
    :raises BadMessage: if it can be told already that no valid head will come of it (too long, bare line feeds).
    """
    start = searched - 3 if searched > 3 else 0
    end = data.find(b"\r\n\r\n", start)
    if end >= 0:
        if end + 4 > MAX_HEAD:
            raise BadMessage("head too large", 431)
        return end + 4
    if len(data) >= MAX_HEAD:
        raise BadMessage("head too large", 431)
    if _BARE_LF.search(data, start) is not None:
        raise BadMessage("bare line feed in the head")
    return -1


def skip_empty_lines(data: bytes) -> bytes:
    """``data`` without the empty lines that it begins with."""
    match = _EMPTY_LINES.match(data)
    return data[match.end() :] if match is not None else data


def _fields(head: bytes, start: int) -> Headers:
    """Every header field of ``head`` from ``start`` on; the status or request line ends just before."""
    fields: Headers = _FIELD.findall(head, start)
    # One line feed for each field and one for the empty line: anything else is a line that is not a field, or a line
    # feed on its own.
    lines = head.count(b"\n", start) - 1
    if lines != len(fields):
        fields = _PADDED_FIELD.findall(head, start)
        if lines != len(fields):
            raise BadMessage("malformed header field")
        fields = [(name, value.rstrip(b" \t")) for name, value in fields]
    if lines > MAX_FIELDS:
        raise BadMessage("too many header fields", 431)
    return fields


@lru_cache(maxsize=128)
def _is_authority(value: bytes) -> bool:
    """Whether a Host may look like this. Clients come with the same few again and again."""
    return _HOST.fullmatch(value) is not None


def _content_length(values: list[bytes]) -> int:
    value = values[0]
    if len(values) != 1 or len(value) > 18 or not value.isdigit():
        raise BadMessage("invalid or repeated Content-Length")
    return int(value)


def join_fields(fields: Headers) -> bytes:
    """The lines of header fields."""
    return b"\r\n".join(map(_colon, fields)) + b"\r\n" if fields else b""


def _tokens(values: list[bytes]) -> list[bytes]:
    """The lower-case members of a comma-separated field that may be repeated."""
    if len(values) == 1 and b"," not in values[0]:
        return [values[0].strip().lower()]
    return [token.strip().lower() for token in b",".join(values).split(b",")]


def parse_request(head: bytes) -> RequestHead:
    """Parse a request head that ends with its empty line.

    :raises BadMessage: with the status to answer.
    """
    match = _REQUEST_LINE.match(head)
    if match is None:
        raise BadMessage(*_why_no_request_line(head))
    result = RequestHead()
    result.raw = head
    result.method, target, minor = match.groups()
    if result.method == b"CONNECT":
        raise BadMessage("this is not a forward proxy", 501)
    result.minor = minor[0] - 48
    result.received = received = _fields(head, match.end())
    hosts: list[bytes] = []
    lengths: list[bytes] = []
    codings: list[bytes] = []
    connection: list[bytes] = []
    result.upgrade = []
    result.forwarded_for = []
    result.forwarded_proto = result.forwarded_host = None
    result.expect_continue = False
    result.mark = b""
    fields: Headers = []
    for field in received:
        name = field[0].lower()
        if name not in _REQUEST_SPECIAL:
            fields.append(field)
        elif name == b"host":
            hosts.append(field[1])
        elif name == b"content-length":
            lengths.append(field[1])
        elif name == b"transfer-encoding":
            codings.append(field[1])
        elif name == b"connection":
            connection.append(field[1])
        elif name == b"expect":
            if field[1].lower() != b"100-continue":
                raise BadMessage("unknown expectation", 417)
            result.expect_continue = result.minor == 1
        elif name == b"upgrade":
            result.upgrade.append(field[1])
        elif name == b"x-forwarded-for":
            result.forwarded_for.append(field[1])
        elif name == b"x-forwarded-proto":
            result.forwarded_proto = field[1]
        elif name == b"x-forwarded-host":
            result.forwarded_host = field[1]
        elif name == CALL_MARK:
            result.mark += field[1]
            fields.append(field)
    result.authority = None
    if target[0] != 47:
        target = _origin_form(result, target)
    result.target = target
    if len(hosts) != 1:
        if hosts or result.minor == 1:
            raise BadMessage("missing or repeated Host")
        result.host = None
    else:
        result.host = hosts[0]
        if not _is_authority(hosts[0]):
            raise BadMessage("invalid Host")
    result.content_length = _content_length(lengths) if lengths else None
    result.te_chunked = False
    if codings:
        if lengths:
            raise BadMessage("both Content-Length and Transfer-Encoding")
        if result.minor == 0 or len(codings) != 1 or codings[0].lower() != b"chunked":
            raise BadMessage("unsupported Transfer-Encoding")
        result.te_chunked = True
    result.keep_alive = result.minor == 1
    if connection:
        named = _tokens(connection)
        if b"close" in named:
            result.keep_alive = False
        elif result.minor == 0 and b"keep-alive" in named:
            result.keep_alive = True
        fields = _without(fields, named)
    result.fields = fields
    return result


def _without(fields: Headers, named: list[bytes]) -> Headers:
    """``fields`` without those that a Connection field names, which are hop-by-hop by that."""
    drop = frozenset(named) - HOP_BY_HOP - _FRAMING_FIELDS - {b"close", b""}
    if not drop:
        return fields
    return [field for field in fields if field[0].lower() not in drop]


def _origin_form(result: RequestHead, target: bytes) -> bytes:
    """The target in origin form; keeps ``*`` of OPTIONS (RFC 9112 section 3.2)."""
    if target == b"*" and result.method == b"OPTIONS":
        return target
    match = _ABSOLUTE.match(target)
    if match is None:
        raise BadMessage("unsupported form of the request target")
    authority = match.group(1)
    if not authority or not _is_authority(authority):
        raise BadMessage("invalid authority in the request target")
    result.authority = authority
    rest = target[match.end() :]
    if not rest and result.method == b"OPTIONS":
        # RFC 9112 section 3.2.4: this is how "*" is asked of a proxy.
        return b"*"
    return rest if rest[:1] == b"/" else b"/" + rest


def _why_no_request_line(head: bytes) -> tuple[str, int]:
    line = head.partition(b"\r\n")[0]
    version = line.rpartition(b" ")[2]
    if re.fullmatch(rb"HTTP/[0-9]+(?:\.[0-9]+)?", version) and version not in (
        b"HTTP/1.0",
        b"HTTP/1.1",
    ):
        return "unsupported HTTP version", 505
    return "malformed request line", 400


def parse_response(head: bytes) -> ResponseHead:
    """Parse a response head that ends with its empty line.

    :raises BadMessage: if the upstream's answer cannot be read in one way only.
    """
    match = _STATUS_LINE.match(head)
    if match is None:
        raise BadMessage("malformed status line", 502)
    result = ResponseHead()
    minor, status, reason = match.groups()
    result.minor = minor[0] - 48
    result.status = int(status)
    result.reason = reason or b""
    lengths: list[bytes] = []
    codings: list[bytes] = []
    connection: list[bytes] = []
    result.unbuffered_hint = False
    result.content_type = b""
    fields: Headers = []
    for field in _fields(head, match.end()):
        name = field[0].lower()
        if name not in _RESPONSE_SPECIAL:
            fields.append(field)
        elif name == b"content-length":
            lengths.append(field[1])
        elif name == b"content-type":
            result.content_type = field[1].lower()
            fields.append(field)
        elif name == b"transfer-encoding":
            codings.append(field[1])
        elif name == b"connection":
            connection.append(field[1])
        elif name == b"x-accel-buffering":
            # Once is enough: a chain of servers may each have added it.
            if not result.unbuffered_hint:
                fields.append(field)
            result.unbuffered_hint = True
    # Repeated but equal lengths are harmless in an answer (RFC 9110 section 8.6).
    if len(lengths) > 1 and len(set(lengths)) == 1:
        lengths = lengths[:1]
    result.content_length = _content_length(lengths) if lengths else None
    result.te_chunked = False
    if codings:
        if len(codings) != 1 or codings[0].lower() != b"chunked" or lengths:
            raise BadMessage("unsupported or conflicting Transfer-Encoding in the answer", 502)
        if result.minor == 0:
            raise BadMessage("Transfer-Encoding in an HTTP/1.0 answer", 502)
        result.te_chunked = True
    result.keep_alive = result.minor == 1
    if connection:
        named = _tokens(connection)
        if b"close" in named:
            result.keep_alive = False
        elif result.minor == 0 and b"keep-alive" in named:
            result.keep_alive = True
        fields = _without(fields, named)
    result.fields = fields
    return result
