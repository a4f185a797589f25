"""Which card: a key that every process of this host finds for the same one.

NVIDIA cards are known by the UUID that their management library (NVML) or ``nvidia-smi`` tells; nothing here
initialises CUDA, so a process may fork afterwards. An Apple GPU is ``metal-0``; any other card is known by a hash
of its description and PCI address.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from turnstile.gpushare.errors import GpuKeyError
from turnstile.gpushare.shm import check_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from collections.abc import Mapping, Sequence

#: Values of ``gpu`` that mean no card.
NONE = ("none", "cpu", "")

_NVML_NAMES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
_UUID_PREFIXES = ("GPU-", "MIG-")
_SMI_SECONDS = 10.0
#: Drivers of cards that compute. A display controller with any other (integrated graphics, a server's
#: console, a virtual machine's) is no card to share.
_PCI_DRIVERS = ("amdgpu", "nvidia", "xe")


class Card(NamedTuple):
    """An NVIDIA card, in the order of its PCI address."""

    uuid: str
    model: str


def find_key(gpu: str | int = "auto", environ: Mapping[str, str] = os.environ) -> str | None:
    """The key for ``gpu`` (see `Peer.join`); None for no card.

    Raises `GpuKeyError` if it is not clear which card is meant or there is none with that number,
    `SegmentError` for a key that can't be one.
    """
    if isinstance(gpu, int) or (gpu.isascii() and gpu.isdecimal()):
        return _find_by_number(int(gpu))
    if gpu in NONE:
        return None
    if gpu == "auto":
        return _find_first(environ)
    check_key(gpu)
    return gpu


def _find_by_number(number: int) -> str:
    if sys.platform.startswith("darwin") and number == 0:
        return "metal-0"
    cards = list_nvidia()
    keys = [card.uuid for card in cards] or list_pci()
    if not 0 <= number < len(keys):
        raise GpuKeyError(f"there is no GPU {number}: this system has {len(keys)}")
    return keys[number]


def _find_first(environ: Mapping[str, str]) -> str | None:
    if sys.platform.startswith("darwin"):
        return "metal-0"
    cards = list_nvidia()
    if cards:
        return choose_visible(cards, environ)
    keys = list_pci()
    visible = environ.get("HIP_VISIBLE_DEVICES", environ.get("ROCR_VISIBLE_DEVICES"))
    if visible is not None and len(keys) > 1:
        raise GpuKeyError(
            "several GPUs, of which some are hidden: say which one is meant by its number"
        )
    return keys[0] if keys and visible != "" else None


def choose_visible(cards: Sequence[Card], environ: Mapping[str, str]) -> str | None:
    """The UUID of the first card that CUDA would show this process; None if it shows none.

    `GpuKeyError` where only CUDA itself could tell: it counts the fastest card first unless
    CUDA_DEVICE_ORDER=PCI_BUS_ID, and NVML doesn't know which that is.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    first = "0" if visible is None else visible.split(",")[0].strip()
    if first.startswith(_UUID_PREFIXES):
        if first.startswith("MIG-"):
            return first
        found = [card.uuid for card in cards if card.uuid.startswith(first)]
        if len(found) != 1:
            raise GpuKeyError(f"CUDA_VISIBLE_DEVICES={visible}: {len(found)} GPUs have such a UUID")
        return found[0]
    if not first.isdecimal() or int(first) >= len(cards):
        return None  # what CUDA makes of it, too: no device
    by_address = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if len(cards) > 1 and not by_address and len({card.model for card in cards}) > 1:
        raise GpuKeyError(
            "there are GPUs of different models, and CUDA counts the fastest first: set"
            " CUDA_DEVICE_ORDER=PCI_BUS_ID, or say which GPU is meant"
        )
    return cards[int(first)].uuid


# -- NVIDIA ----------------------------------------------------------------------------------------


def list_nvidia() -> list[Card]:
    """NVIDIA cards by PCI address; none if there is no driver."""
    library = _load_nvml()
    if library is not None:
        return _ask_nvml(library)
    return _ask_smi()


def _load_nvml() -> ctypes.CDLL | None:
    import ctypes

    for name in _NVML_NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _ask_nvml(library: ctypes.CDLL) -> list[Card]:
    import ctypes

    if library.nvmlInit_v2():
        return []  # a library without its driver
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        cards = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
                continue
            texts = []
            for ask in (library.nvmlDeviceGetUUID, library.nvmlDeviceGetName):
                buffer = ctypes.create_string_buffer(96)
                failed = ask(handle, buffer, ctypes.c_uint(len(buffer)))
                texts.append("" if failed else buffer.value.decode("ascii", "replace"))
            if texts[0]:
                cards.append(Card(*texts))
        return cards
    finally:
        library.nvmlShutdown()


def _ask_smi() -> list[Card]:
    import shutil
    import subprocess

    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
    if program is None:
        return []
    command = [program, "--query-gpu=uuid,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SMI_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_smi(done.stdout) if done.returncode == 0 else []


def parse_smi(text: str) -> list[Card]:
    """The cards in what ``nvidia-smi --query-gpu=uuid,name --format=csv,noheader`` printed."""
    cards = []
    for line in text.splitlines():
        uuid, _, model = (part.strip() for part in line.partition(","))
        if uuid.startswith("GPU-"):
            cards.append(Card(uuid, model))
    return cards


# -- others ----------------------------------------------------------------------------------------


def list_pci(root: str = "/sys/bus/pci/devices") -> list[str]:
    """Keys of the cards that Linux shows on the PCI bus, by address."""
    try:
        addresses = sorted(os.listdir(root))
    except OSError:
        return []
    keys = []
    for address in addresses:
        device = os.path.join(root, address)
        # Class 03: display controllers; 1200: processing accelerators (Instinct cards).
        if not _read(device, "class").startswith(("0x03", "0x1200")):
            continue
        driver = os.path.basename(os.path.realpath(os.path.join(device, "driver")))
        if driver not in _PCI_DRIVERS:
            continue
        ids = ("vendor", "device", "subsystem_vendor", "subsystem_device")
        description = " ".join([driver, *(_read(device, name) for name in ids)])
        keys.append(hash_card(description, address))
    return keys


def hash_card(description: str, address: str) -> str:
    """The key of a card that has no UUID."""
    import hashlib

    digest = hashlib.sha256(f"{description}\n{address}".encode()).hexdigest()
    return f"pci-{digest[:16]}"


def _read(device: str, name: str) -> str:
    try:
        with open(os.path.join(device, name), encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
