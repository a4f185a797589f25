"""The demo's machine: a simulated card and engines, a real turnstile, and clients for all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import ceil
from tempfile import TemporaryDirectory
from typing import Any

import treq
from twisted.internet.defer import Deferred
from twisted.web.client import Agent, HTTPConnectionPool

from turnstile import exitcode
from turnstile.config import Config, Upstream
from turnstile.demo.clients import (
    Chats,
    ComfyImages,
    Images,
    LlamaChats,
    OllamaChats,
    SdImages,
)
from turnstile.service import TurnstileService
from turnstile.sim import GpuHost

#: The engines by their names for turnstile, in the order in which they are shown.
ENGINES = ("ollama", "llamacpp", "comfyui", "sd")
#: Seconds that a step takes at speed 1, and the least real seconds of steps for who looks at them to see some.
STEP = 0.25
STEPS_LEAST = 0.8
#: Seconds at speed 1 after which sd-server is stopped if nobody wants an image, and the least in real ones.
SD_IDLE = 4.0
SD_IDLE_LEAST = 0.5


class Stage:
    """Engines, turnstile and clients, all talking over loopback, in this process but for sd-server.

    :param speed: how many simulated seconds a second lasts.
    :param engines: which there are.
    :param ports: those of turnstile's listeners by engine, any for an engine that is left out.
    """

    def __init__(
        self,
        reactor: Any,
        speed: float,
        engines: Sequence[str] = ("ollama", "comfyui"),
        ports: Mapping[str, int] | None = None,
    ) -> None:
        self.reactor = reactor
        self.engines = tuple(name for name in ENGINES if name in engines)
        self.host = GpuHost(
            reactor,
            speed,
            ollama="ollama" in engines,
            comfy="comfyui" in engines,
            llama="llamacpp" in engines,
            sd="sd" in engines,
            ollama_options={"token_rate": 20.0, "load_time": 1.5},
            comfy_options={"step_time": STEP, "load_time": 1.5},
            llama_options={"token_rate": 20.0, "load_time": 1.5},
            sd_options={"step_time": STEP, "load_time": 1.5},
        )
        #: How many steps an image takes of which something is to be seen.
        self.visible_steps = ceil(STEPS_LEAST * speed / STEP)
        self.sd_idle = max(SD_IDLE / speed, SD_IDLE_LEAST)
        self._ports = ports or {}
        self.service: TurnstileService
        self._pool = HTTPConnectionPool(reactor, persistent=True)
        self.agent = Agent(reactor, self._pool)
        self._logs: TemporaryDirectory[str] | None = None
        chats: list[Chats] = [OllamaChats(self), LlamaChats(self)]
        images: list[Images] = [ComfyImages(self), SdImages(self)]
        self.chats = [client for client in chats if client.name in engines]
        self.images = [client for client in images if client.name in engines]

    @property
    def titles(self) -> dict[str, str]:
        """What people call the engines."""
        titles = {chats.name: chats.title for chats in self.chats}
        return titles | {images.name: images.title for images in self.images}

    async def start(self) -> None:
        """Start the engines, then turnstile in front of them."""
        await self.host.start()
        # What the machine's own probes would see is another card.
        settings: dict[str, Any] = {"shutdown_timeout": 2.0, "vram_probe": "none"}
        for name in self.engines:
            settings |= self._settings(name)
        self.service = TurnstileService(Config(**settings), reactor=self.reactor)
        self.service.privilegedStartService()
        self.service.startService()
        await self.service.ready
        if exitcode.get_failure():
            # The reason was told, and the reactor is about to stop.
            await Deferred()

    def _settings(self, name: str) -> dict[str, Any]:
        listen = f"tcp:{self._ports.get(name, 0)}:interface=127.0.0.1"
        upstream = Upstream.parse(self.engine_url(name))
        if name == "ollama":
            return {"ollama_url": upstream, "listen_ollama": listen}
        if name == "comfyui":
            return {"comfy_url": upstream, "listen_comfy": listen}
        if name == "llamacpp":
            return {"llama_url": upstream, "listen_llama": listen}
        program, *arguments = self.host.sd_command
        self._logs = TemporaryDirectory(prefix="turnstile-demo-")
        return {
            "sd_url": upstream,
            "sd_bin": program,
            "sd_args": tuple(arguments),
            "sd_log_dir": self._logs.name,
            "sd_idle": self.sd_idle,
            "listen_sd": listen,
        }

    async def stop(self) -> None:
        """Stop everything; nothing is left behind."""
        await self._pool.closeCachedConnections()
        await self.service.stopService()
        await self.host.stop()
        if self._logs is not None:
            self._logs.cleanup()

    def url(self, name: str) -> str:
        """Where an engine's clients connect."""
        return f"http://127.0.0.1:{self.service.ports[name].getHost().port}"

    def engine_url(self, name: str) -> str:
        """Where the engine itself is."""
        host = self.host
        engines = {"ollama": host.ollama, "comfyui": host.comfy, "llamacpp": host.llama}
        return host.sd_url if name == "sd" else engines[name].url

    async def state(self) -> dict[str, Any]:
        """What GET /turnstile/state says."""
        url = self.url(self.engines[0]) + "/turnstile/state"
        response = await treq.get(url, agent=self.agent)
        state: dict[str, Any] = json.loads(await response.content())
        return state
