"""One result for many that wait for it, each of whom may go away."""

from __future__ import annotations

from typing import Generic, TypeVar

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

_T = TypeVar("_T")


class Fanout(Generic[_T]):
    """A result that comes once. What waits is a Deferred of its own, whose cancelling concerns nobody else."""

    def __init__(self) -> None:
        self._result: _T | Failure | None = None
        self._fired = False
        self._waiting: list[Deferred[_T]] = []

    @property
    def fired(self) -> bool:
        """Whether the result is there."""
        return self._fired

    def wait(self) -> Deferred[_T]:
        """A Deferred for the result, fired already if that is there."""
        waiter: Deferred[_T] = Deferred(self._forget)
        if self._fired:
            self._tell(waiter)
        else:
            self._waiting.append(waiter)
        return waiter

    def fire(self, result: _T | Failure) -> None:
        """Give the result to all who wait, in the order in which they came. Every call but the first does nothing."""
        if self._fired:
            return
        self._fired = True
        self._result = result
        while self._waiting:
            self._tell(self._waiting.pop(0))

    def _forget(self, waiter: Deferred[_T]) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)

    def _tell(self, waiter: Deferred[_T]) -> None:
        result = self._result
        if isinstance(result, Failure):
            # Each its own: a Deferred changes the failure that it carries.
            waiter.errback(Failure(result.value))
        else:
            waiter.callback(result)  # type: ignore[arg-type]
