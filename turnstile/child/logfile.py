"""The file that a child's output goes to: it has it open itself, and it stays bounded while the child writes on.

The child writes to the file, not to a pipe: a pipe would end with us, and would block the child whenever its reader is
busy; and what it wrote last is in the file however it, or we, ended. The price is that the child can't be told to
reopen it, so that it is rotated under its hands: copied, then cut. Both use ``O_APPEND``, so the child goes on at the
new end. What it writes between the copy's last byte and the cut, some microseconds, is lost.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from twisted.logger import Logger

#: Bytes from which on the file is rotated, and how many older ones are kept.
MAX_BYTES = 4 << 20
BACKUPS = 3
#: The most bytes that are read for the last lines, and the longest that one of these may be.
TAIL_BYTES = 64 << 10
TAIL_LINE = 400
#: How many bytes are read first for each line.
LINE_BYTES = 1024

_CHUNK = 1 << 20
#: Escape sequences of terminals (colours, cursor), and control characters but tab.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _now() -> datetime:
    return datetime.now(UTC)


class RotatingLog:
    """The log of one program, whose output may hold what users typed: for its owner's eyes only.

    Older files are ``PATH.1`` (the latest) to ``PATH.N``.

    :param max_bytes: the size from which on it is rotated.
    :param backups: how many older files are kept; 0: none.
    """

    log = Logger()

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = MAX_BYTES,
        backups: int = BACKUPS,
        now: Callable[[], datetime] = _now,
    ) -> None:
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._backups = backups
        self._now = now
        self._fd = -1
        #: Where the output of the present run begins, here or in the latest older file.
        self._begin = 0
        self._rotated = 0

    def begin(self, program: Sequence[str]) -> int:
        """Open the file for a run of ``program``, with a line that says so; the descriptor to give to it.

        It stays ours, and open until the next run or :meth:`close`.

        :raises OSError: if the directory or file can't be made, or is none that may be written to.
        """
        self.close()
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY
        fd = os.open(self.path, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(f"{self.path} is not a regular file")
            self._fd = fd
            self.rotate_if_large()
            when = self._now().isoformat(timespec="seconds")
            line = f"turnstile: {when}: starting {shlex.join(program)}\n"
            # A disk that is full is no reason not to start.
            with suppress(OSError):
                os.write(fd, line.encode("utf-8", "surrogateescape"))
            self._begin, self._rotated = os.fstat(fd).st_size, 0
        except BaseException:
            self._fd = -1
            os.close(fd)
            raise
        return fd

    def close(self) -> None:
        """Close our end of it; a child that has it open writes on."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def rotate_if_large(self) -> None:
        """Start the file anew if it has reached its size. Trouble is logged."""
        if self._fd < 0:
            return
        try:
            if os.fstat(self._fd).st_size < self._max_bytes:
                return
            try:
                self._keep()
            except OSError as error:
                self.log.warn(
                    "the older part of {path} can't be kept: {reason}",
                    path=str(self.path),
                    reason=error.strerror or str(error),
                )
            os.ftruncate(self._fd, 0)
            self._rotated += 1
        except OSError as error:
            self.log.warn(
                "{path} can't be rotated: {reason}",
                path=str(self.path),
                reason=error.strerror or str(error),
            )

    def tail(self, lines: int) -> list[str]:
        """The last lines of the present run's output, without what only a terminal understands.

        Of a line that was written over (a progress bar) its last state counts. Empty ones are left out.
        """
        if self._fd < 0 or lines <= 0:
            return []
        begin = 0 if self._rotated else self._begin
        try:
            found = _lines(self._read(self._fd, begin, lines * LINE_BYTES))
            if len(found) < lines:
                found = _lines(self._read(self._fd, begin, TAIL_BYTES))
            if self._rotated and len(found) < lines:
                with suppress(OSError), open(self._older(1), "rb") as older:
                    begin = self._begin if self._rotated == 1 else 0
                    found = _lines(self._read(older.fileno(), begin, TAIL_BYTES)) + found
        except OSError as error:
            return [f"({self.path}: {error.strerror or error})"]
        return found[-lines:]

    def _older(self, number: int) -> str:
        return f"{self.path}.{number}"

    def _keep(self) -> None:
        if self._backups < 1:
            return
        for number in range(self._backups - 1, 0, -1):
            with suppress(FileNotFoundError):
                os.replace(self._older(number), self._older(number + 1))
        latest = self._older(1)
        with suppress(FileNotFoundError):
            os.unlink(latest)
        target = os.open(latest, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            position = 0
            while chunk := os.pread(self._fd, _CHUNK, position):
                position += len(chunk)
                while chunk:
                    chunk = chunk[os.write(target, chunk) :]
        except OSError:
            with suppress(OSError):
                os.unlink(latest)
            raise
        finally:
            os.close(target)

    @staticmethod
    def _read(fd: int, begin: int, most: int) -> bytes:
        size = os.fstat(fd).st_size
        most = min(most, TAIL_BYTES)
        begin = min(begin, size)
        start = max(begin, size - most)
        data = os.pread(fd, most, start)
        # Not the rest of a line that began before.
        return data.partition(b"\n")[2] if start > begin and b"\n" in data else data


def _lines(data: bytes) -> list[str]:
    found = []
    for raw in data.decode("utf-8", "replace").split("\n"):
        line = ""
        for state in raw.split("\r"):
            shown = _CONTROLS.sub("", _ESCAPES.sub("", state)).strip()
            line = shown or line
        if line:
            found.append(line if len(line) <= TAIL_LINE else line[: TAIL_LINE - 1] + "…")
    return found
