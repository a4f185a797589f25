"""The clocks. What processes share is on CLOCK_REALTIME, what one measures for itself is monotonic."""

import time


class Clock:
    """Time as a peer sees it; tests put another one in its place."""

    @staticmethod
    def wall_us() -> int:
        """Microseconds since the Unix epoch, the same for every process of this host."""
        return time.time_ns() // 1000

    #: Nanoseconds on a clock that nobody sets.
    monotonic_ns = staticmethod(time.monotonic_ns)

    #: Sleep for so many seconds.
    sleep = staticmethod(time.sleep)


SYSTEM_CLOCK = Clock()
