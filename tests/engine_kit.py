"""What tests of engines share: an HTTP client that answers as told, a clock that is run, the real reactor's ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from twisted.internet import reactor as _reactor
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock, deferLater
from twisted.internet.tcp import Connection, Port
from twisted.python.failure import Failure
from twisted.web.client import ResponseDone

reactor: Any = _reactor


class Response:
    """An answer whose body is delivered when asked for."""

    def __init__(self, code: int, body: bytes, ending: Exception | None = None) -> None:
        self.code = code
        self.body = body
        self.ending = ending or ResponseDone()
        self.dropped = False

    def loseConnection(self) -> None:
        self.dropped = True

    def deliverBody(self, protocol: Any) -> None:
        protocol.transport = self
        protocol.dataReceived(self.body)
        if not isinstance(self.ending, TimeoutError):
            protocol.connectionLost(Failure(self.ending))


class Http:
    """Answers by a function of method, path and payload: a JSON value, a Response, an exception or a Deferred."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self.answer: Callable[[str, str, Any], Any] = lambda method, path, payload: {}

    def request(
        self, method: str, url: str, *, data: bytes | None = None, **_: Any
    ) -> Deferred[Any]:
        parts = urlsplit(url)
        path = parts.path + ("?" + parts.query if parts.query else "")
        payload = None if data is None else json.loads(data)
        self.calls.append((method, path, payload))
        result = self.answer(method, path, payload)
        if isinstance(result, Deferred):
            return result
        if isinstance(result, Exception):
            return fail(result)
        if not isinstance(result, Response):
            result = Response(200, json.dumps(result).encode())
        return succeed(result)

    def sent(self, path: str) -> list[Any]:
        return [payload for _, called, payload in self.calls if called == path]


def result_of(d: Deferred[Any]) -> list[Any]:
    results: list[Any] = []
    d.addBoth(results.append)
    return results


def run(clock: Clock, seconds: float, step: float = 0.01) -> None:
    for _ in range(round(seconds / step)):
        clock.advance(step)


def clean() -> bool:
    sockets = [reader for reader in reactor.getReaders() if isinstance(reader, (Connection, Port))]
    return not sockets and not reactor.getDelayedCalls()


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = reactor.seconds() + seconds
    while not condition():
        assert reactor.seconds() < deadline, condition
        await deferLater(reactor, 0.005)
