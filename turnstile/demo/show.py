"""The live picture of the demo: random traffic, and what the card does about it."""

from __future__ import annotations

import random
import re
import shutil
from collections import deque
from typing import IO, Any

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.task import LoopingCall, deferLater
from twisted.python.failure import Failure

from turnstile.demo.stage import Stage
from turnstile.sim.card import GIB

_COLOURS = {"ollama": "36", "llamacpp": "34", "comfyui": "35", "sd": "33"}
_BAR = 48
_PIECES = re.compile(r"\x1b\[[0-9;]*m|.", re.DOTALL)


def clip(line: str, columns: int) -> str:
    """``line`` cut to so many columns; colours take none."""
    kept, shown = [], 0
    for piece in _PIECES.findall(line):
        if len(piece) == 1:
            shown += 1
            if shown > columns:
                continue
        kept.append(piece)
    return "".join(kept)


class Traffic:
    """Chats and image jobs at random, for ever; its Deferred is cancelled to end it."""

    def __init__(self, stage: Stage, rng: random.Random) -> None:
        self._stage = stage
        self._rng = rng
        self.done = {"chats": 0, "images": 0, "failed": 0}
        self.last: deque[str] = deque(maxlen=6)
        self._running: set[Deferred[Any]] = set()
        self._stopped = False

    def start(self) -> None:
        if self._stage.chats:
            self._go(self._every(1.0, 5.0, self._chat))
        if self._stage.images:
            self._go(self._every(5.0, 14.0, self._image))

    def stop(self) -> None:
        self._stopped = True
        for d in tuple(self._running):
            d.cancel()

    def _go(self, coroutine: Any) -> None:
        d: Deferred[Any] = ensureDeferred(coroutine)
        self._running.add(d)
        d.addErrback(self._failed)
        d.addBoth(lambda _: self._running.discard(d))

    def _failed(self, failure: Failure) -> None:
        if not self._stopped and not failure.check(CancelledError):
            self.done["failed"] += 1
            self.last.append(f"failed: {failure.getErrorMessage()}")

    async def _every(self, least: float, most: float, one: Any) -> None:
        while True:
            self._go(one())
            await deferLater(self._stage.reactor, self._rng.uniform(least, most), lambda: None)

    async def _chat(self) -> None:
        began = self._stage.reactor.seconds()
        first: list[float] = []

        def word(_: str) -> None:
            if not first:
                first.append(self._stage.reactor.seconds() - began)

        tokens = self._rng.randint(10, 80)
        chats = self._rng.choice(self._stage.chats)
        await chats.chat("tell me something", tokens, word)
        self.done["chats"] += 1
        took = f"{tokens} tokens, the first after {first[0]:.1f} s"
        self.last.append(f"{chats.title}: chat answered: {took}")

    async def _image(self) -> None:
        began = self._stage.reactor.seconds()
        images = self._rng.choice(self._stage.images)
        drawing = await images.draw(self._rng.randint(6, 20), lambda step: None)
        try:
            what = await drawing.accepted
            waited = self._stage.reactor.seconds() - began
            self.last.append(f"{images.title}: {what} after {waited:.1f} s")
            await drawing.drawn
            size = len(await drawing.image())
            self.done["images"] += 1
            self.last.append(f"{images.title}: an image of {size} bytes")
        finally:
            drawing.cancel()


class Show:
    """Draws the state a few times a second (terminal) or prints a line where it changed (elsewhere)."""

    def __init__(
        self, stage: Stage, traffic: Traffic, out: IO[str], live: bool, colour: bool = False
    ) -> None:
        self._stage = stage
        self._traffic = traffic
        self._out = out
        self._live = live
        self._colour = colour
        self._drawn = 0
        self._last_line = ""
        self._loop = LoopingCall(self._tick)

    def start(self) -> Deferred[Any]:
        """Begin; the Deferred fails if there is nobody to show it to any more."""
        return self._loop.start(0.2 if self._live else 0.5)

    def stop(self) -> None:
        if self._loop.running:
            self._loop.stop()

    def _tick(self) -> Deferred[None]:
        return ensureDeferred(self._try_to_draw())

    async def _try_to_draw(self) -> None:
        try:
            await self._draw()
        except OSError:
            raise
        except Exception:
            return  # a look that fails is made again

    async def _draw(self) -> None:
        state = await self._stage.state()
        lines = self.lines(state)
        if not self._live:
            if lines[0] != self._last_line:
                self._last_line = lines[0]
                self._out.write(" | ".join(line.strip() for line in lines[:4]) + "\n")
                self._out.flush()
            return
        # Lines that wrap, or that scroll away, could not be drawn over.
        columns, rows = shutil.get_terminal_size()
        lines = [clip(line, max(columns - 1, 1)) for line in lines[: max(rows - 1, 1)]]
        if self._drawn:
            self._out.write(f"\x1b[{min(self._drawn, rows - 1)}A\x1b[J")
        self._out.write("".join(f"\x1b[2K{line}\n" for line in lines))
        self._out.flush()
        self._drawn = len(lines)

    def lines(self, state: dict[str, Any]) -> list[str]:
        """The picture: a handful of lines."""
        tenant = state["tenant"]
        leases, waiting = state["leases"], state["waiting"]
        who = f"{state['state']}" + (
            f" ({tenant}, {len(leases)} lease{'s'[: len(leases) != 1]})" if tenant else ""
        )
        lines = [
            f"state    {who}",
            f"waits    {len(waiting['llm'])} chat, {len(waiting['image'])} image"
            + self._oldest(waiting),
            f"VRAM     {self._bar()}",
            f"job      {self._job(state)}",
            f"done     {self._traffic.done['chats']} chats, {self._traffic.done['images']} images"
            f", {self._traffic.done['failed']} failed; overlaps: {len(self._stage.host.card.overlaps)}",
        ]
        last = list(self._traffic.last)
        return lines + [f"         {text}" for text in last + [""] * (6 - len(last))]

    def _oldest(self, waiting: dict[str, Any]) -> str:
        ages = [entry["age"] for line in waiting.values() for entry in line]
        return f" (the oldest for {max(ages):.1f} s)" if ages else ""

    def _bar(self) -> str:
        card = self._stage.host.card
        bar, used_cells = "", 0
        for owner, used in sorted(card.residents.items()):
            cells = round(_BAR * used / card.total_bytes)
            used_cells += cells
            block = "█" * cells
            bar += f"\x1b[{_COLOURS[owner]}m{block}\x1b[0m" if self._colour else block
        names = ", ".join(
            f"{owner} {used / GIB:.1f}" for owner, used in sorted(card.residents.items())
        )
        return f"[{bar}{'·' * (_BAR - used_cells)}] {names or 'empty'} of {card.total_bytes / GIB:.0f} GiB"

    def _job(self, state: dict[str, Any]) -> str:
        job = state.get("job")
        if not job:
            return "none"
        progress = job.get("progress")
        if isinstance(progress, dict) and progress.get("max"):
            done = f"step {progress['value']} of {progress['max']}"
        else:
            done = "progress unknown"
        return f"{str(job.get('prompt_id'))[:8]}: {done}"
