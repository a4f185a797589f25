"""Mistakes that random schedules of llama.cpp and sd-server brought to light, each as one short story."""

from __future__ import annotations

import json

from schedule_clients import unchunk
from schedule_kit import System


def test_a_queued_job_that_is_cancelled_says_nothing_of_the_one_before_it() -> None:
    # The one before it had been given up after JOB_TIMEOUT and went on; with the second one's end the doubt about it
    # was over, and a chat stopped sd-server in the middle of its work as if nothing were wrong.
    system = System(1, {"job_timeout": 5.0}, engines=("llamacpp", "sd"))
    with system.running():
        world, card = system.world, system.service.card
        system.host.sd.faults.hang_render = 1
        body = {"prompt": "a lock"}
        posted = world.wait(system.ask("sd", "POST", "/sdcpp/v1/img_gen", body))
        assert posted.status == 202
        world.until(lambda: card.degraded, 60.0)
        (process,) = system.host.sd.alive
        assert [job.status for job in process.jobs.values()] == ["generating"]
        posted = world.wait(system.ask("sd", "POST", "/sdcpp/v1/img_gen", body))
        url = json.loads(unchunk(posted.body))["poll_url"]
        cancelled = world.wait(system.ask("sd", "POST", url + "/cancel"))
        assert cancelled.status == 200
        world.until(lambda: not system.service.arbiter.leases, 5.0)
        assert card.degraded
        chat = system.ask("llamacpp", "POST", "/completion", {"model": "qwen3-8b", "prompt": "why"})
        assert world.wait(chat, 60.0).status == 200
        # With its process the doubt is gone.
        assert not card.degraded and not system.host.sd.alive
        assert system.failures == [] and system.stop() == []


def test_a_job_that_is_answered_for_too_late_is_still_to_come() -> None:
    # Its POST was given up after JOB_TIMEOUT, the next job came and went, and with that the doubt; then sd-server took
    # the first one after all, and a chat stopped it in the middle of that.
    system = System(1, {"job_timeout": 5.0}, engines=("llamacpp", "sd"))
    with system.running():
        world, card, fleet = system.world, system.service.card, system.host.sd
        fleet.faults.delay(7.0, "POST /sdcpp/v1/img_gen", 1)
        body = {"prompt": "a lock", "sample_params": {"sample_steps": 20}}
        late = system.ask("sd", "POST", "/sdcpp/v1/img_gen", body)
        world.until(lambda: card.degraded, 60.0)
        next_one = world.wait(system.ask("sd", "POST", "/sdcpp/v1/vid_gen", {"prompt": "a lock"}))
        assert next_one.status == 202
        world.until(lambda: not system.service.arbiter.leases, 10.0)
        assert world.wait(late).status == 202
        (process,) = fleet.alive
        assert "generating" in {job.status for job in process.jobs.values()}
        assert card.degraded
        chat = system.ask("llamacpp", "POST", "/completion", {"model": "qwen3-8b", "prompt": "why"})
        assert world.wait(chat, 60.0).status == 200
        assert not card.degraded and not fleet.alive
        assert system.failures == [] and system.stop() == []
