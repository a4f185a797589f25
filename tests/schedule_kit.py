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
from autobahn.twisted.websocket import WebSocketClientFactory, WebSocketClientProtocol
from twisted.internet import task
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import LogLevel, formatEvent, globalLogPublisher
from twisted.python.failure import Failure
from virtual_net import LOCALHOST, Stuck, VirtualReactor

from turnstile import log as tlog
from turnstile.arbiter import Abandoned, Event, Granted, Kind, Queued, Released, Transition
from turnstile.card import Degraded
from turnstile.config import Config, Upstream
from turnstile.service import TurnstileService
from turnstile.sim import GpuHost
from turnstile.sim.graphs import (
    error_graph,
    image_graph,
    nested_graph,
    oom_graph,
    sleep_graph,
    stubborn_graph,
    system_exit_graph,
)

#: Seconds after which clients give up.
PATIENCE = 300.0
#: Seconds that the end of a run may take, all engines well and nobody asking anything new.
DRAIN = 1500.0


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


# -- clients ---------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Answer:
    """How a request ended, as its client saw it."""

    status: int = 0
    body: bytes = b""
    #: Whether the answer came whole.
    complete: bool = False
    #: Whether the client left before.
    left: bool = False


@attrs.define
class Leave:
    """When a client goes away: at a point of the request, and so many seconds later."""

    at: str
    after: float
    reset: bool


class Caller(Protocol):
    """A client's connection: one request at a time."""

    transport: Any

    def __init__(self, world: VirtualReactor) -> None:
        self.world = world
        self.busy = False
        self.open = False
        self._buffer = b""
        self._answer = Answer()
        self._done: Deferred[Answer] | None = None
        self._left: int | None = None
        self._chunked = False
        self._head_read = False
        self._leave: Leave | None = None

    def connectionMade(self) -> None:
        self.open = True

    def request(
        self, method: str, target: str, body: bytes | None, leave: Leave | None, pause: float
    ) -> Deferred[Answer]:
        """Send a request; the answer always comes, if only as the connection's end."""
        self.busy = True
        self._buffer, self._answer = b"", Answer()
        self._head_read = self._chunked = False
        self._left = None
        self._leave = leave
        self._method = method
        d = self._done = Deferred()
        patience = self.world.callLater(PATIENCE, self._go, d, False)

        def over(answer: Answer) -> Answer:
            if patience.active():
                patience.cancel()
            return answer

        d.addBoth(over)
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: {LOCALHOST}:{self.transport.getPeer().port}\r\n"
        )
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        data = head.encode() + b"\r\n"
        if leave is not None and leave.at == "head":
            self.transport.write(data[: len(data) // 2])
            self._go_in(leave)
        elif body and (pause or (leave is not None and leave.at == "body")):
            half = len(body) // 2
            self.transport.write(data + body[:half])
            if leave is not None and leave.at == "body":
                self._go_in(leave)
            else:
                self.world.callLater(pause, self._send_rest, d, body[half:])
        else:
            self.transport.write(data + (body or b""))
            self._sent()
        return d

    def _send_rest(self, d: Deferred[Answer], rest: bytes) -> None:
        if self._done is d and self.open:
            self.transport.write(rest)
            self._sent()

    def _sent(self) -> None:
        if self._leave is not None and self._leave.at == "sent":
            self._go_in(self._leave)

    def _go_in(self, leave: Leave) -> None:
        self.world.callLater(leave.after, self._go, self._done, leave.reset)

    def _go(self, d: Any, reset: bool) -> None:
        if d is not self._done or not self.open:
            return
        self._answer.left = True
        if reset:
            self.transport.abortConnection()
        else:
            self.transport.loseConnection()

    def dataReceived(self, data: bytes) -> None:
        self._buffer += data
        while not self._head_read:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
            self._read_head(head)
        leave = self._leave
        if leave is not None and leave.at == "answer":
            self._leave = None
            self._go_in(leave)
        if self._chunked:
            if self._buffer.endswith(b"\r\n0\r\n\r\n") or self._buffer == b"0\r\n\r\n":
                self._finish(True)
        elif self._left is not None and len(self._buffer) >= self._left:
            self._finish(True)

    def _read_head(self, head: bytes) -> None:
        lines = head.lower().split(b"\r\n")
        status = int(lines[0].split(b" ")[1])
        if status < 200:
            return
        self._head_read = True
        self._answer.status = status
        fields = dict(line.split(b": ", 1) for line in lines[1:])
        if self._method == "HEAD" or status in (204, 304):
            self._left = 0
        elif b"content-length" in fields:
            self._left = int(fields[b"content-length"])
        else:
            self._chunked = fields.get(b"transfer-encoding") == b"chunked"
        if fields.get(b"connection") == b"close":
            self.open = False

    def _finish(self, complete: bool) -> None:
        d, self._done = self._done, None
        if d is not None:
            answer = self._answer
            answer.body, answer.complete = self._buffer, complete
            self.busy = False
            d.callback(answer)

    def connectionLost(self, reason: Failure | None = None) -> None:
        self.open = False
        endless = self._head_read and not self._chunked and self._left is None
        self._finish(endless and not self._answer.left)


class _OneShot(Factory):
    noisy = False

    def __init__(self, caller: Caller, failed: Callable[[], None]) -> None:
        self.caller = caller
        self._failed = failed

    def buildProtocol(self, addr: object) -> Caller:
        return self.caller

    def startedConnecting(self, connector: object) -> None: ...

    def clientConnectionFailed(self, connector: object, reason: object) -> None:
        self._failed()

    def clientConnectionLost(self, connector: object, reason: object) -> None: ...


class Events(WebSocketClientProtocol):  # type: ignore[misc]
    """A page's WebSocket."""

    ended: Deferred[None]

    def onClose(self, clean: bool, code: int | None, reason: str | None) -> None: ...

    def connectionLost(self, reason: Failure) -> None:
        super().connectionLost(reason)
        if not self.factory.ended.called:
            self.factory.ended.callback(None)


def _unchunk(body: bytes) -> bytes:
    """A body that may be framed as one chunk."""
    first, _, rest = body.partition(b"\r\n")
    return rest.partition(b"\r\n")[0] if rest and first.isalnum() else body


# -- the system ------------------------------------------------------------------------------------------------------


def make_config(host: GpuHost, **changes: Any) -> Config:
    """Time limits as people have them, the long ones shortened."""
    settings: dict[str, Any] = {
        "ollama_url": Upstream.parse(host.ollama.url),
        "comfy_url": Upstream.parse(host.comfy.url),
        "listen_ollama": f"tcp:0:interface={LOCALHOST}",
        "listen_comfy": f"tcp:0:interface={LOCALHOST}",
        "unload_timeout": 10.0,
        "free_timeout": 10.0,
        "job_timeout": 60.0,
        "llm_wait_timeout": 120.0,
        "backoff_max": 5.0,
        "shutdown_timeout": 5.0,
    }
    return Config(**{**settings, **changes})


class _Ordered(dict[Any, None]):
    """A set that is iterated in the order of its making, so that nothing depends on where objects lie."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)

    def pop(self, *args: Any) -> Any:
        return super().pop(*args) if args else self.popitem()[0]


class System:
    """A host, a turnstile in front of it, its clients, and a diary of all that happens.

    :param seed: decides everything.
    :param config: changes to the configuration.
    """

    def __init__(
        self,
        seed: int,
        config: dict[str, Any] | None = None,
        ollama: dict[str, Any] | None = None,
        comfy: dict[str, Any] | None = None,
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.world = VirtualReactor(random.Random(seed + 1))
        self.diary: deque[tuple[float, str]] = deque(maxlen=20_000)
        self.degraded: list[Degraded] = []
        self.failures: list[str] = []
        #: How much of the card Ollama had, by time.
        self.ollama_held: list[tuple[float, int]] = []
        self.tally: dict[str, int] = {}
        self.host = GpuHost(
            self.world,
            ollama_options={
                "load_time": 1.0,
                "token_rate": 40.0,
                "keep_alive": 60.0,
                **(ollama or {}),
            },
            comfy_options={"load_time": 1.0, "object_info_bytes": 5000, **(comfy or {})},
        )
        for engine in (self.host.ollama, self.host.comfy):
            engine.connections, engine._tasks = _Ordered(), _Ordered()  # type: ignore[assignment]
        self._config = config or {}
        self.service: TurnstileService

    # -- life

    @contextmanager
    def running(self) -> Iterator[System]:
        """Everything up; afterwards everything down."""
        with self._patched():
            self.world.wait(self.host.start())
            self.host.card.listen(self._card_changed)
            self.service = service = TurnstileService(
                make_config(self.host, **self._config), reactor=self.world
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
        self.ollama_held.append((self.world.seconds(), card.residents.get("ollama", 0)))
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
        factory = _OneShot(caller, lambda: d.callback(None))
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
        answer = await caller.request(method, target, data, leave, pause)
        if caller.open and leave is None and caller.world.rng.random() < 0.5:
            caller.transport.loseConnection()
            caller.open = False
        return answer

    def ask(self, *args: Any, **kwargs: Any) -> Deferred[Answer]:
        """:meth:`call`, begun at once."""
        return Deferred.fromCoroutine(self.call(*args, **kwargs))

    # -- waiting for the end

    def engines_well(self) -> None:
        """Take all faults away and have every engine up."""
        for engine in (self.host.ollama, self.host.comfy):
            engine.faults.clear()
            # What hangs does so for ever, and so would a node of ComfyUI that waits for it.
            engine.drop_connections()
            if not engine.listening:
                self.world.wait(engine.restart(0.1))
        if self.host.comfy.wedged:
            self.world.wait(self.host.comfy.restart(0.1))

    def unrest(self) -> list[str]:
        """What is not idle."""
        arbiter, card, comfy = self.service.arbiter, self.service.card, self.host.comfy
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
        if comfy.remaining:
            found.append(f"ComfyUI has {comfy.remaining} jobs")
        if self.host.ollama.active_generations or self.host.ollama.waiting:
            found.append("Ollama is at work")
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


# -- schedules -------------------------------------------------------------------------------------------------------

CHAT_MODELS = (
    "llama3.2",
    "llama3.2",
    "llama3.2:latest",
    "qwen3:8b",
    "big:70b",
    "nomic-embed-text",
    "absent",
)


class Schedule:
    """Operations of clients, and in some runs of fate.

    :param faults: engines fail now and then.
    :param intruders: models are loaded and jobs queued behind turnstile's back.
    :param harshness: how many times as often that happens.
    """

    def __init__(
        self,
        system: System,
        operations: int,
        *,
        users: int = 10,
        faults: bool = False,
        intruders: bool = False,
        harshness: int = 1,
    ) -> None:
        self.system = system
        self.rng = system.rng
        self.world = system.world
        self.left = operations
        self.done_operations = 0
        self.users = users
        self.faults = faults
        self.intruders = intruders
        self.prompt_ids: deque[str] = deque(maxlen=6)
        #: When jobs and models came behind turnstile's back.
        self.foreign_jobs: list[float] = []
        self.foreign_models: list[float] = []
        self.running: dict[object, tuple[float, str]] = {}
        self._wedges = False
        self.operations: list[tuple[float, Callable[[], Any]]] = [
            (30, self.chat),
            (4, self.chat_openai),
            (4, self.embed),
            (3, self.unload_only),
            (3, self.load_only),
            (1, self.unknown_post),
            (22, self.image),
            (6, self.look_at_ollama),
            (8, self.look_at_comfy),
            (4, self.look_at_turnstile),
            (3, self.delete_from_queue),
            (1, self.clear_queue),
            (3, self.interrupt),
            (1, self.clear_history),
            (4, self.websocket),
            (1, self.odd_request),
        ]
        if faults:
            self.operations += [
                (3 * harshness, self.fault_http),
                (harshness, self.fault_process),
                (2 * harshness, self.fault_engine),
                (harshness, self.fault_sockets),
            ]
        if "ollama-nested" in system.service.ports:
            self.operations += [(3, self.nested_job), (2, self.nested_call)]
        if intruders:
            self.operations += [
                (2 * harshness, self.foreign_job),
                (2 * harshness, self.foreign_model),
            ]
        self._weights = [weight for weight, _ in self.operations]
        self._choices = [operation for _, operation in self.operations]

    # -- the driver

    def start(self) -> None:
        for number in range(self.users):
            Deferred.fromCoroutine(self._user(number)).addErrback(self._user_failed)

    def _user_failed(self, failure: Failure) -> None:
        self.system.failures.append("a client of the test failed: " + failure.getTraceback())

    async def _user(self, number: int) -> None:
        rng = self.rng
        while self.left > 0:
            self.left -= 1
            operation = rng.choices(self._choices, self._weights)[0]
            key = object()
            self.running[key] = (self.world.seconds(), operation.__name__)
            self.system.tally[operation.__name__] = self.system.tally.get(operation.__name__, 0) + 1
            try:
                await operation()
            finally:
                del self.running[key]
                self.done_operations += 1
            # Bursts and silences: most think for a moment, some for long enough that the card falls idle.
            think = rng.choice((0.0, 0.01, 0.3, 1.0, 4.0 if number % 3 else 12.0))
            await self.sleep(rng.uniform(0.0, think))

    def sleep(self, seconds: float) -> Deferred[None]:
        d: Deferred[None] = Deferred()
        self.world.callLater(seconds, d.callback, None)
        return d

    def finished(self) -> bool:
        return self.left <= 0 and not self.running

    # -- clients

    def leave(self) -> Leave | None:
        """Whether and how the client goes away before its answer."""
        rng = self.rng
        if rng.random() >= 0.25:
            return None
        at = rng.choice(("connect", "head", "body", "sent", "sent", "sent", "answer", "answer"))
        after = rng.choice(
            (0.0, rng.uniform(0, 0.005), rng.uniform(0, 0.3), rng.uniform(0, 3.0), 10.0)
        )
        return Leave(at, after, rng.random() < 0.5)

    def pause(self) -> float:
        return self.rng.choice((0.0, 0.0, 0.0, 0.001, 0.2, 1.5))

    def keep_alive(self) -> dict[str, Any]:
        choice = self.rng.choice((None, None, None, None, 0, -1, "5s"))
        return {} if choice is None else {"keep_alive": choice}

    async def ask(self, name: str, method: str, target: str, body: Any = None) -> Answer:
        self.system.note(f"client: {method} {target}")
        return await self.system.call(
            name,
            method,
            target,
            body,
            self.leave(),
            None,
            self.pause() if body is not None else 0.0,
        )

    async def chat(self) -> None:
        rng = self.rng
        options = {"num_predict": rng.choice((0, 1, 3, 8, 40))}
        body: dict[str, Any] = {
            "model": rng.choice(CHAT_MODELS),
            "options": options,
            **self.keep_alive(),
        }
        if rng.random() < 0.3:
            body["stream"] = False
        if rng.random() < 0.5:
            await self.ask("ollama", "POST", "/api/generate", {**body, "prompt": "why"})
        else:
            body["messages"] = [{"role": "user", "content": "why" * rng.choice((1, 1, 1, 5000))}]
            await self.ask("ollama", "POST", "/api/chat", body)

    async def chat_openai(self) -> None:
        path, more = self.rng.choice(
            (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "why"}]}),
                ("/v1/completions", {"prompt": "why"}),
                ("/v1/responses", {"input": "why"}),
                ("/v1/messages", {"messages": [{"role": "user", "content": "why"}]}),
            )
        )
        body = {"model": self.rng.choice(CHAT_MODELS), "max_tokens": 5, **more}
        if self.rng.random() < 0.5:
            body["stream"] = True
        await self.ask("ollama", "POST", path, body)

    async def embed(self) -> None:
        path, more = self.rng.choice(
            (
                ("/api/embed", {"input": ["a", "b"]}),
                ("/api/embeddings", {"prompt": "a"}),
                ("/v1/embeddings", {"input": "a"}),
            )
        )
        model = self.rng.choice(("nomic-embed-text", "nomic-embed-text", "llama3.2"))
        await self.ask("ollama", "POST", path, {"model": model, **more})

    async def unload_only(self) -> None:
        model = self.rng.choice(CHAT_MODELS)
        path = self.rng.choice(("/api/generate", "/api/chat"))
        zero = self.rng.choice((0, "0", "0s"))
        await self.ask("ollama", "POST", path, {"model": model, "keep_alive": zero})

    async def load_only(self) -> None:
        body = {"model": self.rng.choice(CHAT_MODELS), **self.keep_alive()}
        await self.ask("ollama", "POST", "/api/generate", body)

    async def unknown_post(self) -> None:
        path = self.rng.choice(("/api/new", "/api/chat/", "/api/%63hat", "/v2/chat"))
        body = {"model": "llama3.2", "messages": [{"role": "user", "content": "why"}]}
        await self.ask("ollama", "POST", path, body)

    async def image(self) -> None:
        rng = self.rng
        graph: Any = rng.choice(
            (
                lambda: image_graph(steps=rng.randint(1, 12)),
                lambda: image_graph(steps=rng.randint(1, 12)),
                lambda: image_graph(steps=2, step_time=rng.uniform(0.0, 4.0)),
                lambda: image_graph(
                    steps=1, checkpoint=rng.choice(("sd.safetensors", "xl.safetensors"))
                ),
                lambda: sleep_graph(rng.uniform(0.0, 5.0)),
                lambda: stubborn_graph(rng.uniform(0.0, 5.0)),
                error_graph,
                oom_graph,
                lambda: {"1": {"class_type": "Missing"}},
                lambda: {"1": {"class_type": "KSampler", "inputs": {}}},
                lambda: None,
            )
        )()
        if self.faults and not self._wedges and rng.random() < 0.01:
            graph = system_exit_graph()
            self._wedges = True
            self.world.callLater(20.0, self._unwedge)
        body: Any = {"prompt": graph}
        if rng.random() < 0.5:
            body["client_id"] = f"page-{rng.randint(0, 3)}"
        if rng.random() < 0.15:
            body["prompt_id"] = f"mine-{rng.randint(0, 5)}-{rng.randint(0, 9)}"
        if rng.random() < 0.05:
            body = rng.choice((b"{", b"", b"[]", b'{"prompt": {}}'))
        path = rng.choice(("/prompt", "/api/prompt", "/%70rompt"))
        answer = await self.ask("comfyui", "POST", path, body)
        if answer.status == 200 and answer.complete:
            try:
                prompt_id = json.loads(_unchunk(answer.body))["prompt_id"]
            except ValueError:
                return  # a fault's
            self.prompt_ids.append(prompt_id)
            if rng.random() < 0.5:
                await self.sleep(rng.uniform(0.0, 3.0))
                await self.ask("comfyui", "GET", f"/history/{prompt_id}")

    async def nested_job(self) -> None:
        rng = self.rng
        url = f"http://{LOCALHOST}:{self.system.port('ollama-nested')}/api/generate"
        call = {"model": rng.choice(CHAT_MODELS), "prompt": "why", "options": {"num_predict": 5}}
        graph = nested_graph(
            url,
            call,
            count=rng.choice((1, 2, 4)),
            pause=rng.choice((0.0, 0.5, 3.0)),
            ignore_errors=True,
        )
        await self.ask("comfyui", "POST", "/prompt", {"prompt": graph})

    async def nested_call(self) -> None:
        body = {"model": self.rng.choice(CHAT_MODELS), "prompt": "why"}
        await self.ask("ollama-nested", "POST", "/api/generate", body)

    async def look_at_ollama(self) -> None:
        method, path = self.rng.choice(
            (
                ("GET", "/api/tags"),
                ("GET", "/api/ps"),
                ("GET", "/api/version"),
                ("HEAD", "/"),
                ("GET", "/v1/models"),
                ("GET", "/nothing"),
                ("GET", "/sim/download?bytes=3000000"),
                ("GET", "/sim/download?bytes=300000&chunked=1"),
            )
        )
        await self.ask("ollama", method, path)

    async def look_at_comfy(self) -> None:
        path = self.rng.choice(
            ("/", "/queue", "/history", "/prompt", "/system_stats", "/object_info", "/api/queue")
        )
        await self.ask("comfyui", "GET", path)

    async def look_at_turnstile(self) -> None:
        path = self.rng.choice(("/healthz", "/metrics", "/turnstile/state", "/turnstile/healthz"))
        answer = await self.ask(self.rng.choice(("ollama", "comfyui")), "GET", path)
        if not answer.left and answer.status != 200:
            self.system.failures.append(f"{path} answered {answer.status}")

    def some_prompt(self) -> str:
        pending = [job.id for job in self.system.host.comfy.pending]
        known = [*self.prompt_ids, *pending]
        return self.rng.choice(known) if known else "none"

    async def delete_from_queue(self) -> None:
        await self.ask("comfyui", "POST", "/queue", {"delete": [self.some_prompt()]})

    async def clear_queue(self) -> None:
        await self.ask("comfyui", "POST", "/api/queue", {"clear": True})

    async def interrupt(self) -> None:
        body = {"prompt_id": self.some_prompt()} if self.rng.random() < 0.6 else {}
        await self.ask("comfyui", "POST", "/interrupt", body)

    async def clear_history(self) -> None:
        body = {"clear": True} if self.rng.random() < 0.5 else {"delete": [self.some_prompt()]}
        await self.ask("comfyui", "POST", "/history", body)

    async def odd_request(self) -> None:
        name = self.rng.choice(("ollama", "comfyui"))
        await self.ask(
            name, "POST", self.rng.choice(("/api/create", "/x/../prompt", "/upload/image")), b"{}"
        )

    async def websocket(self) -> None:
        rng = self.rng
        sid = f"page-{rng.randint(0, 3)}"
        port = self.system.port("comfyui")
        factory = WebSocketClientFactory(
            f"ws://{LOCALHOST}:{port}/ws?clientId={sid}", reactor=self.world
        )
        factory.protocol = Events
        factory.noisy = False
        factory.setProtocolOptions(openHandshakeTimeout=0, closeHandshakeTimeout=1)
        factory.ended = Deferred()
        factory.clientConnectionFailed = lambda *_: factory.ended.callback(None)
        connector = self.world.connectTCP(LOCALHOST, port, factory)
        self.system.note(f"client: WebSocket of {sid}")
        how = rng.randrange(3)
        stay = rng.choice((0.0, 0.01, 2.0, 20.0))

        def go(how: int) -> None:
            transport = getattr(connector, "transport", None)
            if connector.state == "disconnected" or transport is None:
                return
            if how == 0 or not transport.connected:
                connector.disconnect() if connector.state == "connecting" else transport.abortConnection()
            elif how == 1 and transport.protocol.state == Events.STATE_OPEN:
                transport.protocol.sendClose(1000)
            else:
                transport.loseConnection()

        self.world.callLater(rng.uniform(0.0, stay), go, how)
        self.world.callLater(stay + 30.0, go, 0)
        await factory.ended

    # -- fate

    def _engine(self) -> Any:
        return self.rng.choice((self.system.host.ollama, self.system.host.comfy))

    def _trouble(self, what: str) -> None:
        self.system.note(f"FAULT: {what}")

    async def fault_http(self) -> None:
        """Some requests to an engine go wrong."""
        rng = self.rng
        engine = self._engine()
        matches = {
            "ollama": ("/api/ps", "/api/ps", "POST /api/generate", "POST /api/*", "/v1/*", "*"),
            "comfyui": (
                "/queue",
                "/history/*",
                "/free",
                "/system_stats",
                "POST */prompt",
                "POST */prompt",
                "GET *",
                "*",
            ),
        }
        match = rng.choice(matches[engine.owner])
        times = rng.choice((1, 1, 2, 5, None))
        faults = engine.faults
        kind = rng.choice(
            (
                "hang",
                "status",
                "status",
                "garbage",
                "drop",
                "drop",
                "cut",
                "upload",
                "delay",
                "trickle",
            )
        )
        if kind == "hang":
            rule = faults.hang(match, times)
        elif kind == "status":
            rule = faults.status(rng.choice((500, 503, 404, 502)), match, times)
        elif kind == "garbage":
            rule = faults.garbage(match, times)
        elif kind == "drop":
            rule = faults.drop(match, times, rst=rng.random() < 0.5)
        elif kind == "cut":
            rule = faults.drop(match, times, after=rng.choice((0, 1, 20)), rst=rng.random() < 0.5)
        elif kind == "upload":
            rule = faults.drop_upload(match, times, after=rng.choice((0, 10, 60)))
        elif kind == "delay":
            rule = faults.delay(rng.choice((0.05, 0.5, 7.0)), match, times)
        else:
            rule = faults.trickle(match, times, interval=0.005)
        self._trouble(f"{engine.owner}: {kind} on {match}, times {times}")
        self.world.callLater(rng.choice((0.5, 3.0, 20.0)), rule.cancel)

    async def fault_process(self) -> None:
        """An engine dies, or refuses connections for a while."""
        rng = self.rng
        engine = self._engine()
        away = rng.choice((0.0, 0.3, 2.0, 8.0))
        if rng.random() < 0.7:
            self._trouble(f"{engine.owner} is killed, back after {away:g} s")
            await engine.restart(away)
        elif engine.listening:
            self._trouble(f"{engine.owner} refuses connections for {away:g} s")
            await engine.stop_listening()
            await self.sleep(away)
            if not engine.listening:
                engine.start_listening()

    async def fault_engine(self) -> None:
        """An engine does not do what it says."""
        rng = self.rng
        ollama, comfy = self.system.host.ollama.faults, self.system.host.comfy.faults
        while_ = rng.choice((1.0, 5.0, 20.0))
        kind = rng.randrange(8)
        if kind == 0:
            self._trouble("Ollama ignores unloads")
            ollama.ignore_unload = rng.choice((1, 2, True))
        elif kind == 1:
            self._trouble("an unloaded model loads itself again")
            ollama.reappear = rng.choice((1, 2, 4))
        elif kind == 2:
            self._trouble("unloads hang")
            ollama.unload_hangs = rng.choice((1, True))
        elif kind == 3:
            self._trouble("unloads fail")
            ollama.unload_500 = rng.choice((1, True))
        elif kind == 4:
            self._trouble("ComfyUI ignores /free")
            comfy.ignore_free = True
        elif kind == 5:
            self._trouble("jobs leave no history")
            comfy.never_in_history = True
        else:
            self._trouble("a job is lost")
            comfy.lose_job()
            return

        def well() -> None:
            ollama.ignore_unload = ollama.unload_hangs = ollama.unload_500 = False
            ollama.reappear = 0
            comfy.ignore_free = comfy.never_in_history = False

        self.world.callLater(while_, well)

    async def fault_sockets(self) -> None:
        """Open connections to an engine are cut."""
        rng = self.rng
        comfy = self.system.host.comfy
        if rng.random() < 0.5:
            self._trouble("ComfyUI's WebSockets are cut")
            for sid, socket in list(comfy.sockets.items()):
                if sid.startswith("turnstile-") or rng.random() < 0.3:
                    socket.transport.abortConnection()
        else:
            engine = self._engine()
            self._trouble(f"all connections to {engine.owner} are cut")
            engine.drop_connections(rst=rng.random() < 0.5)

    def _unwedge(self) -> None:
        self._wedges = False
        if self.system.host.comfy.wedged:
            self._trouble("ComfyUI is restarted by its owner")
            self.system.host.comfy.restart(0.5)

    async def foreign_job(self) -> None:
        comfy = self.system.host.comfy
        if comfy.listening:
            self._trouble("a job is queued in ComfyUI directly")
            self.foreign_jobs.append(self.world.seconds())
            comfy.submit(image_graph(steps=self.rng.randint(1, 8)))

    async def foreign_model(self) -> None:
        ollama = self.system.host.ollama
        if ollama.listening:
            self._trouble("a model is loaded in Ollama directly")
            self.foreign_models.append(self.world.seconds())
            ollama.load("llama3.2", 5.0)


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
    config: dict[str, Any] | None = None,
    ollama: dict[str, Any] | None = None,
    comfy: dict[str, Any] | None = None,
    sabotage: Callable[[System], None] | None = None,
) -> Report:
    """One run; nothing of it fails, its report tells what was found.

    :param strict: whether any degraded interval is a problem.
    :param sabotage: is called with the running system, to plant a bug in it.
    """
    system = System(seed, config, ollama, comfy)
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
        for engine in (system.host.ollama, system.host.comfy):
            problems += [(world.seconds(), f"simulator: {f.getTraceback()}") for f in engine.errors]
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
    held = [*schedule.system.ollama_held, (now, 1)]
    # It has left once nothing is held for a while: one that is being stopped may be loaded again at once.
    left = [t for (t, size), (u, _) in pairwise(held) if not size and u - t > 1.0]
    return [(t, t + 1.0) for t in schedule.foreign_jobs] + [
        (t, next((end for end in left if end > t), now)) for t in schedule.foreign_models
    ]


def _use_normally(system: System) -> list[tuple[float, str]]:
    """One chat and one image job, as if nothing had been."""
    world = system.world
    problems = []
    body = {"model": "llama3.2", "prompt": "why", "options": {"num_predict": 3}}
    answer = world.wait(system.ask("ollama", "POST", "/api/generate", body))
    if answer.status != 200 or not answer.complete:
        problems.append((world.seconds(), f"the last chat: {answer}"))
    body = {"prompt": image_graph(steps=2)}
    answer = world.wait(system.ask("comfyui", "POST", "/prompt", body))
    if answer.status != 200:
        problems.append((world.seconds(), f"the last image job: {answer}"))
    world.until(lambda: not system.unrest(), 60.0)
    world.pass_time(10.0)
    if system.host.card.used_by("comfyui"):
        problems.append((world.seconds(), "ComfyUI was not freed after the last job"))
    return problems
