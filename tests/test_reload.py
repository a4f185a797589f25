"""SIGHUP: what changes at once, what waits for a start, and that every consumer sees the new values."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import attrs
import pytest
import pytest_twisted
from process_kit import ask, listening, notify_socket, twistd
from system_kit import running, until
from twisted.logger import formatEvent, globalLogPublisher

from turnstile import config
from turnstile import log as tlog
from turnstile.config import SETTINGS, Config, ConfigError, Upstream
from turnstile.engines import comfy_events
from turnstile.reload import FIXED, LIVE, Change, Reloader, compare, merge
from turnstile.sim.graphs import sleep_graph

OLLAMA = Upstream.parse("http://a")


def test_every_setting_is_live_or_fixed() -> None:
    """A new setting has to be put into one of the two sets, and the live ones have to be applied."""
    assert LIVE.isdisjoint(FIXED)
    assert {setting.field for setting in SETTINGS} == LIVE | FIXED


def test_what_changed() -> None:
    before = Config(ollama_url=OLLAMA)
    assert compare(before, before) == ([], [])
    after = attrs.evolve(
        before,
        job_timeout=90.0,
        warm_model="m",
        ollama_url=Upstream.parse("http://b"),
        listen_ollama="tcp:1",
        sources={"job_timeout": "f:3", "ollama_url": "f:1"},
    )
    live, later = compare(before, after)
    assert live == [
        Change("job_timeout", "JOB_TIMEOUT", "15m", "1m30s", "f:3"),
        Change("warm_model", "WARM_MODEL", "", "m", "default"),
    ]
    assert [str(change) for change in later] == [
        "OLLAMA_URL: http://a -> http://b (f:1)",
        "LISTEN_OLLAMA: tcp:11434 -> tcp:1 (default)",
    ]
    assert str(live[1]) == "WARM_MODEL: empty -> m (default)"


def test_only_what_is_live_is_taken_over() -> None:
    before = Config(ollama_url=OLLAMA, sources={"ollama_url": "f:1", "job_timeout": "f:2"})
    after = Config(
        ollama_url=Upstream.parse("http://b"),
        free_timeout=1.0,
        sources={"ollama_url": "f:3", "free_timeout": "f:4"},
        notices=("x",),
        file="f",
    )
    merged = merge(before, after)
    assert merged == attrs.evolve(before, free_timeout=1.0)
    assert merged.sources == {"ollama_url": "f:1", "free_timeout": "f:4"}
    assert (merged.notices, merged.file) == (("x",), "f")
    # What needs a start is told each time, until there was one.
    assert [change.name for change in compare(merged, after)[1]] == ["OLLAMA_URL"]


class Bench:
    """A reloader, and what it does."""

    def __init__(self, before: Config, after: Config | ConfigError) -> None:
        self.after = after
        self.applied: list[Config] = []
        self.switches: list[str] = []
        self.log_problem = ""
        self.reloader = Reloader(before, self._load, self.applied.append, self._open)

    def _load(self) -> Config:
        if isinstance(self.after, ConfigError):
            raise self.after
        return self.after

    def _open(self, new: Config) -> Any:
        if self.log_problem:
            raise ConfigError(self.log_problem)
        return lambda: self.switches.append(new.log_file or "")


@pytest.fixture
def events() -> Any:
    found: list[Any] = []
    level = tlog._rank
    tlog.set_level("warn")
    globalLogPublisher.addObserver(found.append)
    yield lambda: [formatEvent(event) for event in found]
    globalLogPublisher.removeObserver(found.append)
    tlog._rank = level


def test_a_reload(events: Any) -> None:
    bench = Bench(Config(), Config(log_level="debug", log_file="/x", listen_comfy="tcp:1"))
    assert bench.reloader.reload()
    (applied,) = bench.applied
    assert applied == Config(log_level="debug", log_file="/x")
    assert bench.switches == ["/x"]
    assert tlog.debug_enabled
    assert events() == [
        "setting LOGLEVEL: warn -> debug (default)",
        "setting LOG_FILE: empty -> /x (default)",
        "setting LISTEN_COMFY: tcp:8188 -> tcp:1 (default): takes effect at the next start",
    ]


def test_no_change_is_told_too(events: Any) -> None:
    bench = Bench(Config(notices=("old",)), Config(notices=("old", "new")))
    assert bench.reloader.reload()
    assert bench.switches == []
    assert events() == ["new", "the configuration was read again: no change"]


def test_a_mistake_changes_nothing(events: Any) -> None:
    bench = Bench(Config(), ConfigError("f:1: not a KEY=VALUE line"))
    assert not bench.reloader.reload()
    bench.after = Config(log_file="/x", log_level="debug", job_timeout=1.0)
    bench.log_problem = "log file /x: can't be written: Permission denied"
    assert not bench.reloader.reload()
    assert bench.applied == [] and bench.switches == []
    assert bench.reloader.config == Config() and not tlog.debug_enabled
    prefix = "the configuration can't be used, the settings stay as they are: "
    assert events() == [
        f"{prefix}f:1: not a KEY=VALUE line",
        f"{prefix}log file /x: can't be written: Permission denied",
    ]


# -- who sees the new values


def reload(s: Any, **changes: Any) -> None:
    s.service.apply(attrs.evolve(s.service.config, **changes))


@pytest_twisted.ensureDeferred
async def test_the_limits_of_chat_requests() -> None:
    async with running() as s:
        job = await s.queue(sleep_graph(2))
        await until(lambda: s.host.comfy.jobs[job].status != "pending")
        reload(s, llm_busy_mode="reject", llm_busy_status=429, busy_retry_after=7)
        answer = await s.chat()
        assert (answer.status, answer.headers["retry-after"]) == (429, "7")
        reload(s, llm_busy_mode="wait", llm_wait_timeout=0.05, busy_retry_after=8)
        answer = await s.chat()
        assert (answer.status, answer.headers["retry-after"]) == (503, "8")
        assert b"too long" in answer.body
        reload(s, llm_wait_timeout=30.0)
        assert (await s.chat()).status == 200
        policy = s.service.sites["ollama"].resource.policy
        reload(s, llm_stall_timeout=123.0)
        assert policy.stall_timeout == 123.0


@pytest_twisted.ensureDeferred
async def test_the_limits_of_the_nested_listener() -> None:
    async with running(listen_ollama_nested="tcp:0:interface=127.0.0.1") as s:
        reload(s, llm_busy_mode="reject", llm_busy_status=429, busy_retry_after=7)
        policy = s.service.sites["ollama-nested"].resource.policy
        claim = policy._claim
        assert (claim.reject_status, claim.retry_after, policy.retry_after) == (429, 7, 7)


@pytest_twisted.ensureDeferred
async def test_more_places_let_waiters_in_at_once() -> None:
    async with running(llm_max_inflight=1) as s:
        streams = [s.chat(200), s.chat(200)]
        await s.until_waiting(llm=1)
        reload(s, llm_max_inflight=2, image_burst=3)
        await s.until_waiting(llm=0)
        assert s.arbiter.image_burst == 3
        assert len(s.arbiter.leases) == 2
        for stream in streams:
            assert (await stream).status == 200


@pytest_twisted.ensureDeferred
async def test_back_off_and_repeats() -> None:
    async with running(backoff_initial=30.0, backoff_max=30.0, retry_status_limit=0) as s:
        s.host.ollama.faults.status(503, "GET /api/tags", times=2)
        assert (await s.request("GET", "/api/tags")).status == 503
        reload(s, backoff_initial=0.01, backoff_max=0.02, retry_status_limit=5)
        assert (await s.request("GET", "/api/tags")).status == 200


@pytest_twisted.ensureDeferred
async def test_the_time_for_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    class Endpoint(comfy_events.HostnameEndpoint):
        def __init__(self, reactor: Any, host: Any, port: Any, timeout: float) -> None:
            given.append(timeout)
            super().__init__(reactor, host, port, timeout)

    monkeypatch.setattr(comfy_events, "HostnameEndpoint", Endpoint)
    async with running(connect_timeout=30.0) as s:
        await until(lambda: given == [30.0])
        reload(s, connect_timeout=4.5)
        for pool in s.service._pools:
            assert (pool._timeout, pool.endpoint._timeout) == (4.5, 4.5)
        for client in s.service._clients:
            assert client._http._agent._endpointFactory.timeout == 4.5
        # ComfyUI's event socket is opened anew.
        await s.host.comfy.restart()
        await until(lambda: given[-1] == 4.5)
        assert (await s.chat()).status == 200
        await until(lambda: s.service.comfy.snapshot()["events"] == "open")


@pytest_twisted.ensureDeferred
async def test_the_engines_limits() -> None:
    async with running() as s:
        reload(
            s,
            unload_timeout=1.25,
            unload_poll_interval=0.75,
            probe_timeout=2.25,
            free_timeout=3.25,
            job_timeout_action="interrupt",
            history_poll_interval=0.33,
            prompt_capture_limit=77,
            free_between_jobs=True,
            warm_model="llama3.2",
            warm_timeout=4.25,
        )
        ollama, comfy, warmer = s.service.ollama, s.service.comfy, s.service._warmer
        assert (ollama.unload_timeout, ollama.unload_poll_interval) == (1.25, 0.75)
        assert (ollama.probe_timeout, comfy._watch.probe_timeout) == (2.25, 2.25)
        assert (comfy.free_timeout, comfy.job_timeout_action) == (3.25, "interrupt")
        assert (comfy._watch.poll_interval, comfy.prompt_capture_limit) == (0.33, 77)
        assert s.service.sites["comfyui"].resource.policy._capture == 77
        assert comfy.free_between_jobs is True
        assert warmer.timeout == 4.25
        await s.queue()
        await until(lambda: s.host.ollama.requests_for("POST", "/api/generate"), "the warm-up")


@pytest_twisted.ensureDeferred
async def test_the_limits_of_llama_cpp_and_sd_server() -> None:
    async with running(llama=True, sd=True) as s:
        reload(
            s,
            unload_timeout=1.25,
            unload_poll_interval=0.75,
            probe_timeout=2.25,
            job_timeout=77.0,
            load_wait=5.25,
            busy_wait=6.25,
            sd_idle=7.25,
            sd_stop_grace=8.25,
            vram_wait=9.25,
            busy_retry_after=3,
            prompt_capture_limit=99,
        )
        service = s.service
        llama, sd = service.llama, service.sd
        assert (llama.unload_timeout, llama.unload_poll_interval) == (1.25, 0.75)
        assert (llama.probe_timeout, llama.load_timeout) == (2.25, 5.25)
        assert llama.single.load_timeout == 5.25
        assert (sd.idle, sd._process.load_wait, sd._process.stop_grace) == (7.25, 5.25, 8.25)
        assert (sd._watch.job_timeout, sd.capture_limit) == (77.0, 99)
        assert service.vram.wait == 9.25
        policies = {policy.engine: policy for policy in service._policies}
        assert policies["llamacpp"]._claim.timeout == 6.25
        assert policies["llamacpp"]._claim.retry_after == policies["sd"].retry_after == 3
        assert (policies["sd"].stall_timeout, policies["sd"]._capture) == (77.0, 99)


@pytest_twisted.ensureDeferred
async def test_a_job_under_way_has_the_new_limit() -> None:
    async with running(overlaps="any", job_timeout=600.0) as s:
        s.host.comfy.faults.hang("GET /history/")
        job = await s.queue(sleep_graph(3000))
        await until(lambda: s.host.comfy.jobs[job].status != "pending")
        assert s.arbiter.state == "image"
        reload(s, job_timeout=0.05)
        await s.idle()
        s.host.comfy.faults.clear()


@pytest_twisted.ensureDeferred
async def test_a_prompt_that_is_not_answered_has_the_new_limit() -> None:
    async with running(overlaps="any", job_timeout=600.0) as s:
        s.host.comfy.faults.hang("POST /prompt")
        prompt = s.prompt()
        await until(lambda: s.host.comfy.requests_for("POST", "/prompt"))
        reload(s, job_timeout=0.05)
        await s.idle()
        s.host.comfy.faults.clear()
        prompt.addErrback(lambda _: None)
        prompt.cancel()


@pytest_twisted.ensureDeferred
async def test_the_time_for_the_stop() -> None:
    async with running(shutdown_timeout=600.0) as s:
        s.host.ollama.faults.hang("POST /api/chat")
        waiting = s.chat()
        await until(lambda: s.host.ollama.requests_for("POST", "/api/chat"))
        reload(s, shutdown_timeout=0.05)
        await s.service.stopService()
        assert (await waiting).status == 503


# -- a real twistd


def write(file: Path, *lines: str) -> None:
    file.write_text("\n".join((*lines, "")))


def test_sighup(tmp_path: Path) -> None:
    file = tmp_path / "turnstile.env"
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    base = "OLLAMA_URL=http://127.0.0.1:1"
    write(file, base, "LLM_BUSY_STATUS=503")
    with (
        notify_socket(str(tmp_path / "notify")) as heard,
        listening() as sock,
        twistd(
            tmp_path,
            f"--config={file}",
            notify=heard,
            sockets=[sock],
            names=["ollama"],
            environ={"LLM_BUSY_STATUS": "429"},
        ) as run,
    ):
        address = sock.getsockname()
        heard.until(READY="1")

        def hang_up() -> None:
            run.send(signal.SIGHUP)
            heard.until(RELOADING="1")
            heard.until(READY="1")

        # The environment still wins over the file.
        write(file, base, "LOGLEVEL=info", "LLM_BUSY_STATUS=500", "COMFY_URL=http://127.0.0.1:2")
        hang_up()
        assert run.said(f"setting LOGLEVEL: warn -> info ({file}:2)")
        assert run.said("LLM_BUSY_STATUS: ") == []
        (line,) = run.said("COMFY_URL: ")
        assert line.endswith(
            f"empty -> http://127.0.0.1:2 ({file}:4): takes effect at the next start"
        )

        write(file, base, "LOGLEVEL=error", f"LOG_FILE={first}")
        hang_up()
        assert len(run.said("setting ")) and "LOG_FILE: empty -> " in first.read_text()
        lines = len(run.lines())

        write(file, base, "LOGLEVEL=nonsense", f"LOG_FILE={second}")
        hang_up()
        (line,) = [x for x in first.read_text().splitlines() if "ERROR" in x]
        assert (
            f"the settings stay as they are: {file}:2: LOGLEVEL: 'nonsense' is not one of" in line
        )
        assert not second.exists()

        write(file, base, "LOG_FILE=/dev/null/x")
        hang_up()
        assert "log file /dev/null/x: can't be written" in first.read_text()

        write(file, base, f"LOG_FILE={second}", "LOG_FORMAT=json")
        hang_up()
        events = [json.loads(line) for line in second.read_text().splitlines()]
        assert any("LOG_FORMAT: text -> json" in event["msg"] for event in events)

        first_size = first.stat().st_size
        write(file, base)
        hang_up()
        added = run.lines()[lines:]
        assert any("LOG_FORMAT: json -> text (default)" in line for line in added)
        assert any(f"LOG_FILE: {second} -> empty (default)" in line for line in added)
        assert first.stat().st_size == first_size

        file.unlink()
        hang_up()
        assert run.said(f"configuration file {file}: it does not exist")
        assert ask(address)[0] == 200
        assert run.stop() == 0


def test_the_log_file_is_opened_anew_even_if_the_configuration_is_broken(tmp_path: Path) -> None:
    file, log = tmp_path / "turnstile.env", tmp_path / "log"
    write(file, "OLLAMA_URL=http://127.0.0.1:1", f"LOG_FILE={log}")
    with (
        notify_socket(str(tmp_path / "notify")) as heard,
        twistd(tmp_path, f"--config={file}", "--listen-ollama=127.0.0.1:0", notify=heard) as run,
    ):
        heard.until(READY="1")
        log.rename(tmp_path / "old")
        file.write_text("nonsense")
        run.send(signal.SIGHUP)
        heard.until(RELOADING="1")
        heard.until(READY="1")
        assert "not a KEY=VALUE line" in log.read_text()
        assert "not a KEY=VALUE line" not in (tmp_path / "old").read_text()
        assert run.stop() == 0


def test_the_settings_of_the_config_module_are_complete() -> None:
    assert {field.name for field in attrs.fields(config.Config)} >= LIVE | FIXED
