"""llama-server's resumable streams: an answer with a conversation's name outlives its connection.

Facts [src]: a completion whose request has an ``X-Conversation-Id`` is computed to its end even if
the client leaves; it can be read again from any byte, and only ``DELETE /v1/stream`` stops it.
"""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from .exchange import Exchange, Headers
from .httplib import JSON_UTF8, compact
from .ollama_runner import wake


class ChildDied(Exception):
    """The process that worked on a request ended before its answer."""


class Kept:
    """One answer: what was written of it so far."""

    def __init__(self) -> None:
        self.status = 200
        self.content_type = JSON_UTF8
        self.data = bytearray()
        self.started = False
        self.done = False
        #: The child ended before the answer did.
        self.broken = False
        self.task: Deferred[Any] | None = None
        self._waiters: list[Deferred[None]] = []

    # -- as the completion sees it

    def start(self, status: int, headers: Headers = (), *, content_type: bytes) -> None:
        self.status, self.content_type, self.started = status, content_type, True
        wake(self._waiters)

    def write(self, data: bytes) -> None:
        self.data += data
        wake(self._waiters)

    async def drain(self) -> None:
        """Nobody is waited for."""

    def json(self, value: Any) -> None:
        self.started = True
        self.data += compact(value)
        self.finish()

    def finish(self) -> None:
        self.end()

    def end(self) -> None:
        self.done = True
        wake(self._waiters)

    # -- as readers see it

    async def follow(self, exchange: Exchange, sent: int = 0) -> None:
        """Write the answer to a connection as it comes; raises `ChildDied` if it breaks off."""
        while not (self.started or self.done):
            await self._change()
        if self.started:
            exchange.start(self.status, content_type=self.content_type)
        while True:
            piece = bytes(self.data[sent:])
            sent += len(piece)
            exchange.write(piece)
            await exchange.drain()
            if sent == len(self.data):
                if self.done:
                    break
                await self._change()
        if self.broken or not self.started:
            raise ChildDied
        exchange.finish()

    def _change(self) -> Deferred[None]:
        waiter: Deferred[None] = Deferred()
        self._waiters.append(waiter)
        return waiter


class Streams:
    """The answers that are kept, by conversation."""

    def __init__(self) -> None:
        self.kept: dict[str, Kept] = {}

    def begin(self, conversation: str) -> Kept:
        """A fresh one; what the conversation had before is stopped."""
        self.cancel(conversation)
        kept = self.kept[conversation] = Kept()
        return kept

    def cancel(self, conversation: str) -> None:
        """Stop and forget an answer."""
        kept = self.kept.pop(conversation, None)
        if kept is not None and kept.task is not None and not kept.done:
            kept.task.cancel()

    def clear(self) -> None:
        self.kept.clear()

    def listed(self, conversations: list[str]) -> list[dict[str, Any]]:
        """What /v1/streams/lookup answers."""
        return [
            {"conversation_id": name, "is_done": kept.done, "total_bytes": len(kept.data)}
            for name in conversations
            if (kept := self.kept.get(name)) is not None
        ]
