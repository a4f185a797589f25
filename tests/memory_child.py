"""Children without processes: simulated sd-servers in memory, as turnstile's own spawner would give them."""

from __future__ import annotations

import itertools
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twisted.internet.defer import Deferred

from turnstile.child.fanout import Fanout
from turnstile.child.process import ExitStatus
from turnstile.sim import SdFleet, SdSim

#: Seconds until the end of a process is told, and until the rest of its group is gone after that.
REAP = 0.002
KILL = 0.005


class MemoryChild:
    """One of them; see :class:`turnstile.child.process.Child`."""

    def __init__(
        self,
        pid: int,
        process: SdSim,
        lines: deque[str],
        clock: Any,
        on_terminate: Callable[[SdSim], None],
    ) -> None:
        self.pid = pid
        self._on_terminate = on_terminate
        self.process = process
        self.status: ExitStatus | None = None
        self._clock = clock
        self._lines = lines
        self._exited: Fanout[ExitStatus] = Fanout()
        self._gone: Fanout[ExitStatus] = Fanout()
        self._deadline: Any = None
        process.exited().addCallback(lambda _: clock.callLater(REAP, self._reaped))

    def when_exited(self) -> Deferred[ExitStatus]:
        return self._exited.wait()

    def when_gone(self) -> Deferred[ExitStatus]:
        return self._gone.wait()

    def when_settled(self) -> Deferred[ExitStatus]:
        return self._gone.wait()

    def tail(self, lines: int) -> list[str]:
        return list(self._lines)[-lines:] if lines > 0 else []

    def terminate(self, grace: float) -> Deferred[ExitStatus]:
        if self.process.exit_status is None:
            if self._deadline is None:
                self._on_terminate(self.process)
            if grace <= 0:
                self._kill()
            elif self._deadline is None:
                self.process.signal(signal.SIGTERM)
                self._deadline = self._clock.callLater(grace, self._kill)
        return self._gone.wait()

    def _kill(self) -> None:
        self.process.signal(signal.SIGKILL)

    def _reaped(self) -> None:
        if self._deadline is not None and self._deadline.active():
            self._deadline.cancel()
        number = self.process.exit_status
        assert number is not None
        self.status = (
            ExitStatus(code=number) if number >= 0 else ExitStatus(code=None, signal=-number)
        )
        self._exited.fire(self.status)
        if self.process.grandchild:
            # Whoever is left of the group is killed.
            self._clock.callLater(KILL, self._rest_gone)
        else:
            self._gone.fire(self.status)

    def _rest_gone(self) -> None:
        self.process.end_grandchild()
        assert self.status is not None
        self._gone.fire(self.status)


class MemorySpawner:
    """Starts processes of a simulated sd-server; see :class:`turnstile.child.process.Spawner`."""

    def __init__(self, fleet: SdFleet, clock: Any) -> None:
        self._fleet = fleet
        self._clock = clock
        self._pids = itertools.count(4_000_000)
        self.children: list[MemoryChild] = []
        #: Is called with each process that is told to end.
        self.on_terminate: Callable[[SdSim], None] = lambda process: None

    def spawn(
        self, program: Sequence[str], env: Mapping[str, str] | None, log: object
    ) -> MemoryChild:
        """Start one on the port that its arguments name; its output is kept in memory, not in ``log``."""
        port = int(program[list(program).index("--listen-port") + 1])
        lines: deque[str] = deque(maxlen=200)
        process = self._fleet.start(port, say=lines.append)
        child = MemoryChild(next(self._pids), process, lines, self._clock, self._tell)
        self.children.append(child)
        return child

    def _tell(self, process: SdSim) -> None:
        self.on_terminate(process)
