"""The llama.cpp engine against a real llama-server, on the CPU, with tiny models that are made on the spot.

The server is ``$LLAMA_SERVER`` or ``llama-server`` on PATH (README.md says how to get one); without it all of this is
skipped. What stands for memory of a card here is the process of a model and what it has allocated.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
import treq
from engine_kit import clean, reactor, until
from system_kit import running
from tiny_gguf import write_model
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ClientFactory, Protocol
from twisted.internet.task import deferLater
from twisted.web.client import Agent, HTTPConnectionPool

from turnstile.card import Card, Eviction
from turnstile.child import guardian, shim
from turnstile.commands import ShellCommands
from turnstile.config import Upstream
from turnstile.engines.base import Admission
from turnstile.engines.client import make_client
from turnstile.engines.llamacpp import LlamaEngine

SERVER = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")

pytestmark = [
    pytest.mark.engines,
    pytest.mark.limit(300),
    pytest.mark.skipif(SERVER is None, reason="no llama-server on PATH and no LLAMA_SERVER"),
]

#: Seconds after which the router kills a process that does not end.
STOP_TIMEOUT = 4
PRESETS = f"""\
version = 1

[*]
stop-timeout = {STOP_TIMEOUT}
ctx-size = 512
threads = 1

[small]
model = {{directory}}/small.gguf

[heavy]
model = {{directory}}/heavy.gguf
"""
AGENT = Agent(reactor, pool=HTTPConnectionPool(reactor, persistent=False))
HEAVY = 300 * 1024 * 1024


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two models and a file that tells a router of them."""
    directory = tmp_path_factory.mktemp("models")
    write_model(directory / "small.gguf", "small")
    write_model(directory / "heavy.gguf", "heavy")
    (directory / "presets.ini").write_text(PRESETS.format(directory=directory))
    return directory


def allocated(pid: int) -> int:
    """Bytes of memory that a process has, those of files that it has mapped included."""
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) * 1024 if match else 0


class Server:
    """A llama-server that runs."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self.group = guardian.Group(process.pid)
        self.url = ""

    def find_url(self) -> bool:
        """Whether it says where it listens."""
        assert self.process.poll() is None, self.log.read_text(errors="replace")
        found = re.findall(r"http://127\.0\.0\.1:\d+", self.log.read_text(errors="replace"))
        self.url = found[-1] if found else ""
        return bool(found)

    def children(self) -> list[int]:
        """The processes of its models."""
        return [member.pid for member in self.group.members() if member.pid != self.process.pid]

    def resident(self, pid: int | None = None) -> int:
        """Bytes of memory that one of its processes has."""
        return allocated(pid or self.process.pid)


@contextmanager
def serving(tmp_path: Path, *args: str, **environment: str) -> Iterator[Server]:
    """A server that is gone, with all of its processes, whatever ends this one."""
    assert SERVER is not None
    log = tmp_path / f"server-{time.monotonic_ns()}.log"
    argv = [SERVER, *args, "--host", "127.0.0.1", "--port", "0", "--no-webui"]
    with open(log, "wb") as file:
        process = subprocess.Popen(
            shim.command(argv, owner=os.getpid()),
            stdout=file,
            stderr=file,
            env={**os.environ, **environment},
        )
    guard = guardian.start_guardian(process.pid, guardian.Mode.KILL)
    server = Server(process, log)
    try:
        yield server
    finally:
        server.group.signal(9)
        process.wait()
        guard.done()


class Wire(Protocol):
    """A chat on a connection of its own, which ends when the test says so."""

    def __init__(self, body: object, conversation: str) -> None:
        data = json.dumps(body).encode()
        lines = [
            "POST /v1/chat/completions HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
            "Connection: close",
            *([f"X-Conversation-Id: {conversation}"] if conversation else []),
        ]
        self.request = "\r\n".join([*lines, "", ""]).encode() + data
        self.answer = b""
        self.ended: Deferred[None] = Deferred()

    def connectionMade(self) -> None:
        self.transport.write(self.request)  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        self.answer += data

    def connectionLost(self, reason: Any = None) -> None:
        self.ended.callback(None)

    def abort(self) -> None:
        """The client leaves."""
        if self.transport is not None:
            self.transport.abortConnection()  # type: ignore[attr-defined]


class Once(ClientFactory):
    """Connects one wire."""

    noisy = False

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def buildProtocol(self, addr: object) -> Wire:
        return self.wire


class Rig:
    def __init__(self, server: Server, engine: LlamaEngine, card: Card) -> None:
        self.wires: list[Wire] = []
        self.server = server
        self.engine = engine
        self.card = card

    async def ask(
        self, method: str, target: str, body: object = None, **headers: str
    ) -> tuple[int, bytes]:
        """A request past turnstile: status and body of the answer."""
        data = None if body is None else json.dumps(body).encode()
        named: Any = {name.replace("_", "-"): value for name, value in headers.items()}
        response = await treq.request(
            method, self.server.url + target, data=data, headers=named, agent=AGENT
        )
        return response.code, await response.content()

    def chat(self, model: str, tokens: int, conversation: str = "", **more: Any) -> Wire:
        """Ask for an answer of so many tokens."""
        messages = [{"role": "user", "content": "hello there"}]
        body = {"model": model, "messages": messages, "max_tokens": tokens, **more}
        wire = Wire(body, conversation)
        reactor.connectTCP("127.0.0.1", int(self.server.url.rpartition(":")[2]), Once(wire))
        self.wires.append(wire)
        return wire

    async def statuses(self) -> dict[str, str]:
        _, body = await self.ask("GET", "/models")
        return {entry["id"]: entry["status"]["value"] for entry in json.loads(body)["data"]}

    async def becomes(self, model: str, *statuses: str) -> None:
        deadline = reactor.seconds() + 60.0
        while (status := (await self.statuses())[model]) not in statuses:
            assert reactor.seconds() < deadline, status
            await deferLater(reactor, 0.02)

    async def generating(self, model: str) -> bool:
        status, body = await self.ask("GET", f"/slots?model={model}&autoload=false")
        return status == 200 and any(slot["is_processing"] for slot in json.loads(body))

    async def begins(self, model: str) -> None:
        """Wait until it computes an answer."""
        deadline = reactor.seconds() + 60.0
        while not await self.generating(model):
            assert reactor.seconds() < deadline
            await deferLater(reactor, 0.02)

    async def unload(self, model: str) -> None:
        await self.ask("POST", "/models/unload", {"model": model})
        await self.becomes(model, "unloaded")


@asynccontextmanager
async def rig(
    tmp_path: Path, *args: str, key: str | None = None, **options: Any
) -> AsyncIterator[Rig]:
    with serving(tmp_path, *args, *(("--api-key", key) if key else ())) as server:
        await until(server.find_url, 60.0)
        card = Card(reactor)
        client = make_client(
            reactor,
            Upstream.parse(server.url),
            connect_timeout=5.0,
            headers={"Authorization": f"Bearer {key}"} if key else None,
        )
        options = {
            "unload_timeout": 30.0,
            "unload_poll_interval": 0.5,
            "probe_timeout": 30.0,
            "load_timeout": 60.0,
            **options,
        }
        engine = LlamaEngine(client, reactor, card, **options)
        card.register(engine)
        made = Rig(server, engine, card)
        try:
            yield made
        finally:
            for wire in made.wires:
                wire.abort()
            engine.stop()
            await client.close()
    await until(clean, 60.0)


def router(models: Path, *more: str) -> tuple[str, ...]:
    return ("--models-preset", str(models / "presets.ini"), *more)


# -- a router ------------------------------------------------------------------------------------------------------

READS = (
    "/",
    "/health",
    "/v1/health",
    "/models",
    "/v1/models",
    "/models?model=small",
    "/props",
    "/slots",
    "/metrics",
    "/lora-adapters",
    "/props?model=small",
    "/slots?model=small",
    "/metrics?model=small",
    "/lora-adapters?model=small",
    "/props?mod%65l=small",
    "/%70rops?model=small",
    "/props?model=small&autoload=false",
    "/slots?model=small&autoload=0",
    "/metrics?autoload=false&model=small",
    "/lora-adapters?model=small&autoload=false",
    "/props?model=small&autoload=",
    "/props?model=small&autoload=false&autoload=true",
    "/v1/stream?conv_id=x",
)
POSTS = (
    "/models/load",
    "/v1/chat/completions",
    "/completion",
    "/tokenize",
    "/apply-template",
    "/v1/messages/count_tokens",
    "/slots/0?action=erase",
    "/models/unload",
    "/models",
    "/v1/streams/lookup",
    "/v1/chat/completions?autoload=false",
)


@pytest_twisted.ensureDeferred
async def test_what_passes_loads_nothing_and_what_loads_takes_a_lease(
    tmp_path: Path, models: Path
) -> None:
    async with rig(tmp_path, *router(models)) as it:
        await it.engine.start()
        loaders = []
        for method, targets in (("GET", READS), ("HEAD", READS[10:14]), ("POST", POSTS)):
            for target in targets:
                body = {"model": "small", "content": "x", "prompt": "x", "max_tokens": 1}
                # "/models" would download it: not from here.
                body = {"model": ""} if target == "/models" else body
                await it.ask(method, target, body if method == "POST" else None)
                loaded = (await it.statuses())["small"] != "unloaded"
                admission = it.engine.admission(method.encode(), target.encode())
                assert not (loaded and admission is Admission.PASS), (method, target)
                if loaded:
                    loaders.append(f"{method} {target}")
                    await it.unload("small")
        # The table is about something: these do load.
        assert {"GET /props?model=small", "HEAD /slots?model=small", "POST /tokenize"} <= set(
            loaders
        )
        assert len(loaders) >= 15


@pytest_twisted.ensureDeferred
async def test_loaded_models_leave(tmp_path: Path, models: Path) -> None:
    async with rig(tmp_path, *router(models)) as it:
        await it.engine.start()
        assert not it.card.resident and it.engine.snapshot()["mode"] == "router"
        await until(lambda: it.engine.snapshot()["events"], 30.0)
        await it.chat("small", 2).ended
        await it.chat("heavy", 2).ended
        # They came past turnstile; the events told it.
        await until(lambda: it.card.resident == {"llamacpp"}, 60.0)
        assert len(it.server.children()) == 2
        assert await it.card.evict("llamacpp") is Eviction.CONFIRMED
        assert it.server.children() == [] and not it.card.resident and not it.card.degraded
        assert set((await it.statuses()).values()) == {"unloaded"}


@pytest_twisted.ensureDeferred
async def test_a_load_is_waited_for_and_ended(tmp_path: Path, models: Path) -> None:
    async with rig(tmp_path, *router(models)) as it:
        await it.engine.start()
        assert (await it.ask("POST", "/models/load", {"model": "heavy"}))[0] == 200
        assert (await it.statuses())["heavy"] == "loading"
        await it.engine.loaded()
        assert (await it.statuses())["heavy"] == "loaded"
        await it.unload("heavy")
        assert (await it.ask("POST", "/models/load", {"model": "heavy"}))[0] == 200
        assert await it.engine.evict() is Eviction.CONFIRMED
        assert it.server.children() == []


@pytest_twisted.ensureDeferred
async def test_after_an_aborted_chat_it_leaves_without_being_killed(
    tmp_path: Path, models: Path
) -> None:
    async with rig(tmp_path, *router(models)) as it:
        for _ in range(3):
            chat = it.chat("heavy", 400, stream=True)
            await it.begins("heavy")
            chat.abort()
            it.engine.note_aborted()
            assert await it.engine.evict() is Eviction.CONFIRMED
            assert it.server.children() == []
        assert "force-killing" not in it.server.log.read_text(errors="replace")


@pytest_twisted.ensureDeferred
async def test_an_aborted_answer_in_one_piece_costs_the_routers_own_time_out(
    tmp_path: Path, models: Path
) -> None:
    """The router does not notice that the client has gone."""
    async with rig(tmp_path, *router(models)) as it:
        chat = it.chat("heavy", 480)
        await it.begins("heavy")
        chat.abort()
        it.engine.note_aborted()
        assert await it.engine.evict() is Eviction.CONFIRMED
        assert it.server.children() == []


@pytest_twisted.ensureDeferred
async def test_a_conversation_without_client_is_ended_first(tmp_path: Path, models: Path) -> None:
    async with rig(tmp_path, *router(models)) as it:
        name = "a conversation/with::signs"
        chat = it.chat("heavy", 400, conversation=name, stream=True)
        await it.begins("heavy")
        chat.abort()
        await deferLater(reactor, 1.0)
        assert await it.generating("heavy")  # though nobody listens
        it.engine.note_aborted(name)
        assert await it.engine.evict() is Eviction.CONFIRMED
        assert it.server.children() == []
        assert "force-killing" not in it.server.log.read_text(errors="replace")


@pytest_twisted.ensureDeferred
async def test_a_chat_past_turnstile_costs_the_routers_own_time_out(
    tmp_path: Path, models: Path
) -> None:
    async with rig(tmp_path, *router(models)) as it:
        it.chat("heavy", 480)
        await it.begins("heavy")
        assert await it.engine.evict() is Eviction.CONFIRMED
        assert it.server.children() == []


@pytest_twisted.ensureDeferred
async def test_an_aborted_request_that_waited_for_another_model(
    tmp_path: Path, models: Path
) -> None:
    async with rig(tmp_path, *router(models, "--models-max", "1")) as it:
        it.chat("heavy", 480)
        await it.begins("heavy")
        second = it.chat("small", 2)
        await deferLater(reactor, 0.3)
        second.abort()
        it.engine.note_aborted()
        assert await it.engine.evict() is Eviction.CONFIRMED
        assert it.server.children() == []
        # And it stays so.
        await deferLater(reactor, 1.0)
        assert it.server.children() == []


@pytest_twisted.ensureDeferred
async def test_sleeping_models(tmp_path: Path, models: Path) -> None:
    async with rig(tmp_path, *router(models, "--sleep-idle-seconds", "1")) as it:
        await it.chat("heavy", 2).ended
        [pid] = it.server.children()
        assert it.server.resident(pid) > HEAVY
        await it.becomes("heavy", "sleeping")
        await until(lambda: it.server.resident(pid) < HEAVY / 2, 30.0)
        await it.engine.start()
        assert it.card.resident == {"llamacpp"}
        for target in ("/models", "/health", "/props?model=heavy", "/metrics?model=heavy"):
            await it.ask("GET", target + ("&autoload=false" if "?" in target else ""))
            assert (await it.statuses())["heavy"] == "sleeping", target
        # This one wakes it, whatever it says of loading.
        target = "/slots?model=heavy&autoload=false"
        assert it.engine.admission(b"GET", target.encode()) is Admission.LEASE
        await it.ask("GET", target)
        assert (await it.statuses())["heavy"] == "loaded"
        await it.becomes("heavy", "sleeping")
        assert await it.engine.evict() is Eviction.CONFIRMED
        assert it.server.children() == []


@pytest_twisted.ensureDeferred
async def test_an_api_key(tmp_path: Path, models: Path) -> None:
    async with rig(tmp_path, *router(models), key="a-secret") as it:
        await it.engine.start()
        assert not it.card.resident
        await until(lambda: it.engine.snapshot()["events"], 30.0)
        key = {"Authorization": "Bearer a-secret"}
        assert (await it.ask("POST", "/models/load", {"model": "small"}, **key))[0] == 200
        await it.engine.loaded()
        assert await it.engine.evict() is Eviction.CONFIRMED
        assert it.server.children() == []


# -- one model -----------------------------------------------------------------------------------------------------


def single(models: Path, *more: str) -> tuple[str, ...]:
    path = str(models / "heavy.gguf")
    return ("--model", path, "--ctx-size", "512", "--threads", "1", *more)


@pytest_twisted.ensureDeferred
async def test_one_model_that_sleeps(tmp_path: Path, models: Path) -> None:
    async with rig(tmp_path, *single(models, "--sleep-idle-seconds", "2", "--metrics")) as it:
        await it.engine.start()
        assert it.engine.snapshot()["mode"] in ("single model", None)
        await it.chat("heavy", 2).ended
        assert it.server.resident() > HEAVY
        assert await it.engine.evict() is Eviction.CONFIRMED
        # It does not say so before the memory is free.
        assert it.server.resident() < HEAVY / 2
        for target in ("/models", "/v1/models", "/health", "/props", "/metrics"):
            assert it.engine.admission(b"GET", target.encode()) is Admission.PASS
            assert (await it.ask("GET", target))[0] == 200
            assert it.server.resident() < HEAVY / 2, target
        assert it.engine.admission(b"GET", b"/slots") is Admission.LEASE
        assert (await it.ask("GET", "/slots"))[0] == 200
        assert it.server.resident() > HEAVY
        assert await it.engine.evict() is Eviction.CONFIRMED
        assert it.server.resident() < HEAVY / 2


@pytest_twisted.ensureDeferred
async def test_one_model_that_does_not_sleep(tmp_path: Path, models: Path) -> None:
    async with rig(tmp_path, *single(models), unload_timeout=2.0) as it:
        await it.chat("heavy", 2).ended
        assert await it.engine.evict() is Eviction.TIMED_OUT
        assert it.server.resident() > HEAVY


def free_port() -> int:
    """A port that nobody has, for a server that must come back at the same one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest_twisted.ensureDeferred
async def test_one_model_that_is_stopped_and_started_by_command(
    tmp_path: Path, models: Path
) -> None:
    assert SERVER is not None
    port, pid_file = free_port(), tmp_path / "pid"
    argv = [SERVER, *single(models), "--host", "127.0.0.1", "--port", str(port), "--no-webui"]
    program = shlex.join(shim.command(argv, owner=os.getpid()))
    start = f"echo $$ >{pid_file}; exec {program} >{tmp_path}/log 2>&1"
    # As a service manager does: over when the process is gone.
    stop = f"pid=$(cat {pid_file}); kill $pid; while kill -0 $pid 2>/dev/null; do sleep 0.05; done"
    card = Card(reactor)
    upstream = Upstream.parse(f"http://127.0.0.1:{port}")
    client = make_client(reactor, upstream, connect_timeout=5.0)
    engine = LlamaEngine(
        client,
        reactor,
        card,
        unload_timeout=30.0,
        unload_poll_interval=0.5,
        probe_timeout=30.0,
        load_timeout=60.0,
        commands=ShellCommands(reactor),
        stop_command=stop,
        start_command=start,
    )
    card.register(engine)
    try:
        engine.single.stopped = True  # as after an eviction by an earlier turnstile
        for _ in range(2):
            await engine.ensure_started()
            assert not engine.needs_start and card.resident == {"llamacpp"}
            pid = int(pid_file.read_text())
            assert allocated(pid) > HEAVY
            assert await card.evict("llamacpp") is Eviction.CONFIRMED
            assert not Path(f"/proc/{pid}").exists() and not card.resident
            assert engine.needs_start
            assert engine.admission(b"GET", b"/v1/models") is Admission.ABSENT
    finally:
        engine.stop()
        await client.close()
        with suppress(OSError, ValueError):
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
    await until(clean, 60.0)


# -- the whole of it -----------------------------------------------------------------------------------------------

#: Prints the memory of a router's models, as if it were a card's.
PROBE = "ps -o rss= --ppid {pid} | awk '{{used += $1}} END {{print used + 65536 \"k 16g\"}}'"


@pytest_twisted.ensureDeferred
async def test_real_chats_and_simulated_images_take_turns(tmp_path: Path, models: Path) -> None:
    with serving(tmp_path, *router(models)) as server:
        await until(server.find_url, 60.0)
        async with running(
            ollama=False,
            comfy=False,
            sd=True,
            llama_url=Upstream.parse(server.url),
            listen_broker="tcp:0:interface=127.0.0.1",
            unload_timeout=30.0,
            vram_probe="command",
            vram_probe_command=PROBE.format(pid=server.process.pid),
            free_gib=0.2,
        ) as s:
            await until(lambda: s.service.vram.works, 60.0)
            for _ in range(2):
                answer = await s.complete(3, "heavy", to="broker")
                assert answer.status == 200 and b"[DONE]" in answer.body
                assert len(server.children()) == 1 and s.sd_starts() == len(s.host.cards.processes)
                assert (await s.draw(to="broker")).status == 200
                # Not before the chat model's process was gone.
                assert server.children() == [] and s.card.resident == {"sd"}
                assert (await s.observe(to="broker")).status == 200
            # A client that leaves in the middle of an answer.
            wire = await s.wire("broker")
            body = {"model": "heavy", "messages": [], "max_tokens": 400, "stream": True}
            body["messages"] = [{"role": "user", "content": "hello there"}]
            wire.send_request("POST", "/v1/chat/completions", body)
            await wire.until(b"data:")
            wire.transport.abortConnection()  # type: ignore[union-attr]
            assert (await s.draw(to="broker")).status == 200
            assert server.children() == []
            assert "force-killing" not in server.log.read_text(errors="replace")
            waited = (await s.state())["vram"]["last_wait"]
            assert waited["outcome"] in ("floor", "free") and not s.card.degraded
            assert not s.card.history
    await until(clean, 60.0)
