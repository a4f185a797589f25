"""ComfyUI's WebSockets: who is connected, and who hears what.

Facts [seen]: a second socket with a clientId takes the first one's events, and the close of the
first then makes the second deaf, to broadcasts too.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from autobahn.twisted.websocket import WebSocketServerFactory, WebSocketServerProtocol
from autobahn.websocket.compress import PerMessageDeflateOffer, PerMessageDeflateOfferAccept

OPEN = WebSocketServerProtocol.STATE_OPEN
PREVIEW_IMAGE = 1
MAX_MESSAGE = 4 << 20
TOO_BIG = 1009


class ComfySocket(WebSocketServerProtocol):  # type: ignore[misc]
    """One client's socket."""

    hub: Hub
    sid: str

    def onOpen(self) -> None:
        self.hub.opened(self)

    def onMessage(self, payload: bytes, isBinary: bool) -> None:
        if len(payload) >= MAX_MESSAGE:
            self.sendCloseFrame(code=TOO_BIG)
            return
        self.hub.received(self, payload, isBinary)

    def onPong(self, payload: bytes) -> None:
        self.hub.pongs.append(payload)

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:
        self.hub.closed(self, code)


class Hub:
    """The open sockets by clientId, and the sending to them."""

    def __init__(
        self,
        clock: Any,
        greet: Callable[[ComfySocket], None],
        features: Callable[[], dict[str, Any]],
    ) -> None:
        self.sockets: dict[str, ComfySocket] = {}
        self.open: set[ComfySocket] = set()
        self.pongs: deque[bytes] = deque(maxlen=1000)
        self.messages: deque[tuple[str, bytes | str]] = deque(maxlen=1000)
        self.close_codes: deque[tuple[str, int | None]] = deque(maxlen=1000)
        self._greet = greet
        self._features = features
        self._factory = WebSocketServerFactory(reactor=clock)
        self._factory.protocol = ComfySocket
        self._factory.setProtocolOptions(
            openHandshakeTimeout=0,
            closeHandshakeTimeout=0,
            failByDrop=False,
            perMessageCompressionAccept=_accept_deflate,
        )

    def protocol(self, client_id: str | None) -> ComfySocket:
        """The protocol for a connection that asked to upgrade."""
        socket: ComfySocket = self._factory.buildProtocol(None)
        socket.hub = self
        socket.sid = client_id or uuid.uuid4().hex
        return socket

    def opened(self, socket: ComfySocket) -> None:
        self.open.add(socket)
        self.sockets[socket.sid] = socket
        self._greet(socket)

    def closed(self, socket: ComfySocket, code: int | None) -> None:
        if socket in self.open:
            self.open.discard(socket)
            self.close_codes.append((socket.sid, code))
            self.sockets.pop(socket.sid, None)

    def received(self, socket: ComfySocket, payload: bytes, binary: bool) -> None:
        message: bytes | str = payload if binary else payload.decode("utf-8")
        self.messages.append((socket.sid, message))
        if binary:
            return
        try:
            value = json.loads(message)
        except ValueError:
            return
        if isinstance(value, dict) and value.get("type") == "feature_flags":
            self.send("feature_flags", self._features(), socket.sid)

    def send(self, event: str, data: Any, sid: str | None = None) -> None:
        """A JSON event to one client, or to all."""
        text = json.dumps({"type": event, "data": data}).encode()
        self.push(text, False, sid)

    def send_preview(self, image: bytes, sid: str | None) -> None:
        """A preview: event type, image format (2 is PNG), bytes."""
        self.push(struct.pack(">II", PREVIEW_IMAGE, 2) + image, True, sid)

    def push(
        self, payload: bytes, binary: bool, sid: str | None, fragment: int | None = None
    ) -> None:
        """Any message, whole or in frames of ``fragment`` bytes."""
        for socket in self.targets(sid):
            socket.sendMessage(payload, isBinary=binary, fragmentSize=fragment)

    def targets(self, sid: str | None) -> list[ComfySocket]:
        found = self.sockets.values() if sid is None else [self.sockets.get(sid)]
        # One whose closing handshake has begun takes nothing any more.
        return [socket for socket in found if socket is not None and socket.state == OPEN]


def _accept_deflate(offers: list[Any]) -> Any:
    for offer in offers:
        if isinstance(offer, PerMessageDeflateOffer):
            return PerMessageDeflateOfferAccept(offer)
    return None
