"""What a probe tells, and which of several cards is meant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import attrs

GIB = 1 << 30
MIB = 1 << 20


class ProbeError(Exception):
    """A probe cannot tell; the message says why."""


@attrs.frozen
class Reading:
    """Bytes of the card's memory, by whomever they are used."""

    used: int
    total: int


@attrs.frozen
class Gpu:
    """A card, as a probe lists it.

    :ivar index: its place in that probe's order.
    :ivar uuid: as the vendor's tools show it; empty if it has none.
    :ivar pci: its PCI address, in the kernel's spelling (``0000:03:00.0``); empty if it has none.
    :ivar total: bytes of memory; ``None``: it cannot tell.
    """

    index: int
    uuid: str
    pci: str
    name: str
    total: int | None

    def __str__(self) -> str:
        size = "" if self.total is None else f", {self.total / GIB:.1f} GiB"
        return f"GPU {self.index} ({self.name or self.pci or self.uuid}{size})"


class Probe(Protocol):
    """Something that can be asked, in a thread: both calls may block."""

    @property
    def name(self) -> str: ...

    def open(self) -> str:
        """Make sure that it works. Returns what it watches, for people; raises :class:`ProbeError`."""
        ...

    def read(self) -> Reading:
        """Ask. Raises :class:`ProbeError`."""
        ...


_PCI = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])")


def normal_pci(text: str) -> str | None:
    """A PCI address in the kernel's spelling; ``None`` if it is none.

    NVIDIA's tools write the domain with eight digits and in capitals, people leave it out.
    """
    match = _PCI.fullmatch(text.strip().lower())
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function}"


def choose(gpus: Sequence[Gpu], which: str | None) -> Gpu:
    """The card that ``which`` names: an index, a UUID or the beginning of one, or a PCI address.

    Nothing named: the one with the most memory, which is not the processor's own; of equal ones the first.

    :raises ProbeError: if there is none, or if several UUIDs begin so.
    """
    if not gpus:
        raise ProbeError("no card")
    if not which:
        return max(gpus, key=lambda gpu: (gpu.total or 0, -gpu.index))
    which = which.strip()
    if which.isdecimal():
        found = [gpu for gpu in gpus if gpu.index == int(which)]
    elif (pci := normal_pci(which)) is not None:
        found = [gpu for gpu in gpus if gpu.pci == pci]
    else:
        wanted = _bare(which)
        found = [gpu for gpu in gpus if wanted and _bare(gpu.uuid).startswith(wanted)]
        found = [gpu for gpu in found if _bare(gpu.uuid) == wanted] or found
    if not found:
        there = "; ".join(f"{gpu.index}, {gpu.uuid or 'no UUID'}, {gpu.pci}" for gpu in gpus)
        raise ProbeError(f"no card {which} (there: {there})")
    if len(found) > 1:
        raise ProbeError(f"several cards are {which}: say more of the UUID")
    return found[0]


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-")
