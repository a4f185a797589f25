"""A command of the user's that prints how much memory is used."""

from __future__ import annotations

import re

from turnstile.commands import CommandFailed, ask
from turnstile.vram.reading import GIB, MIB, ProbeError, Reading

COMMAND_TIMEOUT = 10.0
_UNITS = {"": 1, "k": 1024, "m": MIB, "g": GIB, "t": 1024 * GIB}
_NUMBER = r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?"
_PAIR = re.compile(rf"\s*{_NUMBER}[\s,;/]+{_NUMBER}(?:[\s,;/]|\Z)", re.IGNORECASE | re.ASCII)


def parse_reading(output: str) -> Reading:
    """The first two numbers of what a command printed: bytes used, bytes there are.

    ``M``, ``MiB`` and so on may follow each, all meaning powers of 1024.

    :raises ProbeError: if it does not begin with two such numbers.
    """
    match = _PAIR.match(output)
    if match is None:
        raise ProbeError(f"prints {output.strip()[:80]!r}, not used and total bytes")
    used, total = (
        int(float(number) * _UNITS[unit.lower()])
        for number, unit in (match.group(1, 2), match.group(3, 4))
    )
    if total <= 0 or used > total:
        raise ProbeError(f"prints {used} bytes used of {total}")
    return Reading(used, total)


class CommandProbe:
    """A line for the shell."""

    name = "command"

    def __init__(self, command: str) -> None:
        self._command = command

    def open(self) -> str:
        """See :class:`turnstile.vram.reading.Probe`."""
        reading = self.read()
        return f"VRAM_PROBE_COMMAND ({reading.total / GIB:.1f} GiB)"

    def read(self) -> Reading:
        """See :class:`turnstile.vram.reading.Probe`."""
        try:
            return parse_reading(ask(self._command, COMMAND_TIMEOUT))
        except CommandFailed as error:
            raise ProbeError(str(error)) from None
