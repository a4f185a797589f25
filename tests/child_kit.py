"""Real processes for the tests of children: looked at without the code under test, and none left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import turnstile

ROOT = Path(turnstile.__file__).parent.parent
#: Seconds after which something counts as never coming.
PATIENCE = 20.0


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Wait, blocking, for ``condition`` to hold; returns what it returned."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"it never came true: {what}")
        time.sleep(0.002)


def stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on; empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text[text.rindex(")") + 2 :].split()


def state(pid: int) -> str:
    """One letter; empty if there is no such process."""
    return (stat(pid) or [""])[0]


def runs(pid: int) -> bool:
    """Whether a process lives; a zombie does not."""
    return state(pid) not in ("", "Z", "X")


def stopped(pid: int) -> bool:
    """Whether SIGSTOP has it."""
    return state(pid) == "T"


def descriptors(pid: int) -> dict[int, str]:
    """A process's open files, by descriptor."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def holders(pipe: str) -> dict[int, set[int]]:
    """Who has one end of a pipe (``pipe:[INODE]``) open: pid and descriptors."""
    found: dict[int, set[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            fds = {fd for fd, what in descriptors(int(name)).items() if what == pipe}
            if fds:
                found[int(name)] = fds
    return found


def writers(pipe: str) -> set[int]:
    """Who can write to a pipe."""
    found = set()
    for pid, fds in holders(pipe).items():
        for fd in fds:
            with suppress(OSError):
                info = Path(f"/proc/{pid}/fdinfo/{fd}").read_text()
                flags = next(line for line in info.splitlines() if line.startswith("flags:"))
                if int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                    found.add(pid)
    return found


class Owner:
    """A process that owns a child; it runs a piece of Python, which prints numbers, a line each."""

    def __init__(self, program: str, *arguments: str, **more: Any) -> None:
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        # A file: what runs on after the owner has it open, and a pipe would not end.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environ,
            text=True,
            **more,
        )
        self.seen: list[int] = []

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def number(self) -> int:
        """The next number that it prints, a process id; remembered for the end."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.strip().isdecimal(), (line, self.process.poll())
        self.seen.append(int(line))
        return self.seen[-1]

    @property
    def errors(self) -> str:
        """What it and its children wrote to standard error."""
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Wait for its end."""
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            assert pipe is not None
            pipe.close()
        self.process.wait()


@contextmanager
def owner(program: str, *arguments: str, **more: Any) -> Iterator[Owner]:
    """An owner, killed at the end with all the processes whose numbers it printed."""
    it = Owner(program, *arguments, **more)
    try:
        yield it
    finally:
        it.process.kill()
        for pid in it.seen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        it.close()


def guardians(leader: int) -> list[int]:
    """The guardians of a process group."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            if str(leader).encode() in words and any(w.endswith(b"guardian.py") for w in words):
                found.append(int(name))
    return found
