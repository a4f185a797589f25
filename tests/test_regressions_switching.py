"""Mistakes that random schedules found, each as one short story."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectingCancelledError
from twisted.internet.task import Clock

from turnstile.proxy.retry import RetryPolicy, connect_with_backoff


def test_an_endpoint_that_is_cancelled_is_not_tried_again() -> None:
    # Endpoints fail with ConnectingCancelledError, which is no CancelledError: it was taken for one more failure, and
    # the WebSocket of a page that had been closed meanwhile was connected for, again and again, for ever.
    clock = Clock()
    attempts: list[Deferred[Any]] = []

    def connect() -> Deferred[Any]:
        d: Deferred[Any] = Deferred(lambda d: d.errback(ConnectingCancelledError("address")))
        attempts.append(d)
        return d

    result = connect_with_backoff(clock, RetryPolicy(), lambda: 0.0, connect, lambda f, wait: None)
    ended: list[Any] = []
    result.addErrback(ended.append)
    result.cancel()
    assert ended[0].check(CancelledError)
    assert clock.getDelayedCalls() == []
    clock.pump([60.0] * 5)
    assert len(attempts) == 1
