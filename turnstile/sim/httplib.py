"""What the two servers built on cpp-httplib have in common: llama.cpp's and stable-diffusion.cpp's.

Facts [src]: percent signs in the path are decoded before routes are looked up; HEAD is routed as
GET; a known path with another method is simply not found; an idle connection is closed after 5 s,
one that carried 100 requests with its answer, and any with an answer of 400 or above [seen]; a
browser's preflight is answered for any path.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from .exchange import Exchange, HttpError
from .server import EngineSim

JSON = b"application/json"
KEEP_ALIVE = (b"Keep-Alive", b"timeout=5, max=100")
JSON_UTF8 = b"application/json; charset=utf-8"

Route = Callable[[Exchange], Awaitable[None]]


def compact(value: Any) -> bytes:
    """JSON without blanks."""
    return json.dumps(value, separators=(",", ":")).encode()


class HttplibSim(EngineSim):
    """A server on cpp-httplib: subclasses fill ``routes`` and say what is not found."""

    keep_alive_timeout: float | None = 5.0
    keep_alive_max: int | None = 100
    closes_on_errors = True
    #: Status of the answer to a preflight.
    preflight_status = 204
    preflight_type: bytes | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.routes: dict[tuple[str, str], Route] = {}

    async def handle(self, exchange: Exchange) -> None:
        exchange.extra_headers.extend(self.cors(exchange))
        if exchange.method == "OPTIONS":
            await exchange.body()
            exchange.reply(self.preflight_status, b"", self.preflight_type)
            return
        if await self.refused(exchange):
            return
        method = "GET" if exchange.method == "HEAD" else exchange.method
        route = self.routes.get((method, exchange.path)) or self.find(method, exchange.path)
        if route is None:
            await exchange.body()
            raise self.not_found()
        await route(exchange)

    def standard_headers(self) -> list[tuple[bytes, bytes]]:
        return []

    def connection_headers(self, kept: bool) -> list[tuple[bytes, bytes]]:
        return [KEEP_ALIVE] if kept else super().connection_headers(kept)

    def cors(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        """The headers that let a page of another origin in."""
        raise NotImplementedError

    async def refused(self, exchange: Exchange) -> bool:
        """Whether the request was answered before it was routed."""
        return False

    def find(self, method: str, path: str) -> Route | None:
        """The handler of a path that is not spelled out in ``routes``."""
        return None

    def not_found(self) -> HttpError:
        """The answer to an unknown path."""
        raise NotImplementedError
