"""A whole turnstile in this process, over real sockets, with the simulated card behind it."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import treq
from twisted.internet import reactor as _reactor
from twisted.internet.defer import Deferred, ensureDeferred, maybeDeferred
from twisted.internet.endpoints import HostnameEndpoint
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.internet.tcp import Connection, Port
from twisted.internet.threads import deferToThread
from twisted.logger import formatEvent, globalLogPublisher
from twisted.python.failure import Failure
from twisted.web.client import Agent, HTTPConnectionPool

from turnstile import log as tlog
from turnstile.config import Config, Upstream
from turnstile.service import TurnstileService
from turnstile.sim import GpuHost
from turnstile.sim.card_server import RemoteProcess
from turnstile.sim.graphs import image_graph

reactor: Any = _reactor
SPEED = 25.0
LOOPBACK = "tcp:0:interface=127.0.0.1"
#: A model that the simulated llama-server has.
LLAMA_MODEL = "llama-3.2-3b"
#: Seconds after which something counts as never coming.
PATIENCE = 10.0
#: The same for a program that has to start, on a machine that has other things to do.
START = 30.0
#: What two clocks read apart; intervals are compared with it.
EPSILON = 0.002

AGENT = Agent(reactor, pool=HTTPConnectionPool(reactor, persistent=False))


def tick(seconds: float = 0.0) -> Deferred[None]:
    """Let the reactor work for a while."""
    return deferLater(reactor, seconds, lambda: None)


async def until(
    condition: Callable[[], Any], what: str = "", seconds: float = PATIENCE, every: float = 0.003
) -> Any:
    """Wait for ``condition`` to hold; returns what it returned."""
    deadline = reactor.seconds() + seconds
    while True:
        value = condition()
        if value:
            return value
        if reactor.seconds() > deadline:
            raise AssertionError(f"it never came true: {what or condition}")
        await tick(every)


def in_thread(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Deferred[Any]:
    """Run a blocking client beside the reactor."""
    return deferToThread(work, *args, **kwargs).addTimeout(30.0, reactor)


def in_loop(work: Callable[[], Awaitable[Any]]) -> Deferred[Any]:
    """Run a coroutine of asyncio in a thread with a loop of its own."""

    async def whole() -> Any:
        result = await asyncio.wait_for(work(), 20.0)
        for _ in range(5):
            # asyncio closes the sockets of closed connections in turns of its loop.
            await asyncio.sleep(0)
        return result

    return in_thread(lambda: asyncio.run(whole()))


@attrs.frozen
class Answer:
    """An answer that came whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)

    def lines(self) -> list[Any]:
        """The body as NDJSON."""
        return [json.loads(line) for line in self.body.splitlines()]


class Wire(Protocol):
    """A client's bare socket: what was sent is what is on the wire."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.lost: Failure | None = None
        self.arrivals: list[float] = []

    def dataReceived(self, data: bytes) -> None:
        self.received += data
        self.arrivals.append(reactor.seconds())

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008
        self.lost = reason

    def send(self, data: bytes) -> None:
        """Write."""
        self.transport.write(data)  # type: ignore[union-attr]

    def send_request(
        self, method: str, path: str, body: Any = None, *headers: str, host: str = "127.0.0.1"
    ) -> None:
        """A request, framed by its length."""
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers]
        if body is not None:
            lines.append(f"Content-Length: {len(data)}")
        self.send("\r\n".join([*lines, "", ""]).encode() + data)

    async def until(self, data: bytes) -> None:
        """Wait for bytes to have come."""
        await until(lambda: data in self.received or self.lost, repr(data))
        assert data in self.received, self.received

    async def closed(self, seconds: float = PATIENCE) -> None:
        """Wait for the other side to end the connection."""
        await until(lambda: self.lost is not None, "the end of the connection", seconds)

    def close(self) -> None:
        """FIN."""
        self.transport.loseConnection()  # type: ignore[union-attr]

    def half_close(self) -> None:
        """FIN, but go on reading."""
        self.transport.loseWriteConnection()  # type: ignore[union-attr]

    def reset(self) -> None:
        """RST."""
        transport: Any = self.transport
        linger = struct.pack("ii", 1, 0)
        transport.getHandle().setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        transport.abortConnection()

    @property
    def status(self) -> int:
        """The status of the first answer; 0: none yet."""
        head = bytes(self.received[:15])
        return int(head[9:12]) if len(head) == 15 else 0


class System:
    """The simulated host, the turnstile in front of it, and clients."""

    def __init__(self, host: GpuHost, service: TurnstileService, events: list[Any]) -> None:
        self.host = host
        self.service = service
        self.arbiter = service.arbiter
        self.card = service.card
        self.events = events
        self._wires: list[Wire] = []

    # -- addresses

    def port(self, name: str = "ollama") -> int:
        """The port of one of turnstile's listeners."""
        port: int = self.service.ports[name].getHost().port
        return port

    def url(self, name: str = "ollama") -> str:
        """The address of one of turnstile's listeners."""
        return f"http://127.0.0.1:{self.port(name)}"

    # -- clients

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        to: str = "ollama",
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """One request of a connection of its own."""
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        response = await treq.request(
            method,
            self.url(to) + path,
            data=data,
            headers=headers or {},
            agent=AGENT,
            allow_redirects=False,
        )
        content = await response.content()
        await tick()
        fields = {
            name.decode().lower(): ", ".join(value.decode() for value in values)
            for name, values in response.headers.getAllRawHeaders()
        }
        return Answer(response.code, fields, content)

    def later(self, *args: Any, **kwargs: Any) -> Deferred[Answer]:
        """A request that is under way."""
        return ensureDeferred(self.request(*args, **kwargs))

    def chat(
        self, tokens: int = 5, model: str = "llama3.2", to: str = "ollama", **more: Any
    ) -> Deferred[Answer]:
        """A streamed chat that is under way."""
        return self.later("POST", "/api/chat", chat_body(tokens, model, **more), to)

    def complete(
        self, tokens: int = 5, model: str = LLAMA_MODEL, to: str = "llamacpp", **more: Any
    ) -> Deferred[Answer]:
        """A streamed chat with llama.cpp that is under way."""
        return self.later("POST", "/v1/chat/completions", completion(tokens, model, **more), to)

    def draw(self, steps: int = 4, to: str = "sd", **more: Any) -> Deferred[Answer]:
        """An image of sd-server's that is under way."""
        return self.later("POST", "/sdapi/v1/txt2img", drawing(steps, **more), to)

    def observe(self, path: str = "/sdapi/v1/progress", to: str = "sd") -> Deferred[Answer]:
        """A look at sd-server, which must not start it."""
        return self.later("GET", path, to=to)

    def prompt(self, graph: Any = None, path: str = "/prompt", **more: Any) -> Deferred[Answer]:
        """A prompt that is under way."""
        body = {"prompt": image_graph() if graph is None else graph, **more}
        return self.later("POST", path, body, "comfyui")

    async def queue(self, graph: Any = None, **more: Any) -> str:
        """Post a prompt; returns its id once ComfyUI has it."""
        answer = await self.prompt(graph, **more)
        assert answer.status == 200, answer
        prompt_id: str = answer.json()["prompt_id"]
        return prompt_id

    async def wire(self, to: str = "ollama") -> Wire:
        """A bare connection."""
        endpoint = HostnameEndpoint(reactor, "127.0.0.1", self.port(to))
        wire: Wire = await endpoint.connect(Factory.forProtocol(Wire))
        self._wires.append(wire)
        return wire

    async def state(self) -> dict[str, Any]:
        """What the state page says."""
        to = next(iter(self.service.ports))
        state: dict[str, Any] = (await self.request("GET", "/turnstile/state", to=to)).json()
        return state

    async def metric(self, name: str, **labels: str) -> float:
        """One number of the metrics page; 0 if it is not there."""
        to = next(iter(self.service.ports))
        text = (await self.request("GET", "/turnstile/metrics", to=to)).body.decode()
        inner = ",".join(f'{key}="{value}"' for key, value in labels.items())
        wanted = f"gpu_turnstile_{name}" + (f"{{{inner}}}" if inner else "")
        for line in text.splitlines():
            if line.rpartition(" ")[0] == wanted:
                return float(line.rpartition(" ")[2])
        return 0.0

    # -- the processes of sd-server

    def sd_child(self) -> RemoteProcess:
        """The only one that is there."""
        (process,) = [one for one in self.host.cards.alive if one.role == "main"]
        return process

    def sd_starts(self) -> int:
        """How many there have been."""
        return sum(one.role == "main" for one in self.host.cards.processes)

    async def until_sd_loads(self) -> RemoteProcess:
        """Wait for the first one."""
        await until(lambda: self.sd_starts() == 1, "an sd-server", START)
        return self.sd_child()

    async def until_sd_draws(self) -> RemoteProcess:
        """Wait for it to draw."""
        await until(lambda: any(p.rendering for p in self.host.cards.alive), "a drawing", START)
        return self.sd_child()

    async def until_sd_gone(self) -> None:
        """Wait for the last one to be gone, and its memory."""
        await until(lambda: not self.host.cards.alive, "no sd-server", START)
        await until(lambda: "sd" not in self.host.card.residents, "its memory")

    # -- what can be waited for

    async def idle(self) -> None:
        """Nobody has the card or waits for it."""
        await until(self.is_idle, "idle")

    def is_idle(self) -> bool:
        """Whether nobody has the card or waits for it."""
        arbiter = self.arbiter
        kinds = [kind for kind in type(self.tenants[0].kind)]
        waiting = any(True for kind in kinds for _ in arbiter.waiting(kind))
        return not arbiter.leases and not waiting and not self.card.switching()

    @property
    def tenants(self) -> Any:
        """The engines that are configured."""
        return self.card.tenants

    def waiting(self) -> dict[str, int]:
        """How many wait, by kind."""
        return {
            kind.value: sum(1 for _ in self.arbiter.waiting(kind))
            for kind in type(self.tenants[0].kind)
        }

    async def until_waiting(self, llm: int = 0, image: int = 0) -> None:
        """Exactly so many wait."""
        await until(
            lambda: self.waiting() == {"llm": llm, "image": image}, f"{llm} and {image} waiting"
        )

    def said(self, text: str) -> list[str]:
        """The lines of the log that hold ``text``."""
        return [line for line in map(formatEvent, self.events) if text in line]

    def order(self, *routes: tuple[str, str, str]) -> list[tuple[float, str]]:
        """When the engines got requests of these (engine, method, path), the earliest first."""
        found = []
        for engine, method, path in routes:
            for record in getattr(self.host, engine).requests_for(method, path):
                found.append((record.time, f"{engine} {method} {path}"))
        return sorted(found)

    # -- the end

    def uncovered_overlaps(self) -> list[Any]:
        """Overlaps on the simulated card that no degraded interval accounts for."""
        spans = sorted(
            (interval.began, interval.ended if interval.ended is not None else float("inf"))
            for interval in self.card.history
        )
        return [lap for lap in self.host.card.overlaps if not _covered(lap, spans)]

    def _stop_clients(self) -> None:
        for wire in self._wires:
            if wire.lost is None:
                wire.transport.abortConnection()  # type: ignore[union-attr]


def _covered(lap: Any, spans: list[tuple[float, float]]) -> bool:
    at = lap.start
    end = lap.end if lap.end is not None else reactor.seconds()
    for began, ended in spans:
        if began <= at + EPSILON:
            at = max(at, ended)
    return bool(at + EPSILON >= end)


def chat_body(tokens: int = 5, model: str = "llama3.2", **more: Any) -> dict[str, Any]:
    """A chat that answers with so many tokens."""
    messages = [{"role": "user", "content": "why?"}]
    options = {"num_predict": tokens, **more.pop("options", {})}
    return {"model": model, "messages": messages, "options": options, **more}


def completion(tokens: int = 5, model: str = LLAMA_MODEL, **more: Any) -> dict[str, Any]:
    """A chat with llama.cpp that answers with so many tokens."""
    messages = [{"role": "user", "content": "why?"}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "stream": True, **more}


def drawing(steps: int = 4, **more: Any) -> dict[str, Any]:
    """What sd-server is to draw."""
    return {"prompt": "a lighthouse", "steps": steps, **more}


def make_config(host: GpuHost, *, sd: bool = False, **settings: Any) -> Config:
    """A configuration for the engines of ``host``, with short times.

    :param sd: with an sd-server, which is a real process on the simulated card.
    :param settings: values, or functions that make them from the host once it runs.
    """
    defaults: dict[str, Any] = {
        "listen_ollama": LOOPBACK,
        "listen_comfy": LOOPBACK,
        "vram_probe": "none",
        "unload_timeout": 3.0,
        "unload_poll_interval": 0.05,
        "history_poll_interval": 0.2,
        "free_timeout": 3.0,
        "probe_timeout": 2.0,
        "connect_timeout": 2.0,
        "shutdown_timeout": 1.0,
        "backoff_initial": 0.05,
        "backoff_max": 0.2,
    }
    engines = (
        ("ollama_url", host.ollama),
        ("comfy_url", host.comfy),
        ("llama_url", host.llama),
    )
    for name, engine in engines:
        if engine.port and name not in settings:
            defaults[name] = Upstream.parse(engine.url)
    if sd:
        program, *arguments = host.sd_command
        defaults |= {
            "sd_url": Upstream.parse(host.sd_url),
            "sd_bin": program,
            "sd_args": tuple(arguments),
            "load_wait": 20.0,
            "sd_stop_grace": 3.0,
        }
    if "listen_broker" not in settings:
        defaults |= {"listen_llama": LOOPBACK, "listen_sd": LOOPBACK}
    made = {key: value(host) if callable(value) else value for key, value in settings.items()}
    return Config(**{**defaults, **made})


@asynccontextmanager
async def running(
    speed: float = SPEED,
    *,
    ollama: bool = True,
    comfy: bool = True,
    llama: bool = False,
    sd: bool = False,
    overlaps: str = "never",
    ready: bool = True,
    before: Callable[[GpuHost], Any] | None = None,
    host_options: dict[str, Any] | None = None,
    ollama_options: dict[str, Any] | None = None,
    comfy_options: dict[str, Any] | None = None,
    llama_options: dict[str, Any] | None = None,
    sd_options: dict[str, Any] | None = None,
    ports: Iterable[Any] = (),
    **settings: Any,
) -> AsyncIterator[System]:
    """The whole system, started and stopped.

    :param overlaps: ``never`` may two engines be on the card at once, only while ``degraded``, or ``any`` time.
    :param ready: wait for the first look at the engines.
    :param before: called with the host before turnstile starts; what it returns is awaited.
    :param ports: listening ports of the test's own, to be closed at the end.
    :param settings: of the configuration.
    """
    host = GpuHost(
        reactor,
        speed,
        ollama=ollama,
        comfy=comfy,
        llama=llama,
        sd=sd,
        ollama_options=ollama_options,
        comfy_options=comfy_options,
        llama_options=llama_options,
        sd_options=sd_options,
        **(host_options or {}),
    )
    events: list[Any] = []
    tlog.set_level("debug")
    globalLogPublisher.addObserver(events.append)
    service: TurnstileService | None = None
    logs = tempfile.mkdtemp(prefix="turnstile-test-")
    settings.setdefault("sd_log_dir", logs)
    try:
        await host.start()
        if before is not None:
            waiting = before(host)
            if waiting is not None:
                await waiting
        service = TurnstileService(make_config(host, sd=sd, **settings), reactor=reactor)
        service.privilegedStartService()
        service.startService()
        await until(lambda: all(service.ports.values()), "listeners")
        if ready:
            await until(lambda: not service.arbiter.held, "the first look")
        system = System(host, service, events)
        try:
            yield system
            system._stop_clients()
            await system.idle()
            if overlaps == "never":
                assert host.card.overlaps == [], "two engines on the card at once"
            elif overlaps == "degraded":
                assert system.uncovered_overlaps() == [], "an overlap that is not on record"
            for engine in (host.ollama, host.comfy, host.llama, host.sd):
                assert engine.errors == []
        finally:
            system._stop_clients()
    finally:
        if service is not None:
            await service.stopService()
        await host.stop()
        for port in ports:
            await maybeDeferred(port.stopListening)
        globalLogPublisher.removeObserver(events.append)
        shutil.rmtree(logs, ignore_errors=True)
    await until(clean, f"a clean reactor {reactor.getReaders()} {reactor.getDelayedCalls()}")
    failures = [event for event in events if event.get("log_failure") is not None]
    assert failures == [], "failures were logged"


def clean() -> bool:
    """Whether no socket and no delayed call is left in the reactor."""
    sockets = [reader for reader in reactor.getReaders() if isinstance(reader, (Connection, Port))]
    return not sockets and not reactor.getDelayedCalls()


def pieces(body: bytes) -> Iterator[bytes]:
    """The payloads of an SSE body."""
    for event in body.split(b"\n\n"):
        if event.startswith(b"data: "):
            yield event.removeprefix(b"data: ")
