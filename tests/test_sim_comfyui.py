"""The simulated ComfyUI, seen by real clients."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest_twisted
import treq
import websockets
from twisted.internet import reactor as _reactor
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import deferLater
from twisted.internet.tcp import Connection, Port
from twisted.internet.threads import deferToThread
from twisted.web.client import Agent, HTTPConnectionPool

from turnstile.sim import GIB, ComfySim, GpuHost
from turnstile.sim.graphs import (
    error_graph,
    image_graph,
    nested_graph,
    node,
    oom_graph,
    sleep_graph,
    stubborn_graph,
    system_exit_graph,
)

reactor: Any = _reactor
SPEED = 50.0
AGENT = Agent(reactor, pool=HTTPConnectionPool(reactor, persistent=False))


@asynccontextmanager
async def running(speed: float = SPEED, **options: Any) -> AsyncIterator[GpuHost]:
    host = GpuHost(reactor, speed, comfy_options=options)
    await host.start()
    try:
        yield host
        assert host.comfy.errors == [] and host.ollama.errors == []
    finally:
        await host.stop()
    await until(clean)


def clean() -> bool:
    """Whether no socket and no delayed call is left in the reactor."""
    sockets = [reader for reader in reactor.getReaders() if isinstance(reader, (Connection, Port))]
    return not sockets and not reactor.getDelayedCalls()


async def call(
    sim: ComfySim, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    """One request of a connection of its own; status, and body as JSON if it is."""
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    named: Any = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await treq.request(method, sim.url + path, data=data, headers=named, agent=AGENT)
    content = await response.content()
    await deferLater(reactor, 0)
    try:
        return response.code, json.loads(content)
    except ValueError:
        return response.code, content


async def queue(sim: ComfySim, graph: Any, **more: Any) -> str:
    code, answer = await call(sim, "POST", "/prompt", {"prompt": graph, **more})
    assert code == 200, answer
    prompt_id: str = answer["prompt_id"]
    return prompt_id


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(2000):
        if condition():
            return
        await deferLater(reactor, 0.002)
    raise AssertionError("it never came true")


def raw(sim: ComfySim, head: bytes, body: bytes = b"") -> tuple[int, bytes]:
    """A request with its target exactly as given (in a thread); status and all that came."""
    with socket.create_connection(("127.0.0.1", sim.port), timeout=5) as sock:
        sock.sendall(
            head
            + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            % len(body)
            + body
        )
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    return int(answer.split(b" ")[1]), answer


def in_loop(work: Callable[[], Awaitable[Any]]) -> Deferred[Any]:
    """Run a coroutine of asyncio in a thread with a loop of its own."""
    return deferToThread(lambda: asyncio.run(work()))  # type: ignore[arg-type]


def ws_url(sim: ComfySim, client_id: str, path: str = "/ws") -> str:
    return f"ws://127.0.0.1:{sim.port}{path}?clientId={client_id}"


@pytest_twisted.ensureDeferred
async def test_job_runs_and_history_has_its_shape() -> None:
    async with running() as host:
        sim = host.comfy
        prompt_id = await queue(sim, image_graph(steps=3))
        assert (await call(sim, "GET", f"/history/{prompt_id}"))[1] == {}
        await sim.when_idle()
        _, history = await call(sim, "GET", f"/api/history/{prompt_id}")
        entry = history[prompt_id]
        assert entry["status"]["status_str"] == "success" and entry["status"]["completed"]
        assert [message[0] for message in entry["status"]["messages"]] == [
            "execution_start",
            "execution_cached",
            "execution_success",
        ]
        assert entry["prompt"][1] == prompt_id
        image = entry["outputs"]["3"]["images"][0]
        where = f"/view?filename={image['filename']}&type=output"
        code, content = await call(sim, "GET", where)
        assert code == 200 and content.startswith(b"\x89PNG\r\n\x1a\n")
        assert await call(sim, "GET", where, Range="bytes=1-3") == (206, b"PNG")
        assert host.card.residents == {"comfyui": 7 * GIB}  # A job's end unloads nothing.
        assert sim.jobs[prompt_id].status == "success" and sim.jobs[prompt_id].steps_done == 3


@pytest_twisted.ensureDeferred
async def test_etag() -> None:
    async with running() as host:
        sim = host.comfy
        sim.files["a.png"] = b"x" * 10
        response = await treq.get(sim.url + "/view?filename=a.png", agent=AGENT)
        await response.content()
        etag = response.headers.getRawHeaders("etag")[0]
        assert await call(sim, "GET", "/view?filename=a.png", If_None_Match=etag) == (304, b"")
        assert (await call(sim, "GET", "/view?filename=b.png"))[0] == 404


@pytest_twisted.ensureDeferred
async def test_spellings_of_prompt() -> None:
    async with running() as host:
        body = json.dumps({"prompt": sleep_graph(0)}).encode()
        for target in (
            b"/prompt",
            b"/api/prompt",
            b"/%70rompt",
            b"/api/%70%72ompt",
            b"/%61pi/prompt",
        ):
            code, _ = await deferToThread(raw, host.comfy, b"POST " + target, body)
            assert code == 200, target
        seen = len(host.comfy.jobs)
        for target in (b"/prompt/", b"//prompt", b"/PROMPT", b"/x/../prompt", b"/api//prompt"):
            code, _ = await deferToThread(raw, host.comfy, b"POST " + target, body)
            assert code == 405, target
        assert seen == len(host.comfy.jobs) == 5
        assert host.comfy.requests[-1].target == b"/api//prompt"


@pytest_twisted.ensureDeferred
async def test_refused_prompts() -> None:
    async with running(max_upload_size=5000) as host:
        sim = host.comfy
        missing = {"1": node("MissingNode")}
        bad = {"1": node("SaveImage", sim_invalid=True)}
        for asked, kind in (
            ({}, "no_prompt"),
            ({"prompt": {}}, "prompt_no_outputs"),
            ({"prompt": {"1": node("KSampler")}}, "prompt_no_outputs"),
            ({"prompt": {"1": {"inputs": {}}}}, "invalid_prompt"),
            ({"prompt": missing}, "invalid_prompt"),
            ({"prompt": bad}, "prompt_outputs_failed_validation"),
        ):
            code, answer = await call(sim, "POST", "/prompt", asked)
            assert code == 400 and answer["error"]["type"] == kind
            assert answer["error"].keys() == {"type", "message", "details", "extra_info"}
        for path in ("/queue", "/history"):
            assert (await call(sim, "POST", path, []))[0] == 200
            assert (await call(sim, "POST", path, b"5"))[0] == 500
        assert (await call(sim, "POST", "/prompt", []))[1]["error"]["type"] == "no_prompt"
        for body in (b"", b"{", b"\xff\xfe", b'{"prompt": null}'):
            code, answer = await deferToThread(raw, sim, b"POST /prompt", body)
            assert code == 500 and b"Connection: close\r\n" in answer and b"text/plain" in answer
        assert (await call(sim, "POST", "/prompt", b" " * 6000))[0] == 413
        assert not sim.jobs
        half = {**bad, "2": node("SaveImage")}
        code, answer = await call(sim, "POST", "/prompt", {"prompt": half})
        assert code == 200 and answer["node_errors"].keys() == {"1"}
        packed = gzip.compress(json.dumps({"prompt": sleep_graph(0), "prompt_id": "mine"}).encode())
        code, answer = await call(sim, "POST", "/prompt", packed, Content_Encoding="gzip")
        assert code == 200 and answer["prompt_id"] == "mine"


@pytest_twisted.ensureDeferred
async def test_order_delete_and_clear() -> None:
    async with running() as host:
        sim = host.comfy
        first = await queue(sim, sleep_graph(1000))
        later = await queue(sim, sleep_graph(0), number=50)
        soon = await queue(sim, sleep_graph(0), front=True)
        other = await queue(sim, sleep_graph(0))
        _, shown = await call(sim, "GET", "/queue")
        assert [item[1] for item in shown["queue_running"]] == [first]
        assert [item[1] for item in sorted(shown["queue_pending"])] == [soon, other, later]
        assert (await call(sim, "GET", "/prompt"))[1] == {"exec_info": {"queue_remaining": 4}}
        assert (await call(sim, "POST", "/queue", {"delete": [other, first]}))[0] == 200
        await call(sim, "POST", "/history", {"clear": True})  # The running one's entry stays.
        sim.interrupt()
        await sim.when_idle()
        assert [name for name, job in sim.jobs.items() if job.status == "deleted"] == [other]
        assert sim.jobs[soon].started < sim.jobs[later].started  # type: ignore[operator]
        assert (await call(sim, "GET", "/history"))[1].keys() == {first, soon, later}
        await call(sim, "POST", "/history", {"delete": [soon]})
        await call(sim, "POST", "/history", {"clear": True})
        assert (await call(sim, "GET", "/history"))[1] == {}
        await queue(sim, sleep_graph(1000))
        await queue(sim, sleep_graph(0))
        await until(lambda: sim.running)
        await call(sim, "POST", "/queue", {"clear": True})
        assert (await call(sim, "GET", "/prompt"))[1] == {"exec_info": {"queue_remaining": 1}}


@pytest_twisted.ensureDeferred
async def test_interrupt() -> None:
    async with running() as host:
        sim = host.comfy
        job = await queue(sim, sleep_graph(1000))
        await until(lambda: sim.running)
        assert (await call(sim, "POST", "/interrupt", {"prompt_id": "another"}))[0] == 200
        assert (await call(sim, "POST", "/interrupt", []))[0] == 500
        assert sim.jobs[job].status == "running"
        assert (await call(sim, "POST", "/interrupt", {"prompt_id": job}))[0] == 200
        await sim.when_idle()
        status = (await call(sim, "GET", f"/history/{job}"))[1][job]["status"]
        assert status["status_str"] == "error" and not status["completed"]
        assert status["messages"][-1][0] == "execution_interrupted"
        assert (await call(sim, "POST", "/interrupt", b""))[0] == 200  # Idle: nothing happens.
        stubborn = await queue(sim, stubborn_graph(1))
        await until(lambda: sim.running)
        await call(sim, "POST", "/interrupt", b"")
        await sim.when_idle()
        assert sim.jobs[stubborn].status == "success"


@pytest_twisted.ensureDeferred
async def test_errors_of_nodes() -> None:
    async with running() as host:
        sim = host.comfy
        for graph, kind in (
            (error_graph(), "RuntimeError"),
            (oom_graph(), "torch.OutOfMemoryError"),
            ({"1": node("SimSleep", duration="soon")}, "ValueError"),
        ):
            job = await queue(sim, graph)
            await sim.when_idle()
            last = (await call(sim, "GET", f"/history/{job}"))[1][job]["status"]["messages"][-1]
            assert last[0] == "execution_error" and last[1]["exception_type"] == kind


@pytest_twisted.ensureDeferred
async def test_free_is_asynchronous_and_needs_both_flags() -> None:
    async with running() as host:
        sim = host.comfy
        await queue(sim, image_graph(steps=1000, step_time=1.0))
        await until(lambda: host.card.used == 7 * GIB)
        await call(sim, "POST", "/free", {"unload_models": True})
        both = {"unload_models": True, "free_memory": True}
        assert (await call(sim, "POST", "/free", both))[0] == 200
        stats = (await call(sim, "GET", "/system_stats"))[1]["devices"][0]
        assert stats["torch_vram_total"] == 7 * GIB and stats["vram_free"] == 9 * GIB
        assert sim.running and not sim.frees
        sim.interrupt()
        await sim.when_idle()
        assert host.card.used == 0 and len(sim.free_calls) == 2
        await queue(sim, image_graph())
        await sim.when_idle()
        await call(sim, "POST", "/free", {"unload_models": True})
        await call(sim, "POST", "/free", {})
        await sim.when_idle()
        assert host.card.used == 7 * GIB
        sim.faults.ignore_free = True
        await call(sim, "POST", "/free", both)
        await sim.when_idle()
        assert host.card.used == 7 * GIB
        sim.faults.clear()
        await call(sim, "POST", "/free", both)
        answered = sim.requests[-1].answered_at
        await sim.when_idle()
        assert answered is not None and answered < sim.frees[-1]
        stats = (await call(sim, "GET", "/system_stats"))[1]["devices"][0]
        assert stats["torch_vram_total"] == 0 and stats["vram_free"] == 16 * GIB


@pytest_twisted.ensureDeferred
async def test_three_ways_to_wedge_the_worker() -> None:
    async with running() as host:
        sim = host.comfy
        await queue(sim, sleep_graph(0), extra_data=None)
        await until(lambda: sim.wedged)
        await queue(sim, sleep_graph(0))
        assert (await call(sim, "GET", "/prompt"))[1]["exec_info"]["queue_remaining"] == 2
        await sim.restart(0.1)
        assert not sim.wedged and not sim.remaining
        await queue(sim, system_exit_graph())
        await until(lambda: sim.wedged)
        assert len((await call(sim, "GET", "/queue"))[1]["queue_running"]) == 1
        await sim.restart(0.1)
        first = await queue(sim, sleep_graph(1000))
        await until(lambda: sim.running)
        twin = {"prompt": sleep_graph(0), "number": 7, "prompt_id": "twin"}
        assert (await call(sim, "POST", "/prompt", twin))[0] == 200
        assert (await call(sim, "POST", "/prompt", twin))[0] == 500
        assert len((await call(sim, "GET", "/queue"))[1]["queue_pending"]) == 2
        assert not sim.wedged
        sim.interrupt()
        await until(lambda: sim.wedged)
        assert sim.jobs[first].status == "interrupted" and sim.jobs["twin"].status == "pending"


@pytest_twisted.ensureDeferred
async def test_events_of_a_job() -> None:
    async with running(preview_bytes=10) as host:
        sim = host.comfy

        async def listen() -> tuple[list[Any], list[bytes], list[Any], Any]:
            async with (
                websockets.connect(ws_url(sim, "me", "/api/ws")) as mine,
                websockets.connect(ws_url(sim, "other")) as others,
            ):
                texts: list[Any] = []
                binaries: list[bytes] = []
                hello = json.loads(await mine.recv())
                flags = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
                await mine.send(json.dumps(flags))
                assert json.loads(await mine.recv())["type"] == "feature_flags"
                loop = asyncio.get_running_loop()
                url = sim.url + "/prompt"
                data = json.dumps({"prompt": image_graph(steps=2), "client_id": "me"}).encode()
                await loop.run_in_executor(None, post, url, data)
                while not texts or texts[-1].get("data", {}).get("node", "") is not None:
                    message = await mine.recv()
                    if isinstance(message, bytes):
                        binaries.append(message)
                    else:
                        texts.append(json.loads(message))
                overheard = []
                for _ in range(4):
                    overheard.append(json.loads(await others.recv()))
                return texts, binaries, overheard, hello

        texts, binaries, overheard, hello = await in_loop(listen)
        exec_info = {"exec_info": {"queue_remaining": 0}}
        assert hello == {"type": "status", "data": {"status": exec_info, "sid": "me"}}
        kinds = [event["type"] for event in texts if event["type"] != "progress_state"]
        assert kinds == [
            "status",
            "status",
            "execution_start",
            "execution_cached",
            "executing",
            "executing",
            "progress",
            "progress",
            "executing",
            "executed",
            "execution_success",
            "status",
            "executing",
        ]
        assert binaries == [struct.pack(">II", 1, 2) + bytes(10)] * 2
        assert [event["type"] for event in overheard] == ["status"] * 4


def post(url: str, data: bytes) -> None:
    import urllib.request

    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=5) as answer:
        answer.read()


@pytest_twisted.ensureDeferred
async def test_without_client_id_progress_goes_to_all() -> None:
    async with running(preview_bytes=0) as host:
        sim = host.comfy

        async def listen() -> set[str]:
            async with websockets.connect(ws_url(sim, "somebody")) as sock:
                await sock.recv()
                data = json.dumps({"prompt": image_graph(steps=1)}).encode()
                await asyncio.get_running_loop().run_in_executor(
                    None, post, sim.url + "/prompt", data
                )
                kinds = set()
                while True:
                    event = json.loads(await sock.recv())
                    kinds.add(event["type"])
                    if event["type"] == "status":
                        if not event["data"]["status"]["exec_info"]["queue_remaining"]:
                            return kinds

        assert await in_loop(listen) == {"status", "progress", "progress_state"}


@pytest_twisted.ensureDeferred
async def test_second_socket_of_a_client_is_deaf_once_the_first_closes() -> None:
    async with running() as host:
        sim = host.comfy

        async def listen() -> None:
            first = await websockets.connect(ws_url(sim, "me"))
            second = await websockets.connect(ws_url(sim, "me"))
            assert json.loads(await first.recv())["type"] == "status"
            assert json.loads(await second.recv())["type"] == "status"
            await first.close()
            await second.close()

        done = in_loop(listen)
        await until(lambda: len(sim.hub.close_codes) >= 1)
        assert "me" not in sim.sockets
        await done


@pytest_twisted.ensureDeferred
async def test_big_messages_both_ways() -> None:
    async with running() as host:
        sim = host.comfy
        big = bytes(range(256)) * (16 << 12)

        async def talk() -> tuple[list[Any], int | None]:
            async with websockets.connect(ws_url(sim, "me"), max_size=None) as sock:
                await sock.recv()
                got = [await sock.recv() for _ in range(3)]
                await sock.send("x" * (4 << 20))
                await sock.wait_closed()
                return got, sock.close_code

        done = in_loop(talk)
        await until(lambda: "me" in sim.sockets)
        sim.push_binary(big)
        sim.push_binary(big, "me", fragment=64 << 10)
        sim.ping(payload=b"there?")
        sim.push_text("t" * (5 << 20))
        got, code = await done
        assert got == [big, big, "t" * (5 << 20)]
        assert code == 1009 and list(sim.pongs) == [b"there?"]


@pytest_twisted.ensureDeferred
async def test_origin() -> None:
    async with running() as host:
        sim = host.comfy
        body = {"prompt": sleep_graph(0)}
        for name, origin, code in (
            ("127.0.0.1:8188", "http://127.0.0.1:8188", 200),
            ("127.0.0.1:8188", "http://127.0.0.1:9188", 403),
            ("localhost:8188", "http://evil.test", 403),
            ("localhost", "http://localhost:9", 200),
            ("box:9188", "http://evil.test", 200),
            ("localhost:8188", "null", 200),
        ):
            got, _ = await call(sim, "POST", "/prompt", body, Host=name, Origin=origin)
            assert got == code, (name, origin)

        async def refused() -> int:
            try:
                await websockets.connect(ws_url(sim, "x"), origin="http://evil.test")  # type: ignore[arg-type]
            except websockets.InvalidStatus as error:
                return error.response.status_code
            return 0

        assert await in_loop(refused) == 403


@pytest_twisted.ensureDeferred
async def test_uploads_and_userdata() -> None:
    async with running(max_upload_size=200_000) as host:
        sim = host.comfy
        code, answer = await upload(sim, b"y" * 100_000)
        assert code == 200 and answer["name"] == "a.png"
        assert sim.uploads["a.png"] == b"y" * 100_000
        assert (await upload(sim, b"y" * 300_000))[0] == 413
        target = b"/api/userdata/workflows%2Fa%20b.json?overwrite=true"
        assert (await deferToThread(raw, sim, b"POST " + target, b"{}"))[0] == 200
        assert sim.requests[-1].target == target
        assert sim.userdata == {"workflows/a b.json": b"{}"}
        assert (await deferToThread(raw, sim, b"GET /userdata/workflows/a%20b.json"))[0] == 404
        assert (await call(sim, "GET", "/userdata?dir=workflows"))[1] == ["a b.json"]
        assert len((await call(sim, "GET", "/object_info"))[1]) > 500
        assert (await call(sim, "GET", "/features"))[1]["max_upload_size"] == 200_000
        assert (await call(sim, "GET", "/"))[0] == 200


async def upload(sim: ComfySim, data: bytes) -> tuple[int, Any]:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
        + data
        + b"\r\n--b--\r\n"
    )
    return await call(
        sim, "POST", "/upload/image", body, Content_Type="multipart/form-data; boundary=b"
    )


@pytest_twisted.ensureDeferred
async def test_nested_call_to_ollama() -> None:
    async with running() as host:
        url = host.ollama.url + "/api/generate"
        body = {"model": "llama3.2", "prompt": "x", "stream": False}
        job = await queue(host.comfy, nested_graph(url, body, count=2))
        await host.comfy.when_idle()
        assert host.comfy.jobs[job].status == "success", host.comfy.jobs[job].messages[-1][1][
            "exception_message"
        ]
        assert list(host.comfy.nested) == [(url, 200)] * 2
        assert len(host.card.overlaps) == 1 and host.card.overlaps[0].owners == {
            "ollama",
            "comfyui",
        }
        bad = await queue(host.comfy, nested_graph(url, {"model": "none", "prompt": "x"}))
        await host.comfy.when_idle()
        assert host.comfy.jobs[bad].status == "error"


@pytest_twisted.ensureDeferred
async def test_jobs_that_vanish() -> None:
    async with running() as host:
        sim = host.comfy
        job = await queue(sim, image_graph(steps=1000))
        behind = await queue(sim, sleep_graph(0))
        await until(lambda: sim.running and sim.running.steps_done)
        assert sim.faults.lose_job() == job
        await until(lambda: sim.jobs[behind].status == "success")
        assert (await call(sim, "GET", f"/history/{job}"))[1] == {}
        assert sim.jobs[job].status == "lost"
        sim.faults.never_in_history = True
        unseen = await queue(sim, sleep_graph(0))
        await sim.when_idle()
        assert (await call(sim, "GET", f"/history/{unseen}"))[1] == {}
        running_job = await queue(sim, image_graph(steps=1000))
        await until(lambda: sim.running and sim.running.steps_done)
        await sim.restart(0.1)
        assert sim.jobs[running_job].status == "lost" and host.card.used == 0
        await queue(sim, sleep_graph(0))


@pytest_twisted.ensureDeferred
async def test_scripted_faults() -> None:
    async with running() as host:
        sim = host.comfy
        faults = sim.faults
        faults.status(503, "GET /queue", 1, body=b"no")
        assert await call(sim, "GET", "/queue") == (503, b"no")
        faults.garbage("/queue", 1)
        assert await call(sim, "GET", "/queue") == (200, b"{not json")
        assert (await call(sim, "GET", "/queue"))[0] == 200
        for rule in (
            faults.drop("/features", 1),
            faults.drop("/features", 1, rst=True),
            faults.drop("/object_info", 1, after=1000),
            faults.drop("/object_info", 1, after=1000, rst=True),
            faults.drop_upload("/upload/image", 1, after=10),
        ):
            path = rule.match
            failed: list[Any] = []
            asked = ensureDeferred(call(sim, "POST" if "up" in path else "GET", path, b"x" * 50))
            await asked.addErrback(failed.append)
            assert failed and rule.hits == 1, rule
        trickle = faults.trickle("/features", size=7, interval=0.01)
        assert (await call(sim, "GET", "/features"))[1]["max_upload_size"] > 0
        trickle.cancel()
        faults.raw(b"HTTP/1.1 200 OK\r\n\r\nto the end", "/features", 1)
        assert await call(sim, "GET", "/features") == (200, b"to the end")
        hang = faults.hang("/features")
        asked = ensureDeferred(call(sim, "GET", "/features"))
        asked.addErrback(failed.append)
        await until(lambda: hang.hits)
        asked.cancel()
        await until(lambda: sim.requests[-1].disconnected_at)
        faults.clear()
        await sim.stop_listening()
        refused: list[Any] = []
        await ensureDeferred(call(sim, "GET", "/features")).addErrback(refused.append)
        assert refused and not sim.listening
        sim.start_listening()
        assert (await call(sim, "GET", "/features"))[0] == 200
