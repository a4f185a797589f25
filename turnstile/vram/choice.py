"""Which probes are tried, in which order."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from turnstile.config import Config
from turnstile.engines.client import ClientError, JsonClient
from turnstile.engines.comfy_free import device_memory
from turnstile.vram.amdgpu import AmdgpuProbe
from turnstile.vram.command import CommandProbe
from turnstile.vram.nvidia import NvidiaSmiProbe, NvmlProbe
from turnstile.vram.reading import GIB, Probe, ProbeError, Reading
from turnstile.vram.watch import LOOK_TIMEOUT, Source, Threaded, Vram
from turnstile.vram.worker import Worker

AUTO, NONE, COMFYUI, COMMAND = "auto", "none", "comfyui", "command"


class ComfySource:
    """ComfyUI's ``/system_stats``: the memory of the card that it runs on, by whomever it is used."""

    name = COMFYUI

    def __init__(self, client: JsonClient) -> None:
        self._client = client

    def open(self) -> Deferred[str]:
        """See :class:`turnstile.vram.watch.Source`."""
        return self.read().addCallback(lambda reading: f"its card ({reading.total / GIB:.1f} GiB)")

    def read(self) -> Deferred[Reading]:
        """See :class:`turnstile.vram.watch.Source`."""

        def seen(stats: object) -> Reading:
            memory = device_memory(stats, 0.0)
            if memory is None:
                raise ProbeError("it runs on no card")
            return Reading(memory.used, memory.total)

        def failed(failure: Failure) -> None:
            failure.trap(ClientError)
            raise ProbeError(f"ComfyUI does not answer ({failure.getErrorMessage()})")

        d: Deferred[Any] = self._client.get_json("/system_stats", LOOK_TIMEOUT)
        return d.addErrback(failed).addCallback(seen)


def order(probe: str, *, command: bool, comfyui: bool) -> tuple[str, ...]:
    """The names of the probes to be tried.

    :param probe: VRAM_PROBE.
    :param command: whether there is a command.
    :param comfyui: whether there is a ComfyUI.
    """
    if probe == NONE:
        return ()
    if probe != AUTO:
        return (probe,)
    # Who sets a command means it to be used; the quick ones come before those that start a program or ask an engine.
    return (
        *((COMMAND,) if command else ()),
        "nvml",
        "amdgpu",
        "nvidia-smi",
        *((COMFYUI,) if comfyui else ()),
    )


def make_vram(reactor: Any, config: Config, comfyui: JsonClient | None = None) -> Vram:
    """The probe of the configuration.

    :param comfyui: calls to ComfyUI, if there is one.
    """
    worker = Worker(reactor)

    def make(name: str) -> Source | None:
        if name == COMFYUI:
            return None if comfyui is None else ComfySource(comfyui)
        probe: Probe
        if name == COMMAND:
            probe = CommandProbe(config.vram_probe_command or "")
        elif name == "nvml":
            probe = NvmlProbe(config.gpu)
        elif name == "amdgpu":
            probe = AmdgpuProbe(config.gpu)
        else:
            probe = NvidiaSmiProbe(config.gpu)
        return Threaded(probe, worker)

    names = order(
        config.vram_probe,
        command=config.vram_probe_command is not None,
        comfyui=comfyui is not None,
    )
    return Vram(
        reactor,
        [source for source in map(make, names) if source is not None],
        wait=config.vram_wait,
        free=int(config.free_gib * GIB),
        named=config.vram_probe not in (AUTO, NONE),
        on_stop=worker.stop,
    )
