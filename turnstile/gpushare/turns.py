"""Waiting for one's turn in coroutines, of asyncio or of Twisted."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import TracebackType
    from typing import Any

    from twisted.internet.defer import Deferred

    from turnstile.gpushare.peer import Peer


class Turn:
    """``await`` it to wait for the peer's turn; as an ``async with`` it is a step.

    Cancelling leaves no trace.
    """

    def __init__(self, peer: Peer, sync: Callable[[], object] | None, reactor: Any) -> None:
        self._peer = peer
        self._sync = sync
        self._reactor = reactor

    def __await__(self) -> Generator[Any, Any, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        self._peer.touch()
        if not self._peer.wait_us():
            return
        for seconds in self._peer.pauses():
            if self._reactor is not None:
                await _sleep_on(self._reactor, seconds)
            else:
                import asyncio

                await asyncio.sleep(seconds)

    async def __aenter__(self) -> None:
        await self._wait()
        self._peer.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._sync is not None and kind is None:
                self._sync()
        finally:
            self._peer.end()


def wait_for_turn(peer: Peer, reactor: Any) -> Deferred[None]:
    """Fire when it is ``peer``'s turn, for Twisted code without coroutines."""
    from twisted.internet.defer import Deferred

    return Deferred.fromCoroutine(Turn(peer, None, reactor)._wait())


def _sleep_on(reactor: Any, seconds: float) -> Deferred[None]:
    from twisted.internet.task import deferLater

    return deferLater(reactor, seconds, lambda: None)
