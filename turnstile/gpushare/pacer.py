"""When a program that knows nothing of its peers may run: stopped outside its windows, left alone otherwise."""

from __future__ import annotations

import time

from turnstile.gpushare.usage import Meter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from turnstile.gpushare.peer import Look

    class Paced(Protocol):
        """What is asked of a `turnstile.gpushare.peer.Peer`."""

        def look(self) -> Look: ...

        def tick(self) -> float: ...

        def touch(self) -> None: ...

        def add_busy(self, seconds: float) -> None: ...


#: Seconds for which a program counts as active after it computed, as a peer's step does.
ACTIVE_FOR = 2.0
#: Seconds between two looks at what the program does: while others may wait for it, and alone. Of a program that wakes
#: up among busy peers the first that they notice is this much later.
LOOK_EVERY = 0.02
LOOK_ALONE = 0.1
#: The longest sleep while it is stopped: others may leave, and then it is its turn at once.
LONGEST_STOP = 0.05
#: Nobody is stopped for longer at a stretch, whatever becomes of the schedule and the clock that it goes by; then it
#: runs for a while.
PATIENCE = 1.0
RUNS_AFTER = 0.04


class Pacer:
    """Stops and continues one program.

    Pure but for what it is given: it never sleeps, and is told nothing but to go on.

    :param peer: the slot that stands for the program.
    :param stop: stops its processes. They are running at first.
    :param go: continues them.
    :param cpu: seconds of CPU time that they have used so far.
    :param is_busy: whether the card itself says that it computes for them.
    :param now: monotonic seconds.
    """

    def __init__(
        self,
        peer: Paced,
        stop: Callable[[], None],
        go: Callable[[], None],
        cpu: Callable[[], float],
        is_busy: Callable[[], bool] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peer = peer
        self._stop = stop
        self._go = go
        self._cpu = cpu
        self._is_busy = is_busy
        self._now = now
        self._meter = Meter()
        self._stopped = False
        self._stopped_at = 0.0
        #: Until when it is not stopped.
        self._free_until = now()
        self._active_until: float | None = None
        #: When the time that it was free to run was counted last, and how much of it was not judged yet.
        self._counted_at = now()
        self._ran = 0.0
        self._looked_at: float | None = None
        self._tick_at = self._counted_at

    @property
    def stopped(self) -> bool:
        """Whether the program stands still because it is not its turn."""
        return self._stopped

    def release(self, seconds: float = 0.0) -> None:
        """Let the program run, and don't stop it for so many seconds."""
        now = self._count()
        self._free_until = max(self._free_until, now + seconds)
        if self._stopped:
            self._stopped = False
            self._go()

    def step(self) -> float:
        """Do what is due; return the seconds until something is due again."""
        now = self._count()
        if now >= self._tick_at:
            self._tick_at = now + self._peer.tick()
        look = self._peer.look()
        alone = look.lasts_us is None
        pause = LOOK_ALONE if alone else LOOK_EVERY
        if self._looked_at is None or now - self._looked_at >= pause:
            self._looked_at = now
            self._judge(now)
        active = self._active_until is not None and now < self._active_until
        if self._stopped and now - self._stopped_at >= PATIENCE:
            self.release(RUNS_AFTER)
        if active and not look.is_mine and now >= self._free_until:
            if not self._stopped:
                self._stopped_at = self._count()
                self._stop()
                self._stopped = True
            due = min((look.lasts_us or 0) / 1e6, LONGEST_STOP)
        else:
            self.release()
            due = pause
            if active and look.lasts_us is not None:
                due = min(due, look.lasts_us / 1e6)
        return max(0.0, min(due, self._tick_at - now))

    def _count(self) -> float:
        now = self._now()
        if not self._stopped:
            self._ran += now - self._counted_at
        self._counted_at = now
        return now

    def _judge(self, now: float) -> None:
        ran, self._ran = self._ran, 0.0
        if not ran:
            return
        computed = self._meter.feed(self._cpu(), ran)
        if not computed and self._is_busy is not None:
            computed = self._is_busy()
        if computed:
            self._active_until = now + ACTIVE_FOR
            self._peer.touch()
        busy = self._meter.take_busy()
        if busy:
            self._peer.add_busy(busy)
