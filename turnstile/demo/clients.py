"""Clients of the demo's engines, as the ones that people use: they know turnstile's address and nothing of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import treq
from autobahn.twisted.websocket import WebSocketClientFactory, WebSocketClientProtocol
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.endpoints import HostnameEndpoint
from twisted.internet.task import deferLater

from turnstile.sim.graphs import image_graph

if TYPE_CHECKING:
    from turnstile.demo.stage import Stage

#: Seconds between looks at the progress of sd-server.
LOOK_EVERY = 0.05


class Chats(Protocol):
    """Chats with one engine."""

    #: Its name for turnstile and on the card, and for people.
    name: str
    title: str
    #: The model that is talked to.
    model: str

    async def chat(self, prompt: str, tokens: int, on_text: Callable[[str], None]) -> str:
        """Stream a chat; returns the whole answer."""
        ...


class Drawing(Protocol):
    """An image on its way."""

    #: Fires with a word for it once the engine has it.
    accepted: Deferred[str]
    #: Fires when it is drawn.
    drawn: Deferred[None]

    async def image(self) -> bytes:
        """The image, once it is drawn."""
        ...

    def cancel(self) -> None:
        """Wait no more."""
        ...


class Images(Protocol):
    """Images from one engine."""

    name: str
    title: str

    async def draw(self, steps: int, on_progress: Callable[[int], None]) -> Drawing:
        """Ask for an image; ``on_progress`` is told the steps."""
        ...


class _Lines:
    """Text of a stream, line by line."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self._on_line = on_line
        self._rest = b""

    def received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line)


class _ChatClient:
    """What the two chat engines' clients share."""

    name: str
    title: str
    model: str
    path: str

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def _body(self, prompt: str, tokens: int) -> dict[str, Any]:
        raise NotImplementedError

    def _text(self, line: bytes) -> str:
        raise NotImplementedError

    async def chat(self, prompt: str, tokens: int, on_text: Callable[[str], None]) -> str:
        """See :class:`Chats`."""
        words: list[str] = []

        def line(data: bytes) -> None:
            text = self._text(data)
            if text:
                words.append(text)
                on_text(text)

        response = await treq.post(
            self._stage.url(self.name) + self.path,
            json={"model": self.model, **self._body(prompt, tokens)},
            agent=self._stage.agent,
            unbuffered=True,
        )
        await treq.collect(response, _Lines(line).received)
        if response.code != 200:
            raise RuntimeError(f"{self.title}'s chat answered {response.code}")
        return "".join(words)


class OllamaChats(_ChatClient):
    """As a client of Ollama's own API."""

    name = "ollama"
    title = "Ollama"
    model = "llama3.2"
    path = "/api/chat"

    def _body(self, prompt: str, tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"messages": messages, "options": {"num_predict": tokens}}

    def _text(self, line: bytes) -> str:
        text: str = json.loads(line).get("message", {}).get("content", "")
        return text


class LlamaChats(_ChatClient):
    """As a client of OpenAI's API."""

    name = "llamacpp"
    title = "llama.cpp"
    model = "llama-3.2-3b"
    path = "/v1/chat/completions"

    def _body(self, prompt: str, tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"messages": messages, "max_tokens": tokens, "stream": True}

    def _text(self, line: bytes) -> str:
        if not line.startswith(b"data: {"):
            return ""
        choices = json.loads(line[6:])["choices"]
        return (choices[0]["delta"].get("content") or "") if choices else ""


class ComfyImages:
    """As ComfyUI's page."""

    name = "comfyui"
    title = "ComfyUI"

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def draw(self, steps: int, on_progress: Callable[[int], None]) -> Drawing:
        """See :class:`Images`."""
        drawing = ComfyDrawing(self._stage, self._stage.url(self.name))
        await drawing.begin(steps, on_progress)
        return drawing


class ComfyDrawing:
    """A prompt, and the WebSocket on which its events come."""

    def __init__(self, stage: Stage, url: str) -> None:
        self._stage = stage
        self._url = url
        self._prompt_id = ""
        self._close: Callable[[], None] = lambda: None
        self.accepted: Deferred[str]
        self.drawn: Deferred[None] = Deferred()

    async def begin(self, steps: int, on_progress: Callable[[int], None]) -> None:
        """Open the socket, then post."""

        def event(message: dict[str, Any]) -> None:
            if message.get("type") == "progress":
                on_progress(message["data"]["value"])
            elif message.get("type") == "execution_success" and not self.drawn.called:
                self.drawn.callback(None)

        self._close = await comfy_events(self._stage.reactor, self._url, "demo", event)
        self.accepted = ensureDeferred(self._post(steps))

    async def _post(self, steps: int) -> str:
        response = await treq.post(
            f"{self._url}/api/prompt",
            json={"prompt": image_graph(steps=steps), "client_id": "demo"},
            agent=self._stage.agent,
        )
        answer = json.loads(await response.content())
        if response.code != 200:
            raise RuntimeError(f"/api/prompt answered {response.code}: {answer}")
        self._prompt_id = answer["prompt_id"]
        return f"job {self._prompt_id[:8]}"

    async def image(self) -> bytes:
        """See :class:`Drawing`; as ComfyUI's page fetches it."""
        agent = self._stage.agent
        response = await treq.get(f"{self._url}/api/history/{self._prompt_id}", agent=agent)
        history = json.loads(await response.content())
        outputs = history[self._prompt_id]["outputs"]
        image = next(images[0] for out in outputs.values() if (images := out.get("images")))
        query = {key: image[key] for key in ("filename", "subfolder", "type")}
        response = await treq.get(f"{self._url}/api/view", params=query, agent=agent)
        data: bytes = await response.content()
        self._close()
        return data

    def cancel(self) -> None:
        """See :class:`Drawing`."""
        self.accepted.addErrback(lambda _: None)
        self.accepted.cancel()
        self._close()


class SdImages:
    """As a page in the manner of AUTOMATIC1111's: one request for the image, and looks at its progress meanwhile."""

    name = "sd"
    title = "sd-server"

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def draw(self, steps: int, on_progress: Callable[[int], None]) -> Drawing:
        """See :class:`Images`."""
        return SdDrawing(self._stage, self._stage.url(self.name), steps, on_progress)


class SdDrawing:
    """A synchronous request; that the engine has it shows in its progress."""

    def __init__(
        self, stage: Stage, url: str, steps: int, on_progress: Callable[[int], None]
    ) -> None:
        self._stage = stage
        self._url = url
        self._images: list[str] = []
        self.accepted: Deferred[str] = Deferred()
        self.drawn = ensureDeferred(self._post(steps))
        self._looking = ensureDeferred(self._look(on_progress))
        self._looking.addErrback(lambda failure: failure.trap(CancelledError) and None)

    async def _post(self, steps: int) -> None:
        response = await treq.post(
            f"{self._url}/sdapi/v1/txt2img",
            json={"prompt": "a lock", "steps": steps},
            agent=self._stage.agent,
        )
        answer = json.loads(await response.content())
        if response.code != 200:
            raise RuntimeError(f"/sdapi/v1/txt2img answered {response.code}: {answer}")
        self._images = answer["images"]

    async def _look(self, on_progress: Callable[[int], None]) -> None:
        seen = 0
        while not self.drawn.called:
            status, progress = await sd_progress(self._stage)
            step = progress["state"]["sampling_step"] if status == 200 else 0
            if status == 200 and progress["state"]["job"] and not self.accepted.called:
                self.accepted.callback("it renders")
            if step > seen:
                seen = step
                on_progress(step)
            await deferLater(self._stage.reactor, LOOK_EVERY, lambda: None)

    async def image(self) -> bytes:
        """See :class:`Drawing`."""
        return base64.b64decode(self._images[0])

    def cancel(self) -> None:
        """See :class:`Drawing`."""
        self._looking.cancel()
        self.drawn.addErrback(lambda _: None)
        self.drawn.cancel()


async def sd_progress(stage: Stage) -> tuple[int, dict[str, Any]]:
    """What sd-server's progress is, and the status of the answer."""
    url = stage.url("sd") + "/sdapi/v1/progress"
    response = await treq.get(url, agent=stage.agent)
    answer: dict[str, Any] = json.loads(await response.content())
    return response.code, answer


async def comfy_events(
    reactor: Any, url: str, client_id: str, on_event: Callable[[dict[str, Any]], None]
) -> Callable[[], None]:
    """Open ComfyUI's WebSocket; returns the function that closes it."""

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
    address = url.removeprefix("http://")
    host, port = address.split(":")
    factory = WebSocketClientFactory(f"ws://{address}/ws?clientId={client_id}", reactor=reactor)
    factory.protocol = Events
    factory.noisy = False
    protocol: Any = await HostnameEndpoint(reactor, host, int(port)).connect(factory)
    await opened

    def close() -> None:
        protocol.sendClose(1000)

    return close
