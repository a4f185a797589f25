"""Which processes listen on a TCP port of this machine, as far as that can be seen (Linux, ``/proc``)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

import attrs

from turnstile.child.guardian import Group

_PROC = "/proc"
_TABLES = ("net/tcp", "net/tcp6")
_LISTEN = "0A"


@attrs.frozen
class Listener:
    """A process that listens.

    :ivar command: its command line's first word, or its name.
    """

    pid: int
    command: str

    def __str__(self) -> str:
        return f"{self.command} (pid {self.pid})"


def listeners_on(port: int, leader: int | None = None) -> list[Listener]:
    """Who listens on a port, under whatever address; nobody if the group of ``leader`` does.

    Other users' processes can't be seen: an empty list proves nothing.
    """
    wanted = {f"socket:[{inode}]" for inode in _inodes(port)}
    if not wanted:
        return []
    # These first: on a host with many processes it takes long to look at all that they have open.
    if leader is not None and any(_holds(str(p.pid), wanted) for p in Group(leader).members()):
        return []
    with suppress(OSError):
        pids = [name for name in os.listdir(_PROC) if name.isdecimal() and _holds(name, wanted)]
        return [Listener(int(pid), _command(pid)) for pid in sorted(pids, key=int)]
    return []


def _inodes(port: int) -> Iterable[str]:
    for table in _TABLES:
        with (
            suppress(OSError),
            open(f"{_PROC}/{table}", encoding="ascii", errors="replace") as file,
        ):
            for line in file:
                fields = line.split()
                if len(fields) > 9 and fields[3] == _LISTEN:
                    if int(fields[1].rpartition(":")[2], 16) == port:
                        yield fields[9]


def _holds(pid: str, wanted: set[str]) -> bool:
    # Another user's, or just gone.
    with suppress(OSError):
        for fd in os.listdir(f"{_PROC}/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"{_PROC}/{pid}/fd/{fd}") in wanted:
                    return True
    return False


def _command(pid: str) -> str:
    for name in ("cmdline", "comm"):
        with suppress(OSError), open(f"{_PROC}/{pid}/{name}", "rb") as file:
            word = file.read(4096).split(b"\0")[0].decode("utf-8", "replace").strip()
            if word:
                return os.path.basename(word)
    return "a process"
