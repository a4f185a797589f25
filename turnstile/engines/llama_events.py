"""The events of a llama.cpp router: ``GET /models/sse``, which tells whenever a model's status changes.

They only say *when* to look: nothing is told on connecting, nothing when an unload is asked for, and an event may be
older than the answer of a look that is already here. The list of models is the truth.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.protocol import Protocol as TwistedProtocol
from twisted.internet.protocol import connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure

from turnstile.engines.client import HttpError, JsonClient

PATH = "/models/sse"
#: Events that tell of a status. Others (the progress of a download) come by the hundred.
_TELLING = frozenset({"status_change", "model_status", "models_reload", "model_remove"})
#: The longest event that is read.
LINE_LIMIT = 1024 * 1024
OPEN_TIMEOUT = 5.0
FIRST_RETRY = 0.5
MOST_RETRY = 30.0
#: Seconds after which a connection counts as one that works.
STEADY = 10.0


class _Lines(TwistedProtocol):
    """The body of the answer, line by line."""

    def __init__(self, on_line: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_line = on_line
        self._on_end = on_end
        self._rest = b""

    def dataReceived(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line)
        if len(self._rest) > LINE_LIMIT:
            self.drop()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._on_end()

    def drop(self) -> None:
        transport = self.transport
        if transport is not None:
            getattr(transport, "abortConnection", transport.loseConnection)()


class RouterEvents:
    """Stays connected while it is wanted.

    :param on_change: called when a model's status may have changed, and when the connection is made, since what was
        told before that is lost.
    """

    log = Logger()

    def __init__(
        self, client: JsonClient, clock: IReactorTime, on_change: Callable[[], None]
    ) -> None:
        self._client = client
        self._clock = clock
        self._on_change = on_change
        self._wanted = False
        self._opening: Deferred[Any] | None = None
        self._body: _Lines | None = None
        self._retry: IDelayedCall | None = None
        self._delay = FIRST_RETRY
        self._opened_at = 0.0

    @property
    def open(self) -> bool:
        """Whether changes are being told."""
        return self._body is not None

    def start(self) -> None:
        """Connect, and connect again whenever the connection ends."""
        if not self._wanted:
            self._wanted = True
            self._delay = FIRST_RETRY
            self._connect()

    def stop(self) -> None:
        """Leave nothing behind."""
        self._wanted = False
        retry, self._retry = self._retry, None
        if retry is not None and retry.active():
            retry.cancel()
        if self._opening is not None:
            self._opening.cancel()
        body, self._body = self._body, None
        if body is not None:
            body.drop()

    def _connect(self) -> None:
        self._retry = None
        self._opening = d = self._client.open(PATH, OPEN_TIMEOUT)
        d.addCallbacks(self._opened, self._failed)

    def _opened(self, response: Any) -> None:
        self._opening = None
        self._opened_at = self._clock.seconds()
        body = _Lines(self._line, lambda: self._ended(body))
        self._body = body
        response.deliverBody(body)
        if self._body is body:
            self._on_change()

    def _failed(self, failure: Failure) -> None:
        self._opening = None
        if failure.check(CancelledError):
            return
        error = failure.value
        if isinstance(error, HttpError) and error.status in (404, 405, 501):
            self.log.info("llama.cpp tells no events; its models are polled")
            self._wanted = False
            return
        self._again()

    def _ended(self, body: _Lines) -> None:
        if self._body is body:
            self._body = None
            if self._clock.seconds() - self._opened_at >= STEADY:
                self._delay = FIRST_RETRY
            self._again()

    def _again(self) -> None:
        if self._wanted:
            self._retry = self._clock.callLater(self._delay, self._connect)
            self._delay = min(self._delay * 2, MOST_RETRY)

    def _line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        try:
            event = json.loads(line[5:])
        except (ValueError, RecursionError):
            return
        if isinstance(event, dict) and event.get("event") in _TELLING:
            self._on_change()
