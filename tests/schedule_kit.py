"""Random schedules: a whole system in virtual time, clients and faults drawn from a seed, and what must hold of it.

The simulated engines, the real turnstile in front of them and its clients share one :class:`VirtualReactor`, so that
a seed plays again exactly (with the same PYTHONHASHSEED) and a failure can be looked into.
"""

from __future__ import annotations

import json
import random
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import attrs
import txaio
from schedule_clients import Answer, Caller, Leave, OneShot
from schedule_engines import Comfy, Llama, Ollama, Part, Sd
from schedule_ops import Schedule
from twisted.internet import task
from twisted.internet.defer import Deferred
from twisted.logger import LogLevel, formatEvent, globalLogPublisher
from virtual_net import LOCALHOST, Stuck, VirtualReactor

from turnstile import log as tlog
from turnstile.arbiter import Abandoned, Event, Granted, Kind, Queued, Released, Transition
from turnstile.card import Degraded
from turnstile.config import Config
from turnstile.service import TurnstileService
from turnstile.sim import GpuHost

#: Seconds that the end of a run may take, all engines well and nobody asking anything new.
DRAIN = 1500.0
#: The engines of a system, unless it is told otherwise.
ENGINES = ("ollama", "comfyui")


@attrs.define
class Report:
    """What a run found wrong; empty: nothing."""

    seed: int
    operations: int
    problems: list[str]
    #: Lines of the run's diary that explain the first problem.
    diary: list[str]
    overlaps: int
    degraded: int
    virtual_seconds: float
    #: Seconds of it that were degraded.
    degraded_seconds: float
    tally: dict[str, int]

    def __str__(self) -> str:
        head = f"seed {self.seed}: {len(self.problems)} problem(s) in {self.operations} operations"
        return "\n".join(
            [head, *self.problems[:20], "", "what happened around the first:", *self.diary]
        )


# -- the system ------------------------------------------------------------------------------------------------------


#: Time limits as people have them, the long ones shortened.
LIMITS: dict[str, Any] = {
    "unload_timeout": 10.0,
    "free_timeout": 10.0,
    "job_timeout": 60.0,
    "llm_wait_timeout": 120.0,
    "backoff_max": 5.0,
    "shutdown_timeout": 5.0,
    "busy_wait": 120.0,
    # A probe works in a thread, whose moments are real ones.
    "vram_probe": "none",
}
PARTS: dict[str, tuple[type[Part], str]] = {
    "ollama": (Ollama, "ollama"),
    "llamacpp": (Llama, "llama"),
    "comfyui": (Comfy, "comfy"),
    "sd": (Sd, "sd"),
}
#: How the simulated engines are, unless a system is told otherwise.
SIMS: dict[str, dict[str, Any]] = {
    "ollama": {"load_time": 1.0, "token_rate": 40.0, "keep_alive": 60.0},
    "llama": {"load_time": 1.0, "token_rate": 40.0, "stop_timeout": 5.0},
    "comfy": {"load_time": 1.0, "object_info_bytes": 5000},
    "sd": {"load_time": 2.0},
}


class System:
    """A host, a turnstile in front of it, its clients, and a diary of all that happens.

    :param seed: decides everything.
    :param config: changes to the configuration.
    :param engines: which there are.
    :param sims: changes to how the simulated engines are (``ollama``, ``llama``, ``comfy``, ``sd``).
    """

    def __init__(
        self,
        seed: int,
        config: dict[str, Any] | None = None,
        *,
        engines: Sequence[str] = ENGINES,
        **sims: dict[str, Any] | None,
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.world = VirtualReactor(random.Random(seed + 1))
        self.diary: deque[tuple[float, str]] = deque(maxlen=20_000)
        self.degraded: list[Degraded] = []
        self.failures: list[str] = []
        self.tally: dict[str, int] = {}
        there = {PARTS[name][1] for name in engines}
        self.host = GpuHost(
            self.world,
            ollama="ollama" in there,
            comfy="comfy" in there,
            llama="llama" in there,
            **{f"{name}_options": {**SIMS[name], **(sims.get(name) or {})} for name in SIMS},  # type: ignore[arg-type]
        )
        self.parts: dict[str, Part] = {}
        for name in engines:
            part, attribute = PARTS[name]
            self.parts[name] = part(self, getattr(self.host, attribute))
        self._config = config or {}
        self.service: TurnstileService

    def make_config(self) -> Config:
        """The settings of the turnstile in front of these engines."""
        settings = dict(LIMITS)
        for part in self.parts.values():
            settings |= part.settings()
        return Config(**{**settings, **self._config})

    # -- life

    @contextmanager
    def running(self) -> Iterator[System]:
        """Everything up; afterwards everything down."""
        with self._patched():
            self.world.wait(self.host.start())
            self.host.card.listen(self._card_changed)
            self.service = service = TurnstileService(
                self.make_config(),
                reactor=self.world,
                spawner=sd.spawner if isinstance(sd := self.parts.get("sd"), Sd) else None,
            )
            service.vigil._poll = self.world.poll()
            chance = random.Random(self.seed + 3).random
            for site in service.sites.values():
                site.resource.chance = chance
            service.arbiter.add_listener(self._arbiter_event)
            service.card.add_listener(self._degraded)
            service.card.add_eviction_listener(
                lambda name, outcome, took: self.note(
                    f"eviction of {name}: {outcome.value} after {took:.3f} s"
                )
            )
            service.privilegedStartService()
            service.startService()
            self.world.wait(service.ready)
            yield self

    def stop(self) -> list[str]:
        """End everything; returns what is left behind, which should be nothing."""
        self.world.wait(self.service.stopService())
        self.world.wait(self.host.stop())
        self.world.pass_time(60.0)
        left = [str(call) for call in self.world.getDelayedCalls()]
        left += [
            f"connection {t.getHost().port} to {t.getPeer().port}"
            for t in self.world.transports.values()
        ]
        return left

    @contextmanager
    def _patched(self) -> Iterator[None]:
        ids = random.Random(self.seed + 2)
        cooperator = task.Cooperator(scheduler=lambda f: self.world.callLater(0, f))
        level = "info"
        before = txaio.config.loop
        txaio.config.loop = self.world
        globalLogPublisher.addObserver(self._logged)
        tlog.set_level(level)
        try:
            with (
                mock.patch.object(task, "_theCooperator", cooperator),
                mock.patch.object(uuid, "uuid4", lambda: uuid.UUID(int=ids.getrandbits(128))),
            ):
                yield
        finally:
            tlog.set_level("info")
            globalLogPublisher.removeObserver(self._logged)
            txaio.config.loop = before

    # -- the diary

    def note(self, text: str) -> None:
        self.diary.append((self.world.seconds(), text))

    def _logged(self, event: Any) -> None:
        if "log_failure" in event:
            failure = event["log_failure"]
            self.failures.append(f"{formatEvent(event)}: {failure.getTraceback()}")
            self.note(f"LOGGED FAILURE {failure.value!r}")
        elif event["log_level"] >= LogLevel.info:
            self.note(f"log: {formatEvent(event)}")

    def _card_changed(self, card: Any) -> None:
        for name, part in self.parts.items():
            part.held.append((self.world.seconds(), card.residents.get(name, 0)))
        residents = ", ".join(f"{o} {b >> 20} MiB" for o, b in sorted(card.residents.items()))
        self.note(f"card: {residents or 'empty'}")

    def _arbiter_event(self, event: Event) -> None:
        if isinstance(event, Transition):
            before, after = (t.name if t else "idle" for t in (event.before, event.after))
            self.note(f"arbiter: {before} -> {after}")
        elif isinstance(event, (Granted, Released)):
            lease = event.lease
            kind = type(event).__name__.lower()
            self.note(f"arbiter: {kind} {lease.tenant.name} {lease.label} #{id(lease) % 9973}")
        elif isinstance(event, (Queued, Abandoned)):
            kind = type(event).__name__.lower()
            self.note(f"arbiter: {kind} {event.waiter.tenant.name} {event.waiter.label}")

    def _degraded(self, interval: Degraded) -> None:
        if interval.ended is None:
            self.degraded.append(interval)
        what = "begins" if interval.ended is None else "ends"
        self.note(f"degraded {what}: {interval.culprit} {interval.reason}")

    def around(self, begin: float, end: float, most: int = 120) -> list[str]:
        """The diary's lines of a stretch of time."""
        lines = [f"{t:10.4f} {text}" for t, text in self.diary if begin <= t <= end]
        return lines[-most:]

    # -- clients

    def port(self, name: str) -> int:
        number: int = self.service.ports[name].getHost().port
        return number

    async def connect(self, name: str) -> Caller | None:
        caller = Caller(self.world)
        d: Deferred[Caller | None] = Deferred()
        factory = OneShot(caller, lambda: d.callback(None))
        self.world.connectTCP(LOCALHOST, self.port(name), factory)
        caller.connectionMade = lambda: (setattr(caller, "open", True), d.callback(caller))  # type: ignore
        return await d

    async def call(
        self,
        name: str,
        method: str,
        target: str,
        body: Any = None,
        leave: Leave | None = None,
        caller: Caller | None = None,
        pause: float = 0.0,
        fields: Sequence[str] = (),
    ) -> Answer:
        """One request through turnstile."""
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        if caller is None or not caller.open or caller.busy:
            caller = await self.connect(name)
            if caller is None:
                return Answer()
        if leave is not None and leave.at == "connect":
            caller._go(None, leave.reset)
            return Answer(left=True)
        answer = await caller.request(method, target, data, leave, pause, fields)
        if caller.open and leave is None and caller.world.rng.random() < 0.5:
            caller.transport.loseConnection()
            caller.open = False
        return answer

    def ask(self, *args: Any, **kwargs: Any) -> Deferred[Answer]:
        """:meth:`call`, begun at once."""
        return Deferred.fromCoroutine(self.call(*args, **kwargs))

    def sleep(self, seconds: float) -> Deferred[None]:
        """Some time."""
        d: Deferred[None] = Deferred()
        self.world.callLater(seconds, d.callback, None)
        return d

    # -- waiting for the end

    def engines_well(self) -> None:
        """Take all faults away and have every engine up."""
        for part in self.parts.values():
            part.well()

    def unrest(self) -> list[str]:
        """What is not idle."""
        arbiter, card = self.service.arbiter, self.service.card
        found = [
            f"lease {lease.tenant.name} {lease.label} {lease.details}" for lease in arbiter.leases
        ]
        for kind in Kind:
            found += [f"waiter {w.tenant.name} {w.label}" for w in arbiter.waiting(kind)]
        if arbiter.state != "idle":
            found.append(f"state {arbiter.state}")
        if card.switching():
            found.append("the card is switching")
        found += [
            f"channel of {name} with an exchange"
            for name, site in self.service.sites.items()
            for channel in site.channels
            if channel.exchange is not None
        ]
        for part in self.parts.values():
            found += part.unrest()
        return found


def spans(intervals: list[Degraded], now: float) -> list[tuple[float, float]]:
    """The union of the degraded intervals, in order."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted((i.began, now if i.ended is None else i.ended) for i in intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def uncovered(
    begin: float, end: float, union: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    """The parts of a stretch of time that lie in none of the spans."""
    parts = []
    for first, last in union:
        if last <= begin:
            continue
        if first >= end:
            break
        if first > begin:
            parts.append((begin, first))
        begin = max(begin, last)
    if begin < end:
        parts.append((begin, end))
    return [part for part in parts if part[1] - part[0] > 1e-9]


def check_overlaps(
    system: System, excuses: Sequence[tuple[float, float]] = ()
) -> list[tuple[float, str]]:
    """Every overlap on the card that no degraded interval covers, with the time when it began."""
    now = system.world.seconds()
    union = spans(system.degraded, now)
    merged = spans([*system.degraded, *(Degraded("", "", a, b) for a, b in excuses)], now)
    problems = []
    for overlap in system.host.card.overlaps:
        end = now if overlap.end is None else overlap.end
        for first, last in uncovered(overlap.start, end, merged if excuses else union):
            problems.append(
                (
                    first,
                    f"overlap of {' and '.join(sorted(overlap.owners))} outside a degraded interval"
                    f" from {first:.4f} to {last:.4f} ({last - first:.4f} s)",
                )
            )
    return problems


# -- a run -----------------------------------------------------------------------------------------------------------


def run_schedule(
    seed: int,
    operations: int,
    *,
    faults: bool = False,
    intruders: bool = False,
    users: int = 10,
    harshness: int = 1,
    strict: bool = False,
    engines: Sequence[str] = ENGINES,
    config: dict[str, Any] | None = None,
    sabotage: Callable[[System], None] | None = None,
    **sims: dict[str, Any] | None,
) -> Report:
    """One run; nothing of it fails, its report tells what was found.

    :param strict: whether any degraded interval is a problem.
    :param sabotage: is called with the running system, to plant a bug in it.
    """
    system = System(seed, config, engines=engines, **sims)
    problems: list[tuple[float, str]] = []
    with system.running():
        world = system.world
        schedule = Schedule(
            system,
            operations,
            users=users,
            faults=faults,
            intruders=intruders,
            harshness=harshness,
        )
        if sabotage is not None:
            sabotage(system)
        began = world.seconds()
        schedule.start()
        try:
            _drive(system, schedule)
            world.until(lambda: not system.unrest(), DRAIN)
            world.pass_time(40.0)
            problems += [(world.seconds(), f"not idle at the end: {u}") for u in system.unrest()]
            problems += _use_normally(system)
        except Stuck:
            now = world.seconds()
            stuck = [f"{name} since {t:.3f}" for t, name in schedule.running.values()]
            problems += [(now, f"not idle at the end: {u}") for u in system.unrest()]
            problems += [(now, f"still running: {what}") for what in stuck]
        if strict:
            problems += [
                (d.began, f"degraded without a fault: {d.culprit} {d.reason}")
                for d in system.degraded
            ]
        problems = check_overlaps(system, _excuses(schedule)) + problems
        problems += [(world.seconds(), f"logged: {text}") for text in system.failures]
        for part in system.parts.values():
            errors = part.sim.errors
            problems += [(world.seconds(), f"simulator: {f.getTraceback()}") for f in errors]
        took = world.seconds() - began
        diary = system.around(problems[0][0] - 3.0, problems[0][0] + 0.5) if problems else []
        left = system.stop()
        problems += [(world.seconds(), f"left behind: {what}") for what in left]
    return Report(
        seed,
        schedule.done_operations,
        [f"{t:10.4f} {text}" for t, text in problems],
        diary,
        len(system.host.card.overlaps),
        len(system.degraded),
        took,
        sum(end - begin for begin, end in spans(system.degraded, world.seconds())),
        system.tally,
    )


def _drive(system: System, schedule: Schedule) -> None:
    """Until all operations were begun; then the engines are made well and the rest gets the time it needs."""
    system.world.until(lambda: schedule.left <= 0, 1e6)
    system.engines_well()
    system.world.until(schedule.finished, DRAIN)
    system.engines_well()


def _excuses(schedule: Schedule) -> list[tuple[float, float]]:
    """A job that nobody told turnstile of is noticed within a second; a model not before somebody asks for the card."""
    now = schedule.world.seconds()
    excuses = [(t, t + 1.0) for t in schedule.foreign_jobs]
    parts = schedule.system.parts
    loads = [*schedule.foreign_models]
    loads += [(t, part.name) for part in parts.values() for t in part.own_loads()]
    for t, name in loads:
        held = [*parts[name].held, (now, 1)]
        # It has left once nothing is held for a while: one that is being stopped may be loaded again at once.
        left = [u for (u, size), (v, _) in pairwise(held) if not size and v - u > 1.0]
        excuses.append((t, next((end for end in left if end > t), now)))
    return excuses


def _use_normally(system: System) -> list[tuple[float, str]]:
    """Every engine once, as if nothing had been."""
    problems = []
    for part in system.parts.values():
        problems += [(system.world.seconds(), problem) for problem in part.use()]
    system.world.until(lambda: not system.unrest(), 60.0)
    return problems
