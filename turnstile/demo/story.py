"""``script/demo --once``: switches from chat to image and back, told step by step and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import LoopingCall, deferLater

from turnstile.demo.clients import Chats, Images, sd_progress
from turnstile.demo.stage import Stage
from turnstile.sim.card import GIB

#: Seconds, at speed 1, within which a step has to come about.
PATIENCE = 30.0
#: Seconds between the looks of a page that watches sd-server all the time.
WATCH_EVERY = 0.1
CARDINALS = ("first", "second", "third", "fourth")


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
        self._endings: list[Callable[[], None]] = []
        self._told_chats = 0
        #: The answers that a page got which looks at sd-server's progress all the time.
        self._looks: list[int] = []

    # -- telling

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

    async def _state(self, what: str, holds: Callable[[dict[str, Any]], bool]) -> None:
        deadline = self._stage.reactor.seconds() + PATIENCE
        while not holds(await self._stage.state()):
            if self._stage.reactor.seconds() > deadline:
                raise Wrong(f"waited {PATIENCE:.0f} s in vain: {what}")
            await deferLater(self._stage.reactor, 0.01, lambda: None)

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise Wrong(what)

    def _moment(self, name: str) -> None:
        if name not in self._moments:
            self._moments.append(name)

    def _told(self, value: Any, name: str) -> Any:
        self._moment(name)
        return value

    def _alone(self, name: str) -> None:
        others = sorted(self._stage.host.card.residents.keys() - {name})
        self._check(not others, f"{' and '.join(others)} still held memory")

    # -- the acts

    async def run(self) -> None:
        """Tell the story; raises :class:`Wrong` where it goes another way."""
        try:
            await self._tell()
        finally:
            for d in self._underway:
                d.addErrback(lambda _: None)
                d.cancel()
            for end in self._endings:
                end()

    async def _tell(self) -> None:
        stage, card = self._stage, self._stage.host.card
        titles = list(stage.titles.values())
        self._say(f"the card is empty; turnstile stands in front of {_and(titles)}")
        if "sd" in stage.engines:
            await self._watch()
        if stage.chats and stage.images:
            for images in stage.images:
                await self._switch(stage.chats[0], images, stage.chats[-1])
        elif stage.chats:
            for chats in stage.chats:
                await self._only_chat(chats)
        else:
            for images in stage.images:
                await self._only_image(images)
        if "sd" in stage.engines:
            await self._idle_release()
        await self._state("the end of the last lease", lambda state: not state["leases"])
        self._check(not card.overlaps, f"two engines were on the card at once: {card.overlaps}")
        self._say("never two engines on the card at once; no lease left over")

    async def _switch(self, chats: Chats, images: Images, then: Chats) -> None:
        """Chat, image, chat."""
        host = self._stage.host
        self._moments.clear()
        first = self._chat(chats, 40)
        one = CARDINALS[self._told_chats - 1]
        await self._until(
            f"the {one} chat's first word", lambda: f"{one} chat: first word" in self._moments
        )
        self._check(not first.called, f"the {one} chat's words came only with its last one")
        self._alone(chats.name)
        self._say(f"{one} chat: streaming, {chats.model} is on the card")

        progress: list[int] = []
        drawing = await images.draw(8, lambda step: self._progressed(progress, step))
        self._endings.append(drawing.cancel)
        drawing.accepted.addCallback(self._told, f"image: accepted by {images.title}")
        drawing.drawn.addCallback(self._told, "image: finished")
        self._underway += [drawing.accepted, drawing.drawn]
        await self._state("image_pending", lambda state: bool(state["waiting"]["image"]))
        self._check(not first.called, f"the {one} chat ended before the image job was there")
        self._say("image job: queued behind the chat")

        second = self._chat(then, 12)
        two = CARDINALS[self._told_chats - 1]
        await self._state(f"{two} chat waits", lambda state: bool(state["waiting"]["llm"]))
        self._check(not self._reached(images), "the image job overtook the chat")
        self._say(f"{two} chat: held, since an image job waits")

        await first
        self._say(f"{one} chat: complete")
        what = await drawing.accepted
        self._alone(images.name)
        if images.name == "sd":
            pid = host.cards.alive[0].pid
            self._say(f"{chats.title} unloaded, then {images.title} started (pid {pid}): {what}")
        else:
            self._say(f"{chats.title} unloaded, then the prompt forwarded: {what}")
        await self._until("progress of the job", lambda: progress)
        what = "progress" if images.name == "sd" else "progress events"
        self._say(f"image job: has the card, its {what} come{'s' * (what[-1] != 's')} through")
        await self._until("the end of the job", lambda: "image: finished" in self._moments)
        self._check(not second.called, f"the {two} chat was answered during the job")
        self._say(f"image job: done after {progress[-1]} steps")
        await self._until("the free", lambda: not host.card.used_by(images.name))
        if images.name == "sd":
            self._check(not host.cards.alive, "memory went, the process did not")
            self._say(f"{images.title} stopped, since a chat waits, and its memory is back")
        else:
            self._say(f"{images.title} freed the card")
        await self._until(
            f"the {two} chat's first word", lambda: f"{two} chat: first word" in self._moments
        )
        self._alone(then.name)
        self._say(f"{two} chat: streaming")
        await second
        self._say(f"{two} chat: complete")
        image = await drawing.image()
        self._check(image.startswith(b"\x89PNG"), "the image could not be fetched")
        self._say(f"the image is there, {len(image)} bytes")

        order = [
            f"{one} chat: first word",
            f"{one} chat: complete",
            f"image: accepted by {images.title}",
            "image: progress",
            "image: finished",
            f"{two} chat: first word",
            f"{two} chat: complete",
        ]
        self._check(self._moments == order, f"the order was {self._moments}")

    async def _only_chat(self, chats: Chats) -> None:
        """A chat, and whoever had the card before has left."""
        answer = await self._chat(chats, 12)
        self._alone(chats.name)
        words = len(answer.split())
        self._say(f"{chats.title}: answered in {words} words, {chats.model} is on the card")

    async def _only_image(self, images: Images) -> None:
        """An image, and whoever had the card before has left."""
        progress: list[int] = []
        drawing = await images.draw(4, progress.append)
        self._endings.append(drawing.cancel)
        self._underway += [drawing.accepted, drawing.drawn]
        await drawing.accepted
        self._alone(images.name)
        await drawing.drawn
        image = await drawing.image()
        self._check(image.startswith(b"\x89PNG"), "the image could not be fetched")
        self._say(f"{images.title}: an image, {len(image)} bytes, after {progress[-1]} steps")

    # -- what only sd-server has

    async def _watch(self) -> None:
        """A page looks at the progress all the time, from now to the end."""
        stage = self._stage

        async def look() -> None:
            status, _ = await sd_progress(stage)
            self._looks.append(status)

        looking = LoopingCall(lambda: ensureDeferred(look()))
        # A look that fails as the story ends is nobody's concern; before, the steps would miss it.
        looking.start(WATCH_EVERY).addErrback(lambda _: None)
        self._endings.append(lambda: looking.stop() if looking.running else None)
        await self._until("answers to the looks", lambda: len(self._looks) >= 5)
        self._check(set(self._looks) == {503}, f"looks were answered {set(self._looks)}")
        self._check(not stage.host.cards.processes, "a look at the progress started sd-server")
        self._say(f"{len(self._looks)} looks at sd-server's progress: not loaded, and not started")

    async def _idle_release(self) -> None:
        """Nobody wants an image any more, only its progress is looked at: sd-server ends."""
        stage, host = self._stage, self._stage.host
        images = next(client for client in stage.images if client.name == "sd")
        if not host.cards.alive:
            await self._only_image(images)
        ended = stage.reactor.seconds()
        started = len(host.cards.processes)
        self._looks.clear()
        await self._until("the idle release", lambda: not host.card.used_by("sd"))
        idle = stage.reactor.seconds() - ended
        # The measure began a moment after the image was done.
        self._check(idle > 0.5 * stage.sd_idle, f"released after {idle:.2f} s")
        looks = self._looks.count(200)
        self._check(looks > 0, "nobody looked meanwhile")
        self._say(f"sd-server stopped after {idle:.1f} s without work; {looks} looks kept it not")
        self._looks.clear()
        await self._until("more answers to looks", lambda: len(self._looks) >= 5)
        self._check(self._looks[-1] == 503, f"a look was answered {self._looks[-1]}")
        self._check(len(host.cards.processes) == started, "a look started it again")
        self._say("further looks leave the card empty")

    # -- clients

    def _chat(self, chats: Chats, tokens: int) -> Deferred[str]:
        name = CARDINALS[self._told_chats]
        self._told_chats += 1

        def word(_: str) -> None:
            self._moment(f"{name} chat: first word")

        d: Deferred[str] = ensureDeferred(chats.chat(f"the {name} question", tokens, word))
        self._underway.append(d)
        return d.addCallback(self._told, f"{name} chat: complete")

    def _progressed(self, progress: list[int], step: int) -> None:
        progress.append(step)
        self._moment("image: progress")

    def _reached(self, images: Images) -> bool:
        """Whether the engine has got the job."""
        host = self._stage.host
        if images.name == "sd":
            return bool(host.cards.alive)
        return bool(host.comfy.requests_for("POST", "/api/prompt"))


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
