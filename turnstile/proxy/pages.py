"""turnstile's own pages, rendered from twisted.web resources onto the lean channel."""

from __future__ import annotations

from typing import Any

from twisted.web.http_headers import Headers as WebHeaders
from twisted.web.resource import IResource

from turnstile.log import Logger
from turnstile.proxy.errors import error_response, reason_phrase
from turnstile.proxy.http1 import RequestHead

_log = Logger()


class PageRequest:
    """What a resource may ask and tell about a request for a page: the synchronous part of twisted.web's IRequest."""

    def __init__(self, head: RequestHead, client: str) -> None:
        self.method = head.method
        self.uri = head.target
        self.path = head.path
        self.client = client
        self.requestHeaders = WebHeaders()
        for name, value in head.received:
            self.requestHeaders.addRawHeader(name, value)
        self.responseHeaders = WebHeaders()
        self.code = 200
        self.written: list[bytes] = []

    def getHeader(self, key: str | bytes) -> Any:
        """The last value of a request header."""
        values = self.requestHeaders.getRawHeaders(key)
        return values[-1] if values else None

    def setHeader(self, name: str | bytes, value: str | bytes) -> None:
        self.responseHeaders.setRawHeaders(name, [value])

    def setResponseCode(self, code: int, message: bytes | None = None) -> None:
        self.code = code

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def finish(self) -> None:
        """All was written."""


def render_page(page: IResource, head: RequestHead, client: str, keep_alive: bool) -> bytes:
    """The whole response to a request for one of our own pages."""
    if head.method not in (b"GET", b"HEAD"):
        return error_response(
            405, "only GET and HEAD", head.target, keep_alive=keep_alive, allow=b"GET, HEAD"
        )
    request = PageRequest(head, client)
    # HEAD is rendered as GET and its body left out.
    request.method = b"GET"
    try:
        body = page.render(request)
    except Exception:
        _log.failure("a page could not be rendered: {path}", path=head.path)
        return error_response(
            500, "internal error in turnstile; its log has more", head.target, keep_alive=keep_alive
        )
    content = b"".join(request.written) + (body if isinstance(body, bytes) else b"")
    lines = [b"HTTP/1.1 %d %s" % (request.code, reason_phrase(request.code))]
    for name, values in request.responseHeaders.getAllRawHeaders():
        if name.lower() not in (b"content-length", b"connection", b"transfer-encoding"):
            lines += [b"%s: %s" % (name, value) for value in values]
    lines.append(b"Content-Length: %d" % len(content))
    if not keep_alive:
        lines.append(b"Connection: close")
    elif head.minor == 0:
        lines.append(b"Connection: keep-alive")
    return b"\r\n".join(lines) + b"\r\n\r\n" + (b"" if head.method == b"HEAD" else content)
