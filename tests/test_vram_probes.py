"""What the memory probes make of what hosts tell, and which of several cards is meant."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.vram.amdgpu import AmdgpuProbe
from turnstile.vram.choice import order
from turnstile.vram.command import CommandProbe, parse_reading
from turnstile.vram.nvidia import NvidiaSmiProbe, NvmlProbe, parse_smi
from turnstile.vram.reading import GIB, MIB, Gpu, ProbeError, Reading, choose, normal_pci

# -- which card ----------------------------------------------------------------------------------------------------

ONE = "GPU-2f1b7c0d-64a1-9a52-41f2-0c7d0a1f5b11"
TWO = "GPU-2f1b9e44-0b27-4d18-b0a6-5b1d7e6a9c33"
GPUS = [
    Gpu(0, ONE, "0000:01:00.0", "NVIDIA GeForce RTX 4060", 8 * GIB),
    Gpu(1, TWO, "0000:0a:00.0", "NVIDIA GeForce RTX 3090", 24 * GIB),
    Gpu(2, "", "0001:03:00.0", "another RTX 3090", 24 * GIB),
]


@pytest.mark.parametrize(
    ("which", "index"),
    [
        (None, 1),  # the most memory, and of those the first
        ("", 1),
        ("0", 0),
        (" 2 ", 2),
        (ONE, 0),
        (ONE.lower(), 0),
        (TWO.removeprefix("GPU-"), 1),
        ("GPU-2f1b9", 1),
        ("0000:01:00.0", 0),
        ("00000000:0A:00.0", 1),
        ("0a:00.0", 1),
        ("a:0.0", 1),
        ("0001:03:00.0", 2),
        ("1:03:00.0", 2),
    ],
)
def test_choice_of_a_card(which: str | None, index: int) -> None:
    assert choose(GPUS, which).index == index


@pytest.mark.parametrize("which", ["3", "GPU-ffff", "0000:03:00.0", "nonsense", "GPU-", "-1"])
def test_a_card_that_is_not_there(which: str) -> None:
    with pytest.raises(ProbeError, match=ONE):
        choose(GPUS, which)


def test_an_ambiguous_uuid() -> None:
    with pytest.raises(ProbeError, match="several"):
        choose(GPUS, "GPU-2f1b")
    exact = [Gpu(0, "GPU-ab", "", "", 1), Gpu(1, "GPU-abc", "", "", 1)]
    assert choose(exact, "GPU-ab").index == 0


def test_no_card_at_all() -> None:
    with pytest.raises(ProbeError, match="no card"):
        choose([], None)


def test_cards_that_do_not_tell_their_size() -> None:
    assert choose([Gpu(0, "", "", "", None), Gpu(1, "", "", "", None)], None).index == 0
    assert choose([Gpu(0, "", "", "", None), Gpu(1, "", "", "", 1)], None).index == 1


def test_a_card_is_told_so_that_it_can_be_found() -> None:
    assert str(GPUS[1]) == "GPU 1 (NVIDIA GeForce RTX 3090, 24.0 GiB)"
    assert str(Gpu(0, "", "0000:01:00.0", "", None)) == "GPU 0 (0000:01:00.0)"


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("00000000:01:00.0", "0000:01:00.0"),
        ("0000:C1:1F.7", "0000:c1:1f.7"),
        ("10000:01:00.0", "10000:01:00.0"),
        ("01:00", None),
        ("0000:01:00.8", None),
        ("GPU-01:00.0", None),
    ],
)
def test_pci_addresses(text: str, normal: str | None) -> None:
    assert normal_pci(text) == normal


def test_order_of_the_probes() -> None:
    assert order("auto", command=False, comfyui=False) == ("nvml", "amdgpu", "nvidia-smi")
    assert order("auto", command=True, comfyui=True) == (
        "command",
        "nvml",
        "amdgpu",
        "nvidia-smi",
        "comfyui",
    )
    assert order("nvml", command=True, comfyui=True) == ("nvml",)
    assert order("none", command=True, comfyui=True) == ()


# -- nvidia-smi ----------------------------------------------------------------------------------------------------

#: As it prints them for our query: two cards, one whose name has a comma in it.
TWO_CARDS = f"""\
0, {ONE}, 00000000:01:00.0, 387, 8188, NVIDIA GeForce RTX 4060
1, {TWO}, 00000000:0A:00.0, 13112, 24576, NVIDIA, of some kind
"""
#: A GB10, which shares the host's memory and has none of its own to tell of.
UNIFIED = (
    "0, GPU-2dee1e25-b3b5-007e-2b55-79f2d0f2ebe5, 0000000F:01:00.0, [N/A], [N/A], NVIDIA GB10\n"
)
BROKEN = f"0, {ONE}, 00000000:01:00.0, [Unknown Error], 8188, NVIDIA GeForce RTX 4060\n"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\n"


def test_smi_lists_cards_and_their_memory() -> None:
    (first, memory), (second, _) = parse_smi(TWO_CARDS)
    assert first == Gpu(0, ONE, "0000:01:00.0", "NVIDIA GeForce RTX 4060", 8188 * MIB)
    assert memory == Reading(387 * MIB, 8188 * MIB)
    assert second.name == "NVIDIA, of some kind"
    assert choose([first, second], "0A:00.0") is second


@pytest.mark.parametrize("output", [UNIFIED, BROKEN])
def test_smi_that_does_not_tell(output: str) -> None:
    [(gpu, memory)] = parse_smi(output)
    assert gpu.index == 0 and memory is None


def test_smi_of_a_card_on_an_odd_bus() -> None:
    assert parse_smi(UNIFIED)[0][0].pci == "000f:01:00.0"


@pytest.mark.parametrize("output", [MISMATCH, "No devices were found\n", "0, GPU-1\n"])
def test_smi_that_fails_is_quoted(output: str) -> None:
    with pytest.raises(ProbeError, match=output.split(",")[0].strip()):
        parse_smi(output)


@given(output=st.text(max_size=200))
def test_any_output_of_smi_is_an_answer_or_an_error(output: str) -> None:
    try:
        rows = parse_smi(output)
    except ProbeError:
        return
    assert all(isinstance(gpu, Gpu) for gpu, _ in rows)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A nvidia-smi on PATH that prints the file ``says``, and notes its arguments."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/args\ncat {tmp_path}/says\n. {tmp_path}/end\n'
    )
    program.chmod(0o755)
    (tmp_path / "says").write_text(TWO_CARDS)
    (tmp_path / "end").write_text("exit 0\n")
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_smi_is_asked_for_one_card(smi: Path) -> None:
    probe = NvidiaSmiProbe(None)
    assert probe.open() == "GPU 1 (NVIDIA, of some kind, 24.0 GiB)"
    (smi / "says").write_text(TWO_CARDS.splitlines()[1])
    assert probe.read() == Reading(13112 * MIB, 24576 * MIB)
    query = "--query-gpu=index,uuid,pci.bus_id,memory.used,memory.total,name --format=csv,noheader,nounits"
    assert (smi / "args").read_text().splitlines() == [query, f"{query} --id={TWO}"]


def test_smi_without_a_driver(smi: Path) -> None:
    (smi / "says").write_text(
        "NVIDIA-SMI has failed because it couldn't communicate with the driver.\n"
    )
    (smi / "end").write_text("exit 9\n")
    with pytest.raises(ProbeError, match="exit code 9: NVIDIA-SMI has failed"):
        NvidiaSmiProbe().open()


def test_smi_whose_card_does_not_tell(smi: Path) -> None:
    (smi / "says").write_text(UNIFIED)
    with pytest.raises(ProbeError, match=r"GB10.* does not tell"):
        NvidiaSmiProbe().open()


def test_smi_that_is_not_there() -> None:
    with pytest.raises(ProbeError, match="there is no nvidia-smi"):
        NvidiaSmiProbe(program="/nowhere/nvidia-smi").open()


# -- NVML ----------------------------------------------------------------------------------------------------------


class NvmlError(Exception):
    pass


class Nvml(ModuleType):
    """The functions of nvidia-ml-py that are used, with two cards."""

    NVMLError = NvmlError

    def __init__(self, *, as_bytes: bool = False) -> None:
        super().__init__("pynvml")
        self.as_bytes = as_bytes
        self.ups = 0
        self.downs = 0
        self.trouble: str | None = None
        self.used = [400 * MIB, 13 * GIB]
        self.totals = [8 * GIB, 24 * GIB]

    def _check(self) -> None:
        if self.trouble is not None:
            raise NvmlError(self.trouble)

    def nvmlInit(self) -> None:
        self._check()
        self.ups += 1

    def nvmlShutdown(self) -> None:
        self.downs += 1
        self._check()

    def nvmlDeviceGetCount(self) -> int:
        self._check()
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        self._check()
        return SimpleNamespace(index=index, up=self.ups)

    def nvmlDeviceGetUUID(self, handle: Any) -> str | bytes:
        uuid = (ONE, TWO)[handle.index]
        return uuid.encode() if self.as_bytes else uuid

    def nvmlDeviceGetName(self, handle: Any) -> str | bytes:
        name = ("NVIDIA GeForce RTX 4060", "NVIDIA GeForce RTX 3090")[handle.index]
        return name.encode() if self.as_bytes else name

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        return SimpleNamespace(busId=(b"00000000:01:00.0", b"00000000:0A:00.0")[handle.index])

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        self._check()
        if handle.up != self.ups:
            raise NvmlError("Uninitialized")
        used, total = self.used[handle.index], self.totals[handle.index]
        if not total:
            raise NvmlError("Not Supported")
        return SimpleNamespace(used=used, total=total, free=total - used)


@pytest.fixture(params=[False, True], ids=["text", "bytes"])
def nvml(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Nvml:
    module = Nvml(as_bytes=request.param)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_nvml_reads_the_chosen_card(nvml: Nvml) -> None:
    probe = NvmlProbe("01:00.0")
    assert probe.open() == "GPU 0 (NVIDIA GeForce RTX 4060, 8.0 GiB)"
    assert probe.read() == Reading(400 * MIB, 8 * GIB)
    nvml.used[0] = 7 * GIB
    assert probe.read() == Reading(7 * GIB, 8 * GIB)
    assert NvmlProbe(TWO).open().startswith("GPU 1 ")


def test_nvml_comes_back_after_trouble(nvml: Nvml) -> None:
    probe = NvmlProbe()
    probe.open()
    nvml.trouble = "GPU is lost"
    for _ in range(2):
        with pytest.raises(ProbeError, match="GPU is lost"):
            probe.read()
    nvml.trouble = None
    assert probe.read() == Reading(13 * GIB, 24 * GIB)
    assert nvml.ups == 2 and nvml.downs == 1


def test_nvml_without_a_driver(nvml: Nvml) -> None:
    nvml.trouble = "NVML Shared Library Not Found"
    with pytest.raises(ProbeError, match="Not Found"):
        NvmlProbe().open()


def test_nvml_of_a_card_without_memory_of_its_own(nvml: Nvml) -> None:
    nvml.totals[:] = [0, 0]
    probe = NvmlProbe("0")
    probe.open()
    with pytest.raises(ProbeError, match="Not Supported"):
        probe.read()


def test_nvml_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ProbeError, match="nvidia-ml-py is not installed"):
        NvmlProbe().open()


# -- amdgpu --------------------------------------------------------------------------------------------------------


class Host:
    """A tree as the kernel makes it: cards that are links into the PCI devices, and their connectors."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.drm = root / "class" / "drm"
        self.drm.mkdir(parents=True)

    def card(self, name: str, pci: str, **files: object) -> Path:
        device = self.root / "devices" / pci
        for node in (name, f"{name}-DP-1"):
            (device / "drm" / node).mkdir(parents=True)
            (self.drm / node).symlink_to(device / "drm" / node)
        (device / "drm" / name / "device").symlink_to(device)
        (device / "drm" / f"{name}-DP-1" / "device").symlink_to(device / "drm" / name)
        for key, value in files.items():
            (device / key).write_text(f"{value}\n")
        return device


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def vram(used: int, total: int, **more: object) -> dict[str, object]:
    return {"mem_info_vram_used": used, "mem_info_vram_total": total, **more}


def test_amdgpu_reads_the_card_beside_the_processors_own(host: Host) -> None:
    host.card("card0", "0000:0b:00.0", **vram(480 * MIB, 512 * MIB))
    card = host.card(
        "card1", "0000:03:00.0", **vram(27 * MIB, 20 * GIB), unique_id="2a5c81d9f13e7b40"
    )
    host.card("card2", "0000:00:02.0")  # not AMD's
    probe = AmdgpuProbe(None, host.drm)
    assert probe.open() == "GPU 0 (amdgpu, 20.0 GiB)"
    assert probe.read() == Reading(27 * MIB, 20 * GIB)
    (card / "mem_info_vram_used").write_text(f"{12 * GIB}\n")
    assert probe.read().used == 12 * GIB


@pytest.mark.parametrize("which", ["1", "0000:0c:00.0", "0C:00.0", "77", "GPU-77aa"])
def test_amdgpu_choice(host: Host, which: str) -> None:
    # Numbers of DRM nodes follow the order in which drivers were loaded; indices follow the addresses.
    host.card("card1", "0000:0c:00.0", **vram(2, 16 * GIB), unique_id="77aa")
    host.card("card2", "0000:03:00.0", **vram(1, 20 * GIB), unique_id="55bb")
    if which == "77":
        with pytest.raises(ProbeError, match="no card 77"):
            AmdgpuProbe(which, host.drm).open()
        return
    probe = AmdgpuProbe(which, host.drm)
    probe.open()
    assert probe.read() == Reading(2, 16 * GIB)


def test_amdgpu_of_a_processor_counts_what_it_borrows(host: Host) -> None:
    gtt = {"mem_info_gtt_used": 6 * GIB, "mem_info_gtt_total": 61 * GIB}
    host.card("card0", "0000:c5:00.0", **vram(480 * MIB, 512 * MIB, **gtt))
    probe = AmdgpuProbe(None, host.drm)
    probe.open()
    assert probe.read() == Reading(6 * GIB + 480 * MIB, 61 * GIB + 512 * MIB)


def test_amdgpu_that_is_not_there(host: Host, tmp_path: Path) -> None:
    for sysfs in (host.drm, tmp_path / "nowhere"):
        with pytest.raises(ProbeError, match="no amdgpu card"):
            AmdgpuProbe(None, sysfs).open()


def test_amdgpu_files_that_do_not_tell(host: Host) -> None:
    card = host.card("card0", "0000:03:00.0", **vram(1, 20 * GIB))
    probe = AmdgpuProbe(None, host.drm)
    probe.open()
    (card / "mem_info_vram_used").write_text("")
    with pytest.raises(ProbeError, match="mem_info_vram_used: not a number"):
        probe.read()
    (card / "mem_info_vram_used").unlink()
    with pytest.raises(ProbeError, match="mem_info_vram_used: No such file"):
        probe.read()


# -- commands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "used", "total"),
    [
        ("1234 5678\n", 1234, 5678),
        ("1234\n5678\n", 1234, 5678),
        ("  1 MiB / 2 MiB", MIB, 2 * MIB),
        ("1.5GiB,24 G", 3 * GIB // 2, 24 * GIB),
        ("512k;1m and more", 512 * 1024, MIB),
        ("10 B 20 b", 10, 20),
        ("0 8589934592", 0, 8 * GIB),
    ],
)
def test_what_a_command_prints(output: str, used: int, total: int) -> None:
    assert parse_reading(output) == Reading(used, total)


@pytest.mark.parametrize(
    "output", ["", "12", "used 1 of 2", "12 apples 13", "-1 5", "1 2x", "5 0", "7 6", "nan nan"]
)
def test_what_is_no_reading(output: str) -> None:
    with pytest.raises(ProbeError, match="prints"):
        parse_reading(output)


@given(output=st.text(max_size=60))
def test_any_output_is_a_sound_reading_or_an_error(output: str) -> None:
    try:
        reading = parse_reading(output)
    except ProbeError:
        return
    assert 0 <= reading.used <= reading.total and reading.total > 0


def test_a_command_is_run() -> None:
    probe = CommandProbe("echo 1GiB 8GiB")
    assert probe.open() == "VRAM_PROBE_COMMAND (8.0 GiB)"
    assert probe.read() == Reading(GIB, 8 * GIB)
    with pytest.raises(ProbeError, match="exit code 4: no card"):
        CommandProbe("echo no card >&2; exit 4").open()
