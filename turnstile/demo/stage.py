"""The demo's machine: a simulated card and engines, a real turnstile, and clients for both."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import treq
from autobahn.twisted.websocket import WebSocketClientFactory, WebSocketClientProtocol
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint
from twisted.web.client import Agent, HTTPConnectionPool

from turnstile.config import Config, Upstream
from turnstile.service import TurnstileService
from turnstile.sim import GpuHost


class Stage:
    """Engines, turnstile and clients, all in this process, talking over loopback.

    :param speed: how many simulated seconds a second lasts.
    :param listen_ollama: port of turnstile's Ollama listener, 0 for any; likewise ``listen_comfy``.
    """

    def __init__(
        self, reactor: Any, speed: float, listen_ollama: int = 0, listen_comfy: int = 0
    ) -> None:
        self.reactor = reactor
        self.host = GpuHost(
            reactor,
            speed,
            ollama_options={"token_rate": 20.0, "load_time": 1.5},
            comfy_options={"step_time": 0.25, "load_time": 1.5},
        )
        self._listens = (listen_ollama, listen_comfy)
        self.service: TurnstileService
        self._pool = HTTPConnectionPool(reactor, persistent=True)
        self._agent = Agent(reactor, self._pool)

    async def start(self) -> None:
        """Start the engines, then turnstile in front of them."""
        await self.host.start()
        config = Config(
            ollama_url=Upstream.parse(self.host.ollama.url),
            comfy_url=Upstream.parse(self.host.comfy.url),
            listen_ollama=f"tcp:{self._listens[0]}:interface=127.0.0.1",
            listen_comfy=f"tcp:{self._listens[1]}:interface=127.0.0.1",
            shutdown_timeout=2.0,
        )
        self.service = TurnstileService(config, reactor=self.reactor)
        self.service.privilegedStartService()
        self.service.startService()
        await self.service.ready

    async def stop(self) -> None:
        """Stop everything; nothing is left behind."""
        await self._pool.closeCachedConnections()
        await self.service.stopService()
        await self.host.stop()

    @property
    def ollama_url(self) -> str:
        """Where chat clients connect."""
        return self._url("ollama")

    @property
    def comfy_url(self) -> str:
        """Where image clients connect."""
        return self._url("comfyui")

    def _url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.service.ports[name].getHost().port}"

    async def state(self) -> dict[str, Any]:
        """What GET /turnstile/state says."""
        response = await treq.get(f"{self.ollama_url}/turnstile/state", agent=self._agent)
        state: dict[str, Any] = json.loads(await response.content())
        return state

    async def chat(self, prompt: str, tokens: int, on_text: Callable[[str], None]) -> str:
        """Stream a chat through turnstile; returns the whole answer."""
        body = {
            "model": "llama3.2",
            "messages": [{"role": "user", "content": prompt}],
            "options": {"num_predict": tokens},
        }
        response = await treq.post(
            f"{self.ollama_url}/api/chat", json=body, agent=self._agent, unbuffered=True
        )
        lines = b""
        words: list[str] = []

        def received(data: bytes) -> None:
            nonlocal lines
            lines += data
            *complete, lines = lines.split(b"\n")
            for line in complete:
                text = json.loads(line).get("message", {}).get("content", "")
                words.append(text)
                on_text(text)

        await treq.collect(response, received)
        if response.code != 200:
            raise RuntimeError(f"chat answered {response.code}")
        return "".join(words)

    async def post_prompt(self, graph: dict[str, Any], client_id: str) -> str:
        """Queue an image job through turnstile; returns its prompt_id once ComfyUI has it."""
        response = await treq.post(
            f"{self.comfy_url}/api/prompt",
            json={"prompt": graph, "client_id": client_id},
            agent=self._agent,
        )
        answer = json.loads(await response.content())
        if response.code != 200:
            raise RuntimeError(f"/api/prompt answered {response.code}: {answer}")
        prompt_id: str = answer["prompt_id"]
        return prompt_id

    async def image(self, prompt_id: str) -> bytes:
        """Fetch the first image of a finished job, as ComfyUI's page does."""
        response = await treq.get(f"{self.comfy_url}/api/history/{prompt_id}", agent=self._agent)
        history = json.loads(await response.content())
        outputs = history[prompt_id]["outputs"]
        image = next(images[0] for out in outputs.values() if (images := out.get("images")))
        query = {key: image[key] for key in ("filename", "subfolder", "type")}
        response = await treq.get(f"{self.comfy_url}/api/view", params=query, agent=self._agent)
        data: bytes = await response.content()
        return data

    async def events(
        self, client_id: str, on_event: Callable[[dict[str, Any]], None]
    ) -> Callable[[], None]:
        """Open ComfyUI's WebSocket through turnstile; returns the function that closes it."""

        class Events(WebSocketClientProtocol):  # type: ignore[misc]
            def onOpen(self) -> None:
                opened.callback(None)

            def onMessage(self, payload: bytes, is_binary: bool) -> None:
                if not is_binary:
                    on_event(json.loads(payload))

            def onClose(self, clean: bool, code: int | None, reason: str | None) -> None:
                if not opened.called:
                    opened.errback(RuntimeError(f"WebSocket refused: {reason}"))

        opened: Deferred[None] = Deferred()
        port = self.service.ports["comfyui"].getHost().port
        factory = WebSocketClientFactory(
            f"ws://127.0.0.1:{port}/ws?clientId={client_id}", reactor=self.reactor
        )
        factory.protocol = Events
        factory.noisy = False
        protocol: Any = await HostnameEndpoint(self.reactor, "127.0.0.1", port).connect(factory)
        await opened

        def close() -> None:
            protocol.sendClose(1000)

        return close
