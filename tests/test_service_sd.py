"""sd-server as a child of a whole turnstile: a real process on the simulated card."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
import treq
from child_kit import runs
from system_kit import (
    AGENT,
    SPEED,
    START,
    System,
    drawing,
    make_config,
    reactor,
    running,
    tick,
    until,
)
from twisted.internet.endpoints import serverFromString
from twisted.internet.protocol import Factory, Protocol

from turnstile.config import ConfigError
from turnstile.proxy import channel
from turnstile.service import TurnstileService
from turnstile.sim import GpuHost

# -- a day in its life


@pytest_twisted.ensureDeferred
async def test_chat_draw_draw_chat() -> None:
    async with running(ollama=False, comfy=False, llama=True, sd=True) as s:
        assert (await s.complete()).status == 200
        assert s.card.resident == {"llamacpp"}
        first = await s.draw()
        assert first.status == 200 and first.json()["images"]
        assert s.card.resident == {"sd"} and s.host.llama.resident == {}
        process = s.sd_child()
        assert (await s.draw(to="sd", prompt="another")).status == 200
        assert s.sd_starts() == 1 and process.rendered == ["txt2img", "txt2img"]
        # A chat ends it, and its memory is back before the chat is forwarded.
        assert (await s.complete()).status == 200
        assert process.ended is not None and not runs(process.pid)
        record = s.host.llama.requests_for("POST", "/v1/chat/completions")[-1]
        assert record.time >= process.ended
        assert s.card.resident == {"llamacpp"}


@pytest_twisted.ensureDeferred
async def test_both_image_engines_and_both_chat_engines() -> None:
    async with running(llama=True, sd=True) as s:
        for ask in (s.chat, s.draw, s.complete, s.prompt, s.draw, s.chat):
            assert (await ask()).status == 200
        await s.idle()
        await until(lambda: s.card.resident == {"ollama"})
        await s.until_sd_gone()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/images/generations", {"prompt": "x", "n": 1}, 200),
        ("/sdapi/v1/img2img", {"prompt": "x"}, 200),
        ("/%73dapi/v1/txt2img", {"prompt": "x"}, 200),
        ("/sdapi/v1/txt2img", {}, 400),
    ],
)
@pytest_twisted.ensureDeferred
async def test_requests_that_draw_start_it(path: str, body: Any, status: int) -> None:
    async with running(ollama=False, comfy=False, sd=True) as s:
        answer = await s.request("POST", path, body, to="sd")
        assert answer.status == status and s.sd_starts() == 1


# -- observation


@pytest_twisted.ensureDeferred
async def test_observation_is_answered_only_while_it_is_up() -> None:
    async with running(ollama=False, comfy=False, llama=True, sd=True) as s:
        for path in ("/sdapi/v1/progress", "/sdapi/v1/options", "/sdcpp/v1/jobs/x", "/", "/x"):
            answer = await s.observe(path)
            assert answer.status == 503 and "retry-after" not in answer.headers
            assert answer.json() == {"error": "sd is not loaded", "state": "down"}
        answer = await s.observe("/v1/models")
        assert answer.json()["error"]["message"] == "sd is not loaded"
        assert s.sd_starts() == 0

        s.host.cards.options["load_time"] = 20.0
        drawn = s.draw()
        await s.until_sd_loads()
        answer = await s.observe()
        assert answer.json() == {"error": "sd is not loaded", "state": "loading"}
        await s.until_sd_draws()
        answer = await s.observe()
        assert answer.status == 200 and "progress" in answer.json()
        assert (await drawn).status == 200
        assert (await s.observe("/sdapi/v1/options")).status == 200
        assert (await s.observe("/nothing")).status == 404

        assert (await s.complete()).status == 200
        assert (await s.observe()).status == 503 and s.sd_starts() == 1


@pytest_twisted.ensureDeferred
async def test_polling_does_not_keep_it_alive() -> None:
    async with running(ollama=False, comfy=False, sd=True, sd_idle=0.5) as s:
        assert (await s.draw()).status == 200
        drawn = reactor.seconds()
        while (await s.observe()).status == 200:
            assert reactor.seconds() - drawn < START, "it was kept alive"
            await tick(0.02)
        await s.until_sd_gone()
        await until(lambda: not s.card.resident, "nobody on the card")
        assert s.sd_starts() == 1
        assert reactor.seconds() - drawn >= 0.4
        # The next one starts a fresh one.
        assert (await s.draw()).status == 200 and s.sd_starts() == 2


@pytest_twisted.ensureDeferred
async def test_without_an_idle_time_it_stays() -> None:
    async with running(ollama=False, comfy=False, sd=True, sd_idle=0.0) as s:
        assert (await s.draw()).status == 200
        await tick(0.3)
        assert s.sd_child().alive and (await s.state())["engines"]["sd"]["state"] == "up"


# -- loading


@pytest_twisted.ensureDeferred
async def test_a_crash_while_loading_is_a_502_with_the_end_of_the_log(tmp_path: Path) -> None:
    async with running(
        ollama=False, comfy=False, sd=True, backoff_initial=0.2, sd_log_dir=str(tmp_path)
    ) as s:
        s.host.sd.faults.crash_loading = 1
        answer = await s.draw()
        assert answer.status == 502
        assert "load tensors from model failed" in answer.json()["error"]
        assert "load tensors from model failed" in "".join(
            path.read_text() for path in tmp_path.iterdir()
        )
        await s.until_sd_gone()
        assert (await s.observe()).status == 503
        # At once it is not tried again …
        answer = await s.request("POST", "/v1/images/generations", {"prompt": "x"}, to="sd")
        while answer.status == 503:
            assert int(answer.headers["retry-after"]) >= 1
            await tick(0.05)
            answer = await s.request("POST", "/v1/images/generations", {"prompt": "x"}, to="sd")
        assert answer.status == 200 and s.sd_starts() == 2


@pytest_twisted.ensureDeferred
async def test_while_it_keeps_crashing_nobody_is_made_to_leave_for_it() -> None:
    async with running(
        ollama=False, comfy=False, llama=True, sd=True, backoff_initial=60.0, backoff_max=60.0
    ) as s:
        s.host.sd.faults.crash_loading = True
        while (await s.draw()).status == 502:
            pass
        assert s.sd_starts() == 2
        assert (await s.complete()).status == 200
        answer = await s.draw()
        assert answer.status == 503 and int(answer.headers["retry-after"]) > 30
        assert "keeps failing" in answer.json()["error"]
        assert s.host.llama.unloads == [] and s.card.resident == {"llamacpp"}
        snapshot = (await s.state())["engines"]["sd"]
        assert snapshot["crashes"] == 2 and snapshot["retry_in"] > 30


@pytest_twisted.ensureDeferred
async def test_the_loading_goes_on_without_its_client_and_the_next_one_profits() -> None:
    async with running(ollama=False, comfy=False, sd=True) as s:
        s.host.cards.options["load_time"] = 20.0
        wire = await s.wire("sd")
        wire.send_request("POST", "/sdapi/v1/txt2img", drawing())
        process = await s.until_sd_loads()
        wire.reset()
        await s.idle()
        assert "sd" in s.card.resident and process.alive
        assert (await s.draw()).status == 200
        assert s.sd_starts() == 1 and process.rendered == ["txt2img"]


@pytest_twisted.ensureDeferred
async def test_a_chat_ends_a_loading_whose_client_is_gone() -> None:
    async with running(ollama=False, comfy=False, llama=True, sd=True) as s:
        s.host.cards.options["load_time"] = 100_000.0
        wire = await s.wire("sd")
        wire.send_request("POST", "/sdapi/v1/txt2img", drawing())
        process = await s.until_sd_loads()
        chat = s.complete()
        await s.until_waiting(llm=1)
        wire.reset()
        assert (await chat).status == 200
        assert not process.alive and not runs(process.pid)


@pytest_twisted.ensureDeferred
async def test_one_that_never_listens_is_given_up() -> None:
    async with running(ollama=False, comfy=False, sd=True, load_wait=3.0) as s:
        s.host.sd.faults.hang_loading = 1
        answer = await s.draw()
        assert answer.status == 504
        assert "did not listen" in answer.json()["error"] and "tensors" in answer.json()["error"]
        await s.until_sd_gone()
        await s.idle()


@pytest_twisted.ensureDeferred
async def test_several_that_draw_share_one_start_and_go_one_after_another() -> None:
    async with running(ollama=False, comfy=False, sd=True) as s:
        answers = [await one for one in [s.draw() for _ in range(4)]]
        assert [answer.status for answer in answers] == [200] * 4
        assert s.sd_starts() == 1


class Squatter(Protocol):
    """Somebody else's server."""

    def dataReceived(self, data: bytes) -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")  # type: ignore[union-attr]


@pytest_twisted.ensureDeferred
async def test_a_port_that_somebody_else_has_is_never_talked_to() -> None:
    async with running(ollama=False, comfy=False, sd=True) as s:
        where = f"tcp:{s.host.sd_port}:interface=127.0.0.1"
        s.host._reserved.close()  # type: ignore[union-attr]
        factory = Factory.forProtocol(Squatter)
        factory.noisy = False
        port = await serverFromString(reactor, where).listen(factory)
        answer = await s.draw()
        assert answer.status in (502, 503)
        assert str(port.getHost().port) in answer.json()["error"]
        assert s.sd_starts() == 0
        assert (await s.observe()).status == 503
        await port.stopListening()
        s.host._reserved = socket.socket()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("/nonexistent/sd-server", "SD_BIN"),
        ("no-such-program-anywhere", "PATH"),
        ("/etc/passwd", "SD_BIN"),
        ("/etc", "SD_BIN"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_a_program_that_cannot_be_run_is_told_at_start(program: str, reason: str) -> None:
    host = GpuHost(reactor, SPEED, ollama=False, comfy=False, sd=True)
    await host.start()
    try:
        config = make_config(host, sd=True, sd_bin=program)
        with pytest.raises(ConfigError, match=reason):
            TurnstileService(config, reactor=reactor)
    finally:
        await host.stop()


@pytest_twisted.ensureDeferred
async def test_a_log_folder_that_cannot_be_made_is_told_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    host = GpuHost(reactor, SPEED, ollama=False, comfy=False, sd=True)
    await host.start()
    try:
        config = make_config(host, sd=True, sd_log_dir=str(tmp_path / "file" / "logs"))
        with pytest.raises(ConfigError, match="SD_LOG_DIR"):
            TurnstileService(config, reactor=reactor)
    finally:
        await host.stop()


# -- drawing


@pytest_twisted.ensureDeferred
async def test_a_chat_waits_for_a_drawing_for_so_long() -> None:
    async with running(ollama=False, comfy=False, llama=True, sd=True, busy_wait=0.3) as s:
        drawn = s.draw(steps=200)
        process = await s.until_sd_draws()
        answer = await s.complete()
        assert (answer.status, answer.headers["retry-after"]) == (503, "30")
        assert process.alive and process.rendering
        # What does not touch the card is answered meanwhile.
        assert (await s.request("GET", "/v1/models", to="llamacpp")).status == 200
        chat = s.complete()
        assert (await drawn).status == 200
        assert (await chat).status in (200, 503)


@pytest_twisted.ensureDeferred
async def test_one_that_ends_by_itself_is_noticed_and_started_again() -> None:
    async with running(ollama=False, comfy=False, sd=True, backoff_initial=0.05) as s:
        assert (await s.draw()).status == 200
        s.sd_child().exit(3)
        await s.until_sd_gone()
        await until(lambda: "sd" not in s.card.resident)
        assert s.said("exit code 3")
        assert (await s.observe()).status == 503
        answer = await s.draw()
        while answer.status == 503:
            await tick(0.05)
            answer = await s.draw()
        assert answer.status == 200 and s.sd_starts() == 2


@pytest_twisted.ensureDeferred
async def test_a_drawing_that_fails_leaves_it_up() -> None:
    async with running(ollama=False, comfy=False, sd=True) as s:
        s.host.sd.faults.fail_render = 1
        answer = await s.draw()
        assert answer.status == 500
        assert s.sd_child().alive


@pytest_twisted.ensureDeferred
async def test_a_client_that_leaves_gives_the_card_back() -> None:
    async with running(ollama=False, comfy=False, llama=True, sd=True) as s:
        wire = await s.wire("sd")
        wire.send_request("POST", "/sdapi/v1/txt2img", drawing(100_000))
        process = await s.until_sd_draws()
        chat = s.complete()
        await s.until_waiting(llm=1)
        wire.close()
        # It would go on drawing in vain.
        assert (await chat).status == 200
        assert not process.alive


@pytest_twisted.ensureDeferred
async def test_one_that_hangs_is_given_up_if_others_wait(monkeypatch: Any) -> None:
    # How often a connection is looked at.
    monkeypatch.setattr(channel, "IDLE_TIMEOUT", 0.25)
    async with running(
        ollama=False, comfy=False, llama=True, sd=True, job_timeout=0.5, busy_wait=60.0
    ) as s:
        s.host.sd.faults.hang_render = 1
        drawn = s.draw()
        process = await s.until_sd_draws()
        chat = s.complete()
        assert (await drawn).status == 504
        assert (await chat).status == 200
        assert not process.alive


# -- jobs


async def submit(s: System, kind: str = "img_gen", steps: int = 4, to: str = "sd") -> str:
    body = drawing(steps, sample_params={"sample_steps": steps})
    answer = await s.request("POST", f"/sdcpp/v1/{kind}", body, to=to)
    assert answer.status == 202, answer
    id_: str = answer.json()["id"]
    return id_


@pytest.mark.parametrize("kind", ["img_gen", "vid_gen"])
@pytest_twisted.ensureDeferred
async def test_a_job_has_the_card_until_it_is_done(kind: str) -> None:
    async with running(ollama=False, comfy=False, llama=True, sd=True, busy_wait=60.0) as s:
        id_ = await submit(s, kind, 500)
        process = s.sd_child()
        chat = s.complete()
        await s.until_waiting(llm=1)
        assert (await s.observe(f"/sdcpp/v1/jobs/{id_}")).json()["status"] != "completed"
        assert (await chat).status == 200
        assert process.rendered == [kind]


@pytest_twisted.ensureDeferred
async def test_jobs_of_several_clients_go_on_in_their_order() -> None:
    async with running(ollama=False, comfy=False, sd=True) as s:
        first = await submit(s, steps=20)
        second = await submit(s, steps=20)
        assert first != second
        await s.idle()
        for id_ in (first, second):
            assert (await s.observe(f"/sdcpp/v1/jobs/{id_}")).json()["status"] == "completed"


@pytest_twisted.ensureDeferred
async def test_a_job_that_is_refused_keeps_nothing() -> None:
    async with running(ollama=False, comfy=False, sd=True) as s:
        answer = await s.request("POST", "/sdcpp/v1/img_gen", b"{nonsense", to="sd")
        assert answer.status == 400
        await s.idle()


@pytest_twisted.ensureDeferred
async def test_a_job_whose_client_leaves_before_the_answer_is_carried_through() -> None:
    async with running(ollama=False, comfy=False, llama=True, sd=True, busy_wait=60.0) as s:
        await s.draw()  # it is up
        s.host.sd.faults.clear()
        wire = await s.wire("sd")
        body = drawing(100, sample_params={"sample_steps": 100})
        wire.send_request("POST", "/sdcpp/v1/img_gen", body)
        wire.close()
        process = await s.until_sd_draws()
        assert (await s.complete()).status == 200
        assert process.rendered == ["txt2img", "img_gen"]


@pytest_twisted.ensureDeferred
async def test_a_job_whose_process_dies_gives_the_card_back() -> None:
    async with running(ollama=False, comfy=False, llama=True, sd=True, busy_wait=60.0) as s:
        await submit(s, steps=100_000)
        process = await s.until_sd_draws()
        chat = s.complete()
        await s.until_waiting(llm=1)
        process.exit(1)
        assert (await chat).status == 200


@pytest_twisted.ensureDeferred
async def test_a_cancelled_job_gives_the_card_back_at_once() -> None:
    async with running(ollama=False, comfy=False, sd=True) as s:
        await s.draw()
        # Somebody's job, past turnstile: ours stands behind it, where it can be cancelled.
        body = json.dumps(drawing(sample_params={"sample_steps": 100_000})).encode()
        answer = await treq.post(f"{s.host.sd_url}/sdcpp/v1/img_gen", body, agent=AGENT)
        await answer.content()
        await s.until_sd_draws()
        id_ = await submit(s)
        await tick(0.3)
        assert s.arbiter.tenant is not None and s.arbiter.tenant.name == "sd"
        cancelled = await s.request("POST", f"/sdcpp/v1/jobs/{id_}/cancel", {}, to="sd")
        assert cancelled.status == 200
        began = reactor.seconds()
        await s.idle()
        assert reactor.seconds() - began < 0.9
        assert (await s.state())["counters"]["job_outcomes"] == {"success": 1, "cancelled": 1}


# -- the end


@pytest.mark.parametrize("phase", ["loading", "drawing", "idle"])
@pytest.mark.parametrize("stubborn", [False, True])
@pytest_twisted.ensureDeferred
async def test_a_stop_ends_it_with_its_whole_group(phase: str, stubborn: bool) -> None:
    async with running(
        ollama=False, comfy=False, sd=True, sd_stop_grace=0.5, shutdown_timeout=0.3
    ) as s:
        s.host.sd.faults.grandchild = 1
        s.host.sd.faults.ignore_sigterm = stubborn
        if phase == "loading":
            s.host.cards.options["load_time"] = 100_000.0
        wire = await s.wire("sd")
        wire.send_request("POST", "/sdapi/v1/txt2img", drawing(4 if phase == "idle" else 100_000))
        await until(lambda: len(s.host.cards.alive) == 2, "sd-server and its child", START)
        if phase == "drawing":
            await s.until_sd_draws()
        elif phase == "idle":
            await until(lambda: wire.status == 200, "the drawing", START)
            await s.idle()
        pids = [one.pid for one in s.host.cards.alive]
        await s.service.stopService()
        assert [pid for pid in pids if runs(pid)] == []
        await s.until_sd_gone()


@pytest_twisted.ensureDeferred
async def test_a_stop_that_is_hastened_kills_at_once() -> None:
    async with running(
        ollama=False, comfy=False, sd=True, sd_stop_grace=600.0, shutdown_timeout=600.0
    ) as s:
        s.host.sd.faults.ignore_sigterm = 1
        wire = await s.wire("sd")
        wire.send_request("POST", "/sdapi/v1/txt2img", drawing(100_000))
        process = await s.until_sd_draws()
        stopped = s.service.stopService()
        await tick(0.05)
        assert runs(process.pid)
        s.service.hasten()
        await stopped
        assert not runs(process.pid)


# -- the memory


@pytest_twisted.ensureDeferred
async def test_the_memory_of_a_dead_process_is_waited_for() -> None:
    def probe(host: GpuHost) -> str:
        return f"{sys.executable} -m turnstile.sim.card_server {host.cards.address}"

    async with running(
        ollama=False,
        comfy=False,
        llama=True,
        sd=True,
        host_options={"sd_release_delay": 2.0 * SPEED},
        vram_probe="command",
        vram_probe_command=probe,
        busy_wait=60.0,
        vram_wait=30.0,
    ) as s:
        await until(lambda: s.service.vram.works, "the probe", START)
        assert (await s.draw()).status == 200
        assert (await s.complete()).status == 200
        # Else running() finds the overlap. The driver took two seconds.
        assert await s.metric("evictions_total", engine="sd", outcome="confirmed") == 1
        vram = (await s.state())["vram"]
        assert vram["probe"] == "command" and vram["total"] == s.host.card.total_bytes
        assert vram["last_wait"]["seconds"] >= 1.0
