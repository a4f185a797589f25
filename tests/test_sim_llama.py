"""The simulated llama-server, seen by real clients."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
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
NAME = "llama-3.2-3b"
AGENT = Agent(reactor, pool=HTTPConnectionPool(reactor, persistent=False))


@asynccontextmanager
async def running(speed: float = SPEED, **options: Any) -> AsyncIterator[GpuHost]:
    host = GpuHost(reactor, speed, ollama=False, comfy=False, llama=True, llama_options=options)
    await host.start()
    try:
        yield host
        assert host.llama.errors == []
    finally:
        await host.stop()
    await until(clean)


def clean() -> bool:
    """Whether no socket and no delayed call is left in the reactor."""
    sockets = [reader for reader in reactor.getReaders() if isinstance(reader, (Connection, Port))]
    return not sockets and not reactor.getDelayedCalls()


async def until(condition: Any) -> None:
    for _ in range(2000):
        if condition():
            return
        await deferLater(reactor, 0.002)
    raise AssertionError("it never came true")


async def call(
    host: GpuHost, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, bytes]:
    """One request of a connection of its own; status and body."""
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    named: Any = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await treq.request(
        method, host.llama.url + path, data=data, headers=named, agent=AGENT
    )
    content = await response.content()
    await deferLater(reactor, 0)
    return response.code, content


def start(*args: Any, **kwargs: Any) -> Deferred[Any]:
    """`call`, not waited for; how it ends is nobody's concern."""
    d = ensureDeferred(call(*args, **kwargs))
    d.addErrback(lambda _: None)
    return d


def ask(tokens: int = 4, model: str = NAME, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": model, "messages": messages, "max_tokens": tokens, **more}


CHAT = "/v1/chat/completions"


def message(body: bytes) -> str:
    text: str = json.loads(body)["error"]["message"]
    return text


async def status(host: GpuHost, name: str = NAME) -> dict[str, Any]:
    """What /models says of a model."""
    _, body = await call(host, "GET", "/models")
    found: dict[str, Any] = next(m for m in json.loads(body)["data"] if m["id"] == name)["status"]
    return found


@pytest_twisted.ensureDeferred
async def test_clients_use_every_endpoint() -> None:
    async with running() as host:

        def use() -> list[Any]:
            with openai.OpenAI(base_url=host.llama.url + "/v1", api_key="x") as client:
                asked: Any = ask(3)
                chunks = list(client.chat.completions.create(**asked, stream=True))
                return [
                    "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
                    client.chat.completions.create(**asked).choices[0].message.content,
                    client.completions.create(model=NAME, prompt="hi").choices[0].text,
                    client.responses.create(model=NAME, input="hi").output_text,
                    len(client.embeddings.create(model="nomic-embed", input=["a", "b"]).data),
                    client.audio.transcriptions.create(model=NAME, file=("a.wav", b"RIFF")).text,
                    next(model.id for model in client.models.list()),
                ]

        streamed, whole, text, response, vectors, heard, first = await deferToThread(use)
        assert streamed == whole == "the card has"
        assert text.startswith("the card") and response.startswith("the card")
        assert vectors == 2 and heard == "one tenant at a time" and first == NAME
        _, body = await call(host, "POST", "/v1/messages", ask(3))
        assert json.loads(body)["content"][0]["text"] == "the card has"
        _, body = await call(host, "POST", "/completion", {"model": NAME, "prompt": "hi"})
        assert json.loads(body)["stop"] is True
        assert host.card.residents == {"llamacpp": 5 * GIB}


@pytest_twisted.ensureDeferred
async def test_looks_load_nothing() -> None:
    async with running() as host:
        for path in ("/health", "/v1/health", "/models", "/v1/models", "/props", "/"):
            assert (await call(host, "GET", path))[0] == 200, path
        for path in ("/slots", "/metrics", "/lora-adapters"):
            code, body = await call(host, "GET", path)
            assert code == 400 and message(body) == "model name is missing from the request"
        for path in ("/props", "/slots", "/metrics", "/lora-adapters"):
            code, body = await call(host, "GET", f"{path}?model={NAME}&autoload=false")
            assert code == 400 and message(body) == "model is not loaded", path
        assert (await call(host, "POST", "/nothing", b"{}"))[0] == 404
        assert (await call(host, "GET", CHAT))[0] == 404
        code, body = await call(host, "POST", CHAT, ask(model="absent"))
        assert code == 400 and message(body) == "model 'absent' not found"
        code, body = await call(host, "POST", CHAT + "?autoload=false", ask())
        assert code == 400 and message(body) == "model is not loaded"
        assert (await call(host, "POST", CHAT, b"{not"))[0] == 400
        assert host.llama.loads == [] and host.card.used == 0
        assert json.loads((await call(host, "GET", "/props"))[1])["role"] == "router"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", f"/props?model={NAME}", None),
        ("GET", f"/slots?model={NAME}", None),
        ("HEAD", f"/metrics?model={NAME}", None),
        ("GET", f"/lora-adapters?model={NAME}&autoload=1", None),
        ("POST", "/tokenize", {"model": NAME, "content": "x"}),
        ("POST", "/%74okenize", {"model": NAME, "content": "x"}),
        ("POST", "/apply-template", {"model": NAME}),
        ("POST", "/v1/messages/count_tokens", {"model": NAME}),
        ("POST", "/slots/0?action=save", {"model": NAME}),
        ("POST", "/v1/embeddings", {"model": NAME, "input": "x"}),
        ("POST", "/v1/rerank", {"model": NAME}),
        ("POST", "/a/route/of/tomorrow", {"model": NAME}),
    ],
)
@pytest_twisted.ensureDeferred
async def test_what_loads_a_model(method: str, path: str, body: Any) -> None:
    async with running() as host:
        await call(host, method, path, body)
        assert [name for _, name in host.llama.loads] == [NAME]
        assert host.llama.resident == {NAME: "loaded"}


@pytest_twisted.ensureDeferred
async def test_unload_is_answered_before_it_is_done() -> None:
    async with running(unload_time=5.0) as host:
        code, body = await call(host, "POST", "/models/unload", {"model": NAME})
        assert code == 400 and message(body) == "model is not running"
        assert (await call(host, "POST", CHAT, ask()))[0] == 200
        for _ in range(2):
            code, body = await call(host, "POST", "/models/unload", {"model": NAME})
            assert (code, json.loads(body)) == (200, {"success": True})
        assert (await status(host))["value"] == "loaded" and host.card.used == 4 * GIB
        await host.llama.when_idle()
        assert host.card.used == 0
        ended = await status(host)
        assert ended["value"] == "unloaded" and "failed" not in ended
        assert host.llama.kills == []


@pytest.mark.parametrize("stream", [True, False])
@pytest_twisted.ensureDeferred
async def test_unload_in_mid_completion_hangs_until_the_child_is_killed(stream: bool) -> None:
    async with running(token_rate=2.0, stop_timeout=5.0) as host:
        chat = start(host, "POST", CHAT, ask(1000, stream=stream))
        await until(lambda: host.llama.active_generations)
        began = reactor.seconds()
        await call(host, "POST", "/models/unload", {"model": NAME})
        assert (await status(host))["value"] == "loaded"
        assert host.card.used == 4 * GIB
        code, body = await chat
        assert reactor.seconds() - began >= 5.0 / SPEED
        assert body.endswith(b"proxy error: Failed to read connection")
        assert code == (200 if stream else 500)
        assert (body == b"proxy error: Failed to read connection") is not stream
        assert len(host.llama.kills) == 1 and host.card.used == 0
        ended = await status(host)
        assert (ended["value"], ended["failed"], ended["exit_code"]) == ("unloaded", True, 1)


@pytest_twisted.ensureDeferred
async def test_a_client_that_left_a_moment_ago_does_not_hold_the_unload_up() -> None:
    async with running(token_rate=2.0) as host:
        sim = host.llama
        for abort_time, kills in ((1.0, 0), (1000.0, 1)):
            sim.abort_time = abort_time
            chat = start(host, "POST", CHAT, ask(1000))
            await until(lambda: sim.active_generations)
            chat.cancel()
            await until(lambda: sim.requests[-1].disconnected_at)
            if not kills:
                await until(lambda: not sim.active_generations)
            await call(host, "POST", "/models/unload", {"model": NAME})
            await sim.when_idle()
            assert len(sim.kills) == kills
            assert sim.active_generations == 0


@pytest_twisted.ensureDeferred
async def test_a_named_conversation_goes_on_without_its_client() -> None:
    async with running(token_rate=40.0, prompt_time=20.0) as host:
        chat = start(host, "POST", CHAT, ask(40, stream=True), X_Conversation_Id="c1")
        await until(lambda: host.llama.active_generations)
        chat.cancel()
        await until(lambda: host.llama.requests[-1].disconnected_at)
        _, body = await call(host, "POST", "/v1/streams/lookup", {"conversation_ids": ["c1", "x"]})
        assert [entry["conversation_id"] for entry in json.loads(body)] == ["c1"]
        code, body = await call(host, "GET", "/v1/stream?conv_id=c1")
        assert code == 200 and body.endswith(b"data: [DONE]\n\n")
        assert body.count(b"data: ") == 43 and host.llama.active_generations == 0
        assert (await call(host, "GET", "/v1/stream?conv_id=x"))[0] == 404
        chat = start(host, "POST", CHAT, ask(4000, stream=True), X_Conversation_Id="c1")
        await until(lambda: host.llama.active_generations)
        assert (await call(host, "DELETE", "/v1/stream?conv_id=c1"))[0] == 204
        await until(lambda: not host.llama.active_generations)


@pytest_twisted.ensureDeferred
async def test_unload_while_loading_is_a_failed_load() -> None:
    async with running(load_time=50.0, kill_time=1.0) as host:
        chat = start(host, "POST", CHAT, ask())
        await until(lambda: host.card.used)
        assert (await status(host))["value"] == "loading"
        assert (await call(host, "POST", "/models/load", {"model": NAME}))[0] == 400
        code, _ = await call(host, "POST", "/models/unload", {"model": NAME})
        assert code == 200
        code, body = await chat
        assert code == 500 and message(body) == f"model name={NAME} failed to load"
        ended = await status(host)
        assert ended["value"] == "unloaded" and ended["failed"] is True
        assert host.card.used == 0
        host.llama.load_time = 0.1
        assert (await call(host, "POST", CHAT, ask()))[0] == 200
        assert "failed" not in await status(host)


@pytest_twisted.ensureDeferred
async def test_a_chat_that_comes_while_the_child_stops_loads_again() -> None:
    async with running(unload_time=5.0) as host:
        await host.llama.load(NAME)
        await call(host, "POST", "/models/unload", {"model": NAME})
        assert host.llama.resident == {NAME: "stopping"}
        assert (await call(host, "POST", CHAT, ask()))[0] == 200
        assert len(host.llama.loads) == 2 and len(host.llama.unloads) == 1
        assert host.llama.resident == {NAME: "loaded"}


@pytest_twisted.ensureDeferred
async def test_a_client_that_leaves_while_the_child_stops_may_load_all_the_same() -> None:
    async with running(unload_time=20.0) as host:
        for ghosts in (True, False):
            host.llama.ghost_loads = ghosts
            await host.llama.load(NAME)
            loads = len(host.llama.loads)
            await call(host, "POST", "/models/unload", {"model": NAME})
            chat = start(host, "POST", CHAT, ask())
            await until(lambda: host.llama.waiting)
            chat.cancel()
            await until(lambda: host.llama.requests[-1].disconnected_at)
            unloads = len(host.llama.unloads)
            await until(lambda: len(host.llama.unloads) == unloads + 1)  # noqa: B023
            assert len(host.llama.loads) == loads + ghosts
            await until(lambda: not host.llama.waiting)


@pytest_twisted.ensureDeferred
async def test_a_load_goes_on_although_its_client_left_and_others_join_it() -> None:
    async with running(load_time=10.0) as host:
        chat = start(host, "POST", CHAT, ask())
        await until(lambda: host.card.used)
        chat.cancel()
        answers = await DeferredList([start(host, "POST", CHAT, ask()) for _ in range(5)])
        assert [answer[0] for _, answer in answers] == [200] * 5
        assert len(host.llama.loads) == 1
        chat = start(host, "POST", CHAT, ask(model="qwen3-8b"))
        await until(lambda: host.llama.resident.get("qwen3-8b") == "loading")
        chat.cancel()
        await until(lambda: host.llama.resident.get("qwen3-8b") == "loaded")
        assert host.llama.waiting == 0


@pytest_twisted.ensureDeferred
async def test_load_route_is_answered_before_the_model_is_there() -> None:
    async with running(load_time=5.0) as host:
        assert (await call(host, "POST", "/models/load", {"model": "absent"}))[0] == 404
        code, body = await call(host, "POST", "/models/load", {"model": NAME})
        assert (code, json.loads(body)) == (200, {"success": True})
        assert (await status(host))["value"] == "loading"
        await until(lambda: host.llama.resident == {NAME: "loaded"})
        host.llama.faults.crash_load = 1
        assert (await call(host, "POST", "/models/load", {"model": "qwen3-8b"}))[0] == 200
        await until(lambda: "qwen3-8b" not in host.llama.resident)
        assert (await status(host, "qwen3-8b"))["failed"] is True
        assert host.card.used == 4 * GIB


@pytest_twisted.ensureDeferred
async def test_events() -> None:
    async with running() as host:
        response = await treq.get(host.llama.url + "/models/sse", agent=AGENT, unbuffered=True)
        heard = bytearray()
        collecting = treq.collect(response, heard.extend)
        assert response.headers.getRawHeaders("content-type") == ["text/event-stream"]
        await host.llama.load(NAME)
        await call(host, "POST", "/models/unload", {"model": NAME})
        await host.llama.when_idle()
        await until(lambda: b'"exit_code"' in heard)
        events = [json.loads(line[6:]) for line in heard.splitlines() if line]
        assert events[0] == {
            "model": NAME,
            "event": "model_status",
            "data": {"status": "loading"},
        }
        assert [event["data"]["status"] for event in events[1:]] == ["loading"] * 4 + [
            "loaded",
            "unloaded",
        ]
        assert events[-1]["data"] == {"status": "unloaded", "exit_code": 0}
        await host.llama.kill()
        await DeferredList([collecting], consumeErrors=True)


@pytest_twisted.ensureDeferred
async def test_sleep() -> None:
    async with running(sleep_idle=2.0, sleep_free_time=1.0) as host:
        fell_asleep: list[float] = []

        def hear(event: dict[str, Any]) -> None:
            if event["data"]["status"] == "sleeping":
                fell_asleep.append(reactor.seconds())

        with host.llama.subscribed(hear):
            assert (await call(host, "POST", CHAT, ask()))[0] == 200
            await until(lambda: not host.card.used)
        assert host.llama.resident == {NAME: "sleeping"}
        assert host.card.history[-1][0] - fell_asleep[0] >= 1.0 / SPEED
        for path in ("/models", "/health", f"/props?model={NAME}", f"/metrics?model={NAME}"):
            assert (await call(host, "GET", path))[0] == 200, path
        assert host.card.used == 0
        _, body = await call(host, "GET", f"/props?model={NAME}")
        assert json.loads(body)["is_sleeping"] is True
        assert (await call(host, "POST", "/tokenize", {"model": NAME, "content": "x"}))[0] == 200
        assert host.llama.resident == {NAME: "loaded"} and host.card.used == 4 * GIB
        await until(lambda: host.llama.resident == {NAME: "sleeping"})
        await call(host, "POST", "/models/unload", {"model": NAME})
        await host.llama.when_idle()
        assert host.card.used == 0 and host.llama.kills == []


@pytest_twisted.ensureDeferred
async def test_a_server_that_falls_asleep_says_so_when_the_memory_is_free() -> None:
    async with running(single=NAME, sleep_idle=1.0, sleep_free_time=20.0) as host:
        await until(lambda: host.llama.resident == {NAME: "sleeping"})
        assert host.card.used == 4 * GIB
        _, body = await call(host, "GET", "/props")
        assert json.loads(body)["is_sleeping"] is True and host.card.used == 0


@pytest_twisted.ensureDeferred
async def test_the_model_used_longest_ago_makes_room() -> None:
    specs = [ModelSpec(name, GIB) for name in ("a", "b", "c")]
    async with running(models=specs, models_max=2) as host:
        for name in ("a", "b", "a", "c"):
            assert (await call(host, "POST", CHAT, ask(model=name)))[0] == 200
        assert host.llama.resident == {"a": "loaded", "c": "loaded"}


@pytest_twisted.ensureDeferred
async def test_a_crash_in_mid_answer() -> None:
    async with running(token_rate=5.0) as host:
        chat = start(host, "POST", CHAT, ask(1000, stream=True))
        await until(lambda: host.llama.active_generations)
        await deferLater(reactor, 0.01)
        host.llama.crash(NAME)
        assert host.card.used == 0
        code, body = await chat
        assert code == 200 and body.endswith(b"proxy error: Failed to read connection")
        assert (await call(host, "POST", CHAT, ask()))[0] == 200


@pytest_twisted.ensureDeferred
async def test_unload_faults() -> None:
    async with running() as host:
        sim = host.llama
        unload = {"model": NAME}
        await sim.load(NAME)
        sim.faults.unload_500 = 1
        assert (await call(host, "POST", "/models/unload", unload))[0] == 500
        await sim.when_idle()
        await sim.load(NAME)
        sim.faults.unload_hangs = 1
        hanging = start(host, "POST", "/models/unload", unload)
        await sim.when_idle()
        assert not hanging.called
        hanging.cancel()
        await sim.load(NAME)
        sim.faults.ignore_unload = 1
        assert (await call(host, "POST", "/models/unload", unload))[0] == 200
        assert sim.resident == {NAME: "loaded"}
        sim.faults.hang_stop = 1
        assert (await call(host, "POST", "/models/unload", unload))[0] == 200
        await sim.when_idle()
        assert len(sim.kills) == 1
        await sim.load(NAME)
        sim.faults.reappear = 1
        assert (await call(host, "POST", "/models/unload", unload))[0] == 200
        await until(lambda: len(sim.loads) == 5)
        await until(lambda: sim.resident == {NAME: "loaded"})


@pytest_twisted.ensureDeferred
async def test_api_key() -> None:
    async with running(api_key="s3cret") as host:
        assert (await call(host, "GET", "/health"))[0] == 200
        for method, path in (("GET", "/models"), ("POST", "/models/unload"), ("POST", CHAT)):
            code, body = await call(host, method, path, ask() if method == "POST" else None)
            assert code == 401 and message(body) == "Invalid API Key"
        assert (await call(host, "GET", "/models", Authorization="Bearer s3cret"))[0] == 200
        assert (await call(host, "GET", "/models", X_Api_Key="s3cret"))[0] == 200
        assert (await call(host, "OPTIONS", "/models"))[0] == 200


@pytest_twisted.ensureDeferred
async def test_a_server_with_one_model() -> None:
    async with running(single=NAME, load_time=10.0) as host:
        code, body = await call(host, "GET", "/health")
        assert code == 503 and message(body) == "Loading model"
        assert (await call(host, "POST", CHAT, ask()))[0] == 503
        await until(lambda: host.llama.resident == {NAME: "loaded"})
        assert (await call(host, "GET", "/health"))[0] == 200
        code, body = await call(host, "POST", CHAT, ask(model="whatever"))
        assert code == 200 and json.loads(body)["model"] == NAME
        for path in ("/models/unload", "/models/load"):
            assert (await call(host, "POST", path, {"model": NAME}))[0] == 404
        assert (await call(host, "GET", "/models/sse"))[0] == 404
        _, body = await call(host, "GET", "/v1/models")
        assert "status" not in json.loads(body)["data"][0]
        _, body = await call(host, "GET", "/props")
        assert "role" not in json.loads(body) and json.loads(body)["is_sleeping"] is False
        host.llama.sleep_idle = 2.0
        assert (await call(host, "POST", CHAT, ask()))[0] == 200
        await until(lambda: not host.card.used)
        assert json.loads((await call(host, "GET", "/props"))[1])["is_sleeping"] is True
        assert (await call(host, "POST", CHAT, ask()))[0] == 200
        host.llama.crash(NAME)
        await until(lambda: not host.llama.listening)
        assert host.card.used == 0


@pytest_twisted.ensureDeferred
async def test_restart_loses_everything_and_keeps_the_port() -> None:
    async with running(token_rate=0.1) as host:
        chat: Deferred[Any] = ensureDeferred(call(host, "POST", CHAT, ask(stream=True)))
        failed: list[Any] = []
        chat.addErrback(failed.append)
        await until(lambda: host.llama.active_generations)
        port = host.llama.port
        back = host.llama.restart(1.0)
        assert host.card.used == 0 and not host.llama.listening
        await back
        assert failed and host.llama.port == port
        assert (await status(host))["value"] == "unloaded"
        assert host.llama.active_generations == 0 and host.llama.waiting == 0


@pytest_twisted.ensureDeferred
async def test_idle_connections_are_closed() -> None:
    async with running() as host:
        host.llama.keep_alive_timeout = 0.05
        pool = HTTPConnectionPool(reactor, persistent=True)
        response = await treq.get(host.llama.url + "/health", agent=Agent(reactor, pool=pool))
        assert await response.content() == b'{"status":"ok"}'
        await until(lambda: host.llama.connections_seen == 1 and not host.llama.connections)
        await pool.closeCachedConnections()
