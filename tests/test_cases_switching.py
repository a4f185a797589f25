"""Switching the card between chats and image jobs: the cases of the field and the promises of the configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_twisted
import websockets
from system_kit import System, chat_body, in_loop, pieces, reactor, running, tick, until
from twisted.internet.defer import DeferredList

from turnstile.engines import comfy_watch
from turnstile.sim import GIB, GpuHost
from turnstile.sim.graphs import image_graph, sleep_graph

MIB = 1 << 20


def outcomes(s: System) -> list[str]:
    """How the jobs ended, the oldest first."""
    assert s.service.comfy is not None
    return [job["outcome"] for job in s.service.comfy.snapshot()["last_jobs"]]


async def our_job_pending(s: System) -> tuple[str, str]:
    """A long job that was queued directly at ComfyUI, and one of ours behind it."""
    theirs = s.host.comfy.submit(sleep_graph(10_000))
    await until(lambda: s.host.comfy.running is not None)
    ours = await s.queue(sleep_graph(10_000))
    assert [job.id for job in s.host.comfy.pending] == [ours]
    assert s.service.comfy is not None
    await until(lambda: _job(s) is not None and _job(s).prompt_id == ours)
    return theirs, ours


def _job(s: System) -> Any:
    assert s.service.comfy is not None
    return s.service.comfy.job


# -- a user cancels


@pytest.mark.parametrize("how", ["delete", "clear"])
@pytest_twisted.ensureDeferred
async def test_deleting_a_pending_job_ends_its_lease(how: str) -> None:
    async with running() as s:
        theirs, ours = await our_job_pending(s)
        began = reactor.seconds()
        body: dict[str, Any] = {"delete": [ours]} if how == "delete" else {"clear": True}
        assert (await s.request("POST", "/queue", body, "comfyui")).status == 200
        await until(lambda: "deleted" in outcomes(s), seconds=2.0)
        assert reactor.seconds() - began < 2.0
        # The other one still runs, and has the card.
        state = await s.state()
        assert state["engines"]["comfyui"]["foreign"] == [theirs]
        chat = s.chat()
        await s.until_waiting(llm=1)
        await s.request("POST", "/interrupt", {"prompt_id": theirs}, "comfyui")
        assert (await chat).status == 200


@pytest_twisted.ensureDeferred
async def test_a_chat_that_waits_for_a_deleted_job_is_answered() -> None:
    async with running() as s:
        first = await s.queue(sleep_graph(10_000))
        await until(lambda: s.host.comfy.running is not None)
        chat = s.chat()
        await s.until_waiting(llm=1)
        await s.request("POST", "/interrupt", {"prompt_id": first}, "comfyui")
        began = reactor.seconds()
        assert (await chat).status == 200
        assert reactor.seconds() - began < 2.0
        assert outcomes(s) == ["interrupted"]


@pytest_twisted.ensureDeferred
async def test_interrupting_a_running_job_ends_its_lease() -> None:
    async with running() as s:
        theirs, ours = await our_job_pending(s)
        await s.request("POST", "/interrupt", {"prompt_id": theirs}, "comfyui")
        await until(lambda: s.host.comfy.jobs[ours].status == "running")
        began = reactor.seconds()
        await s.request("POST", "/interrupt", {}, "comfyui")
        await s.idle()
        assert reactor.seconds() - began < 2.0
        assert outcomes(s)[-1] == "interrupted"


@pytest_twisted.ensureDeferred
async def test_a_waiting_client_that_is_reset_is_noticed_though_its_body_is_unread() -> None:
    async with running() as s:
        await s.queue(sleep_graph(10_000))
        wire = await s.wire("ollama")
        head = f"POST /api/chat HTTP/1.1\r\nHost: x\r\nContent-Length: {50 * MIB}\r\n\r\n"
        wire.send(head.encode() + bytes(50 * MIB))
        await s.until_waiting(llm=1)
        await tick(0.2)
        (waiter,) = (await s.state())["waiting"]["llm"]
        assert waiter["label"] == "POST /api/chat"
        gone = reactor.seconds()
        wire.reset()
        while (await s.state())["waiting"]["llm"]:
            assert reactor.seconds() - gone < 2.0
            await tick(0.02)
        await s.request("POST", "/interrupt", {}, "comfyui")


# -- jobs of others


@pytest_twisted.ensureDeferred
async def test_a_comfyui_that_is_busy_at_the_start_is_adopted() -> None:
    def before(host: GpuHost) -> None:
        host.comfy.submit(image_graph(steps=60))

    async with running(before=before) as s:
        chat = s.chat()
        state = await s.state()
        assert (state["state"], state["leases"][0]["label"]) == ("image", "foreign job")
        assert state["job"]["foreign"] is True
        assert (await chat).status == 200
        (record,) = s.host.ollama.requests_for("POST", "/api/chat")
        assert record.time > s.host.comfy.frees[0]
        assert await s.metric("job_outcomes_total", outcome="foreign") == 1
        assert await s.metric("image_jobs_total") == 0


@pytest_twisted.ensureDeferred
async def test_a_job_queued_directly_is_adopted_at_any_time() -> None:
    async with running() as s:
        await tick(0.05)
        job_id = s.host.comfy.submit(image_graph(steps=40))
        await until(lambda: s.arbiter.state == "image", seconds=1.0)
        assert (await s.chat()).status == 200
        (record,) = s.host.ollama.requests_for("POST", "/api/chat")
        assert record.time > s.host.comfy.jobs[job_id].ended
        # Every phase is told, with its id even once the queue does not know that any more.
        for phase in ("running", "foreign after", "ComfyUI freed"):
            assert len(s.said(f"image job {job_id}: {phase}")) == 1, phase


@pytest_twisted.ensureDeferred
async def test_a_job_queued_directly_beside_a_chat_is_on_record() -> None:
    async with running(overlaps="any") as s:
        chat = s.chat(60)
        await until(lambda: s.host.ollama.active_generations)
        began = reactor.seconds()
        s.host.comfy.submit(image_graph(steps=40))
        await until(lambda: s.card.degraded, seconds=1.0)
        assert (await chat).status == 200
        assert s.arbiter.state == "image" or await until(lambda: s.arbiter.state == "image")
        await s.idle()
        await until(lambda: not s.card.degraded)
        # Nothing can be done about the moment before turnstile heard of it.
        assert all(lap.start >= began for lap in s.host.card.overlaps)
        assert s.host.ollama.resident == {}


@pytest_twisted.ensureDeferred
async def test_a_job_of_ours_joins_those_of_others_without_a_free_between() -> None:
    async with running() as s:
        s.host.comfy.submit(image_graph(steps=40))
        await until(lambda: s.arbiter.state == "image")
        ours = await s.queue(image_graph())
        assert (await s.chat()).status == 200
        assert s.host.comfy.jobs[ours].status == "success"
        assert len(s.host.comfy.frees) == 1


# -- hand-over


@pytest_twisted.ensureDeferred
async def test_image_jobs_hand_the_card_over() -> None:
    async with running() as s:
        await s.chat()
        jobs = []
        resume = s.arbiter.hold()
        for count in range(1, 5):
            # One after the other, since connections made together are accepted in any order.
            jobs.append(s.prompt(image_graph(steps=8)))
            await s.until_waiting(image=count)
        resume()
        answers = [answer for _, answer in await DeferredList(jobs)]
        assert [answer.status for answer in answers] == [200] * 4
        chat = s.chat()
        assert (await chat).status == 200
        assert len(s.host.comfy.requests_for("POST", "/free")) == 1
        assert len(s.host.ollama.unloads) == 1
        assert await s.metric("handovers_total") == 3
        assert await s.metric("image_jobs_total") == 4
        # First come, first served.
        started = [s.host.comfy.jobs[answer.json()["prompt_id"]].started for answer in answers]
        assert started == sorted(started)


@pytest_twisted.ensureDeferred
async def test_free_between_jobs_frees_between_jobs() -> None:
    async with running(free_between_jobs=True) as s:
        jobs = [s.prompt() for _ in range(3)]
        await DeferredList(jobs)
        await s.idle()
        assert len(s.host.comfy.frees) == 3
        assert await s.metric("handovers_total") == 0


@pytest_twisted.ensureDeferred
async def test_a_next_job_that_leaves_after_the_hand_over_leaves_nothing_behind() -> None:
    async with running() as s:
        await s.queue()
        wire = await s.wire("comfyui")
        # Its body never comes whole, and then it goes away.
        wire.send(b"POST /prompt HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        await s.until_waiting(image=1)
        await until(lambda: s.waiting()["image"] == 0)
        await tick(0.05)
        wire.reset()
        await s.idle()
        await until(lambda: s.host.card.used == 0)
        assert (await s.chat()).status == 200


# -- warm-up


@pytest_twisted.ensureDeferred
async def test_the_warm_model_is_loaded_after_the_last_image_job() -> None:
    async with running(warm_model="llama3.2") as s:
        await s.queue()
        await until(lambda: s.host.ollama.resident.get("llama3.2:latest") == "ready")
        (record,) = s.host.ollama.requests_for("POST", "/api/generate")
        assert record.json()["keep_alive"] == -1
        assert record.time > s.host.comfy.frees[-1]
        assert (await s.chat()).status == 200
        assert len(s.host.ollama.loads) == 1


@pytest_twisted.ensureDeferred
async def test_a_warm_up_gives_way_to_an_image_job() -> None:
    async with running(warm_model="big:70b", ollama_options={"load_time": 200.0}) as s:
        await s.queue()
        await until(lambda: s.host.ollama.loads)
        began = reactor.seconds()
        assert (await s.prompt()).status == 200
        assert reactor.seconds() - began < 4.0
        s.service._warmer.stop()  # type: ignore[union-attr]


@pytest_twisted.ensureDeferred
async def test_without_a_pause_between_jobs_nothing_is_warmed_up() -> None:
    async with running(warm_model="llama3.2") as s:
        await s.queue()
        chat = s.chat(model="qwen3:8b")
        assert (await chat).status == 200
        assert [name for _, name in s.host.ollama.loads] == ["qwen3:8b"]


# -- busy modes


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
@pytest_twisted.ensureDeferred
async def test_a_chat_that_waits_too_long_is_told_so(path: str) -> None:
    async with running(llm_wait_timeout=0.2, busy_retry_after=11) as s:
        await s.queue(sleep_graph(10_000))
        answer = await s.request("POST", path, chat_body())
        assert (answer.status, answer.headers["retry-after"]) == (503, "11")
        assert answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        if path.startswith("/v1"):
            assert set(error) >= {"message", "type", "param", "code"}
            error = error["message"]
        assert "comfyui" in error
        assert s.said("left the waiting line: timeout")
        assert await s.metric("abandoned_total", kind="llm", why="timeout") == 1
        await s.request("POST", "/interrupt", {}, "comfyui")


@pytest.mark.parametrize("status", [503, 429])
@pytest_twisted.ensureDeferred
async def test_in_reject_mode_a_busy_card_is_told_at_once(status: int) -> None:
    async with running(llm_busy_mode="reject", llm_busy_status=status, busy_retry_after=5) as s:
        assert (await s.chat()).status == 200
        await s.queue(sleep_graph(10_000))
        answer = await s.chat()
        assert (answer.status, answer.headers["retry-after"]) == (status, "5")
        openai = await s.request("POST", "/v1/completions", {"model": "llama3.2", "prompt": "x"})
        assert openai.status == status and openai.json()["error"]["message"]
        # What needs no card is answered, and image jobs still wait.
        assert (await s.request("GET", "/api/tags")).status == 200
        job = s.prompt()
        await s.until_waiting(image=1)
        await s.request("POST", "/interrupt", {}, "comfyui")
        assert (await job).status == 200


@pytest_twisted.ensureDeferred
async def test_an_unload_needs_no_card() -> None:
    async with running(llm_busy_mode="reject") as s:
        await s.queue(sleep_graph(10_000))
        body = {"model": "llama3.2", "keep_alive": 0}
        answer = await s.request("POST", "/api/generate", body)
        assert (answer.status, answer.json()["done_reason"]) == (200, "unload")
        # What loads a model, or might, does.
        for body in ({"model": "llama3.2"}, {"model": "llama3.2", "keep_alive": 0, "prompt": "x"}):
            assert (await s.request("POST", "/api/generate", body)).status == 503
        assert (await s.request("POST", "/api/something/new", {})).status == 503
        await s.request("POST", "/interrupt", {}, "comfyui")
        assert s.host.ollama.loads == []


@pytest_twisted.ensureDeferred
async def test_a_waiting_image_job_stops_new_chats() -> None:
    async with running() as s:
        first = s.chat(100)
        await until(lambda: s.host.ollama.active_generations)
        job = s.prompt()
        await s.until_waiting(image=1)
        second = s.chat(1)
        await s.until_waiting(image=1, llm=1)
        assert (await s.request("GET", "/healthz")).json() == {
            "state": "llm",
            "llm_inflight": 1,
            "image_pending": True,
        }
        await DeferredList([first, job, second])
        posted = s.host.comfy.requests_for("POST", "/prompt")[0].time
        chats = [record.time for record in s.host.ollama.requests_for("POST", "/api/chat")]
        assert chats[0] < posted < chats[1]


@pytest_twisted.ensureDeferred
async def test_image_burst_gives_waiting_chats_a_turn() -> None:
    async with running(image_burst=2) as s:
        jobs = [s.prompt(sleep_graph(2))]
        await until(lambda: s.arbiter.state == "image")
        chat = s.chat()
        await s.until_waiting(llm=1)
        jobs += [s.prompt(sleep_graph(2)) for _ in range(4)]
        await s.until_waiting(llm=1, image=4)
        await DeferredList([*jobs, chat])
        posted = [record.time for record in s.host.comfy.requests_for("POST", "/prompt")]
        (record,) = s.host.ollama.requests_for("POST", "/api/chat")
        assert sum(at < record.time for at in posted) == 2


@pytest_twisted.ensureDeferred
async def test_without_image_burst_images_go_first() -> None:
    async with running() as s:
        jobs = [s.prompt(sleep_graph(2))]
        await until(lambda: s.arbiter.state == "image")
        chat = s.chat()
        await s.until_waiting(llm=1)
        jobs += [s.prompt(sleep_graph(2)) for _ in range(4)]
        await DeferredList([*jobs, chat])
        posted = [record.time for record in s.host.comfy.requests_for("POST", "/prompt")]
        (record,) = s.host.ollama.requests_for("POST", "/api/chat")
        assert sum(at < record.time for at in posted) == 5


# -- one engine only


@pytest_twisted.ensureDeferred
async def test_only_ollama() -> None:
    async with running(comfy=False) as s:
        assert set(s.service.ports) == {"ollama"}
        answers = [answer for _, answer in await DeferredList([s.chat() for _ in range(3)])]
        assert [answer.status for answer in answers] == [200] * 3
        assert (await s.request("GET", "/healthz")).json()["state"] == "idle"
        assert s.host.ollama.requests_for("POST", "/api/generate") == []


@pytest_twisted.ensureDeferred
async def test_only_comfyui() -> None:
    async with running(ollama=False, warm_model="llama3.2") as s:
        assert set(s.service.ports) == {"comfyui"}
        await s.queue()
        await s.idle()
        assert len(s.host.comfy.frees) == 1
        assert (await s.request("GET", "/healthz", to="comfyui")).json()["state"] == "idle"
        assert s.host.ollama.requests_seen == 0


# -- engines that misbehave


@pytest.mark.parametrize("action", ["release", "interrupt"])
@pytest_twisted.ensureDeferred
async def test_job_timeout_ends_the_lease(action: str) -> None:
    async with running(
        job_timeout=0.4, job_timeout_action=action, free_timeout=0.5, overlaps="degraded"
    ) as s:
        prompt_id = await s.queue(sleep_graph(10_000))
        assert (await s.chat()).status == 200
        assert outcomes(s) == ["timeout"]
        assert s.said("timeout after")
        job = s.host.comfy.jobs[prompt_id]
        if action == "interrupt":
            await until(lambda: job.status == "interrupted")
        else:
            assert job.status == "running"
            assert {interval.culprit for interval in s.card.degraded} == {"comfyui"}
            assert s.host.comfy.requests_for("POST", "/interrupt") == []
            s.host.comfy.interrupt(None)
        await until(lambda: not s.card.degraded)


@pytest_twisted.ensureDeferred
async def test_job_timeout_counts_from_the_last_sign_of_progress() -> None:
    async with running(job_timeout=0.4) as s:
        url = f"ws://127.0.0.1:{s.port('comfyui')}/ws?clientId=me"

        async def client() -> None:
            async with websockets.connect(url) as ws:
                async for message in ws:
                    if isinstance(message, str) and '"execution_success"' in message:
                        return

        done = in_loop(client)
        await until(lambda: "me" in s.host.comfy.sockets)
        # About a second, in steps of 20 ms.
        await s.queue(image_graph(steps=50, step_time=0.5), client_id="me")
        await done
        await s.idle()
        assert outcomes(s) == ["success"]


@pytest_twisted.ensureDeferred
async def test_a_comfyui_that_dies_in_a_job_gives_the_card_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comfy_watch, "GONE_AFTER", 0.3)
    async with running(overlaps="degraded") as s:
        await s.queue(image_graph(steps=10_000))
        await until(lambda: s.host.card.used_by("comfyui") > GIB)
        await s.host.comfy.kill()
        chat = s.chat()
        assert (await chat).status == 200
        assert outcomes(s) == ["lost"]
        assert s.host.card.overlaps == []
        # And when it comes back it serves.
        s.host.comfy.start_listening()
        s.host.comfy.boot()
        assert (await s.prompt()).status == 200


@pytest_twisted.ensureDeferred
async def test_a_prompt_whose_answer_never_comes_is_looked_for() -> None:
    async with running() as s:
        s.host.comfy.faults.drop("POST /prompt", times=1, after=0)
        answer = await _or_error(s.prompt())
        assert answer is None or answer.status == 502
        await s.idle()
        assert outcomes(s) == ["success"]
        assert (await s.chat()).status == 200


async def _or_error(d: Any) -> Any:
    try:
        return await d
    except Exception:
        return None


@pytest_twisted.ensureDeferred
async def test_a_client_that_leaves_after_its_prompt_was_sent_does_not_lose_track_of_the_job() -> (
    None
):
    async with running() as s:
        s.host.comfy.faults.delay(10, "POST /prompt", times=1)
        wire = await s.wire("comfyui")
        wire.send_request("POST", "/prompt", {"prompt": image_graph()})
        await until(lambda: s.host.comfy.requests_for("POST", "/prompt"))
        wire.reset()
        await until(lambda: s.host.comfy.jobs)
        assert (await s.chat()).status == 200
        assert outcomes(s) == ["success"]


@pytest_twisted.ensureDeferred
async def test_an_ollama_that_restarts_serves_on() -> None:
    async with running() as s:
        assert (await s.chat()).status == 200
        await s.host.ollama.restart(downtime=5)
        assert (await s.chat()).status == 200
        assert (await s.prompt()).status == 200
        assert (await s.chat()).status == 200


@pytest_twisted.ensureDeferred
async def test_a_chat_while_ollama_is_down_holds_nothing() -> None:
    async with running() as s:
        await s.host.ollama.kill()
        chat = s.chat()
        await until(lambda: s.said("ollama not reached"))
        assert (await s.prompt(image_graph())).status == 200
        await s.idle()
        s.host.ollama.start_listening()
        s.host.ollama.boot()
        assert (await chat).status == 200


@pytest_twisted.ensureDeferred
async def test_an_image_job_does_not_wait_for_a_dead_ollama() -> None:
    async with running() as s:
        await s.chat()
        await s.host.ollama.kill()
        began = reactor.seconds()
        assert (await s.prompt()).status == 200
        assert reactor.seconds() - began < 3.0


@pytest_twisted.ensureDeferred
async def test_an_ollama_that_hangs_costs_its_time_out_once() -> None:
    async with running(overlaps="degraded", unload_timeout=0.5) as s:
        await s.chat()
        rule = s.host.ollama.faults.hang("/api/ps")
        for _ in range(3):
            assert (await s.prompt()).status == 200
            await s.idle()
        assert len(s.said("Ollama did not unload within")) == 1
        assert {interval.culprit for interval in s.card.degraded} == {"ollama"}
        rule.cancel()


@pytest_twisted.ensureDeferred
async def test_garbage_from_an_engine_is_no_evidence() -> None:
    async with running() as s:
        await s.chat()
        s.host.ollama.faults.garbage("/api/ps", times=3)
        assert (await s.prompt()).status == 200
        s.host.comfy.faults.garbage("/queue", times=3)
        s.host.comfy.faults.garbage("/history/*", times=3)
        s.host.comfy.faults.status(500, "/system_stats", times=3)
        assert (await s.chat()).status == 200


@pytest_twisted.ensureDeferred
async def test_a_model_that_comes_back_is_unloaded_again() -> None:
    async with running(overlaps="degraded") as s:
        await s.chat()
        s.host.ollama.faults.reappear = 1
        assert (await s.prompt()).status == 200
        await s.idle()


# -- starting


@pytest_twisted.ensureDeferred
async def test_nothing_is_granted_before_each_engine_was_looked_at() -> None:
    def before(host: GpuHost) -> None:
        host.comfy.faults.hang("/system_stats", times=1)

    async with running(before=before, ready=False, probe_timeout=0.5) as s:
        chat = s.chat()
        await s.until_waiting(llm=1)
        state = await s.state()
        assert state["held"] is True
        # What needs no card is answered.
        assert (await s.request("GET", "/api/tags")).status == 200
        began = reactor.seconds()
        assert (await chat).status == 200
        assert reactor.seconds() - began < 2.0
        assert s.said("ComfyUI does not answer")


@pytest_twisted.ensureDeferred
async def test_an_engine_that_is_down_at_the_start_is_no_reason_not_to_start() -> None:
    async with running(before=lambda host: host.comfy.stop_listening()) as s:
        assert s.said("ComfyUI does not answer")
        assert (await s.chat()).status == 200
        s.host.comfy.start_listening()
        assert (await s.prompt()).status == 200


# -- the answers themselves


@pytest_twisted.ensureDeferred
async def test_a_stream_arrives_word_by_word() -> None:
    async with running(speed=5.0) as s:
        wire = await s.wire()
        body = {**chat_body(20), "stream": True, "max_tokens": 20}
        wire.send_request("POST", "/v1/chat/completions", body)
        await wire.until(b"[DONE]")
        payload = bytes(wire.received).partition(b"\r\n\r\n")[2]
        assert b"data: " in payload
        assert len(wire.arrivals) > 10
        assert wire.arrivals[-1] - wire.arrivals[1] > 0.03
        assert wire.received.lower().count(b"x-accel-buffering: no") == 1


@pytest_twisted.ensureDeferred
async def test_sse_of_a_chat_is_complete() -> None:
    async with running() as s:
        body = {**chat_body(4), "stream": True, "max_tokens": 4}
        answer = await s.request("POST", "/v1/chat/completions", body)
        words = [json.loads(data) for data in pieces(answer.body) if data != b"[DONE]"]
        assert sum(bool(word["choices"][0]["delta"].get("content")) for word in words) == 4
