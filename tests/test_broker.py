"""One port for llama.cpp and sd-server: which requests are whose, and what a user of stadi finds there."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
import treq
from hypothesis import given
from hypothesis import strategies as st
from program_kit import Program, post
from system_kit import (
    AGENT,
    LOOPBACK,
    SPEED,
    START,
    completion,
    drawing,
    reactor,
    running,
    until,
)

from turnstile.broker import LLAMA, SD, broker_route
from turnstile.sim import GpuHost


@pytest.mark.parametrize(
    "target",
    [
        "/v1/images/generations",
        "/v1/images/edits",
        "/v1/images/",
        "/sdapi/v1/txt2img",
        "/sdapi/v1/img2img",
        "/sdapi/v1/progress?skip_current_image=true",
        "/sdapi/v1/anything/new",
        "/sdcpp/v1/img_gen",
        "/sdcpp/v1/jobs/abc/cancel",
        "/sdcpp/v1/capabilities",
        # as sd-server reads it
        "/%73dapi/v1/txt2img",
        "/sdapi%2Fv1%2Ftxt2img",
        "/v1%2fimages/generations",
    ],
)
def test_what_is_sd_servers(target: str) -> None:
    assert broker_route(target.encode()) == SD


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/favicon.ico",
        "/v1/models",
        "/models",
        "/models/load",
        "/props?model=x",
        "/v1/chat/completions",
        "/v1/images",
        "/v1/imagesx/generations",
        "/sdapi",
        "/sdapix/v1/txt2img",
        "/SDAPI/v1/txt2img",
        "/x/sdapi/v1/txt2img",
        "//sdapi/v1/txt2img",
        "/?x=/sdapi/v1/txt2img",
        "/%2573dapi/v1/txt2img",
        "*",
    ],
)
def test_everything_else_is_llamas(target: str) -> None:
    assert broker_route(target.encode()) == LLAMA


@given(st.binary(), st.sampled_from([b"/v1/images/", b"/sdapi/", b"/sdcpp/"]), st.data())
def test_a_request_has_one_owner_however_it_is_spelled(
    rest: bytes, prefix: bytes, data: Any
) -> None:
    assert broker_route(b"/" + rest) in (SD, LLAMA)
    # Any of its letters may be percent-encoded; the query says nothing.
    spelled = b"".join(
        b"%%%02X" % byte if data.draw(st.booleans()) else bytes([byte]) for byte in prefix[1:]
    )
    tail = rest.replace(b"?", b"").replace(b"%", b"")
    assert broker_route(b"/" + spelled + tail) == SD
    assert broker_route(b"/nobody?" + rest) == LLAMA


# -- one port for both


@pytest_twisted.ensureDeferred
async def test_the_broker_tells_stadis_story() -> None:
    async with running(
        ollama=False, comfy=False, llama=True, sd=True, listen_broker=LOOPBACK, sd_idle=1.0
    ) as s:
        assert set(s.service.ports) == {"broker"}

        async def status() -> Any:
            return (await s.request("GET", "/status", to="broker")).json()

        assert (await status())["sd_child_up"] is False
        assert (await s.complete(to="broker")).status == 200
        for _ in range(3):
            assert (await s.observe(to="broker")).status == 503
            answer = await s.request("GET", "/v1/models", to="broker")
            assert answer.status == 200 and answer.json()["object"] == "list"
        assert s.sd_starts() == 0 and s.card.resident == {"llamacpp"}
        drawn = s.draw(to="broker", steps=40)
        await s.until_sd_draws()
        assert (await status())["sd_child_up"] is True
        assert (await s.observe(to="broker")).status == 200
        # A favicon is no chat.
        assert (await s.request("GET", "/favicon.ico", to="broker")).status == 404
        assert (await drawn).status == 200
        assert (await s.complete(to="broker")).status == 200
        now = await status()
        assert now["sd_child_up"] is False and now["resident"] == ["llamacpp"]
        # After a drawing that nobody follows up it leaves by itself.
        assert (await s.draw(to="broker")).status == 200
        await s.until_sd_gone()
        assert (await status())["sd_child_up"] is False
        assert s.sd_starts() == 2


@pytest_twisted.ensureDeferred
async def test_the_brokers_pages() -> None:
    async with running(ollama=False, comfy=False, llama=True, sd=True, listen_broker=LOOPBACK) as s:
        for path in ("/healthz", "/metrics", "/turnstile/state", "/status"):
            assert (await s.request("GET", path, to="broker")).status == 200
        assert (await s.request("POST", "/status", {}, to="broker")).status == 405
        found = (await s.request("GET", "/status", to="broker")).json()
        assert {
            "sd_child_up",
            "sd",
            "llama",
            "vram",
            "state",
            "waiting",
            "resident",
            "version",
        } <= set(found)
        assert found["llama"]["mode"] == "router"
        assert await s.metric("sd_child_up") == 0
        assert await s.metric("llama_models", status="unloaded") == 4


@pytest_twisted.ensureDeferred
async def test_a_broker_and_ports_of_their_own() -> None:
    async with running(
        ollama=False,
        comfy=False,
        llama=True,
        sd=True,
        listen_broker=LOOPBACK,
        listen_sd=LOOPBACK,
        listen_llama=LOOPBACK,
    ) as s:
        assert set(s.service.ports) == {"broker", "sd", "llamacpp"}
        assert (await s.draw(to="broker")).status == 200
        assert (await s.draw(to="sd")).status == 200
        assert (await s.complete(to="llamacpp")).status == 200
        assert s.sd_starts() == 1
        for to in ("sd", "llamacpp"):
            assert (await s.request("GET", "/status", to=to)).status in (404, 503)
            assert (await s.request("GET", "/turnstile/healthz", to=to)).status == 200


@pytest_twisted.ensureDeferred
async def test_one_connection_to_the_broker_serves_both() -> None:
    async with running(ollama=False, comfy=False, llama=True, sd=True, listen_broker=LOOPBACK) as s:
        wire = await s.wire("broker")
        wire.send_request("GET", "/v1/models")
        await wire.until(b"llama-3.2-3b")
        wire.received.clear()
        wire.send_request("POST", "/sdapi/v1/txt2img", drawing())
        await until(lambda: wire.status == 200, "the drawing", START)
        await wire.until(b'"info"')
        wire.received.clear()
        body = completion()
        wire.send_request("POST", "/v1/chat/completions", body)
        await wire.until(b"[DONE]")


@pytest_twisted.ensureDeferred
async def test_a_start_with_stadis_variables_alone(tmp_path: Path) -> None:
    host = GpuHost(reactor, SPEED, ollama=False, comfy=False, llama=True, sd=True)
    await host.start()
    program, *arguments = host.sd_command
    run = Program(
        tmp_path,
        LOGLEVEL="info",
        STADI_LISTEN="127.0.0.1:0",
        STADI_LLM=host.llama.url,
        STADI_SD=host.sd_url,
        STADI_SD_BIN=program,
        STADI_SD_ARGS=" ".join(arguments),
        STADI_SD_LOG_DIR=str(tmp_path / "logs"),
        STADI_IDLE="5m",
        STADI_BUSY_WAIT="2m",
        STADI_VRAM_WAIT="45s",
        STADI_LOAD_WAIT="15m",
        STADI_LLM_WEIGHT="1",
    )
    try:
        port = await run.port("broker")

        async def status() -> Any:
            answer = await treq.get(f"http://127.0.0.1:{port}/status", agent=AGENT)
            return json.loads(await answer.content())

        assert (await status())["sd_child_up"] is False
        code, content = await post(port, "/v1/chat/completions", completion())
        assert code == 200 and b"[DONE]" in content
        code, content = await post(port, "/v1/images/generations", {"prompt": "a lighthouse"})
        assert code == 200 and json.loads(content)["data"]
        found = await status()
        assert found["sd_child_up"] is True and found["sd"]["state"] == "up"
        assert found["sd"]["log"] == str(tmp_path / "logs" / "sd-server.log")
        code, _ = await post(port, "/v1/chat/completions", completion())
        assert code == 200 and (await status())["sd_child_up"] is False
        assert host.card.overlaps == []
        assert not [line for line in run.lines() if "listens on" in line and "broker" not in line]
        assert any("STADI_LLM_WEIGHT has no effect" in line for line in run.lines())
        run.process.send_signal(signal.SIGTERM)
        assert await run.ended(START) == 0
    finally:
        await run.kill()
        await host.stop()
