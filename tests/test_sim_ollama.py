"""The simulated Ollama, seen by real clients."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ollama
import openai
import pytest_twisted
import treq
from twisted.internet import reactor as _reactor
from twisted.internet.defer import Deferred, DeferredList, ensureDeferred
from twisted.internet.task import deferLater
from twisted.internet.tcp import Connection, Port
from twisted.internet.threads import deferToThread
from twisted.web.client import Agent, HTTPConnectionPool

from turnstile.sim import GIB, GpuHost, ModelSpec

reactor: Any = _reactor
SPEED = 50.0


@asynccontextmanager
async def running(speed: float = SPEED, **options: Any) -> AsyncIterator[GpuHost]:
    host = GpuHost(reactor, speed, comfy=False, ollama_options=options)
    await host.start()
    try:
        yield host
        assert host.ollama.errors == []
    finally:
        await host.stop()
    await until(clean)


def clean() -> bool:
    """Whether no socket and no delayed call is left in the reactor."""
    sockets = [reader for reader in reactor.getReaders() if isinstance(reader, (Connection, Port))]
    return not sockets and not reactor.getDelayedCalls()


AGENT = Agent(reactor, pool=HTTPConnectionPool(reactor, persistent=False))


async def call(
    host: GpuHost, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, bytes]:
    """One request of a connection of its own; status and body."""
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    named: Any = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await treq.request(
        method, host.ollama.url + path, data=data, headers=named, agent=AGENT
    )
    content = await response.content()
    await deferLater(reactor, 0)
    return response.code, content


async def until(condition: Any) -> None:
    for _ in range(2000):
        if condition():
            return
        await deferLater(reactor, 0.002)
    raise AssertionError("it never came true")


def talk(host: GpuHost, data: bytes, wait: bool = True) -> bytes:
    """Bytes on a raw socket; what comes back until the server closes (in a thread)."""
    with socket.create_connection(("127.0.0.1", host.ollama.port), timeout=5) as sock:
        sock.sendall(data)
        answer = b""
        while wait:
            piece = sock.recv(65536)
            if not piece:
                break
            answer += piece
        return answer


@pytest_twisted.ensureDeferred
async def test_ollama_client_streams_and_model_stays() -> None:
    async with running() as host:
        client = ollama.Client(host.ollama.url)

        def chat() -> list[Any]:
            messages = [{"role": "user", "content": "hi"}]
            return list(client.chat("llama3.2", messages=messages, stream=True))

        parts = await deferToThread(chat)
        assert [part.done for part in parts] == [False] * 16 + [True]
        assert "".join(part.message.content for part in parts).startswith("the card has one")
        listed = await deferToThread(client.ps)
        assert [model.model for model in listed.models] == ["llama3.2:latest"]
        assert listed.models[0].size_vram == 4 * GIB
        assert host.card.residents == {"ollama": 4 * GIB}
        client._client.close()


@pytest_twisted.ensureDeferred
async def test_openai_client_uses_every_endpoint() -> None:
    async with running() as host:

        def use() -> list[Any]:
            with openai.OpenAI(base_url=host.ollama.url + "/v1", api_key="x") as client:
                chunks = list(
                    client.chat.completions.create(
                        model="llama3.2",
                        messages=[{"role": "user", "content": "hi"}],
                        stream=True,
                        max_tokens=3,
                    )
                )
                return [
                    "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
                    client.completions.create(model="llama3.2", prompt="hi").choices[0].text,
                    client.responses.create(model="llama3.2", input="hi").output_text,
                    [
                        event.type
                        for event in client.responses.create(
                            model="llama3.2", input="hi", stream=True, max_output_tokens=2
                        )
                    ],
                    len(client.embeddings.create(model="nomic-embed-text", input=["a", "b"]).data),
                    client.audio.transcriptions.create(
                        model="llama3.2", file=("a.wav", b"RIFF" * 100)
                    ).text,
                    next(model.id for model in client.models.list()),
                ]

        chat, text, response, events, vectors, heard, first = await deferToThread(use)
        assert chat == "the card has"
        assert text.startswith("the card") and response.startswith("the card")
        assert events == [
            "response.created",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.completed",
        ]
        assert vectors == 2
        assert heard == "one tenant at a time"
        assert first == "llama3.2:latest"


@pytest_twisted.ensureDeferred
async def test_errors_have_the_shape_of_their_api() -> None:
    async with running() as host:
        code, body = await call(host, "POST", "/api/generate", {"model": "none", "prompt": "x"})
        assert (code, json.loads(body)) == (404, {"error": "model 'none' not found"})
        asked = {"model": "none", "messages": [{"role": "user", "content": "x"}]}
        code, body = await call(host, "POST", "/v1/chat/completions", asked)
        assert code == 404 and json.loads(body)["error"]["type"] == "not_found_error"
        assert (await call(host, "POST", "/api/chat", b"{"))[0] == 400
        assert (await call(host, "POST", "/nowhere", b""))[0] == 404
        assert (await call(host, "POST", "/api/tags", b"{}"))[0] == 405
        code, _ = await call(host, "POST", "/%61pi/generate", {"model": "llama3.2"})
        assert code == 200 and len(host.ollama.loads) == 1


@pytest_twisted.ensureDeferred
async def test_unload_is_answered_at_once_and_waits_for_the_request() -> None:
    async with running(token_rate=0.5) as host:
        generation = ensureDeferred(
            call(host, "POST", "/api/generate", {"model": "llama3.2", "prompt": "x"})
        )
        await until(lambda: host.ollama.active_generations)
        for keep_alive in (0, "0", "0s", "0m"):
            code, body = await call(
                host, "POST", "/api/generate", {"MODEL": "llama3.2", "keep_alive": keep_alive}
            )
            assert code == 200 and json.loads(body)["done_reason"] == "unload"
        assert not generation.called
        assert len(json.loads((await call(host, "GET", "/api/ps"))[1])["models"]) == 1
        host.ollama.token_rate = 1000.0
        assert (await generation)[0] == 200
        await host.ollama.when_idle()
        assert host.card.used == 0
        assert [name for _, name in host.ollama.unloads] == ["llama3.2:latest"]


@pytest_twisted.ensureDeferred
async def test_keep_alive() -> None:
    async with running(keep_alive=1.0) as host:
        _, body = await call(host, "POST", "/api/generate", {"model": "llama3.2"})
        assert json.loads(body)["done_reason"] == "load"
        await host.ollama.when_idle()
        assert host.card.used == 0
        await call(host, "POST", "/api/chat", {"model": "llama3.2", "keep_alive": -1})
        await deferLater(reactor, 0.1)  # Five times the default's length.
        assert host.card.used == 4 * GIB
        code, _ = await call(host, "POST", "/api/chat", {"model": "llama3.2", "keep_alive": "-1"})
        assert code == 400
        _, body = await call(host, "POST", "/api/chat", {"model": "llama3.2", "keep_alive": 0})
        assert json.loads(body)["done_reason"] == "unload"
        await host.ollama.when_idle()


@pytest_twisted.ensureDeferred
async def test_embedding_only_models_refuse_generate() -> None:
    async with running() as host:
        ask = {"model": "nomic-embed-text", "keep_alive": 0}
        assert (await call(host, "POST", "/api/embed", {**ask, "keep_alive": 60, "input": "x"}))[
            0
        ] == 200
        assert (await call(host, "POST", "/api/generate", ask))[0] == 400
        assert (await call(host, "POST", "/api/embed", ask))[0] == 400
        assert host.card.used == GIB
        assert (await call(host, "POST", "/api/embed", {**ask, "input": "x"}))[0] == 200
        await host.ollama.when_idle()
        assert host.card.used == 0


@pytest_twisted.ensureDeferred
async def test_first_requests_share_a_load_and_a_lone_client_cancels_it() -> None:
    async with running() as host:
        ask = {"model": "llama3.2", "prompt": "x", "stream": False}
        answers = await DeferredList(
            [ensureDeferred(call(host, "POST", "/api/generate", ask)) for _ in range(5)]
        )
        assert [code for _, (code, _) in answers] == [200] * 5
        assert len(host.ollama.loads) == 1
        host.ollama.load_time = 1000.0
        lone = ensureDeferred(call(host, "POST", "/api/generate", {**ask, "model": "qwen3:8b"}))
        await until(lambda: host.ollama.resident.get("qwen3:8b") == "loading")
        lone.addErrback(lambda _: None)
        lone.cancel()
        await until(lambda: "qwen3:8b" not in host.ollama.resident)
        assert host.card.residents == {"ollama": 4 * GIB}
        record = host.ollama.requests[-1]
        assert record.disconnected_at is not None and record.complete


@pytest_twisted.ensureDeferred
async def test_runner_may_ignore_a_client_that_left() -> None:
    async with running(ignores_disconnect_for=2.0, token_rate=0.001) as host:
        ask = {"model": "llama3.2", "prompt": "x", "stream": False}
        chat = ensureDeferred(call(host, "POST", "/api/generate", ask))
        chat.addErrback(lambda _: None)
        await until(lambda: host.ollama.active_generations)
        chat.cancel()
        await until(lambda: host.ollama.requests[-1].disconnected_at)
        assert host.ollama.active_generations == 1
        host.ollama.unload("llama3.2")
        assert host.ollama.resident == {"llama3.2:latest": "ready"}
        await host.ollama.when_idle()
        assert host.ollama.active_generations == 0


@pytest_twisted.ensureDeferred
async def test_ps_can_hide_a_loading_model() -> None:
    async with running(ps_lists_loading=False, cancels_load=False, load_time=20.0) as host:
        load = ensureDeferred(call(host, "POST", "/api/generate", {"model": "llama3.2"}))
        load.addErrback(lambda _: None)
        await until(lambda: host.card.used)
        load.cancel()
        assert json.loads((await call(host, "GET", "/api/ps"))[1])["models"] == []
        host.ollama.load_time = 0.0
        await until(lambda: host.ollama.resident.get("llama3.2:latest") == "ready")
        assert len(json.loads((await call(host, "GET", "/api/ps"))[1])["models"]) == 1


@pytest_twisted.ensureDeferred
async def test_idle_models_make_room() -> None:
    async with running() as host:
        for name in ("llama3.2", "qwen3:8b", "big:70b"):
            assert (await call(host, "POST", "/api/generate", {"model": name}))[0] == 200
        assert host.ollama.resident == {"big:70b": "ready"}  # 6 GiB and 12 do not fit either.
        assert len(host.ollama.unloads) == 2
        assert not host.card.over_committed and not host.card.overlaps
        assert max(sum(held.values()) for _, held in host.card.history) <= 16 * GIB


@pytest_twisted.ensureDeferred
async def test_a_model_that_does_not_fit_is_an_error_if_the_card_does_not_page() -> None:
    host = GpuHost(
        reactor,
        SPEED,
        comfy=False,
        on_full="raise",
        ollama_options={"models": [ModelSpec("huge", 40 * GIB)]},
    )
    await host.start()
    code, body = await call(host, "POST", "/api/generate", {"model": "huge", "prompt": "x"})
    assert code == 500 and "out of memory" in json.loads(body)["error"]
    assert host.card.used == 0
    await host.stop()


@pytest_twisted.ensureDeferred
async def test_full_queue_is_busy() -> None:
    async with running(max_queue=1, load_time=20.0) as host:
        first = ensureDeferred(call(host, "POST", "/api/generate", {"model": "llama3.2"}))
        await until(lambda: host.ollama.waiting)
        code, body = await call(host, "POST", "/api/generate", {"model": "llama3.2"})
        assert code == 503 and json.loads(body)["error"].startswith("server busy")
        host.ollama.load_time = 0.0
        assert (await first)[0] == 200


@pytest_twisted.ensureDeferred
async def test_host_and_origin() -> None:
    async with running() as host:
        assert await call(host, "GET", "/", Host="gpu.example:11434") == (403, b"")
        for name in ("localhost", "10.0.0.3:1", "box.local", "a.localhost", "x.internal", "[::1]"):
            assert (await call(host, "GET", "/api/version", Host=name))[0] == 200, name
        assert (await call(host, "GET", "/", Origin="http://evil.test"))[0] == 403
        assert (await call(host, "GET", "/", Origin="null"))[0] == 403
        assert await call(host, "GET", "/", Origin="http://localhost:3000") == (
            200,
            b"Ollama is running",
        )
        code, _ = await call(host, "OPTIONS", "/api/chat", Origin="http://localhost:3000")
        assert code == 204
        assert await call(host, "HEAD", "/") == (200, b"")


@pytest_twisted.ensureDeferred
async def test_blobs_stream_and_continue() -> None:
    async with running(hash_blobs=True) as host:
        digest = "sha256:" + "0" * 64
        assert (await call(host, "HEAD", f"/api/blobs/{digest}"))[0] == 404
        assert (await call(host, "POST", f"/api/blobs/{digest}", b"wrong"))[0] == 400
        host.ollama.hash_blobs = False
        size = 3 << 20
        head = (
            b"POST /api/blobs/%s HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n" % (digest.encode(), size)
        )
        answer = await deferToThread(talk, host, head + bytes(size))
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\n")
        assert host.ollama.blobs == {digest: size}
        record = host.ollama.requests[-1]
        assert record.body_length == size and len(record.body) == 64 << 10 and record.complete
        chunked = (
            b"POST /api/blobs/sha256:1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
            b"3;x=y\r\nabc\r\nA\r\n0123456789\r\n0\r\nT: v\r\n\r\n"
        )
        assert b" 201 " in await deferToThread(talk, host, chunked)
        assert host.ollama.requests[-1].body == b"abc0123456789"


@pytest_twisted.ensureDeferred
async def test_download_and_pull() -> None:
    async with running() as host:
        for path in ("/sim/download?bytes=5000000", "/sim/download?bytes=5000000&chunked=1"):
            code, body = await call(host, "GET", path)
            assert (code, len(body)) == (200, 5_000_000)
        code, body = await call(host, "POST", "/api/pull", {"model": "new"})
        lines = [json.loads(line) for line in body.splitlines()]
        assert lines[0]["status"] == "pulling manifest" and lines[-1] == {"status": "success"}
        assert "new:latest" in host.ollama.models


@pytest_twisted.ensureDeferred
async def test_pipelined_requests_are_answered_in_order() -> None:
    async with running() as host:
        get = b"GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
        host.ollama.faults.delay(1.0, "/api/tags")
        data = get % (b"/api/tags", b"") + get % (b"/api/version", b"Connection: close\r\n")
        answer = await deferToThread(talk, host, data)
        assert 0 < answer.index(b'"models"') < answer.index(b'"version"')
        assert host.ollama.connections_seen == 1 and host.ollama.requests_seen == 2


@pytest_twisted.ensureDeferred
async def test_unload_faults() -> None:
    async with running() as host:
        ask = {"model": "llama3.2", "keep_alive": 0}
        sim = host.ollama
        await sim.load("llama3.2")
        sim.faults.unload_500 = 1
        assert (await call(host, "POST", "/api/generate", ask))[0] == 500
        await sim.when_idle()
        await sim.load("llama3.2")
        sim.faults.unload_hangs = 1
        hanging = ensureDeferred(call(host, "POST", "/api/generate", ask))
        hanging.addErrback(lambda _: None)
        await sim.when_idle()
        assert not hanging.called
        hanging.cancel()
        await sim.load("llama3.2")
        sim.faults.ignore_unload = 1
        assert (await call(host, "POST", "/api/generate", ask))[0] == 200
        assert sim.resident == {"llama3.2:latest": "ready"}
        sim.faults.reappear = 1
        assert (await call(host, "POST", "/api/generate", ask))[0] == 200
        await until(lambda: len(sim.loads) == 4)
        await until(lambda: sim.resident == {"llama3.2:latest": "ready"})


@pytest_twisted.ensureDeferred
async def test_restart_loses_everything_and_keeps_the_port() -> None:
    async with running(token_rate=0.1) as host:
        chat: Deferred[Any] = ensureDeferred(
            call(host, "POST", "/api/generate", {"model": "llama3.2", "prompt": "x"})
        )
        failed: list[Any] = []
        chat.addErrback(failed.append)
        await until(lambda: host.ollama.active_generations)
        port = host.ollama.port
        back = host.ollama.restart(1.0)
        assert host.card.used == 0 and not host.ollama.listening
        await back
        assert failed and host.ollama.port == port
        assert json.loads((await call(host, "GET", "/api/ps"))[1]) == {"models": []}
        assert host.ollama.active_generations == 0 and host.ollama.waiting == 0
