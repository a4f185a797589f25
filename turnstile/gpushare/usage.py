"""Whether somebody else's program computes: the CPU time of its processes, and what NVML says of them.

Facts from proc(5): fields 14 and 15 of ``/proc/PID/stat`` are the clock ticks that a process and its threads spent in
user and kernel mode; field 5 is its process group, field 6 its session.
"""

from __future__ import annotations

import os
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

#: Seconds between two searches of /proc for new members.
SEARCH_EVERY = 1.0
#: In how many searches every process of others is looked at again, should its number have been given to a member.
_LOOK_AGAIN = 32
#: The part of the time that it may run in which a program must use CPUs to count as computing. A thread that waits
#: for a GPU mostly spins; one that waits for requests sleeps.
BUSY_SHARE = 0.1
#: Seconds of running over which that is judged. The kernel counts in steps of 10 ms, one of which means little.
JUDGED_OVER = 0.5
#: One that uses this part is known to compute much sooner.
SURE_SHARE = 0.5
SURE_AFTER = 0.05


def can_measure() -> bool:
    """Whether this system shows what processes use."""
    return os.path.exists("/proc/self/stat")


class SessionUsage:
    """The CPU time of all processes in one session.

    :param session: its number.
    :param leader: the process of the program, or the first of them.
    :param strangers: processes of the session that don't count.
    :param proc: where proc(5) is mounted.
    """

    def __init__(
        self,
        session: int,
        leader: int,
        strangers: Iterable[int] = (),
        proc: str = "/proc",
    ) -> None:
        self._session = session
        self._leader = leader
        self._strangers = frozenset(strangers)
        self._proc = proc
        self._tick = 1.0 / os.sysconf("SC_CLK_TCK")
        self._searched: float | None = None
        self._searches = 0
        #: Ticks of the members, as last seen, and of those that are gone.
        self._ticks: dict[int, int] = {leader: 0}
        self._gone = 0
        self._groups: dict[int, int] = {leader: leader}
        #: Processes of other sessions. None of them can come into this one.
        self._others: set[int] = set()

    @property
    def pids(self) -> frozenset[int]:
        """The members, as of the last look."""
        return frozenset(self._ticks)

    @property
    def groups(self) -> frozenset[int]:
        """The process groups of the session, as of the last look."""
        return frozenset(self._groups.values()) | {self._leader}

    def cpu_seconds(self, now: float) -> float:
        """What the session's processes have used so far, in seconds; never less than before.

        A process that came and went between two searches is not in it.
        """
        pids: Iterable[int] = self._ticks
        search = self._searched is None or now - self._searched >= SEARCH_EVERY
        if search:
            self._searched = now
            pids = self._candidates()
        ticks: dict[int, int] = {}
        groups: dict[int, int] = {}
        for pid in pids:
            seen = self._read(pid)
            if seen is not None:
                group, used = seen
                ticks[pid] = max(used, self._ticks.get(pid, 0))
                groups[pid] = group
            elif search:
                self._others.add(pid)
        for pid, last in self._ticks.items():
            if pid not in ticks:
                self._gone += last
        self._ticks, self._groups = ticks, groups
        return (self._gone + sum(ticks.values())) * self._tick

    def _candidates(self) -> set[int]:
        """Members, and processes that were not looked at before: most of a big host's were."""
        self._searches += 1
        turn = self._searches % _LOOK_AGAIN
        present = {int(name) for name in os.listdir(self._proc) if name.isdecimal()}
        self._others &= present
        self._others = {pid for pid in self._others if pid % _LOOK_AGAIN != turn}
        return present - self._others - self._strangers

    def _read(self, pid: int) -> tuple[int, int] | None:
        try:
            with open(f"{self._proc}/{pid}/stat", "rb") as file:
                data = file.read()
            # The name, in parentheses, may hold anything.
            fields = data[data.rindex(b")") + 2 :].split()
            if int(fields[3]) != self._session:
                return None
            return int(fields[2]), int(fields[11]) + int(fields[12])
        except (OSError, ValueError, IndexError):
            return None


class Meter:
    """Judges from CPU time whether a program computes; pure."""

    def __init__(self) -> None:
        self._cpu: float | None = None
        self._ran = 0.0
        #: (used, ran) of the last slices, and their sums.
        self._slices: deque[tuple[float, float]] = deque()
        self._used_sum = 0.0
        self._ran_sum = 0.0
        self._busy = 0.0

    def feed(self, cpu: float, ran: float) -> bool:
        """Whether it computed lately.

        :param cpu: all the CPU time that it has used so far, in seconds.
        :param ran: seconds since the last call in which it was free to run.
        """
        if self._cpu is None:
            self._cpu = cpu
            return False
        self._ran += ran
        if self._ran < SURE_AFTER:
            return False
        used, self._cpu = cpu - self._cpu, cpu
        spent, self._ran = self._ran, 0.0
        self._busy += min(used, spent)
        self._slices.append((used, spent))
        self._used_sum += used
        self._ran_sum += spent
        while self._ran_sum - self._slices[0][1] >= JUDGED_OVER:
            old_used, old_spent = self._slices.popleft()
            self._used_sum -= old_used
            self._ran_sum -= old_spent
        if used >= SURE_SHARE * spent:
            return True
        long_enough = used > 0 and self._ran_sum >= JUDGED_OVER
        return long_enough and self._used_sum >= BUSY_SHARE * self._ran_sum

    def take_busy(self) -> float:
        """Seconds of computing since the last call; never more than it ran."""
        busy, self._busy = self._busy, 0.0
        return busy


class NvmlUsage:
    """Which processes a card computes for, by NVML's samples.

    :param key: the card's UUID.
    :param nvml: the module ``pynvml`` (package nvidia-ml-py).
    :raises Exception: whatever NVML raises where it has no such card or driver.
    """

    def __init__(self, key: str, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._device = nvml.nvmlDeviceGetHandleByUUID(key)
        self._since = 0

    def is_busy(self, pids: frozenset[int]) -> bool:
        """Whether the card computed for one of ``pids`` since the last call; false where NVML can't tell."""
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._device, self._since)
        except self._nvml.NVMLError:
            # Nothing sampled since then, or not supported.
            return False
        self._since = max([self._since, *(sample.timeStamp for sample in samples)])
        return any(sample.pid in pids and sample.smUtil > 0 for sample in samples)


def open_nvml(key: str) -> NvmlUsage | None:
    """NVML's view of the card with this UUID; ``None`` where that can't be had."""
    if not key.startswith("GPU-"):
        return None
    try:
        import pynvml

        return NvmlUsage(key, pynvml)
    except Exception:
        return None
