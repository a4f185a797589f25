"""The simulated llama-server answers as a real one does: the same requests to both, and what may not differ.

The real one is ``$LLAMA_SERVER`` or ``llama-server`` on PATH, with a tiny model that is made on the spot; without it
all of this is skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import pytest_twisted
from engine_kit import reactor, until
from test_real_llama import PRESETS, SERVER, Server, serving
from tiny_gguf import write_model
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint, connectProtocol
from twisted.internet.protocol import Protocol

from turnstile.sim import GIB, GpuHost, ModelSpec

pytestmark = [
    pytest.mark.engines,
    pytest.mark.limit(300),
    pytest.mark.skipif(SERVER is None, reason="no llama-server on PATH and no LLAMA_SERVER"),
]

M = "small"
CHAT = {"model": M, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
CHATS = "/v1/chat/completions"
Ask = tuple[str, str, Any]

#: What is asked while no model is loaded; nothing of it loads one.
COLD: list[Ask] = [
    ("GET", "/health", None),
    ("GET", "/v1/models", None),
    ("GET", "/%6dodels", None),
    ("GET", "/models/", None),
    ("PUT", "/models", None),
    ("GET", "/props", None),
    ("GET", "/slots", None),
    ("GET", "/metrics", None),
    ("GET", "/lora-adapters", None),
    ("GET", "/nothing", None),
    ("HEAD", "/nothing", None),
    ("POST", "/nothing", {"model": M}),
    ("GET", CHATS, None),
    ("OPTIONS", CHATS, None),
    ("POST", CHATS, b"{not"),
    ("POST", CHATS, b""),
    ("POST", CHATS, [1]),
    ("POST", CHATS, {"messages": []}),
    ("POST", CHATS, {"model": "absent"}),
    ("POST", CHATS + "?autoload=false", CHAT),
    ("POST", "/%74okenize", {"model": "absent"}),
    ("GET", f"/props?model={M}&autoload=false", None),
    ("GET", f"/slots?model={M}&autoload=0", None),
    ("HEAD", f"/metrics?model={M}&autoload=no", None),
    ("POST", "/models/unload", {"model": M}),
    ("POST", "/models/unload", {"model": "absent"}),
    ("POST", "/models/load", {"model": "absent"}),
    ("POST", "/models/load", b"{"),
    ("POST", "/models", {}),
    ("DELETE", "/models", None),
    ("DELETE", "/models?model=absent", None),
    ("POST", "/v1/streams/lookup", {"conversation_ids": ["x"]}),
    ("POST", "/v1/streams/lookup", b"{"),
    ("GET", "/v1/stream", None),
    ("GET", "/v1/stream?conv_id=x", None),
    ("DELETE", "/v1/stream?conv_id=x", None),
]
#: And while one is.
WARM: list[Ask] = [
    ("POST", "/models/load", {"model": M}),
    ("GET", "/models", None),
    ("POST", CHATS, CHAT),
    ("POST", CHATS, {**CHAT, "stream": True}),
    ("POST", CHATS, {"model": M}),
    ("POST", "/completion", {"model": M, "prompt": "x", "n_predict": 2}),
    ("POST", "/completion", {"model": M, "prompt": "x", "n_predict": 2, "stream": True}),
    ("POST", "/v1/completions", {"model": M, "prompt": "x", "max_tokens": 2}),
    ("POST", "/v1/messages", CHAT),
    ("POST", "/v1/messages/count_tokens", CHAT),
    ("POST", "/v1/embeddings", {"model": M, "input": "x"}),
    ("POST", "/tokenize", {"model": M, "content": "x"}),
    ("POST", "/detokenize", {"model": M, "tokens": [1]}),
    ("POST", "/apply-template", {"model": M, "messages": CHAT["messages"]}),
    ("POST", "/slots/0?action=save", {"model": M}),
    ("POST", "/rerank", {"model": M}),
    ("POST", "/props", {"model": M}),
    ("GET", f"/props?model={M}", None),
    ("HEAD", f"/props?model={M}", None),
    ("GET", f"/slots?model={M}", None),
    ("GET", f"/metrics?model={M}", None),
    ("GET", f"/lora-adapters?model={M}", None),
]


@attrs.frozen
class Seen:
    """An answer, as far as it may not differ."""

    status: int
    fields: dict[str, str]
    #: Of an error what it says, of an object its members, of a list that it is one, else how it begins.
    body: Any
    closed: bool


class Wire(Protocol):
    """A request on a connection of its own, whose end is watched."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.data = b""
        self.lost = False

    def connectionMade(self) -> None:
        self.transport.write(self.request)  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        self.data += data

    def connectionLost(self, reason: Any = None) -> None:
        self.lost = True

    @property
    def whole(self) -> bool:
        head, _, body = self.data.partition(b"\r\n\r\n")
        if self.lost or not head:
            return self.lost
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if self.request.startswith(b"HEAD ") or b"204 No" in head:
            return True
        return len(body) >= int(length[1]) if length else body.endswith(b"0\r\n\r\n")


async def ask(url: str, request: Ask) -> Seen:
    method, path, body = request
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{port}"]
    if method != "GET":
        lines.append(f"Content-Length: {len(data)}")
    wire = Wire("\r\n".join([*lines, "", ""]).encode() + data)
    await connectProtocol(HostnameEndpoint(reactor, host, int(port)), wire)
    await until(lambda: wire.whole)
    head, _, content = wire.data.partition(b"\r\n\r\n")
    status, *rest = head.decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in rest if ": " in line)
    if fields.get("connection") == "close":
        await until(lambda: wire.lost)
    closed = wire.lost
    wire.transport.abortConnection()  # type: ignore[union-attr]
    if "transfer-encoding" in fields:
        content = b"".join(content.split(b"\r\n")[1::2])
    return Seen(int(status.split()[1]), fields, _digest(content), closed)


def _digest(content: bytes) -> Any:
    try:
        value = json.loads(content)
    except ValueError:
        return content[:6]
    if isinstance(value, dict) and "error" in value:
        error = value["error"]
        # What a parser has to say differs with the parser.
        message = re.sub(r"(parse_error.101\] parse error).*", r"\1", error["message"])
        return {**error, "message": message}
    return set(value) if isinstance(value, dict) else type(value)


COMPARED = ("connection", "keep-alive", "transfer-encoding", "content-type", "x-accel-buffering")


def compare(request: Ask, real: Seen, sim: Seen) -> list[str]:
    """How they differ."""
    what = f"{request[0]} {request[1]} {str(request[2])[:40]}"
    found = []
    if sim.status != real.status:
        found.append(f"{what}: {sim.status} instead of {real.status}")
    for name in COMPARED:
        if sim.fields.get(name) != real.fields.get(name):
            found.append(f"{what}: {name} {sim.fields.get(name)}, really {real.fields.get(name)}")
    if isinstance(real.body, set) and isinstance(sim.body, set):
        if sim.body - real.body:
            found.append(f"{what}: members {sim.body - real.body} that it does not have")
    elif sim.body != real.body:
        found.append(f"{what}: {sim.body!r} instead of {real.body!r}")
    if sim.closed != real.closed:
        found.append(f"{what}: closed {sim.closed}, really {real.closed}")
    return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    write_model(tmp_path / "small.gguf", "small")
    presets = PRESETS.partition("[heavy]")[0].format(directory=tmp_path)
    (tmp_path / "presets.ini").write_text(presets)
    with serving(tmp_path, "--models-preset", str(tmp_path / "presets.ini"), "--metrics") as found:
        yield found


@asynccontextmanager
async def simulated() -> AsyncIterator[GpuHost]:
    options = {"models": [ModelSpec(M, GIB)], "unknown_routes_load": False, "speed": 50.0}
    host = GpuHost(reactor, ollama=False, comfy=False, llama=True, llama_options=options)
    await host.start()
    try:
        yield host
    finally:
        await host.stop()


@pytest_twisted.ensureDeferred
async def test_it_answers_as_a_real_one(server: Server) -> None:
    await until(server.find_url)
    async with simulated() as host:
        urls = (server.url, host.llama.url)

        async def differences(requests: list[Ask]) -> list[str]:
            found = []
            for request in requests:
                real, sim = [await ask(url, request) for url in urls]
                found += compare(request, real, sim)
            return found

        assert await differences(COLD) == []
        for url in urls:
            assert (await ask(url, ("POST", CHATS, CHAT))).status == 200
        assert await differences(WARM) == []


@pytest_twisted.ensureDeferred
async def test_its_events_come_as_those_of_a_real_one(server: Server) -> None:
    await until(server.find_url)
    async with simulated() as host:
        heard = []
        for url in (server.url, host.llama.url):
            address, port = url.removeprefix("http://").split(":")
            wire = Wire(b"GET /models/sse HTTP/1.1\r\nHost: x\r\n\r\n")
            await connectProtocol(HostnameEndpoint(reactor, address, int(port)), wire)
            await ask(url, ("POST", CHATS, CHAT))
            await ask(url, ("POST", "/models/unload", {"model": M}))
            await until(lambda: b"exit_code" in wire.data)  # noqa: B023
            await _tick()
            wire.transport.abortConnection()  # type: ignore[union-attr]
            events = [json.loads(text) for text in re.findall(rb"data: (\{.*)\n", wire.data)]
            told = [(e["model"], e["event"], e["data"]["status"]) for e in events]
            # How often it tells of its progress is its own affair.
            heard.append([one for n, one in enumerate(told) if one not in told[:n]])
        assert heard[0] == heard[1]


def _tick() -> Deferred[None]:
    d: Deferred[None] = Deferred()
    reactor.callLater(0, d.callback, None)
    return d
