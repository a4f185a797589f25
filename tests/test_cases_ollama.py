"""Field cases about Ollama, through a whole turnstile. The letters and numbers are the cases' names."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import pytest_twisted
from system_kit import System, Wire, chat_body, reactor, running, tick, until
from twisted.internet.defer import DeferredList, ensureDeferred

from turnstile.sim import GIB, ModelSpec
from turnstile.sim.graphs import sleep_graph

LLAMA = "llama3.2:latest"
EMBEDDER = "nomic-embed-text:latest"


def unloads(s: System) -> list[Any]:
    """The requests to Ollama that only unload."""
    return [
        record
        for record in s.host.ollama.requests_for("POST", "/api/generate")
        if record.json().get("keep_alive") == 0
    ]


async def leave(wire: Wire, how: str) -> None:
    """A client goes away."""
    {"fin": wire.close, "rst": wire.reset, "half": wire.half_close}[how]()


@pytest_twisted.ensureDeferred
async def test_A01_requests_that_meet_an_idle_unload_are_all_answered() -> None:
    # Idle release of LLM engines is their own keep_alive; the next request comes just as it ends.
    async with running(speed=50.0, ollama_options={"keep_alive": 1.0}) as s:
        chance = random.Random(1)
        for _ in range(40):
            assert (await s.chat(1)).status == 200
            await tick((1.0 + chance.uniform(-0.4, 0.4)) / 50.0)
        assert (await s.prompt()).status == 200
        assert len(s.host.ollama.loads) > 5


@pytest_twisted.ensureDeferred
async def test_A01_a_request_whose_client_left_while_waiting_is_logged_as_such() -> None:
    async with running() as s:
        await s.queue(sleep_graph(5))
        wire = await s.wire()
        wire.send_request("POST", "/api/chat", chat_body())
        await s.until_waiting(llm=1)
        wire.close()
        await s.until_waiting()
        assert s.said("/api/chat left the waiting line: cancelled")
        (line,) = [line for line in s.said("<--") if "/api/chat" in line]
        assert "200" not in line
        await s.request("POST", "/interrupt", {}, "comfyui")


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest_twisted.ensureDeferred
async def test_A07_a_client_that_dies_ends_the_upstream_request(how: str) -> None:
    async with running() as s:
        wire = await s.wire()
        wire.send_request("POST", "/api/chat", chat_body(10_000, stream=False))
        await until(lambda: s.host.ollama.active_generations)
        job = s.prompt(sleep_graph(0.2))
        await s.until_waiting(image=1)
        gone = reactor.seconds()
        await leave(wire, how)
        (record,) = s.host.ollama.requests_for("POST", "/api/chat")
        await until(lambda: record.disconnected_at)
        assert record.disconnected_at - gone < 1.0
        assert (await job).status == 200
        assert s.host.ollama.active_generations == 0


@pytest_twisted.ensureDeferred
async def test_A08_a_load_that_nobody_waits_for_does_not_hold_up_the_image() -> None:
    # The load would take 8 real seconds.
    async with running(ollama_options={"load_time": 200.0}) as s:
        wire = await s.wire()
        wire.send_request("POST", "/api/chat", chat_body(model="big:70b", stream=False))
        await until(lambda: s.host.ollama.loads)
        job = s.prompt()
        await s.until_waiting(image=1)
        began = reactor.seconds()
        wire.close()
        (record,) = s.host.ollama.requests_for("POST", "/api/chat")
        await until(lambda: record.disconnected_at)
        assert (await job).status == 200
        assert reactor.seconds() - began < 4.0
        await s.idle()
        assert len(s.host.ollama.loads) == 1


@pytest_twisted.ensureDeferred
async def test_A13_there_is_no_hidden_limit_of_parallel_chats() -> None:
    async with running() as s:
        answers = [result for _, result in await DeferredList([s.chat(20) for _ in range(30)])]
        assert [answer.status for answer in answers] == [200] * 30
        assert len(s.host.ollama.loads) == 1


@pytest_twisted.ensureDeferred
async def test_A13_with_a_limit_the_others_wait() -> None:
    async with running(llm_max_inflight=4) as s:
        chats = [s.chat(20) for _ in range(12)]
        most = 0
        pending = DeferredList(chats)
        while not pending.called:
            assert len(s.arbiter.leases) <= 4
            most = max(most, s.host.ollama.active_generations)
            await tick(0.002)
        assert most == 4
        assert [answer.status for _, answer in await pending] == [200] * 12


@pytest_twisted.ensureDeferred
async def test_A13_with_a_limit_and_in_reject_mode_the_others_are_told_when_to_come_again() -> None:
    async with running(
        llm_max_inflight=1, llm_busy_mode="reject", llm_busy_status=429, busy_retry_after=7
    ) as s:
        first = s.chat(50)
        await until(lambda: s.host.ollama.active_generations)
        second = await s.chat(1)
        assert (second.status, second.headers["retry-after"]) == (429, "7")
        assert isinstance(second.json()["error"], str)
        assert (await first).status == 200


@pytest.mark.parametrize("fault", ["unload_hangs", "unload_500"])
@pytest_twisted.ensureDeferred
async def test_A15_the_unload_is_judged_by_what_is_loaded(fault: str) -> None:
    async with running() as s:
        await s.chat()
        setattr(s.host.ollama.faults, fault, True)
        began = reactor.seconds()
        assert (await s.prompt()).status == 200
        assert reactor.seconds() - began < 2.0
        assert (await s.chat()).status == 200
        # Once more: what went wrong before is not remembered against it.
        assert (await s.prompt()).status == 200
        assert (await s.chat()).status == 200
        await s.idle()
        assert not s.card.history
        assert s.said("evicting ollama: confirmed")
        # Nothing that was done about it loaded the model once more.
        assert len(s.host.ollama.loads) == 3
        if fault == "unload_500":
            assert len(s.said("Ollama: unload failed")) == 2  # once each


@pytest_twisted.ensureDeferred
async def test_A17_chats_that_waited_for_one_image_load_the_model_once() -> None:
    async with running() as s:
        await s.queue()
        chats = [s.chat(10) for _ in range(5)]
        await s.until_waiting(llm=5)
        results = await DeferredList(chats)
        assert [answer.status for _, answer in results] == [200] * 5
        assert len(s.host.ollama.loads) == 1
        assert len(s.host.comfy.frees) == 1
        assert len(s.host.comfy.requests_for("POST", "/free")) == 1


@pytest_twisted.ensureDeferred
async def test_B01_the_number_of_active_requests_comes_back_to_zero() -> None:
    async with running() as s:
        wires = [await s.wire() for _ in range(6)]
        for wire in wires[:3]:
            wire.send_request("POST", "/api/chat", chat_body(5, stream=False))
        for wire in wires[3:]:
            wire.send_request("POST", "/api/chat", chat_body(10_000))
        await until(lambda: s.arbiter.llm_inflight == 6)
        for wire in wires[:3]:
            await wire.until(b'"done":true')
        await until(lambda: s.arbiter.llm_inflight == 3)
        wires[3].reset()
        wires[4].reset()
        wires[5].half_close()
        await until(lambda: s.arbiter.llm_inflight == 0, seconds=1.0)
        await until(lambda: s.host.ollama.active_generations == 0, seconds=1.0)
        health = await s.request("GET", "/healthz")
        assert health.json() == {"state": "idle", "llm_inflight": 0, "image_pending": False}


@pytest_twisted.ensureDeferred
async def test_B02_an_idle_connection_holds_nothing() -> None:
    async with running() as s:
        wire = await s.wire()
        wire.send_request("POST", "/api/chat", chat_body(2, stream=False))
        await wire.until(b'"done":true')
        assert wire.lost is None
        assert (await s.prompt()).status == 200
        assert not s.said("waits")
        # And the connection serves on.
        await s.idle()
        wire.received = b""
        wire.send_request("GET", "/api/version")
        await wire.until(b'"version"')


@pytest_twisted.ensureDeferred
async def test_B03_a_client_that_leaves_the_line_causes_no_switch() -> None:
    async with running() as s:
        await s.queue(sleep_graph(5))
        wire = await s.wire()
        wire.send_request("POST", "/api/chat", chat_body())
        await s.until_waiting(llm=1)
        wire.close()
        await until(lambda: s.waiting()["llm"] == 0, seconds=1.0)
        second = s.prompt(sleep_graph(0.2))
        await s.until_waiting(image=1)
        assert not s.host.ollama.requests_for("POST", "/api/chat")
        await second
        await s.idle()
        # One free after both, none in between for the chat that left.
        assert len(s.host.comfy.requests_for("POST", "/free")) == 1
        assert unloads(s) == []


@pytest_twisted.ensureDeferred
async def test_C04_an_unload_that_waits_for_a_generation_is_waited_for() -> None:
    async with running() as s:
        assert (await s.chat(1)).status == 200
        # Somebody beside turnstile uses the model, for a while.
        runner = await ensureDeferred(s.host.ollama.acquire(LLAMA, None))
        job = s.prompt()
        await until(lambda: unloads(s))
        first = unloads(s)[0]
        await until(lambda: first.status == 200)
        await tick(0.3)
        assert not s.host.comfy.requests_for("POST", "/prompt")
        assert LLAMA in s.host.ollama.resident
        s.host.ollama.release(runner)
        assert (await job).status == 200
        (posted,) = s.host.comfy.requests_for("POST", "/prompt")
        assert posted.time >= s.host.ollama.unloads[-1][0]


@pytest_twisted.ensureDeferred
async def test_C05_an_embedding_model_is_unloaded_through_embed() -> None:
    models = [ModelSpec(LLAMA, 4 * GIB), ModelSpec(EMBEDDER, GIB, embedding_only=True)]
    async with running(ollama_options={"models": models}) as s:
        await s.chat()
        body = {"model": EMBEDDER, "input": ["a", "b"]}
        assert (await s.request("POST", "/api/embed", body)).status == 200
        assert set(s.host.ollama.resident) == {LLAMA, EMBEDDER}
        assert (await s.prompt()).status == 200
        assert {name for _, name in s.host.ollama.unloads} == {LLAMA, EMBEDDER}
        last = s.host.ollama.requests_for("POST", "/api/embed")[-1].json()
        assert last == {"model": EMBEDDER, "input": "x", "keep_alive": 0}
        await s.idle()
        assert not s.card.history


@pytest_twisted.ensureDeferred
async def test_C05_a_model_that_cannot_be_unloaded_does_not_keep_the_others() -> None:
    models = [ModelSpec("stays:latest", GIB), ModelSpec(LLAMA, 4 * GIB)]
    async with running(
        ollama_options={"models": models}, overlaps="degraded", unload_timeout=0.6
    ) as s:
        await s.chat()
        await s.chat(model="stays")
        s.host.ollama.faults.status(500, "POST /api/embed")
        rule = s.host.ollama.faults
        original = s.host.ollama.expire
        s.host.ollama.expire = (  # type: ignore[method-assign]
            lambda name: None if name.startswith("stays") else original(name)
        )
        assert (await s.prompt()).status == 200
        assert LLAMA not in s.host.ollama.resident
        assert [interval.culprit for interval in s.card.history] == ["ollama"]
        s.host.ollama.expire = original  # type: ignore[method-assign]
        rule.clear()


@pytest_twisted.ensureDeferred
async def test_C07_a_foreign_host_is_not_passed_on() -> None:
    async with running() as s:
        for path in ("/api/version", "/api/tags", "/v1/models"):
            answer = await s.request("GET", path, headers={"Host": "gpu.example:11434"})
            assert answer.status == 200, answer
        record = s.host.ollama.requests_for("GET", "/api/tags")[-1]
        assert record.header(b"host") == b"127.0.0.1:%d" % s.host.ollama.port
        assert record.header(b"x-forwarded-host") == b"gpu.example:11434"
        body = chat_body(1)
        headers = {"Host": "gpu.example:11434"}
        assert (await s.request("POST", "/api/chat", body, headers=headers)).status == 200


@pytest.mark.parametrize("origin", ["chrome-extension://x", "null", "http://localhost:3000"])
@pytest_twisted.ensureDeferred
async def test_C07_the_origin_is_judged_by_ollama(origin: str) -> None:
    async with running() as s:
        through = await s.request("GET", "/api/tags", headers={"Origin": origin})
        record = s.host.ollama.requests_for("GET", "/api/tags")[-1]
        assert record.header(b"origin") == origin.encode()
        allowed = origin.startswith("http://localhost")
        assert through.status == (200 if allowed else 403)
        assert ("access-control-allow-origin" in through.headers) == allowed


@pytest_twisted.ensureDeferred
async def test_C07_preflight_and_head_pass_at_once_while_an_image_has_the_card() -> None:
    async with running() as s:
        await s.queue(sleep_graph(5))
        origin = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
        preflight = await s.request("OPTIONS", "/api/chat", headers=origin)
        assert preflight.status == 204
        assert preflight.headers["access-control-allow-origin"] == "http://localhost:3000"
        head = await s.request("HEAD", "/")
        assert (head.status, head.body) == (200, b"")
        assert s.arbiter.state == "image" and s.waiting()["llm"] == 0
        await s.request("POST", "/interrupt", {}, "comfyui")


@pytest_twisted.ensureDeferred
async def test_C08_an_engine_that_goes_on_without_its_client_is_waited_for() -> None:
    async with running(ollama_options={"ignores_disconnect_for": 15.0}) as s:
        wire = await s.wire()
        wire.send_request("POST", "/api/chat", chat_body(10_000, stream=False))
        await until(lambda: s.host.ollama.active_generations)
        wire.close()
        (record,) = s.host.ollama.requests_for("POST", "/api/chat")
        await until(lambda: record.disconnected_at, seconds=1.0)
        job = s.prompt()
        await tick(0.2)
        assert s.host.ollama.active_generations == 1
        assert not s.host.comfy.requests_for("POST", "/prompt")
        assert (await job).status == 200
        assert s.host.ollama.active_generations == 0


@pytest_twisted.ensureDeferred
async def test_D03_a_model_that_is_still_loading_counts_as_loaded() -> None:
    async with running(ollama_options={"load_time": 10.0, "cancels_load": False}) as s:
        wire = await s.wire()
        wire.send_request("POST", "/api/chat", chat_body(model="big:70b"))
        await until(lambda: s.host.ollama.loads)
        wire.reset()
        assert (await s.prompt()).status == 200
        assert not s.host.ollama.resident


@pytest.mark.parametrize("after", [None, 0, 100])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("rst", [True, False])
@pytest_twisted.ensureDeferred
async def test_E03_an_engine_that_breaks_off_never_looks_like_a_clean_end(
    after: int | None, stream: bool, rst: bool
) -> None:
    async with running() as s:
        s.host.ollama.faults.drop("/api/chat", after=after, rst=rst)
        wire = await s.wire()
        wire.send_request("POST", "/api/chat", chat_body(20, stream=stream))
        await until(lambda: wire.lost is not None or wire.status == 502)
        if after is None or wire.status == 502:  # a reset may overtake the head
            assert wire.status == 502
            error = json.loads(wire.received.partition(b"\r\n\r\n")[2])
            assert isinstance(error["error"], str)
        else:
            assert wire.lost is not None
            assert b'"done":true' not in wire.received
            assert not wire.received.endswith(b"0\r\n\r\n")
        await s.idle()
        assert (await s.prompt()).status == 200


@pytest_twisted.ensureDeferred
async def test_E03_on_openai_paths_the_error_is_an_object() -> None:
    async with running() as s:
        s.host.ollama.faults.drop("/v1/chat/completions")
        body = {"model": "llama3.2", "messages": [{"role": "user", "content": "x"}]}
        answer = await s.request("POST", "/v1/chat/completions", body)
        assert answer.status == 502
        assert answer.json()["error"]["message"]


@pytest_twisted.ensureDeferred
async def test_G02_the_order_of_a_switch_there_and_back() -> None:
    async with running() as s:
        await s.chat()
        await s.chat(model="qwen3:8b")
        prompt_id = await s.queue()
        chat = s.chat()
        assert (await chat).status == 200
        ollama, comfy = s.host.ollama, s.host.comfy
        (posted,) = comfy.requests_for("POST", "/prompt")
        asked = {record.json()["model"] for record in unloads(s)}
        assert asked == {LLAMA, "qwen3:8b"}
        # unload each -> /api/ps empty -> /prompt
        assert max(record.time for record in unloads(s)) < posted.time
        looks = [record.time for record in ollama.requests_for("GET", "/api/ps")]
        last_unload = max(at for at, _ in ollama.unloads)
        assert any(last_unload <= look <= posted.time for look in looks)
        # job over -> /free -> memory down -> chat
        freed = comfy.requests_for("POST", "/free")[0]
        last_chat = ollama.requests_for("POST", "/api/chat")[-1]
        job = comfy.jobs[prompt_id]
        assert job.ended <= freed.time <= comfy.frees[0] <= last_chat.time
