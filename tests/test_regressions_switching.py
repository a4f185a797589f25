"""Mistakes that random schedules found, each as one short story."""

from __future__ import annotations

from typing import Any

from schedule_kit import Leave, System, check_overlaps
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectingCancelledError
from twisted.internet.task import Clock

from turnstile.proxy.retry import RetryPolicy, connect_with_backoff
from turnstile.sim.graphs import image_graph, nested_graph


def test_an_endpoint_that_is_cancelled_is_not_tried_again() -> None:
    # Endpoints fail with ConnectingCancelledError, which is no CancelledError: it was taken for one more failure, and
    # the WebSocket of a page that had been closed meanwhile was connected for, again and again, for ever.
    clock = Clock()
    attempts: list[Deferred[Any]] = []

    def connect() -> Deferred[Any]:
        d: Deferred[Any] = Deferred(lambda d: d.errback(ConnectingCancelledError("address")))
        attempts.append(d)
        return d

    result = connect_with_backoff(clock, RetryPolicy(), lambda: 0.0, connect, lambda f, wait: None)
    ended: list[Any] = []
    result.addErrback(ended.append)
    result.cancel()
    assert ended[0].check(CancelledError)
    assert clock.getDelayedCalls() == []
    clock.pump([60.0] * 5)
    assert len(attempts) == 1


def test_a_prompt_that_comfyui_never_answers_keeps_the_card_for_job_timeout_at_most() -> None:
    # JOB_TIMEOUT did not run before the answer: a hung POST /prompt, whose caller had gone, held the card for ever.
    system = System(1, {"job_timeout": 60.0})
    with system.running():
        system.host.comfy.faults.hang("POST /prompt", 1)
        system.ask(
            "comfyui", "POST", "/prompt", {"prompt": image_graph()}, Leave("sent", 1.0, True)
        )
        system.world.pass_time(50.0)
        assert system.service.arbiter.state == "image"
        chat = system.ask("ollama", "POST", "/api/generate", {"model": "llama3.2", "prompt": "why"})
        assert system.world.wait(chat, 15.0).status == 200
        assert system.world.seconds() < 1000.0 + 65.0
        assert {d.culprit for d in system.degraded} == {"comfyui"}
        assert system.unrest() == []
        assert system.stop() == []


def test_a_simulated_generation_ends_when_its_answer_is_cut() -> None:
    # The fault cut the connection from inside the handler, which could not be cancelled there and went on to its end.
    system = System(1)
    with system.running():
        ollama = system.host.ollama
        ollama.faults.drop("POST /api/generate", 1, after=20)
        body = {"model": "llama3.2", "prompt": "why", "options": {"num_predict": 1000}}
        answer = system.world.wait(system.ask("ollama", "POST", "/api/generate", body))
        assert (answer.status, answer.complete) == (200, False)
        system.world.pass_time(0.1)
        assert ollama.active_generations == 0
        assert system.stop() == []


def test_a_failed_look_at_the_queue_is_repeated_when_an_event_told_of_a_job() -> None:
    # With no job of its own to watch, turnstile waited for the next event, and a job queued behind its back was unseen.
    system = System(1)
    with system.running():
        comfy = system.host.comfy
        comfy.faults.status(500, "/queue", 2)
        comfy.submit(image_graph(steps=4, step_time=1.0))
        system.world.pass_time(2.0)
        assert system.service.arbiter.state == "image"
        assert system.stop() == []


def test_models_of_a_job_that_only_an_event_told_of_are_evicted_before_a_chat() -> None:
    # The look at the queue hung until that job was over: ComfyUI was taken for empty, and a chat loaded beside it.
    system = System(1)
    with system.running():
        comfy = system.host.comfy
        hang = comfy.faults.hang("/queue", 1)
        comfy.submit(image_graph(steps=1))
        system.world.pass_time(3.0)
        assert hang.hits == 1 and comfy.remaining == 0 and system.host.card.used_by("comfyui")
        chat = system.ask("ollama", "POST", "/api/generate", {"model": "llama3.2", "prompt": "why"})
        assert system.world.wait(chat).status == 200
        assert check_overlaps(system) == []
        assert system.stop() == []


def test_a_refused_prompt_does_not_hide_what_another_job_loaded_meanwhile() -> None:
    # ComfyUI was taken to be as empty as before the refused prompt was posted, though another job had run beside it.
    system = System(1)
    with system.running():
        comfy = system.host.comfy
        body = {"prompt": {"1": {"class_type": "Missing"}}}
        image = system.ask("comfyui", "POST", "/prompt", body, pause=5.0)
        system.world.pass_time(1.0)
        comfy.submit(image_graph(steps=1))
        assert system.world.wait(image).status == 400
        assert comfy.remaining == 0
        chat = system.ask("ollama", "POST", "/api/generate", {"model": "llama3.2", "prompt": "why"})
        assert system.world.wait(chat).status == 200
        assert system.host.card.overlaps == []
        assert system.stop() == []


def test_a_nested_call_that_hangs_does_not_keep_later_jobs_from_ending() -> None:
    # The end of each job waited for the call of the first, which JOB_TIMEOUT had ended long before; without any limit.
    system = System(1, {"listen_ollama_nested": "tcp:0:interface=127.0.0.1", "job_timeout": 60.0})
    with system.running():
        system.host.ollama.faults.hang("POST /api/generate", 1)
        url = f"http://127.0.0.1:{system.port('ollama-nested')}/api/generate"
        call = {"model": "llama3.2", "prompt": "why"}
        system.ask("comfyui", "POST", "/prompt", {"prompt": nested_graph(url, call)})
        system.world.pass_time(70.0)
        assert system.service.arbiter.leases == frozenset()
        refused = {"prompt": {"1": {"class_type": "Missing"}}}
        assert system.world.wait(system.ask("comfyui", "POST", "/prompt", refused)).status == 400
        system.world.pass_time(15.0)
        assert system.service.arbiter.leases == frozenset()
        system.stop()


def test_a_refused_prompt_does_not_vouch_for_a_comfyui_that_could_not_be_freed() -> None:
    # It refused connections when it was to be freed and so counted as empty; the refused prompt then confirmed that.
    system = System(1)
    with system.running():
        comfy = system.host.comfy
        good, bad = {"prompt": image_graph(steps=1)}, {"prompt": {"1": {"class_type": "Missing"}}}
        assert system.world.wait(system.ask("comfyui", "POST", "/prompt", good)).status == 200
        system.world.pass_time(0.5)
        system.world.wait(comfy.stop_listening())
        comfy.drop_connections()
        system.world.pass_time(15.0)
        assert (
            system.service.card.resident == frozenset()
            and system.service.arbiter.leases == frozenset()
        )
        comfy.start_listening()
        assert system.world.wait(system.ask("comfyui", "POST", "/prompt", bad)).status == 400
        chat = system.ask("ollama", "POST", "/api/generate", {"model": "llama3.2", "prompt": "why"})
        assert system.world.wait(chat).status == 200
        assert system.host.card.overlaps == []
        assert system.stop() == []


def test_a_prompt_that_is_queued_after_its_lease_ended_is_covered_and_adopted() -> None:
    # Freeing ComfyUI ended all doubt about it, though the prompt was still on its way: its job began beside a chat.
    system = System(1, {"job_timeout": 60.0})
    with system.running():
        system.host.comfy.faults.delay(70.0, "POST /prompt", 1)
        image = system.ask(
            "comfyui", "POST", "/prompt", {"prompt": image_graph(steps=20, step_time=1.0)}
        )
        system.world.pass_time(65.0)
        options = {"num_predict": 400}
        body = {"model": "llama3.2", "prompt": "why", "options": options}
        chat = system.ask("ollama", "POST", "/api/generate", body)
        assert system.world.wait(image).status == 200
        assert system.host.card.overlaps
        assert system.world.wait(chat).status == 200
        system.world.pass_time(1.0)
        assert [lease.label for lease in system.service.arbiter.leases] == ["foreign job"]
        system.world.pass_time(30.0)
        assert check_overlaps(system) == []
        assert system.service.card.degraded == () and system.unrest() == []
        assert system.stop() == []


def test_a_nested_call_that_outlives_its_job_is_covered() -> None:
    # Ollama was confirmed to be empty while a call that had been given up waited in it, to load its model later.
    system = System(1, {"listen_ollama_nested": "tcp:0:interface=127.0.0.1", "job_timeout": 30.0})
    with system.running():
        system.host.ollama.faults.delay(70.0, "POST /api/generate", 1)
        good = {"prompt": image_graph(steps=20, step_time=1.0)}
        assert system.world.wait(system.ask("comfyui", "POST", "/prompt", good)).status == 200
        call = {"model": "llama3.2", "prompt": "why"}
        nested = system.ask("ollama-nested", "POST", "/api/generate", call)
        system.world.pass_time(64.0)
        assert system.world.wait(system.ask("comfyui", "POST", "/prompt", good), 30.0).status == 200
        assert system.world.wait(nested).status == 200
        assert system.host.card.overlaps
        system.world.pass_time(60.0)
        assert check_overlaps(system) == []
        assert system.service.card.degraded == () and system.unrest() == []
        assert system.stop() == []
