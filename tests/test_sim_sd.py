"""The simulated sd-server: in memory, seen by real clients, and as a real process."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import openai
import pytest
import pytest_twisted
import treq
from twisted.internet import reactor as _reactor
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock, deferLater
from twisted.internet.tcp import Connection, Port
from twisted.internet.threads import deferToThread
from twisted.web.client import Agent, HTTPConnectionPool

from turnstile.sim import GIB, GpuHost, SdFleet, SdSim
from turnstile.sim.card import Card
from turnstile.sim.sd_jobs import MAX_PENDING

reactor: Any = _reactor
SPEED = 50.0
AGENT = Agent(reactor, pool=HTTPConnectionPool(reactor, persistent=False))


@asynccontextmanager
async def running(speed: float = SPEED, **options: Any) -> AsyncIterator[tuple[GpuHost, SdSim]]:
    """A host and a process of its sd-server, in memory, that is up."""
    async with hosted(speed, **options) as host:
        process = host.sd.start(0)
        await until(lambda: process.state == "up")
        yield host, process


@asynccontextmanager
async def hosted(speed: float = SPEED, **options: Any) -> AsyncIterator[GpuHost]:
    """A host on which sd-server may be started, in memory or as a process."""
    more = {name: options.pop(name) for name in ("on_full", "sd_release_delay") if name in options}
    host = GpuHost(reactor, speed, ollama=False, comfy=False, sd=True, sd_options=options, **more)
    await host.start()
    try:
        yield host
        assert host.sd.errors == []
    finally:
        await host.stop()
    await until(clean)


def clean() -> bool:
    """Whether no socket and no delayed call is left in the reactor."""
    sockets = [reader for reader in reactor.getReaders() if isinstance(reader, (Connection, Port))]
    return not sockets and not reactor.getDelayedCalls()


async def until(condition: Any, seconds: float = 20.0) -> None:
    deadline = reactor.seconds() + seconds
    while not condition():
        assert reactor.seconds() < deadline, "it never came true"
        await deferLater(reactor, 0.002)


async def call(
    port: int, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, bytes]:
    """One request of a connection of its own; status and body."""
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    named: Any = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await treq.request(
        method, f"http://127.0.0.1:{port}{path}", data=data, headers=named, agent=AGENT
    )
    content = await response.content()
    await deferLater(reactor, 0)
    return response.code, content


def start(*args: Any, **kwargs: Any) -> Deferred[Any]:
    """`call`, not waited for; how it ends is nobody's concern."""
    d = ensureDeferred(call(*args, **kwargs))
    d.addErrback(lambda _: None)
    return d


# -- in memory -------------------------------------------------------------------------------------

TXT2IMG = "/sdapi/v1/txt2img"
IMG_GEN = "/sdcpp/v1/img_gen"


def asked(**more: Any) -> dict[str, Any]:
    return {"prompt": "a lock", **more}


@pytest_twisted.ensureDeferred
async def test_the_port_opens_when_the_model_is_loaded_and_only_the_exit_frees_the_card() -> None:
    async with hosted(load_time=5.0) as host:
        process = host.sd.start(0)
        assert process.state == "loading" and not process.listening
        await until(lambda: host.card.used)
        assert not process.listening
        await until(lambda: process.state == "up")
        assert host.card.residents == {"sd": 12 * GIB} and process.up_at is not None
        assert process.started_at is not None
        assert process.up_at - process.started_at >= 5.0 / SPEED
        ended = process.exited()
        process.signal(signal.SIGTERM)
        await ended
        assert process.exit_status == -signal.SIGTERM
        assert host.card.used == 0 and not process.listening and not host.sd.alive


@pytest_twisted.ensureDeferred
async def test_openai_client_draws_and_edits() -> None:
    async with running(steps=2) as (_, process):

        def use() -> list[Any]:
            url = process.url + "/v1"
            with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
                drawn = client.images.generate(model="x", prompt="a lock", n=2).data
                edited = client.images.edit(model="x", prompt="rust", image=("a.png", b"x")).data
                assert drawn is not None and edited is not None
                return [image.b64_json for image in (*drawn, *edited)]

        images = await deferToThread(use)
        assert len(images) == 3
        assert all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)
        assert [(r.kind, r.images) for r in process.renders] == [("txt2img", 2), ("img2img", 1)]


@pytest_twisted.ensureDeferred
async def test_sdapi() -> None:
    async with running(steps=3) as (host, process):
        code, body = await call(process.port, "POST", TXT2IMG, asked(steps=5, batch_size=2))
        answer = json.loads(body)
        assert code == 200 and len(answer["images"]) == 2
        assert answer["parameters"]["steps"] == 5
        assert json.loads(answer["info"])["prompt"] == "a lock"
        code, _ = await call(process.port, "POST", "/sdapi/v1/img2img", asked())
        assert code == 200
        extra = '<sd_cpp_extra_args>{"sample_params": {"sample_steps": 7}}</sd_cpp_extra_args>'
        code, _ = await call(
            process.port, "POST", "/v1/images/generations", {"prompt": "a" + extra}
        )
        assert code == 200
        assert [render.steps for render in process.renders] == [5, 3, 7]
        assert host.card.residents == {"sd": 12 * GIB}
        assert max(sum(held.values()) for _, held in host.card.history) == 13 * GIB


@pytest_twisted.ensureDeferred
async def test_errors() -> None:
    async with running() as (_, process):
        port = process.port
        for path in (TXT2IMG, "/v1/images/generations", IMG_GEN, "/sdcpp/v1/upscale"):
            code, body = await call(port, "POST", path, b"")
            assert (code, json.loads(body)) == (400, {"error": "empty body"}), path
        for path, status in ((TXT2IMG, 500), ("/v1/images/generations", 500), (IMG_GEN, 400)):
            assert (await call(port, "POST", path, b"{"))[0] == status, path
        code, body = await call(port, "POST", TXT2IMG, {"prompt": ""})
        assert (code, json.loads(body)) == (400, {"error": "prompt required"})
        assert (await call(port, "POST", "/v1/images/edits", b"{}"))[0] == 400
        assert await call(port, "GET", "/nothing") == (404, b"")
        assert (await call(port, "GET", TXT2IMG))[0] == 404
        assert (await call(port, "OPTIONS", "/anything"))[0] == 204
        assert process.renders == []


@pytest_twisted.ensureDeferred
async def test_looks_answer_while_it_renders() -> None:
    async with running(steps=20_000) as (_, process):
        idle = json.loads((await call(process.port, "GET", "/sdapi/v1/progress"))[1])
        assert idle["progress"] == 0 and idle["state"]["job"] == ""
        start(process.port, "POST", "/%73dapi/v1/txt2img", asked())
        await until(lambda: process.rendering and process.rendering.step > 100)
        busy = json.loads((await call(process.port, "GET", "/sdapi/v1/progress?x=1"))[1])
        assert 0 < busy["progress"] < 1 and busy["state"]["job"] == "txt2img"
        assert busy["state"]["sampling_steps"] == 20_000
        for path in (
            "/v1/models",
            "/",
            "/sdcpp/v1/capabilities",
            *(f"/sdapi/v1/{name}" for name in ("options", "sd-models", "samplers", "schedulers")),
            *(f"/sdapi/v1/{name}" for name in ("loras", "upscalers", "latent-upscale-modes")),
        ):
            assert (await call(process.port, "GET", path))[0] == 200, path
        assert len(process.renders) == 1


@pytest_twisted.ensureDeferred
async def test_one_at_a_time_and_in_vain_for_those_who_left() -> None:
    async with running(steps=5) as (_, process):
        sim = process
        sim.condition_time = 5.0
        gone = start(sim.port, "POST", TXT2IMG, asked())
        await until(lambda: sim.rendering)
        waiting = start(sim.port, "POST", TXT2IMG, asked())
        await until(lambda: len(sim.renders) == 2)
        gone.cancel()
        waiting.cancel()
        await until(lambda: all(r.disconnected_at for r in sim.requests))
        code, _ = await call(sim.port, "POST", TXT2IMG, asked())
        assert code == 200 and len(sim.renders) == 3
        begins = [(render.started, render.ended) for render in sim.renders]
        assert all(begin is not None and end is not None for begin, end in begins)
        for (_, one_ended), (next_began, _) in pairwise(begins):
            assert one_ended <= next_began  # type: ignore[operator]


@pytest_twisted.ensureDeferred
async def test_threads_that_render_for_nobody_are_taken() -> None:
    async with running(steps=5, threads=2) as (_, process):
        process.condition_time = 20.0
        leaving = [start(process.port, "POST", TXT2IMG, asked()) for _ in range(2)]
        await until(lambda: len(process.renders) == 2)
        for d in leaving:
            d.cancel()
        await until(lambda: all(r.disconnected_at for r in process.requests))
        assert (await call(process.port, "GET", "/v1/models"))[0] == 200
        assert process.renders[0].done


@pytest_twisted.ensureDeferred
async def test_jobs() -> None:
    async with running(steps=5) as (_, process):
        process.condition_time = 10.0
        port = process.port
        answers = []
        for path in (IMG_GEN, IMG_GEN, "/sdcpp/v1/vid_gen"):
            code, body = await call(port, "POST", path, asked())
            assert code == 202
            answers.append(json.loads(body))
        first, second, third = answers
        assert first.keys() == {"id", "kind", "status", "created", "poll_url"}
        assert first["status"] == "queued" and third["kind"] == "vid_gen"
        assert first["poll_url"] == f"/sdcpp/v1/jobs/{first['id']}"

        async def look(answer: Any) -> dict[str, Any]:
            code, body = await call(port, "GET", answer["poll_url"])
            assert code == 200
            found: dict[str, Any] = json.loads(body)
            return found

        assert (await look(first))["status"] == "generating"
        waits = await look(third)
        assert (waits["status"], waits["queue_position"]) == ("queued", 2)
        code, body = await call(port, "POST", first["poll_url"] + "/cancel")
        assert code == 409 and "cannot be interrupted" in json.loads(body)["error"]
        code, body = await call(port, "POST", second["poll_url"] + "/cancel")
        assert code == 200 and json.loads(body)["status"] == "cancelled"
        assert (await look(second))["error"]["code"] == "cancelled"
        await until(lambda: process.jobs[first["id"]].completed)
        done = await look(first)
        assert done["status"] == "completed"
        assert base64.b64decode(done["result"]["images"][0]["b64_json"]).startswith(b"\x89PNG")
        process.orders.fail_render = True
        await until(lambda: process.jobs[third["id"]].completed)
        assert (await look(third))["status"] == "failed"
        assert (await call(port, "GET", "/sdcpp/v1/jobs/nothing"))[0] == 404
        assert len(process.renders) == 2


@pytest_twisted.ensureDeferred
async def test_old_jobs_are_expired_then_unknown() -> None:
    clock = Clock()
    process = SdSim(Card(clock), clock, steps=1, load_time=0.5)
    job = process.submit("img_gen")
    process.cancel_job(job)
    clock.advance(600)
    for status in (410, 404):
        with pytest.raises(Exception) as error:
            process.find_job(job.id)
        assert getattr(error.value, "status", None) == status
        clock.advance(600)


@pytest_twisted.ensureDeferred
async def test_a_full_queue_of_jobs() -> None:
    async with running() as (_, process):
        for _ in range(MAX_PENDING):
            process.submit("img_gen", 1000)
        assert (await call(process.port, "POST", IMG_GEN, asked()))[0] == 429


@pytest_twisted.ensureDeferred
async def test_a_rendering_that_fails_leaves_the_server_and_one_that_aborts_does_not() -> None:
    async with running(steps=4) as (host, process):
        process.orders.fail_render = True
        code, body = await call(process.port, "POST", TXT2IMG, asked())
        assert code == 500 and json.loads(body) == {"error": "generate_image returned no results"}
        process.orders.fail_render = False
        process.orders.exit_in_render = True
        cut: list[Any] = []
        drawing = ensureDeferred(call(process.port, "POST", TXT2IMG, asked()))
        drawing.addErrback(cut.append)
        await process.exited()
        assert process.exit_status == -signal.SIGABRT and host.card.used == 0
        await drawing
        assert len(cut) == 1


@pytest_twisted.ensureDeferred
async def test_faults_of_a_process() -> None:
    log: list[str] = []
    async with hosted(load_time=1.0) as host:
        host.sd.faults.crash_loading = 1
        process = host.sd.start(0, say=log.append)
        await process.exited()
        assert process.exit_status == 1 and host.card.used == 0 and process.up_at is None
        assert log[-1].endswith("new_sd_ctx_t failed")
        host.sd.faults.hang_loading = 1
        hangs = host.sd.start(0)
        host.sd.faults.port_delay = 5.0
        host.sd.faults.ignore_sigterm = 1
        slow = host.sd.start(0)
        await until(lambda: slow.state == "up")
        assert slow.up_at is not None and slow.started_at is not None
        assert slow.up_at - slow.started_at >= 6.0 / SPEED
        assert hangs.state == "loading"
        slow.signal(signal.SIGTERM)
        hangs.signal(signal.SIGTERM)
        assert host.sd.alive == [slow]
        slow.signal(signal.SIGKILL)
        assert slow.exit_status == -signal.SIGKILL and host.card.used == 0


@pytest_twisted.ensureDeferred
async def test_a_grandchild_holds_the_card_when_the_server_has_gone() -> None:
    async with hosted() as host:
        host.sd.faults.grandchild = 1
        process = host.sd.start(0)
        await until(lambda: process.state == "up")
        process.signal(signal.SIGKILL)
        assert host.card.residents == {"sd": GIB} and process.grandchild
        process.end_grandchild()
        assert host.card.used == 0


@pytest_twisted.ensureDeferred
async def test_the_driver_may_take_its_time() -> None:
    async with running(release_delay=5.0) as (host, process):
        process.signal(signal.SIGKILL)
        assert process.exit_status is not None and host.card.used == 12 * GIB
        await until(lambda: not host.card.used)
        assert host.card.history[-1][0] - (process.ended_at or 0) >= 5.0 / SPEED


@pytest_twisted.ensureDeferred
async def test_a_full_card_ends_it() -> None:
    async with hosted(on_full="raise") as host:
        host.card.allocate("llamacpp", "model", 6 * GIB)
        process = host.sd.start(0)
        await process.exited()
        assert process.exit_status == 1 and host.card.residents == {"llamacpp": 6 * GIB}
        host.card.release("llamacpp")


@pytest_twisted.ensureDeferred
async def test_a_taken_port_ends_it() -> None:
    async with running() as (host, process):
        second = host.sd.start(process.port)
        await second.exited()
        assert second.exit_status == 1 and host.sd.alive == [process]


def test_what_goes_wrong_is_counted_by_process() -> None:
    clock = Clock()
    fleet = SdFleet(Card(clock), clock)
    fleet.faults.grandchild = 2
    fleet.faults.hang_render = True
    orders = [fleet.faults.orders() for _ in range(3)]
    assert [order.grandchild for order in orders] == [True, True, False]
    assert all(order.hang_render for order in orders)
    fleet.faults.clear()
    assert not fleet.faults.orders().hang_render


# -- as a process ----------------------------------------------------------------------------------


@asynccontextmanager
async def spawned(host: GpuHost, *more: str) -> AsyncIterator[subprocess.Popen[str]]:
    """sd-server as a process group of its own."""
    command = [*host.sd_command, *more]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            yield child
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)


async def ended(child: subprocess.Popen[str]) -> int:
    await until(lambda: child.poll() is not None)
    assert child.returncode is not None
    return child.returncode


@pytest_twisted.ensureDeferred
async def test_a_real_process_holds_memory_as_long_as_it_lives() -> None:
    async with hosted(load_time=5.0) as host, spawned(host, "-m", "x.gguf") as child:
        await until(lambda: host.card.used)
        assert "ignored here: -m x.gguf" in (child.stdout.readline() if child.stdout else "")
        remote = host.cards.processes[0]
        assert remote.state == "loading" and remote.pid == child.pid
        await until(lambda: remote.state == "up")
        code, body = await call(host.sd_port, "POST", TXT2IMG, asked(steps=2))
        assert code == 200 and json.loads(body)["images"]
        await until(lambda: remote.rendered == ["txt2img"])
        assert remote.requests == [("POST", TXT2IMG)] and remote.count(TXT2IMG) == 1
        assert host.card.residents == {"sd": 12 * GIB}
        child.terminate()
        assert await ended(child) == -signal.SIGTERM
        await until(lambda: not host.card.used)
        assert not host.cards.alive
        log = child.stdout.read() if child.stdout else ""
        assert "| 1/2 - " in log and "generate_image completed" in log


@pytest_twisted.ensureDeferred
async def test_a_real_process_that_is_killed_frees_the_card_at_once() -> None:
    async with hosted(steps=100_000, load_time=0.5) as host, spawned(host) as child:
        await until(lambda: host.cards.processes and host.cards.processes[0].state == "up")
        start(host.sd_port, "POST", TXT2IMG, asked())
        await until(lambda: host.cards.processes[0].rendering)
        child.kill()
        assert await ended(child) == -signal.SIGKILL
        await until(lambda: not host.card.used)


@pytest_twisted.ensureDeferred
async def test_the_driver_may_take_its_time_with_a_real_process_too() -> None:
    async with hosted(load_time=0.5, sd_release_delay=20.0) as host, spawned(host) as child:
        await until(lambda: host.cards.processes and host.cards.processes[0].state == "up")
        child.kill()
        await until(lambda: not host.cards.alive)
        assert host.card.used == 12 * GIB
        await until(lambda: not host.card.used)
        (process,) = host.cards.processes
        assert host.card.history[-1][0] - (process.ended or 0.0) >= 20.0 / SPEED


@pytest_twisted.ensureDeferred
async def test_a_real_process_does_what_it_is_told() -> None:
    async with hosted(load_time=0.5, steps=4) as host:
        host.sd.faults.crash_loading = 1
        async with spawned(host) as child:
            assert await ended(child) == 1
            assert child.stdout is not None
            assert child.stdout.read().rstrip().endswith("new_sd_ctx_t failed")
            await until(lambda: not host.cards.alive)
        async with spawned(host, "--exit-in-render") as child:
            await until(lambda: host.cards.alive and host.cards.alive[0].state == "up")
            drawing = start(host.sd_port, "POST", TXT2IMG, asked())
            assert await ended(child) == -signal.SIGABRT
            await drawing
            await until(lambda: not host.cards.alive)
        async with spawned(host) as child:
            await until(lambda: host.cards.alive and host.cards.alive[0].state == "up")
            remote = host.cards.alive[0]
            await remote.order(fail_render=True)
            code, _ = await call(host.sd_port, "POST", TXT2IMG, asked())
            assert code == 500
            remote.exit(3)
            assert await ended(child) == 3
        await until(lambda: not host.card.used)
        assert len(host.cards.processes) == 3


@pytest_twisted.ensureDeferred
async def test_a_real_process_may_ignore_sigterm_and_leave_a_grandchild() -> None:
    async with hosted(load_time=0.5) as host:
        host.sd.faults.grandchild = host.sd.faults.ignore_sigterm = 1
        async with spawned(host) as child:
            await until(lambda: len(host.cards.alive) == 2)
            await until(lambda: host.card.used == 13 * GIB)
            os.killpg(child.pid, signal.SIGTERM)
            child.kill()
            assert await ended(child) == -signal.SIGKILL
            await until(lambda: host.card.residents == {"sd": GIB})
            assert [process.role for process in host.cards.alive] == ["grandchild"]
            os.killpg(child.pid, signal.SIGKILL)
            await until(lambda: not host.card.used)


@pytest_twisted.ensureDeferred
async def test_two_real_processes_share_a_port() -> None:
    async with hosted(load_time=0.5, model_bytes=GIB) as host, spawned(host), spawned(host):
        await until(lambda: [p.state for p in host.cards.processes] == ["up", "up"])
        assert host.card.residents == {"sd": 2 * GIB}


@pytest_twisted.ensureDeferred
async def test_the_card_can_be_asked_from_outside() -> None:
    async with hosted() as host:
        host.card.allocate("sd", "x", 3 * GIB)
        command = [sys.executable, "-m", "turnstile.sim.card_server", host.cards.address]
        answer = await deferToThread(subprocess.check_output, command)
        assert answer.split() == [b"%d" % (3 * GIB), b"%d" % (16 * GIB)]
        host.card.release("sd")


@pytest_twisted.ensureDeferred
async def test_a_real_process_ends_with_the_card() -> None:
    async with hosted(load_time=0.5) as host, spawned(host) as child:
        await until(lambda: host.cards.alive)
        await host.cards.stop()
        assert await ended(child) == 0
