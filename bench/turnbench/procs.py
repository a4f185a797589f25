"""Processes under measurement: started, waited for, weighed (/proc) and ended."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

MIB = 1 << 20
_TICKS = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Process:
    """One program and its children.

    :param log: where its output goes; shown if it ends by itself.
    """

    def __init__(
        self, argv: Sequence[str], log: Path, *, env: dict[str, str] | None = None
    ) -> None:
        self._log = log
        with log.open("wb") as file:
            self._popen = subprocess.Popen(
                list(argv),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.began = time.monotonic()

    def wait_for(self, port: int, seconds: float = 30.0, every: float = 0.01) -> float:
        """Seconds from the start until somebody listens on ``port``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._popen.poll() is not None:
                break
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return time.monotonic() - self.began
            time.sleep(every)
        raise SystemExit(
            f"bench: {self._popen.args!r} does not listen on {port}:\n"
            + self._log.read_text(errors="replace")[-2000:]
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def _pids(self) -> list[int]:
        """It and its children's."""
        found = [self.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += map(int, (task / "children").read_text().split())
        return found

    def cpu(self) -> float:
        """CPU seconds used so far, in user and system mode."""
        ticks = 0
        for pid in self._pids():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(stat[11]) + int(stat[12])
        return ticks / _TICKS

    def memory(self, field: str = "VmRSS") -> int:
        """Bytes resident now, children included; ``VmHWM``: the most since :meth:`forget_peak`."""
        total = 0
        for pid in self._pids():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                found = re.search(rf"^{field}:\s+(\d+) kB", status, re.M)
                total += int(found[1]) * 1024 if found is not None else 0
        return total

    def forget_peak(self) -> None:
        """Begin to look for the most memory anew."""
        for pid in self._pids():
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    @contextlib.contextmanager
    def growth(self) -> Iterator[list[int]]:
        """A list that holds, afterwards, by how many bytes the memory grew at most in the block."""
        grown: list[int] = []
        before = self.memory()
        self.forget_peak()
        yield grown
        grown.append(max(0, self.memory("VmHWM") - before))

    def stop(self) -> None:
        """End it."""
        if self._popen.poll() is None:
            self._popen.terminate()
            try:
                self._popen.wait(15.0)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
