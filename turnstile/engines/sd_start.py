"""Starting sd-server: why it may fail, and how soon it is tried again."""

from __future__ import annotations

from collections.abc import Sequence


class LoadFailed(Exception):
    """sd-server did not come up.

    :ivar tail: the last lines of its output.
    :ivar status: the HTTP status that fits.
    """

    def __init__(self, message: str, tail: Sequence[str] = (), status: int = 502) -> None:
        super().__init__(message)
        self.tail = list(tail)
        self.status = status


class Cooling(Exception):
    """sd-server ended again and again, and is not started for a while.

    :ivar seconds: how long.
    """

    def __init__(self, seconds: float, reason: str) -> None:
        super().__init__(f"sd-server keeps failing and is not started again yet ({reason})")
        self.seconds = seconds


class Backoff:
    """The pause before the next start: none after a first failure, then twice as long each time.

    :param initial: seconds after the second failure in a row.
    :param longest: seconds at most.
    """

    def __init__(self, initial: float, longest: float) -> None:
        self._initial = initial
        self._longest = longest
        self._until = 0.0
        #: Failures in a row.
        self.failures = 0
        #: What the last one was.
        self.reason = ""

    def failed(self, now: float, reason: str) -> None:
        """It could not be started, or ended by itself."""
        self.failures += 1
        self.reason = reason
        if self.failures > 1:
            # The exponent is bounded: so many failures are as good as for ever.
            pause = self._initial * 2.0 ** min(self.failures - 2, 64)
            self._until = now + min(pause, self._longest)

    def succeeded(self) -> None:
        """It did what it is for."""
        self.failures = 0
        self._until = 0.0

    def left(self, now: float) -> float:
        """Seconds until it may be tried again."""
        return max(0.0, self._until - now)
