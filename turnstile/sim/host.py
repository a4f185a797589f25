"""A simulated GPU host: one card, and the engines on it."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from .card import GIB, Card
from .comfyui import ComfySim
from .llama import LlamaSim
from .ollama import OllamaSim


class GpuHost:
    """One card with several engines; only the enabled ones listen.

    ``speed`` 100 makes every simulated second last 10 ms.  Port 0: the kernel picks one.
    ``ollama_options``, ``comfy_options`` and ``llama_options`` go to `OllamaSim`, `ComfySim` and
    `LlamaSim`.
    """

    def __init__(
        self,
        reactor: Any,
        speed: float = 1.0,
        total_vram: int = 16 * GIB,
        ollama: bool = True,
        comfy: bool = True,
        *,
        llama: bool = False,
        ollama_port: int = 0,
        comfy_port: int = 0,
        llama_port: int = 0,
        interface: str = "127.0.0.1",
        on_full: str = "page",
        ollama_options: dict[str, Any] | None = None,
        comfy_options: dict[str, Any] | None = None,
        llama_options: dict[str, Any] | None = None,
    ) -> None:
        self.card = Card(reactor, total_vram, on_full=on_full)
        self.ollama = OllamaSim(self.card, reactor, **{"speed": speed, **(ollama_options or {})})
        self.comfy = ComfySim(self.card, reactor, **{"speed": speed, **(comfy_options or {})})
        self.llama = LlamaSim(self.card, reactor, **{"speed": speed, **(llama_options or {})})
        self.interface = interface
        self._ports = [
            (engine, port)
            for engine, port, enabled in (
                (self.ollama, ollama_port, ollama),
                (self.comfy, comfy_port, comfy),
                (self.llama, llama_port, llama),
            )
            if enabled
        ]

    def start(self) -> Deferred[None]:
        """Start the enabled engines; a port that is taken fails it, with nothing left open."""
        return Deferred.fromCoroutine(self._start())

    async def _start(self) -> None:
        try:
            for engine, port in self._ports:
                engine.listen(port, self.interface)
        except Exception:
            await self.stop()
            raise

    def stop(self) -> Deferred[None]:
        """End all; afterwards nothing of the host is left in the reactor."""
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        for stopping in [self.ollama.stop(), self.comfy.stop(), self.llama.stop()]:
            await stopping
