"""Ollama's eviction, guard and warm-up: decisions on a fake clock, then against the simulated engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_twisted
from engine_kit import Http, Response, clean, reactor, result_of, run, until
from twisted.internet import error
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock, deferLater
from twisted.python.failure import Failure
from twisted.web.client import ResponseNeverReceived

from turnstile.arbiter import Arbiter, Kind, Lease, Tenant
from turnstile.card import Card, Eviction
from turnstile.config import Upstream
from turnstile.engines.client import (
    BadAnswer,
    Broken,
    HttpError,
    JsonClient,
    TimedOut,
    Unreachable,
    make_client,
)
from turnstile.engines.ollama import SETTLE_TIME, OllamaEngine
from turnstile.sim import Card as SimCard
from turnstile.sim import GpuHost, OllamaSim
from turnstile.warm import Warmer


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def http() -> Http:
    return Http()


@pytest.fixture
def client(http: Http, clock: Clock) -> JsonClient:
    return JsonClient(http, clock, "http://ollama")


@pytest.fixture
def card(clock: Clock) -> Card:
    return Card(clock)


@pytest.fixture
def engine(client: JsonClient, clock: Clock, card: Card) -> Iterator[OllamaEngine]:
    engine = OllamaEngine(
        client, clock, card, unload_timeout=60.0, unload_poll_interval=0.5, probe_timeout=5.0
    )
    card.register(engine)
    yield engine
    engine.stop()
    assert clock.getDelayedCalls() == []


# -- the client ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (Response(200, b"{not json"), BadAnswer),
        (Response(200, b"[" * 100_000), BadAnswer),
        (Response(200, b"\xff\xfe\x00"), BadAnswer),
        (Response(500, b"oh"), HttpError),
        (Response(302, b""), HttpError),
        (Response(500, b"oh", error.ConnectionLost()), HttpError),
        (Response(200, b"{}", error.ConnectionLost()), Broken),
        (error.ConnectionRefusedError(), Unreachable),
        (error.NoRouteError(), Unreachable),
        (error.ConnectBindError(24, "Too many open files"), Broken),
        (error.DNSLookupError(), Unreachable),
        (error.TimeoutError(), TimedOut),
        (error.TCPTimedOutError(), TimedOut),
        (ResponseNeverReceived([Failure(error.ConnectionLost())]), Broken),
    ],
)
def test_client_errors(
    http: Http, client: JsonClient, clock: Clock, answer: Any, raised: type[Exception]
) -> None:
    http.answer = lambda *_: answer
    [failure] = result_of(client.get_json("/x", 5.0))
    assert isinstance(failure, Failure) and failure.check(raised)
    assert clock.getDelayedCalls() == []


def test_client_time_limit_drops_the_connection_before_the_head(
    http: Http, client: JsonClient, clock: Clock
) -> None:
    cancelled: list[Any] = []
    http.answer = lambda *_: Deferred(cancelled.append)
    result = result_of(client.get_json("/x", 5.0))
    clock.advance(4.9)
    assert not result
    clock.advance(0.2)
    assert result[0].check(TimedOut) and len(cancelled) == 1


def test_client_time_limit_drops_the_connection_in_the_body(
    http: Http, client: JsonClient, clock: Clock
) -> None:
    response = Response(200, b"{", TimeoutError())
    http.answer = lambda *_: response
    result = result_of(client.get_json("/x", 5.0))
    clock.advance(5.1)
    assert result[0].check(TimedOut) and response.dropped


def test_client_cancel_is_a_cancel(http: Http, client: JsonClient, clock: Clock) -> None:
    http.answer = lambda *_: Deferred(lambda d: d.errback(ResponseNeverReceived([])))
    d = client.get_json("/x", 5.0)
    result = result_of(d)
    d.cancel()
    assert result[0].check(CancelledError)
    assert clock.getDelayedCalls() == []


def test_client_bounds_the_body(http: Http, clock: Clock) -> None:
    client = JsonClient(http, clock, "http://x", limit=10)
    response = Response(200, b"1" * 11)
    http.answer = lambda *_: response
    [failure] = result_of(client.get_json("/x", 5.0))
    assert failure.check(BadAnswer) and response.dropped


# -- decisions -----------------------------------------------------------------------------------------------------


class Ollama:
    """Just enough of it to be listed and unloaded."""

    def __init__(self, http: Http, *models: str) -> None:
        self.models = set(models)
        self.ps: Any = None
        self.generate: Any = None
        self.embed: Any = None
        http.answer = self.answer

    def answer(self, method: str, path: str, payload: Any) -> Any:
        if path == "/api/version":
            return {"version": "0.12"}
        if path == "/api/ps":
            return self.ps or {"models": [{"name": m, "model": m} for m in sorted(self.models)]}
        return {"/api/generate": self.generate, "/api/embed": self.embed}[path] or {}


def test_evict_nothing_loaded(http: Http, engine: OllamaEngine) -> None:
    Ollama(http)
    assert result_of(engine.evict()) == [Eviction.CONFIRMED]
    assert http.calls == [("GET", "/api/ps", None)]


def test_g02_each_listed_model_is_unloaded_and_ps_decides(
    http: Http, engine: OllamaEngine, clock: Clock
) -> None:
    ollama = Ollama(http, "a", "b")
    result = result_of(engine.evict())
    assert [p["model"] for p in http.sent("/api/generate")] in (["a", "b"], ["b", "a"])
    assert all(p["keep_alive"] == 0 for p in http.sent("/api/generate"))
    run(clock, 0.3)
    ollama.models = {"b"}
    run(clock, 0.3)
    assert result == []
    ollama.models = set()
    run(clock, 0.5)
    assert result == [Eviction.CONFIRMED]


def test_c04_an_unload_that_answers_at_once_is_not_believed(
    http: Http, engine: OllamaEngine, clock: Clock
) -> None:
    ollama = Ollama(http, "a")
    result = result_of(engine.evict())
    run(clock, 5.0)
    assert result == []
    assert 2 <= len(http.sent("/api/generate")) <= 4  # told again now and then
    ollama.models = set()
    run(clock, 0.5)
    assert result == [Eviction.CONFIRMED]


def test_c05_embedding_models_and_one_failure_does_not_stop_the_others(
    http: Http, engine: OllamaEngine, clock: Clock
) -> None:
    ollama = Ollama(http, "a", "b")
    ollama.generate = Response(400, b'{"error":"does not support generate"}')
    result_of(engine.evict())
    assert sorted(p["model"] for p in http.sent("/api/embed")) == ["a", "b"]
    assert all(p["input"] == "x" and p["keep_alive"] == 0 for p in http.sent("/api/embed"))
    ollama.models = set()
    run(clock, 0.5)


def test_a15_a_hanging_unload_call_is_not_waited_for(
    http: Http, engine: OllamaEngine, clock: Clock
) -> None:
    ollama = Ollama(http, "a", "b")
    cancelled: list[Any] = []
    ollama.generate = Deferred(cancelled.append)
    result = result_of(engine.evict())
    run(clock, 0.1)
    assert sorted(p["model"] for p in http.sent("/api/generate")) == ["a", "b"]
    ollama.models = set()
    run(clock, 0.5)
    assert result == [Eviction.CONFIRMED]
    assert cancelled  # and what hung is dropped
    assert clock.getDelayedCalls() == []


def test_a15_failing_unload_calls_do_not_count(
    http: Http, engine: OllamaEngine, clock: Clock
) -> None:
    ollama = Ollama(http, "a")
    ollama.generate = ollama.embed = Response(500, b"")
    result = result_of(engine.evict())
    run(clock, 0.1)
    ollama.models = set()
    run(clock, 0.5)
    assert result == [Eviction.CONFIRMED]


def test_a_model_that_comes_back_is_unloaded_again(
    http: Http, engine: OllamaEngine, clock: Clock
) -> None:
    ollama = Ollama(http, "a", "b")
    result = result_of(engine.evict())
    ollama.models = {"b"}
    run(clock, 0.5)
    ollama.models = {"a", "b"}
    run(clock, 0.7)
    assert [p["model"] for p in http.sent("/api/generate")].count("a") == 2
    ollama.models = set()
    run(clock, 0.6)
    assert result == [Eviction.CONFIRMED]


def test_evict_is_bounded(http: Http, engine: OllamaEngine, clock: Clock) -> None:
    Ollama(http, "a")
    result = result_of(engine.evict())
    run(clock, 59.9, 0.05)
    assert result == []
    run(clock, 0.3)
    assert result == [Eviction.TIMED_OUT]


def test_evict_is_bounded_while_ps_hangs(http: Http, engine: OllamaEngine, clock: Clock) -> None:
    http.answer = lambda *_: Deferred()
    result = result_of(engine.evict())
    run(clock, 60.1, 0.1)
    assert result == [Eviction.TIMED_OUT]
    assert len(http.calls) < 15


@pytest.mark.parametrize(
    "odd",
    [
        Response(200, b"{not json"),
        Response(500, b""),
        Response(200, b"{}"),
        Response(200, b"[]"),
        Response(200, b'{"models":[{}]}'),
        Response(200, b'{"models":{}}'),
    ],
)
def test_an_odd_answer_is_not_an_empty_one(
    http: Http, engine: OllamaEngine, clock: Clock, odd: Response
) -> None:
    ollama = Ollama(http)
    ollama.ps = odd
    result = result_of(engine.evict())
    run(clock, 2.0)
    assert result == []
    ollama.ps = {"models": None}
    run(clock, 1.0)
    assert result == [Eviction.CONFIRMED]


def test_unreachable_at_once(http: Http, engine: OllamaEngine) -> None:
    http.answer = lambda *_: error.ConnectionRefusedError()
    assert result_of(engine.evict()) == [Eviction.UNREACHABLE]


def test_gone_during_the_eviction(http: Http, engine: OllamaEngine, clock: Clock) -> None:
    Ollama(http, "a")
    result = result_of(engine.evict())
    http.answer = lambda *_: error.ConnectionRefusedError()
    run(clock, 0.9)
    assert result == []
    run(clock, 1.0)
    assert result == [Eviction.UNREACHABLE]


def test_after_an_abort_one_empty_answer_is_not_enough(
    http: Http, engine: OllamaEngine, clock: Clock
) -> None:
    ollama = Ollama(http)
    engine.note_aborted()
    result = result_of(engine.evict())
    run(clock, SETTLE_TIME - 0.05)
    assert result == []
    ollama.models = {"late"}
    run(clock, 0.6)
    assert result == [] and http.sent("/api/generate")
    ollama.models = set()
    run(clock, 1.0)
    assert result == [Eviction.CONFIRMED]


def test_the_settle_time_ends(http: Http, engine: OllamaEngine, clock: Clock) -> None:
    Ollama(http)
    engine.note_aborted()
    result = result_of(engine.evict())
    run(clock, SETTLE_TIME + 0.05)
    assert result == [Eviction.CONFIRMED]
    clock.advance(1)
    assert result_of(engine.evict()) == [Eviction.CONFIRMED]


def test_guard_does_nothing_without_an_abort(
    http: Http, engine: OllamaEngine, clock: Clock
) -> None:
    Ollama(http)
    engine.guard()
    assert clock.getDelayedCalls() == []


def test_guard_evicts_a_model_that_shows_up(
    http: Http, engine: OllamaEngine, card: Card, clock: Clock
) -> None:
    ollama = Ollama(http)
    card.mark_evicted("ollama")
    engine.note_aborted()
    engine.guard()
    run(clock, 1.0)
    assert not card.degraded
    ollama.models = {"late"}
    run(clock, 0.5)
    assert [d.reason for d in card.degraded] == ["model re-appeared during an image job"]
    assert http.sent("/api/generate")
    ollama.models = set()
    run(clock, 2.0)
    assert not card.degraded and not card.resident
    looks = len(http.calls)
    run(clock, 5.0)
    engine.end_guard()
    assert len(http.calls) > looks
    looks = len(http.calls)
    run(clock, 5.0)
    assert len(http.calls) == looks


def test_guard_leaves_nested_models_alone(
    http: Http, engine: OllamaEngine, card: Card, clock: Clock
) -> None:
    Ollama(http, "nested")
    engine.note_aborted()
    engine.guard()  # the engine is registered as resident
    run(clock, 6.0)
    assert not http.calls


def test_start_marks_an_empty_engine(http: Http, engine: OllamaEngine, card: Card) -> None:
    Ollama(http)
    assert result_of(engine.start()) == [None]
    assert card.resident == frozenset()
    assert engine.snapshot()["version"] == "0.12"


def test_start_leaves_a_loaded_one(http: Http, engine: OllamaEngine, card: Card) -> None:
    Ollama(http, "a")
    assert result_of(engine.start()) == [None]
    assert card.resident == {"ollama"}


def test_start_is_bounded(http: Http, engine: OllamaEngine, card: Card, clock: Clock) -> None:
    http.answer = lambda *_: Deferred()
    result = result_of(engine.start())
    clock.advance(5.1)
    assert result == [None]
    assert card.resident == {"ollama"}


# -- warming up ----------------------------------------------------------------------------------------------------

IMAGE = Tenant("comfyui", Kind.EXCLUSIVE)


class Warmth:
    def __init__(self, http: Http, engine: OllamaEngine, card: Card, clock: Clock) -> None:
        card.mark_evicted("ollama")
        self.arbiter = Arbiter(clock)
        self.warmer = Warmer(self.arbiter, card, engine, "m", 120.0, clock)
        self.warmer.start()
        self.loading: Deferred[Any] = Deferred()
        http.answer = lambda *_: self.loading

    def image_job(self) -> None:
        lease = self.arbiter.try_acquire(IMAGE)
        assert lease is not None
        lease.release()


@pytest.fixture
def warmth(http: Http, engine: OllamaEngine, card: Card, clock: Clock) -> Iterator[Warmth]:
    warmth = Warmth(http, engine, card, clock)
    yield warmth
    warmth.warmer.stop()


def test_warm_up_after_an_image_job(warmth: Warmth, http: Http, card: Card, clock: Clock) -> None:
    warmth.image_job()
    clock.advance(0)
    assert http.sent("/api/generate") == [{"model": "m", "keep_alive": -1, "stream": False}]
    assert warmth.arbiter.llm_inflight == 1 and card.resident == {"ollama"}
    warmth.loading.callback(Response(200, b"{}"))
    assert warmth.arbiter.state == "idle"
    assert clock.getDelayedCalls() == []


def test_no_warm_up_after_chats_or_beside_others(
    warmth: Warmth, http: Http, card: Card, clock: Clock, engine: OllamaEngine
) -> None:
    lease = warmth.arbiter.try_acquire(engine.tenant)
    assert lease is not None
    lease.release()
    clock.advance(0)
    assert not http.calls

    class Other:
        tenant = IMAGE

    card.register(Other())  # type: ignore[arg-type]
    warmth.image_job()
    clock.advance(0)
    assert not http.calls


def test_no_warm_up_while_somebody_waits(warmth: Warmth, http: Http, clock: Clock) -> None:
    first = warmth.arbiter.try_acquire(IMAGE)
    assert first is not None
    leases: list[Lease] = []
    warmth.arbiter.acquire(IMAGE).addCallback(leases.append)
    first.release()
    clock.advance(0)
    assert leases and not http.calls


def test_an_image_job_ends_the_warm_up_at_once(warmth: Warmth, clock: Clock) -> None:
    cancelled: list[Any] = []
    warmth.loading = Deferred(cancelled.append)
    warmth.image_job()
    clock.advance(0)
    leases: list[Lease] = []
    warmth.arbiter.acquire(IMAGE).addCallback(leases.append)
    assert leases and cancelled
    assert clock.getDelayedCalls() == []


def test_a_chat_runs_beside_the_warm_up(warmth: Warmth, engine: OllamaEngine, clock: Clock) -> None:
    warmth.image_job()
    clock.advance(0)
    assert warmth.arbiter.try_acquire(engine.tenant) is not None
    assert warmth.warmer.busy


def test_the_warm_up_is_bounded(warmth: Warmth, clock: Clock) -> None:
    warmth.image_job()
    clock.advance(0)
    clock.advance(120.1)
    assert warmth.arbiter.state == "idle"


def test_a_failing_warm_up_gives_the_card_back(warmth: Warmth, http: Http, clock: Clock) -> None:
    http.answer = lambda *_: Response(404, b"")
    warmth.image_job()
    clock.advance(0)
    assert len(http.calls) == 1 and warmth.arbiter.state == "idle"


# -- against the simulated engine ----------------------------------------------------------------------------------


@asynccontextmanager
async def rig(**options: Any) -> AsyncIterator[tuple[OllamaSim, OllamaEngine, Card]]:
    options = {"load_time": 0.2, "unload_time": 0.05, **options}
    host = GpuHost(reactor, 1.0, comfy=False, ollama_options=options)
    await host.start()
    card = Card(reactor)
    client = make_client(reactor, Upstream.parse(host.ollama.url), connect_timeout=2.0)
    engine = OllamaEngine(
        client, reactor, card, unload_timeout=5.0, unload_poll_interval=0.1, probe_timeout=2.0
    )
    card.register(engine)
    try:
        yield host.ollama, engine, card
    finally:
        engine.stop()
        await client.close()
        await host.stop()
    await until(clean)


def sim_card(sim: OllamaSim) -> SimCard:
    found: SimCard = sim.card
    return found


@pytest_twisted.ensureDeferred
async def test_sim_g02_start_and_evict() -> None:
    async with rig() as (sim, engine, card):
        sim.load("qwen3:8b")
        sim.load("llama3.2:latest")
        await engine.start()
        assert card.resident == {"ollama"} and engine.version
        assert await card.evict("ollama") is Eviction.CONFIRMED
        assert sim_card(sim).used == 0 and not card.resident
        assert not card.degraded


@pytest_twisted.ensureDeferred
async def test_sim_c05_embedding_only() -> None:
    async with rig() as (sim, engine, _card):
        sim.load("nomic-embed-text:latest")
        sim.load("llama3.2:latest")
        await until(lambda: set(sim.resident.values()) == {"ready"})
        assert await engine.evict() is Eviction.CONFIRMED
        assert sim_card(sim).used == 0
        assert sim.requests_for("POST", "/api/embed")


@pytest_twisted.ensureDeferred
async def test_sim_a15_hanging_unloads() -> None:
    async with rig() as (sim, engine, _card):
        sim.load("llama3.2:latest")
        await until(lambda: set(sim.resident.values()) == {"ready"})
        sim.faults.hang("POST /api/generate", times=1)
        d = engine.evict()
        await deferLater(reactor, 0.1)
        sim.unload("llama3.2:latest")
        assert await d is Eviction.CONFIRMED


@pytest_twisted.ensureDeferred
async def test_sim_reappearing_model() -> None:
    async with rig() as (sim, engine, _card):
        sim.faults.reappear = 1
        sim.load("llama3.2:latest")
        await until(lambda: set(sim.resident.values()) == {"ready"})
        assert await engine.evict() is Eviction.CONFIRMED
        await deferLater(reactor, 0.05)


@pytest_twisted.ensureDeferred
async def test_sim_dead_and_garbage() -> None:
    async with rig() as (sim, engine, card):
        sim.faults.garbage("/api/ps", times=3)
        assert await engine.evict() is Eviction.CONFIRMED
        await sim.kill()
        assert await card.evict("ollama") is Eviction.UNREACHABLE
        assert not card.resident and card.degraded


@pytest_twisted.ensureDeferred
async def test_sim_warm_and_cancel() -> None:
    async with rig() as (sim, engine, _card):
        await engine.warm("qwen3:8b")
        assert sim.resident == {"qwen3:8b": "ready"}
        d = engine.warm("big:70b")
        await deferLater(reactor, 0.1)
        d.cancel()
        with pytest.raises(CancelledError):
            await d
        engine.note_aborted()
        assert await engine.evict() is Eviction.CONFIRMED
        await deferLater(reactor, 0.3)
        assert sim_card(sim).used == 0
