"""When to try an upstream again, and how long to wait before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

#: Methods that may be sent twice without harm (RFC 9110 section 9.2.1, safe methods).
SAFE_METHODS = frozenset((b"GET", b"HEAD", b"OPTIONS", b"TRACE"))
#: Answers of a server that is not up yet, worth another try where the method is GET or HEAD.
RETRIED_STATUSES = frozenset((502, 503, 504))


@attrs.define
class RetryPolicy:
    """Back-off between attempts to reach an upstream. One object for all who retry, so that a change reaches them.

    :ivar initial: seconds before the second attempt; doubles from attempt to attempt.
    :ivar maximum: the most seconds between two attempts.
    :ivar status_limit: how often a GET or HEAD answered 502, 503 or 504 is repeated.
    """

    initial: float = 1.0
    maximum: float = 60.0
    status_limit: int = 3

    def delay(self, failures: int, chance: float) -> float:
        """Seconds to wait after ``failures`` failed attempts in a row.

        :param chance: a random number in [0, 1); spreads the delay over its upper half, so that the requests that
            met a restart together do not come back together.
        """
        # The exponent is bounded since 2.0 ** 1024 overflows.
        full = min(self.maximum, self.initial * 2.0 ** min(failures - 1, 64))
        return full * (0.5 + chance / 2)

    def repeats_status(self, method: bytes, status: int, repeated: int) -> bool:
        """Whether an answer is thrown away and the request sent again."""
        return (
            status in RETRIED_STATUSES
            and method in (b"GET", b"HEAD")
            and repeated < self.status_limit
        )


def connect_with_backoff(
    clock: IReactorTime,
    policy: RetryPolicy,
    chance: Callable[[], float],
    connect: Callable[[], Deferred[Any]],
    failed: Callable[[Failure, float], None],
) -> Deferred[Any]:
    """Call ``connect`` until it succeeds; cancel the Deferred to give up.

    :param failed: told of each failure and the seconds until the next attempt.
    """
    pending: list[Any] = []
    over = False

    def cancel(_: object) -> None:
        nonlocal over
        over = True
        pending.pop().cancel()

    result: Deferred[Any] = Deferred(cancel)

    def attempt(failures: int) -> None:
        d = connect()
        pending[:] = [d]
        d.addCallbacks(result.callback, lambda f: retry(f, failures + 1))

    def retry(failure: Failure, failures: int) -> None:
        if over:
            # Endpoints fail with an error of their own when they are cancelled (ConnectingCancelledError).
            return
        if failure.check(CancelledError):
            result.errback(failure)
            return
        wait = policy.delay(failures, chance())
        failed(failure, wait)
        pending[:] = [clock.callLater(wait, attempt, failures)]

    attempt(0)
    return result
