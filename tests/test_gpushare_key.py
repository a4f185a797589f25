"""Which card a process means."""

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from turnstile.gpushare import gpu_key
from turnstile.gpushare.errors import GpuKeyError, SegmentError
from turnstile.gpushare.gpu_key import (
    Card,
    choose_visible,
    find_key,
    hash_card,
    list_pci,
    parse_smi,
)

A = Card("GPU-aaaaaaaa-1111-2222-3333-444444444444", "RTX 3090")
B = Card("GPU-bbbbbbbb-1111-2222-3333-444444444444", "RTX 3090")
C = Card("GPU-cccccccc-1111-2222-3333-444444444444", "RTX 5080")

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere it is metal-0"
)


@pytest.fixture
def cards(monkeypatch):
    """The cards of this machine, as the test has it."""
    machine = SimpleNamespace(nvidia=[], pci=[])
    monkeypatch.setattr(gpu_key, "list_nvidia", lambda: machine.nvidia)
    monkeypatch.setattr(gpu_key, "list_pci", lambda: machine.pci)
    return machine


@pytest.mark.parametrize("gpu", ["none", "cpu", ""])
def test_no_card(gpu, cards):
    cards.nvidia = [A]
    assert find_key(gpu) is None


def test_nothing_is_registered_without_a_gpu(cards):
    assert find_key("auto", {}) is None


def test_a_key_is_a_key(cards):
    assert find_key("GPU-1234") == "GPU-1234"
    assert find_key("my.card-0") == "my.card-0"
    with pytest.raises(SegmentError, match="not a card's key"):
        find_key("my/card")


def test_by_number(cards):
    cards.nvidia = [A, C]
    assert find_key(1) == find_key("1") == C.uuid
    for number in (2, "2", -1):
        with pytest.raises(GpuKeyError, match=f"no GPU {number}: this system has 2"):
            find_key(number)
    cards.nvidia, cards.pci = [], ["pci-1", "pci-2"]
    assert find_key(1) == "pci-2"
    cards.pci = []
    with pytest.raises(GpuKeyError, match="no GPU 0: this system has 0"):
        find_key(0)


def test_others_than_nvidia(cards):
    cards.pci = ["pci-1", "pci-2"]
    assert find_key("auto", {}) == "pci-1"
    with pytest.raises(GpuKeyError, match="some are hidden"):
        find_key("auto", {"HIP_VISIBLE_DEVICES": "1"})
    cards.pci = ["pci-1"]
    assert find_key("auto", {"ROCR_VISIBLE_DEVICES": "0"}) == "pci-1"
    assert find_key("auto", {"HIP_VISIBLE_DEVICES": ""}) is None


@pytest.mark.parametrize(
    "cards, environ, chosen",
    [
        ([A], {}, A),
        ([A, B], {}, A),
        ([A, B], {"CUDA_VISIBLE_DEVICES": "1"}, B),
        ([A, B], {"CUDA_VISIBLE_DEVICES": " 1 , 0"}, B),
        ([A, B], {"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}, B),
        ([A, C], {"CUDA_VISIBLE_DEVICES": C.uuid + ",0"}, C),
        ([A, C], {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, C),
        ([A, C], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, A),
        # What hides all cards from CUDA.
        ([A], {"CUDA_VISIBLE_DEVICES": ""}, None),
        ([A], {"CUDA_VISIBLE_DEVICES": "-1"}, None),
        ([A], {"CUDA_VISIBLE_DEVICES": "1"}, None),
        ([A], {"CUDA_VISIBLE_DEVICES": "none"}, None),
    ],
)
def test_what_cuda_shows_first(cards, environ, chosen):
    assert choose_visible(cards, environ) == (chosen and chosen.uuid)


def test_an_instance_of_a_divided_card():
    assert choose_visible([A], {"CUDA_VISIBLE_DEVICES": "MIG-77"}) == "MIG-77"


@pytest.mark.parametrize(
    "environ, words",
    [
        ({}, "different models"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "different models"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, "2 GPUs have such a UUID"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-dddd"}, "0 GPUs have such a UUID"),
    ],
)
def test_what_only_cuda_knows(environ, words):
    with pytest.raises(GpuKeyError, match=words):
        choose_visible([A, C], environ)


def test_auto_goes_by_the_environment(cards, monkeypatch):
    cards.nvidia = [A, B]
    assert find_key("auto", {"CUDA_VISIBLE_DEVICES": "1"}) == B.uuid
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_key() == A.uuid


# -- NVML and nvidia-smi


class Nvml:
    """NVML as the driver's library has it: results through pointers, 0 for success."""

    def __init__(self, cards, init=0, broken=()):
        self.cards, self.init, self.broken = cards, init, broken
        self.shut_down = 0

    def nvmlInit_v2(self):
        return self.init

    def nvmlShutdown(self):
        self.shut_down += 1

    def nvmlDeviceGetCount_v2(self, count):
        if "count" in self.broken:
            return 999
        count._obj.value = len(self.cards)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        if index.value in self.broken:
            return 15  # the GPU is lost
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetUUID(self, handle, buffer, size):
        buffer.value = self.cards[handle.value - 1].uuid.encode()
        return 0

    def nvmlDeviceGetName(self, handle, buffer, size):
        if "name" in self.broken:
            return 3
        buffer.value = self.cards[handle.value - 1].model.encode()
        return 0


@pytest.mark.parametrize(
    "library, found",
    [
        (Nvml([A, C]), [A, C]),
        (Nvml([]), []),
        (Nvml([A], init=9), []),
        (Nvml([A, B, C], broken=(1,)), [A, C]),
        (Nvml([A], broken=("count",)), []),
        (Nvml([A], broken=("name",)), [Card(A.uuid, "")]),
    ],
)
def test_nvml(library, found, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert gpu_key.list_nvidia() == found
    assert library.shut_down == (0 if library.init else 1)


def test_without_nvml_the_program_is_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_key, "_NVML_NAMES", ("libno-such.so.1",))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_key.list_nvidia() == []
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\n[ "$*" = "--query-gpu=uuid,name --format=csv,noheader" ] || exit 2\n'
        f'echo "{A.uuid}, {A.model}"\necho "{C.uuid}, {C.model}"\n'
    )
    program.chmod(0o755)
    assert gpu_key.list_nvidia() == [A, C]
    program.write_text("#!/bin/sh\necho no devices were found\nexit 6\n")
    assert gpu_key.list_nvidia() == []

    def hang(*arguments, **options):
        raise subprocess.TimeoutExpired(arguments, 10)

    monkeypatch.setattr(subprocess, "run", hang)
    assert gpu_key.list_nvidia() == []


def test_what_the_program_prints():
    assert parse_smi("GPU-1, Tesla, with a comma\n\nrubbish\nGPU-2, X\n") == [
        Card("GPU-1", "Tesla, with a comma"),
        Card("GPU-2", "X"),
    ]


# -- PCI


def add_device(root, address, **files):
    device = root / "devices" / address
    device.mkdir(parents=True)
    driver = files.pop("driver", None)
    if driver:
        target = root / "drivers" / driver
        target.mkdir(parents=True, exist_ok=True)
        os.symlink(target, device / "driver")
    # "class" is no name for an argument
    for name, value in files.items():
        (device / name.rstrip("_")).write_text(value + "\n")


def test_pci_cards(tmp_path):
    amd = dict(vendor="0x1002", device="0x744c", subsystem_vendor="0x1", subsystem_device="0x2")
    add_device(tmp_path, "0000:0a:00.0", class_="0x030000", driver="amdgpu", **amd)
    add_device(tmp_path, "0000:03:00.0", class_="0x030000", driver="amdgpu", **amd)
    add_device(tmp_path, "0000:04:00.0", class_="0x120000", driver="amdgpu", **amd)
    # Integrated graphics, a console of a server, of a virtual machine, a network card, nothing.
    add_device(tmp_path, "0000:00:02.0", class_="0x030000", driver="i915", vendor="0x8086")
    add_device(tmp_path, "0000:01:00.0", class_="0x030000", driver="ast")
    add_device(tmp_path, "0000:00:03.0", class_="0x030000")
    add_device(tmp_path, "0000:00:04.0", class_="0x020000", driver="e1000")
    add_device(tmp_path, "0000:00:05.0")
    keys = list_pci(str(tmp_path / "devices"))
    assert len(set(keys)) == 3
    description = "amdgpu 0x1002 0x744c 0x1 0x2"
    assert keys == [hash_card(description, f"0000:{slot}:00.0") for slot in ("03", "04", "0a")]
    assert all(len(key) == 20 and key.startswith("pci-") for key in keys)


def test_no_pci(tmp_path):
    assert list_pci(str(tmp_path / "nothing")) == []


def test_the_hash_stays_what_it_is():
    """Peers of other versions must find the same."""
    assert hash_card("amdgpu 0x1002", "0000:03:00.0") == "pci-1f24f02def6dc233"
