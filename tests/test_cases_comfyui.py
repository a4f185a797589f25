"""Field cases about ComfyUI, through a whole turnstile. The letters and numbers are the cases' names."""

from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_twisted
import websockets
from system_kit import System, chat_body, in_loop, reactor, running, tick, until

from turnstile.engines import comfy_watch
from turnstile.sim.graphs import image_graph, nested_graph, sleep_graph, stubborn_graph

MIB = 1 << 20


def ws_url(s: System, client_id: str = "me", path: str = "/ws") -> str:
    return f"ws://127.0.0.1:{s.port('comfyui')}{path}?clientId={client_id}"


async def phase(s: System, prompt_id: str, wanted: str) -> Any:
    """Wait until ComfyUI's job is so far."""
    job = s.host.comfy.jobs[prompt_id]
    await until(lambda: job.status == wanted, f"{prompt_id} {wanted}")
    return job


# -- F01: interrupt


@pytest.mark.parametrize("path", ["/interrupt", "/api/interrupt"])
@pytest_twisted.ensureDeferred
async def test_F01_an_interrupt_passes_at_once_and_as_it_is(path: str) -> None:
    async with running() as s:
        first = await s.queue(sleep_graph(5))
        job = await phase(s, first, "running")
        body = json.dumps({"prompt_id": "another"}).encode()
        answer = await s.request("POST", path, body, "comfyui")
        assert answer.status == 200
        assert job.status == "running"
        assert s.waiting() == {"llm": 0, "image": 0}
        (record,) = s.host.comfy.requests_for("POST", path)
        assert (record.target, record.body) == (path.encode(), body)
        await s.request("POST", path, {"prompt_id": first}, "comfyui")
        await s.idle()
        assert job.status == "interrupted"
        # Nothing of turnstile's own was sent.
        assert len(s.host.comfy.requests_for("POST", path)) == 2


@pytest_twisted.ensureDeferred
async def test_F01_turnstile_never_sends_a_bare_interrupt() -> None:
    async with running(job_timeout=0.3, job_timeout_action="interrupt", overlaps="degraded") as s:
        prompt_id = await s.queue(sleep_graph(1000))
        await phase(s, prompt_id, "interrupted")
        for record in s.host.comfy.requests_for("POST", "/interrupt"):
            assert record.json() == {"prompt_id": prompt_id}


# -- F02, F03: jobs that vanish


@pytest_twisted.ensureDeferred
async def test_F02_a_job_that_vanishes_without_history_frees_the_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # While the event socket is up, looks without an event are rare: every 5 s.
    monkeypatch.setattr(comfy_watch, "SILENT_FACTOR", 1.0)
    monkeypatch.setattr(comfy_watch, "SILENT_DELAY", 0.2)
    async with running() as s:
        prompt_id = await s.queue(sleep_graph(1000))
        await phase(s, prompt_id, "running")
        await until(lambda: s.service.comfy.job.place == 0)  # type: ignore[union-attr]
        began = reactor.seconds()
        s.host.comfy.faults.lose_job()
        await s.idle()
        assert reactor.seconds() - began < 2.0
        (last,) = s.service.comfy.snapshot()["last_jobs"]  # type: ignore[union-attr]
        assert last["outcome"] == "lost"
        assert (await s.chat()).status == 200


@pytest_twisted.ensureDeferred
async def test_F02_a_job_that_never_shows_in_history_frees_the_card() -> None:
    async with running() as s:
        s.host.comfy.faults.never_in_history = True
        await s.queue()
        assert (await s.chat()).status == 200
        (last,) = s.service.comfy.snapshot()["last_jobs"]  # type: ignore[union-attr]
        assert last["outcome"] == "lost"


@pytest_twisted.ensureDeferred
async def test_F02_clearing_the_history_of_a_job_that_runs_or_ended_frees_the_card() -> None:
    async with running() as s:
        await s.queue(sleep_graph(2))
        assert (await s.request("POST", "/history", {"clear": True}, "comfyui")).status == 200
        await s.idle()
        assert (await s.chat()).status == 200


@pytest_twisted.ensureDeferred
async def test_F03_a_restart_loses_the_jobs_and_says_so() -> None:
    async with running() as s:
        await s.queue(sleep_graph(1000))
        second = s.prompt(sleep_graph(0.2))
        await s.until_waiting(image=1)
        await s.host.comfy.restart(downtime=10)  # 0.4 s
        began = reactor.seconds()
        assert (await second).status == 200
        assert reactor.seconds() - began < 5.0
        await s.idle()
        outcomes = [job["outcome"] for job in s.service.comfy.snapshot()["last_jobs"]]  # type: ignore[union-attr]
        assert outcomes == ["lost", "success"]
        assert await s.metric("job_outcomes_total", outcome="lost") == 1


@pytest_twisted.ensureDeferred
async def test_F03_a_prompt_during_the_down_time_waits_and_holds_nothing() -> None:
    async with running() as s:
        await s.chat()
        await s.host.comfy.kill()
        job = s.prompt()
        await until(lambda: s.said("comfyui not reached"))
        # Neither the card nor Ollama's models are touched meanwhile.
        assert (await s.chat()).status == 200
        assert s.host.ollama.unloads == []
        assert await s.metric("retries_total", engine="comfyui", reason="connect") > 0
        s.host.comfy.start_listening()
        s.host.comfy.boot()
        answer = await job
        assert answer.status == 200
        await s.idle()
        assert s.host.comfy.jobs[answer.json()["prompt_id"]].status == "success"


# -- F07, H09: the socket


@pytest_twisted.ensureDeferred
async def test_F07_large_messages_pass_whole_or_in_fragments() -> None:
    async with running() as s:
        sim = s.host.comfy
        binary, text = bytes(range(256)) * (16 * MIB // 256), "ä" * (5 * MIB // 2)
        got: list[tuple[type, int, bool]] = []
        connected: list[bool] = []

        async def client() -> None:
            async with websockets.connect(ws_url(s), max_size=None) as ws:
                await ws.recv()
                connected.append(True)
                while len(got) < 4:
                    message = await ws.recv()
                    if isinstance(message, bytes) or len(message) > 1000:
                        got.append((type(message), len(message), message in (binary, text)))
                await ws.recv()

        done = in_loop(client)
        await until(lambda: connected)
        for fragment in (None, 64 * 1024):
            sim.push_binary(binary, "me", fragment)
            sim.push_text(text, "me", fragment)
        await until(lambda: len(got) == 4)
        assert all(same for _, _, same in got)
        sim.ping("me", b"are you there")
        await until(lambda: b"are you there" in sim.pongs)
        assert (await s.state())["counters"]["websocket_relays"] == 1
        sim.push_text("{}", "me")
        await done
        await until(lambda: s.service.sites["comfyui"].relays == set())


@pytest_twisted.ensureDeferred
async def test_F07_a_slow_reader_bounds_what_is_kept_of_it() -> None:
    async with running() as s:
        wire = await s.wire("comfyui")
        wire.send(_handshake(s.port("comfyui")))
        await wire.until(b'"status"')
        wire.transport.pauseProducing()  # type: ignore[union-attr]
        for _ in range(64):
            s.host.comfy.push_binary(bytes(MIB), "slow")
        upstream: Any = s.host.comfy.sockets["slow"].transport
        await tick(0.3)
        # What is sent stays where it came from, but for what sockets and a few buffers hold.
        assert len(upstream.dataBuffer) + upstream._tempDataLen > 40 * MIB
        wire.transport.resumeProducing()  # type: ignore[union-attr]
        await until(lambda: len(wire.received) > 64 * MIB)


def _handshake(port: int, *more: str, path: str = "/ws?clientId=slow") -> bytes:
    lines = [
        f"GET {path} HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Connection: keep-alive, Upgrade",
        "Upgrade: WebSocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest_twisted.ensureDeferred
async def test_H09_the_handshake_and_the_first_frame_arrive() -> None:
    async with running() as s:
        for path in ("/ws?clientId=a", "/api/ws?clientId=b"):
            wire = await s.wire("comfyui")
            offer = "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits"
            wire.send(_handshake(s.port("comfyui"), offer, path=path))
            await wire.until(b"101 Switching Protocols")
            await wire.until(b"\r\n\r\n")
            head = wire.received.partition(b"\r\n\r\n")[0]
            assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head
            if b"permessage-deflate" not in head.lower():
                await wire.until(b'"queue_remaining"')
            wire.close()


@pytest_twisted.ensureDeferred
async def test_H09_a_refused_handshake_is_passed_on_as_http() -> None:
    async with running() as s:
        wire = await s.wire("comfyui")
        wire.send(_handshake(s.port("comfyui"), "Origin: http://evil.test"))
        await wire.until(b"\r\n\r\n")
        assert wire.status == 403
        await until(lambda: not s.service.sites["comfyui"].relays)


@pytest_twisted.ensureDeferred
async def test_H09_both_ends_of_a_socket_end_together() -> None:
    async with running() as s:
        first = await s.wire("comfyui")
        first.send(_handshake(s.port("comfyui")))
        await first.until(b'"status"')
        first.reset()
        await until(lambda: "slow" not in s.host.comfy.sockets, seconds=1.0)
        codes: list[Any] = []

        async def client() -> None:
            async with websockets.connect(ws_url(s)) as ws:
                try:
                    async for _ in ws:
                        pass
                finally:
                    codes.append((ws.close_code, ws.close_reason))

        done = in_loop(client)
        await until(lambda: "me" in s.host.comfy.sockets)
        s.host.comfy.close_sockets(1001, "going", client_id="me")
        await done
        assert codes == [(1001, "going")]


# -- F10: Host and Origin


@pytest_twisted.ensureDeferred
async def test_F10_a_page_of_the_same_site_may_change_things() -> None:
    async with running() as s:
        for host in ("box:9188", f"127.0.0.1:{s.port('comfyui')}", "localhost"):
            headers = {"Host": host, "Origin": f"http://{host}"}
            body = {"prompt": sleep_graph(0.1)}
            answer = await s.request("POST", "/api/prompt", body, "comfyui", headers)
            assert answer.status == 200, (host, answer)
            form = (
                b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
                b"PNG\r\n--b--\r\n"
            )
            headers["Content-Type"] = "multipart/form-data; boundary=b"
            answer = await s.request("POST", "/upload/image", form, "comfyui", headers)
            assert answer.status == 200
            wire = await s.wire("comfyui")
            shaken = _handshake(1, f"Origin: http://{host}").replace(b"127.0.0.1:1", host.encode())
            wire.send(shaken)
            await wire.until(b"101 Switching Protocols")
            wire.close()


@pytest_twisted.ensureDeferred
async def test_F10_a_page_of_another_site_is_refused() -> None:
    async with running() as s:
        headers = {"Origin": "http://evil.test"}
        for path in ("/prompt", "/api/prompt", "/upload/image", "/free", "/interrupt"):
            answer = await s.request("POST", path, {"prompt": image_graph()}, "comfyui", headers)
            assert answer.status == 403, path
        await s.idle()
        assert s.host.comfy.jobs == {}


# -- F13, F14: free


@pytest_twisted.ensureDeferred
async def test_F13_free_asks_for_both_and_looks_whether_it_came_true() -> None:
    async with running() as s:
        await s.queue()
        assert (await s.chat()).status == 200
        (record,) = s.host.comfy.requests_for("POST", "/free")
        assert record.json() == {"unload_models": True, "free_memory": True}
        assert s.host.comfy.requests_for("GET", "/system_stats")[-1].time > record.time


@pytest_twisted.ensureDeferred
async def test_F13_a_comfyui_that_keeps_its_memory_is_on_record_and_chats_go_on() -> None:
    async with running(overlaps="degraded", free_timeout=0.5) as s:
        s.host.comfy.faults.ignore_free = True
        await s.queue()
        answer = await s.chat()
        assert answer.status == 200
        assert {interval.culprit for interval in s.card.degraded} == {"comfyui"}
        assert s.said("ComfyUI did not give back its memory")
        assert (await s.state())["degraded"][0]["engine"] == "comfyui"
        assert s.host.card.overlaps
        s.host.comfy.faults.ignore_free = False
        await s.queue()
        await s.idle()
        await until(lambda: not s.card.degraded)


@pytest_twisted.ensureDeferred
async def test_F14_a_free_during_a_job_is_no_proof_and_passes() -> None:
    async with running() as s:
        prompt_id = await s.queue(image_graph(steps=40))
        job = await phase(s, prompt_id, "running")
        body = {"unload_models": True, "free_memory": True}
        answer = await s.request("POST", "/free", body, "comfyui")
        assert answer.status == 200 and job.status == "running"
        chat = s.chat()
        await s.until_waiting(llm=1)
        assert (await chat).status == 200
        (record,) = s.host.ollama.requests_for("POST", "/api/chat")
        assert job.status == "success"
        assert record.time > s.host.comfy.frees[0] > job.ended


@pytest_twisted.ensureDeferred
async def test_F14_work_queued_directly_meanwhile_is_waited_for() -> None:
    async with running() as s:
        await s.queue()
        direct = s.host.comfy.submit(image_graph(steps=20))
        assert (await s.chat()).status == 200
        (record,) = s.host.ollama.requests_for("POST", "/api/chat")
        assert record.time > s.host.comfy.jobs[direct].ended


# -- I01: nested calls


def calls_ollama(s: System, listener: str, **more: Any) -> dict[str, Any]:
    """A workflow with a node that asks the chat engine."""
    body = {"model": "llama3.2", "prompt": "describe it", "stream": False}
    return nested_graph(s.url(listener) + "/api/generate", body, **more)


@pytest_twisted.ensureDeferred
async def test_I01_a_nested_call_runs_inside_the_job() -> None:
    async with running(listen_ollama_nested="tcp:0:interface=127.0.0.1", overlaps="degraded") as s:
        prompt_id = await s.queue(calls_ollama(s, "ollama-nested"))
        chat = s.chat()
        await s.until_waiting(llm=1)
        assert (await chat).status == 200
        job = s.host.comfy.jobs[prompt_id]
        assert job.status == "success"
        nested = s.host.ollama.requests_for("POST", "/api/generate")[0]
        ordinary = s.host.ollama.requests_for("POST", "/api/chat")[0]
        assert nested.finished_at < job.ended < ordinary.time
        # The node's model was unloaded before the ordinary chat's was loaded.
        assert len(s.host.ollama.loads) == 2
        assert s.host.ollama.unloads[0][0] < ordinary.time
        assert [interval.reason for interval in s.card.history] == ["nested call"]
        assert await s.metric("nested_calls_total") == 1
        assert (await s.state())["counters"]["nested_calls"] == 1


@pytest_twisted.ensureDeferred
async def test_I01_a_burst_of_nested_calls_loads_the_model_once() -> None:
    async with running(listen_ollama_nested="tcp:0:interface=127.0.0.1", overlaps="degraded") as s:
        await s.queue(calls_ollama(s, "ollama-nested", count=4, pause=0.5))
        await s.idle()
        assert len(s.host.ollama.loads) == 1
        assert s.host.ollama.resident == {}
        assert await s.metric("nested_calls_total") == 4


@pytest_twisted.ensureDeferred
async def test_I01_on_the_nested_listener_an_ordinary_request_is_ordinary() -> None:
    async with running(listen_ollama_nested="tcp:0:interface=127.0.0.1") as s:
        chat = s.chat(200, to="ollama-nested")
        await until(lambda: s.arbiter.llm_inflight == 1)
        job = s.prompt()
        await s.until_waiting(image=1)
        assert (await chat).status == 200
        assert (await job).status == 200
        assert await s.metric("nested_calls_total") == 0


@pytest_twisted.ensureDeferred
async def test_I01_without_the_listener_the_log_tells_what_to_do_once_per_job() -> None:
    async with running(llm_wait_timeout=0.4) as s:
        prompt_id = await s.queue(calls_ollama(s, "ollama", ignore_errors=True, count=2))
        await phase(s, prompt_id, "success")
        hints = s.said("--listen-ollama-nested")
        assert len(hints) == 1
        await s.idle()
        second = await s.queue(calls_ollama(s, "ollama", ignore_errors=True))
        await phase(s, second, "success")
        assert len(s.said("--listen-ollama-nested")) == 2
        assert s.host.ollama.loads == []


# -- odd prompts


@pytest_twisted.ensureDeferred
async def test_a_refused_prompt_gives_the_card_back_at_once() -> None:
    async with running() as s:
        answer = await s.request("POST", "/prompt", {"prompt": {}}, "comfyui")
        assert answer.status == 400
        assert answer.json()["error"]["type"] == "prompt_no_outputs"
        await s.idle()
        assert s.host.comfy.requests_for("POST", "/free") == []
        broken = await s.request("POST", "/prompt", b"{", "comfyui")
        assert broken.status == 500
        await s.idle()
        assert (await s.chat()).status == 200


@pytest.mark.parametrize("path", ["/prompt", "/api/prompt", "/%70rompt", "/api/%70rompt"])
@pytest_twisted.ensureDeferred
async def test_every_spelling_that_queues_a_job_takes_the_card(path: str) -> None:
    async with running() as s:
        await s.chat()
        answer = await s.prompt(path=path)
        assert answer.status == 200
        assert (await s.chat()).status == 200


@pytest_twisted.ensureDeferred
async def test_a_stubborn_node_keeps_the_card_until_it_ends() -> None:
    async with running() as s:
        prompt_id = await s.queue(stubborn_graph(15))
        job = await phase(s, prompt_id, "running")
        await s.request("POST", "/interrupt", {}, "comfyui")
        chat = s.chat()
        assert (await chat).status == 200
        (record,) = s.host.ollama.requests_for("POST", "/api/chat")
        assert record.time > job.ended


@pytest_twisted.ensureDeferred
async def test_progress_of_the_job_shows_on_the_state_page() -> None:
    async with running() as s:
        seen: list[Any] = []

        async def client() -> None:
            async with websockets.connect(ws_url(s, "painter")) as ws:
                while True:
                    message = await ws.recv()
                    event = json.loads(message) if isinstance(message, str) else {}
                    seen.append(event.get("type"))
                    if event.get("type") == "executing" and event["data"]["node"] is None:
                        return

        done = in_loop(client)
        await until(lambda: "painter" in s.host.comfy.sockets)
        prompt_id = await s.queue(image_graph(steps=40), client_id="painter")
        while True:
            job = (await s.state())["job"]
            if job["progress"] != "unknown" and job["progress"]["max"] == 40:
                break
        assert job["prompt_id"] == prompt_id
        await done
        assert "progress" in seen


@pytest_twisted.ensureDeferred
async def test_a_chat_body_to_the_comfyui_port_is_nobodys_business() -> None:
    async with running() as s:
        answer = await s.request("POST", "/api/chat", chat_body(), "comfyui")
        assert answer.status == 405
