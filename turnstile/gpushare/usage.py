"""Whether somebody else's program computes: the CPU time of its processes, and what NVML says of them.

Facts from proc(5): fields 14 and 15 of ``/proc/PID/stat`` are the clock ticks that a process and its threads spent in
user and kernel mode; field 5 is its process group, field 6 its session.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

#: Seconds between two searches of /proc for new members.
SEARCH_EVERY = 1.0
#: The part of the time that it may run in which a program must use a CPU to count as computing. A thread that waits
#: for a GPU mostly spins; one that waits for requests sleeps.
BUSY_SHARE = 0.1
#: Seconds that it must have run before that is judged: the kernel counts in steps of 10 ms.
JUDGED_AFTER = 0.05


class GroupUsage:
    """The CPU time of all processes in one session.

    :param leader: the process that made the session.
    :param proc: where proc(5) is mounted.
    """

    def __init__(self, leader: int, proc: str = "/proc") -> None:
        self.leader = leader
        self._proc = proc
        self._tick = 1.0 / os.sysconf("SC_CLK_TCK")
        self._searched: float | None = None
        #: Ticks of the members, as last seen, and of those that are gone.
        self._ticks: dict[int, int] = {leader: 0}
        self._gone = 0
        self._groups: dict[int, int] = {leader: leader}

    @property
    def pids(self) -> frozenset[int]:
        """The members, as of the last look."""
        return frozenset(self._ticks)

    @property
    def groups(self) -> frozenset[int]:
        """The process groups of the session, as of the last look."""
        return frozenset(self._groups.values()) | {self.leader}

    def cpu_seconds(self, now: float) -> float:
        """What the session's processes have used so far, in seconds; never less than before.

        A process that came and went between two searches is not in it.
        """
        if self._searched is None or now - self._searched >= SEARCH_EVERY:
            self._searched = now
            pids: Iterable[int] = [int(n) for n in os.listdir(self._proc) if n.isdecimal()]
        else:
            pids = list(self._ticks)
        ticks: dict[int, int] = {}
        groups: dict[int, int] = {}
        for pid in pids:
            seen = self._read(pid)
            if seen is not None:
                group, used = seen
                ticks[pid] = max(used, self._ticks.get(pid, 0))
                groups[pid] = group
        for pid, last in self._ticks.items():
            if pid not in ticks:
                self._gone += last
        self._ticks, self._groups = ticks, groups
        return (self._gone + sum(ticks.values())) * self._tick

    def _read(self, pid: int) -> tuple[int, int] | None:
        try:
            with open(f"{self._proc}/{pid}/stat", "rb") as file:
                data = file.read()
            # The name, in parentheses, may hold anything.
            fields = data[data.rindex(b")") + 2 :].split()
            if int(fields[3]) != self.leader:
                return None
            return int(fields[2]), int(fields[11]) + int(fields[12])
        except (OSError, ValueError, IndexError):
            return None


class Meter:
    """Judges from CPU time whether a program computes; pure."""

    def __init__(self, share: float = BUSY_SHARE, after: float = JUDGED_AFTER) -> None:
        self._share = share
        self._after = after
        self._cpu: float | None = None
        self._ran = 0.0
        #: Seconds of computing since this was taken last; never more than it ran.
        self.busy = 0.0

    def feed(self, cpu: float, ran: float) -> bool:
        """Whether it computed lately.

        :param cpu: all the CPU time that it has used so far, in seconds.
        :param ran: seconds since the last call in which it was free to run.
        """
        if self._cpu is None:
            self._cpu = cpu
            return False
        self._ran += ran
        if self._ran < self._after:
            return False
        used, self._cpu = cpu - self._cpu, cpu
        spent, self._ran = self._ran, 0.0
        self.busy += min(used, spent)
        return used >= self._share * spent

    def take_busy(self) -> float:
        """Seconds of computing since the last call."""
        busy, self.busy = self.busy, 0.0
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
