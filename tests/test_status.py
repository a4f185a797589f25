"""The pages, through twisted.web's own server and through the data path."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.logger import globalLogPublisher
from twisted.web.resource import Resource
from twisted.web.server import Site
from twisted.web.test.requesthelper import DummyChannel

from turnstile.arbiter import Arbiter, Kind, Tenant
from turnstile.card import DID_NOT_LEAVE, Card, Eviction
from turnstile.metrics import Metrics
from turnstile.proxy.http1 import parse_request
from turnstile.proxy.pages import render_page
from turnstile.status import REMEMBERED, make_status_tree

OLLAMA = Tenant("ollama", Kind.SHARED)
COMFY = Tenant("comfyui", Kind.EXCLUSIVE)
#: 2025-06-01T12:00:00Z
WALL = 1748779200.0


class FakeEngine:
    def __init__(self, tenant: Tenant, snapshot: dict[str, Any]) -> None:
        self.tenant = tenant
        self._snapshot = snapshot
        self.broken = False
        self.outcome = Eviction.CONFIRMED

    def evict(self) -> Deferred[Eviction]:
        return succeed(self.outcome)

    def start(self) -> Deferred[None]:
        return succeed(None)

    def stop(self) -> None:
        pass

    def snapshot(self) -> dict[str, Any]:
        if self.broken:
            raise ZeroDivisionError
        return self._snapshot


class World:
    def __init__(self, *, short_forms: bool = True) -> None:
        self.clock = Clock()
        self.clock.advance(1000)
        self.arbiter = Arbiter(self.clock)
        self.card = Card(self.clock)
        self.metrics = Metrics()
        self.metrics.connect(self.arbiter, self.card)
        self.ollama = FakeEngine(OLLAMA, {"version": "0.9", "models": ["llama3"]})
        self.comfy = FakeEngine(COMFY, {"job": {"prompt_id": "p1", "progress": "3/20"}})
        for engine in (self.ollama, self.comfy):
            self.card.register(engine, resident=False)
        began = self.clock.seconds()
        self.tree = make_status_tree(
            self.arbiter,
            self.card,
            [self.ollama, self.comfy],
            self.clock,
            "1.2.3",
            self.metrics,
            short_forms=short_forms,
            gpu_share=lambda: {"gpu_key": "GPU-1", "self": None, "peers": []},
            wall=lambda: WALL + self.clock.seconds() - began,
        )

    def get(self, path: bytes, method: bytes = b"GET", **headers: str) -> Answer:
        """Ask twisted.web's server."""
        root = Resource()
        for name, page in self.tree.items():
            parent = root
            *parents, leaf = name.strip(b"/").split(b"/")
            for part in parents:
                child = parent.children.get(part)
                if child is None:
                    child = Resource()
                    parent.putChild(part, child)
                parent = child
            parent.putChild(leaf, page)
        channel = DummyChannel()
        channel.site = Site(root)
        request = channel.site.requestFactory(channel, False)
        for name_, value in headers.items():
            request.requestHeaders.setRawHeaders(name_, [value])
        request.gotLength(0)
        request.requestReceived(method, path, b"HTTP/1.1")
        return Answer(channel.transport.written.getvalue())

    def state(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.get(b"/turnstile/state").body)
        return content


class Answer:
    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        self.code = int(first.split()[1])
        self.headers = {
            name.lower().decode(): value.strip().decode()
            for name, _, value in (line.partition(b":") for line in lines)
        }


@pytest.fixture
def world() -> World:
    return World()


# -- health -----------------------------------------------------------------------------------------------------------


def test_health_has_the_seeds_three_keys(world: World) -> None:
    answer = world.get(b"/healthz")
    assert answer.code == 200 and answer.headers["content-type"] == "application/json"
    assert json.loads(answer.body) == {"state": "idle", "llm_inflight": 0, "image_pending": False}


def test_health_while_things_happen(world: World) -> None:
    lease = world.arbiter.try_acquire(OLLAMA)
    world.arbiter.try_acquire(OLLAMA)
    world.arbiter.acquire(COMFY)
    expected = {"state": "llm", "llm_inflight": 2, "image_pending": True}
    assert json.loads(world.get(b"/turnstile/healthz").body) == expected
    assert lease is not None
    for lease in world.arbiter.leases:
        lease.release()
    expected = {"state": "image", "llm_inflight": 0, "image_pending": False}
    assert json.loads(world.get(b"/healthz").body) == expected


@pytest.mark.parametrize("path", [b"/healthz", b"/metrics", b"/turnstile/state"])
def test_head_is_get_without_a_body(world: World, path: bytes) -> None:
    answer = world.get(path, b"HEAD")
    assert answer.code == 200 and not answer.body
    assert answer.headers["content-type"] == world.get(path).headers["content-type"]


def test_other_methods_are_refused(world: World) -> None:
    assert world.get(b"/healthz", b"POST").code == 405


def test_answers_are_not_cached(world: World) -> None:
    assert world.get(b"/healthz").headers["cache-control"] == "no-store"


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_are_text_by_default(world: World) -> None:
    answer = world.get(b"/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b'gpu_turnstile_state{state="idle"} 1.0\n' in answer.body


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
        "text/plain, application/openmetrics-text",
    ],
)
def test_openmetrics_for_those_who_ask(world: World, accept: str) -> None:
    answer = world.get(b"/turnstile/metrics", accept=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=")
    assert list(parse_openmetrics(answer.body.decode()))


@pytest.mark.parametrize("accept", ["", "*/*", "text/html", "text/plain;version=x;q=", "a=b,=,;"])
def test_odd_wishes_get_the_default(world: World, accept: str) -> None:
    answer = world.get(b"/metrics", accept=accept)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")


# -- the tree ---------------------------------------------------------------------------------------------------------


def test_short_forms_only_where_the_engine_leaves_the_path() -> None:
    long = {
        b"/turnstile/healthz",
        b"/turnstile/metrics",
        b"/turnstile/state",
        b"/turnstile/gpu/peers",
    }
    assert set(World(short_forms=False).tree) == long
    assert set(World().tree) == long | {b"/healthz", b"/metrics", b"/gpu/peers"}


def test_who_shares_the_card_has_a_page_and_a_part_of_the_state(world: World) -> None:
    shown = {"gpu_key": "GPU-1", "self": None, "peers": []}
    for path in (b"/gpu/peers", b"/turnstile/gpu/peers"):
        answer = world.get(path)
        assert answer.code == 200 and json.loads(answer.body) == shown
        assert answer.headers["content-type"] == "application/json"
    assert world.state()["gpu_share"] == shown


# -- state ------------------------------------------------------------------------------------------------------------


def test_the_idle_state(world: World) -> None:
    world.clock.advance(90)
    state = world.state()
    assert (state["version"], state["uptime"], state["now"]) == (
        "1.2.3",
        90,
        "2025-06-01T12:01:30.000Z",
    )
    assert (state["state"], state["tenant"], state["held"]) == ("idle", None, False)
    for empty in ("leases", "resident", "degraded", "degraded_before", "transitions"):
        assert state[empty] == []
    assert state["waiting"] == {"llm": [], "image": []}
    assert state["job"] is None and state["switching"] is False
    assert state["engines"]["ollama"] == {"version": "0.9", "models": ["llama3"]}
    assert state["counters"]["image_jobs"] == 0


def test_leases_and_lines_with_ages(world: World) -> None:
    world.arbiter.try_acquire(OLLAMA, "POST /api/chat", "10.0.0.1")
    world.clock.advance(2)
    world.arbiter.acquire(COMFY, "POST /prompt", "10.0.0.2")
    world.clock.advance(3)
    world.arbiter.acquire(OLLAMA, "POST /api/generate", "10.0.0.3")
    world.arbiter.acquire(COMFY, "POST /api/prompt", "10.0.0.4")
    state = world.state()
    assert state["tenant"] == "ollama"
    assert state["leases"] == [
        {
            "label": "POST /api/chat",
            "client": "10.0.0.1",
            "tenant": "ollama",
            "age": 5,
            "waited": 0,
        }
    ]
    first, second = state["waiting"]["image"]
    assert first == {
        "position": 1,
        "label": "POST /prompt",
        "client": "10.0.0.2",
        "tenant": "comfyui",
        "age": 3,
    }
    assert (second["position"], second["age"]) == (2, 0)
    assert [w["client"] for w in state["waiting"]["llm"]] == ["10.0.0.3"]


def test_the_job_of_the_tenant(world: World) -> None:
    assert world.state()["job"] is None
    world.arbiter.try_acquire(COMFY)
    state = world.state()
    assert state["job"] == {"prompt_id": "p1", "progress": "3/20"}
    assert state["engines"]["comfyui"]["job"] == state["job"]


def test_transitions_the_latest_first(world: World) -> None:
    lease = world.arbiter.try_acquire(OLLAMA)
    assert lease is not None
    world.clock.advance(1.25)
    lease.release()
    world.clock.advance(1)
    assert world.state()["transitions"] == [
        {"from": "ollama", "to": "idle", "at": "2025-06-01T12:00:01.250Z", "age": 1},
        {"from": "idle", "to": "ollama", "at": "2025-06-01T12:00:00.000Z", "age": 2.25},
    ]
    for _ in range(REMEMBERED):
        again = world.arbiter.try_acquire(COMFY)
        assert again is not None
        again.release()
    assert len(world.state()["transitions"]) == REMEMBERED


def test_degraded_now_and_before(world: World) -> None:
    world.card.mark_resident("ollama")
    world.ollama.outcome = Eviction.TIMED_OUT
    world.card.make_room(COMFY)
    world.clock.advance(4)
    state = world.state()
    assert state["resident"] == ["ollama"] and state["degraded_before"] == []
    assert state["degraded"] == [
        {
            "engine": "ollama",
            "reason": DID_NOT_LEAVE,
            "since": "2025-06-01T12:00:00.000Z",
            "age": 4,
        }
    ]
    world.card.mark_evicted("ollama")
    state = world.state()
    assert state["degraded"] == [] and state["counters"]["degraded"] == 1
    assert state["degraded_before"] == [
        {
            "engine": "ollama",
            "reason": DID_NOT_LEAVE,
            "since": "2025-06-01T12:00:00.000Z",
            "until": "2025-06-01T12:00:04.000Z",
            "seconds": 4,
        }
    ]


def test_an_engine_that_cannot_tell_does_not_spoil_the_page(world: World) -> None:
    logged: list[dict[str, Any]] = []
    globalLogPublisher.addObserver(logged.append)
    try:
        world.comfy.broken = True
        world.arbiter.try_acquire(COMFY)
        state = world.state()
    finally:
        globalLogPublisher.removeObserver(logged.append)
    assert state["engines"]["comfyui"] == {"error": "ZeroDivisionError"}
    assert state["job"] is None and state["state"] == "image"
    assert logged[0]["log_failure"].check(ZeroDivisionError)


def test_what_json_does_not_know_is_shown_as_text(world: World) -> None:
    world.ollama._snapshot = {"what": Kind.SHARED, "tenants": {1: "x"}}
    assert world.state()["engines"]["ollama"] == {"what": "Kind.SHARED", "tenants": {"1": "x"}}


# -- the data path ----------------------------------------------------------------------------------------------------


def lean(world: World, path: bytes, fields: bytes = b"", method: bytes = b"GET") -> Answer:
    head = parse_request(method + b" " + path + b" HTTP/1.1\r\nHost: x\r\n" + fields + b"\r\n")
    return Answer(render_page(world.tree[path], head, "10.0.0.1", True))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [b"/healthz", b"/metrics", b"/turnstile/state"])
def test_the_data_path_renders_the_same_pages(world: World, path: bytes) -> None:
    answer = lean(world, path)
    assert answer.code == 200 and answer.body.endswith(b"\n")
    assert answer.headers["content-type"] == world.get(path).headers["content-type"]
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert not lean(world, path, method=b"HEAD").body


def test_openmetrics_through_the_data_path(world: World) -> None:
    answer = lean(world, b"/metrics", b"Accept: application/openmetrics-text\r\n")
    assert answer.body.endswith(b"# EOF\n")
