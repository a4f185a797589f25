"""Ollama's scheduler and runners: which models are on the card, for whom, and until when.

Facts [src]: a runner ends only after its last request; an unload only marks it; a first request
loads and others join that load; idle models make room for new ones; the latest request's
keep_alive counts.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from twisted.internet.defer import Deferred, DeferredSemaphore
from twisted.internet.interfaces import IDelayedCall

from .card import GIB, Card, OutOfVram
from .exchange import HttpError
from .faults import Faults, take
from .server import EngineSim

RAMP_STEPS = 4
BUSY = b'{"error":"server busy, please try again.  maximum pending requests exceeded"}'
JSON = b"application/json; charset=utf-8"


@dataclass(frozen=True)
class ModelSpec:
    """A model that the engine has on disk.  ``tokens``: how long its answers are by default."""

    name: str
    vram: int = 4 * GIB
    embedding_only: bool = False
    tokens: int = 16
    size: int | None = None

    @property
    def disk(self) -> int:
        return self.vram if self.size is None else self.size


DEFAULT_MODELS = (
    ModelSpec("llama3.2:latest", 4 * GIB),
    ModelSpec("qwen3:8b", 6 * GIB),
    ModelSpec("big:70b", 12 * GIB),
    ModelSpec("nomic-embed-text:latest", 1 * GIB, embedding_only=True),
)


class OllamaFaults(Faults):
    """Switches are False/0 (off), True (always) or a number (so many times).

    ``unload_hangs``/``unload_500``: the unload call hangs or fails although the model does go.
    ``ignore_unload``: it succeeds although the model stays.  ``reappear``: a model that was
    unloaded loads itself again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unload_hangs: int = False
        self.unload_500: int = False
        self.ignore_unload: int = False
        self.reappear: int = 0

    def clear(self) -> None:
        super().clear()
        self.unload_hangs = self.unload_500 = self.ignore_unload = False
        self.reappear = 0


class Runner:
    """A model on the card: ``loading``, ``ready``, ``stopping``, then ``gone``."""

    def __init__(self, spec: ModelSpec, parallel: int) -> None:
        self.spec = spec
        self.state = "loading"
        self.started = False
        self.was_ready = False
        self.refs = 0
        self.keep_alive = 0.0
        self.expires_at: float | None = None
        self.timer: IDelayedCall | None = None
        self.load_task: Deferred[Any] | None = None
        self.error: str | None = None
        self.slots = DeferredSemaphore(parallel) if parallel else None
        self._waiters: list[Deferred[None]] = []

    def changed(self) -> Deferred[None]:
        """Fire at the next change of state."""
        waiter: Deferred[None] = Deferred()
        self._waiters.append(waiter)
        return waiter

    def become(self, state: str) -> None:
        self.state = state
        wake(self._waiters)


def wake(waiters: list[Deferred[None]]) -> None:
    """Fire all that wait; those cancelled meanwhile are passed over."""
    woken = waiters[:]
    waiters.clear()
    for waiter in woken:
        if not waiter.called:
            waiter.callback(None)


class Scheduler(EngineSim):
    """The part of `OllamaSim` that knows the card and nothing of HTTP routes."""

    owner = "ollama"
    faults: OllamaFaults

    def __init__(
        self,
        card: Card,
        clock: Any,
        models: tuple[ModelSpec, ...] | list[ModelSpec] | None = None,
        *,
        speed: float = 1.0,
        load_time: float = 2.0,
        unload_time: float = 0.3,
        load_cancel_time: float = 0.2,
        keep_alive: float = 300.0,
        max_queue: int = 512,
        max_parallel: int = 0,
        ps_lists_loading: bool = True,
        cancels_load: bool = True,
        vram_of_others: bool = False,
        max_requests: int = 5000,
    ) -> None:
        super().__init__(card, clock, speed=speed, max_requests=max_requests)
        self.faults = OllamaFaults()
        specs = DEFAULT_MODELS if models is None else models
        self.models = {full_name(spec.name): spec for spec in specs}
        self.load_time = load_time
        self.unload_time = unload_time
        self.load_cancel_time = load_cancel_time
        self.keep_alive = keep_alive
        self.max_queue = max_queue
        self.max_parallel = max_parallel
        self.ps_lists_loading = ps_lists_loading
        self.cancels_load = cancels_load
        self.vram_of_others = vram_of_others
        self.runners: dict[str, Runner] = {}
        self.loads: list[tuple[float, str]] = []
        self.unloads: list[tuple[float, str]] = []
        self.waiting = 0
        self._waiters: list[Deferred[None]] = []

    @property
    def resident(self) -> dict[str, str]:
        """State by model, for every model that may hold memory."""
        return {name: runner.state for name, runner in self.runners.items()}

    def reset(self) -> None:
        for runner in self.runners.values():
            self._disarm(runner)
        self.runners.clear()
        self.waiting = 0
        wake(self._waiters)

    async def when_idle(self) -> None:
        """Wait until nothing is resident and nobody waits."""
        while self.runners or self.waiting:
            await self._change()

    # -- for the routes

    async def acquire(self, name: str, keep_alive: float | None) -> Runner:
        """A ready runner with one more reference; cancel to leave the line."""
        runner = self.runners.get(name)
        if (runner is None or runner.state != "ready") and self.waiting >= self.max_queue:
            raise HttpError(503, BUSY, JSON)
        self.waiting += 1
        generation = self._generation
        try:
            while True:
                runner = self.runners.get(name) or self._begin_load(name)
                if runner.state in ("stopping", "gone"):
                    await runner.changed()
                    continue
                await self._hold(runner, keep_alive)
                return runner
        finally:
            if self._generation == generation:
                self.waiting -= 1
            self._notify()

    async def _hold(self, runner: Runner, keep_alive: float | None) -> None:
        runner.refs += 1
        runner.keep_alive = self.keep_alive if keep_alive is None else keep_alive
        self._disarm(runner)
        held = False
        try:
            while runner.state == "loading":
                await runner.changed()
            if runner.error is not None:
                raise HttpError(500, b'{"error":"%s"}' % runner.error.encode(), JSON)
            if runner.state != "ready":
                raise HttpError(500, b'{"error":"model runner has unexpectedly stopped"}', JSON)
            held = True
        finally:
            if not held:
                self.release(runner)

    def release(self, runner: Runner) -> None:
        """A request is done with its runner."""
        runner.refs -= 1
        if runner.refs or self.runners.get(full_name(runner.spec.name)) is not runner:
            return
        if runner.state == "loading":
            if self.cancels_load:
                self._abandon(runner)
        elif runner.state == "ready":
            self._idle(runner)
        self._notify()

    def expire(self, name: str) -> None:
        """What an unload request does: the runner goes when its last request has ended."""
        runner = self.runners.get(full_name(name))
        if runner is None or (runner.state == "loading" and not self.ps_lists_loading):
            return
        runner.keep_alive = 0
        if runner.state == "ready" and runner.refs == 0:
            self._idle(runner)

    def load(self, name: str, keep_alive: float | None = None) -> Deferred[None]:
        """Load a model as somebody else's request would; fires when it is ready."""

        async def hold() -> None:
            with suppress(HttpError):  # It did not fit: nobody to tell.
                self.release(await self.acquire(full_name(name), keep_alive))

        return self.spawn(hold())

    def unload(self, name: str) -> None:
        """Unload a model as somebody else's request would."""
        self.expire(name)

    # -- inside

    def _change(self) -> Deferred[None]:
        waiter: Deferred[None] = Deferred()
        self._waiters.append(waiter)
        return waiter

    def _notify(self) -> None:
        wake(self._waiters)

    def _disarm(self, runner: Runner) -> None:
        if runner.timer is not None and runner.timer.active():
            runner.timer.cancel()
        runner.timer = runner.expires_at = None

    def _idle(self, runner: Runner) -> None:
        self._disarm(runner)
        if runner.keep_alive == 0:
            self._stop(runner)
        elif runner.keep_alive > 0:
            delay = self.real(runner.keep_alive)
            runner.expires_at = self.clock.seconds() + delay
            runner.timer = self.clock.callLater(delay, self._stop, runner)

    def _begin_load(self, name: str) -> Runner:
        runner = Runner(self.models[name], self.max_parallel)
        self.runners[name] = runner
        runner.load_task = self.spawn(self._load(name, runner))
        return runner

    async def _load(self, name: str, runner: Runner) -> None:
        await self._make_room(runner)
        self.loads.append((self.clock.seconds(), name))
        runner.started = True
        try:
            for step in range(1, RAMP_STEPS + 1):
                self.card.allocate(self.owner, name, runner.spec.vram * step // RAMP_STEPS)
                await self.sleep(self.load_time / RAMP_STEPS)
        except OutOfVram:
            runner.error = "llama runner process has terminated: cudaMalloc failed: out of memory"
            self._forget(name, runner)
            return
        runner.was_ready = True
        runner.become("ready")
        if runner.refs == 0:
            self._idle(runner)
        self._notify()

    async def _make_room(self, runner: Runner) -> None:
        while True:
            others = [other for other in self.runners.values() if other is not runner]
            need = runner.spec.vram + sum(
                other.spec.vram for other in others if other.started or other.state != "loading"
            )
            if self.vram_of_others:
                need += self.card.used - self.card.used_by(self.owner)
            loading = any(other.started and other.state == "loading" for other in others)
            occupied = any(other.state != "loading" for other in others)
            if not loading and (need <= self.card.total_bytes or not occupied):
                return
            idle = [other for other in others if other.state == "ready" and not other.refs]
            if idle and not loading and not any(other.state == "stopping" for other in others):
                self._disarm(idle[0])
                self._stop(idle[0])
            await self._change()

    def _abandon(self, runner: Runner) -> None:
        """Nobody waits for this load any more."""
        runner.state = "stopping"
        if runner.load_task is not None:
            runner.load_task.cancel()
        pause = self.load_cancel_time if runner.started else 0.0
        self.spawn(self._wind_down(runner, pause))

    def _stop(self, runner: Runner) -> None:
        self._disarm(runner)
        runner.state = "stopping"
        self.spawn(self._wind_down(runner, self.unload_time))

    async def _wind_down(self, runner: Runner, seconds: float) -> None:
        name = full_name(runner.spec.name)
        if seconds:
            await self.sleep(seconds)
        if runner.started:
            self.unloads.append((self.clock.seconds(), name))
        self._forget(name, runner)
        again, self.faults.reappear = take(self.faults.reappear)
        if again:
            self.load(name)

    def _forget(self, name: str, runner: Runner) -> None:
        self.card.release(self.owner, name)
        if self.runners.get(name) is runner:
            del self.runners[name]
        runner.become("gone")
        self._notify()

    def listed(self) -> list[tuple[str, Runner]]:
        """What ``/api/ps`` shows: by default everything until it has really stopped."""
        return [
            (name, runner)
            for name, runner in self.runners.items()
            if self.ps_lists_loading or runner.was_ready
        ]


def full_name(name: str) -> str:
    """Model names without a tag mean ``:latest``."""
    return name if ":" in name.rsplit("/", 1)[-1] else f"{name}:latest"
