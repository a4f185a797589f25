"""llama-server's router: which models have a process, in what state, and how they come and go.

Facts [seen, src]: one child process a model; it stays ``loaded`` until that process is gone; an
unload in mid-completion hangs until the router kills the child after ``stop-timeout``; one in
mid-load kills it at once and counts as a failed load; a request that finds a child on its way out
waits for the exit and loads the model again; a load goes on although its request has gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore
from twisted.internet.interfaces import IDelayedCall

from .card import GIB, Card, OutOfVram
from .exchange import HttpError
from .faults import Faults
from .httplib import HttplibSim
from .llama_formats import llama_error
from .llama_streams import ChildDied
from .ollama_runner import ModelSpec, wake

RAMP_STEPS = 4
#: Exit status of a child that was killed, or whose load failed.
FAILED = 1

DEFAULT_MODELS = (
    ModelSpec("llama-3.2-3b", 4 * GIB),
    ModelSpec("qwen3-8b", 6 * GIB),
    ModelSpec("big-70b", 12 * GIB),
    ModelSpec("nomic-embed", 1 * GIB, embedding_only=True),
)


class LlamaFaults(Faults):
    """Switches are False/0 (off), True (always) or a number (so many times).

    ``unload_hangs``/``unload_500``: the unload call hangs or fails although the model does go.
    ``ignore_unload``: it succeeds although the model stays.  ``reappear``: a model that was
    unloaded is loaded again by somebody.  ``crash_load``: the child ends in mid-load.
    ``hang_stop``: an idle child does not end either until it is killed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unload_hangs: int = False
        self.unload_500: int = False
        self.ignore_unload: int = False
        self.reappear: int = 0
        self.crash_load: int = False
        self.hang_stop: int = False

    def clear(self) -> None:
        super().clear()
        self.unload_hangs = self.unload_500 = self.ignore_unload = False
        self.crash_load = self.hang_stop = False
        self.reappear = 0


class Child:
    """The process that serves one model."""

    def __init__(self, spec: ModelSpec, parallel: int) -> None:
        self.spec = spec
        self.alive = True
        self.was_ready = False
        #: Told to exit: it takes no step of its work any more.
        self.exiting = False
        self.slots = DeferredSemaphore(parallel)
        #: Requests that the router has given it.
        self.requests = 0
        #: Those of them that keep it from falling asleep.
        self.tasks = 0
        #: Completions that it computes, for whomever.
        self.working = 0
        self.task: Deferred[Any] | None = None
        self.timer: IDelayedCall | None = None
        self._naps: dict[Deferred[None], IDelayedCall] = {}
        self._waiters: list[Deferred[None]] = []

    def nap(self, clock: Any, seconds: float) -> Deferred[None]:
        """Fire after so many real seconds, or when the process ends."""

        def cancelled(nap: Deferred[None]) -> None:
            self._naps.pop(nap).cancel()

        def over() -> None:
            del self._naps[nap]
            nap.callback(None)

        nap: Deferred[None] = Deferred(cancelled)
        self._naps[nap] = clock.callLater(seconds, over)
        return nap

    def gone(self) -> Deferred[None]:
        """Fire when the process has ended."""
        waiter: Deferred[None] = Deferred()
        if self.alive:
            self._waiters.append(waiter)
        else:
            waiter.callback(None)
        return waiter

    def end(self) -> None:
        """The process has ended."""
        self.alive = False
        for nap, call in list(self._naps.items()):
            call.cancel()
            del self._naps[nap]
            nap.callback(None)
        wake(self._waiters)

    def disarm(self) -> None:
        if self.timer is not None and self.timer.active():
            self.timer.cancel()
        self.timer = None


class Instance:
    """A model as the router knows it."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.status = "unloaded"
        self.exit_code = 0
        #: An unload was asked for and its child has not ended yet.
        self.stopping = False
        self.child: Child | None = None
        self.last_used = 0.0

    @property
    def running(self) -> bool:
        return self.status in ("loading", "loaded", "sleeping")

    @property
    def failed(self) -> bool:
        return self.status == "unloaded" and self.exit_code != 0


class Router(HttplibSim):
    """The part of `LlamaSim` that knows the card and nothing of HTTP routes.

    ``abort_time``: how long a child computes on for a client that has left.  ``unload_time``: what
    an idle child needs to end, ``kill_time`` one that is killed.  ``models_max``: how many children
    there may be; the one used longest ago makes room.  ``sleep_idle``: ``--sleep-idle-seconds``,
    0 for never; the memory is free ``sleep_free_time`` after the status says so.  ``single``: the
    name of the one model of a server without router.  ``ghost_loads``: a request that waits for a
    child to end loads its model then, even if its client has left meanwhile.
    """

    owner = "llamacpp"
    faults: LlamaFaults

    def __init__(
        self,
        card: Card,
        clock: Any,
        models: tuple[ModelSpec, ...] | list[ModelSpec] | None = None,
        *,
        speed: float = 1.0,
        load_time: float = 2.0,
        unload_time: float = 0.1,
        kill_time: float = 0.05,
        stop_timeout: float = 10.0,
        abort_time: float = 0.08,
        parallel: int = 4,
        models_max: int = 4,
        autoload: bool = True,
        sleep_idle: float = 0.0,
        sleep_free_time: float = 0.2,
        single: str | None = None,
        ghost_loads: bool = True,
        max_requests: int = 5000,
    ) -> None:
        super().__init__(card, clock, speed=speed, max_requests=max_requests)
        self.faults = LlamaFaults()
        specs = DEFAULT_MODELS if models is None else models
        self.instances = {spec.name: Instance(spec) for spec in specs}
        if single is not None:
            self.instances = {single: self.instances[single]}
        self.load_time = load_time
        self.unload_time = unload_time
        self.kill_time = kill_time
        self.stop_timeout = stop_timeout
        self.abort_time = abort_time
        self.parallel = parallel
        self.models_max = models_max
        self.autoload = autoload
        self.sleep_idle = sleep_idle
        self.sleep_free_time = sleep_free_time
        self.single = single
        self.ghost_loads = ghost_loads
        self.loads: list[tuple[float, str]] = []
        self.unloads: list[tuple[float, str]] = []
        self.boots: list[float] = []
        #: Children that had to be killed, and when.
        self.kills: list[tuple[float, str]] = []
        self.active_generations = 0
        self.waiting = 0
        self._line: list[tuple[str, object]] = []
        self._waiters: list[Deferred[None]] = []
        self._subscribers: list[Callable[[dict[str, Any]], None]] = []

    # -- what a test may look at and do

    @property
    def resident(self) -> dict[str, str]:
        """State by model, for every model that has a process."""
        return {
            name: "stopping" if instance.stopping else instance.status
            for name, instance in self.instances.items()
            if instance.running
        }

    async def when_idle(self) -> None:
        """Wait until no model has a process and nobody waits for one."""
        while self.resident or self.waiting:
            await self._change()

    def load(self, name: str) -> Deferred[None]:
        """Load a model as somebody else's request would; fires when it is ready or has failed."""

        async def hold() -> None:
            instance = self.instances[name]
            self.begin_load(instance)
            while instance.status == "loading":
                await self._change()

        return self.spawn(hold())

    def unload(self, name: str) -> None:
        """Unload a model as somebody else's request would."""
        self.stop_instance(self.instances[name])

    def crash(self, name: str) -> None:
        """The model's process ends by itself."""
        instance = self.instances[name]
        if instance.child is not None:
            self._exited(instance, instance.child, FAILED)

    def boot(self) -> None:
        self.boots.append(self.clock.seconds())
        if self.single is not None:
            self.begin_load(self.instances[self.single])

    def reset(self) -> None:
        for instance in self.instances.values():
            child, instance.child = instance.child, None
            if child is not None:
                child.disarm()
                child.end()
            instance.status, instance.exit_code, instance.stopping = "unloaded", 0, False
        self.active_generations = self.waiting = 0
        self._line.clear()
        self._subscribers.clear()
        wake(self._waiters)

    @contextmanager
    def subscribed(self, listener: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        """Call ``listener`` with every event of /models/sse meanwhile."""
        self._subscribers.append(listener)
        try:
            yield
        finally:
            if listener in self._subscribers:
                self._subscribers.remove(listener)

    # -- for the routes

    async def ensure(self, instance: Instance) -> None:
        """Wait until the model is ready, loading it if need be; cancel to leave the line."""
        if instance.status in ("loaded", "sleeping") and not instance.stopping:
            return
        name = instance.spec.name
        entry = (name, object())
        seen_loading = False
        self.waiting += 1
        generation = self._generation
        if instance.status == "unloaded":
            self._line.append(entry)
        try:
            while True:
                if instance.stopping:
                    if entry not in self._line:
                        self._line.append(entry)
                elif instance.status in ("loaded", "sleeping"):
                    return
                elif instance.status == "loading":
                    seen_loading = True
                elif seen_loading:
                    if instance.failed:
                        raise llama_error(f"model name={name} failed to load", "server_error")
                    return
                elif entry not in self._line:
                    return
                elif self._line[0][0] == name and self._has_room(name):
                    self.begin_load(instance)
                    seen_loading = True
                    continue
                await self._change()
        except CancelledError:
            if self.ghost_loads and entry in self._line and self._generation == generation:
                self.spawn(self._ensure_for_nobody(instance))
            raise
        finally:
            if self._generation == generation:
                self.waiting -= 1
                if entry in self._line:
                    self._line.remove(entry)
            self._notify()

    async def _ensure_for_nobody(self, instance: Instance) -> None:
        with suppress(HttpError):
            await self.ensure(instance)

    async def make_place(self, name: str) -> None:
        """What /models/load does before it loads: one model may have to go."""
        while not self._has_room(name):
            if self._victim(name) is None and not any(i.stopping for i in self.instances.values()):
                raise llama_error("model limit reached, try again later", "server_error")
            await self._change()

    def begin_load(self, instance: Instance) -> None:
        """Start the model's process, unless it has one."""
        if instance.status != "unloaded":
            return
        child = instance.child = Child(instance.spec, self.parallel)
        instance.status, instance.exit_code, instance.stopping = "loading", 0, False
        instance.last_used = self.clock.seconds()
        self._event("model_status", instance)
        self.loads.append((self.clock.seconds(), instance.spec.name))
        child.task = self.spawn(self._load(instance, child))
        self._notify()

    def stop_instance(self, instance: Instance) -> None:
        """What an unload request does; the answer comes long before the effect."""
        child = instance.child
        if child is None or instance.stopping:
            return
        instance.stopping = True
        child.disarm()
        if instance.status == "loading":
            if child.task is not None:
                child.task.cancel()
            self.spawn(self._kill_child(instance, child, 0.0))
            return
        child.exiting = True
        hangs = self.faults.spend("hang_stop")
        if child.working or hangs:
            self.spawn(self._kill_child(instance, child, self.stop_timeout))
        else:
            self.spawn(self._end_child(instance, child))

    async def awake(self, instance: Instance, child: Child) -> None:
        """Have a child that sleeps load its model again; raises `ChildDied` if it ends first."""
        while child.alive and not child.exiting and instance.status != "loaded":
            if instance.status == "sleeping" and child.task is None:
                instance.status = "loading"
                self._event("status_change", instance)
                child.task = self.spawn(self._load(instance, child))
            await self._change()
        if child.exiting or not child.alive:
            await child.gone()
            raise ChildDied

    async def asleep_or_awake(self, instance: Instance, child: Child) -> None:
        """Wait while the child falls asleep: meanwhile it answers nobody [src: one mutex]."""
        while child.alive and instance.status == "sleeping" and child.task is not None:
            await self._change()

    async def compute(self, child: Child, seconds: float) -> None:
        """Let the child work so long; raises `ChildDied` if it ends, which it may take its time to."""
        if child.alive:
            await child.nap(self.clock, self.real(seconds))
        if child.exiting:
            await child.gone()
        if not child.alive:
            raise ChildDied

    def tasks_over(self, instance: Instance, child: Child) -> None:
        """The child may have nothing to do any more."""
        if not child.tasks and not child.working and instance.child is child:
            self._idle(instance, child)
        self._notify()

    # -- inside

    def _change(self) -> Deferred[None]:
        waiter: Deferred[None] = Deferred()
        self._waiters.append(waiter)
        return waiter

    def _notify(self) -> None:
        wake(self._waiters)

    def _event(self, kind: str, instance: Instance, **more: Any) -> None:
        data: dict[str, Any] = {"status": instance.status, **more}
        if instance.status == "unloaded":
            data["exit_code"] = instance.exit_code
        event = {"model": instance.spec.name, "event": kind, "data": data}
        for subscriber in list(self._subscribers):
            subscriber(event)

    def _has_room(self, name: str) -> bool:
        """Whether another child may be started; the one used longest ago is told to go if not."""
        running = [i for i in self.instances.values() if i.running]
        if self.models_max <= 0 or len(running) < self.models_max:
            return True
        victim = self._victim(name)
        if victim is not None and not any(i.stopping for i in running):
            self.stop_instance(victim)
        return False

    def _victim(self, name: str) -> Instance | None:
        wanted = {waiting for waiting, _ in self._line}
        idle = [
            instance
            for instance in self.instances.values()
            if instance.status in ("loaded", "sleeping")
            and not instance.stopping
            and instance.spec.name not in wanted
            and instance.child is not None
            and not instance.child.requests
        ]
        return min(idle, key=lambda instance: instance.last_used, default=None)

    async def _load(self, instance: Instance, child: Child) -> None:
        name, first = instance.spec.name, not child.was_ready
        crashes = self.faults.spend("crash_load")
        try:
            for step in range(1, RAMP_STEPS + 1):
                self.card.allocate(self.owner, name, instance.spec.vram * step // RAMP_STEPS)
                await self.sleep(self.load_time / RAMP_STEPS)
                if crashes and step > 1:
                    child.task = None
                    self._exited(instance, child, FAILED)
                    return
                value = step / RAMP_STEPS
                progress = {"stages": ["text_model"], "current": "text_model", "value": value}
                self._event("status_change", instance, progress=progress)
        except OutOfVram:
            child.task = None
            self._exited(instance, child, FAILED)
            return
        child.task = None
        child.was_ready = True
        instance.status = "loaded"
        self._event("status_change", instance, **({"info": {"meta": {}}} if first else {}))
        self._idle(instance, child)
        self._notify()

    def _idle(self, instance: Instance, child: Child) -> None:
        child.disarm()
        if self.sleep_idle > 0 and instance.status == "loaded" and not child.tasks:
            child.timer = self.clock.callLater(
                self.real(self.sleep_idle), self._sleep_child, instance, child
            )

    def _sleep_child(self, instance: Instance, child: Child) -> None:
        child.timer = None
        if child.working or instance.stopping or instance.status != "loaded":
            return
        instance.status = "sleeping"
        self._event("status_change", instance)

        async def free() -> None:
            await self.sleep(self.sleep_free_time)
            self.card.release(self.owner, instance.spec.name)
            child.task = None
            self._notify()

        child.task = self.spawn(free())
        self._notify()

    async def _end_child(self, instance: Instance, child: Child) -> None:
        await self.sleep(self.unload_time)
        self._exited(instance, child, 0)

    async def _kill_child(self, instance: Instance, child: Child, wait: float) -> None:
        if wait:
            await self.sleep(wait)
            self.kills.append((self.clock.seconds(), instance.spec.name))
        await self.sleep(self.kill_time)
        self._exited(instance, child, FAILED)

    def _exited(self, instance: Instance, child: Child, code: int) -> None:
        if instance.child is not child:
            return
        child.disarm()
        task, child.task = child.task, None
        if task is not None and not task.called:
            task.cancel()
        self.card.release(self.owner, instance.spec.name)
        self.unloads.append((self.clock.seconds(), instance.spec.name))
        instance.child = None
        instance.status, instance.exit_code, instance.stopping = "unloaded", code, False
        child.end()
        self._event("status_change", instance)
        if self.single is not None:
            # The child was the server itself; this may be running within it.
            self.clock.callLater(0, self.kill)
            return
        self._notify()
        if self.faults.spend("reappear"):
            self.load(instance.spec.name)
