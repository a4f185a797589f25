"""Steps of a loop that is somebody else's and calls back once for each."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from turnstile.gpushare.peer import Peer


class StepLoop:
    """One step after the other: each callback ends one, waits for the peer's turn, and begins the next.

    As a context it begins the first step when it is entered, so that work before the first callback (the prompt)
    is paced too, and ends the last one. Without that the first callback begins, and the last step ends with
    `finish` or when the object is dropped.
    """

    def __init__(self, peer: Peer, sync: Callable[[], object] | None = None) -> None:
        self._is_open = False
        self._peer = peer
        self._sync = sync

    def advance(self) -> None:
        """The present step is over, and the next one begins as soon as it may."""
        self._close(with_sync=True)
        self._peer.begin()
        self._is_open = True

    def finish(self) -> None:
        """The present step is over, and no other follows."""
        self._close(with_sync=True)

    def _close(self, *, with_sync: bool) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            if with_sync and self._sync is not None:
                self._sync()
        finally:
            self._peer.end()

    def __enter__(self) -> Self:
        self.advance()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(with_sync=kind is None)

    def __del__(self) -> None:
        self._close(with_sync=False)
