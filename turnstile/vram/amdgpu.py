"""AMD's cards: the files that the kernel's amdgpu driver keeps in sysfs."""

from __future__ import annotations

import re
from pathlib import Path

from turnstile.vram.reading import GIB, Gpu, ProbeError, Reading, choose, normal_pci

SYSFS = Path("/sys/class/drm")
#: A card with less memory than this is part of the processor: its models live in the host's memory (GTT).
SMALL = 4 * GIB
_CARD = re.compile(r"card\d+")


class AmdgpuProbe:
    """``mem_info_vram_used`` and ``mem_info_vram_total`` (kernel documentation, gpu/amdgpu/driver-misc).

    Indices follow the PCI addresses. Reading them wakes no card that sleeps.

    :param gpu: which card; see :func:`choose`.
    """

    name = "amdgpu"

    def __init__(self, gpu: str | None = None, sysfs: Path = SYSFS) -> None:
        self._which = gpu
        self._sysfs = sysfs
        self._device: Path | None = None

    def open(self) -> str:
        """See :class:`turnstile.vram.reading.Probe`."""
        devices = self._devices()
        if not devices:
            raise ProbeError("no amdgpu card")
        gpus = [self._describe(index, device) for index, device in enumerate(devices)]
        gpu = choose(gpus, self._which)
        self._device = devices[gpu.index]
        self.read()
        return str(gpu)

    def read(self) -> Reading:
        """See :class:`turnstile.vram.reading.Probe`."""
        device = self._device
        if device is None:
            raise ProbeError("no amdgpu card")
        used, total = _number(device, "vram_used"), _number(device, "vram_total")
        if total < SMALL:
            used, total = used + _number(device, "gtt_used"), total + _number(device, "gtt_total")
        if not total:
            raise ProbeError("the card has no memory")
        return Reading(used, total)

    def _devices(self) -> list[Path]:
        found = set()
        try:
            for entry in self._sysfs.iterdir():
                # Its connectors are card0-DP-1 and so on.
                device = entry / "device"
                if _CARD.fullmatch(entry.name) and (device / "mem_info_vram_total").exists():
                    found.add(device.resolve())
        except OSError:
            return []
        return sorted(found, key=lambda device: (normal_pci(device.name) or "", device.name))

    @staticmethod
    def _describe(index: int, device: Path) -> Gpu:
        try:
            total = _number(device, "vram_total")
            if total < SMALL:
                total = 0  # never the one that is meant, beside a card
        except ProbeError:
            total = 0
        name = _line(device / "product_name") or "amdgpu"
        return Gpu(
            index, _line(device / "unique_id"), normal_pci(device.name) or "", name, total or None
        )


def _number(device: Path, what: str) -> int:
    path = device / f"mem_info_{what}"
    try:
        return int(path.read_text())
    except OSError as error:
        raise ProbeError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise ProbeError(f"{path}: not a number") from None


def _line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
