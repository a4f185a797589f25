"""Field cases with llama.cpp and sd-server, by their ids, and stadi's own two war stories. The whole system."""

from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_twisted
from system_kit import (
    LLAMA_MODEL,
    SPEED,
    completion,
    pieces,
    reactor,
    running,
    tick,
    until,
)

OTHER = "qwen3-8b"


def whole(body: bytes) -> bool:
    """Whether a streamed completion came to its end."""
    return list(pieces(body))[-1:] == [b"[DONE]"]


# -- D01: another model must not end a running answer


@pytest_twisted.ensureDeferred
async def test_d01_an_answer_goes_on_when_another_model_is_asked_for() -> None:
    options = {"models_max": 1}
    async with running(
        ollama=False, comfy=False, llama=True, llama_options=options, llm_max_inflight=1
    ) as s:
        first = s.complete(60, LLAMA_MODEL)
        await until(lambda: s.host.llama.active_generations)
        second = s.complete(5, OTHER)
        await s.until_waiting(llm=1)
        assert [name for _, name in s.host.llama.loads] == [LLAMA_MODEL]
        one, other = await first, await second
        assert whole(one.body) and whole(other.body)
        assert s.host.llama.kills == []
        records = s.host.llama.requests_for("POST", "/v1/chat/completions")
        assert records[1].time >= records[0].finished_at


# -- D03: an unload while the model loads


@pytest.mark.parametrize("engine", ["comfyui", "ollama"])
@pytest_twisted.ensureDeferred
async def test_d03_a_model_that_loads_holds_the_card(engine: str) -> None:
    options = {"load_time": 10.0}
    async with running(llama=True, llama_options=options, overlaps="never") as s:
        # Loads go on at the server when the client has gone.
        wire = await s.wire("llamacpp")
        wire.send_request("POST", "/v1/chat/completions", completion(5))
        await until(lambda: "loading" in s.host.llama.resident.values())
        wire.reset()
        await s.idle()
        assert "llamacpp" in s.card.resident
        if engine == "comfyui":
            await s.queue()
        else:
            answer = await s.chat()
            assert answer.status == 200
        assert s.host.llama.resident == {}
        record = s.host.llama.requests_for("POST", "/models/unload")[-1]
        assert record.json() == {"model": LLAMA_MODEL}


@pytest_twisted.ensureDeferred
async def test_d03_an_unload_that_has_no_effect_while_the_model_loads() -> None:
    # For ten more seconds the list says "loading", whatever it is told.
    options = {"load_time": 10.0}
    async with running(llama=True, llama_options=options, overlaps="never") as s:
        s.host.llama.faults.ignore_unload = 1
        answer = await s.request("POST", "/models/load", {"model": LLAMA_MODEL}, to="llamacpp")
        assert answer.status == 200 and json.loads(answer.body) == {"success": True}
        # The load has the card until it is done, not until it is answered.
        assert s.arbiter.tenant is not None and s.arbiter.tenant.name == "llamacpp"
        queued = s.prompt()
        await s.until_waiting(image=1)
        assert "loading" in s.host.llama.resident.values()
        assert (await queued).status == 200
        # The load was complete before anything was told to leave.
        (loaded, _), (unloaded, _) = s.host.llama.loads[0], s.host.llama.unloads[0]
        assert unloaded - loaded >= options["load_time"] / SPEED


@pytest_twisted.ensureDeferred
async def test_d03_a_load_that_never_ends_delays_others_for_a_bounded_time() -> None:
    options = {"load_time": 100_000.0}
    async with running(llama=True, llama_options=options, load_wait=0.5) as s:
        await s.request("POST", "/models/load", {"model": LLAMA_MODEL}, to="llamacpp")
        began = reactor.seconds()
        answer = await s.prompt()
        assert answer.status == 200 and reactor.seconds() - began < 5.0
        assert s.host.llama.resident == {}


# -- what a picker polls


@pytest_twisted.ensureDeferred
async def test_metadata_loads_nothing_and_waits_for_nobody() -> None:
    async with running(llama=True) as s:
        await s.queue()
        for path in (
            "/v1/models",
            "/models",
            "/props",
            "/health",
            f"/props?model={LLAMA_MODEL}&autoload=false",
        ):
            answer = await s.request("GET", path, to="llamacpp")
            assert answer.status in (200, 400), path
        assert s.arbiter.state == "image"
        assert s.host.llama.loads == []
        # That one would load it: it waits for the job.
        waiting = s.later("GET", f"/props?model={LLAMA_MODEL}", to="llamacpp")
        await s.until_waiting(llm=1)
        assert s.host.llama.loads == []
        assert (await waiting).status == 200
        assert [name for _, name in s.host.llama.loads] == [LLAMA_MODEL]


@pytest_twisted.ensureDeferred
async def test_llamas_own_pages_are_its_own() -> None:
    async with running(llama=True, ollama=False, comfy=False) as s:
        answer = await s.request("GET", "/health", to="llamacpp")
        assert answer.json() == {"status": "ok"}
        answer = await s.request("GET", "/metrics", to="llamacpp")
        assert answer.status == 400 and b"gpu_turnstile" not in answer.body
        answer = await s.request("GET", "/healthz", to="llamacpp")
        assert answer.status == 404
        for path in ("/turnstile/healthz", "/turnstile/metrics", "/turnstile/state"):
            answer = await s.request("GET", path, to="llamacpp")
            assert answer.status == 200
            assert "llama.cpp" not in answer.headers.get("server", "")


@pytest.mark.parametrize("status", [503, 502])
@pytest_twisted.ensureDeferred
async def test_what_llama_says_of_its_health_is_not_tried_again(status: int) -> None:
    # 503 is what a server says that is loading its model.
    async with running(llama=True, ollama=False, comfy=False) as s:
        s.host.llama.faults.status(status, "GET /health", times=1, body=b"{}")
        answer = await s.request("GET", "/health", to="llamacpp")
        assert answer.status == status
        assert len(s.host.llama.requests_for("GET", "/health")) == 1


# -- BUSY_WAIT


@pytest_twisted.ensureDeferred
async def test_a_chat_waits_for_an_image_for_so_long() -> None:
    async with running(llama=True, busy_wait=0.3, llm_wait_timeout=60.0) as s:
        from turnstile.sim.graphs import sleep_graph

        await s.queue(sleep_graph(30))
        began = reactor.seconds()
        answer = await s.complete()
        assert (answer.status, answer.headers["retry-after"]) == (503, "30")
        assert "stayed busy" in answer.json()["error"]["message"]
        assert reactor.seconds() - began >= 0.29
        assert s.host.llama.requests_for("POST", "/v1/chat/completions") == []


@pytest_twisted.ensureDeferred
async def test_a_chat_is_rejected_at_once_if_so_wanted() -> None:
    async with running(llama=True, llm_busy_mode="reject", llm_busy_status=429) as s:
        await s.queue()
        assert (await s.complete()).status == 429


@pytest_twisted.ensureDeferred
async def test_two_chat_engines_take_turns() -> None:
    async with running(llama=True, comfy=False) as s:
        first = s.complete(40)
        await until(lambda: s.host.llama.active_generations)
        second = s.chat(5)
        await s.until_waiting(llm=1)
        third = s.complete(5)
        await s.until_waiting(llm=2)
        assert whole((await first).body) and (await second).status == 200
        assert whole((await third).body)
        order = s.order(("llama", "POST", "/v1/chat/completions"), ("ollama", "POST", "/api/chat"))
        assert [what.split()[0] for _, what in order] == ["llama", "ollama", "llama"]


@pytest_twisted.ensureDeferred
async def test_an_aborted_chat_is_noticed_and_leaves_before_an_image() -> None:
    async with running(llama=True) as s:
        wire = await s.wire("llamacpp")
        wire.send_request("POST", "/v1/chat/completions", completion(100_000))
        await wire.until(b"data: ")
        image = s.prompt()
        await s.until_waiting(image=1)
        wire.reset()
        assert (await image).status == 200
        assert s.host.llama.kills == [], "the router had to kill a child that still computed"


@pytest_twisted.ensureDeferred
async def test_the_key_is_sent_with_our_own_calls_only() -> None:
    options: dict[str, Any] = {"api_key": "s3cret"}
    async with running(
        llama=True, ollama=False, llama_options=options, llama_api_key="s3cret"
    ) as s:
        assert (await s.complete()).status == 401
        answer = await s.request(
            "POST",
            "/v1/chat/completions",
            completion(),
            to="llamacpp",
            headers={"Authorization": "Bearer s3cret"},
        )
        assert answer.status == 200
        await s.queue()
        await s.idle()
        assert s.host.llama.resident == {}
        assert not s.said("s3cret")
        await tick()
