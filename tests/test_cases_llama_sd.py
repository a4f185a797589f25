"""Field cases with llama.cpp and sd-server, by their ids, and stadi's own two war stories. The whole system."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
import schedule_clients
from child_kit import runs
from program_kit import Program, post
from schedule_clients import Leave
from schedule_kit import System
from system_kit import (
    LLAMA_MODEL,
    SPEED,
    completion,
    drawing,
    pieces,
    reactor,
    running,
    tick,
    until,
)
from twisted.internet.defer import Deferred

from turnstile.sim import GpuHost
from turnstile.sim.graphs import sleep_graph

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
        job = await s.queue(sleep_graph(600))
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
        await s.request("POST", "/interrupt", {"prompt_id": job}, to="comfyui")
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
        await s.queue(sleep_graph(30))
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


# -- A01: an idle release and a request meet


def virtual(**config: Any) -> System:
    """llama.cpp and sd-server in virtual time."""
    return System(1, config, engines=("llamacpp", "sd"))


@pytest.mark.parametrize("leaves", [False, True])
def test_a01_requests_at_the_moment_of_the_idle_release(leaves: bool) -> None:
    system = virtual(sd_idle=1.0)
    world = system.world
    drawn = drawing(2)
    # Loading, and drawing two steps.
    longest = 2.0 + 0.2 + 0.2 + 0.3 + 1.0

    async def rounds() -> None:
        for number in range(200):
            if leaves and number % 3 == 0:
                # Another one is gone before it gets an answer.
                leave = Leave("sent", system.rng.uniform(0.0, 0.1), True)
                await system.call("sd", "POST", "/sdapi/v1/txt2img", drawn, leave)
            began = world.seconds()
            answer = await system.call("sd", "POST", "/sdapi/v1/txt2img", drawn)
            assert (answer.status, answer.complete) == (200, True), (number, answer)
            assert world.seconds() - began <= longest, number
            await system.sleep(1.0 + system.rng.uniform(-0.05, 0.05))
        # Whoever comes then gets through as well.
        answer = await system.call("llamacpp", "POST", "/v1/chat/completions", completion())
        assert answer.status == 200 and answer.complete

    with system.running():
        world.wait(Deferred.fromCoroutine(rounds()), 10_000.0)
        assert system.failures == []
        assert system.host.card.overlaps == []
        # Both happened, often.
        starts = len(system.host.sd.processes)
        assert 20 < starts < 180, starts
        # Those who left are counted as such, never as answered.
        value = system.service.metrics.registry.get_sample_value
        name = "gpu_turnstile_requests_total"
        assert value(name, {"engine": "sd", "status": "200"}) == 200
        assert (value(name, {"engine": "sd", "status": "none"}) or 0) == (67 if leaves else 0)
        assert system.unrest() == []
        assert system.stop() == []


# -- B01: who is counted as busy


@pytest_twisted.ensureDeferred
async def test_b01_whatever_ends_a_connection_it_counts_no_more() -> None:
    async with running(ollama=False, comfy=False, sd=True, sd_idle=0.3) as s:
        wires = [await s.wire("sd") for _ in range(6)]
        for wire in wires:
            wire.send_request("POST", "/sdapi/v1/txt2img", drawing(20))
        await until(lambda: any(p.rendering for p in s.host.cards.alive), "a drawing", 30.0)
        wires[3].reset()
        wires[4].reset()
        wires[5].half_close()
        for wire in wires[:3]:
            await until(lambda wire=wire: b'"info"' in wire.received, "a drawing", 30.0)
        began = reactor.seconds()
        await s.idle()
        assert reactor.seconds() - began < 1.0
        snapshot = (await s.state())["engines"]["sd"]
        assert snapshot["generations"] == 0
        # The connections stay open, and idle.
        await until(lambda: not s.host.cards.alive, "the idle release", 10.0)
        assert [wire.lost for wire in wires[:3]] == [None] * 3


# -- E03: an error ends the whole server


@pytest_twisted.ensureDeferred
async def test_e03_a_server_that_ends_before_it_answers() -> None:
    async with running(ollama=False, comfy=False, llama=True, sd=True) as s:
        s.host.sd.faults.exit_in_render = 1
        answer = await s.draw()
        assert answer.status == 502 and "closed the connection" in answer.json()["error"]
        await s.idle()
        assert (await s.complete()).status == 200
        assert (await s.draw()).status == 200


@pytest.mark.parametrize("path", ["/sdapi/v1/txt2img", "/v1/images/generations"])
@pytest_twisted.ensureDeferred
async def test_e03_a_server_that_ends_in_its_answer(path: str) -> None:
    async with running(
        ollama=False, comfy=False, llama=True, sd=True, sd_options={"image_bytes": 50_000_000}
    ) as s:
        wire = await s.wire("sd")
        wire.send_request("POST", path, drawing(1))
        await until(lambda: wire.received, "the answer", 30.0)
        wire.transport.pauseProducing()
        s.host.cards.alive[0].exit(1)
        await until(lambda: not s.host.cards.alive, "its end", 30.0)
        wire.transport.resumeProducing()
        await wire.closed()
        head, _, body = bytes(wire.received).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        (length,) = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-le")]
        assert len(body) < int(length.split(b":")[1]), "a cut answer looks whole"
        await s.idle()
        assert (await s.complete()).status == 200


# -- stadi's two war stories


def test_the_idle_timer_is_armed_from_the_end_of_a_drawing(monkeypatch: Any) -> None:
    """Five minutes after it was asked for, a cold drawing of ten is not half done."""
    monkeypatch.setattr(schedule_clients, "PATIENCE", 5000.0)
    system = virtual(sd_idle=300.0, load_wait=900.0, job_timeout=3600.0, busy_wait=3600.0)
    world = system.world
    system.host.sd.options |= {"load_time": 400.0, "step_time": 25.4}

    async def story() -> None:
        answer = await system.call("sd", "POST", "/sdapi/v1/txt2img", drawing(20))
        assert (answer.status, answer.complete) == (200, True)
        assert world.seconds() > 900.0
        (process,) = system.host.sd.processes
        await system.sleep(299.0)
        assert process.exit_status is None
        # Whoever watches meanwhile changes nothing.
        answer = await system.call("sd", "GET", "/sdapi/v1/progress")
        assert answer.status == 200
        await system.sleep(1.5)
        assert process.exit_status is not None
        assert system.host.card.used == 0
        # One that takes longer than that, without a cold start before it.
        system.host.sd.options |= {"load_time": 2.0, "step_time": 50.0}
        answer = await system.call("sd", "POST", "/sdapi/v1/txt2img", drawing(20))
        assert answer.status == 200
        assert len(system.host.sd.processes) == 2

    with system.running():
        world.wait(Deferred.fromCoroutine(story()), 10_000.0)
        assert system.failures == []
        assert system.stop() == []


@pytest_twisted.ensureDeferred
async def test_a_restart_leaves_nothing_behind(tmp_path: Path) -> None:
    """stadi's second: the child has a group of its own, so that it does not end with its parent by itself."""
    host = GpuHost(reactor, SPEED, ollama=False, comfy=False, sd=True)
    await host.start()
    program, *arguments = host.sd_command
    options = [
        f"--sd-bin={program}",
        f"--sd-args={shlex.join(arguments)}",
        f"--sd={host.sd_url}",
        f"--sd-log-dir={tmp_path}",
        "--listen-sd=127.0.0.1:0",
        "--loglevel=info",
    ]
    run = None
    try:
        for number in (1, 2):
            run = Program(tmp_path, *options)
            port = await run.port("sd")
            code, _ = await post(port, "/sdapi/v1/txt2img", drawing())
            assert code == 200
            (process,) = host.cards.alive
            run.process.send_signal(signal.SIGTERM)
            assert await run.ended(30.0) == 0
            assert not runs(process.pid)
            await until(lambda: host.card.used == 0, "its memory")
            assert len(host.cards.processes) == number
    finally:
        if run is not None:
            await run.kill()
        await host.stop()
