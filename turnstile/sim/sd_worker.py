"""A simulated sd-server as a process: how it loads, renders one thing at a time, and ends.

Facts [src]: the weights are loaded before the port opens, and nothing but the process's exit gives
them back; one mutex is held while anything is rendered, whoever asked for it and whether or not the
client is still there; SIGTERM has no handler, so it ends the process at once.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any

from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IDelayedCall

from .card import GIB, Card, OutOfVram
from .comfy_assets import png
from .exchange import HttpError, RecordedRequest
from .faults import Faults
from .httplib import JSON, HttplibSim, compact
from .ollama_runner import wake

RAMP_STEPS = 8
#: Exit status of a program that gave up by itself, and of one that ended in abort().
FAILED = 1
ABORTED = -signal.SIGABRT

_serials = count(1)


@dataclass
class Orders:
    """What will go wrong in one process; a test may change them while it runs."""

    #: It ends while it loads, with a message.
    crash_loading: bool = False
    #: It never gets to open its port.
    hang_loading: bool = False
    #: It ends in the middle of a rendering.
    exit_in_render: bool = False
    #: A rendering never ends.
    hang_render: bool = False
    #: A rendering fails, the process stays.
    fail_render: bool = False
    #: Only SIGKILL ends it.
    ignore_sigterm: bool = False
    #: It has a process of its own that holds memory of the card too.
    grandchild: bool = False
    #: Seconds between the end of loading and the port.
    port_delay: float = 0.0


class SdFaults(Faults):
    """Switches are False/0 (off), True (always) or a number (so many processes); see `Orders`."""

    def __init__(self) -> None:
        super().__init__()
        self.port_delay = 0.0
        self._off()

    def _off(self) -> None:
        self.crash_loading: int = False
        self.hang_loading: int = False
        self.exit_in_render: int = False
        self.hang_render: int = False
        self.fail_render: int = False
        self.ignore_sigterm: int = False
        self.grandchild: int = False
        self.port_delay = 0.0

    def clear(self) -> None:
        super().clear()
        self._off()

    def orders(self) -> Orders:
        """Those of the next process, counted as used."""
        switches = [item.name for item in fields(Orders) if item.name != "port_delay"]
        struck = {switch: self.spend(switch) for switch in switches}
        return Orders(**struck, port_delay=self.port_delay)


@dataclass(eq=False)
class Render:
    """One thing that is rendered: when it got the mutex, how far it is, what came of it."""

    kind: str
    steps: int
    images: int = 1
    asked: float = 0.0
    started: float | None = None
    ended: float | None = None
    step: int = 0
    result: list[bytes] | None = None
    waiters: list[Deferred[None]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.ended is not None

    async def over(self) -> list[bytes]:
        """Wait for its end; an answer of 500 if nothing came of it."""
        if not self.done:
            waiter: Deferred[None] = Deferred()
            self.waiters.append(waiter)
            await waiter
        if self.result is None:
            raise sd_error(500, "generate_image returned no results")
        return self.result


def sd_error(status: int, text: str, **more: str) -> HttpError:
    """An error as sd-server answers it."""
    return HttpError(status, compact({"error": text, **more}), JSON)


class SdWorker(HttplibSim):
    """The part of `SdSim` that knows the card and nothing of HTTP routes.  One object, one process.

    ``load_time``: seconds from the start to the port.  A rendering takes ``condition_time``, then
    ``step_time`` a step (``steps`` of them unless the request says otherwise), then
    ``decode_time``; ``compute_bytes`` of the card are held meanwhile on top of ``model_bytes``.
    ``release_delay``: how long the driver takes to give a dead process's memory back.
    ``say``: where its log goes, line by line.
    """

    owner = "sd"
    faults: SdFaults

    def __init__(
        self,
        card: Card,
        clock: Any,
        *,
        speed: float = 1.0,
        load_time: float = 3.0,
        model_bytes: int = 12 * GIB,
        compute_bytes: int = 1 * GIB,
        grandchild_bytes: int = 1 * GIB,
        steps: int = 20,
        condition_time: float = 0.2,
        step_time: float = 0.1,
        decode_time: float = 0.3,
        release_delay: float = 0.0,
        image_bytes: int = 0,
        faults: SdFaults | None = None,
        orders: Orders | None = None,
        requests: deque[RecordedRequest] | None = None,
        say: Callable[[str], None] | None = None,
        max_requests: int = 5000,
    ) -> None:
        super().__init__(card, clock, speed=speed, max_requests=max_requests)
        self.faults = SdFaults() if faults is None else faults
        self.orders = self.faults.orders() if orders is None else orders
        if requests is not None:
            self.requests = requests
        self.load_time = load_time
        self.model_bytes = model_bytes
        self.compute_bytes = compute_bytes
        self.grandchild_bytes = grandchild_bytes
        self.steps = steps
        self.condition_time = condition_time
        self.step_time = step_time
        self.decode_time = decode_time
        self.release_delay = release_delay
        self.image_bytes = image_bytes
        self.say = say or _unheard
        self.serial = next(_serials)
        self.state = "new"
        self.started_at: float | None = None
        self.up_at: float | None = None
        self.ended_at: float | None = None
        #: Exit status, or minus the signal that ended it.
        self.exit_status: int | None = None
        #: Whether a process of its own is left that holds memory.
        self.grandchild = False
        self.renders: list[Render] = []
        self._mutex = DeferredLock()
        self._exits: list[Deferred[None]] = []
        self._freeing: IDelayedCall | None = None

    # -- the process

    def listen(self, port: int = 0, interface: str = "127.0.0.1") -> None:
        """Start the process; its port opens, and is known if it was 0, when the model is loaded."""
        self.host, self.port = interface, port
        self.boot()

    def boot(self) -> None:
        self.state = "loading"
        self.started_at = self.clock.seconds()
        self.say("[INFO ] stable-diffusion.cpp:187  - loading diffusion model")
        self.spawn(self._load())

    async def _load(self) -> None:
        orders = self.orders
        if orders.grandchild:
            self.grandchild = True
            self.begin_grandchild()
        try:
            for step in range(1, RAMP_STEPS + 1):
                self.hold("weights", self.model_bytes * step // RAMP_STEPS)
                await self.sleep(self.load_time / RAMP_STEPS)
                self.say(f"[DEBUG] model.cpp:1602 - loading tensors {step}/{RAMP_STEPS}")
                if orders.crash_loading and step * 2 >= RAMP_STEPS:
                    self.say("[ERROR] stable-diffusion.cpp:321  - load tensors from model failed")
                    self.say("[ERROR] main.cpp:233  - new_sd_ctx_t failed")
                    self.exit_soon(FAILED)
                    return
                if orders.hang_loading and step * 2 >= RAMP_STEPS:
                    return
        except OutOfVram:
            self.say("[ERROR] ggml_extend.hpp:83   - cudaMalloc failed: out of memory")
            self.exit_soon(FAILED)
            return
        if orders.port_delay:
            await self.sleep(orders.port_delay)
        try:
            self.start_listening()
        except CannotListenError:
            self.say(f"[ERROR] main.cpp:250  - couldn't bind to {self.host}:{self.port}")
            self.exit_soon(FAILED)
            return
        self.state = "up"
        self.up_at = self.clock.seconds()
        self.say(f"[INFO ] main.cpp:301  - listening on: {self.host}:{self.port}")
        self.opened()

    def opened(self) -> None:
        """The port is open."""

    def signal(self, number: int) -> None:
        """Send the process a signal that ends it, unless it is one that it ignores."""
        if number == signal.SIGTERM and self.orders.ignore_sigterm:
            return
        self.exit(-number)

    def exit(self, status: int) -> Deferred[None]:
        """The process ends here and now; fires when its sockets are closed."""
        if self.exit_status is None:
            self.exit_status = status
            self.ended_at = self.clock.seconds()
            self.state = "exited"
        return self.kill()

    def exit_soon(self, status: int) -> None:
        """The same from within one of the process's own tasks."""
        self.clock.callLater(0, self.exit, status)

    def exited(self) -> Deferred[None]:
        """Fire when the process has ended; `exit_status` says how."""
        waiter: Deferred[None] = Deferred()
        if self.exit_status is not None:
            waiter.callback(None)
        else:
            self._exits.append(waiter)
        return waiter

    def end_grandchild(self) -> None:
        """End the process that this one left behind."""
        if self.grandchild:
            self.grandchild = False
            self.card.release(self.owner, self._label("grandchild"))

    def stop(self) -> Deferred[None]:
        """End all that is left of it."""
        self.release_delay = 0.0
        stopped = self.exit(-signal.SIGKILL)
        self.end_grandchild()
        return stopped

    def reset(self) -> None:
        if self.exit_status is None:  # killed without being told how
            self.exit_status, self.state = -signal.SIGKILL, "exited"
            self.ended_at = self.clock.seconds()
        for render in self.renders:
            render.waiters.clear()

    # -- the card

    def _label(self, name: str) -> str:
        return f"{name} {self.serial}"

    def hold(self, name: str, nbytes: int) -> None:
        """Hold so much of the card for a purpose."""
        self.card.allocate(self.owner, self._label(name), nbytes)

    def begin_grandchild(self) -> None:
        """Have another process hold memory too."""
        self.hold("grandchild", self.grandchild_bytes)

    def release_card(self) -> None:
        if self.release_delay and self.started_at is not None:
            delay = self.real(self.release_delay)
            self._freeing = self._freeing or self.clock.callLater(delay, self.free_card)
        else:
            self.free_card()
        wake(self._exits)

    def free_card(self) -> None:
        """The driver takes back what the process held."""
        if self._freeing is not None and self._freeing.active():
            self._freeing.cancel()
        for name in ("weights", "compute"):
            self.card.release(self.owner, self._label(name))

    # -- rendering

    @property
    def rendering(self) -> Render | None:
        """What has the mutex now."""
        return next((r for r in self.renders if r.started is not None and not r.done), None)

    def render(self, kind: str, steps: int | None = None, images: int = 1) -> Render:
        """Render as soon as the mutex can be had, whatever becomes of the client."""
        render = Render(kind, self.steps if steps is None else steps, images)
        render.asked = self.clock.seconds()
        self.renders.append(render)
        self.spawn(self._render(render))
        return render

    async def _render(self, render: Render) -> None:
        await self._mutex.acquire()
        try:
            await self._compute(render)
        finally:
            render.ended = self.clock.seconds()
            self._mutex.release()
            self.finished(render)
            wake(render.waiters)

    async def _compute(self, render: Render) -> None:
        render.started = self.clock.seconds()
        self.begun(render)
        try:
            self.hold("compute", self.compute_bytes)
        except OutOfVram:
            self.say("[ERROR] ggml_extend.hpp:83   - cudaMalloc failed: out of memory")
            self.exit_soon(ABORTED)
            await Deferred()
        try:
            await self.sleep(self.condition_time)
            for image in range(render.images):
                self.say(f"[INFO ] stable-diffusion.cpp:1502 - generating image: {image + 1}")
                for step in range(render.steps):
                    await self.sleep(self.step_time)
                    render.step += 1
                    self.show_progress(step + 1, render.steps)
                    if self.orders.exit_in_render and (step + 1) * 2 >= render.steps:
                        self.say("ggml.c:1700: GGML_ASSERT(false) failed")
                        self.exit_soon(ABORTED)
                        await Deferred()
                    if self.orders.hang_render:
                        await Deferred()
                await self.sleep(self.decode_time)
        finally:
            if self.exit_status is None:
                self.card.release(self.owner, self._label("compute"))
        if self.orders.fail_render:
            self.say("[ERROR] stable-diffusion.cpp:1620 - generation failed")
        else:
            render.result = [
                png(number, self.image_bytes) for number in range(1, render.images + 1)
            ]
        self.say("[INFO ] stable-diffusion.cpp:1650 - generate_image completed")

    def show_progress(self, step: int, steps: int) -> None:
        """Draw the bar that grows with every step."""
        self.say(progress_bar(step, steps, self.step_time))

    def begun(self, render: Render) -> None:
        """A rendering got the mutex."""

    def finished(self, render: Render) -> None:
        """A rendering gave the mutex back."""


def progress_bar(step: int, steps: int, seconds: float) -> str:
    """The bar that is drawn after a step."""
    done = 50 * step // steps
    return f"  |{'=' * done}{' ' * (50 - done)}| {step}/{steps} - {seconds:.2f}s/it"


def _unheard(line: str) -> None:
    """Where a log goes that nobody reads."""
