"""``script/demo --once``: one switch from chat to image and back, told step by step and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import deferLater

from turnstile.demo.stage import Stage
from turnstile.sim.card import GIB
from turnstile.sim.graphs import image_graph

#: Seconds, at speed 1, within which a step has to come about.
PATIENCE = 30.0


class Wrong(Exception):
    """A step did not come out right."""


class Story:
    """Runs the steps and prints them."""

    def __init__(self, stage: Stage, say: Callable[[str], None]) -> None:
        self._stage = stage
        self._print = say
        self._began = stage.reactor.seconds()
        self._moments: list[str] = []
        self._underway: list[Deferred[Any]] = []

    def _say(self, text: str) -> None:
        elapsed = self._stage.reactor.seconds() - self._began
        card = self._stage.host.card
        self._print(f"{elapsed:7.2f} s  {card.used / GIB:5.1f} GiB  {text}")

    async def _until(self, what: str, condition: Callable[[], Any]) -> None:
        deadline = self._stage.reactor.seconds() + PATIENCE
        while not condition():
            if self._stage.reactor.seconds() > deadline:
                raise Wrong(f"waited {PATIENCE:.0f} s in vain: {what}")
            await deferLater(self._stage.reactor, 0.005, lambda: None)

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise Wrong(what)

    def _moment(self, name: str) -> None:
        if name not in self._moments:
            self._moments.append(name)

    async def run(self) -> None:
        """Tell the story; raises :class:`Wrong` where it goes another way."""
        try:
            await self._tell()
        finally:
            for d in self._underway:
                d.addErrback(lambda _: None)
                d.cancel()

    async def _tell(self) -> None:
        stage, host = self._stage, self._stage.host
        self._say("the card is empty; turnstile stands in front of Ollama and ComfyUI")
        first = self._chat("first", 40)
        await self._until(
            "the first chat's first word", lambda: "first chat: first word" in self._moments
        )
        self._check(not first.called, "the first chat's words came only with its last one")
        self._say("first chat: streaming, llama3.2 is on the card")

        progress: list[int] = []

        def event(message: dict[str, Any]) -> None:
            if message.get("type") == "progress":
                progress.append(message["data"]["value"])
                self._moment("image: progress")
            elif message.get("type") == "execution_success":
                self._moment("image: finished")

        close = await stage.events("demo", event)
        posted = ensureDeferred(stage.post_prompt(image_graph(steps=8), "demo"))
        posted.addCallback(self._told, "image: accepted by ComfyUI")
        self._underway.append(posted)
        await self._state("image_pending", lambda state: bool(state["waiting"]["image"]))
        self._check(not first.called, "the first chat ended before the image job was there")
        self._say("image job: queued behind the chat")

        second = self._chat("second", 12)
        await self._state("second chat waits", lambda state: bool(state["waiting"]["llm"]))
        self._check(
            not host.comfy.requests_for("POST", "/api/prompt"), "the prompt overtook the chat"
        )
        self._say("second chat: held, since an image job waits")

        await first
        self._say("first chat: complete")
        prompt_id = await posted
        unloads = len(host.ollama.unloads)
        self._check(unloads > 0 and host.card.used_by("ollama") == 0, "Ollama still held memory")
        self._say(f"Ollama unloaded, then the prompt forwarded: job {prompt_id[:8]}")
        await self._until("progress of the job", lambda: progress)
        self._say("image job: has the card, its progress events come through")
        await self._until("the end of the job", lambda: "image: finished" in self._moments)
        self._check(not second.called, "the second chat was answered during the job")
        self._say(f"image job: done after {len(progress)} steps")
        await self._until("the free", lambda: host.comfy.frees)
        self._say("ComfyUI freed the card")
        await self._until(
            "the second chat's first word", lambda: "second chat: first word" in self._moments
        )
        self._say("second chat: streaming")
        await second
        self._say("second chat: complete")
        image = await stage.image(prompt_id)
        self._check(image.startswith(b"\x89PNG"), "the image could not be fetched")
        self._say(f"the image is there, {len(image)} bytes")
        close()

        order = [
            "first chat: first word",
            "first chat: complete",
            "image: accepted by ComfyUI",
            "image: progress",
            "image: finished",
            "second chat: first word",
            "second chat: complete",
        ]
        self._check(self._moments == order, f"the order was {self._moments}")
        self._check(
            not host.card.overlaps, f"two engines were on the card at once: {host.card.overlaps}"
        )
        state = await stage.state()
        self._check(not state["leases"], "a lease was left over")
        self._say("never two engines on the card at once; no lease left over")

    def _chat(self, name: str, tokens: int) -> Deferred[str]:
        def word(_: str) -> None:
            self._moment(f"{name} chat: first word")

        d: Deferred[str] = ensureDeferred(self._stage.chat(f"the {name} question", tokens, word))
        self._underway.append(d)
        return d.addCallback(self._told, f"{name} chat: complete")

    def _told(self, value: Any, name: str) -> Any:
        self._moment(name)
        return value

    async def _state(self, what: str, holds: Callable[[dict[str, Any]], bool]) -> None:
        deadline = self._stage.reactor.seconds() + PATIENCE
        while not holds(await self._stage.state()):
            if self._stage.reactor.seconds() > deadline:
                raise Wrong(f"waited {PATIENCE:.0f} s in vain: {what}")
            await deferLater(self._stage.reactor, 0.01, lambda: None)
