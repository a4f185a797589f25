"""One thread that may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from twisted.internet.defer import Deferred, fail
from twisted.internet.error import ReactorNotRunning
from twisted.python.failure import Failure

from turnstile.vram.reading import ProbeError

_T = TypeVar("_T")


class Runs(Protocol):
    """Runs something that may block."""

    def run(self, job: Callable[[], _T], timeout: float) -> Deferred[_T]:
        """The result of ``job``; fails with :class:`ProbeError` after ``timeout`` seconds.

        A job that hangs is left alone; until it ends every other one fails at once.
        """
        ...

    def stop(self) -> None:
        """Take no more jobs."""
        ...


class Worker:
    """A daemon thread, so that what hangs in it keeps no process alive."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Deferred[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy = False
        self._stopped = False

    def run(self, job: Callable[[], _T], timeout: float) -> Deferred[_T]:
        """See :class:`Runs`."""
        if self._stopped:
            return fail(ProbeError("turnstile stops"))
        if self._busy:
            return fail(ProbeError("it still hangs"))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="vram")
            self._thread.start()
        self._busy = True
        result: Deferred[Any] = Deferred()
        outer: Deferred[_T] = Deferred(lambda _: expiry.active() and expiry.cancel())

        def expire() -> None:
            outer.errback(ProbeError(f"no answer within {timeout:g} s"))

        def over(value: Any) -> None:
            self._busy = False
            if expiry.active():
                expiry.cancel()
            if not outer.called:
                outer.callback(value)

        expiry = self._reactor.callLater(timeout, expire)
        result.addBoth(over)
        self._jobs.put((job, result))
        return outer

    def stop(self) -> None:
        """See :class:`Runs`."""
        self._stopped = True
        self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, result = item
            value: Any
            try:
                value = job()
            except Exception:
                value = Failure()
            try:
                self._reactor.callFromThread(result.callback, value)
            except ReactorNotRunning:
                return
