"""NVIDIA's cards: by NVML where ``nvidia-ml-py`` is installed, else by ``nvidia-smi``."""

from __future__ import annotations

import csv
import importlib
import shlex
import shutil
from typing import Any

from turnstile.commands import CommandFailed, ask
from turnstile.vram.reading import MIB, Gpu, ProbeError, Reading, choose, normal_pci

#: Seconds that nvidia-smi may take; on a host without persistence mode it has to wake the driver first.
SMI_TIMEOUT = 10.0
_FIELDS = ("index", "uuid", "pci.bus_id", "memory.used", "memory.total", "name")
_QUERY = ("--query-gpu=" + ",".join(_FIELDS), "--format=csv,noheader,nounits")


def _text(value: Any) -> str:
    # Bytes in older versions of nvidia-ml-py.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


class NvmlProbe:
    """NVML, by the module ``pynvml`` of the distribution ``nvidia-ml-py``.

    :param gpu: which card; see :func:`choose`.
    """

    name = "nvml"

    def __init__(self, gpu: str | None = None) -> None:
        self._which = gpu
        self._nvml: Any = None
        self._handle: Any = None

    def open(self) -> str:
        """See :class:`turnstile.vram.reading.Probe`."""
        if self._nvml is None:
            try:
                self._nvml = importlib.import_module("pynvml")
            except ImportError:
                raise ProbeError("nvidia-ml-py is not installed") from None
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            gpus = [self._describe(index) for index in range(nvml.nvmlDeviceGetCount())]
            gpu = choose(gpus, self._which)
            self._handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
        except (nvml.NVMLError, OSError) as error:
            raise ProbeError(str(error)) from None
        return str(gpu)

    def _describe(self, index: int) -> Gpu:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        pci = normal_pci(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
        try:
            total = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        except nvml.NVMLError:
            total = None
        uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        return Gpu(index, _text(uuid), pci or "", _text(name), total)

    def read(self) -> Reading:
        """See :class:`turnstile.vram.reading.Probe`."""
        if self._handle is None:
            # The driver was in trouble: begin anew, since it may have been loaded again.
            self.open()
        nvml = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except nvml.NVMLError as error:
            self._handle = None
            self._shut_down()
            raise ProbeError(str(error)) from None
        if not memory.total:
            raise ProbeError("the card has no memory of its own")
        return Reading(int(memory.used), int(memory.total))

    def _shut_down(self) -> None:
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            # It was not up.
            return


class NvidiaSmiProbe:
    """``nvidia-smi``, which is on every host with NVIDIA's driver and takes its time.

    :param gpu: which card; see :func:`choose`.
    """

    name = "nvidia-smi"

    def __init__(self, gpu: str | None = None, program: str = "nvidia-smi") -> None:
        self._which = gpu
        self._program = program
        self._id: str | None = None

    def open(self) -> str:
        """See :class:`turnstile.vram.reading.Probe`."""
        if shutil.which(self._program) is None:
            raise ProbeError("there is no nvidia-smi")
        rows = parse_smi(self._ask())
        gpu = choose([gpu for gpu, _ in rows], self._which)
        if dict(rows)[gpu] is None:
            raise ProbeError(f"{gpu} does not tell how much memory is used")
        self._id = gpu.uuid or gpu.pci or str(gpu.index)
        return str(gpu)

    def read(self) -> Reading:
        """See :class:`turnstile.vram.reading.Probe`."""
        if self._id is None:
            self.open()
        for gpu, reading in parse_smi(self._ask(f"--id={self._id}")):
            if reading is not None:
                return reading
            raise ProbeError(f"{gpu} does not tell how much memory is used")
        raise ProbeError("nvidia-smi shows no card")

    def _ask(self, *more: str) -> str:
        try:
            return ask(shlex.join([self._program, *_QUERY, *more]), SMI_TIMEOUT)
        except CommandFailed as error:
            raise ProbeError(str(error)) from None


def parse_smi(output: str) -> list[tuple[Gpu, Reading | None]]:
    """What ``nvidia-smi`` printed for our fields: each card, and its memory if it tells (in MiB).

    Cards that share the host's memory (GB10) print ``[N/A]``, broken ones ``[Unknown Error]`` and the like.

    :raises ProbeError: if a line is something else.
    """
    found: list[tuple[Gpu, Reading | None]] = []
    try:
        rows = list(csv.reader(output.splitlines(), skipinitialspace=True))
    except csv.Error as error:
        raise ProbeError(f"nvidia-smi prints no table: {error}") from None
    for row in rows:
        if not row:
            continue
        if len(row) < len(_FIELDS) or not row[0].strip().isdecimal():
            raise ProbeError(f"nvidia-smi says: {', '.join(row)[:200]}")
        index, uuid, pci, used, total = (field.strip() for field in row[:5])
        name = ", ".join(row[5:]).strip()
        size = _mib(total)
        gpu = Gpu(int(index), uuid, normal_pci(pci) or "", name, size)
        taken = _mib(used)
        known = taken is not None and bool(size)
        found.append((gpu, Reading(taken or 0, size or 0) if known else None))
    return found


def _mib(text: str) -> int | None:
    return int(text) * MIB if text.isdecimal() else None
