"""A simulated GPU host: one card, and the engines on it."""

from __future__ import annotations

import socket
import sys
from typing import Any

from twisted.internet.defer import Deferred

from .card import GIB, Card
from .card_server import CardServer
from .comfyui import ComfySim
from .llama import LlamaSim
from .ollama import OllamaSim
from .sd_fleet import SdFleet


class GpuHost:
    """One card with several engines; only the enabled ones listen.

    ``speed`` 100 makes every simulated second last 10 ms.  Port 0: the kernel picks one.
    ``ollama_options``, ``comfy_options``, ``llama_options`` and ``sd_options`` go to `OllamaSim`,
    `ComfySim`, `LlamaSim` and `SdSim`.  Nobody starts sd-server but whoever owns it: with ``sd``
    there is a port for it (`sd_port`), and a card for the processes that `sd_command` starts;
    processes in memory are started by `sd` itself.
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
        sd: bool = False,
        ollama_port: int = 0,
        comfy_port: int = 0,
        llama_port: int = 0,
        interface: str = "127.0.0.1",
        on_full: str = "page",
        ollama_options: dict[str, Any] | None = None,
        comfy_options: dict[str, Any] | None = None,
        llama_options: dict[str, Any] | None = None,
        sd_options: dict[str, Any] | None = None,
        sd_release_delay: float = 0.0,
    ) -> None:
        self.card = Card(reactor, total_vram, on_full=on_full)
        self.ollama = OllamaSim(self.card, reactor, **{"speed": speed, **(ollama_options or {})})
        self.comfy = ComfySim(self.card, reactor, **{"speed": speed, **(comfy_options or {})})
        self.llama = LlamaSim(self.card, reactor, **{"speed": speed, **(llama_options or {})})
        options = {"speed": speed, **(sd_options or {})}
        self.sd = SdFleet(self.card, reactor, **options)
        #: Lends the card to real processes of sd-server; has what is to be known of them.
        self.cards = CardServer(
            self.card,
            reactor,
            faults=self.sd.faults,
            options=options,
            release_delay=sd_release_delay / speed,
        )
        self._with_sd = sd
        self._reserved: socket.socket | None = None
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
            if self._with_sd:
                self.cards.listen(0, "127.0.0.1")
                self._reserve()
        except Exception:
            await self.stop()
            raise

    def _reserve(self) -> None:
        """Take a port for sd-server without listening on it, so that nobody else gets it."""
        self._reserved = reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))

    @property
    def sd_port(self) -> int:
        """The port that sd-server is to listen on."""
        if self._reserved is None:
            raise RuntimeError("the host has no sd-server, or was not started")
        port: int = self._reserved.getsockname()[1]
        return port

    @property
    def sd_url(self) -> str:
        """Where sd-server will be."""
        return f"http://127.0.0.1:{self.sd_port}"

    @property
    def sd_command(self) -> list[str]:
        """What starts sd-server as a real process on this card: the program and its arguments."""
        arguments = ["-m", "turnstile.sim.sdserver", "--listen-ip", "127.0.0.1"]
        arguments += ["--listen-port", str(self.sd_port), "--card", self.cards.address]
        return [sys.executable, *arguments]

    def stop(self) -> Deferred[None]:
        """End all; afterwards nothing of the host is left in the reactor."""
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        engines = [self.ollama.stop(), self.comfy.stop(), self.llama.stop(), self.sd.stop()]
        for stopping in [*engines, self.cards.stop()]:
            await stopping
