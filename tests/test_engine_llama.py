"""llama.cpp: which requests need the card, and how it leaves: on a fake clock, then against the simulated server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, unquote_to_bytes

import pytest
import pytest_twisted
import treq
from engine_kit import Http, Response, clean, reactor, result_of, run, until
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet import error
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock, deferLater
from twisted.logger import globalLogPublisher
from twisted.python.failure import Failure

from turnstile.arbiter import Kind, Tenant
from turnstile.card import LOADED_ELSEWHERE, Card, Eviction
from turnstile.commands import CommandFailed
from turnstile.config import Upstream
from turnstile.engines.base import Admission
from turnstile.engines.client import BadAnswer, JsonClient, make_client
from turnstile.engines.llama_aborts import (
    ABORT_MEMORY,
    ABORT_PAUSE,
    BUSY_LOOK,
    BUSY_WAIT,
    EMPTY_TIME,
    SETTLE_TIME,
)
from turnstile.engines.llama_events import LINE_LIMIT
from turnstile.engines.llama_routes import Mode, parse_models
from turnstile.engines.llamacpp import LlamaEngine, StartFailed, classify
from turnstile.sim import GpuHost
from turnstile.vram import Back

PASS, LEASE = Admission.PASS, Admission.LEASE

# -- which requests need the card ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_line", "admission"),
    [
        ("POST /v1/chat/completions", LEASE),
        ("POST /completion", LEASE),
        ("POST /v1/messages", LEASE),
        ("POST /v1/messages/count_tokens", LEASE),
        ("POST /tokenize", LEASE),
        ("POST /apply-template", LEASE),
        ("POST /slots/0?action=erase", LEASE),
        ("POST /v1/chat/completions?autoload=false", LEASE),
        ("POST /models/load", LEASE),
        ("POST /lora-adapters", LEASE),
        ("POST /a-route-of-tomorrow", LEASE),
        ("POST /models/unload", PASS),
        ("POST /models", PASS),
        ("POST /v1/streams/lookup", PASS),
        # Odd spellings of harmless ones cost a wait at most.
        ("POST /models/unload/", LEASE),
        ("POST //models/unload", LEASE),
        ("POST /models/%75nload", LEASE),
        ("POST /models#/load", LEASE),
        ("PUT /models", LEASE),
        ("GET /models", PASS),
        ("GET /v1/models", PASS),
        ("GET /models/sse", PASS),
        ("GET /models?reload=1", PASS),
        ("GET /health", PASS),
        ("HEAD /", PASS),
        ("GET /v1/stream?conv_id=a&from=0", PASS),
        ("DELETE /v1/stream?conv_id=a", PASS),
        ("DELETE /models?model=x", PASS),
        ("OPTIONS /v1/chat/completions", PASS),
        ("GET /props", PASS),
        ("GET /metrics", PASS),
        ("GET /props?model=x", LEASE),
        ("HEAD /props?model=x", LEASE),
        ("GET /metrics?model=x", LEASE),
        ("GET /slots?model=x", LEASE),
        ("GET /lora-adapters?model=x", LEASE),
        ("GET /prefix/props?model=x", LEASE),
        ("GET /%70rops?model=x", LEASE),
        ("GET /props/?model=x", LEASE),
        ("GET /props?mod%65l=x", LEASE),
        ("GET /props?a=b&model=x%2Fy", LEASE),
        ("GET /props?model=x&autoload=false", PASS),
        ("GET /props?autoload=0&model=x", PASS),
        ("GET /metrics?model=x&autoload=false", PASS),
        ("GET /props?model=x&autoload=", LEASE),
        ("GET /props?model=x&autoload=true", LEASE),
        ("GET /props?model=x&autoload=false&autoload=1", LEASE),
        ("GET /props?model=x&AUTOLOAD=false", LEASE),
        ("GET /props?model=x#&autoload=false", LEASE),
        ("GET /props?model=x;autoload=false", LEASE),
    ],
)
def test_classification(request_line: str, admission: Admission) -> None:
    method, target = request_line.encode().split(b" ")
    assert classify(method, target, wakes=False) is admission
    if target.partition(b"?")[0] not in (b"/slots", b"/lora-adapters"):
        assert classify(method, target) is admission


@pytest.mark.parametrize("page", ["/slots", "/lora-adapters"])
def test_pages_that_wake_a_sleeping_model(page: str) -> None:
    for query in ("", "?model=x&autoload=false", "?autoload=false"):
        target = (page + query).encode()
        assert classify(b"GET", target, wakes=True) is LEASE
        assert classify(b"HEAD", target, wakes=True) is LEASE
        assert classify(b"GET", target, wakes=False) is PASS


def spelled(text: str) -> st.SearchStrategy[bytes]:
    """The same text with some of its characters percent-encoded."""

    def spell(encoded: list[bool]) -> bytes:
        pairs = zip(text, encoded, strict=True)
        return b"".join(
            b"%%%02X" % ord(c) if code and c != "/" else c.encode() for c, code in pairs
        )

    return st.lists(st.booleans(), min_size=len(text), max_size=len(text)).map(spell)


@given(
    page=st.sampled_from(["/props", "/slots", "/metrics", "/lora-adapters"]).flatmap(spelled),
    prefix=st.sampled_from([b"", b"/llama", b"/a/b%20c"]),
    key=spelled("model"),
    before=st.sampled_from([b"", b"a=b&", b"&", b"autoload=true&", b"model=&"]),
    after=st.sampled_from(
        [b"", b"&autoload=1", b"&autoload", b"&x=autoload=false", b"#&autoload=0"]
    ),
    method=st.sampled_from([b"GET", b"HEAD"]),
    wakes=st.booleans(),
)
def test_no_spelling_of_a_page_that_loads_passes(
    page: bytes, prefix: bytes, key: bytes, before: bytes, after: bytes, method: bytes, wakes: bool
) -> None:
    target = prefix + page + b"?" + before + key + b"=some/model" + after
    assert unquote_to_bytes(target).startswith(unquote_to_bytes(prefix) + b"/")
    assert classify(method, target, wakes=wakes) is LEASE


@given(target=st.binary(max_size=60), method=st.sampled_from([b"GET", b"POST", b"HEAD", b"X"]))
def test_any_bytes_have_an_answer(target: bytes, method: bytes) -> None:
    assert classify(method, target) in (PASS, LEASE)
    if method == b"POST" and target not in (b"/models/unload", b"/models", b"/v1/streams/lookup"):
        assert b"?" in target or classify(method, target) is LEASE


# -- the list of models --------------------------------------------------------------------------------------------


def entry(name: str, value: Any, *args: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "status": {"value": value, "args": list(args)}}


def test_a_router_tells_what_its_models_do() -> None:
    statuses = ["unloaded", "loading", "loaded", "sleeping", "downloading", "downloaded", "new"]
    models = parse_models({"data": [entry(value, value) for value in statuses]})
    assert models.mode is Mode.ROUTER
    assert models.held == {"loading", "loaded", "sleeping", "new"}
    assert models.loading == {"loading"}


def test_a_failed_model_is_not_held() -> None:
    status = {"value": "unloaded", "failed": True, "exit_code": 1, "args": []}
    assert not parse_models({"data": [{"id": "x", "status": status}]}).held


def test_whether_models_will_sleep() -> None:
    args = ["llama-server", "--port", "1"]
    assert not parse_models({"data": [entry("x", "unloaded", *args)]}).sleeps
    assert not parse_models(
        {"data": [entry("x", "loaded", *args, "--sleep-idle-seconds", "-1")]}
    ).sleeps
    assert parse_models({"data": [entry("x", "loaded", "--sleep-idle-seconds", "5")]}).sleeps
    assert parse_models({"data": [entry("x", "sleeping")]}).sleeps
    # One that does not tell how it was started may.
    assert parse_models({"data": [{"id": "x", "status": {"value": "unloaded"}}]}).sleeps


def test_one_model_and_no_model() -> None:
    single = {"object": "list", "data": [{"id": "x", "meta": {}}], "models": [{"name": "x"}]}
    assert parse_models(single).mode is Mode.SINGLE
    assert parse_models({"object": "list", "data": []}).mode is Mode.ROUTER


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"data": None},
        {"data": {}},
        {"data": ["x"]},
        {"data": [{"id": None}]},
        {"data": [{"id": "x", "status": {}}]},
        {"data": [{"id": "x", "status": {"value": 1}}]},
        {"data": [entry("x", "unloaded"), {"id": "y"}]},
        {"error": {"message": "Loading model"}},
    ],
)
def test_an_odd_list_does_not_pass_for_an_empty_one(answer: Any) -> None:
    with pytest.raises(BadAnswer):
        parse_models(answer)


# -- a server on a fake clock --------------------------------------------------------------------------------------


class Stream(Response):
    """An answer that does not end by itself."""

    def __init__(self) -> None:
        super().__init__(200, b"")
        self.protocol: Any = None

    def deliverBody(self, protocol: Any) -> None:
        self.protocol = protocol
        protocol.transport = self

    def send(self, data: bytes) -> None:
        self.protocol.dataReceived(data)

    def end(self) -> None:
        self.protocol.connectionLost(Failure(error.ConnectionDone()))


class Router:
    """Just enough of one to be listed and unloaded."""

    def __init__(self, http: Http, **models: str) -> None:
        self.models = models
        self.unload: Any = None
        self.listing: Any = None
        self.sse: Any = None
        #: Models that compute.
        self.busy: set[str] = set()
        self.slots: Any = None
        self.streams: list[Stream] = []
        #: Seconds from now until an unload shows.
        self.http = http
        http.answer = self.answer

    def answer(self, method: str, path: str, payload: Any) -> Any:
        if path == "/models/sse":
            if self.sse is not None:
                return self.sse
            self.streams.append(Stream())
            return self.streams[-1]
        if path == "/models":
            if self.listing is not None:
                return self.listing
            return {"data": [entry(name, value) for name, value in self.models.items()]}
        if path == "/models/unload":
            return self.unload or {"success": True}
        if path.startswith("/v1/stream?"):
            return {}
        if path.startswith("/slots?model=") and path.endswith("&autoload=false"):
            name = path.removeprefix("/slots?model=").removesuffix("&autoload=false")
            assert self.models[name] == "loaded", "it would be woken"
            return self.slots or [{"is_processing": name in self.busy}, {"is_processing": False}]
        raise AssertionError((method, path))

    def tell(self, model: str, status: str) -> None:
        event = {"model": model, "event": "status_change", "data": {"status": status}}
        self.streams[-1].send(b"data: " + json.dumps(event).encode() + b"\n\n")

    @property
    def unloads(self) -> list[str]:
        return [payload["model"] for payload in self.http.sent("/models/unload")]


class Single:
    """A server of one model."""

    def __init__(self, http: Http, **props: Any) -> None:
        self.props: Any = {"model_path": "/m.gguf", "is_sleeping": False, **props}
        self.state = "up"
        http.answer = self.answer

    def answer(self, method: str, path: str, payload: Any) -> Any:
        if self.state == "down":
            return error.ConnectionRefusedError()
        if self.state == "loading":
            return Response(503, b'{"error":{"message":"Loading model"}}')
        if path == "/models":
            return {"data": [{"id": "m"}], "models": [{"name": "m"}]}
        return {"/props": self.props, "/health": {"status": "ok"}}[path]


class Commands:
    """Runs nothing; the test says how a command ends."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, float | None]] = []
        self.running: list[Deferred[int]] = []

    def run(self, command: str, timeout: float | None) -> Deferred[int]:
        self.ran.append((command, timeout))
        self.running.append(Deferred())
        return self.running[-1]

    def end(self, result: int | Exception = 0) -> None:
        self.running.pop(0).callback(result if isinstance(result, int) else Failure(result))  # type: ignore[arg-type]


class Other:
    """Another engine of the card."""

    def __init__(self, kind: Kind) -> None:
        self.tenant = Tenant("other", kind)

    def evict(self) -> Deferred[Eviction]:
        raise AssertionError("nobody asked for it")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def http() -> Http:
    return Http()


@pytest.fixture
def card(clock: Clock) -> Card:
    return Card(clock)


@pytest.fixture
def commands() -> Commands:
    return Commands()


@pytest.fixture
def logged() -> Iterator[list[str]]:
    texts: list[str] = []

    def note(event: dict[str, Any]) -> None:
        if event.get("log_format"):
            texts.append(event["log_format"].format(**event))

    globalLogPublisher.addObserver(note)
    yield texts
    globalLogPublisher.removeObserver(note)


def make(http: Http, clock: Clock, card: Card, **more: Any) -> LlamaEngine:
    engine = LlamaEngine(
        JsonClient(http, clock, "http://llama"),
        clock,
        card,
        unload_timeout=60.0,
        unload_poll_interval=0.5,
        probe_timeout=5.0,
        load_timeout=100.0,
        **more,
    )
    card.register(engine)
    return engine


@pytest.fixture
def engine(http: Http, clock: Clock, card: Card) -> Iterator[LlamaEngine]:
    engine = make(http, clock, card)
    yield engine
    engine.stop()
    assert clock.getDelayedCalls() == []


@pytest.fixture
def commanded(http: Http, clock: Clock, card: Card, commands: Commands) -> Iterator[LlamaEngine]:
    engine = make(http, clock, card, commands=commands, stop_command="stop", start_command="start")
    yield engine
    engine.stop()
    assert clock.getDelayedCalls() == []


# -- a router leaves -----------------------------------------------------------------------------------------------


def test_nothing_loaded_is_seen_at_once(http: Http, engine: LlamaEngine) -> None:
    Router(http, a="unloaded", b="downloading")
    assert result_of(engine.evict()) == [Eviction.CONFIRMED]
    assert [path for _, path, _ in http.calls] == ["/models", "/models/sse"]


def test_every_model_is_unloaded_and_the_list_decides(
    http: Http, engine: LlamaEngine, clock: Clock
) -> None:
    router = Router(http, a="loaded", b="sleeping", c="unloaded", d="loading", e="downloading")
    result = result_of(engine.evict())
    assert router.unloads == ["a", "b", "d"]
    run(clock, 0.3)
    router.models |= {"a": "unloaded", "d": "unloaded"}
    run(clock, 0.3)
    assert result == []
    router.models["b"] = "unloaded"
    run(clock, 0.6)
    assert result == [Eviction.CONFIRMED]


def test_d03_one_that_is_still_loading_counts_until_it_is_gone(
    http: Http, engine: LlamaEngine, clock: Clock
) -> None:
    router = Router(http, a="loading")
    result = result_of(engine.evict())
    run(clock, 10.0)
    assert result == [] and 4 <= len(router.unloads) <= 6  # told again now and then
    router.models["a"] = "unloaded"
    run(clock, 0.6)
    assert result == [Eviction.CONFIRMED]


def test_it_is_bounded(http: Http, engine: LlamaEngine, clock: Clock, logged: list[str]) -> None:
    Router(http, a="loaded")
    result = result_of(engine.evict())
    run(clock, 59.9)
    assert result == []
    run(clock, 0.2)
    assert result == [Eviction.TIMED_OUT]
    assert "llama.cpp did not leave the card within 60 s" in logged


def test_an_event_ends_the_wait_at_once(http: Http, engine: LlamaEngine, clock: Clock) -> None:
    router = Router(http, a="loaded")
    result = result_of(engine.evict())
    run(clock, 5.0)
    router.models["a"] = "unloaded"
    assert result == []
    router.tell("a", "unloaded")
    assert result == [Eviction.CONFIRMED]


def test_an_event_alone_proves_nothing(http: Http, engine: LlamaEngine, clock: Clock) -> None:
    router = Router(http, a="loaded")
    result = result_of(engine.evict())
    run(clock, 5.0)
    router.tell("a", "unloaded")
    run(clock, 1.0)
    assert result == []


def test_looks_slow_down(http: Http, engine: LlamaEngine, clock: Clock) -> None:
    Router(http, a="loaded")
    engine.evict()
    run(clock, 10.0)
    assert 20 <= len([path for _, path, _ in http.calls if path == "/models"]) <= 40


def test_an_unload_that_says_it_is_gone_is_no_failure(
    http: Http, engine: LlamaEngine, clock: Clock, logged: list[str]
) -> None:
    router = Router(http, a="loaded")
    router.unload = Response(400, b'{"error":{"message":"model is not running"}}')
    result = result_of(engine.evict())
    router.models["a"] = "unloaded"
    run(clock, 0.1)
    assert result == [Eviction.CONFIRMED] and not [text for text in logged if "failed" in text]


def test_failing_unload_calls_are_told_once_and_made_again(
    http: Http, engine: LlamaEngine, clock: Clock, logged: list[str]
) -> None:
    router = Router(http, a="loaded")
    router.unload = Response(500, b"")
    result = result_of(engine.evict())
    run(clock, 1.0)
    assert len(router.unloads) >= 2
    router.unload = None
    router.models["a"] = "unloaded"
    run(clock, 0.6)
    assert result == [Eviction.CONFIRMED]
    assert len([text for text in logged if "unload failed" in text]) == 1


def test_a_hanging_unload_call_is_not_waited_for(
    http: Http, engine: LlamaEngine, clock: Clock
) -> None:
    router = Router(http, a="loaded", b="loaded")
    cancelled: list[Any] = []
    router.unload = Deferred(cancelled.append)
    result = result_of(engine.evict())
    assert router.unloads == ["a", "b"]
    router.models.update(a="unloaded", b="unloaded")
    run(clock, 0.1)
    assert result == [Eviction.CONFIRMED] and cancelled


def test_an_odd_answer_is_not_believed(http: Http, engine: LlamaEngine, clock: Clock) -> None:
    router = Router(http, a="unloaded")
    router.listing = {"data": [{}]}
    result = result_of(engine.evict())
    run(clock, 1.0)
    assert result == []
    router.listing = None
    run(clock, 0.6)
    assert result == [Eviction.CONFIRMED]


def test_a_missing_key_is_told_and_not_waited_for(
    http: Http, engine: LlamaEngine, logged: list[str]
) -> None:
    http.answer = lambda *_: Response(401, b"{}")
    assert result_of(engine.evict()) == [Eviction.TIMED_OUT]
    assert any("LLAMA_API_KEY" in text for text in logged)


def test_nobody_there_at_all(http: Http, engine: LlamaEngine) -> None:
    http.answer = lambda *_: error.ConnectionRefusedError()
    assert result_of(engine.evict()) == [Eviction.UNREACHABLE]


def test_one_that_answered_is_gone_after_a_while_only(
    http: Http, engine: LlamaEngine, clock: Clock
) -> None:
    router = Router(http, a="loaded")
    result = result_of(engine.evict())
    router.listing = error.ConnectionRefusedError()
    run(clock, 0.9)
    assert result == []
    router.listing = None
    run(clock, 2.0)
    assert result == []
    router.listing = error.ConnectionRefusedError()
    run(clock, 2.0)
    assert result == [Eviction.UNREACHABLE]


def test_a_stop_ends_an_eviction(http: Http, engine: LlamaEngine, clock: Clock) -> None:
    Router(http, a="loaded")
    result = result_of(engine.evict())
    engine.stop()
    assert result == [Eviction.TIMED_OUT]


# -- after aborted requests ----------------------------------------------------------------------------------------


def test_an_aborted_request_gets_a_moment_to_end(
    http: Http, engine: LlamaEngine, clock: Clock
) -> None:
    router = Router(http, a="loaded")
    engine.note_aborted()
    clock.advance(0.1)
    engine.evict()
    run(clock, ABORT_PAUSE - 0.12)
    assert router.unloads == []
    run(clock, 0.04)
    assert router.unloads == ["a"]


def test_one_that_still_computes_is_left_to_end(
    http: Http, engine: LlamaEngine, clock: Clock
) -> None:
    """Told to leave now, it would hang until the router kills it."""
    router = Router(http, a="loaded", b="sleeping", c="loading")
    router.busy = {"a"}
    engine.note_aborted()
    engine.evict()
    run(clock, 1.0)
    assert router.unloads == []
    router.busy = set()
    run(clock, 0.6)
    assert router.unloads == ["a", "b", "c"]
    assert len([path for _, path, _ in http.calls if path.startswith("/slots")]) <= 1.0 / BUSY_LOOK


def test_one_that_does_not_stop_computing_is_told_all_the_same(
    http: Http, engine: LlamaEngine, clock: Clock
) -> None:
    router = Router(http, a="loaded")
    router.busy = {"a"}
    engine.note_aborted()
    engine.evict()
    run(clock, BUSY_WAIT - 0.1)
    assert router.unloads == []
    run(clock, 0.7)
    assert router.unloads == ["a"]


@pytest.mark.parametrize(
    ("answer", "waits"),
    [
        (Response(501, b""), False),
        ({"odd": 1}, False),
        ([1, {}], False),
        (Response(200, b"nonsense"), True),
        (error.ConnectionLost(), True),
    ],
)
def test_slots_that_do_not_tell(
    http: Http, engine: LlamaEngine, clock: Clock, answer: Any, waits: bool
) -> None:
    router = Router(http, a="loaded")
    router.slots = answer
    engine.note_aborted()
    engine.evict()
    run(clock, 1.0)
    assert router.unloads == ([] if waits else ["a"])


def test_without_an_abort_nobody_is_asked(http: Http, engine: LlamaEngine) -> None:
    router = Router(http, a="loaded")
    router.busy = {"a"}
    engine.evict()
    assert router.unloads == ["a"]


def test_an_empty_list_right_after_an_abort_is_not_believed(
    http: Http, engine: LlamaEngine, clock: Clock
) -> None:
    router = Router(http, a="unloaded")
    engine.note_aborted()
    result = result_of(engine.evict())
    run(clock, SETTLE_TIME / 2)
    router.models["a"] = "loading"
    run(clock, 1.0)
    assert result == [] and router.unloads == ["a"]
    router.models["a"] = "unloaded"
    run(clock, 1.0)
    assert result == [Eviction.CONFIRMED]


def test_a_request_that_waited_for_the_other_model_to_leave(
    http: Http, engine: LlamaEngine, clock: Clock
) -> None:
    router = Router(http, a="loaded", b="unloaded")
    engine.note_aborted()
    clock.advance(ABORT_MEMORY / 2)
    result = result_of(engine.evict())
    run(clock, 0.2)
    router.models["a"] = "unloaded"
    router.tell("a", "unloaded")
    assert result == []
    run(clock, EMPTY_TIME / 2)
    router.models["b"] = "loading"
    run(clock, 1.0)
    assert result == [] and router.unloads == ["a", "b"]
    router.models["b"] = "unloaded"
    run(clock, 1.0)
    assert result == [Eviction.CONFIRMED]


def test_an_abort_of_long_ago_costs_nothing(http: Http, engine: LlamaEngine, clock: Clock) -> None:
    router = Router(http, a="loaded")
    engine.note_aborted()
    clock.advance(ABORT_MEMORY)
    result = result_of(engine.evict())
    router.models["a"] = "unloaded"
    router.tell("a", "unloaded")
    assert result == [Eviction.CONFIRMED]


def test_conversations_without_client_are_ended_first(
    http: Http, engine: LlamaEngine, clock: Clock
) -> None:
    router = Router(http, a="loaded")
    name = "conv 1::org/model"
    engine.note_aborted(name)
    engine.note_aborted(name)
    clock.advance(10.0)
    result = result_of(engine.evict())
    ends = [(method, path) for method, path, _ in http.calls if "stream" in path]
    assert ends == [("DELETE", "/v1/stream?conv_id=" + quote(name, safe=""))]
    assert router.unloads == []
    run(clock, ABORT_PAUSE + 0.02)
    assert router.unloads == ["a"]
    router.models["a"] = "unloaded"
    run(clock, 1.0)
    assert result == [Eviction.CONFIRMED]
    calls = len(http.calls)
    clock.advance(ABORT_MEMORY)
    assert result_of(engine.evict()) == [Eviction.CONFIRMED]
    assert len(http.calls) == calls + 1


# -- models that come past turnstile -------------------------------------------------------------------------------


def started(http: Http, engine: LlamaEngine, card: Card) -> Router:
    router = Router(http, a="unloaded")
    assert result_of(engine.start()) == [None]
    assert not card.resident
    return router


def test_a_model_loaded_elsewhere_is_noticed(
    http: Http, engine: LlamaEngine, card: Card, clock: Clock
) -> None:
    router = started(http, engine, card)
    router.models["a"] = "loading"
    router.tell("a", "loading")
    assert card.resident == {"llamacpp"} and not card.degraded and router.unloads == []


@pytest.mark.parametrize("kind", list(Kind))
def test_a_model_loaded_beside_another_engine(
    http: Http, engine: LlamaEngine, card: Card, clock: Clock, kind: Kind
) -> None:
    router = started(http, engine, card)
    card.register(Other(kind))
    router.models["a"] = "loading"
    router.tell("a", "loading")
    assert [(d.culprit, d.reason) for d in card.degraded] == [("llamacpp", LOADED_ELSEWHERE)]
    # Beside a render it is unloaded again; beside another chat engine it may stay until somebody wants the card.
    assert router.unloads == (["a"] if kind is Kind.EXCLUSIVE else [])
    assert card.switching() is (kind is Kind.EXCLUSIVE)
    router.models["a"] = "unloaded"
    router.tell("a", "unloaded")
    if kind is Kind.EXCLUSIVE:
        assert not card.degraded and card.resident == {"other"}


def test_a_model_loaded_while_the_memory_is_waited_for(
    http: Http, engine: LlamaEngine, card: Card, clock: Clock
) -> None:
    waits: list[Deferred[Back]] = []

    class Memory:
        def leaving(self) -> None:
            """Not looked at."""

        def note_empty(self, still: object) -> None:
            """Not looked at."""

        def returned(self, *_: object) -> Deferred[Back]:
            waits.append(Deferred())
            return waits[-1]

    card.memory = Memory()
    router = started(http, engine, card)
    card.mark_resident("llamacpp")
    result = result_of(card.evict("llamacpp"))
    router.tell("a", "unloaded")
    assert waits and not result
    router.models["a"] = "loading"
    router.tell("a", "loading")
    waits.pop().callback(Back.STABLE)
    assert result == [Eviction.CONFIRMED] and card.resident == {"llamacpp"}


def test_what_a_look_saw_before_an_eviction_says_nothing_after_it(
    http: Http, engine: LlamaEngine, card: Card, clock: Clock
) -> None:
    router = started(http, engine, card)
    late: Deferred[Any] = Deferred()
    router.listing = late
    router.tell("a", "loaded")
    router.listing = None
    card.mark_resident("llamacpp")
    evicted = result_of(card.evict("llamacpp"))
    assert evicted == [Eviction.CONFIRMED]
    body = json.dumps({"data": [entry("a", "loaded")]}).encode()
    late.callback(Response(200, body))
    assert not card.resident


def test_events_during_a_look_are_looked_after(
    http: Http, engine: LlamaEngine, card: Card, clock: Clock
) -> None:
    router = started(http, engine, card)
    late: Deferred[Any] = Deferred()
    router.listing = late
    router.tell("a", "loading")
    router.tell("a", "loaded")
    router.listing = None
    router.models["a"] = "loaded"
    late.callback(Response(200, json.dumps({"data": [entry("a", "unloaded")]}).encode()))
    assert card.resident == {"llamacpp"}


def test_the_events_come_back(http: Http, engine: LlamaEngine, card: Card, clock: Clock) -> None:
    router = started(http, engine, card)
    for _ in range(8):
        router.streams[-1].end()
        assert not engine.snapshot()["events"]
        clock.advance(30.1)
        assert engine.snapshot()["events"]
    router.sse = error.ConnectionRefusedError()
    router.streams[-1].end()
    run(clock, 60.0, 1.0)
    # What was loaded meanwhile is seen when they come back.
    router.sse = None
    router.models["a"] = "loaded"
    run(clock, 31.0, 1.0)
    assert card.resident == {"llamacpp"}


def test_a_router_without_events_is_polled(
    http: Http, engine: LlamaEngine, card: Card, clock: Clock, logged: list[str]
) -> None:
    router = Router(http, a="loaded")
    router.sse = Response(404, b"")
    result = result_of(engine.evict())
    run(clock, 5.0)
    router.models["a"] = "unloaded"
    run(clock, 0.6)
    assert result == [Eviction.CONFIRMED]
    assert len([path for _, path, _ in http.calls if path == "/models/sse"]) == 1


def test_odd_events_do_no_harm(http: Http, engine: LlamaEngine, card: Card, clock: Clock) -> None:
    router = started(http, engine, card)
    looks = len(http.calls)
    for data in (
        b"\n\n",
        b": hello\n",
        b"data: {\n",
        b"data: []\n",
        b"data: " + b"[" * 9999 + b"\n",
    ):
        router.streams[-1].send(data)
    router.streams[-1].send(b'data: {"event":"download_progress","model":"x"}\n\n')
    assert len(http.calls) == looks
    # In pieces.
    router.streams[-1].send(b'data: {"event":"status_')
    router.streams[-1].send(b'change","model":"a"}\r\n\r\n')
    assert len(http.calls) == looks + 1
    assert not router.streams[-1].dropped
    router.streams[-1].send(b"x" * (LINE_LIMIT + 1))
    assert router.streams[-1].dropped


def test_guard_finds_what_events_do_not_tell(
    http: Http, engine: LlamaEngine, card: Card, clock: Clock
) -> None:
    router = started(http, engine, card)
    engine.guard()
    assert not engine.snapshot()["guarding"]
    card.register(Other(Kind.EXCLUSIVE))
    engine.note_aborted()
    engine.guard()
    assert engine.snapshot()["guarding"]
    run(clock, 1.0)
    assert not card.degraded
    router.models["a"] = "loaded"
    run(clock, 0.5)
    assert [d.reason for d in card.degraded] == [LOADED_ELSEWHERE] and router.unloads == ["a"]
    router.models["a"] = "unloaded"
    run(clock, 2.0)
    assert not card.degraded and card.resident == {"other"}
    run(clock, 5.0)
    assert not engine.snapshot()["guarding"]
    engine.guard()
    engine.end_guard()
    assert clock.getDelayedCalls() == []


# -- loading on request --------------------------------------------------------------------------------------------


def test_a_load_is_over_when_nothing_loads_any_more(
    http: Http, engine: LlamaEngine, clock: Clock
) -> None:
    router = Router(http, a="loading", b="loaded")
    result = result_of(engine.loaded())
    run(clock, 3.0)
    assert result == []
    router.models["a"] = "loaded"
    router.tell("a", "loaded")
    assert result == [None]


@pytest.mark.parametrize("status", ["unloaded", "loaded", "sleeping"])
def test_a_load_that_is_over_is_over_at_once(http: Http, engine: LlamaEngine, status: str) -> None:
    Router(http, a=status)
    assert result_of(engine.loaded()) == [None]


def test_a_load_is_bounded(http: Http, engine: LlamaEngine, clock: Clock) -> None:
    Router(http, a="loading")
    result = result_of(engine.loaded())
    run(clock, 99.9, 0.1)
    assert result == []
    run(clock, 0.3, 0.1)
    assert result == [None]


@pytest.mark.parametrize(
    "answer", [error.ConnectionRefusedError(), Response(500, b""), Response(401, b"")]
)
def test_a_load_that_cannot_be_watched_is_over(
    http: Http, engine: LlamaEngine, answer: Any
) -> None:
    http.answer = lambda *_: answer
    assert result_of(engine.loaded()) == [None]


def test_a_stop_ends_the_wait_for_a_load(http: Http, engine: LlamaEngine) -> None:
    Router(http, a="loading")
    result = result_of(engine.loaded())
    engine.stop()
    assert result == [None]


def test_a_cancelled_wait_leaves_nothing(http: Http, engine: LlamaEngine, clock: Clock) -> None:
    Router(http, a="loading")
    d = engine.loaded()
    result = result_of(d)
    run(clock, 0.1)
    d.cancel()
    assert isinstance(result[0], Failure) and result[0].check(CancelledError)


# -- the first look ------------------------------------------------------------------------------------------------


def test_start_finds_a_router_empty(http: Http, engine: LlamaEngine, card: Card) -> None:
    started(http, engine, card)
    assert engine.snapshot() == {
        "mode": "router",
        "models": {"a": "unloaded"},
        "asleep": None,
        "stopped": False,
        "starting": False,
        "events": True,
        "guarding": False,
    }
    assert engine.admission(b"GET", b"/slots") is PASS


def test_start_leaves_a_loaded_one(http: Http, engine: LlamaEngine, card: Card) -> None:
    Router(http, a="loaded")
    assert result_of(engine.start()) == [None]
    assert card.resident == {"llamacpp"}


def test_start_is_bounded(http: Http, engine: LlamaEngine, card: Card, clock: Clock) -> None:
    http.answer = lambda *_: Deferred()
    result = result_of(engine.start())
    clock.advance(5.1)
    assert result == [None] and card.resident == {"llamacpp"}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (error.ConnectionRefusedError(), "does not answer at http://llama"),
        (Response(401, b""), "LLAMA_API_KEY"),
        (Response(503, b""), "is loading its model"),
    ],
)
def test_start_tells_what_is_wrong(
    http: Http, engine: LlamaEngine, card: Card, logged: list[str], answer: Any, told: str
) -> None:
    http.answer = lambda *_: answer
    assert result_of(engine.start()) == [None]
    assert card.resident == {"llamacpp"} and any(told in text for text in logged)
    # Not known: slots of a server of one model wake it.
    assert engine.admission(b"GET", b"/slots") is LEASE


# -- one model -----------------------------------------------------------------------------------------------------


def test_one_that_can_do_nothing_is_told_at_start(
    http: Http, engine: LlamaEngine, card: Card, logged: list[str]
) -> None:
    Single(http, is_sleeping=None)
    engine.start()
    assert card.resident == {"llamacpp"}
    [text] = [text for text in logged if "LLAMA_STOP_COMMAND" in text]
    assert "cannot be told to leave the card: it stays there" in text
    # Nothing is waited for that cannot happen.
    assert result_of(engine.evict()) == [Eviction.TIMED_OUT]


def test_one_that_may_sleep_is_waited_for(
    http: Http, engine: LlamaEngine, card: Card, clock: Clock, logged: list[str]
) -> None:
    single = Single(http)
    engine.start()
    assert any("unless it sleeps (--sleep-idle-seconds)" in text for text in logged)
    result = result_of(engine.evict())
    run(clock, 20.0)
    assert result == []
    single.props["is_sleeping"] = True
    run(clock, 0.6)
    assert result == [Eviction.CONFIRMED]
    assert engine.snapshot()["asleep"] is True


def test_one_that_did_not_sleep_is_not_waited_for_again(
    http: Http, engine: LlamaEngine, card: Card, clock: Clock
) -> None:
    single = Single(http)
    engine.start()
    result = result_of(engine.evict())
    run(clock, 61.0, 0.1)
    assert result == [Eviction.TIMED_OUT]
    began = clock.seconds()
    assert result_of(engine.evict()) == [Eviction.TIMED_OUT] and clock.seconds() == began
    # Until it is seen asleep.
    single.props["is_sleeping"] = True
    assert result_of(engine.evict()) == [Eviction.CONFIRMED]
    single.props["is_sleeping"] = False
    result = result_of(engine.evict())
    run(clock, 10.0)
    single.props["is_sleeping"] = True
    run(clock, 0.6)
    assert result == [Eviction.CONFIRMED]


def test_one_that_sleeps_is_off_the_card_from_the_start(
    http: Http, engine: LlamaEngine, card: Card, logged: list[str]
) -> None:
    Single(http, is_sleeping=True)
    engine.start()
    assert not card.resident and not any("cannot be told" in text for text in logged)
    assert engine.admission(b"GET", b"/slots") is LEASE
    assert engine.admission(b"GET", b"/props") is PASS


def test_one_that_is_loading_holds_the_card(http: Http, engine: LlamaEngine, clock: Clock) -> None:
    single = Single(http)
    single.state = "loading"
    result = result_of(engine.evict())
    run(clock, 5.0)
    assert result == []
    single.state, single.props["is_sleeping"] = "up", True
    run(clock, 0.6)
    assert result == [Eviction.CONFIRMED]


def test_a_router_that_comes_back_with_one_model(
    http: Http, engine: LlamaEngine, card: Card, clock: Clock
) -> None:
    router = started(http, engine, card)
    stream = router.streams[-1]
    Single(http)
    card.mark_resident("llamacpp")
    result_of(engine.evict())
    assert engine.snapshot()["mode"] == "single model" and stream.dropped
    Router(http, a="unloaded")
    run(clock, 1.0)
    assert engine.snapshot()["mode"] == "router" and engine.snapshot()["events"]


def test_a_stop_command_ends_it_and_its_end_is_the_evidence(
    http: Http, commanded: LlamaEngine, commands: Commands, clock: Clock
) -> None:
    single = Single(http)
    result = result_of(commanded.evict())
    [(command, timeout)] = commands.ran
    assert command == "stop" and timeout == 60.0
    # The server closes its port before it gives the memory back: the command has to end.
    single.state = "down"
    run(clock, 5.0)
    assert result == []
    commands.end()
    run(clock, 0.1)
    assert result == [Eviction.CONFIRMED]
    assert commanded.snapshot()["stopped"] and commanded.needs_start


def test_a_stop_command_that_stops_nothing(
    http: Http, commanded: LlamaEngine, commands: Commands, clock: Clock, logged: list[str]
) -> None:
    Single(http)
    result = result_of(commanded.evict())
    commands.end(3)
    run(clock, 61.0, 0.1)
    assert result == [Eviction.TIMED_OUT]
    # Again after a while, not at every look.
    assert len(commands.ran) == 2
    assert "LLAMA_STOP_COMMAND failed: exit code 3" in logged and not commanded.needs_start
    assert "LLAMA_STOP_COMMAND failed: it does not end" in logged


@pytest.mark.parametrize("failure", [3, CommandFailed("took longer than 60 s")])
def test_gone_though_the_command_failed(
    http: Http, commanded: LlamaEngine, commands: Commands, clock: Clock, failure: Any
) -> None:
    single = Single(http)
    result = result_of(commanded.evict())
    single.state = "down"
    commands.end(failure)
    run(clock, 3.0)
    assert result == [Eviction.UNREACHABLE]


def test_a_stop_command_waits_until_it_is_done_loading_too(
    http: Http, commanded: LlamaEngine, commands: Commands, clock: Clock
) -> None:
    single = Single(http)
    single.state = "loading"
    result = result_of(commanded.evict())
    assert [command for command, _ in commands.ran] == ["stop"]
    single.state = "down"
    commands.end()
    run(clock, 0.1)
    assert result == [Eviction.CONFIRMED]


def test_a_router_is_never_stopped_by_command(
    http: Http, commanded: LlamaEngine, commands: Commands, clock: Clock, logged: list[str]
) -> None:
    router = Router(http, a="loaded")
    result = result_of(commanded.evict())
    router.listing = Response(503, b"")
    run(clock, 1.0)
    router.listing = None
    router.models["a"] = "unloaded"
    run(clock, 1.0)
    assert result == [Eviction.CONFIRMED] and not commands.ran
    assert any("LLAMA_STOP_COMMAND is not used" in text for text in logged)


def stopped(
    http: Http, engine: LlamaEngine, card: Card, commands: Commands, clock: Clock
) -> Single:
    """One that was stopped to make room."""
    single = Single(http)
    result = result_of(card.evict("llamacpp"))
    single.state = "down"
    commands.end()
    run(clock, 0.1)
    assert result == [Eviction.CONFIRMED] and not card.resident
    commands.ran.clear()
    return single


def test_it_is_started_again_for_the_next_chat(
    http: Http, commanded: LlamaEngine, commands: Commands, card: Card, clock: Clock
) -> None:
    single = stopped(http, commanded, card, commands, clock)
    assert commanded.admission(b"GET", b"/v1/models") is Admission.ABSENT
    assert commanded.admission(b"POST", b"/v1/chat/completions") is LEASE
    one, two = result_of(commanded.ensure_started()), result_of(commanded.ensure_started())
    assert commands.ran == [("start", None)] and card.resident == {"llamacpp"}
    assert commanded.snapshot()["starting"]
    run(clock, 1.0)
    single.state = "loading"
    run(clock, 20.0)
    assert not one and not two
    # The command may be the server itself: its end is not waited for.
    single.state = "up"
    run(clock, 0.5)
    assert one == two == [None] and not commanded.needs_start
    assert commanded.admission(b"GET", b"/v1/models") is PASS
    assert result_of(commanded.ensure_started()) == [None] and len(commands.ran) == 1


def test_one_that_somebody_else_started_is_not_started_again(
    http: Http, commanded: LlamaEngine, commands: Commands, card: Card, clock: Clock
) -> None:
    single = stopped(http, commanded, card, commands, clock)
    single.state = "up"
    assert result_of(commanded.ensure_started()) == [None]
    assert not commands.ran and card.resident == {"llamacpp"}


def test_a_reading_request_finds_that_it_is_back(
    http: Http, commanded: LlamaEngine, commands: Commands, card: Card, clock: Clock
) -> None:
    single = stopped(http, commanded, card, commands, clock)
    single.state = "up"
    assert commanded.admission(b"GET", b"/v1/models") is Admission.ABSENT
    assert commanded.admission(b"GET", b"/v1/models") is PASS
    assert card.resident == {"llamacpp"}


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (3, "LLAMA_START_COMMAND failed: exit code 3"),
        (CommandFailed("no shell"), "LLAMA_START_COMMAND failed: no shell"),
    ],
)
def test_a_start_command_that_fails(
    http: Http,
    commanded: LlamaEngine,
    commands: Commands,
    card: Card,
    clock: Clock,
    end: Any,
    told: str,
) -> None:
    stopped(http, commanded, card, commands, clock)
    result = result_of(commanded.ensure_started())
    run(clock, 0.1)
    commands.end(end)
    run(clock, 0.5)
    assert isinstance(result[0], Failure) and isinstance(result[0].value, StartFailed)
    assert str(result[0].value) == told
    # The next request tries again.
    assert commanded.needs_start
    assert not result_of(commanded.ensure_started()) and len(commands.ran) == 2


def test_a_start_is_bounded(
    http: Http, commanded: LlamaEngine, commands: Commands, card: Card, clock: Clock
) -> None:
    stopped(http, commanded, card, commands, clock)
    result = result_of(commanded.ensure_started())
    commands.end(0)
    run(clock, 101.0, 0.1)
    assert isinstance(result[0], Failure)
    assert str(result[0].value) == "llama.cpp did not come up within 100 s"


def test_a_client_that_leaves_does_not_end_the_start(
    http: Http, commanded: LlamaEngine, commands: Commands, card: Card, clock: Clock
) -> None:
    single = stopped(http, commanded, card, commands, clock)
    gone = commanded.ensure_started()
    gone.addErrback(lambda f: f.trap(CancelledError))
    gone.cancel()
    run(clock, 1.0)
    single.state = "up"
    run(clock, 0.5)
    assert not commanded.needs_start


def test_another_engine_ends_a_start(
    http: Http, commanded: LlamaEngine, commands: Commands, card: Card, clock: Clock
) -> None:
    """Nobody answers yet, but what was started may be about to load."""
    stopped(http, commanded, card, commands, clock)
    start = result_of(commanded.ensure_started())
    run(clock, 1.0)
    result = result_of(card.evict("llamacpp"))
    assert isinstance(start[0], Failure) and start[0].check(StartFailed)
    assert [command for command, _ in commands.ran] == ["start", "stop"] and not result
    commands.running.pop(0)
    commands.end()
    run(clock, 0.1)
    assert result == [Eviction.CONFIRMED] and not card.resident and commanded.needs_start


def test_without_a_start_command_somebody_else_has_to_start_it(
    http: Http, clock: Clock, card: Card, commands: Commands
) -> None:
    engine = make(http, clock, card, commands=commands, stop_command="stop")
    stopped(http, engine, card, commands, clock)
    assert not engine.needs_start and engine.admission(b"GET", b"/v1/models") is PASS
    engine.stop()


# -- against the simulated server ----------------------------------------------------------------------------------

NAME, OTHER = "llama-3.2-3b", "qwen3-8b"


class Rig:
    def __init__(self, host: GpuHost, engine: LlamaEngine, card: Card) -> None:
        self.host = host
        self.sim = host.llama
        self.engine = engine
        self.card = card
        self.calls: list[Deferred[Any]] = []

    @property
    def used(self) -> int:
        return self.host.card.used

    def post(self, path: str, model: str = NAME, **more: Any) -> Deferred[Any]:
        """A request past turnstile, not waited for."""
        headers = more.pop("headers", {})
        body = {"model": model, "messages": [{"role": "user", "content": "x"}], **more}
        d: Deferred[Any] = treq.post(
            self.sim.url + path, json=body, headers=headers, persistent=False
        )
        d.addCallback(treq.content)
        self.calls.append(d)
        return d


@asynccontextmanager
async def rig(**options: Any) -> AsyncIterator[Rig]:
    options = {"load_time": 0.2, "unload_time": 0.05, "stop_timeout": 2.0, **options}
    key = {"Authorization": f"Bearer {options['api_key']}"} if "api_key" in options else None
    host = GpuHost(reactor, 1.0, ollama=False, comfy=False, llama=True, llama_options=options)
    await host.start()
    card = Card(reactor)
    client = make_client(reactor, Upstream.parse(host.llama.url), connect_timeout=2.0, headers=key)
    engine = LlamaEngine(
        client,
        reactor,
        card,
        unload_timeout=10.0,
        unload_poll_interval=0.25,
        probe_timeout=2.0,
        load_timeout=10.0,
    )
    card.register(engine)
    made = Rig(host, engine, card)
    try:
        yield made
        assert host.llama.errors == []
    finally:
        engine.stop()
        for d in made.calls:
            d.addErrback(lambda _: None)
            d.cancel()
        await client.close()
        await host.stop()
    await until(clean)


@pytest_twisted.ensureDeferred
async def test_sim_start_and_evict() -> None:
    async with rig(api_key="secret") as it:
        await it.sim.load(NAME)
        it.sim.load(OTHER)
        await it.engine.start()
        assert it.card.resident == {"llamacpp"}
        assert it.engine.snapshot()["mode"] == "router"
        assert await it.card.evict("llamacpp") is Eviction.CONFIRMED
        assert it.used == 0 and not it.sim.resident and not it.card.degraded


@pytest_twisted.ensureDeferred
async def test_sim_unload_after_an_aborted_chat() -> None:
    async with rig() as it:
        chat = it.post("/v1/chat/completions", max_tokens=5000)
        await until(lambda: it.sim.active_generations == 1)
        chat.addErrback(lambda _: None)
        chat.cancel()
        it.engine.note_aborted()
        assert await it.engine.evict() is Eviction.CONFIRMED
        # Not by the router's force-kill.
        assert it.used == 0 and not it.sim.kills


@pytest_twisted.ensureDeferred
async def test_sim_a_conversation_goes_on_without_its_client_until_it_is_told_to_stop() -> None:
    async with rig() as it:
        headers = {"X-Conversation-Id": "a/b c"}
        chat = it.post("/v1/chat/completions", max_tokens=5000, stream=True, headers=headers)
        await until(lambda: it.sim.active_generations == 1)
        chat.addErrback(lambda _: None)
        chat.cancel()
        await deferLater(reactor, 0.4)
        assert it.sim.active_generations == 1
        it.engine.note_aborted("a/b c")
        assert await it.engine.evict() is Eviction.CONFIRMED
        assert it.used == 0 and not it.sim.kills


@pytest_twisted.ensureDeferred
async def test_sim_a_completion_past_us_is_waited_for_until_the_router_kills_it() -> None:
    async with rig(stop_timeout=0.5) as it:
        it.post("/v1/chat/completions", max_tokens=5000).addErrback(lambda _: None)
        await until(lambda: it.sim.active_generations == 1)
        assert await it.engine.evict() is Eviction.CONFIRMED
        assert it.used == 0 and it.sim.kills


@pytest_twisted.ensureDeferred
async def test_sim_d03_unload_while_loading() -> None:
    async with rig(load_time=1000.0) as it:
        it.sim.load(NAME).addErrback(lambda _: None)
        await until(lambda: it.used > 0)
        assert await it.engine.evict() is Eviction.CONFIRMED
        assert it.used == 0


@pytest_twisted.ensureDeferred
async def test_sim_load_and_wait() -> None:
    async with rig() as it:
        await it.engine.start()
        await it.post("/models/load")
        assert it.sim.resident == {NAME: "loading"}
        await it.engine.loaded()
        assert it.sim.resident == {NAME: "loaded"}
        assert it.card.resident == {"llamacpp"}  # it came past turnstile


@pytest_twisted.ensureDeferred
async def test_sim_asleep_models_are_unloaded_too() -> None:
    async with rig(sleep_idle=0.1) as it:
        await it.sim.load(NAME)
        await until(lambda: it.sim.resident == {NAME: "sleeping"})
        await it.engine.start()
        assert it.card.resident == {"llamacpp"}
        assert it.engine.admission(b"GET", b"/slots") is LEASE
        assert await it.engine.evict() is Eviction.CONFIRMED
        assert not it.sim.resident


@pytest_twisted.ensureDeferred
async def test_sim_misbehaving_unloads() -> None:
    async with rig() as it:
        await it.sim.load(NAME)
        it.sim.faults.unload_500 = 1
        assert await it.engine.evict() is Eviction.CONFIRMED
        await it.sim.load(NAME)
        it.sim.faults.unload_hangs = 1
        assert await it.engine.evict() is Eviction.CONFIRMED
        await it.sim.load(NAME)
        it.sim.faults.garbage("/models", times=3)
        assert await it.engine.evict() is Eviction.CONFIRMED
        assert it.used == 0


@pytest_twisted.ensureDeferred
async def test_sim_a_dead_router_is_unreachable() -> None:
    async with rig() as it:
        await it.engine.start()
        await it.sim.load(NAME)
        await until(lambda: it.card.resident == {"llamacpp"})
        await it.sim.kill()
        assert await it.card.evict("llamacpp") is Eviction.UNREACHABLE
        assert not it.card.resident and it.card.degraded


@pytest_twisted.ensureDeferred
async def test_sim_one_model_that_sleeps() -> None:
    async with rig(single=NAME, sleep_idle=0.3) as it:
        await until(lambda: it.used > 0)
        assert await it.engine.evict() is Eviction.CONFIRMED
        assert it.engine.snapshot()["mode"] == "single model"
        # The real one does not say that it sleeps before the memory is free; this one does.
        await until(lambda: it.used == 0)


@pytest_twisted.ensureDeferred
async def test_sim_one_model_that_does_not() -> None:
    async with rig(single=NAME) as it:
        await until(lambda: it.used > 0)
        it.engine.unload_timeout = 0.5
        assert await it.engine.evict() is Eviction.TIMED_OUT
        assert it.used > 0
