"""A process that outlives its owner for a moment, to leave nothing of the owner's child behind.

A child's own means (``PR_SET_PDEATHSIG``) reach neither its children nor a child that must live on, so a second process
watches: it holds the read end of a pipe whose write end only the owner has. Whatever ends the owner closes that pipe,
SIGKILL included. At its end the guardian acts on the child's **whole group**:

* ``kill``: SIGKILL, repeated until no member is left;
* ``continue``: SIGCONT, repeated until none is stopped, for a child that its owner stops and continues.

A byte in the pipe means that the owner needs it no longer: it goes without acting.

The *group* is more than the process group that the leader leads: what is in a session that the leader made (the jobs
of a shell have groups of their own), and descendants that made a session of their own, as long as they can be traced. A
daemon, whose parents are gone, can't be: that takes a control group of the service manager's.

Standard library only, and no import of turnstile: it runs without a search path. The functions serve owners as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from enum import StrEnum

# Type checkers know this name; the module `typing` takes longer to import than all else here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

#: Seconds for which members that are stopped are continued, at least and at most.
CONTINUE_FOR = 0.5
CONTINUE_AT_MOST = 5.0

_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 1.0

_PROC = "/proc"


class Mode(StrEnum):
    """What happens to the group when the owner is gone."""

    KILL = "kill"
    CONTINUE = "continue"


# -- groups --------------------------------------------------------------------------------------------------------


class Process:
    """What ``/proc/PID/stat`` tells of a process.

    :ivar state: one letter of proc(5); ``T``: stopped, ``Z``: zombie.
    :ivar threads: those that exist. A zombie that still has others is a leader whose threads run on.
    :ivar birth: when it started, in clock ticks since boot: with the pid, its identity.
    """

    __slots__ = ("birth", "group", "parent", "pid", "session", "state", "threads")

    def __init__(
        self, pid: int, state: str, parent: int, group: int, session: int, threads: int, birth: int
    ) -> None:
        self.pid = pid
        self.state = state
        self.parent = parent
        self.group = group
        self.session = session
        self.threads = threads
        self.birth = birth

    @property
    def alive(self) -> bool:
        """Whether any of it runs: a zombie only waits for its parent."""
        return self.state not in "ZX" or self.threads > 1


def look_at(pid: int) -> Process | None:
    """One process, ``None`` if there is none or the system can't tell (no ``/proc``)."""
    try:
        with open(f"{_PROC}/{pid}/stat", "rb") as file:
            data = file.read()
        # The name, in parentheses, may hold anything.
        fields = data[data.rindex(b")") + 2 :].split()
        parent, group, session = map(int, fields[1:4])
        return Process(
            pid, fields[0].decode(), parent, group, session, int(fields[17]), int(fields[19])
        )
    except (OSError, ValueError, IndexError):
        return None


class Group:
    """The group of a leader, looked at and signalled as a whole.

    :param leader: a process that exists and leads, or is about to lead, a process group.
    """

    def __init__(self, leader: int) -> None:
        if leader <= 1:
            raise ValueError("not a process group")
        self.leader = leader
        self._can_look = look_at(os.getpid()) is not None
        first = look_at(leader)
        self._birth = first and first.birth
        #: Members outside the leader's session, which their parent's death would hide: pid and birth.
        self._strays: dict[int, int] = {}

    def members(self) -> list[Process]:
        """Those that are alive. Without ``/proc`` it is one that stands for all, while the process group exists."""
        if not self._can_look:
            try:
                os.killpg(self.leader, 0)
            except ProcessLookupError:
                return []
            except PermissionError:
                pass
            return [Process(self.leader, "?", 0, self.leader, self.leader, 1, 0)]
        processes = [look_at(int(name)) for name in os.listdir(_PROC) if name.isdecimal()]
        table = {process.pid: process for process in processes if process is not None}
        now = table.get(self.leader)
        # The number is given to another process only after the whole group is gone.
        reused = now is not None and now.birth != self._birth
        found: dict[int, Process] = {}
        for process in table.values():
            named = self.leader in (process.pid, process.group, process.session)
            if (named and not reused) or self._strays.get(process.pid) == process.birth:
                found[process.pid] = process
        children: dict[int, list[Process]] = {}
        for process in table.values():
            children.setdefault(process.parent, []).append(process)
        heads = list(found)
        while heads:
            for process in children.get(heads.pop(), ()):
                if process.pid not in found:
                    found[process.pid] = process
                    heads.append(process.pid)
        living = [process for process in found.values() if process.alive]
        self._strays = {
            process.pid: process.birth
            for process in living
            if self.leader not in (process.group, process.session)
        }
        return living

    def signal(self, *numbers: int) -> bool:
        """Send signals to every member; false if there was nobody who could get them."""
        sent = False
        # Before any of them dies, since those in other sessions are found by their parents.
        members = self.members()
        if any(process.group == self.leader for process in members):
            # In one step for the whole process group, so that none can fork its way out.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                for number in numbers:
                    os.killpg(self.leader, number)
                sent = True
        for process in members:
            if process.group != self.leader:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    for number in numbers:
                        os.kill(process.pid, number)
                    sent = True
        return sent


# -- the owner's side ----------------------------------------------------------------------------------------------


def command(leader: int, mode: Mode) -> list[str]:
    """The command line of a guardian; its standard input is to be the read end of the owner's pipe."""
    if leader <= 1:
        raise ValueError("not a process group")
    return [
        sys.executable,
        *("-I", "-S", "-E"),
        os.path.abspath(__file__),
        str(leader),
        Mode(mode).value,
    ]


class Guardian:
    """The owner's handle on a guardian that :func:`start_guardian` started. Dropping it is like dying."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it still watches."""
        return self._process.poll() is None

    def done(self) -> None:
        """Let it go without acting, and wait until it did. May be called more than once."""
        stdin = self._process.stdin
        assert stdin is not None
        if not stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                os.write(stdin.fileno(), b".")
            stdin.close()
        self._process.wait()


def start_guardian(leader: int, mode: Mode) -> Guardian:
    """Start a guardian for the group of ``leader``, a process that exists or is about to make its group.

    The owner is the calling process: the pipe's write end is close-on-exec, so that programs which it starts do not
    have it. A fork that execs nothing does, and keeps the guardian waiting for as long as it lives.

    :raises OSError: if it can't be started.
    """
    # Not at the top: a guardian itself has no use for it, and it takes longer than all the rest.
    import subprocess

    process = subprocess.Popen(
        command(leader, mode),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )
    return Guardian(process)


# -- the guardian itself -------------------------------------------------------------------------------------------


def _kill(group: Group) -> None:
    pause = _FIRST_PAUSE
    while group.members():
        if not group.signal(signal.SIGKILL) and group.members():
            _say(f"group {group.leader} may not be signalled by this user and was left")
            return
        # What is in the middle of a driver's call ends when the driver lets it.
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)


def _continue(group: Group) -> None:
    began = time.monotonic()
    pause = _FIRST_PAUSE
    while group.signal(signal.SIGCONT):
        elapsed = time.monotonic() - began
        stopped = any(process.state == "T" for process in group.members())
        if elapsed > (CONTINUE_AT_MOST if stopped else CONTINUE_FOR):
            return
        time.sleep(pause)
        pause = min(pause * 2, 0.1)


def _say(message: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"turnstile: guardian: {message}\n".encode())


def _main(arguments: Sequence[str]) -> int:
    # A service manager that stops a service signals all of its processes; this one must be the last.
    for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "ALRM", "TSTP"):
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    if os.getsid(0) != os.getpid():
        os.setsid()
    group, mode = Group(int(arguments[0])), Mode(arguments[1])
    if os.read(0, 1):
        return 0
    if group.members():
        if mode is Mode.KILL:
            _say(f"the owner is gone: killing process group {group.leader}")
            _kill(group)
        else:
            _say(f"the owner is gone: process group {group.leader} runs on")
            _continue(group)
    return 0


if __name__ == "__main__":
    os._exit(_main(sys.argv[1:]))
