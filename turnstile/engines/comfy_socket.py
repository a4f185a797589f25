"""The socket of :mod:`turnstile.engines.comfy_events`, apart since autobahn takes its time to load."""

from __future__ import annotations

from typing import Any

from twisted.logger import Logger
from twisted.python.failure import Failure

from turnstile.engines.comfy_events import Sink
from turnstile.websockets import websocket

#: Seconds between our pings, and for which an answer is waited.
PING_INTERVAL = 10.0
PING_TIMEOUT = 10.0

#: Text messages above this size are outputs, which nobody here needs.
TEXT_LIMIT = 256 * 1024


class EventsProtocol(websocket.WebSocketClientProtocol):  # type: ignore[misc]
    """Hands text to a sink, drops everything else."""

    log = Logger()
    _text: list[bytes] | None = None
    _size = 0

    def onOpen(self) -> None:
        self.factory.sink.opened()

    # autobahn would gather every message whole: previews of a job without a client id come to every socket, tens of
    # megabytes each, and how long a message gets is the engine's affair.

    def onMessageBegin(self, isBinary: bool) -> None:
        self._text = None if isBinary else []
        self._size = 0

    def onMessageFrameBegin(self, length: int) -> None:
        """Nothing: pieces are counted as they come."""

    def onMessageFrameData(self, payload: bytes) -> None:
        if self._text is not None:
            self._size += len(payload)
            if self._size > TEXT_LIMIT:
                self._text = None
            else:
                self._text.append(payload)

    def onMessageFrameEnd(self) -> None:
        """Nothing: the message is what counts."""

    def onMessageEnd(self) -> None:
        text, self._text = self._text, None
        if text is not None:
            self.factory.sink.text(b"".join(text))

    def connectionLost(self, reason: Failure) -> None:
        # Not onClose: that is not called where the connection ends before the handshake did.
        super().connectionLost(reason)
        self.factory.sink.lost(reason.getErrorMessage())


def events_factory(url: str, reactor: Any, sink: Sink, connect_timeout: float) -> Any:
    """A factory for one connection, whose text goes to ``sink``."""
    # Without offers permessage-deflate is not spoken: small messages on a near network gain nothing.
    factory = websocket.WebSocketClientFactory(url, reactor=reactor)
    factory.protocol = EventsProtocol
    factory.sink = sink
    factory.setProtocolOptions(
        openHandshakeTimeout=connect_timeout,
        autoPingInterval=PING_INTERVAL,
        autoPingTimeout=PING_TIMEOUT,
    )
    factory.noisy = False
    return factory
